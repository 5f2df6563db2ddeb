"""`LLM` with the demo model: shapes, order, texts, errors."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from service.offline import api, public
from service.offline.api import (
    LLM,
    BeamSearchParams,
    SamplingParams,
    StructuredOutputsParams,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
START = "Once upon a time"


@pytest.fixture(scope="module")
def llm():
    with LLM(max_model_len=128, swap_space=0) as made:
        yield made


def texts(outputs):
    return [each.outputs[0].text for each in outputs]


def test_outputs_come_in_the_prompts_order_and_say_what_was_generated(llm):
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("Tom had a")
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (40, 3, 9, 1)]
    found = llm.generate([START, {"prompt": "Tom had a"}, ids, {"prompt_token_ids": ids}], params, use_tqdm=False)
    assert [each.prompt for each in found] == [START, "Tom had a", None, None]
    assert [each.prompt_token_ids for each in found[1:]] == [ids] * 3
    for each, asked in zip(found, params, strict=True):
        (choice,) = each.outputs
        assert each.finished
        assert choice.finished()
        assert choice.text.strip() == tokenizer.decode(choice.token_ids).strip()
        assert (len(choice.token_ids), choice.finish_reason) == (asked.max_tokens, "length")
        assert choice.logprobs is choice.cumulative_logprob is each.prompt_logprobs is None
    assert found[2].outputs[0].text.startswith(found[1].outputs[0].text)
    assert len({each.request_id for each in found}) == 4


def test_ids_may_be_tuples_and_arrays(llm):
    given = [(5, 6), np.array([5, 6]), {"prompt_token_ids": np.array([5, 6], np.int32)}, [np.int64(5), 6]]
    found = llm.generate(given, SamplingParams(max_tokens=1), use_tqdm=False)
    assert [each.prompt_token_ids for each in found] == [[5, 6]] * 4
    assert all(type(token_id) is int for each in found for token_id in each.prompt_token_ids)
    (alone,) = llm.generate(np.array([5, 6]), SamplingParams(max_tokens=1), use_tqdm=False)
    assert alone.prompt_token_ids == [5, 6]


def test_branches_stop_strings_and_stop_tokens(llm):
    (found,) = llm.generate(START, SamplingParams(n=3, seed=3, max_tokens=90, stop=[".", "zzz"]), use_tqdm=False)
    assert [choice.index for choice in found.outputs] == [0, 1, 2]
    assert {choice.stop_reason for choice in found.outputs} == {"."}
    assert not any("." in choice.text for choice in found.outputs)
    shown = SamplingParams(n=3, seed=3, max_tokens=90, stop=".", include_stop_str_in_output=True)
    (again,) = llm.generate(START, shown, use_tqdm=False)
    assert texts([again])[0] == found.outputs[0].text + "."
    (full,) = llm.generate(START, GREEDY, use_tqdm=False)
    stop_id = full.outputs[0].token_ids[4]
    (ended,) = llm.generate(START, SamplingParams(temperature=0, stop_token_ids=[stop_id]), use_tqdm=False)
    assert (ended.outputs[0].stop_reason, ended.outputs[0].finish_reason) == (stop_id, "stop")
    assert ended.outputs[0].token_ids == full.outputs[0].token_ids[:5]


def test_log_probabilities_are_maps_by_token(llm):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=1)
    (found,) = llm.generate(START, params, use_tqdm=False)
    (choice,) = found.outputs
    chosen = [entry[token] for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)]
    assert [one.rank for one in chosen] == [1] * 5
    assert choice.cumulative_logprob == pytest.approx(sum(one.logprob for one in chosen))
    assert all(len(entry) == 2 for entry in choice.logprobs)
    assert found.prompt_logprobs[0] is None
    assert [token in entry for token, entry in zip(found.prompt_token_ids[1:], found.prompt_logprobs[1:], strict=True)]
    assert len(found.prompt_logprobs) == len(found.prompt_token_ids)


def test_a_chat_renders_the_template_and_takes_another(llm):
    talk = [{"role": "user", "content": "Tell me a story."}]
    one, two = llm.chat([talk, talk], GREEDY, use_tqdm=False)
    assert texts([one]) == texts([two]) != [""]
    bare = llm.chat(talk, GREEDY, use_tqdm=False, chat_template="{{ messages[0].content }}")
    assert bare[0].prompt_token_ids == llm.get_tokenizer().encode("Tell me a story.", add_special_tokens=False)
    with pytest.raises(ValueError, match="role"):
        llm.chat([{"role": "king", "content": "x"}], GREEDY)


def test_beams_are_sequences_with_their_prompt(llm):
    ((best, *others),) = [each.sequences for each in llm.beam_search(START, BeamSearchParams(3, 8))]
    assert len(others) == 2
    assert all(best.cum_logprob >= other.cum_logprob for other in others)
    assert best.text.startswith(START)
    assert len(best.tokens) == len(llm.get_tokenizer().encode(START)) + 8


def test_vectors_have_length_one_and_alike_texts_score_higher(llm):
    encoded = llm.encode(["A fox ran."], use_tqdm=False)
    assert encoded[0].outputs.data @ encoded[0].outputs.data == pytest.approx(1.0, abs=1e-5)
    assert llm.embed("A fox ran.", use_tqdm=False)[0].outputs.embedding == encoded[0].outputs.data.tolist()
    near, far = llm.score("A fox ran.", ["A fox ran away.", "The sea was blue."], use_tqdm=False)
    assert near.outputs.score > far.outputs.score
    with pytest.raises(ValueError, match="text_1"):
        llm.score(["a", "b"], ["a"])


def test_a_form_holds_and_a_bad_one_is_named(llm):
    form = StructuredOutputsParams(choice=["yes", "no"])
    assert texts(llm.generate("Is it?", SamplingParams(structured_outputs=form), use_tqdm=False))[0] in ("yes", "no")
    with pytest.raises(ValueError, match=r"structured_outputs.regex"):
        llm.generate("x", SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")), use_tqdm=False)


@pytest.mark.parametrize(
    ("prompts", "params", "name"),
    [
        (["", "x"], None, "prompt"),
        ([{"prompt": "x", "multi_modal_data": {}}], None, "multi_modal_data"),
        (["x", "x"], [GREEDY], "sampling_params"),
        (["x"], {"max_tokens": 3}, "sampling_params"),
        (["x"], [3], "sampling_params"),
        (3, GREEDY, "'prompts' must be"),
        (b"abc", GREEDY, "'prompts' must be"),
        ([[1 << 40]], None, "prompt"),
        ([[True, 2]], None, "'prompt' must be"),
        (["a\ud800", "x"], None, "'prompt' has a lone surrogate"),
        (["x"], SamplingParams(max_tokens=500), "context"),
        (["x"], SamplingParams(stop_token_ids=[1 << 20]), "stop_token_ids"),
    ],
)
def test_a_wrong_request_is_named_and_the_others_are_cancelled(llm, prompts, params, name):
    with pytest.raises(ValueError, match=name):
        llm.generate(["x", *prompts] if params is None else prompts, params, use_tqdm=False)
    assert texts(llm.generate("The fox", GREEDY, use_tqdm=False))[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate("x", priority=["x"]), "'priority' must be a list of integers"),
        (lambda llm: llm.chat(None), "'messages' must be a list"),
        (lambda llm: llm.beam_search("x", None), "'params' must be a BeamSearchParams"),
        (lambda llm: llm.encode("x", 3), "'pooling_params' must be a PoolingParams"),
    ],
)
def test_an_argument_of_a_wrong_type_is_named(llm, call, message):
    with pytest.raises(ValueError, match=message):
        call(llm)


def test_priorities_order_the_start_and_the_bar_counts(llm):
    seen = []

    class Bar:
        def __init__(self, **how):
            seen.append(how["total"])

        def update(self, count):
            seen.append(count)

        def set_postfix_str(self, text, refresh):
            pass

        def close(self):
            seen.append("closed")

    found = llm.generate(["a", "b"], GREEDY, use_tqdm=Bar, priority=[1, 0])
    assert [each.prompt for each in found] == ["a", "b"]
    assert seen == [2, 1, 1, "closed"]


@pytest.fixture
def default_ctrl_c():
    """Ctrl-C raises, also where a shell started the tests with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_ctrl_c")
def test_ctrl_c_cancels_the_call_and_the_next_one_works(llm):
    class Bar:
        def __init__(self, **how):
            pass

        def update(self, count):
            signal.raise_signal(signal.SIGINT)

        def set_postfix_str(self, text, refresh):
            pass

        def close(self):
            pass

    many = [SamplingParams(temperature=0, max_tokens=1), *[SamplingParams(temperature=0, max_tokens=100)] * 9]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([START] * 10, many, use_tqdm=Bar)
    assert not llm._engine._open
    assert llm.generate([], GREEDY) == []
    found = llm.generate(START, GREEDY, use_tqdm=False)
    assert pickle.loads(pickle.dumps(found)) == found


def test_a_reset_hides_earlier_prefixes(llm):
    prompt = f"{START} there was a fox who lived in a wood"

    def num_cached():
        return llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens

    num_cached()
    assert num_cached() > 0
    assert llm.reset_prefix_cache()
    assert num_cached() == 0 < num_cached()


def test_it_starts_no_process_and_ends_its_threads():
    def children():
        return Path(f"/proc/self/task/{os.getpid()}/children").read_text()

    before, threads = children(), set(threading.enumerate())
    made = LLM(max_model_len=64, seed=5)
    first = made.generate(START, SamplingParams(max_tokens=20), use_tqdm=False)
    assert children() == before
    made.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        made.generate("x")
    again = LLM(max_model_len=64, seed=5)
    assert texts(again.generate(START, SamplingParams(max_tokens=20), use_tqdm=False)) == texts(first)
    own = set(threading.enumerate()) - threads
    assert {each.name for each in own} >= {"engine", "grammar"}
    del made, again
    gc.collect()
    for each in own:
        each.join(10)
    assert not any(each.is_alive() for each in own)


def test_a_forked_child_is_refused(llm):
    """Its copy has no engine thread: a call would wait forever."""
    child = os.fork()
    if not child:
        try:
            llm.generate("x", GREEDY, use_tqdm=False)
        except RuntimeError as error:
            os._exit("after a fork" in str(error))
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_keyword_beyond_the_model_is_named():
    with pytest.raises(ValueError, match=r"^max_model_len: "):
        LLM(max_model_len=1 << 20)


def test_a_kept_log_record_does_not_keep_the_model(caplog):
    caplog.set_level("INFO")
    made = LLM(max_model_len=64)
    engine = made._engine._thread._thread
    assert caplog.records
    del made
    gc.collect()
    engine.join(10)
    assert not engine.is_alive()


def test_a_dead_engine_is_an_error_of_every_call(monkeypatch):
    made = LLM(max_model_len=64)

    def die():
        raise MemoryError("no more")

    monkeypatch.setattr(made._engine._thread._engine, "step", die)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="died"):
            made.generate([START] * 3, GREEDY, use_tqdm=False)


def test_both_lists_of_public_names_agree():
    assert public.__all__ == api.__all__
    assert all(getattr(public, name) is getattr(api, name) for name in api.__all__)
