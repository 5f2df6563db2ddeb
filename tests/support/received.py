"""Outputs of an engine's requests, by branch."""

from __future__ import annotations

from service.engine.engine import Engine
from service.engine.output_processor import RequestOutput
from service.engine.request import BranchHistory
from service.engine.step import TokenLogprob
from service.errors import EndReason


class Received:
    """Outputs of one request; none may follow its end or that of its branch."""

    def __init__(self) -> None:
        self.branches: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprob]] = {}
        self.ends: dict[int, EndReason] = {}
        self.end: EndReason | None = None
        self.choices: tuple[int, ...] | None = None
        self.num_output_tokens = 0
        self.num_outputs = 0

    def hear(self, output: RequestOutput) -> None:
        assert self.end is None, "an output behind the end"
        self.num_outputs += 1
        for part in output.parts:
            assert part.branch not in self.ends, "something behind a branch's end"
            self.branches.setdefault(part.branch, []).extend(part.token_ids)
            self.logprobs.setdefault(part.branch, []).extend(part.logprobs)
            if part.end is not None:
                self.ends[part.branch] = part.end
        if output.end is not None:
            self.end, self.choices = output.end, output.choices
            self.num_output_tokens = output.num_output_tokens

    def by_branch(self) -> dict[int, tuple[list[int], EndReason | None]]:
        return {branch: (tokens, self.ends.get(branch)) for branch, tokens in self.branches.items()}

    def history(self, num_branches: int) -> tuple[BranchHistory, ...]:
        """Return the history from which another engine resumes. The end of the whole request counts as lost."""
        self.end = self.choices = None
        return tuple(
            BranchHistory(
                token_ids=tuple(self.branches.get(branch, ())),
                end=self.ends.get(branch),
                sum_logprob=sum(one.logprob for one in self.logprobs.get(branch, ())),
            )
            for branch in range(num_branches)
        )


def run_steps(
    engine: Engine, received: dict[str, Received] | None = None, num_steps: int = 10_000
) -> dict[str, Received]:
    """Run this many steps, or to the end, checking invariants after each; return outputs by request id."""
    received = {} if received is None else received
    while engine.has_work and num_steps:
        num_steps -= 1
        engine.step()
        engine.check_invariants()
        _receive(engine, received)
    _receive(engine, received)
    return received


def _receive(engine: Engine, received: dict[str, Received]) -> None:
    for output in engine.drain_request_outputs():
        received.setdefault(output.request_id, Received()).hear(output)
