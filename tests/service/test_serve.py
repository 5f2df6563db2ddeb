"""The whole staircase, run as a user runs it, spoken to with the official client and with plain redis-py."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import msgpack
import numpy as np
import openai
import pytest
import redis

from service.cli import serve
from service.cli.processes import children
from service.config.settings import WORKER, Settings
from service.errors import StartupError
from service.offline.api import LLM, SamplingParams
from service.shutdown import Shutdown
from tests.support.served import REPOSITORY, Served, alive

STORY = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    running = Served(tmp_path_factory.mktemp("data"), "--enable-embeddings=true")
    yield running
    running.terminate()


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as made:
        yield made


def get(url):
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.status, response.read().decode()


def test_the_client_completes(client):
    answer = client.completions.create(model="demo", prompt="Once upon a time", max_tokens=20, temperature=0)
    assert answer.choices[0].text.strip()
    assert answer.usage.completion_tokens <= 20
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_client_chats_and_the_model_ends_by_itself(client):
    answer = client.chat.completions.create(model="demo", messages=STORY, temperature=0)
    assert answer.choices[0].finish_reason == "stop"
    assert "fox" in answer.choices[0].message.content.lower()


def test_a_stream_is_the_same_text_in_pieces(client):
    whole = client.chat.completions.create(model="demo", messages=STORY, temperature=0, max_tokens=60)
    stream = client.chat.completions.create(
        model="demo", messages=STORY, temperature=0, max_tokens=60, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 2  # what a busy machine publishes late comes in one piece
    received, expected = chunks[-1].usage, whole.usage
    assert (received.prompt_tokens, received.completion_tokens) == (expected.prompt_tokens, expected.completion_tokens)


def test_what_was_asked_before_counts_as_cached(client):
    prompt = "A turtle and a heron met by the quiet pond where nobody had ever counted to ninety-nine. " * 4
    first, again = (
        client.completions.create(model="demo", prompt=prompt, max_tokens=4, temperature=0).usage for _ in range(2)
    )
    assert first.prompt_tokens_details.cached_tokens < 16
    assert again.prompt_tokens_details.cached_tokens >= again.prompt_tokens - 16
    assert again.prompt_tokens_details.cached_tokens < again.prompt_tokens


def test_a_response_matches_a_chat_and_can_be_continued(client):
    chat = client.chat.completions.create(model="demo", messages=STORY, temperature=0, max_tokens=40)
    first = client.responses.create(model="demo", input=STORY, temperature=0, max_output_tokens=40)
    assert first.output_text == chat.choices[0].message.content
    assert first.usage.output_tokens == chat.usage.completion_tokens
    again = {"role": "user", "content": "Tell it again."}
    talk = [*STORY, {"role": "assistant", "content": first.output_text}, again]
    chat = client.chat.completions.create(model="demo", messages=talk, temperature=0, max_tokens=40)
    stream = client.responses.create(
        model="demo",
        input=[again],
        previous_response_id=first.id,
        temperature=0,
        max_output_tokens=40,
        stream=True,
        background=True,
    )
    events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == (
        chat.choices[0].message.content
    )
    final = events[-1].response
    assert final.usage.input_tokens == chat.usage.prompt_tokens
    assert client.responses.retrieve(final.id) == final
    assert list(client.responses.retrieve(final.id, stream=True, starting_after=5)) == events[6:]
    assert [item.role for item in client.responses.input_items.list(final.id)] == ["user", "assistant", "user"]
    client.responses.delete(final.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(final.id)


def test_embeddings_are_of_the_prompt_alone(served, client):
    texts = ["A fox ran.", "A fox ran away.", "The sun was warm and the sea was blue."]
    answer = client.embeddings.create(model="demo", input=texts)
    vectors = np.array([one.embedding for one in answer.data])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    alone = client.embeddings.create(model="demo", input=texts[1], encoding_format="float")
    np.testing.assert_allclose(vectors[1], alone.data[0].embedding, atol=1e-5)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]


def test_the_same_seed_gives_the_same_text(client):
    def story(seed):
        answer = client.chat.completions.create(model="demo", messages=STORY, temperature=1.0, seed=seed, max_tokens=60)
        return answer.choices[0].message.content

    assert story(11) == story(11)
    assert len({story(seed) for seed in range(4)}) > 1


def test_logprobs_are_of_the_tokens(client):
    answer = client.chat.completions.create(
        model="demo", messages=STORY, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob, abs=1e-5)
        assert token.logprob <= 0


def test_a_stop_string_ends_the_text_before_it(client):
    whole = client.completions.create(model="demo", prompt="Once upon a time", max_tokens=60, temperature=0)
    text = whole.choices[0].text
    stop = text[20:24]
    cut = client.completions.create(model="demo", prompt="Once upon a time", max_tokens=60, temperature=0, stop=stop)
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


@pytest.mark.timeout(120)
def test_sixty_four_streams_at_once(served):
    async def read(client, number):
        stream = await client.chat.completions.create(
            model="demo", messages=STORY, temperature=1.0, seed=number, max_tokens=40, stream=True
        )
        chunks = [chunk async for chunk in stream]
        return chunks[-1].choices[0].finish_reason

    async def everyone():
        # Without a timeout of its own the client gives up connecting after 5 s, which a busy machine can take.
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=100
        ) as client:
            return await asyncio.gather(*(read(client, number) for number in range(64)))

    reasons = asyncio.run(everyone())
    assert len(reasons) == 64
    assert set(reasons) <= {"stop", "length"}


def test_the_probes_and_the_metrics(served):
    for path in ("/livez", "/readyz", "/health"):
        assert get(served.url + path)[0] == 200
    status, text = get(served.url + "/metrics")
    assert status == 200
    for name in (
        "vllm:generation_tokens_total",
        "vllm:iteration_tokens_total_count",
        "vllm:request_queue_time_seconds",
    ):
        assert name in text


def test_a_refusal_names_the_field(client):
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model="demo", messages=STORY, n=9)
    assert refusal.value.param == "n"


def test_a_queue_producer_gets_its_text(served):
    connection = redis.Redis.from_url(served.redis_url)
    body = {"model": "demo", "messages": STORY, "max_tokens": 12, "temperature": 0}
    job = {"v": 1, "id": "story-1", "endpoint": "/v1/chat/completions", "body": body}
    connection.xadd("{quire}:ingress:default", {"m": msgpack.packb(job)})
    last, replies = "0", []
    while not (replies and replies[-1]["done"]):
        answer = connection.xread({"{quire}:reply:default:story-1": last}, block=20_000)
        assert answer, f"no reply; so far {replies}"
        entries = answer[0][1]
        replies += [msgpack.unpackb(fields[b"m"]) for _, fields in entries]
        last = entries[-1][0]
    connection.close()
    assert "".join(reply["text"] for reply in replies).strip()
    assert replies[-1].get("error") is None
    assert replies[-1]["usage"]["completion_tokens"] <= 12


def test_the_readme_producer_runs_as_printed(served):
    page = (REPOSITORY / "service" / "queue" / "README.md").read_text()
    example = page.split("```python\n", 1)[1].split("```", 1)[0]
    done = subprocess.run(
        [sys.executable, "-c", example, served.redis_url, "default", "demo", "Hello"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_signal_ends_every_process(tmp_path):
    running = Served(tmp_path)
    processes = running.descendants()
    assert len(processes) >= 3
    assert running.terminate(signal.SIGINT) == 0, running.output
    assert alive(processes) == set()


def test_a_second_ctrl_c_ends_the_drain(tmp_path):
    running = Served(tmp_path, "--drain-timeout=300", "-dp=2")
    processes = running.descendants()
    wish = {"model": "demo", "prompt": "Once", "max_tokens": 1900, "stream": True, "extra_body": {"ignore_eos": True}}
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        streams = [client.completions.create(**wish) for _ in range(8)]
        for stream in streams:
            next(stream)
        running.process.send_signal(signal.SIGINT)
        while "gateway drains" not in running.output:
            time.sleep(0.01)
        assert running.terminate(signal.SIGINT) == 128 + signal.SIGINT, running.output
        for stream in streams:
            with pytest.raises(openai.APIError, match="shut"):
                list(stream)
    assert alive(processes) == set()
    assert "ending without draining" in running.output
    assert "killed" not in running.output


def test_a_killed_parent_leaves_nothing_behind(tmp_path):
    running = Served(tmp_path)
    processes = running.descendants()
    running.process.kill()
    running.kill()
    deadline = time.monotonic() + 20
    while alive(processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(processes) == set()


def test_sigterm_under_load_lets_running_requests_finish(tmp_path):
    running, num_tokens = Served(tmp_path), 200
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        streams = [
            client.chat.completions.create(
                model="demo", messages=STORY, max_tokens=num_tokens, stream=True,
                stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
            )
            for _ in range(4)
        ]  # fmt: skip
        while not next(streams[-1]).choices[0].delta.content:
            pass
        assert running.terminate() == 0, running.output
        assert [list(stream)[-1].usage.completion_tokens for stream in streams] == 4 * [num_tokens]


def test_a_wrong_word_is_one_line_and_exit_2(tmp_path):
    for flags, word in [(["--port", "x"], "--port"), (["--model", str(tmp_path / "none")], "none")]:
        done = subprocess.run(
            [sys.executable, "-m", "service.cli.entry", "serve", "--data-dir", str(tmp_path / "d"), *flags],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=REPOSITORY,
            check=False,
        )
        assert done.returncode == 2
        assert word in done.stderr
        assert "Traceback" not in done.stderr


def worker_of(served) -> int:
    """The process id of the worker."""
    for pid in served.descendants():
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"service.cli.entry" in command and b"worker" in command:
            return pid
    raise AssertionError(f"no worker:\n{served.output}")


def test_a_worker_that_dies_is_started_again_and_its_requests_go_on(tmp_path):
    served = Served(tmp_path)
    try:
        wish = {"model": "demo", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 200, "ignore_eos": True}
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            wish["extra_body"] = {"ignore_eos": wish.pop("ignore_eos")}
            golden = client.completions.create(**wish).choices[0].text
            for _ in range(2):
                stream = client.completions.create(**wish, stream=True)
                text = next(stream).choices[0].text
                os.kill(worker_of(served), signal.SIGKILL)
                assert text + "".join(chunk.choices[0].text for chunk in stream) == golden
        assert served.output.count("worker ended by itself; restarting") == 2
        assert served.terminate() == 0
    finally:
        served.kill()


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_process_that_ends_by_the_same_ctrl_c_is_not_logged_as_an_error(monkeypatch, num_turns):
    """The gateway fails `num_turns` turns of the loop later."""
    stop = Shutdown()

    class Child:
        def __init__(self, verb):
            self.verb = verb
            self.is_stopped = asyncio.Event()

        @classmethod
        async def start(cls, verb, settings, environ):
            return cls(verb)

        async def wait_ready(self):
            if self.verb == WORKER:
                await self.is_stopped.wait()
            stop.set()
            for _ in range(num_turns):
                await asyncio.sleep(0)
            raise StartupError("it did not start")

        async def wait(self):
            await self.is_stopped.wait()

        async def stop(self, at_once):
            self.is_stopped.set()

    monkeypatch.setattr(children, "ChildProcess", Child)
    logged = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context["message"]))
    assert await serve._serve(Settings(redis_url="redis://nobody", port=0), stop) == 0
    gc.collect()
    assert logged == []


async def test_a_worker_that_ends_again_and_again_is_given_up(monkeypatch):
    """And one that was well for a while has all its lives again."""
    starts = []

    class Child:
        pid = 1

        def __init__(self, number):
            self.number = number

        @classmethod
        async def start(cls, verb, settings, environ):
            starts.append(settings)
            return cls(len(starts))

        async def wait_ready(self):
            if self.number % 3 == 0:
                raise StartupError("no memory is left")
            if self.number == 4:
                await asyncio.sleep(0.6)

        async def wait(self):
            if self.number == 5:
                await asyncio.sleep(0.6)
            return -9

    monkeypatch.setattr(children, "ChildProcess", Child)
    monkeypatch.setattr(children, "WELL_S", 0.5)
    worker = children.RestartingChild(WORKER, Settings(), restarts_s=(0.0,) * 5)
    await worker.start()
    async with asyncio.timeout(10):
        await worker.keep_running()
    assert len(starts) == 5 + 5


def test_a_program_with_the_engine_inside_gets_the_same_text(client):
    asked = {"temperature": 0.9, "top_p": 1.0, "seed": 5, "max_tokens": 30, "stop": ["."], "n": 2}
    chat = client.chat.completions.create(model="demo", messages=STORY, **asked)
    text = client.completions.create(model="demo", prompt="Once upon a time", **asked)
    with LLM() as llm:
        (chatted,) = llm.chat(STORY, SamplingParams(**asked), use_tqdm=False)
        (completed,) = llm.generate("Once upon a time", SamplingParams(**asked), use_tqdm=False)
    assert [one.text for one in chatted.outputs] == [one.message.content for one in chat.choices]
    assert [one.text for one in completed.outputs] == [one.text for one in text.choices]
    assert [one.finish_reason for one in completed.outputs] == [one.finish_reason for one in text.choices]
