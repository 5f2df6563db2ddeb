"""Simulated GPU: each step advances a clock by its cost.

A step costs `fixed_s`, plus the longer of reading the weights and computing its tokens, plus reading its keys and
values.

`llama-3.1-8b-h200` fits measurements on an H200 at commit 99e3829 within 7 %: decode steps of 4.06, 6.83, 15.6 and 29.0
ms for 1, 64, 256 and 512 sequences of 1.1k tokens, and 64 prompts of 1,024 in 1.487 s.

`opt-13b-a100` is the paper's first machine (table 1: 26 GB of weights, 12 GB of cache, 800 KiB a token, 15.7K slots):
the A100-40GB's data sheet (1,555 GB/s, 312 TFLOP/s) times the shares that the H200 reached of its own: 0.86 of the
bandwidth reading weights, 0.83 reading the cache, 0.72 of the bf16 rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from service.engine.sequence import Sequence
from service.engine.step import FinishedTransfer, SampledToken, StepPlan, StepResult, TokenLogprob


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Costs of a step. Times are in seconds."""

    fixed_s: float
    weights_s: float
    token_s: float
    cached_token_s: float

    def step_s(self, num_tokens: int, num_cached_tokens: int) -> float:
        """Return a step's seconds. `num_cached_tokens` includes the step's tokens."""
        return self.fixed_s + max(self.weights_s, num_tokens * self.token_s) + num_cached_tokens * self.cached_token_s


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A model on a GPU, with its default pool."""

    name: str
    costs: StepCosts
    num_blocks: int  # of 16 tokens
    max_model_len: int = 2048


def _derived(weight_bytes: float, bytes_per_token: int, bytes_per_s: float, flops_per_s: float) -> StepCosts:
    """Return the costs, assuming one multiply-add per two-byte weight."""
    return StepCosts(
        fixed_s=0.16e-3,
        weights_s=weight_bytes / (0.86 * bytes_per_s),
        token_s=weight_bytes / (0.72 * flops_per_s),
        cached_token_s=bytes_per_token / (0.83 * bytes_per_s),
    )


MACHINES = {
    machine.name: machine
    for machine in (
        Machine(name="opt-13b-a100", costs=_derived(26e9, 800 << 10, 1555e9, 312e12), num_blocks=15_728 // 16),
        Machine(
            name="llama-3.1-8b-h200",
            costs=StepCosts(fixed_s=0.16e-3, weights_s=3.9e-3, token_s=22.6e-6, cached_token_s=32.8e-9),
            num_blocks=3000,  # 48K slots; a whole H200 fits 256 sequences under any policy
        ),
    )
}


class SimulatedClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def advance(self, seconds: float) -> None:
        self.now_s += seconds

    def wait_until(self, due_s: float) -> None:
        self.now_s = max(self.now_s, due_s)


class SimulatedExecutor:
    """Executor that only advances the clock. Every token is 0."""

    runs_ahead = False
    num_host_blocks = 0

    def __init__(self, clock: SimulatedClock, costs: StepCosts):
        self._clock = clock
        self._costs = costs

    def transfer(self, plan: StepPlan) -> None:
        raise AssertionError("there is no host memory to swap to")

    def finished_transfers(self) -> list[FinishedTransfer]:
        return []

    def wait_for_transfer(self) -> None:
        raise AssertionError("no transfer is in flight")

    def launch(self, plan: StepPlan) -> StepResult:
        num_tokens = num_cached_tokens = num_due = 0
        for _, start, length, sampled_sequences, _ in plan.chunks:
            num_tokens += length
            num_cached_tokens += start + length
            num_due += len(sampled_sequences)
        self._clock.advance(self._costs.step_s(num_tokens, num_cached_tokens))
        return StepResult([0] * num_due)

    def sample(self, launched: StepResult) -> None:
        """Do nothing: tokens are known at launch."""

    def collect(self, launched: StepResult) -> StepResult:
        return launched


class SimulatedSampler(SimulatedExecutor):
    """Samples random tokens.

    The top token's probability follows a beta distribution with mean 2/3; each further token gets half of the rest.
    Means of 1/2 to 2/3 agree within 4 %.
    """

    def __init__(self, clock: SimulatedClock, costs: StepCosts, vocab_size: int):
        super().__init__(clock, costs)
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(0)

    def launch(self, plan: StepPlan) -> StepResult:
        super().launch(plan)
        sequences = plan.sampled_sequences
        token_ids = self._random.integers(0, self._vocab_size, len(sequences)).tolist()
        shares = self._random.beta(0.8, 0.4, len(sequences))
        return StepResult.of(map(self._sample, sequences, token_ids, shares))

    def _sample(self, sequence: Sequence, token_id: int, share: float) -> SampledToken:
        count = sequence.num_alternatives
        if not count:
            return SampledToken(token_id, False, None)
        rest = (1 - share) * 0.5 ** np.arange(1, count)
        logprobs = np.log(np.maximum(-np.sort(-np.append(rest, share)), 1e-9)).tolist()
        top_ids = tuple((token_id + place) % self._vocab_size for place in range(count))
        return SampledToken(token_id, False, TokenLogprob(logprobs[0], top_ids, tuple(logprobs)))
