"""A field is refused by name: unknown, missing, of another type, out of its range, or asking for what is not here."""

import contextlib
import math

import pytest

from model.errors import GrammarError
from model.text.grammar_compiler import TokenTable
from model.text.grammar_task import GrammarTask, write_grammar
from service.errors import RequestError
from service.gateway.core.refusals import grammar_refusal
from service.gateway.core.request import CHAT, COMPLETIONS, RESPONSES
from service.gateway.openai.request_bodies import IDLE_CHAT_FIELDS, IDLE_COMPLETION_FIELDS, IDLE_MESSAGE_FIELDS
from service.gateway.openai.request_reader import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, read_request

NAN, INF = math.nan, math.inf


USER = {"role": "user", "content": "hi"}


BODIES = {COMPLETIONS: {"model": "m", "prompt": "hi"}, CHAT: {"model": "m", "messages": [USER]}}


BOTH = {
    "model": [1, True, [], {}],
    "max_tokens": [0, -1, 2**31 + 1, 10**30, 1.5, 1.0, "5", True, [], {}],
    "min_tokens": [-1, 17 + 2**31, True, "1", 0.5],
    "temperature": [-0.1, 2.01, NAN, INF, -INF, "1", True, [], 10**400],
    "top_p": [-0.1, 1.1, NAN, INF, "1", False],
    "top_k": [-2, 2**40, 0.5, True],
    "min_p": [-0.01, 1.01, NAN],
    "presence_penalty": [-2.1, 2.1, NAN, INF],
    "frequency_penalty": [-2.1, 2.1, NAN],
    "repetition_penalty": [0, 0.0, -1, 10.1, 1e-300, NAN, INF],
    "seed": [2**63, -(2**63) - 1, 1.5, True, "7"],
    "stop": ["", [""], ["a"] * 3 + [""], ["x" * 300], [1], {}, 5, [f"s{i}" for i in range(MAX_STOP_STRINGS + 1)]],
    "stop_token_ids": [[1.5], [True], ["1"], 5, list(range(129))],
    "logit_bias": [
        {"1": 101},
        {"1": -100.5},
        {"1": NAN},
        {"1": "1"},
        {"1": True},
        {"": 1},
        {" 1": 1},
        {"01": 1},
        {"+1": 1},
        {"-1": 1},
        {"1_0": 1},
        {"１２": 1},
        {"1.0": 1},
        {"99999999999": 1},
        {str(i): 1 for i in range(MAX_LOGIT_BIAS + 1)},
        [],
    ],
    "stream": [1, "true", []],
    "ignore_eos": [0, "no"],
    "skip_special_tokens": [1],
    "include_stop_str_in_output": ["x"],
    "allowed_token_ids": [[1.5], [True], 5, list(range(1025))],
    "bad_words": [[""], [" "], ["x" * 65], [1], "a", ["a"] * 129],
    "timeout": [0, -1, NAN, INF, "1", True, 10**9],
    "user": [1, "u" * 513],
    "stream_options": [True, [], {"include_usage": 1}, {"include_usage": True}],
    "n": [0, -1, 129, True, 1.0, "2"],
    "best_of": [0, 129, True, 2.0],
    "use_beam_search": [1, "true"],
    "beam_width": [0, 17, True, 4],
    "length_penalty": [NAN, INF, 11, -11, "1", 0.5],
    "early_stopping": [1, "always", True, "never"],
    "response_format": [
        "json",
        {},
        {"type": "xml"},
        {"type": "structural_tag"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": "text"}},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": 1}},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"pattern": "x" * 5000}}},
        {"type": "text", "extra": 1},
        {"type": "text", "json_schema": {"name": "n", "schema": {}}},
        {"type": "json_object", "json_schema": {"name": "n", "schema": {}}},
    ],
    "guided_json": [1, [], "{", {"enum": ["x" * (2 << 20)]}, {"multipleOf": 1e-9}],
    "guided_regex": ["", 1, "a" * 5000],
    "guided_choice": [[], [""], [1], "a", ["a"] * 2000],
    "guided_grammar": ["", "no grammar", "%llguidance {}", 'root ::= "' + "a" * 20_000 + '"'],
    "guided_decoding_backend": ["outlines", 1],
    "guided_whitespace_pattern": [" ", 1],
    "structured_outputs": [
        {},
        [],
        {"json": 1},
        {"json": "{"},
        {"json": {}, "regex": "a"},
        {"json_object": False},
        {"json": {}, "whitespace_pattern": "x" * 65},
        {"regex": "a", "whitespace_pattern": " "},
        {"choice": ["a"], "disable_any_whitespace": True},
        {"json": {}, "disable_additional_properties": True},
        {"structural_tag": "{}"},
    ],
    "truncate_prompt_tokens": [0, -2, True, 1.5],
    "return_tokens_as_token_ids": [1],
    "return_token_ids": [1],
}


BY_ENDPOINT = {
    COMPLETIONS: {
        "prompt": [
            "",
            [],
            [[]],
            [""],
            ["a", ""],
            [[1], []],
            ["a"] * 1025,
            [1, "a"],
            ["a", 1],
            ["a", [1]],
            [[1], 2],
            [1.5],
            [True],
            [None],
            [[True]],
            5,
            {},
        ],
        "logprobs": [-1, 21, True, 1.5, 10**30],
        "echo": [1, "yes"],
        "add_special_tokens": [0],
        "parse_special": [1],
    },
    CHAT: {
        "messages": [
            [],
            {},
            "hi",
            [1],
            [[]],
            [{}],
            [{"role": "user"}],
            [{"role": "user", "content": None}],
            [{"content": "hi"}],
            [{"role": "king", "content": "hi"}],
            [{"role": 1, "content": "hi"}],
            [{"role": "user", "content": 1}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}],
            [{"role": "user", "content": [{"type": "image", "text": "hi"}]}],
            [{"role": "user", "content": [{"type": "text"}]}],
            [{"role": "user", "content": ["hi"]}],
            [{"role": "user", "content": "hi", "extra": 1}],
            [{"role": "user", "content": "hi", "name": "n" * 513}],
            [{"role": "user", "content": "hi"}] * 4097,
        ],
        "logprobs": [1, 0, "true"],
        "top_logprobs": [-1, 21, True, 3],
        "max_completion_tokens": [0, -1, True],
        "add_generation_prompt": [1],
        "continue_final_message": [1],
        "chat_template_kwargs": [{"tokenize": True}, {"messages": False}, {"a b": 1}, []],
        "reasoning_effort": ["much", 1],
        "verbosity": ["loud", 1],
        "include_reasoning": [1],
        "store": [1],
        "metadata": [{"k": "v" * 600}, {"k": 1}],
        "tool_choice": [{"type": "allowed_tools"}, {"type": "custom", "custom": {"name": "f"}}],
    },
}


def read_whole(endpoint, body):
    """Reads a request, and its form as a grammar process does."""
    wish = read_request(endpoint, body).sampling.grammar
    if wish is not None:
        try:
            write_grammar(GrammarTask(wish.spec), TokenTable([], {}, []))
        except GrammarError as error:
            raise grammar_refusal(error, wish.param) from None


def refused(endpoint, body):
    with pytest.raises(RequestError) as caught:
        read_whole(endpoint, body)
    assert caught.value.status == 400
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 300
    return caught.value


@pytest.mark.parametrize("endpoint", BODIES)
@pytest.mark.parametrize("name", BOTH)
def test_bad_values_are_refused_by_name(endpoint, name):
    for value in BOTH[name]:
        error = refused(endpoint, {**BODIES[endpoint], name: value})
        assert error.param.startswith(name), value
        assert name in error.message


@pytest.mark.parametrize(("endpoint", "name"), [(one, name) for one, names in BY_ENDPOINT.items() for name in names])
def test_bad_values_of_one_endpoint_are_refused_by_name(endpoint, name):
    for value in BY_ENDPOINT[endpoint][name]:
        error = refused(endpoint, {**BODIES[endpoint], name: value})
        assert error.param.startswith(name), value
        assert name in error.message


@pytest.mark.parametrize(("endpoint", "idle"), [(COMPLETIONS, IDLE_COMPLETION_FIELDS), (CHAT, IDLE_CHAT_FIELDS)])
def test_idle_fields_take_only_what_asks_for_nothing(endpoint, idle):
    for name, accepted in idle.items():
        assert read_request(endpoint, {**BODIES[endpoint], name: None}) == read_request(endpoint, BODIES[endpoint])
        for value in accepted:
            assert read_request(endpoint, {**BODIES[endpoint], name: value}) == read_request(endpoint, BODIES[endpoint])
        for value in ("something", 7, [1], {"a": 1}, NAN):
            error = refused(endpoint, {**BODIES[endpoint], name: value})
            assert error.param == name
            assert f"'{name}'" in error.message


def test_a_number_is_no_boolean_in_idle_fields():
    refused(COMPLETIONS, {**BODIES[COMPLETIONS], "spaces_between_special_tokens": 1})


def test_idle_fields_of_messages():
    for name in IDLE_MESSAGE_FIELDS:
        error = refused(CHAT, {"model": "m", "messages": [USER, {**USER, name: "x"}]})
        assert error.param == f"messages[1].{name}"
    assert read_request(CHAT, {"model": "m", "messages": [{**USER, "tool_calls": [], "refusal": None}]})


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "default": None}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TALK = [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "1", "content": []}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [None], "title": None}}}
NESTED = {
    CHAT: {"model": "m", "messages": TALK, "tools": [TOOL], "tool_choice": "none", "response_format": SCHEMA},
    RESPONSES: {
        "model": "m",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}], "id": "msg_1"}],
        "text": {"format": {"type": "json_object"}},
        "reasoning": {"effort": "none"},
        "stream_options": {"include_obfuscation": False},
    },
}


def with_nulls(value, name=""):
    """Add a null to each object except the client's own."""
    if isinstance(value, list):
        return [with_nulls(item, name) for item in value]
    if not isinstance(value, dict) or name in ("parameters", "schema"):
        return value
    return {"newer": None} | {name: with_nulls(item, name) for name, item in value.items()}


@pytest.mark.parametrize("endpoint", NESTED)
def test_a_null_counts_as_absent_at_any_depth(endpoint):
    assert read_request(endpoint, with_nulls(NESTED[endpoint])) == read_request(endpoint, NESTED[endpoint])
    assert refused(CHAT, {"model": "m", "messages": [{"role": "user", "content": [{"text": None}]}]}).param.endswith(
        "type"
    )


@pytest.mark.parametrize("endpoint", BODIES)
def test_unknown_fields_are_refused_by_name(endpoint):
    error = refused(endpoint, {**BODIES[endpoint], "temprature": 1})
    assert (error.param, error.code) == ("temprature", "unknown_field")
    # A name is shown, but not what would break a terminal or a log.
    error = refused(endpoint, {**BODIES[endpoint], "a\x1b[31m\r\n" + "b" * 100: 1})
    assert error.param == "a?[31m??" + "b" * 56
    assert refused(endpoint, {**BODIES[endpoint], 5: 1}).code == "unknown_field"
    error = refused(endpoint, {**BODIES[endpoint], "stream": True, "stream_options": {"what`` - at `$.x": 1}})
    assert error.code == "unknown_field"


@pytest.mark.parametrize("endpoint", BODIES)
def test_missing_and_null_fields_are_named(endpoint):
    for name in BODIES[endpoint].keys() - {"model"}:
        for body in ({k: v for k, v in BODIES[endpoint].items() if k != name}, {**BODIES[endpoint], name: None}):
            error = refused(endpoint, body)
            assert (error.param, error.code) == (name, "missing_required_parameter")


@pytest.mark.parametrize("endpoint", BODIES)
def test_no_value_is_ever_echoed(endpoint):
    secret = "s3cr3t"
    values = (secret, [secret], {"a": secret}, [{"a": secret}], [[secret]])
    for name in set(BOTH) | set(BY_ENDPOINT[endpoint]):
        for value in values:
            with contextlib.suppress(RequestError):
                read_request(endpoint, {**BODIES[endpoint], name: value})
                continue
            assert secret not in refused(endpoint, {**BODIES[endpoint], name: value}).message
