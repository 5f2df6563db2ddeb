"""Token rules in the engine: samples, beams, grammars, and resumption after any token."""

from __future__ import annotations

import pytest

from model.ops.cpu.ops import NumpyOps
from model.sampling_params import BeamSearch, ReasoningBudget, TokenRules
from model.text.grammar import regex_grammar
from model.text.grammar_task import GrammarSpec, GrammarTask, ReasoningRule, write_grammar
from model.text.tokenizer import Tokenizer
from service.engine.request import BranchHistory
from service.errors import EndReason
from tests.support.demo_engine import DEMO, DemoEngines
from tests.unit.service.engine.execution.test_executor import FLOAT32
from tests.unit.service.engine.test_grammars import ask, run

TOKENIZER = Tokenizer.read(DEMO)
END = tuple(TOKENIZER.encode("</think>", add_special_tokens=False))
BUDGET = ReasoningBudget(max_tokens=3, start="<think>", end="</think>", end_ids=END, is_open=True)


@pytest.fixture(scope="module")
def engine():
    return DemoEngines(NumpyOps(FLOAT32)).make(max_num_seqs=8, prefix_caching=True)


def texts(received):
    return [TOKENIZER.decode(tokens) for _, tokens in sorted(received.items())]


@pytest.mark.parametrize("params", [{"n": 2, "best_of": 3}, {"temperature": 0.0, "logprobs": 2}])
def test_the_end_of_the_reasoning_is_forced(engine, params):
    received, _ = run(engine, ask("budget", None, rules=TokenRules(reasoning=BUDGET), max_tokens=9, **params))
    for tokens in received.values():
        assert tuple(tokens[3 : 3 + len(END)]) == END
        assert "</think>" not in TOKENIZER.decode(tokens[:3])


def test_beams_and_a_grammar_after_it(engine):
    thought = ReasoningRule("<think>", "</think>", is_open=True)
    grammar = write_grammar(GrammarTask(GrammarSpec("regex", "[0-9]{3}"), None, thought), TOKENIZER)
    rules = TokenRules(reasoning=BUDGET)
    beams = {"beam": BeamSearch(width=2), "n": 2, "max_tokens": 20, "temperature": 0.0}
    received, ends = run(engine, ask("beams", grammar, rules=rules, **beams), ask("one", grammar, rules=rules))
    assert {*ends.values()} == {EndReason.STOP}
    for tokens in received.values():
        assert tuple(tokens[3 : 3 + len(END)]) == END
        assert TOKENIZER.decode(tokens).rpartition("</think>")[2].strip().isdigit()


def test_it_resumes_after_any_token(engine):
    rules = TokenRules(reasoning=BUDGET, bad_words=((TOKENIZER.encode("the", add_special_tokens=False)[0],),))
    received, _ = run(engine, ask("whole", None, rules=rules, max_tokens=10))
    whole = received["whole", 0]
    for cut in (1, 3, 4, 7):
        history = (BranchHistory(token_ids=tuple(whole[:cut])),)
        rest, _ = run(engine, ask(f"cut {cut}", None, history, rules=rules, max_tokens=10))
        assert whole[:cut] + rest[f"cut {cut}", 0] == whole


def test_allowed_ids_and_bad_words(engine):
    ids = tuple(TOKENIZER.encode(" 1 2 3 4 5", add_special_tokens=False))
    received, ends = run(engine, ask("few", None, rules=TokenRules(allowed_token_ids=ids), max_tokens=8))
    assert {*received["few", 0]} <= {*ids}
    assert ends["few"] is EndReason.LENGTH
    free, _ = run(engine, ask("free", None, max_tokens=8))
    pair = tuple(free["free", 0][3:5])
    received, _ = run(engine, ask("bad", None, rules=TokenRules(bad_words=(pair,)), max_tokens=8))
    assert received["bad", 0][:4] == free["free", 0][:4]
    assert received["bad", 0][4] != pair[1]
    _, ends = run(engine, ask("none", regex_grammar("a"), rules=TokenRules(allowed_token_ids=ids)))
    assert ends["none"] is EndReason.GRAMMAR
