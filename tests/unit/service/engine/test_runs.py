"""Several tokens from one step: every request gets the tokens, ends, log-probabilities and cached blocks that it gets
one token at a time."""

from itertools import pairwise

import pytest

from model.sampling_params import BeamSearch, SamplingParams
from service.engine.engine import Engine
from service.engine.kv.kv_manager import KVManager
from service.engine.request import BranchHistory, EngineRequest
from service.engine.scheduling.limits import Limits
from service.engine.scheduling.scheduler import Scheduler
from service.engine.scheduling.speculation import Speculation
from service.errors import EndReason
from tests.fakes.scripted_executor import VOCAB_SIZE, ScriptedDrafter, ScriptedExecutor, next_token
from tests.support.random_operations import run_randomly

BLOCK_SIZE = 4
PROMPT = (1, 2, 3, 4, 5, 6)


def engine_of(num_drafts, *, num_blocks=200, runs_ahead=False, wrong_every=5, silent_every=0, nan_after=None):
    executor = ScriptedExecutor(num_blocks, BLOCK_SIZE, nan_after, runs_ahead=runs_ahead, silent_every=silent_every)
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=40, max_prefill_chunk=40, max_model_len=128)
    kv = KVManager(num_blocks, BLOCK_SIZE, prefix_caching=True)
    speculation = Speculation(kv, VOCAB_SIZE, ScriptedDrafter(num_drafts, wrong_every)) if num_drafts else None
    return Engine(executor, Scheduler(kv, limits, speculation=speculation), frozenset()), executor


def request(name="a", prompt=PROMPT, history=(), **params):
    sampling = SamplingParams(**{"max_tokens": 40} | params)
    return EngineRequest(request_id=name, prompt=tuple(prompt), sampling=sampling, history=history)


def run(engine, *requests):
    """(request id, branch) -> (tokens, log-probabilities, end); request id -> (end, choices, usage)."""
    branches, ends = {}, {}
    for one in requests:
        engine.add_request(one)
    while engine.has_work:
        engine.step()
        engine.check_invariants()
        for output in engine.drain_request_outputs():
            assert output.request_id not in ends, "an output behind the end"
            for part in output.parts:
                tokens, logprobs, end = branches.get((output.request_id, part.branch), ((), (), None))
                assert end is None, "a token behind the end of its branch"
                branches[output.request_id, part.branch] = tokens + part.token_ids, logprobs + part.logprobs, part.end
            if output.end is not None:
                usage = output.num_prompt_tokens, output.num_output_tokens, output.num_cached_tokens
                ends[output.request_id] = output.end, output.choices, usage
    return branches, ends


ALONE = [
    token
    for tokens in [list(PROMPT)]
    for _ in range(40)
    for token in [next_token(tokens)]
    if tokens.append(token) is None
]


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("silent_every", [0, 3])
@pytest.mark.parametrize("num_drafts", [4, 15])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"max_tokens": 7},
        {"stop_token_ids": (ALONE[9],)},
        {"stop_token_ids": (ALONE[9], ALONE[21]), "min_tokens": 15},
        {"n": 3, "best_of": 3},
        {"n": 2, "best_of": 4, "logprobs": 2, "stop_token_ids": (ALONE[9], 11, 12, 13)},
        {"logprobs": 0},
        {"presence_penalty": 0.5},
        {"beam": BeamSearch(width=2), "n": 2, "max_tokens": 6},
    ],
    ids=["plain", "max_tokens", "stop", "min_tokens", "n", "best_of", "logprobs", "penalty", "beam"],
)
def test_a_request_gets_what_it_gets_token_by_token(params, num_drafts, silent_every, runs_ahead):
    engine, executor = engine_of(num_drafts, silent_every=silent_every, runs_ahead=runs_ahead)
    requests = [request(**params), request("other", (9, 9))]
    assert run(engine, *requests) == run(engine_of(0)[0], *requests)
    has_drafts = any(chunk.drafts for plan in executor.plans for chunk in plan.chunks)
    assert has_drafts


def test_right_drafts_take_fewer_steps():
    engine, executor = engine_of(4, wrong_every=1000)
    branches, _ = run(engine, request())
    assert branches["a", 0][0] == tuple(ALONE)
    assert len(executor.plans) == 1 + 8  # the prompt with a token, then 39 tokens, five a step
    assert engine.stats().num_output_tokens == 40


def test_no_draft_reaches_beyond_the_last_token():
    engine, executor = engine_of(15, wrong_every=1000)
    run(engine, request(max_tokens=12))
    assert max(chunk.end for plan in executor.plans for chunk in plan.chunks) == len(PROMPT) + 11


def test_what_a_run_computed_is_found_in_the_prefix_cache():
    """The number of cached tokens equals that of a request without drafts, also if a run ended it."""
    for num_tokens in range(1, 20):
        found = []
        for num_drafts in (0, 6):
            engine, _ = engine_of(num_drafts, wrong_every=1000)
            run(engine, request(max_tokens=num_tokens))
            _, ends = run(engine, request("again", (*PROMPT, *ALONE[:num_tokens], 1), max_tokens=1))
            found.append(ends["again"][2][2])
        assert found[0] == found[1] > 0


def test_a_request_goes_on_from_any_token_of_a_run():
    for num_before in range(1, 20):
        history = (BranchHistory(token_ids=tuple(ALONE[:num_before])),)
        branches, ends = run(engine_of(5)[0], request(history=history))
        assert branches["a", 0][0] == tuple(ALONE[num_before:])
        assert ends["a"][0] is EndReason.LENGTH


def test_a_run_without_finite_numbers_ends_its_request_alone():
    bad = (50, 51, 52)
    after = [next_token([*bad])]
    after.append(next_token([*bad, *after]))
    assert after[1] not in (*PROMPT, *ALONE)
    branches, ends = run(engine_of(6, nan_after=after[1], wrong_every=1000)[0], request("bad", bad), request())
    assert ends["bad"][0] is EndReason.NUMERICAL_ERROR
    assert branches["a", 0][0] == tuple(ALONE)


def test_drafts_preempt_nothing_and_keep_within_the_budget():
    engine, executor = engine_of(15, num_blocks=33)
    names = [str(number) for number in range(6)]
    branches, _ = run(engine, *(request(name, (int(name), 3)) for name in names))
    plain, _ = run(engine_of(0)[0], *(request(name, (int(name), 3)) for name in names))
    assert branches == plain
    assert max(plan.num_tokens for plan in executor.plans) <= 40


def test_a_stream_gets_each_token_once_in_order():
    engine, _ = engine_of(4, wrong_every=1000)
    engine.add_request(request())
    seen = []
    while engine.has_work:
        engine.step()
        outputs = engine.drain_request_outputs()
        seen += [token for output in outputs for part in output.parts for token in part.token_ids]
        assert all(first.num_output_tokens < second.num_output_tokens for first, second in pairwise(outputs))
        assert not outputs or outputs[-1].num_output_tokens == len(seen)
    assert seen == ALONE


def test_random_operations_with_drafts():
    assert run_randomly(6_000, seed=5, world_every=1000)["ended"] > 100


def test_beams_are_not_drafted():
    engine, executor = engine_of(4)
    run(engine, request(beam=BeamSearch(width=2), n=2, max_tokens=6))
    assert not any(chunk.drafts for plan in executor.plans for chunk in plan.chunks)
