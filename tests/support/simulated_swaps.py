"""A simulated machine with a host tier: steps advance a clock while two lanes copy blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from model.sampling_params import SamplingParams
from service.bench.kv_policies.simulation import MACHINES, SimulatedClock, SimulatedExecutor
from service.engine.engine import Engine
from service.engine.kv.kv_manager import KVManager
from service.engine.request import EngineRequest
from service.engine.scheduling.fair_share import FairShare
from service.engine.scheduling.limits import Limits
from service.engine.scheduling.preemption import Preemption
from service.engine.scheduling.scheduler import Scheduler
from service.engine.scheduling.swap_cost import Rates, SwapCostModel
from service.engine.step import FinishedTransfer, StepPlan, StepResult

H200 = MACHINES["llama-3.1-8b-h200"]
RATES = Rates(token_s=H200.costs.token_s, pair_s=6e-10, block_out_s=4.0e-5, block_in_s=4.0e-5, transfer_s=5e-5)
"""Blocks of 2 MiB at an H200's measured bus and prompt rates."""

COPY_SLOWDOWN = 0.06
"""Slowdown of a step while the bus is busy in both directions."""


class SimulatedCosts(SwapCostModel):
    """Costs on simulated time: a step takes what the executor says."""

    def __init__(self, rates: Rates, block_size: int, executor: SwappingExecutor):
        super().__init__(replace(rates), block_size)  # it corrects its own
        self._executor = executor

    def on_decode_step(self, seconds: float) -> None:
        super().on_decode_step(self._executor.last_step_s)

    def on_prefill_step(self, spans: list[tuple[int, int]], seconds: float, *, with_decodes: bool) -> None:
        pass


class SwappingExecutor(SimulatedExecutor):
    """Executor whose transfers of one direction run in order, each after the preceding step."""

    def __init__(self, clock: SimulatedClock, num_host_blocks: int, rates: Rates = RATES):
        super().__init__(clock, H200.costs)
        self.num_host_blocks = num_host_blocks
        self.last_step_s = 0.0
        self.num_computed_tokens = 0
        self._rates = rates
        self._lanes: dict[bool, deque[tuple[float, int, float]]] = {True: deque(), False: deque()}
        self._free_at_s = {True: 0.0, False: 0.0}

    def launch(self, plan: StepPlan) -> StepResult:
        self.num_computed_tokens += plan.num_tokens
        self.transfer(plan)
        begin_s = self._clock.now_s
        result = super().launch(plan)
        busy_s = sum(max(0.0, min(self._free_at_s[lane], self._clock.now_s) - begin_s) for lane in (True, False))
        self._clock.now_s += COPY_SLOWDOWN * busy_s / 2
        self.last_step_s = self._clock.now_s - begin_s
        return result

    def transfer(self, plan: StepPlan) -> None:
        for is_out, copies in ((True, plan.swap_outs), (False, plan.swap_ins)):
            if copies:
                block_s = self._rates.block_out_s if is_out else self._rates.block_in_s
                seconds = self._rates.transfer_s + len(copies) * block_s
                self._free_at_s[is_out] = max(self._clock.now_s, self._free_at_s[is_out]) + seconds
                self._lanes[is_out].append((self._free_at_s[is_out], len(copies), seconds))

    def finished_transfers(self) -> list[FinishedTransfer]:
        finished = []
        for is_out, lane in self._lanes.items():
            while lane and lane[0][0] <= self._clock.now_s:
                _, num_blocks, seconds = lane.popleft()
                finished.append(FinishedTransfer(is_out, num_blocks, seconds))
        return finished

    def wait_for_transfer(self) -> None:
        self._clock.wait_until(min(lane[0][0] for lane in self._lanes.values() if lane))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    total_s: float
    output_tokens_per_s: float
    computed_again: int  # tokens
    most_blocks: int  # used at once
    num_preemptions: int
    num_swapped: int
    num_blocks_out: int
    num_blocks_in: int


def replay(
    lengths: Seq[tuple[int, int]],
    num_blocks: int,
    mode: str,
    *,
    num_host_blocks: int = 2048,
    rates: Rates = RATES,
    max_num_seqs: int = 512,
    max_len: int = 8192,
    prefix_caching: bool = False,
) -> Outcome:
    """Run requests of these (prompt, output) lengths at once to their ends."""
    clock = SimulatedClock()
    if mode == "recompute" and not prefix_caching:  # else the host keeps what is evicted
        num_host_blocks = 0
    executor = SwappingExecutor(clock, num_host_blocks, rates)
    kv = KVManager(num_blocks, 16, prefix_caching=prefix_caching, swapping=num_host_blocks > 0)
    limits = Limits(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=8192, max_prefill_chunk=512, max_model_len=max_len
    )
    preemption = Preemption(kv, FairShare(kv, limits.max_num_seqs), SimulatedCosts(rates, 16, executor), mode)
    engine = Engine(executor, Scheduler(kv, limits, preemption=preemption), frozenset())
    for number, (num_prompt, num_output) in enumerate(lengths):
        params = SamplingParams(max_tokens=num_output, ignore_eos=True)
        engine.add_request(
            EngineRequest(request_id=str(number), prompt=(number, *[1] * (num_prompt - 1)), sampling=params)
        )
    most_blocks = 0
    while engine.has_work:
        engine.step()
        engine.drain_outputs()
        most_blocks = max(most_blocks, kv.pool.num_used)
    stats = engine.stats()
    num_outputs = sum(num_output for _, num_output in lengths)
    num_needed = sum(num_prompt + num_output - 1 for num_prompt, num_output in lengths)
    return Outcome(
        total_s=clock.now_s,
        output_tokens_per_s=num_outputs / clock.now_s,
        computed_again=executor.num_computed_tokens - num_needed,
        most_blocks=most_blocks,
        num_preemptions=stats.num_preemptions,
        num_swapped=stats.num_swapped,
        num_blocks_out=stats.num_blocks_out,
        num_blocks_in=stats.num_blocks_in,
    )


def num_blocks_needed(lengths: Seq[tuple[int, int]]) -> int:
    """Return the blocks with which no sequence waits or is preempted."""
    plenty = sum(-(-sum(both) // 16) for both in lengths)
    return replay(lengths, plenty, "recompute").most_blocks
