"""`LLM`: batches of prompts per call, with vLLM's names."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from service.config.settings import Settings
from service.gateway.core.request import GenerationRequest
from service.gateway.core.served_model import ServedModel
from service.offline.engine import OfflineEngine
from service.offline.lora import LoRARequest, LoRARequests, each_adapter
from service.offline.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from service.offline.prompts import Conversation, Prompt, conversations, listed, text_of, with_conversation, with_prompt
from service.offline.run import Progress, Work, run_all
from service.offline.sampling_params import (
    AnyParams,
    BeamSearchParams,
    PoolingParams,
    SamplingParams,
    default_sampling_params,
    each_params,
)
from service.offline.settings import read_keywords
from service.offline.tokenizer import LLMTokenizer, with_template
from service.offline.vllm_names import VllmNames, named


class LLM(VllmNames):
    """A model in this process. Methods block until done, and may be called from several threads.

    A context manager; `shutdown` or garbage collection ends the engine's thread.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, *, seed: int | None = 0, **keywords: Any) -> None:
        """Load a model. Raises ValueError, one line, for an invalid keyword or a model that cannot be served.

        `model`: a folder, or org/name of a Hugging Face model; None: the shipped demo model. `seed`: base seed of
        requests without one; None: random. `keywords`: model and engine flags of `quire serve`, or vLLM's engine
        arguments.
        """
        self.settings: Settings = read_keywords({"model": model, **keywords})
        self._engine = OfflineEngine(self.settings, seed)
        self._finalizer = weakref.finalize(self, self._engine.shut_down)  # the thread holds the engine, not this

    @named
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Progress = True,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Return one output per prompt, in order.

        `sampling_params` (None: the model's defaults) and `lora_request`: one, or one per prompt. `priority`: one per
        prompt; lower ones start first. Raises ValueError for an invalid prompt or adapter, RuntimeError if the engine
        fails.
        """
        asked = listed(prompts)
        params = self._params(sampling_params, len(asked))
        requests = [with_prompt(request, prompt) for request, prompt in zip(_requests(params), asked, strict=True)]
        work = self._work(
            requests,
            lora_request,
            texts=[text_of(prompt) for prompt in asked],
            has_text=[each.detokenize for each in params],
            order=_order(priority, len(asked)),
        )
        return [output for output, _ in run_all(self._engine, work, use_tqdm)]

    @named
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        lora_request: LoRARequests = None,
        chat_template: str | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Return one output per conversation, like `generate`. `chat_template`: a file or text.

        Tools only appear in the prompt: tool calls and reasoning are part of the output text.
        """
        model = self._engine.model if chat_template is None else with_template(self._engine.model, chat_template)
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }
        asked = conversations(messages)
        params = self._params(sampling_params, len(asked))
        requests = [
            with_conversation(request, {"messages": one, **options})
            for request, one in zip(_requests(params), asked, strict=True)
        ]
        work = self._work(requests, lora_request, has_text=[each.detokenize for each in params], model=model)
        return [output for output, _ in run_all(self._engine, work, use_tqdm)]

    @named
    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        lora_request: LoRARequests = None,
        use_tqdm: Progress = False,
    ) -> list[BeamSearchOutput]:
        """Return the best `beam_width` continuations of each prompt. Raises like `generate`."""
        asked = listed(prompts)
        each = _requests(each_params(params, BeamSearchParams, "params", len(asked)))
        requests = [with_prompt(request, prompt) for request, prompt in zip(each, asked, strict=True)]
        work = self._work(requests, lora_request, texts=[text_of(prompt) for prompt in asked])
        return [self._beams(output) for output, _ in run_all(self._engine, work, use_tqdm)]

    @named
    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: Progress = True,
        lora_request: LoRARequests = None,
    ) -> list[PoolingRequestOutput]:
        """Return each prompt's pooled hidden states (keyword `pooling`) as a unit vector. Raises like `generate`."""
        asked = listed(prompts)
        given = PoolingParams() if pooling_params is None else pooling_params
        params = each_params(given, PoolingParams, "pooling_params", len(asked))
        requests = [with_prompt(request, prompt) for request, prompt in zip(_requests(params), asked, strict=True)]
        work = self._work(requests, lora_request)
        return [
            PoolingRequestOutput(output.request_id, PoolingOutput(_vector(data)), output.prompt_token_ids)
            for output, data in run_all(self._engine, work, use_tqdm)
        ]

    @named
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequests = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the vectors of `encode` as lists."""
        return [
            EmbeddingRequestOutput(one.request_id, EmbeddingOutput(one.outputs.data.tolist()), one.prompt_token_ids)
            for one in self.encode(prompts, pooling_params, use_tqdm=use_tqdm, lora_request=lora_request)
        ]

    @named
    def score(
        self,
        text_1: Prompt | Sequence[Prompt],
        text_2: Prompt | Sequence[Prompt],
        *,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return the cosine similarity of each pair's embeddings. One `text_1` is compared with all of `text_2`."""
        left, right = listed(text_1), listed(text_2)
        if len(left) not in (1, len(right)):
            raise ValueError("'text_1' must be one text, or as many as 'text_2'")
        encoded = self.encode([*left, *right], pooling_params, use_tqdm=use_tqdm, lora_request=lora_request)
        firsts, seconds = encoded[: len(left)], encoded[len(left) :]
        pairs = zip(firsts * len(seconds) if len(firsts) == 1 else firsts, seconds, strict=True)
        return [
            ScoringRequestOutput(
                second.request_id,
                ScoringOutput(float(first.outputs.data @ second.outputs.data)),
                first.prompt_token_ids + second.prompt_token_ids,
            )
            for first, second in pairs
        ]

    def get_tokenizer(self) -> LLMTokenizer:
        return LLMTokenizer(self._engine.model)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters recommended in the model's folder."""
        return default_sampling_params(self._engine.model.defaults)

    def reset_prefix_cache(self) -> bool:
        """Hide cached prefixes from later prompts. Return True."""
        return self._engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """End open requests and the engine's thread."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> Sequence[SamplingParams]:
        given = self.get_default_sampling_params() if given is None else given
        return each_params(given, SamplingParams, "sampling_params", num_prompts)

    def _work(
        self,
        requests: Sequence[GenerationRequest],
        lora: LoRARequests,
        *,
        texts: Sequence[str | None] = (),
        has_text: Sequence[bool] = (),
        order: Sequence[int] = (),
        model: ServedModel | None = None,
    ) -> Work:
        num = len(requests)
        return Work(
            requests=requests,
            request_ids=[self._engine.new_id() for _ in requests],
            texts=texts or [None] * num,
            has_text=has_text or [True] * num,
            order=order or range(num),
            adapters=each_adapter(lora, num),
            model=model,
        )

    def _beams(self, output: RequestOutput) -> BeamSearchOutput:
        decode = self._engine.model.tokenizer.decode
        return BeamSearchOutput(
            [
                BeamSearchSequence(
                    tokens=output.prompt_token_ids + beam.token_ids,
                    logprobs=beam.logprobs or [],
                    cum_logprob=beam.cumulative_logprob or 0.0,
                    text=decode(output.prompt_token_ids + beam.token_ids),
                    finish_reason=beam.finish_reason,
                    stop_reason=beam.stop_reason,
                )
                for beam in output.outputs
            ]
        )


def _requests(params: Sequence[AnyParams]) -> list[GenerationRequest]:
    """Return each params' request, built once per distinct object."""
    made = {id(each): each.request() for each in {id(one): one for one in params}.values()}
    return [made[id(each)] for each in params]


def _order(priority: Sequence[int] | None, num_prompts: int) -> Sequence[int]:
    if priority is None:
        return range(num_prompts)
    if not isinstance(priority, Sequence) or not all(type(each) is int for each in priority):
        raise ValueError("'priority' must be a list of integers, one per prompt")
    if len(priority) != num_prompts:
        raise ValueError(f"'priority': {len(priority)} for {num_prompts} prompts (one per prompt)")
    return sorted(range(num_prompts), key=lambda index: priority[index])


def _vector(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.float32)
