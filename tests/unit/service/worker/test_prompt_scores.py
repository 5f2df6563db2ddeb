"""Log-probabilities of prompts on their way out: never more in an event than it may hold, and counted when taken up."""

from service.engine.output_processor import BranchOutput, RequestOutput
from service.engine.step import TokenLogprob
from service.errors import EndReason
from service.queue.codec import LIMITS, decode, encode, unpack_ids
from service.queue.messages import Event
from service.worker.events import MAX_EVENT_TOKENS, event_of, split_by_event
from service.worker.recovery import branch_histories, num_scored_tokens

WIDEST = TokenLogprob(-1.5, tuple(range(20)), (-0.5,) * 20)


def scored(first: int, count: int) -> RequestOutput:
    part = BranchOutput(0, tuple(range(first, first + count)), (WIDEST,) * count, None, is_prompt=True)
    return RequestOutput("j/1", (part,), None, (), 10, 0, 0)


def generated(token: int, end: EndReason | None = None) -> RequestOutput:
    part = BranchOutput(0, (token,), (WIDEST,), end)
    return RequestOutput("j/1", (part,), end, (0,) if end else (), 10, 1, 0)


def test_a_long_prompt_takes_several_events_that_fit():
    outputs = [*(scored(first, 256) for first in range(0, 256 * 40, 256)), generated(7), generated(8, EndReason.STOP)]
    events = [event_of("j", number, some) for number, some in enumerate(split_by_event(outputs), 1)]
    assert len(events) == 3
    assert all(len(encode(event)) <= LIMITS[Event].max_bytes for event in events)
    received = [decode(Event, encode(event)) for event in events]
    assert received == events
    prompt = [
        token for event in received for part in event.parts if part.is_prompt for token in unpack_ids(part.tokens)
    ]
    assert prompt == list(range(256 * 40))
    assert [event.end for event in received] == [None, None, EndReason.STOP]
    assert unpack_ids(received[-1].parts[-1].tokens) == [7, 8]
    assert num_scored_tokens(received) == 256 * 40 + 1
    (past,) = branch_histories(received)
    assert past.token_ids == (7, 8)
    assert past.sum_logprob == -3.0


def test_what_fits_is_one_event():
    assert len(split_by_event([scored(0, MAX_EVENT_TOKENS - 1), generated(7)])) == 1
    assert len(split_by_event([scored(0, MAX_EVENT_TOKENS + 5)])) == 1
    assert num_scored_tokens([event_of("j", 1, [generated(7)])]) == 0
