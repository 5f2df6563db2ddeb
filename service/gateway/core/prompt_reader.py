"""The parts of a request that need the tokenizer: prompts, token rules, the grammar to compile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from model.sampling_params import ReasoningBudget, TokenRules
from model.text.grammar_task import GrammarSpec, GrammarTask, ReasoningRule
from model.text.reasoning import PROMPT_END_TOKENS, ReasoningState, state_after, state_within
from model.text.tool_calls.formats import MAX_FORCED_CALLS, CallSpec, detect_arguments_key
from service.config.settings import Settings
from service.gateway.core.refusals import refusal, too_costly
from service.gateway.core.request import Conversation, GenerationRequest, ToolSpec
from service.gateway.core.served_model import NO_EFFORT, ServedModel


@dataclass(frozen=True)
class Tokenized:
    prompts: list[list[int]]  # token ids
    texts: tuple[str, ...]  # the prompts' texts, if the response echoes them
    reasoning: ReasoningState
    rules: TokenRules | None
    task: GrammarTask | None  # the grammar to compile


class PromptReader:
    """Reads prompts. Immutable; shared by all threads."""

    def __init__(self, model: ServedModel, settings: Settings) -> None:
        self._model = model
        self._settings = settings

    def check(self, request: GenerationRequest) -> None:
        """Raises RequestError (400) for too many choices or token ids outside the vocabulary."""
        max_n, params = self._settings.max_n, request.sampling
        for name, value in (("n", params.n), ("best_of", params.best_of)):
            if value > max_n:
                raise refusal(name, f"must be at most {max_n} here")
        self._model.check_ids(params.stop_token_ids, "stop_token_ids")
        self._model.check_ids(params.allowed_token_ids, "allowed_token_ids")
        self._model.check_ids(tuple(token for token, _ in params.logit_bias), "logit_bias")

    def read(self, request: GenerationRequest, max_model_len: int) -> Tokenized:
        """Tokenize the prompts. Slow for long ones: call it off the event loop. Raises RequestError (400)."""
        prompts = self._encode(request, max_model_len)
        reasoning = self._reasoning_state(request, prompts[0])
        return Tokenized(
            prompts=prompts,
            texts=self._prompt_texts(request, prompts),
            reasoning=reasoning,
            rules=self._token_rules(request, reasoning),
            task=self._grammar_task(request, reasoning),
        )

    def _encode(self, request: GenerationRequest, max_model_len: int) -> list[list[int]]:
        prompts: list[list[int]] = []
        num_tokens = 0
        keeps_end = request.truncate_prompt_tokens is not None
        for prompt in request.prompts:
            ids = self._model.encode(
                prompt, request.add_special_tokens, parse_special=request.parse_special, keeps_end=keeps_end
            )
            prompts.append(self._truncated(request, ids, max_model_len))
            num_tokens += len(prompts[-1])
            if num_tokens > self._settings.max_request_tokens:  # do not encode the rest in vain
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
        """Return the prompts to echo: as sent, or decoded if truncated or parsed for special tokens."""
        if not request.echo:
            return ()
        decode = self._model.tokenizer.decode
        is_whole = request.truncate_prompt_tokens is None and not request.parse_special
        return tuple(
            text if isinstance(text, str) and is_whole else decode(ids, request.skip_special_tokens)
            for text, ids in zip(request.prompts, prompts, strict=True)
        )

    def _reasoning_state(self, request: GenerationRequest, prompt_ids: Sequence[int]) -> ReasoningState:
        """Return the reasoning state at the end of the prompt."""
        prompt = request.prompts[0]
        if self._model.reasoning_format is None or not isinstance(prompt, Conversation):
            return ReasoningState.OFF
        if prompt.continue_final_message:
            return state_within(self._model.reasoning_format, prompt.messages[-1]["content"])
        end = self._model.tokenizer.decode(prompt_ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
        return state_after(self._model.reasoning_format, end)

    def _token_rules(self, request: GenerationRequest, reasoning: ReasoningState) -> TokenRules | None:
        """Raises RequestError (400) for a bad word that has no tokens."""
        params = request.sampling
        bad_words = tuple(ids for word in params.bad_words for ids in self._spellings(word))
        budget = self._reasoning_budget(request, reasoning)
        if not params.allowed_token_ids and not bad_words and budget is None:
            return None
        return TokenRules(allowed_token_ids=params.allowed_token_ids, bad_words=bad_words, reasoning=budget)

    def _spellings(self, word: str) -> set[tuple[int, ...]]:
        """Return a bad word's token ids, at the start of a text and after a space."""
        bare = word.lstrip(" ")
        spellings = {tuple(self._model.tokenizer.encode(text, add_special_tokens=False)) for text in (bare, " " + bare)}
        if not bare or () in spellings:
            raise refusal("bad_words", "has a word without tokens")
        self._model.check_ids([token for ids in spellings for token in ids], "bad_words")
        return spellings

    def _reasoning_budget(self, request: GenerationRequest, reasoning: ReasoningState) -> ReasoningBudget | None:
        markers, max_tokens = self._model.reasoning_format, request.sampling.reasoning_budget
        prompt = request.prompts[0]
        is_off = isinstance(prompt, Conversation) and prompt.hints.get("reasoning_effort") == NO_EFFORT
        if is_off:
            max_tokens = 0  # the template had no switch, or the model would not reason
        if markers is None or max_tokens is None or reasoning is ReasoningState.OFF:
            return None
        special = self._model.tokenizer.special_id(markers.end)
        end_ids = self._model.tokenizer.encode(markers.end, add_special_tokens=False) if special is None else [special]
        self._model.check_ids(end_ids, "thinking_token_budget")
        return ReasoningBudget(
            max_tokens=max_tokens,
            start=markers.start,
            end=markers.end,
            end_ids=tuple(end_ids),
            is_open=reasoning is ReasoningState.OPEN,
        )

    def _grammar_task(self, request: GenerationRequest, reasoning: ReasoningState) -> GrammarTask | None:
        """Raises RequestError (400) for tools if this model cannot call any."""
        grammar, tools = request.sampling.grammar, request.tools
        spec = None if grammar is None else grammar.spec
        calls = None if tools is None else self._call_spec(tools, spec)
        if spec is None and calls is None:
            return None
        markers = self._model.reasoning_format
        if markers is None or reasoning is ReasoningState.OFF:
            return GrammarTask(spec, calls)
        return GrammarTask(spec, calls, ReasoningRule(markers.start, markers.end, reasoning is ReasoningState.OPEN))

    def _call_spec(self, tools: ToolSpec, spec: GrammarSpec | None) -> CallSpec | None:
        call_format, template = self._model.require_call_format()
        if spec is not None and not tools.must_call and call_format.syntax.bare:
            raise refusal(
                "tool_choice", "cannot be 'auto' where the answer must have a form: calls of this model have no opening"
            )
        if spec is None and not tools.must_call and not any(function.is_strict for function in tools.callable):
            return None
        return CallSpec(
            format=call_format,
            functions=tools.callable,
            arguments_key=detect_arguments_key(template.tool_source),
            max_calls=1 if tools.only_one else MAX_FORCED_CALLS,
            or_text=not tools.must_call,
            or_spec=spec is not None and not tools.must_call,
        )
