"""Reasoning and content are the same however the answer is split."""

import random

import pytest

from model.text.reasoning import (
    DEEPSEEK_R1,
    MAX_HELD_BLANKS,
    MISTRAL,
    QWEN3,
    SEED_OSS,
    ReasoningState,
    ReasoningStream,
    detect_reasoning,
    state_after,
    state_within,
)

OFF, OPTIONAL, OPEN = ReasoningState
CASES = [
    (OPTIONAL, "<think>\nI add.\n</think>\n\n4", ("I add.", "4")),
    (OPTIONAL, " \n<think>I add.</think> 4 </think> <think>", ("I add.", "4 </think> <think>")),
    (OPTIONAL, "<think>\n\n</think>\n\n4", ("", "4")),
    (OPTIONAL, " plain <think>no</think>", ("", " plain <think>no</think>")),
    (OPTIONAL, "<thin", ("", "<thin")),
    (OPTIONAL, " ", ("", " ")),
    (OPTIONAL, " " * 300 + "<think>a", ("", " " * 300 + "<think>a")),
    (OPTIONAL, "<think>cut off \n</thi", ("cut off \n</thi", "")),
    (OPTIONAL, "<think>cut off \n", ("cut off", "")),
    (OPEN, "\nI add. </think>\n", ("I add.", "")),
    (OPEN, "<think>\nI <think> add.</think>4", ("I <think> add.", "4")),
    (OPEN, "</think>4", ("", "4")),
    (OPEN, "a <<//think></think></think>b", ("a <<//think>", "</think>b")),
    (OPEN, "<thi", ("<thi", "")),
    (OPEN, " " * 300 + "a" + " " * 300 + "</think>" + " " * 300 + "b", (" " * 44 + "a" + " " * 44, " " * 44 + "b")),
    (OFF, " 4 <think>", ("", " 4 <think>")),
]


def split(state, parts, markers=QWEN3):
    stream = ReasoningStream(markers, state)
    found = [*(stream.push(part) for part in parts), stream.flush()]
    return "".join(one.reasoning for one in found), "".join(one.content for one in found)


@pytest.mark.parametrize(("state", "text", "wanted"), CASES)
def test_whole_and_by_characters(state, text, wanted):
    assert split(state, [text]) == wanted
    assert split(state, text) == wanted
    swapped = text.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    markers = tuple(part.replace("<think>", "[THINK]").replace("</think>", "[/THINK]") for part in wanted)
    assert "<" in swapped or split(state, swapped, MISTRAL) == markers


def test_random_splits_of_random_texts():
    rng = random.Random(7)
    pieces = ["<think>", "</think>", "<th", "ink>", "</", ">", "<", " ", "\n", "a", "bc", " " * MAX_HELD_BLANKS]
    for _ in range(3000):
        text = "".join(rng.choices(pieces, k=rng.randrange(12)))
        state = rng.choice([OFF, OPTIONAL, OPEN])
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(8)))
        parts = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert split(state, parts) == split(state, [text]), (state, text, parts)


def test_reasoning_is_sent_as_it_comes():
    stream = ReasoningStream(QWEN3, OPTIONAL)
    assert stream.push("<think>one ") == ("one", "")
    assert stream.is_open
    assert stream.push("two</think> yes") == (" two", "yes")
    assert stream.is_over
    assert not stream.is_open


def test_templates_and_prompts():
    assert detect_reasoning("<|im_start|>assistant") is None
    assert detect_reasoning("split('</think>')") is QWEN3
    assert detect_reasoning("<｜Assistant｜> split('</think>')") is DEEPSEEK_R1
    assert detect_reasoning("[THINK]x[/THINK]") is MISTRAL
    assert detect_reasoning("set think_end_token = '</seed:think>'") is SEED_OSS
    assert [state_after(QWEN3, end) for end in ("a\n", "<think>\n", "<think>\n\n</think>\n\n")] == [OPTIONAL, OPEN, OFF]
    assert [state_after(SEED_OSS, end) for end in ("<seed:bos>assistant\n", "</seed:think>")] == [OPEN, OFF]
    assert [state_after(DEEPSEEK_R1, end) for end in ("a\n", "</think>")] == [OPEN, OFF]
    assert [state_within(QWEN3, text) for text in ("a", "<think>a", "<think>a</think>b")] == [OFF, OPEN, OFF]
