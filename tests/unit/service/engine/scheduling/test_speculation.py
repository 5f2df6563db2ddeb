"""Steps overlap while nothing is drafted, and every request still gets the same tokens."""

import pytest

from model.sampling_params import SamplingParams
from service.engine.drafting.lengths import DraftLengths
from service.engine.drafting.step_cost import StepCost
from service.engine.engine import Engine
from service.engine.kv.kv_manager import KVManager
from service.engine.request import EngineRequest
from service.engine.scheduling.limits import Limits
from service.engine.scheduling.scheduler import Scheduler
from service.engine.scheduling.speculation import MAX_SILENT, Speculation
from tests.fakes.drafters import FakeDrafter
from tests.fakes.scripted_executor import VOCAB_SIZE, ScriptedDrafter, ScriptedExecutor

ROWS = StepCost([1, 101], [1.0, 16.0])
EXPOSED = StepCost([1, 101], [1.0, 16.0])
"""Costs where the host takes longer than the device."""
for _number in range(1, 60):
    EXPOSED.on_step(1, _number, 100.0)


class SilentDrafter(FakeDrafter):
    def of(self, sequence, count):
        return ()


class LateDrafter(ScriptedDrafter):
    """Guesses wrong until the given number of tokens is known, then right."""

    def __init__(self, num_wrong):
        super().__init__(8, wrong_every=1)
        self._num_wrong = num_wrong

    def _draft(self, sequence, max_tokens):
        self._wrong_every = 1 if len(sequence.token_ids) < self._num_wrong else 1000
        return super()._draft(sequence, max_tokens)


def engine_of(drafter, cost=ROWS):
    executor = ScriptedExecutor(200, 4, runs_ahead=True)
    kv = KVManager(200, 4)
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=40, max_prefill_chunk=40, max_model_len=128)
    speculation = None if drafter is None else Speculation(kv, VOCAB_SIZE, drafter, 8, DraftLengths(cost))
    if speculation is not None:
        speculation.on_step = lambda plan, seconds, has_overlapped: None
    return Engine(executor, Scheduler(kv, limits, speculation=speculation), frozenset()), executor


def run(engine, num_requests=3, max_tokens=40):
    """Return the tokens of each request, and how many steps were planned while one was in flight."""
    for number in range(num_requests):
        sampling = SamplingParams(max_tokens=max_tokens)
        engine.add_request(EngineRequest(request_id=str(number), prompt=(number, 3, 4), sampling=sampling))
    tokens, num_overlapped = {}, 0
    while engine.has_work:
        num_before, before = engine._num_steps, [*engine._in_flight]
        engine.step()
        engine.check_invariants()
        # The earlier step is collected in `step` only after the new one was launched.
        num_overlapped += bool(before) and engine._num_steps > num_before and overlapped(engine, before[-1])
        for output in engine.drain_request_outputs():
            for part in output.parts:
                tokens.setdefault(output.request_id, []).extend(part.token_ids)
    return tokens, num_overlapped


def overlapped(engine, earlier):
    latest = engine._in_flight[-1].plan.chunks if engine._in_flight else ()
    known = {chunk.sequence: chunk.end for chunk in earlier.plan.chunks}
    return any(known.get(chunk.sequence) == chunk.start and not chunk.drafts for chunk in latest)


@pytest.fixture(scope="module")
def plain():
    return run(engine_of(None)[0])


@pytest.mark.parametrize(
    ("drafter", "cost"), [(SilentDrafter(), ROWS), (ScriptedDrafter(8, 1), ROWS), (ScriptedDrafter(8, 1000), EXPOSED)]
)
def test_steps_overlap_while_drafts_do_not_pay(plain, drafter, cost):
    """It finds nothing, it is wrong, or the lost overlap costs more than all its tokens."""
    engine, executor = engine_of(drafter, cost)
    tokens, num_overlapped = run(engine)
    assert tokens == plain[0]
    assert num_overlapped >= plain[1] - 1
    assert not any(chunk.drafts for plan in executor.plans for chunk in plan.chunks)


def test_a_sequence_stops_running_ahead_once_its_guesses_hold(plain):
    engine, executor = engine_of(LateDrafter(20))
    tokens, num_overlapped = run(engine)
    assert tokens == plain[0]
    drafted = [chunk for plan in executor.plans for chunk in plan.chunks if chunk.drafts]
    assert drafted
    assert min(chunk.start for chunk in drafted) >= 20
    assert 10 < num_overlapped < plain[1]
    assert len(executor.plans) < 40


def test_a_step_with_drafts_is_collected_before_the_next_is_planned():
    engine, executor = engine_of(ScriptedDrafter(8, 1000))
    engine.add_request(EngineRequest(request_id="a", prompt=(1, 2), sampling=SamplingParams(max_tokens=60)))
    while engine.has_work:
        engine.step()
        plans = executor.plans[-2:]
        if any(chunk.drafts for chunk in plans[0].chunks) and len(plans) == 2:
            assert plans[1].chunks[0].start > plans[0].chunks[0].start
        engine.drain_outputs()
    assert engine.stats().num_accepted_tokens > 40


class CountedDrafter(SilentDrafter):
    def __init__(self):
        self.num_calls = 0

    def draft(self, sequences, max_tokens):
        self.num_calls += 1
        return super().draft(sequences, max_tokens)


def looks_per_step(num_requests, max_tokens):
    drafter = CountedDrafter()
    engine, _ = engine_of(drafter)
    run(engine, num_requests, max_tokens)
    return drafter.num_calls / engine._num_steps


def test_many_sequences_that_draft_nothing_are_looked_at_less_often():
    assert looks_per_step(8, 8) < 0.7 * looks_per_step(3, 8)


def test_sequences_that_drafted_nothing_for_long_are_looked_at_less_often():
    assert looks_per_step(3, 110) < 0.7 * looks_per_step(3, 8)


class SilentHead(CountedDrafter):
    writes_cache = True


def test_a_head_that_drafts_nothing_is_asked_ever_less_often():
    calls = []
    for max_tokens in (10, 110):
        drafter = SilentHead()
        engine, _ = engine_of(drafter)
        run(engine, max_tokens=max_tokens)
        calls.append(drafter.num_calls)
    assert MAX_SILENT <= calls[0] <= 3 * MAX_SILENT
    assert calls[1] <= 5 * MAX_SILENT


class HeadAfterPrompts(LateDrafter):
    """A head that drafts nothing for a few calls."""

    writes_cache = True

    def __init__(self, num_empty):
        super().__init__(0)
        self._num_empty = num_empty

    def draft(self, sequences, max_tokens):
        self._num_empty -= 1
        return super().draft(sequences, max_tokens) if self._num_empty < 0 else [()] * len(sequences)


def test_a_head_that_drafted_nothing_after_prompts_soon_drafts():
    engine, executor = engine_of(HeadAfterPrompts(MAX_SILENT))
    run(engine, 1, 60)
    first = next(number for number, plan in enumerate(executor.plans) if any(chunk.drafts for chunk in plan.chunks))
    assert first < 20


def test_drafts_leave_room_for_prompts():
    executor, kv = ScriptedExecutor(200, 4, runs_ahead=True), KVManager(200, 4)
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=12, max_prefill_chunk=12, max_model_len=128)
    engine = Engine(
        executor, Scheduler(kv, limits, speculation=Speculation(kv, VOCAB_SIZE, ScriptedDrafter(16), 16)), frozenset()
    )
    for name, max_tokens in (("long", 100), ("late", 1)):
        sampling = SamplingParams(max_tokens=max_tokens)
        engine.add_request(EngineRequest(request_id=name, prompt=(5, 3, 4), sampling=sampling))
        for _ in range(3):
            engine.step()
    assert engine.stats().mean_draft_length > 1
    ended = [output.request_id for output in engine.drain_request_outputs() if output.end is not None]
    assert ended == ["late"]
