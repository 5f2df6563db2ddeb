"""Everything of a request that needs the tokenizer: prompts, token rules, the grammar to compile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from model.sampling_params import TokenRules
from model.text.grammar_task import GrammarTask
from model.text.reasoning import ReasoningState
from service.config.settings import Settings
from service.gateway.core.refusals import refusal, too_costly
from service.gateway.core.request import GenerationRequest
from service.gateway.core.served_model import ServedModel


@dataclass(frozen=True)
class Tokenized:
    prompts: list[list[int]]  # token ids
    texts: tuple[str, ...]  # of the prompts, if the answer repeats them
    reasoning: ReasoningState
    rules: TokenRules | None
    task: GrammarTask | None  # the grammar to compile


class PromptReader:
    """Immutable and shared by all threads."""

    def __init__(self, model: ServedModel, settings: Settings) -> None:
        self._model = model
        self._settings = settings

    def check(self, request: GenerationRequest) -> None:
        """Raises RequestError (400) for too many choices or ids outside the vocabulary."""
        max_n, params = self._settings.max_n, request.sampling
        for name, value in (("n", params.n), ("best_of", params.best_of)):
            if value > max_n:
                raise refusal(name, f"must be at most {max_n} here")
        self._model.check_ids(params.stop_token_ids, "stop_token_ids")
        self._model.check_ids(params.allowed_token_ids, "allowed_token_ids")
        self._model.check_ids(tuple(token for token, _ in params.logit_bias), "logit_bias")

    def read(self, request: GenerationRequest, max_model_len: int) -> Tokenized:
        """Slow: call it off the event loop for a long prompt. Raises RequestError (400)."""
        prompts = self._encode(request, max_model_len)
        reasoning = self._model.reasoning_state(request, prompts[0])
        return Tokenized(
            prompts=prompts,
            texts=self._prompt_texts(request, prompts),
            reasoning=reasoning,
            rules=self._model.token_rules(request, reasoning),
            task=self._model.grammar_task(request, reasoning),
        )

    def _encode(self, request: GenerationRequest, max_model_len: int) -> list[list[int]]:
        prompts: list[list[int]] = []
        num_tokens = 0
        keeps_end = request.truncate_prompt_tokens is not None
        for prompt in request.prompts:
            ids = self._model.encode(prompt, request.add_special_tokens, keeps_end=keeps_end)
            prompts.append(self._truncated(request, ids, max_model_len))
            num_tokens += len(prompts[-1])
            if num_tokens > self._settings.max_request_tokens:  # do not encode the rest for nothing
                raise too_costly(self._settings.max_request_tokens)
        return prompts

    def _truncated(self, request: GenerationRequest, prompt: list[int], max_model_len: int) -> list[int]:
        num_kept = request.truncate_prompt_tokens
        if num_kept is None:
            return prompt
        if num_kept < 0:
            num_kept = max(1, max_model_len - (request.sampling.max_tokens or 1))
        return prompt[-num_kept:]

    def _prompt_texts(self, request: GenerationRequest, prompts: Sequence[list[int]]) -> tuple[str, ...]:
        """Return the prompts that the answer repeats, as sent or truncated."""
        if not request.echo:
            return ()
        decode = self._model.tokenizer.decode
        is_whole = request.truncate_prompt_tokens is None
        return tuple(
            text if isinstance(text, str) and is_whole else decode(ids, request.skip_special_tokens)
            for text, ids in zip(request.prompts, prompts, strict=True)
        )
