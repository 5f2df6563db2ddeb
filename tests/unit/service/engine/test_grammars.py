"""Grammars in the engine: every answer matches, next to others without, in every kind of request, and after a crash; a
bad one fails only its request."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict
from concurrent import futures

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.sampling_params import BeamSearch, SamplingParams
from model.text.grammar import COMPACT, choice_grammar, json_grammar, lark_grammar, regex_grammar
from model.text.tokenizer import Tokenizer
from service.engine import grammars
from service.engine.grammars import NUM_COMPILING_THREADS, Grammars, MaskBuilder
from service.engine.request import BranchHistory, EngineRequest
from service.errors import EndReason
from tests.fakes.plain_model import PlainModel
from tests.support.beam_reference import search
from tests.support.demo_engine import DEMO, TWO_LAYERS, DemoEngines, grammar_compiler
from tests.support.random_schemas import random_schema
from tests.support.received import run_steps
from tests.support.schema_validator import is_valid
from tests.support.source_tree import ROOT
from tests.unit.service.engine.execution.test_executor import FLOAT32, AheadOps

EOS = 1
TOKENIZER = Tokenizer.read(DEMO)
PROMPT = tuple(TOKENIZER.encode("Once upon a time"))


@pytest.fixture(scope="module")
def engines():
    return DemoEngines(AheadOps(FLOAT32), num_layers=TWO_LAYERS)


@pytest.fixture(scope="module")
def engine(engines):
    return engines.make(max_num_seqs=8, prefix_caching=True)


@pytest.fixture(scope="module")
def plain():
    engines = DemoEngines(NumpyOps(FLOAT32), num_layers=TWO_LAYERS)
    return PlainModel(engines.model, engines.eos_token_ids)


def ask(name: str, grammar: str | None, history: tuple[BranchHistory, ...] = (), **params) -> EngineRequest:
    params = {"max_tokens": 120, "temperature": 1.0, "seed": 3} | params
    return EngineRequest(
        request_id=name, prompt=PROMPT, sampling=SamplingParams(grammar=grammar, **params), history=history
    )


def run(engine, *requests, max_steps=None):
    """Return tokens by request and branch, and ends by request."""
    received, ends = defaultdict(list), {}
    for request in requests:
        engine.add_request(request)
    num_steps = 0
    while num_steps != max_steps:
        engine.step()
        engine.check_invariants()
        num_steps += 1
        outputs = engine.drain_request_outputs()
        for output in outputs:
            for part in output.parts:
                received[output.request_id, part.branch] += part.token_ids
            if output.end is not None:
                ends[output.request_id] = output.end
        if not engine.has_work:
            break
    return received, ends


def preempt_all(engine):
    """Preempt all running groups."""
    scheduler = engine._scheduler
    for group in {sequence.group for sequence in engine.running}:
        scheduler.preemption._preempt(group, scheduler.running)
        scheduler._requeue([group])


def text(ids) -> str:
    return TOKENIZER.decode([token for token in ids if token != EOS])


def test_every_answer_fits_its_schema(engines):
    schemas = [random_schema(random.Random(seed), depth=2) for seed in range(5)]
    asked = [
        ask(str(i), json_grammar(schema, whitespace=COMPACT), seed=i, temperature=i % 3 / 2, max_tokens=130)
        for i, schema in enumerate(schemas)
    ]
    received, ends = run(engines.make(num_blocks=300), *asked)
    finished = [i for i in range(len(schemas)) if ends[str(i)] is EndReason.STOP]
    assert len(finished) >= 3
    for i in finished:
        assert is_valid(json.loads(text(received[str(i), 0])), schemas[i])


def test_others_get_what_they_would_get_alone(engines):
    free = ask("free", None, max_tokens=30)
    alone, _ = run(engines.make(), free)
    received, _ = run(engines.make(), ask("bound", regex_grammar("[a-z ]{40}")), free)
    assert received["free", 0] == alone["free", 0]
    assert re.fullmatch("[a-z ]{40}", text(received["bound", 0]))


def test_an_answer_that_can_only_end_ends_without_eos(engines):
    received, ends = run(engines.make(), ask("a", choice_grammar(["the cat"]), ignore_eos=True, min_tokens=50))
    assert text(received["a", 0]) == "the cat"
    assert EOS not in received["a", 0]
    assert ends == {"a": EndReason.STOP}


def test_length_cuts_and_the_stop_ids_end(engines):
    comma = TOKENIZER.encode(",")[-1]
    received, ends = run(
        engines.make(),
        ask("cut", regex_grammar("[a-z]{300}"), max_tokens=10),
        ask("stopped", regex_grammar("a(,a)*"), stop_token_ids=(comma,), logit_bias=((comma, 100.0),)),
    )
    assert (len(received["cut", 0]), ends["cut"]) == (10, EndReason.LENGTH)
    assert (received["stopped", 0][-1], ends["stopped"]) == (comma, EndReason.STOP)


def ids_with(letter: bytes) -> tuple[int, ...]:
    """All tokens that hold this letter."""
    return tuple(token for token in range(TOKENIZER.vocab_size) if letter in TOKENIZER.token_bytes(token))


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"beam": BeamSearch(width=2)}])
def test_a_stop_id_that_alone_fits_within_min_tokens_is_a_token_and_ends_nothing(engines, params):
    stops = ids_with(b"b")
    received, ends = run(
        engines.make(),
        ask("bound", regex_grammar("ab[ac]{2}c"), stop_token_ids=stops, min_tokens=4, **params),
        ask("free", None, max_tokens=5, ignore_eos=True),
    )
    assert re.fullmatch("ab[ac]{2}c", text(received["bound", 0]))
    assert set(received["bound", 0]) & set(stops)
    assert ends == {"bound": EndReason.STOP, "free": EndReason.LENGTH}


@pytest.mark.parametrize("params", [{}, {"beam": BeamSearch(width=2)}])
def test_a_form_behind_which_only_an_end_fits_ends_within_min_tokens(engines, params):
    """The grammar names EOS, as it may: the text is complete without it, and nothing else follows."""
    grammar = lark_grammar('start: "the" <|end|>?')
    received, ends = run(engines.make(), ask("a", grammar, min_tokens=30, **params))
    assert (text(received["a", 0]), ends["a"]) == ("the", EndReason.STOP)
    other = TOKENIZER.encode(",")[-1]
    received, ends = run(
        engines.make(),
        ask("b", grammar, min_tokens=30, stop_token_ids=(other,), logit_bias=((other, 100.0),), **params),
    )
    assert ends["b"] is EndReason.STOP


@pytest.mark.parametrize("text", ['start: <|end|> "x"', 'start: "the" <|end|>', "start: start"])
@pytest.mark.parametrize(
    "params", [{}, {"logit_bias": ((EOS, 100.0),)}, {"n": 2, "best_of": 2}, {"beam": BeamSearch(width=2)}]
)
def test_a_grammar_that_no_token_fits_fails_its_own_request_alone(engines, text, params):
    _, ends = run(engines.make(), ask("bad", lark_grammar(text), **params), ask("good", choice_grammar(["the cat"])))
    assert ends == {"bad": EndReason.GRAMMAR, "good": EndReason.STOP}


def test_branches_go_their_own_ways(engines):
    pattern = "[a-z]{3,6}-[0-9]{4}"
    received, ends = run(engines.make(), ask("n", regex_grammar(pattern), n=4, best_of=5))
    answers = [text(ids) for ids in received.values()]
    assert len(answers) == 5
    assert all(re.fullmatch(pattern, answer) for answer in answers)
    assert len(set(answers)) > 1
    assert ends == {"n": EndReason.STOP}


def test_beams_hold_to_the_grammar(engines):
    pattern = "(red|green|blue)( and (red|green|blue))?"
    received, ends = run(
        engines.make(), ask("b", regex_grammar(pattern), n=3, temperature=0.0, beam=BeamSearch(width=4))
    )
    answers = [text(received["b", i]) for i in range(3)]
    assert all(re.fullmatch(pattern, answer) for answer in answers)
    assert len({tuple(received["b", i]) for i in range(3)}) == 3  # some perhaps alike in text, in other tokens
    assert ends == {"b": EndReason.STOP}


CHOICES = choice_grammar(["yes", "no", "the cat", "the cat sat"])
FORM = {"properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}, "required": ["a", "b"], "type": "object"}
FEW = (CHOICES, regex_grammar("(red|green|blue)( and (red|green|blue))?"), json_grammar(FORM, whitespace=COMPACT))
"""Each grammar allows fewer tokens than the beam width at some position, and more after it."""


@pytest.mark.parametrize("params", [{"min_tokens": 12}, {"ignore_eos": True}], ids=str)
@pytest.mark.parametrize("grammar", FEW)
def test_beams_match_the_reference_however_few_tokens_a_grammar_allows(engine, plain, grammar, params):
    beam = BeamSearch(width=8, early_stopping="never")
    request = ask("b", grammar, n=8, max_tokens=13, beam=beam, **params)
    engine.add_request(request)
    received = run_steps(engine, num_steps=4)
    while engine.has_work:
        preempt_all(engine)
        run_steps(engine, received, num_steps=4)
    branches = received["b"].branches
    sampling, first = request.sampling, engine._grammars._compiler.result().compile(grammar)
    stops = frozenset() if sampling.ignore_eos else frozenset({EOS})

    def at(output):
        matcher = first.copy()
        assert matcher.advance(output)
        return matcher

    def logprobs_after(tokens):
        words, output = np.zeros(128, np.uint32), tokens[len(PROMPT) :]
        assert at(output).fill_mask(words, stops)
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")
        return np.where(allowed, plain.logprobs(tokens, sampling, len(PROMPT)), -np.inf)

    def is_complete(output):
        return output[-1] not in stops and at(output).is_finished

    wanted = search(PROMPT, sampling, stops, logprobs_after, is_complete)
    assert [branches[i] for i in range(len(branches))] == [output for output, _, _ in wanted]


def test_a_beam_whose_grammar_grows_beyond_its_limits_fails_its_own_request(engines):
    engine = engines.make(max_num_seqs=9)
    engine.add_request(ask("bad", regex_grammar("[a-z]{50}"), beam=BeamSearch(width=4)))
    engine.add_request(ask("good", regex_grammar("[a-z]{9}")))
    while not any(sequence.num_output_tokens > 3 for sequence in engine.running if sequence.request_id == "bad"):
        engine.step()
    for sequence in engine.running:
        if sequence.request_id == "bad":
            sequence.matcher.advance((0,))  # as a limit would leave it
    _, ends = run(engine)
    assert ends == {"bad": EndReason.GRAMMAR, "good": EndReason.STOP}


def test_penalties_and_a_grammar_together(engines):
    params = {"temperature": 0.0, "frequency_penalty": 2.0}
    free = ask("b", None, max_tokens=30, ignore_eos=True, **params)
    received, _ = run(engines.make(), ask("a", regex_grammar("[a-z]{60}"), **params), free)
    assert re.fullmatch("[a-z]{60}", text(received["a", 0]))
    assert len(set(received["b", 0])) > 15


def test_another_engine_goes_on_behind_what_was_received(engines):
    for params in ({}, {"n": 2, "best_of": 2}):
        request = ask(
            "r", json_grammar(random_schema(random.Random(5), depth=2), whitespace=COMPACT), seed=11, **params
        )
        whole, ends = run(engines.make(), request)
        before, early = run(engines.make(), request, max_steps=14)
        assert not early
        past = tuple(BranchHistory(token_ids=tuple(before["r", branch])) for branch in range(request.sampling.n))
        assert all(one.token_ids for one in past)
        after, ends_after = run(engines.make(), ask("r", request.sampling.grammar, past, seed=11, **params))
        for branch, one in enumerate(past):
            assert [*one.token_ids, *after["r", branch]] == whole["r", branch]
        assert ends_after == ends


def test_a_branch_that_ended_outside_its_grammar_does_not_fail_the_others(engines):
    """It ended at a stop id that the grammar allowed as an end only: nothing is repeated."""
    stop, *letters = TOKENIZER.encode("!")[-1], *TOKENIZER.encode("abc")[1:]
    ended = BranchHistory(token_ids=(*letters, stop), end=EndReason.STOP)
    params = {"n": 2, "best_of": 2, "stop_token_ids": (stop,)}
    for past in ((ended, BranchHistory()), (BranchHistory(token_ids=ended.token_ids), BranchHistory())):
        received, ends = run(engines.make(), ask("r", regex_grammar("[a-z]{3,9}"), past, **params))
        assert ends == {"r": EndReason.STOP}
        assert re.fullmatch("[a-z]{3,9}", text(token for token in received["r", 1] if token != stop))
        assert not received["r", 0]


def test_a_finished_past_ends_at_once(engines):
    history = (BranchHistory(token_ids=tuple(TOKENIZER.encode("yes")[1:])),)
    assert text(history[0].token_ids) == "yes"
    received, ends = run(engines.make(), ask("r", choice_grammar(["yes", "no"]), history))
    assert (received["r", 0], ends) == ([], {"r": EndReason.STOP})


def test_preempted_and_taken_up_again(engines):
    asked = [ask(str(i), regex_grammar("[a-z]{90,99}"), seed=i) for i in range(5)]
    engine = engines.make(num_blocks=17)
    received, _ = run(engine, *asked)
    assert engine.stats().num_preemptions > 0
    roomy, _ = run(engines.make(), *asked)
    assert received == roomy
    assert all(re.fullmatch("[a-z]{90,99}", text(ids)) for ids in received.values())


@pytest.mark.parametrize("grammar", ["start: missing", 'start: "a' + "a" * (300 << 10) + '"'])
def test_a_grammar_that_cannot_be_had_fails_its_own_request(engines, grammar):
    received, ends = run(engines.make(), ask("bad", grammar), ask("good", choice_grammar(["the dog"])))
    assert ends == {"bad": EndReason.GRAMMAR, "good": EndReason.STOP}
    assert text(received["good", 0]) == "the dog"


def test_one_that_grows_beyond_its_limits_fails_its_own_request(engines):
    engine = engines.make()
    engine.add_request(ask("bad", regex_grammar("[a-z]{50}")))
    engine.add_request(ask("good", regex_grammar("[a-z]{9}")))
    while not any(sequence.num_output_tokens > 3 for sequence in engine.running):
        engine.step()
    next(one for one in engine.running if one.request_id == "bad").matcher.advance((0,))  # as a limit would leave it
    _, ends = run(engine)
    assert ends == {"bad": EndReason.GRAMMAR, "good": EndReason.STOP}


def test_a_past_that_does_not_fit_is_no_crash(engines):
    _, ends = run(engines.make(), ask("r", choice_grammar(["yes"]), (BranchHistory(token_ids=(0, 0)),)))
    assert ends == {"r": EndReason.GRAMMAR}


def test_without_a_compiler_the_request_ends(engines):
    engine = engines.make()
    engine._grammars = None
    assert run(engine, ask("r", choice_grammar(["yes"])))[1] == {"r": EndReason.GRAMMAR}


def test_while_one_compiles_others_run_and_it_can_be_cancelled(engines):
    released = threading.Event()
    engine = engines.make()
    compiler = grammar_compiler()

    def slow_compiler():
        assert released.wait(30)
        return compiler

    engine._grammars = Grammars(slow_compiler)
    engine.add_request(ask("slow", choice_grammar(["yes"])))
    engine.add_request(ask("gone", choice_grammar(["yes"])))
    try:
        _, ends = run(engine, ask("other", None, max_tokens=5, ignore_eos=True), max_steps=8)
        assert ends == {"other": EndReason.LENGTH}
        engine.cancel("gone", EndReason.CANCELLED)
        start_s = time.perf_counter()
        engine.step()
        assert time.perf_counter() - start_s < 5  # it waits a little, not for the grammar
    finally:
        released.set()
    received, ends = run(engine)
    assert ends == {"gone": EndReason.CANCELLED, "slow": EndReason.STOP}
    assert text(received["slow", 0]) == "yes"


def test_grammars_that_never_compile_fail_their_own_requests_alone(engines, monkeypatch):
    monkeypatch.setattr(grammars, "MAX_COMPILE_S", 0.3)
    released = threading.Event()
    compiler = grammar_compiler()
    compile_at_once = compiler.compile

    def compile_at_last(text):
        if "never" in text:
            released.wait(60)
        return compile_at_once(text)

    compiler.compile = compile_at_last
    engine = engines.make()
    engine._grammars = Grammars(lambda: compiler)
    try:
        hostile = [ask(f"bad{i}", choice_grammar([f"never {i}"])) for i in range(NUM_COMPILING_THREADS + 1)]
        received, ends = run(engine, *hostile, ask("good", choice_grammar(["yes"])))
    finally:
        released.set()
    assert ends == {**{one.request_id: EndReason.GRAMMAR for one in hostile}, "good": EndReason.STOP}
    assert text(received["good", 0]) == "yes"


PROGRAM = """
import threading
from service.engine.compile_threads import CompileThreads
call = CompileThreads(1).submit(threading.Event().wait)
while call.began_at_s is None:
    pass
"""


def test_a_process_ends_whatever_it_compiles():
    assert subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, timeout=60, check=False).returncode == 0


def test_masks_of_many_sequences_match_each_alone(engines):
    engine = engines.make(max_num_seqs=30, num_blocks=400)
    for i in range(20):
        engine.add_request(
            ask(str(i), None if i % 4 == 0 else regex_grammar(f"[{chr(97 + i)}0-9]{{30}}"), max_tokens=40)
        )
    futures.wait([call.future for call in engine._grammars._compiling.values()])  # else some end before all have begun
    while len(engine.running) < 20:
        engine.step()
    sequences = engine.running
    builder = MaskBuilder(4096)
    builder._num_threads = 3
    mask = builder.build(sequences)
    assert (mask.rows >= 0).tolist() == [one.matcher is not None for one in sequences]
    for row, sequence in zip(mask.rows, sequences, strict=True):
        if sequence.matcher is not None:
            words = np.zeros(128, np.uint32)
            assert sequence.matcher.fill_mask(words, ())
            np.testing.assert_array_equal(mask.words[row], words)
    assert builder.build(one for one in sequences if one.matcher is None) is None
    engine.cancel_all(EndReason.CANCELLED)
