"""n, best_of and beam search on the scripted model: branches share what they have in common, and each says what it
would say alone."""

import pytest

from model.sampling_params import BeamSearch, SamplingParams
from service.engine import beam_search
from service.engine.engine import Engine
from service.engine.kv.kv_manager import KVManager
from service.engine.request import BranchHistory, EngineRequest
from service.engine.scheduling.limits import Limits
from service.engine.scheduling.scheduler import Scheduler
from service.errors import EndReason
from tests.fakes.scripted_executor import ScriptedExecutor, logprobs_after, next_token
from tests.support.beam_reference import search
from tests.support.received import Received, run_steps

EOS = 7
BLOCK = 4


@pytest.fixture(params=[(False, False), (True, False), (True, True)], ids=["in step", "ahead", "ahead, caching"])
def make_engine(request):
    runs_ahead, caching = request.param

    def make(num_blocks=200, max_num_seqs=24, budget=64, max_len=160, nan_after=None, block_size=BLOCK):
        executor = ScriptedExecutor(num_blocks, block_size, nan_after, runs_ahead)
        limits = Limits(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_prefill_chunk=budget, max_model_len=max_len
        )
        kv = KVManager(num_blocks, block_size, prefix_caching=caching)
        return Engine(executor, Scheduler(kv, limits), frozenset({EOS})), executor

    return make


def request(name, prompt, history=(), **params):
    sampling = SamplingParams(**{"max_tokens": 8} | params)
    return EngineRequest(request_id=name, prompt=tuple(prompt), sampling=sampling, history=history)


def alone(prompt, branch, max_tokens, stops=frozenset({EOS})):
    """Return the scripted model's tokens in this branch, and why it ends."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens, branch))
        if tokens[-1] in stops:
            return tokens[len(prompt) :], EndReason.STOP
        if len(tokens) - len(prompt) == max_tokens:
            return tokens[len(prompt) :], EndReason.LENGTH


def test_a_request_counts_once_however_many_branches_run(make_engine):
    engine, _ = make_engine()
    engine.add_request(request("a", range(9), n=4, best_of=4, max_tokens=20, ignore_eos=True))
    engine.add_request(request("b", [9, 8], max_tokens=20, ignore_eos=True))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_sequences_running) == (2, 5)


@pytest.mark.parametrize("prompt", [range(1), range(8), range(50, 77)], ids=len)
def test_branches_say_what_each_would_say_alone(make_engine, prompt):
    engine, _ = make_engine(budget=16)
    engine.add_request(request("a", prompt, n=4, best_of=4, max_tokens=20))
    engine.add_request(request("other", [9, 8], max_tokens=20))
    received = run_steps(engine)
    assert received["a"].by_branch() == {branch: alone(prompt, branch, 20) for branch in range(4)}
    assert received["a"].choices == (0, 1, 2, 3)
    assert received["a"].num_output_tokens == sum(len(alone(prompt, branch, 20)[0]) for branch in range(4))
    assert received["other"].by_branch() == {0: alone([9, 8], 0, 20)}
    assert engine.stats().num_blocks_used == 0


@pytest.mark.parametrize(("prompt", "n", "max_tokens"), [((1, 2, 9, 8, 8), 1, 3), ((1, 2, 9), 2, 1)])
def test_what_the_cache_has_keeps_none_out_of_a_pool_that_is_just_large_enough(make_engine, prompt, n, max_tokens):
    """Its block begins like one of theirs: sharing and copying that one would take more blocks than there are."""
    engine, _ = make_engine(num_blocks=2)
    engine.add_request(request("before", [1, 2, 3, 4, 5], max_tokens=1))
    run_steps(engine)
    engine.add_request(request("a", prompt, n=n, max_tokens=max_tokens))
    received = run_steps(engine, num_steps=50)
    assert received["a"].by_branch() == {branch: alone(prompt, branch, max_tokens) for branch in range(n)}


@pytest.mark.parametrize(("length", "num_copies"), [(40, 0), (41, 7), (43, 7)])
def test_eight_branches_hold_one_prompt(make_engine, length, num_copies):
    engine, executor = make_engine()
    engine.add_request(request("a", range(length), n=8, best_of=8, max_tokens=30, ignore_eos=True))
    engine.step()
    assert sum(plan.num_tokens for plan in executor.plans) == length
    assert engine.stats().num_blocks_used == -(-length // BLOCK)
    run_steps(engine, num_steps=8)
    longest = max(len(sequence.token_ids) for sequence in engine.running)
    assert longest > length + BLOCK
    tails = [len(sequence.block_table) - length // BLOCK for sequence in engine.running]
    stats = engine.stats()
    assert stats.num_blocks_used == length // BLOCK + sum(tails)
    assert stats.num_blocks_logical == 8 * (length // BLOCK) + sum(tails)
    own = [sequence.num_computed_tokens - length // BLOCK * BLOCK for sequence in engine.running]
    assert stats.num_slots_held == stats.num_blocks_used * BLOCK
    assert stats.num_slots_filled == length // BLOCK * BLOCK + sum(own)
    run_steps(engine)
    assert engine.stats().num_block_copies == num_copies
    assert sum(plan.num_tokens for plan in executor.plans) <= length + 8 * 30


def test_the_best_of_many_by_mean_logprob(make_engine):
    engine, _ = make_engine()
    prompt = [3, 1, 4]
    engine.add_request(request("a", prompt, n=2, best_of=6, max_tokens=12))
    received = run_steps(engine)["a"]
    answers = {branch: alone(prompt, branch, 12)[0] for branch in range(6)}
    assert received.branches == answers
    means = {}
    for branch, output in answers.items():
        logprobs = [logprobs_after([*prompt, *output[:at]])[token] for at, token in enumerate(output)]
        assert [one.logprob for one in received.logprobs[branch]] == logprobs
        means[branch] = sum(logprobs) / len(logprobs)
    assert received.choices == tuple(sorted(means, key=means.get, reverse=True)[:2])
    assert received.end is received.ends[received.choices[0]]


def test_a_stop_string_ends_one_branch_and_frees_its_blocks(make_engine):
    engine, _ = make_engine()
    engine.add_request(request("a", range(20), n=3, best_of=3, max_tokens=40, ignore_eos=True))
    received = run_steps(engine, num_steps=10)
    before = engine.stats().num_blocks_used
    engine.cancel("a", EndReason.STOP, branch=1)
    engine.check_invariants()
    assert engine.stats().num_blocks_used < before
    received = run_steps(engine, received)["a"]
    assert received.ends == {0: EndReason.LENGTH, 1: EndReason.STOP, 2: EndReason.LENGTH}
    assert [len(received.branches[branch]) for branch in (0, 2)] == [40, 40]
    assert received.branches[1] == alone(range(20), 1, 40, frozenset())[0][: len(received.branches[1])]
    assert received.choices == (0, 1, 2)
    engine.cancel("a", EndReason.STOP, branch=1)
    assert engine.drain_request_outputs() == []


def test_the_last_branch_that_ends_ends_the_request(make_engine):
    engine, _ = make_engine()
    engine.add_request(request("a", [1, 2], n=2, best_of=2, max_tokens=40, ignore_eos=True))
    received = run_steps(engine, num_steps=5)
    for branch in (1, 0):
        engine.cancel("a", EndReason.STOP, branch=branch)
    received = run_steps(engine, received)["a"]
    assert (received.end, received.choices) == (EndReason.STOP, (0, 1))
    assert engine.stats().num_blocks_used == 0


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 5])
def test_the_leader_may_leave_at_any_time(make_engine, num_steps):
    engine, _ = make_engine(budget=8)
    engine.add_request(request("a", range(30), n=3, best_of=3, max_tokens=9, ignore_eos=True))
    received = run_steps(engine, num_steps=num_steps)
    engine.cancel("a", EndReason.STOP, branch=0)
    engine.check_invariants()
    received = run_steps(engine, received)["a"]
    for branch in (1, 2):
        assert received.by_branch()[branch] == alone(range(30), branch, 9, frozenset())
    assert received.choices == (0, 1, 2)


def test_a_parked_branch_may_leave(make_engine):
    engine, _ = make_engine(budget=8)
    engine.add_request(request("a", range(30), n=3, best_of=3, max_tokens=9, ignore_eos=True))
    received = run_steps(engine, num_steps=1)
    engine.cancel("a", EndReason.STOP, branch=2)
    received = run_steps(engine, received)["a"]
    assert received.branches[2] == []
    assert received.by_branch()[1] == alone(range(30), 1, 9, frozenset())


@pytest.mark.parametrize("params", [{"n": 3, "best_of": 3}, {"beam": BeamSearch(width=3), "n": 3}], ids=str)
def test_cancelled_while_it_waits_runs_and_forks(make_engine, params):
    for num_steps in range(8):
        engine, _ = make_engine(budget=8)
        engine.add_request(request("a", range(20), max_tokens=30, **params))
        received = run_steps(engine, num_steps=num_steps)
        engine.cancel("a", EndReason.CANCELLED)
        assert engine.stats().num_blocks_used == 0
        received = run_steps(engine, received)["a"]
        assert (received.end, received.choices) == (EndReason.CANCELLED, ())


def test_preempted_groups_leave_and_return_whole_and_share_again(make_engine):
    engine, executor = make_engine(num_blocks=52, max_len=60, budget=24)
    prompts = {str(number): range(number, number + 22) for number in range(3)}
    for name, prompt in prompts.items():
        engine.add_request(request(name, prompt, n=4, best_of=4, max_tokens=18, ignore_eos=True))
    received, most_held = {}, 0
    while engine.has_work:
        run_steps(engine, received, num_steps=1)
        most_held = max(most_held, engine.stats().num_blocks_used)
    assert engine.stats().num_preemptions > 0
    for name, prompt in prompts.items():
        assert received[name].by_branch() == {branch: alone(prompt, branch, 18, frozenset()) for branch in range(4)}
    starts = [
        (chunk.sequence.request_id, chunk.sequence.branch, chunk.start)
        for plan in executor.plans
        for chunk in plan.chunks
    ]
    assert not [one for one in starts if one[1] > 0 and one[2] < 22], "a prompt was computed for a second branch"


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_other_block_sizes(make_engine, block_size):
    engine, _ = make_engine(block_size=block_size)
    engine.add_request(request("a", range(37), n=4, best_of=4, max_tokens=40, ignore_eos=True))
    engine.add_request(request("b", range(37), n=2, beam=BeamSearch(width=4), max_tokens=12))
    received = run_steps(engine)
    assert received["a"].by_branch() == {branch: alone(range(37), branch, 40, frozenset()) for branch in range(4)}
    assert_beams(received["b"], range(37), n=2, beam=BeamSearch(width=4), max_tokens=12)


def test_a_nan_ends_the_whole_request(make_engine):
    engine, _ = make_engine(nan_after=96)
    engine.add_request(request("bad", [1, 96], n=3, best_of=3))
    received = run_steps(engine)["bad"]
    assert (received.end, received.choices, received.branches) == (EndReason.NUMERICAL_ERROR, (), {})


def test_what_can_never_fit_ends_at_once(make_engine):
    engine, _ = make_engine(num_blocks=20, max_num_seqs=4)
    engine.add_request(request("wide", [1, 2], n=5, best_of=5))
    engine.add_request(request("long", range(20), n=4, best_of=4, max_tokens=15))
    engine.add_request(request("fits", range(20), n=4, best_of=4, max_tokens=12, ignore_eos=True))
    received = run_steps(engine)
    assert [received[name].end for name in ("wide", "long")] == [EndReason.TOO_LARGE] * 2
    assert received["fits"].end is EndReason.LENGTH


def assert_beams(received, prompt, stops=frozenset({EOS}), **params):
    wanted = search(list(prompt), SamplingParams(**params), stops, logprobs_after)[: params.get("n", 1)]
    assert [received.branches[branch] for branch in range(len(wanted))] == [tokens for tokens, _, _ in wanted]
    reasons = [EndReason.STOP if is_stop else EndReason.LENGTH for _, _, is_stop in wanted]
    assert [received.ends[branch] for branch in range(len(wanted))] == reasons
    assert received.choices == tuple(range(len(wanted)))
    assert received.end is reasons[0]


STOPS = tuple(range(0, 60, 3))  # beams end often


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -1.0, 2.5])
def test_beams_match_the_reference(make_engine, width, early_stopping, length_penalty):
    engine, _ = make_engine()
    beam = BeamSearch(width=width, early_stopping=early_stopping, length_penalty=length_penalty)
    params = {"beam": beam, "n": width, "max_tokens": 9, "stop_token_ids": STOPS}
    engine.add_request(request("few stops", range(10), beam=beam, n=width, max_tokens=9))
    engine.add_request(request("many stops", range(9), **params))
    received = run_steps(engine)
    assert_beams(received["few stops"], range(10), beam=beam, n=width, max_tokens=9)
    assert_beams(received["many stops"], range(9), stops=frozenset({EOS, *STOPS}), **params)
    assert engine.stats().num_blocks_used == 0


def test_beams_never_copy_a_full_block(make_engine):
    engine, executor = make_engine()
    engine.add_request(request("a", range(30), beam=BeamSearch(width=8), n=8, max_tokens=40, ignore_eos=True))
    run_steps(engine)
    for plan in executor.plans:
        writers = len(plan.chunks)
        assert len(plan.copies) < max(1, writers), "one of those that write into a block keeps it"
        if plan.chunks[0].start % BLOCK == 0:
            assert plan.copies == ()
    assert engine.stats().num_block_copies > 0


def test_beams_and_their_logprobs_are_sent_at_the_end(make_engine):
    engine, _ = make_engine()
    engine.add_request(request("a", range(5), beam=BeamSearch(width=4), n=2, max_tokens=6, logprobs=3))
    received, outputs = Received(), []
    while engine.has_work:
        engine.step()
        outputs += engine.drain_request_outputs()
    assert [output.end is None for output in outputs] == [True, False]  # one for each answer
    for output in outputs:
        received.hear(output)
    for branch in (0, 1):
        tokens = list(range(5))
        for token, one in zip(received.branches[branch], received.logprobs[branch], strict=True):
            logprobs = logprobs_after(tokens)
            best = sorted(range(len(logprobs)), key=lambda token: (-logprobs[token], token))[:3]
            assert (one.logprob, one.top_ids) == (logprobs[token], tuple(best))
            tokens.append(token)
    assert received.num_output_tokens == sum(map(len, received.branches.values()))


def test_preempted_beams_find_the_same_answers(make_engine):
    engine, _ = make_engine(num_blocks=26, max_len=60, budget=20)
    params = {"beam": BeamSearch(width=4), "n": 4, "max_tokens": 16, "ignore_eos": True}
    for number in range(4):
        engine.add_request(request(str(number), range(number, number + 18), **params))
    received = run_steps(engine)
    assert engine.stats().num_preemptions > 0
    for number in range(4):
        assert_beams(received[str(number)], range(number, number + 18), stops=frozenset(), **params)


@pytest.mark.parametrize("params", [{"n": 3, "best_of": 3}, {"n": 1, "best_of": 3}, {"n": 2, "logprobs": 2}], ids=str)
def test_resumed_after_any_step_it_sends_the_rest(make_engine, params):
    prompt, params = range(10), {"max_tokens": 14, **params}
    engine, _ = make_engine()
    engine.add_request(request("a", prompt, **params))
    whole = run_steps(engine)["a"]
    for num_steps in range(1, 18):
        before, _ = make_engine()
        before.add_request(request("a", prompt, **params))
        received = run_steps(before, num_steps=num_steps)
        if not received:
            continue
        after, _ = make_engine()
        after.add_request(request("a", prompt, history=received["a"].history(len(whole.branches)), **params))
        received = run_steps(after, received)["a"]
        assert received.by_branch() == whole.by_branch()
        assert received.logprobs == whole.logprobs
        assert (received.end, received.choices) == (whole.end, whole.choices)
        assert received.num_output_tokens == whole.num_output_tokens
        assert after.stats().num_blocks_used == 0


@pytest.mark.parametrize("given", [[3, 0, 5], [0, 4, 1], [0, 0, 2]])
def test_branches_taken_up_at_different_lengths(make_engine, given):
    prompt = range(10)
    wanted = {branch: alone(prompt, branch, 12, frozenset()) for branch in range(3)}
    past = tuple(BranchHistory(token_ids=tuple(wanted[branch][0][:count])) for branch, count in enumerate(given))
    engine, executor = make_engine()
    engine.add_request(request("a", prompt, history=past, n=3, best_of=3, max_tokens=12, ignore_eos=True))
    received = run_steps(engine)["a"]
    assert {branch: (wanted[branch][0][count:], EndReason.LENGTH) for branch, count in enumerate(given)} == (
        received.by_branch()
    )
    assert sum(plan.num_tokens for plan in executor.plans) <= len(prompt) + 3 * 12 + 2


def test_a_history_with_an_unsent_end_ends_without_a_step(make_engine):
    prompt, params = range(6), {"n": 2, "best_of": 2, "max_tokens": 5}
    engine, executor = make_engine()
    wanted = {branch: alone(prompt, branch, 5) for branch in range(2)}
    past = tuple(BranchHistory(token_ids=tuple(tokens)) for tokens, _ in wanted.values())
    engine.add_request(request("a", prompt, history=past, **params))
    received = run_steps(engine)["a"]
    assert received.by_branch() == {branch: ([], end) for branch, (_, end) in wanted.items()}
    assert (received.choices, executor.plans) == ((0, 1), [])
    assert received.num_output_tokens == sum(len(tokens) for tokens, _ in wanted.values())


def test_beams_start_over_and_send_what_is_left(make_engine, monkeypatch):
    """An engine that died after emitting parts of its answers."""
    monkeypatch.setattr(beam_search, "MAX_PIECE_TOKENS", 3)
    params = {"beam": BeamSearch(width=2), "n": 2, "max_tokens": 7, "logprobs": 1}
    engine, _ = make_engine()
    engine.add_request(request("a", [5], **params))
    outputs = []
    while engine.has_work:
        engine.step()
        outputs += engine.drain_request_outputs()
    assert len(outputs) == 6
    for num_received in range(7):
        received = Received()
        for output in outputs[:num_received]:
            received.hear(output)
        engine.add_request(request("a", [5], history=received.history(len(received.branches)), **params))
        received = run_steps(engine, {"a": received})["a"]
        assert_beams(received, [5], **params)
        assert [len(received.logprobs[branch]) for branch in (0, 1)] == [7, 7]
        assert received.num_output_tokens == 14
