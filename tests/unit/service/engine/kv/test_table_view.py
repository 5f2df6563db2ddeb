"""Block tables as the page shows them: what is shared, copied, cached, swapped; and their bounds."""

import pytest

from model.sampling_params import SamplingParams
from service.engine.engine import Engine
from service.engine.kv import table_view
from service.engine.kv.kv_manager import KVManager
from service.engine.kv.table_view import ARRIVING, CACHED, WRITABLE, view_tables
from service.engine.request import EngineRequest
from service.engine.scheduling.fair_share import FairShare
from service.engine.scheduling.limits import Limits
from service.engine.scheduling.preemption import Preemption
from service.engine.scheduling.scheduler import Scheduler
from service.engine.scheduling.speculation import Speculation
from service.engine.sequence import SequenceGroup
from tests.fakes.scripted_executor import VOCAB_SIZE, ScriptedDrafter, ScriptedExecutor

SIZE = 4


def started(kv, name, num_tokens):
    request = EngineRequest(request_id=name, prompt=tuple(range(num_tokens)), sampling=SamplingParams(max_tokens=100))
    made = SequenceGroup(request, frozenset()).branches[0]
    kv.attach(made, kv.match(made))
    kv.extend(made, num_tokens)
    made.num_computed_tokens = num_tokens
    return made


def test_a_copy_on_write_names_its_source_until_the_sequence_ends():
    kv = KVManager(8, SIZE)
    parent = started(kv, "parent", 6)
    child = started(kv, "child", 0)
    kv.fork(parent, child, 6)
    shared = list(parent.block_table)
    kv.extend(child, 7)
    one, other = view_tables(kv, [parent, child], {child: (4, 3)})
    assert (one.request_id, one.holders, one.copied_from) == ("parent", (2, 1), {})
    assert (other.holders, dict(other.copied_from)) == ((2, 1), {1: shared[1]})
    assert (other.num_drafted, other.num_accepted) == (4, 3)
    assert (one.num_drafted, one.num_computed_tokens, one.num_blocks) == (0, 6, 2)
    kv.release(child)
    assert kv.copied_from(child) == {}


def test_blocks_of_the_prefix_cache_are_marked():
    kv = KVManager(8, SIZE, prefix_caching=True)
    made = started(kv, "s", 6)
    kv.cache_blocks(made, 6)
    (view,) = view_tables(kv, [made], {})
    assert list(view.states) == [CACHED, WRITABLE]


def test_the_longest_are_shown_within_bounds(monkeypatch):
    monkeypatch.setattr(table_view, "MAX_TABLES", 3)
    monkeypatch.setattr(table_view, "MAX_TABLE_BLOCKS", 5)
    kv = KVManager(64, SIZE)
    running = [started(kv, str(num_blocks), SIZE * num_blocks) for num_blocks in (1, 4, 2, 3)]
    views = view_tables(kv, running, {})
    assert [(view.request_id, view.num_blocks, len(view.blocks)) for view in views] == [
        ("4", 4, 4),
        ("3", 3, 1),
        ("2", 2, 0),
    ]
    assert all(len(view.blocks) == len(view.holders) == len(view.states) for view in views)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_an_engine_shows_its_sequences_and_no_tokens(num_steps):
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=16, max_prefill_chunk=16, max_model_len=256)
    engine = Engine(ScriptedExecutor(64, SIZE), Scheduler(KVManager(64, SIZE), limits), frozenset())
    assert engine.view_tables() == ()
    secret = 12345
    engine.add_request(EngineRequest(request_id="r", prompt=(secret,) * 9, sampling=SamplingParams(max_tokens=9)))
    for _ in range(num_steps):
        engine.step()
    (view,) = engine.view_tables()
    assert (view.request_id, view.num_prompt_tokens) == ("r", 9)
    assert view.num_computed_tokens >= 9
    assert str(secret) not in repr(view)


def test_a_swapped_sequence_shows_its_host_blocks():
    executor = ScriptedExecutor(24, SIZE, runs_ahead=True, num_host_blocks=40, transfer_steps=1)
    kv = KVManager(24, SIZE, swapping=True)
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_prefill_chunk=64, max_model_len=64)
    engine = Engine(
        executor, Scheduler(kv, limits, preemption=Preemption(kv, FairShare(kv, 8), None, "swap")), frozenset()
    )
    for name in "abcdef":
        sampling = SamplingParams(max_tokens=30)
        engine.add_request(EngineRequest(request_id=name, prompt=(ord(name), *range(9)), sampling=sampling))
    swapped, arriving = [], 0
    while engine.has_work:
        engine.step()
        for view in engine.view_tables():
            swapped += [len(view.host_blocks)] if view.host_blocks and not view.num_blocks else []
            arriving += view.states.count(ARRIVING)
            assert len(view.blocks) == view.num_blocks == len(view.states)
        engine.drain_outputs()
    assert engine.stats().num_swapped > 0
    assert max(swapped) > 1
    assert arriving > 0
    assert engine.view_tables() == ()


def test_drafts_of_the_last_step_are_shown():
    kv = KVManager(200, SIZE)
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=40, max_prefill_chunk=40, max_model_len=128)
    speculation = Speculation(kv, VOCAB_SIZE, ScriptedDrafter(8, 1000), 8)
    engine = Engine(ScriptedExecutor(200, SIZE), Scheduler(kv, limits, speculation=speculation), frozenset())
    engine.add_request(EngineRequest(request_id="a", prompt=(1, 2), sampling=SamplingParams(max_tokens=60)))
    shown = set()
    while engine.has_work:
        engine.step()
        shown |= {(view.num_drafted, view.num_accepted) for view in engine.view_tables()}
        engine.drain_outputs()
    assert any(0 < num_accepted <= num_drafted for num_drafted, num_accepted in shown)
    assert speculation.last_drafts == {}
