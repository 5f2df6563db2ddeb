"""The engine on a scripted model: every request gets its tokens alone, in any batch."""

from itertools import pairwise

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from model.sampling_params import SamplingParams
from service.engine.engine import Engine
from service.engine.kv.kv_manager import KVManager
from service.engine.request import EngineRequest
from service.engine.scheduling.limits import Limits
from service.engine.scheduling.scheduler import Scheduler
from service.errors import EndReason
from tests.fakes.scripted_executor import ScriptedExecutor, next_token
from tests.support.num_examples import num_examples

EOS = 7


@pytest.fixture(params=[False, True], ids=["in step", "one step ahead"])
def runs_ahead(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["", "caching"])
def make_engine(request, runs_ahead):
    def make(**sizes):
        return engine_of(runs_ahead=runs_ahead, caches=request.param, **sizes)

    return make


def engine_of(
    runs_ahead, caches=False, num_blocks=64, block_size=4, max_num_seqs=8, budget=16, max_len=128, nan_after=None
):
    executor = ScriptedExecutor(num_blocks, block_size, nan_after, runs_ahead)
    limits = Limits(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_prefill_chunk=budget, max_model_len=max_len
    )
    kv = KVManager(num_blocks, block_size, prefix_caching=caches)
    return Engine(executor, Scheduler(kv, limits), frozenset({EOS})), executor


def request(name, prompt, **params):
    return EngineRequest(request_id=name, prompt=tuple(prompt), sampling=SamplingParams(**{"max_tokens": 8} | params))


def alone(prompt, max_tokens, stops=frozenset({EOS})):
    """Return the scripted model's tokens after the prompt, and why it ends."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens))
        if tokens[-1] in stops:
            return tokens[len(prompt) :], EndReason.STOP
        if len(tokens) - len(prompt) == max_tokens:
            return tokens[len(prompt) :], EndReason.LENGTH


def run(engine):
    """Request id -> (tokens, end); checks that nothing follows an end."""
    received = {}
    while engine.has_work:
        engine.step()
        engine.check_invariants()
        collect(engine, received)
    collect(engine, received)
    return received


def collect(engine, received):
    for output in engine.drain_request_outputs():
        tokens, end = received.get(output.request_id, ([], None))
        assert end is None, "an output behind the end"
        tokens = tokens + [token for part in output.parts for token in part.token_ids]
        assert output.num_output_tokens == len(tokens)
        received[output.request_id] = (tokens, output.end)


def test_many_requests_get_what_each_would_get_alone(make_engine):
    engine, _ = make_engine()
    prompts = {str(n): [n, *range(n % 23)] for n in range(40)}
    for name, prompt in prompts.items():
        engine.add_request(request(name, prompt, max_tokens=5 + int(name) % 11))
    received = run(engine)
    assert received == {name: alone(prompt, 5 + int(name) % 11) for name, prompt in prompts.items()}
    assert engine.stats().num_blocks_used == 0


def test_a_long_prompt_is_computed_in_chunks_during_decodes(make_engine):
    engine, executor = make_engine(budget=8)
    engine.add_request(request("short", [1], max_tokens=20, ignore_eos=True))
    engine.step()
    engine.add_request(request("long", range(50), max_tokens=2, ignore_eos=True))
    run(engine)
    mixed = [plan for plan in executor.plans if len(plan.chunks) == 2]
    assert len(mixed) >= 6
    assert all(plan.num_tokens <= 8 and plan.chunks[0].length == 1 for plan in mixed)


def test_preempted_requests_come_back_and_lose_nothing(make_engine):
    engine, _ = make_engine(num_blocks=12, max_len=48)
    for n in range(6):
        engine.add_request(request(str(n), [n, 50, 51], max_tokens=30, ignore_eos=True))
    received = run(engine)
    assert engine.stats().num_preemptions > 0
    for n in range(6):
        assert received[str(n)] == alone([n, 50, 51], 30, stops=frozenset())


def test_the_oldest_request_is_never_preempted(make_engine):
    engine, executor = make_engine(num_blocks=10, max_len=40)
    for n in range(5):
        engine.add_request(request(str(n), [n], max_tokens=35, ignore_eos=True))
    run(engine)
    oldest_starts = [c.start for plan in executor.plans for c in plan.chunks if c.sequence.request_id == "0"]
    assert engine.stats().num_preemptions > 0
    assert oldest_starts == sorted(set(oldest_starts))


@pytest.mark.parametrize("params", [{"stop_token_ids": (3, 11, 29)}, {"ignore_eos": True}, {"min_tokens": 6}])
def test_ends(make_engine, params):
    engine, _ = make_engine()
    engine.add_request(request("a", [5, 6], max_tokens=90, **params))
    tokens, end = run(engine)["a"]
    stops = {*params.get("stop_token_ids", ()), *(() if params.get("ignore_eos") else (EOS,))}
    expected = [5, 6]
    while True:
        expected.append(next_token(expected))
        made = len(expected) - 2
        if (expected[-1] in stops and made >= params.get("min_tokens", 0)) or made == 90:
            break
    assert tokens == expected[2:]
    assert end is (EndReason.STOP if tokens[-1] in stops else EndReason.LENGTH)


def test_what_can_never_fit_ends_at_once(make_engine):
    engine, _ = make_engine(max_len=20)
    engine.add_request(request("big", range(15), max_tokens=6))
    engine.add_request(request("empty", []))
    assert run(engine) == {"big": ([], EndReason.TOO_LARGE), "empty": ([], EndReason.TOO_LARGE)}


def test_a_nan_ends_only_its_own_request(make_engine):
    engine, _ = make_engine(nan_after=96)
    engine.add_request(request("bad", [1, 96]))
    engine.add_request(request("good", [1, 2], ignore_eos=True, max_tokens=3))
    received = run(engine)
    assert received["bad"] == ([], EndReason.NUMERICAL_ERROR)
    assert received["good"] == alone([1, 2], 3, stops=frozenset())


def test_cancel_frees_blocks_before_the_next_step(make_engine):
    engine, _ = make_engine()
    engine.add_request(request("a", range(20), ignore_eos=True, max_tokens=50))
    engine.step()
    assert engine.stats().num_blocks_used > 0
    engine.cancel("a", EndReason.CANCELLED)
    assert engine.stats().num_blocks_used == 0
    assert [output.end for output in engine.drain_request_outputs()] == [EndReason.CANCELLED]
    engine.cancel("a", EndReason.CANCELLED)
    assert engine.drain_request_outputs() == []


def test_the_same_id_twice_is_refused(make_engine):
    engine, _ = make_engine()
    engine.add_request(request("a", [1]))
    with pytest.raises(ValueError, match="already here"):
        engine.add_request(request("a", [2]))


def test_later_requests_begin_with_what_earlier_ones_have_left(runs_ahead):
    engine, executor = engine_of(runs_ahead, caches=True)
    engine.add_request(request("first", range(30), max_tokens=10, ignore_eos=True))
    tokens, _ = run(engine)["first"]
    turn = [*range(30), *tokens, 5, 6]
    engine.add_request(request("next", turn, max_tokens=4, ignore_eos=True))
    cached = []
    while engine.has_work:
        engine.step()
        cached += [output.num_cached_tokens for output in engine.drain_request_outputs()]
    assert cached == [36] * 4  # the first one has computed 39; its last block was not full
    assert sum(c.length for plan in executor.plans for c in plan.chunks if c.sequence.request_id == "next") == 6 + 3


def test_requests_of_one_beginning_compute_it_once_though_they_come_together(runs_ahead):
    engine, executor = engine_of(runs_ahead, caches=True, budget=256)
    prompts = {str(n): [*range(40), 60 + n] for n in range(8)}
    for name, prompt in prompts.items():
        engine.add_request(request(name, prompt, max_tokens=3))
    assert run(engine) == {name: alone(prompt, 3) for name, prompt in prompts.items()}
    assert executor.plans[0].num_tokens == 41 + 7


class EngineMachine(RuleBasedStateMachine):
    """Add, step and cancel in any order in a pool that is too small, against what each request would get alone."""

    @initialize(runs_ahead=st.booleans(), caches=st.booleans())
    def start(self, runs_ahead, caches):
        self.engine, _ = engine_of(runs_ahead, caches, num_blocks=14, max_num_seqs=5, budget=11, max_len=56)
        self.wanted, self.received, self.cancelled = {}, {}, set()

    @rule(
        prompt=st.lists(st.integers(0, 96), min_size=1, max_size=30)
        | st.lists(st.integers(0, 1), min_size=1, max_size=30),
        max_tokens=st.integers(1, 25),
        penalty=st.sampled_from([0.0, 0.0, 0.0, 1.0]),
    )
    def add(self, prompt, max_tokens, penalty):
        name = str(len(self.wanted))
        self.wanted[name] = alone(prompt, max_tokens)
        self.engine.add_request(request(name, prompt, max_tokens=max_tokens, presence_penalty=penalty))

    @rule(count=st.integers(1, 12))
    def step(self, count):
        for _ in range(count):
            self.engine.step()
        collect(self.engine, self.received)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def cancel(self, data):
        name = data.draw(st.sampled_from(sorted(self.wanted)))
        self.engine.cancel(name, EndReason.CANCELLED)
        collect(self.engine, self.received)

    @invariant()
    def books_agree(self):
        self.engine.check_invariants()

    def teardown(self):
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.engine.step()
        assert not self.engine.has_work, "a request starves"
        collect(self.engine, self.received)
        for name, (tokens, end) in self.wanted.items():
            received_tokens, received_end = self.received[name]
            if received_end is EndReason.CANCELLED:
                assert received_tokens == tokens[: len(received_tokens)]
            else:
                assert (received_tokens, received_end) == (tokens, end)
        assert self.engine.stats().num_blocks_used == 0


EngineMachine.TestCase.settings = hypothesis_settings(
    max_examples=num_examples(60), stateful_step_count=40, deadline=None
)
test_engine_machine = EngineMachine.TestCase


def test_prompts_get_a_smaller_share_of_a_step_while_others_decode():
    executor = ScriptedExecutor(64, 4)
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=32, max_prefill_chunk=6, max_model_len=128)
    engine = Engine(executor, Scheduler(KVManager(64, 4), limits), frozenset({EOS}))
    engine.add_request(request("alone", range(30), max_tokens=30, ignore_eos=True))
    engine.step()
    engine.add_request(request("later", range(20, 50), max_tokens=2, ignore_eos=True))
    run(engine)
    engine.add_request(request("a", range(40, 70), max_tokens=9, ignore_eos=True))
    engine.step()
    for name in ("b", "c", "d"):
        engine.add_request(request(name, range(60, 90), max_tokens=2, ignore_eos=True))
    run(engine)
    lengths = [sum(c.length for c in plan.chunks if c.length > 1) for plan in executor.plans]
    assert lengths[0] == 30
    assert lengths[1:6] == [6, 6, 6, 6, 6]
    with_three = next(n for n, plan in enumerate(executor.plans) if plan.chunks[-1].sequence.request_id == "b")
    assert lengths[with_three] == 3 * 6 - 1


def test_a_long_queue_gets_more_of_a_step_than_a_short_one():
    executor = ScriptedExecutor(4096, 4)
    limits = Limits(max_num_seqs=512, max_num_batched_tokens=512, max_prefill_chunk=16, max_model_len=128)
    engine = Engine(executor, Scheduler(KVManager(4096, 4), limits), frozenset({EOS}))
    engine.add_request(request("first", range(4), max_tokens=124, ignore_eos=True))
    engine.step()
    for number in range(400):
        engine.add_request(request(str(number), range(10), max_tokens=1, ignore_eos=True))
    run(engine)
    prompts = [[c for c in plan.chunks if c.length > 1] for plan in executor.plans[1:]]
    lengths = [sum(c.length for c in chunks) for chunks in prompts if chunks]
    assert lengths[0] == 400 // 64 * 16 - 1
    assert all(later <= earlier + 1 for earlier, later in pairwise(lengths))  # a last token of a prompt is a decode
    assert lengths[-2] == 3 * 16 - 1


def test_a_queue_gets_what_the_device_does_best_and_a_few_prompts_all_they_want():
    executor, asked = ScriptedExecutor(4096, 4), []

    def fit(num_decodes, num_tokens):
        asked.append((num_decodes, num_tokens))
        return min(num_tokens, 25)

    limits = Limits(
        max_num_seqs=8, max_num_batched_tokens=512, max_prefill_chunk=16, max_model_len=128, fit_prompts=fit
    )
    engine = Engine(executor, Scheduler(KVManager(4096, 4), limits), frozenset({EOS}))
    engine.add_request(request("first", range(4), max_tokens=100, ignore_eos=True))
    engine.step()
    for number in range(20):
        engine.add_request(request(str(number), range(10), max_tokens=1, ignore_eos=True))
    run(engine)
    assert asked[0] == (1, 3 * 16 - 1)
    assert all(num_tokens <= 70 for _, num_tokens in asked)  # seven slots
    prompts = [sum(c.length for c in plan.chunks if c.length > 1) for plan in executor.plans[1:]]
    assert prompts[0] == 25
    assert max(prompts) <= 27
    assert len(asked) < sum(1 for length in prompts if length)


def test_tokens_of_each_step_are_counted(make_engine):
    engine, _ = make_engine()
    for name in "ab":
        engine.add_request(request(name, [3, 4, 5], max_tokens=5, ignore_eos=True))
    run(engine)
    stats = engine.stats()
    *counts, total = stats.iteration_tokens
    assert total == stats.num_prompt_tokens + stats.num_output_tokens == 16
    assert sum(counts) == stats.num_steps
    assert counts[:2] == [0, stats.num_steps]  # the first step's 2 x (3 + 1) tokens are 8 at most
