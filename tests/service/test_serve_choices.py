"""Choices, beams and requests as resources on the demo model, as the official client and plain HTTP see them."""

import json
import time
import urllib.request

import openai
import pytest

from tests.support.served import Served

STORY = [{"role": "user", "content": "Tell me a story about a fox."}]
PROMPT = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 24}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    running = Served(tmp_path_factory.mktemp("data"))
    yield running
    running.terminate()


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as made:
        yield made


def texts(answer):
    return [choice.text for choice in answer.choices]


def streamed(chunks, n):
    found = [""] * n
    for chunk in chunks:
        found[chunk.choices[0].index] += chunk.choices[0].text
    return found


def test_the_same_seed_gives_the_same_choices_streamed_or_not(client):
    whole = texts(client.completions.create(**PROMPT, n=4, seed=7, temperature=1.0))
    assert len(set(whole)) > 1
    assert texts(client.completions.create(**PROMPT, n=4, seed=7, temperature=1.0)) == whole
    assert streamed(client.completions.create(**PROMPT, n=4, seed=7, temperature=1.0, stream=True), 4) == whole


def test_the_first_choice_is_what_a_request_for_one_gets(client):
    one = texts(client.completions.create(**PROMPT, seed=7, temperature=1.0))
    assert texts(client.completions.create(**PROMPT, n=3, seed=7, temperature=1.0))[0] == one[0]


def test_the_best_of_four_are_the_likeliest_of_the_four(client):
    four = client.completions.create(**PROMPT, n=4, seed=3, temperature=1.0, logprobs=0)

    best = client.completions.create(**PROMPT, n=2, best_of=4, seed=3, temperature=1.0)

    def mean(choice):
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    by_mean = [choice.text for choice in sorted(four.choices, key=mean, reverse=True)]
    assert texts(best) == by_mean[:2]
    assert best.usage.completion_tokens == four.usage.completion_tokens


def test_a_stop_string_cuts_each_choice_for_itself(client):
    whole = texts(client.completions.create(**PROMPT, n=4, seed=7, temperature=1.0))
    cut = client.completions.create(**PROMPT, n=4, seed=7, temperature=1.0, stop=["e "])
    assert texts(cut) == [text.partition("e ")[0] for text in whole]
    for choice, text in zip(cut.choices, whole, strict=True):
        assert "e " not in text or choice.finish_reason == "stop"


def test_beams(client):
    beams = {"use_beam_search": True, "beam_width": 4}
    answer = client.completions.create(**PROMPT, n=3, extra_body=beams)
    assert len(set(texts(answer))) == 3
    assert texts(client.completions.create(**PROMPT, n=3, extra_body=beams)) == texts(answer)
    assert streamed(client.completions.create(**PROMPT, n=3, extra_body=beams, stream=True), 3) == texts(answer)
    greedy = texts(client.completions.create(**PROMPT, temperature=0))
    assert texts(client.completions.create(**PROMPT, extra_body={**beams, "beam_width": 1})) == greedy


def test_choices_of_several_prompts(client):
    prompts = ["Once upon a time", "There was a"]
    both = client.completions.create(**{**PROMPT, "prompt": prompts}, n=2, seed=5, temperature=1.0)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    for number, prompt in enumerate(prompts):
        alone = client.completions.create(**{**PROMPT, "prompt": prompt}, n=2, seed=5, temperature=1.0)
        assert texts(both)[2 * number : 2 * number + 2] == texts(alone)


def test_in_the_background(served, client):
    body = {**PROMPT, "n": 2, "seed": 7, "background": True, "temperature": 1.0}
    request = urllib.request.Request(
        f"{served.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        assert response.status == 202
        state = json.load(response)
    deadline = time.monotonic() + 30
    while state["status"] != "completed":
        assert time.monotonic() < deadline, state
        time.sleep(0.05)
        with urllib.request.urlopen(f"{served.url}/v1/requests/{state['id']}", timeout=10) as response:
            state = json.load(response)
    found = [choice["text"] for choice in state["response"]["choices"]]
    assert found == texts(client.completions.create(**PROMPT, n=2, seed=7, temperature=1.0))
