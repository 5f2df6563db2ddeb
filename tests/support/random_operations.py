"""Random operations on an engine's memory, compared with each request's answer alone.

The scripted executor keeps each slot's token, so that a block shared, copied, moved or freed wrongly shows as a wrong
token. `python -m tests.support.random_operations --operations N` runs N operations.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache

from model.sampling_params import BeamSearch, SamplingParams
from service.engine.engine import Engine
from service.engine.kv.kv_manager import KVManager
from service.engine.request import BranchHistory, EngineRequest
from service.engine.scheduling.fair_share import FairShare
from service.engine.scheduling.limits import Limits
from service.engine.scheduling.preemption import AUTO, MODES, Preemption
from service.engine.scheduling.scheduler import Scheduler
from service.engine.scheduling.speculation import Speculation
from service.engine.scheduling.swap_cost import Rates, SwapCostModel
from service.errors import EndReason
from tests.fakes.scripted_executor import VOCAB_SIZE, ScriptedDrafter, ScriptedExecutor, logprobs_after, next_token
from tests.support.beam_reference import search

EOS = 7
BLOCK_SIZE = 4
MAX_LEN = 56
MAX_SEQS = 6
TENANTS = ("", "", "", "other", "other", "third")
CHANCES = {"add": 0.2, "step": 0.6, "cancel": 0.05, "preempt": 0.08, "evict": 0.05, "restart": 0.02}


@dataclass(frozen=True)
class World:
    """The parts of an engine."""

    runs_ahead: bool = True
    prefix_caching: bool = True
    num_blocks: int = 30
    num_host_blocks: int = 20
    transfer_steps: int = 2
    mode: str = AUTO
    num_drafts: int = 0

    @staticmethod
    def drawn(rng: random.Random) -> World:
        return World(
            runs_ahead=rng.random() < 0.6,
            prefix_caching=rng.random() < 0.7,
            num_blocks=rng.choice((14, 20, 30, 60)),
            num_host_blocks=rng.choice((0, 6, 20, 60)),
            transfer_steps=rng.choice((0, 0, 1, 2, 5)),
            mode=rng.choice(MODES),
            num_drafts=rng.choice((0, 0, 1, 3, 6)),
        )

    def engine(self) -> tuple[Engine, Preemption]:
        executor = ScriptedExecutor(
            self.num_blocks,
            BLOCK_SIZE,
            runs_ahead=self.runs_ahead,
            num_host_blocks=self.num_host_blocks,
            transfer_steps=self.transfer_steps,
            silent_every=5,
        )
        limits = Limits(max_num_seqs=MAX_SEQS, max_num_batched_tokens=11, max_prefill_chunk=8, max_model_len=MAX_LEN)
        kv = KVManager(
            self.num_blocks, BLOCK_SIZE, prefix_caching=self.prefix_caching, swapping=self.num_host_blocks > 0
        )
        rates = Rates(token_s=3e-5, pair_s=1e-8, block_out_s=4e-5, block_in_s=4e-5, transfer_s=2e-4)
        preemption = Preemption(kv, FairShare(kv, MAX_SEQS), SwapCostModel(rates, BLOCK_SIZE), self.mode)
        speculation = Speculation(kv, VOCAB_SIZE, ScriptedDrafter(self.num_drafts)) if self.num_drafts else None
        engine = Engine(
            executor, Scheduler(kv, limits, preemption=preemption, speculation=speculation), frozenset({EOS})
        )
        return engine, preemption


@dataclass
class _Asked:
    request: EngineRequest
    received: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, EndReason] = field(default_factory=dict)
    end: EndReason | None = None


class Operations:
    """An engine, with its requests and their outputs so far."""

    def __init__(self, world: World):
        self._world = world
        self._engine, self._preemption = world.engine()
        self._asked: dict[str, _Asked] = {}
        self._count = 0
        self._num_kept_out = 0  # steps in a row
        self.num_ended = 0

    @property
    def open_names(self) -> list[str]:
        return sorted(self._asked)

    def add(self, prompt: list[int], params: dict, tenant: str) -> None:
        """Add a request; its id is its number."""
        name = str(self._count)
        self._count += 1
        sampling = SamplingParams(**params)
        request = EngineRequest(
            request_id=name, prompt=tuple(prompt), sampling=sampling, tenant=tenant, cache_salt=tenant
        )
        self._asked[name] = _Asked(request)
        self._engine.add_request(request)
        self._receive()

    def step(self) -> None:
        if self._engine.has_work:
            self._engine.step()
        self._receive()
        self._check_shares()

    def cancel(self, name: str) -> None:
        self._engine.cancel(name, EndReason.CANCELLED)
        self._receive()

    def preempt(self, mode: str) -> None:
        """Preempt the next victim, although there is room, in this way."""
        scheduler = self._engine._scheduler
        if not scheduler.running:
            return
        chosen, self._preemption._mode = self._preemption._mode, mode
        group = self._preemption._next_victim(scheduler.running)
        self._preemption._preempt(group, scheduler.running)
        scheduler._requeue([group])
        self._preemption._mode = chosen

    def evict(self, of_host: bool, count: int) -> None:
        """Allocate this many unheld blocks, which evicts cached ones."""
        kv = self._engine._kv
        pool = kv.host.pool if of_host and kv.host is not None else kv.pool
        pool.release(pool.allocate(min(count, pool.num_available)))

    def restart(self) -> None:
        """Replace the engine by a new one, which resumes what was not yet emitted."""
        self._engine, self._preemption = self._world.engine()
        for name, asked in self._asked.items():
            params, past = asked.request.sampling, ()
            if params.beam is None:
                past = tuple(
                    BranchHistory(token_ids=tuple(asked.received.get(branch, ())), end=asked.ends.get(branch))
                    for branch in range(params.num_branches)
                )
            self._engine.add_request(
                EngineRequest(
                    request_id=name,
                    prompt=asked.request.prompt,
                    sampling=params,
                    tenant=asked.request.tenant,
                    cache_salt=asked.request.cache_salt,
                    history=past,
                )
            )
        self._receive()

    def check(self) -> None:
        self._engine.check_invariants()

    def finish(self) -> None:
        """Run until every request has ended and no block is held."""
        for _ in range(20_000):
            if not self._engine.has_work:
                break
            self.step()
        assert not self._engine.has_work, "a request starves"
        assert not self._asked, "a request never received its end"
        self.check()
        stats = self._engine.stats()
        assert stats.num_blocks_used == 0, "blocks are leaked"
        host = self._engine._kv.host
        assert host is None or host.pool.num_used == 0, "blocks of the host are leaked"

    def _check_shares(self) -> None:
        """Check that no tenant waits long for a slot while another one exceeds its fair share."""
        scheduler = self._engine._scheduler
        held = Counter(sequence.group.tenant for sequence in scheduler.running)
        ready = [group for group in scheduler.waiting if group.is_ready and not group.has_pending_tokens]
        first = min(ready, key=lambda group: (held[group.tenant], group.arrival), default=None)
        equal_part = MAX_SEQS // len(
            {group.tenant for group in self._engine._output_processor.open_groups.values()} or {""}
        )
        oldest = {sequence.group.tenant: sequence.group for sequence in reversed(scheduler.running)}.values()
        others = {sequence.group for sequence in scheduler.running}.difference(oldest)
        is_kept_out = (
            first is not None
            and len(first.live) == 1
            and self._engine.pool.num_available > 2 * MAX_LEN // BLOCK_SIZE
            and any(held[one.tenant] - len(one.live) >= max(held[first.tenant] + 1, equal_part) for one in others)
        )
        self._num_kept_out = self._num_kept_out + 1 if is_kept_out else 0
        assert self._num_kept_out < 10, f"{first.request_id} waits for a place that is lent"

    def _receive(self) -> None:
        for output in self._engine.drain_request_outputs():
            asked = self._asked[output.request_id]
            assert asked.end is None, "an output behind the end"
            for part in output.parts:
                asked.received.setdefault(part.branch, []).extend(part.token_ids)
                if part.end is not None:
                    asked.ends[part.branch] = part.end
            if output.end is not None:
                asked.end = output.end
                self._compare(asked)
                del self._asked[output.request_id]
                self.num_ended += 1

    def _compare(self, asked: _Asked) -> None:
        params, prompt = asked.request.sampling, asked.request.prompt
        if params.beam is not None:
            if asked.end is not EndReason.CANCELLED:
                assert list(asked.received.values()) == _beams(prompt, params), "wrong beams"
            return
        for branch, tokens in asked.received.items():
            wanted, end = alone(prompt, branch, params.max_tokens)
            if asked.end is EndReason.CANCELLED and branch not in asked.ends:
                assert tokens == wanted[: len(tokens)], "wrong tokens before a cancel"
            elif asked.ends.get(branch) is not EndReason.CANCELLED:
                assert (tokens, asked.ends.get(branch)) == (wanted, end), "wrong tokens"


@lru_cache(4096)
def alone(prompt: tuple[int, ...], branch: int, max_tokens: int) -> tuple[list[int], EndReason]:
    """Return a branch's tokens when run alone, and why it ends."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens, branch))
        if tokens[-1] == EOS:
            return tokens[len(prompt) :], EndReason.STOP
        if len(tokens) - len(prompt) == max_tokens:
            return tokens[len(prompt) :], EndReason.LENGTH


@lru_cache(256)
def _beams(prompt: tuple[int, ...], params: SamplingParams) -> list[list[int]]:
    return [tokens for tokens, _, _ in search(prompt, params, frozenset({EOS}), logprobs_after)[: params.n]]


def random_params(rng: random.Random) -> dict:
    kind = rng.random()
    if kind < 0.02:
        return {"beam": BeamSearch(width=rng.choice((2, 3))), "n": 1, "max_tokens": rng.randrange(1, 6)}
    if kind < 0.25:
        count = rng.randrange(2, 5)
        return {"n": count, "best_of": count, "max_tokens": rng.randrange(1, 20)}
    penalty = 0.5 if kind > 0.95 else 0.0  # no effect on the scripted model, but steps must wait for tokens
    return {"max_tokens": rng.randrange(1, 26), "presence_penalty": penalty}


def random_prompt(rng: random.Random) -> list[int]:
    """Return a prompt; most share a prefix."""
    common = rng.choice(([], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1] * 17))
    return [*common[: rng.randrange(18)], *(rng.randrange(2) for _ in range(rng.randrange(1, 13)))]


def run_randomly(num_operations: int, seed: int, *, world_every: int = 4000, check_every: int = 50) -> dict[str, int]:
    """Run this many random operations, with a new engine now and then; return the number of each kind."""
    rng = random.Random(seed)
    counts = dict.fromkeys([*CHANCES, "ended"], 0)
    for first in range(0, num_operations, world_every):
        operations = Operations(World.drawn(rng))
        for number in range(first, min(first + world_every, num_operations)):
            name = rng.choices(list(CHANCES), list(CHANCES.values()))[0]
            counts[name] += 1
            _carry_out(operations, name, rng)
            if number % check_every == 0:
                operations.check()
        begin = random_prompt(rng)
        longest = [*begin, *range(8, 8 + MAX_LEN - 2 - len(begin))]  # needs the whole smallest pool at once
        operations.add(longest, {"max_tokens": 2}, rng.choice(TENANTS))
        operations.finish()
        counts["ended"] += operations.num_ended
    return counts


def _carry_out(operations: Operations, name: str, rng: random.Random) -> None:
    match name:
        case "add":
            if len(operations.open_names) < 12:
                operations.add(random_prompt(rng), random_params(rng), rng.choice(TENANTS))
        case "step":
            operations.step()
        case "cancel":
            if operations.open_names:
                operations.cancel(rng.choice(operations.open_names))
        case "preempt":
            operations.preempt(rng.choice(MODES))
        case "evict":
            operations.evict(rng.random() < 0.5, rng.randrange(1, 60))
        case "restart":
            if rng.random() < 0.2:
                operations.restart()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    begin_s = time.perf_counter()
    print(
        run_randomly(wanted.operations, wanted.seed), f"{time.perf_counter() - begin_s:.0f} s, no leak, no wrong token"
    )
