"""Several choices and several prompts: which text belongs to which, streamed or not, and what ends which."""

import asyncio
import json

import msgpack
import pytest

from model.sampling_params import BeamSearch
from service.errors import EndReason
from service.queue.codec import decode, unpack_ids
from service.queue.messages import Reply
from tests.fakes.scripted_worker import Script
from tests.support.gateway import MAX_POSITION, MODEL, open_gateway, speech

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"model": MODEL, "prompt": "the and", "max_tokens": 40}
MESSAGES = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXTS = ("hello world", "the other one", "안녕 🙂")
SOON_S = 5.0


def saying(gateway, *texts, **how):
    """A script in which each branch says its text."""
    branches = tuple(speech(gateway.model, text).steps for text in texts)
    return lambda job: Script(branches=branches, **how)


def lengths(gateway, *texts):
    """Tokens of the texts and of the end of each."""
    return sum(len(gateway.model.tokenizer.encode(text)) + 1 for text in texts)


def text_of(choice):
    if "message" in choice:
        return choice["message"]["content"]
    return choice["delta"].get("content", "") if "delta" in choice else choice["text"]


def texts_of(events):
    """Text and finish reason by index, from a stream that ended well."""
    assert events[-1] == "[DONE]"
    found = {}
    for event in events[:-1]:
        for choice in json.loads(event)["choices"]:
            text, reason = found.get(choice["index"], ("", None))
            assert reason is None, "nothing follows a choice's end"
            found[choice["index"]] = (text + text_of(choice), choice["finish_reason"])
    return found


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
async def test_each_branch_is_a_choice(gateway, path, body):
    gateway.worker.script = saying(gateway, *TEXTS)
    status, answer = await gateway.post(path, {**body, "n": 3})
    assert status == 200
    assert [(choice["index"], text_of(choice), choice["finish_reason"]) for choice in answer["choices"]] == [
        (index, text, "stop") for index, text in enumerate(TEXTS)
    ]
    assert answer["usage"]["completion_tokens"] == lengths(gateway, *TEXTS)
    assert answer["usage"]["prompt_tokens"] == len(gateway.worker.jobs[0].prompt) // 4
    events = await gateway.events(path, {**body, "n": 3})
    assert texts_of(events) == {index: (text, "stop") for index, text in enumerate(TEXTS)}
    indexes = [json.loads(event)["choices"][0]["index"] for event in events[:-1]]
    assert indexes[:3] != [0, 0, 0], "choices are sent interleaved"
    assert [job.sampling.n for job in gateway.worker.jobs] == [3, 3]
    assert [job.sampling.best_of for job in gateway.worker.jobs] == [3, 3]
    assert gateway.worker.cancels == []


async def test_every_choice_of_a_chat_opens_with_its_role(gateway):
    events = await gateway.events(CHAT, {**MESSAGES, "n": 2})
    opened = set()
    for choice in (json.loads(event)["choices"][0] for event in events[:-1]):
        assert ("role" in choice["delta"]) == (choice["index"] not in opened)
        opened.add(choice["index"])
    assert opened == {0, 1}


async def test_choices_may_end_for_different_reasons(gateway):
    gateway.worker.script = saying(gateway, "hello", "a much longer text than hello")
    most = lengths(gateway, "hello") + 1
    _, answer = await gateway.post(COMPLETIONS, {**PROMPT, "n": 2, "max_tokens": most})
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length"]


async def test_logprobs_of_each_choice(gateway):
    gateway.worker.script = saying(gateway, "Hé", "abc")
    body = {**PROMPT, "n": 2, "logprobs": 1}
    _, answer = await gateway.post(COMPLETIONS, body)
    first, second = (choice["logprobs"] for choice in answer["choices"])
    assert first["tokens"] == ["H", "bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"]
    assert second["tokens"] == ["a", "b", "c", "<|im_end|>"]
    assert (first["text_offset"], second["text_offset"]) == ([0, 1, 1, 2], [0, 1, 2, 3])
    streamed = {0: [], 1: []}
    for event in (await gateway.events(COMPLETIONS, body))[:-1]:
        choice = json.loads(event)["choices"][0]
        if choice["logprobs"]:
            streamed[choice["index"]] += choice["logprobs"]["text_offset"]
    assert streamed == {0: [0, 1, 1, 2], 1: [0, 1, 2, 3]}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_ends_its_branch_alone(gateway, stream):
    gateway.worker.script = saying(gateway, "one END of it", "two goes on to its end", step_s=0.002)
    body = {**PROMPT, "n": 2, "stop": "END"}
    if stream:
        choices = texts_of(await gateway.events(COMPLETIONS, body))
    else:
        _, answer = await gateway.post(COMPLETIONS, body)
        choices = {c["index"]: (c["text"], c["finish_reason"]) for c in answer["choices"]}
        tokens = len(gateway.model.tokenizer.encode("one END")) + lengths(gateway, "two goes on to its end")
        assert answer["usage"]["completion_tokens"] == tokens
    assert choices == {0: ("one ", "stop"), 1: ("two goes on to its end", "stop")}
    (cancel,) = gateway.worker.cancels
    assert (cancel.reason, cancel.branch) == (EndReason.STOP, 0)


async def test_a_job_is_cancelled_when_stop_strings_have_ended_every_branch(gateway):
    gateway.worker.script = saying(gateway, "a END b", "ab END c", end=None)
    _, answer = await gateway.post(COMPLETIONS, {**PROMPT, "n": 2, "stop": "END"})
    assert [choice["text"] for choice in answer["choices"]] == ["a ", "ab "]
    async with asyncio.timeout(SOON_S):
        await gateway.worker.cancelled(2)
    assert [(cancel.reason, cancel.branch) for cancel in gateway.worker.cancels] == [
        (EndReason.STOP, 0), (EndReason.STOP, None),
    ]  # fmt: skip


async def test_the_best_of_more(gateway):
    gateway.worker.script = saying(gateway, *TEXTS, choices=(2, 0))
    body = {**PROMPT, "n": 2, "best_of": 3}
    _, answer = await gateway.post(COMPLETIONS, body)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, TEXTS[2]), (1, TEXTS[0])]
    assert answer["usage"]["completion_tokens"] == lengths(gateway, *TEXTS), "all that was sampled has its price"
    # The best are known only at the end of a stream.
    assert texts_of(await gateway.events(COMPLETIONS, body)) == {0: (TEXTS[2], "stop"), 1: (TEXTS[0], "stop")}
    assert gateway.worker.jobs[0].sampling.best_of == 3


async def test_a_stop_string_among_the_best(gateway):
    gateway.worker.script = saying(gateway, "one END of it", "two", choices=(0,), step_s=0.002)
    _, answer = await gateway.post(COMPLETIONS, {**PROMPT, "best_of": 2, "stop": "END"})
    assert [choice["text"] for choice in answer["choices"]] == ["one "]
    assert gateway.worker.cancels[0].branch == 0


async def test_the_best_are_ranked_without_the_text_after_a_stop_string(gateway):
    # Its worker ranked the tokens after END too, whose number is random.
    gateway.worker.script = saying(gateway, "one END of it", "two", "three", scores=(-0.5, -0.6, -0.4), choices=(1, 0))
    body = {**PROMPT, "n": 2, "best_of": 3, "stop": "END"}
    _, answer = await gateway.post(COMPLETIONS, body)
    assert [choice["text"] for choice in answer["choices"]] == ["three", "one "]
    assert texts_of(await gateway.events(COMPLETIONS, body)) == {0: ("three", "stop"), 1: ("one ", "stop")}


async def test_beams(gateway):
    gateway.worker.script = saying(gateway, *TEXTS, choices=(1, 2))
    body = {**PROMPT, "n": 2, "use_beam_search": True, "beam_width": 3, "length_penalty": 0.5}
    _, answer = await gateway.post(COMPLETIONS, {**body, "stop": "one"})
    assert [choice["text"] for choice in answer["choices"]] == ["the other ", TEXTS[2]]
    sampling = gateway.worker.jobs[0].sampling
    assert (sampling.n, sampling.best_of, sampling.beam) == (2, 1, BeamSearch(width=3, length_penalty=0.5))
    assert (sampling.temperature, sampling.top_k) == (0.0, None), "the makers' advice on sampling is not for beams"
    assert texts_of(await gateway.events(CHAT, {**MESSAGES, **{k: v for k, v in body.items() if k != "prompt"}})) == {
        0: (TEXTS[1], "stop"), 1: (TEXTS[2], "stop"),
    }  # fmt: skip


async def test_fewer_beams_end_than_requested(gateway):
    """A grammar may allow no more."""
    gateway.worker.script = saying(gateway, TEXTS[0], choices=(0,))
    beams = {"n": 2, "use_beam_search": True, "beam_width": 3}
    _, answer = await gateway.post(CHAT, {**MESSAGES, **beams})
    (choice,) = answer["choices"]
    assert (choice["index"], text_of(choice), choice["finish_reason"]) == (0, TEXTS[0], "stop")
    assert texts_of(await gateway.events(CHAT, {**MESSAGES, **beams})) == {0: (TEXTS[0], "stop")}
    (reply,) = await replies_of(gateway, "beams", **beams)
    assert (reply.index, reply.text, reply.finish_reason, reply.done) == (0, TEXTS[0], "stop", True)


async def test_nothing_stops_an_answer_before_min_tokens(gateway):
    gateway.worker.script = saying(gateway, "hello world, hello")
    for min_tokens, text in ((0, ""), (3, "hello world, ")):
        _, answer = await gateway.post(COMPLETIONS, {**PROMPT, "stop": "hello", "min_tokens": min_tokens})
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")
        assert answer["usage"]["completion_tokens"] > min_tokens


@pytest.mark.parametrize("prompts", [["the", "and the"], [[5, 6, 7], [8]]])
async def test_choices_of_several_prompts_are_ordered_by_prompt(gateway, prompts):
    def script(job):
        size = len(job.prompt) // 4
        return Script(branches=[speech(gateway.model, f"{size} {branch}").steps for branch in range(2)])

    gateway.worker.script = script
    body = {**PROMPT, "prompt": prompts, "n": 2}
    _, answer = await gateway.post(COMPLETIONS, body)
    sizes = [len(p) if isinstance(p, list) else len(gateway.model.tokenizer.encode(p)) for p in prompts]
    wanted = [f"{size} {branch}" for size in sizes for branch in range(2)]
    assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate(wanted))
    assert answer["usage"]["prompt_tokens"] == sum(sizes)
    assert answer["usage"]["completion_tokens"] == lengths(gateway, *wanted)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert texts_of(await gateway.events(COMPLETIONS, body)) == {i: (text, "stop") for i, text in enumerate(wanted)}
    ids = [job.job_id for job in gateway.worker.jobs[:2]]
    assert ids == [ids[0], f"{ids[0]}.1"]
    assert answer["id"] == f"cmpl-{ids[0]}"


async def test_one_prompt_that_fails_fails_the_request_and_cancels_the_rest(gateway):
    def script(job):
        if len(job.prompt) == 4:
            return Script([], EndReason.NUMERICAL_ERROR)
        return speech(gateway.model, "hello", end=None)

    gateway.worker.script = script
    status, answer = await gateway.post(COMPLETIONS, {**PROMPT, "prompt": [[1, 2], [3], [4, 5]]})
    assert (status, answer["error"]["code"]) == (500, "numerical_error")
    async with asyncio.timeout(SOON_S):
        await gateway.worker.cancelled(2)
    assert {cancel.reason for cancel in gateway.worker.cancels} == {EndReason.CANCELLED}


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"n": 5}, "n", None),
        ({"best_of": 5}, "best_of", None),
        ({"n": 4, "max_tokens": 100}, "max_tokens", "request_too_large"),
        ({"prompt": ["the"] * 6, "max_tokens": 50}, "max_tokens", "request_too_large"),
        ({"use_beam_search": True, "beam_width": 16, "max_tokens": 20}, "max_tokens", "request_too_large"),
    ],
)
async def test_what_one_request_may_cost(model_folder, change, param, code):
    async with open_gateway(model_folder, max_n=4, max_request_tokens=300) as gateway:
        status, answer = await gateway.post(COMPLETIONS, {**PROMPT, **change})
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code)
        # Where the client names no length, what may be spent is shared out.
        gateway.worker.script = lambda job: Script([[1]])
        assert (await gateway.post(CHAT, {**MESSAGES, "n": 4}))[0] == 200
        job = gateway.worker.jobs[0]
        assert job.sampling.max_tokens == (300 - len(job.prompt) // 4) // 4


async def test_echo(gateway):
    body = {**PROMPT, "prompt": ["the", "and"], "n": 2, "echo": True}
    _, answer = await gateway.post(COMPLETIONS, body)
    wanted = ["theHello world."] * 2 + ["andHello world."] * 2
    assert [choice["text"] for choice in answer["choices"]] == wanted
    assert texts_of(await gateway.events(COMPLETIONS, body)) == {i: (text, "stop") for i, text in enumerate(wanted)}
    ids = gateway.model.tokenizer.encode("the and")
    _, answer = await gateway.post(COMPLETIONS, {**PROMPT, "prompt": ids, "echo": True})
    assert answer["choices"][0]["text"] == "the andHello world."


async def test_tokens_by_their_ids(gateway):
    ids = [*gateway.model.tokenizer.encode("Hé"), gateway.model.eos_token_ids[0]]
    names = [f"token_id:{token}" for token in ids]
    gateway.worker.script = saying(gateway, "Hé")
    _, answer = await gateway.post(COMPLETIONS, {**PROMPT, "logprobs": 1, "return_tokens_as_token_ids": True})
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == names
    assert names[0] in logprobs["top_logprobs"][0]
    _, answer = await gateway.post(CHAT, {**MESSAGES, "logprobs": True, "return_tokens_as_token_ids": True})
    assert [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]] == names


async def test_the_front_of_a_prompt_is_cut(gateway):
    async def prompt(**change):
        status, _ = await gateway.post(COMPLETIONS, {**PROMPT, **change})
        assert status == 200
        return unpack_ids(gateway.worker.jobs[-1].prompt)

    assert await prompt(prompt=[1, 2, 3, 4], truncate_prompt_tokens=2) == [3, 4]
    assert await prompt(prompt=[1, 2], truncate_prompt_tokens=5) == [1, 2]
    whole = [1] * 600
    assert len(await prompt(prompt=whole, truncate_prompt_tokens=-1, max_tokens=12)) == MAX_POSITION - 12
    _, answer = await gateway.post(COMPLETIONS, {**PROMPT, "prompt": "ab", "truncate_prompt_tokens": 1, "echo": True})
    assert answer["choices"][0]["text"] == "bHello world."


async def test_usage_in_every_chunk(gateway):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await gateway.events(COMPLETIONS, {**PROMPT, "n": 2, "stream_options": options})
    chunks = [json.loads(event) for event in events[:-1]]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == lengths(gateway, "Hello world.") * 2
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {len(gateway.worker.jobs[0].prompt) // 4}


async def test_continuing_the_final_message(gateway):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the "}]}
    await gateway.post(CHAT, {**body, "continue_final_message": True})
    await gateway.post(CHAT, {**body, "add_generation_prompt": False})
    continued, closed = (unpack_ids(job.prompt) for job in gateway.worker.jobs)
    assert closed[: len(continued)] == continued
    decode_ids = gateway.model.tokenizer.decode
    assert decode_ids(closed[len(continued) :], skip_special_tokens=False) == "<|im_end|>\n"
    status, answer = await gateway.post(
        CHAT, {**MESSAGES, "messages": [{"role": "user", "content": ""}], "continue_final_message": True}
    )
    assert (status, answer["error"]["param"]) == (400, "messages")


async def replies_of(gateway, name, **more):
    """All that a producer hears of one completion."""
    payload = {"v": 1, "id": name, "endpoint": COMPLETIONS, "body": {**PROMPT, **more}}
    await gateway.queue.produce("default", msgpack.packb(payload))
    async with asyncio.timeout(SOON_S):
        while True:
            found = [decode(Reply, reply) for reply in gateway.queue.replies("default", name)]
            if found and found[-1].done:
                return found
            await asyncio.sleep(0.005)


async def test_choices_at_the_queue_gateway(gateway):
    gateway.worker.script = saying(gateway, TEXTS[0], TEXTS[2])
    first, second = await replies_of(gateway, "whole", n=2)
    assert (first.index, first.text, first.finish_reason, first.usage, first.done) == (0, TEXTS[0], "stop", None, False)
    assert (second.index, second.text, second.finish_reason) == (1, TEXTS[2], "stop")
    assert second.usage.completion_tokens == lengths(gateway, TEXTS[0], TEXTS[2])
    streamed = await replies_of(gateway, "streamed", n=2, stream=True)
    assert ["".join(r.text for r in streamed if r.index == index) for index in range(2)] == [TEXTS[0], TEXTS[2]]
    assert [reply.number for reply in streamed] == list(range(1, len(streamed) + 1))
    assert sum(reply.finish_reason is not None for reply in streamed) == 2
