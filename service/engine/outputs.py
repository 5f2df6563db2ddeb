"""What the engine has to tell of its requests, in the order in which it happened."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from service.engine.plan import TokenLogprob
from service.engine.sequence import Sequence, SequenceGroup
from service.errors import EndReason


class BranchOutput(NamedTuple):
    """What one branch has to tell: a new token, or its end, or both."""

    branch: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]  # as many as tokens where the request wants or ranks by them, else none
    end: EndReason | None  # STOP or LENGTH: nothing of this branch follows
    is_prompt: bool = False  # the tokens are the prompt's, behind those told before: all branches have them in common


class Output(NamedTuple):
    """Something a request's sender should hear: news of its branches, or the end, or both."""

    request_id: str
    parts: tuple[BranchOutput, ...]
    end: EndReason | None  # of the whole request: once, in its last output
    choices: tuple[int, ...]  # with an end that is a success: the n branches to answer with, best first
    num_prompt_tokens: int
    num_output_tokens: int  # of all branches
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    embedding: bytes = b""  # float32[H], with an end that is a success, where the request wants the prompt's vector


def output_of(
    group: SequenceGroup,
    parts: tuple[BranchOutput, ...],
    end: EndReason | None = None,
    choices: tuple[int, ...] = (),
    *,
    num_output: int | None = None,
) -> Output:
    """Without `num_output`, it is what the group has now."""
    if num_output is None:
        num_output = group.num_output_tokens
    num_cached = group.num_cached_tokens or 0
    embedding = group.embedding if choices else b""
    return Output(group.request_id, parts, end, choices, group.num_prompt_tokens, num_output, num_cached, embedding)


class NewTokens(NamedTuple):
    """One more token for each of these branches, and nothing else to say of it: most of what a step brings."""

    branches: list[Sequence]
    token_ids: list[int]
    nums_output: list[int]  # tokens of the whole request so far

    def outputs(self) -> list[Output]:
        """The same, one by one."""
        return [
            output_of(branch.group, (BranchOutput(branch.branch, (token_id,), (), None),), num_output=num_output)
            for branch, token_id, num_output in zip(*self, strict=True)
        ]


News = Output | NewTokens


def one_by_one(news: Iterable[News]) -> Iterator[Output]:
    """The same in the same order, an output for each token."""
    for each in news:
        if type(each) is Output:
            yield each
        else:
            yield from each.outputs()
