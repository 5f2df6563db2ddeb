"""Answers whose workers are killed meanwhile, each compared with the same answer undisturbed.

`python -m tests.chaos.resume_answers --times 1000` asks a gateway with the demo model, kills workers at the claim, in
the prefill, after a token and before the end, until this many answers were resumed by another worker and compared.
Kinds in turn: greedy, seeded, penalised, several choices, best_of, beams, log-probabilities, stop strings, structured
output, Anthropic's messages; streamed and not. Texts and ends must be equal byte for byte, log-probabilities up to the
rounding of other batch sizes. With `--drafting` the workers draft by n-gram, suffix and EAGLE-3 in turn, so that
another drafter resumes; the answers to compare with come without drafts.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from service.config.settings import Settings
from service.gateway.core.served_model import ServedModel
from service.gateway.process import serving
from tests.support.demo_engine import DEMO
from tests.support.fleet import Fleet
from tests.support.measuring import flags, report

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
MODEL = "demo"
FAULTS = ("token-6", "claim", "token-12", "prefill", "token-3", "settle")
LOGPROB_TOLERANCE = 2e-4
NUM_WORKERS = 2
LEASE_S = 1.0
STEP_S = 0.01
SUBJECTS = ("a fox", "the sea", "two friends", "rain", "a lost key", "bread", "winter")
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1, "seed": 7},
    "penalised": {"temperature": 0.9, "seed": 8, "presence_penalty": 0.6, "frequency_penalty": 0.4, "top_p": 0.9},
    "n = 4": {"temperature": 1, "seed": 9, "n": 4, "max_tokens": 20},
    "best of 4": {"temperature": 1, "seed": 10, "best_of": 4, "n": 2, "max_tokens": 20},
    "beam 4": {"temperature": 0, "use_beam_search": True, "beam_width": 4, "n": 4, "max_tokens": 20},
    "logprobs": {"temperature": 1, "seed": 11, "logprobs": 3},
    "stop strings": {"temperature": 1, "seed": 12, "stop": ["and", ". "], "n": 2, "max_tokens": 60},
    "structured output": {"temperature": 1, "seed": 13, "guided_regex": "[A-Z][a-z ]{60,90}[.]", "ignore_eos": False},
}
DRAFTING = (
    '{"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1, "prompt_lookup_max": 4}',
    '{"method": "suffix", "num_speculative_tokens": 8}',
    '{"method": "eagle3", "num_speculative_tokens": 3}',
)
STREAMED = ("greedy", "seeded", "n = 4", "logprobs", "stop strings", "structured output")


@dataclass(frozen=True)
class PlannedRequest:
    kind: str
    path: str
    body: str  # JSON

    @property
    def is_streamed(self) -> bool:
        return bool(json.loads(self.body).get("stream"))


@dataclass
class Answer:
    """Text and end of each choice; log-probabilities apart."""

    choices: dict[int, tuple[str, str | None]]
    logprobs: list[float]
    num_accepted_drafts: int = 0  # as far as usage says

    def is_as(self, golden: Answer) -> bool:
        return (
            self.choices == golden.choices
            and len(self.logprobs) == len(golden.logprobs)
            and np.allclose(self.logprobs, golden.logprobs, atol=LOGPROB_TOLERANCE)
        )


@dataclass
class Tally:
    """Results. `num_resumed`: answers compared that were resumed at least once."""

    num_resumed: int = 0
    num_compared: int = 0
    num_different: int = 0
    num_kills: int = 0
    num_accepted_drafts: int = 0
    resumed_by_kind: dict[str, int] = field(default_factory=dict)
    different: list[str] = field(default_factory=list)


def options(num_subjects: int) -> list[PlannedRequest]:
    found = []
    for subject, (kind, fields) in itertools.product(SUBJECTS[:num_subjects], KINDS.items()):
        body = {
            "model": MODEL,
            "max_tokens": 32,
            "ignore_eos": True,
            "prompt": f"A story about {subject}. Once",
            **fields,
        }
        for is_streamed in (False, True)[: 1 + (kind in STREAMED)]:
            found.append(PlannedRequest(kind, COMPLETIONS, json.dumps({**body, "stream": is_streamed})))
        talk = {"messages": [{"role": "user", "content": f"Tell me a story about {subject}."}], "temperature": 0}
        if kind == "greedy":  # Anthropic's API has no seed
            for is_streamed in (False, True):
                body = {"model": MODEL, "max_tokens": 32, **talk, "stream": is_streamed}
                found.append(PlannedRequest("messages", MESSAGES, json.dumps(body)))
    return found


async def ask(http: aiohttp.ClientSession, url: str, planned: PlannedRequest) -> tuple[str, Answer]:
    """Send a request; return its id and answer."""
    async with http.post(
        url + planned.path, data=planned.body, headers={"Content-Type": "application/json"}
    ) as response:
        data = await response.text()
        assert response.status == 200, (planned, data)
        if planned.is_streamed:
            frames = re.findall(r"^data: (\{.*\})$", data, re.MULTILINE)
            end = '{"type":"message_stop"}' if planned.path == MESSAGES else "[DONE]"
            assert data.endswith(f"data: {end}\n\n"), (planned, data[-200:])
        else:
            frames = [data]
        read = _read_message if planned.path == MESSAGES else _read
        return response.headers["X-Request-Id"], read(frames)


def _read(frames: list[str]) -> Answer:
    texts: dict[int, str] = {}
    ends: dict[int, str | None] = {}
    logprobs: list[tuple[int, float]] = []
    num_accepted = 0
    for frame in map(json.loads, frames):
        assert "error" not in frame, frame
        details = (frame.get("usage") or {}).get("completion_tokens_details") or {}
        num_accepted += details.get("accepted_prediction_tokens", 0)
        for choice in frame["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + choice["text"]
            ends[index] = choice["finish_reason"] or ends.get(index)
            received = (choice.get("logprobs") or {}).get("token_logprobs") or []
            logprobs += [(index, value) for value in received]
    logprobs.sort(key=lambda pair: pair[0])
    choices = {index: (text, ends[index]) for index, text in texts.items()}
    return Answer(choices, [value for _, value in logprobs], num_accepted)


def _read_message(frames: list[str]) -> Answer:
    """Read a message of one text block, whole or as events, each once and in order."""
    events = [json.loads(frame) for frame in frames]
    if events[0]["type"] == "message":
        (block,) = events[0]["content"]
        return Answer({0: (block["text"], events[0]["stop_reason"])}, [])
    types = [event["type"] for event in events if event["type"] != "ping"]
    first, last = ["message_start", "content_block_start"], ["content_block_stop", "message_delta", "message_stop"]
    assert types == [*first, *["content_block_delta"] * (len(types) - 5), *last], types
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    return Answer({0: (text, events[-2]["delta"]["stop_reason"])}, [])


@asynccontextmanager
async def open_house(folder: Path):
    """Open a gateway on the fleet's Redis, and its clients."""
    fleet = Fleet(folder, lease_s=LEASE_S)
    try:
        settings = Settings(
            model=DEMO, served_model_name=MODEL, port=0, drain_timeout=1.0, max_connections_per_client=4096
        )
        queue = await fleet.gateway()
        async with (
            serving(settings, ServedModel.read(settings), queue) as url,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
        ):
            yield fleet, http, url
        await queue.close()
    finally:
        fleet.close()


async def run(
    folder: Path,
    times: int,
    num_at_once: int,
    num_subjects: int = len(SUBJECTS),
    needed: frozenset[str] = frozenset(),
    drafting: tuple[str, ...] = (),
) -> Tally:
    """Run rounds of `num_at_once` requests and a kill until answers of all `needed` kinds were resumed."""
    tally = Tally()
    async with open_house(folder) as (fleet, http, url):
        await fleet.have(NUM_WORKERS, STEP_S)
        wanted = options(num_subjects)
        undisturbed = await asyncio.gather(*(ask(http, url, planned) for planned in wanted))
        goldens = {planned: answer for planned, (_, answer) in zip(wanted, undisturbed, strict=True)}
        if drafting:
            fleet.drafting = drafting
            await asyncio.gather(*(asyncio.to_thread(worker.end) for worker in fleet.living))
        turns, faults = itertools.cycle(goldens), itertools.cycle(FAULTS)
        while tally.num_resumed < times or not needed <= tally.resumed_by_kind.keys():
            await fleet.have(NUM_WORKERS, STEP_S)
            some = list(itertools.islice(turns, num_at_once))
            fault = next(faults)
            fleet.order(fault)
            answers = await asyncio.gather(*(ask(http, url, planned) for planned in some))
            await fleet.obeyed(fault)
            tally.num_kills += 1
            taken_over = set(re.findall(r"goes on with.* job=(\S+)", fleet.output))
            for planned, (request_id, answer) in zip(some, answers, strict=True):
                _compare(tally, planned, answer, goldens[planned], request_id in taken_over)
    return tally


def _compare(tally: Tally, planned: PlannedRequest, answer: Answer, golden: Answer, is_resumed: bool) -> None:
    tally.num_compared += 1
    tally.num_accepted_drafts += answer.num_accepted_drafts
    if is_resumed:
        tally.num_resumed += 1
        tally.resumed_by_kind[planned.kind] = tally.resumed_by_kind.get(planned.kind, 0) + 1
    if not answer.is_as(golden):
        tally.num_different += 1
        tally.different.append(f"{planned} was {golden}, is {answer}")


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--times", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=60)
    parser.add_argument("--drafting", action="store_true", help="let the workers draft (default: no)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        start_s = time.monotonic()
        tally = asyncio.run(run(Path(folder), args.times, args.at_once, drafting=DRAFTING if args.drafting else ()))
    report({**asdict(tally), "elapsed_s": round(time.monotonic() - start_s, 1)}, args.out)
    return int(tally.num_different != 0)


if __name__ == "__main__":
    sys.exit(main())
