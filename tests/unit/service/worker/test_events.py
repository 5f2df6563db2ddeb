"""The split of outputs into events."""

from dataclasses import fields

from service.config.settings import Settings
from service.engine.output_processor import BranchOutput, RequestOutput
from service.engine.step import TokenLogprob
from service.errors import EndReason
from service.queue.codec import decode, encode
from service.queue.messages import Event
from service.worker.events import event_of, without_end


def output(*token_ids: int, end: EndReason | None = None) -> RequestOutput:
    parts = (BranchOutput(0, token_ids, (), None),)
    return RequestOutput(
        "j/1", parts, end, (), num_prompt_tokens=9, num_output_tokens=len(token_ids), num_cached_tokens=4
    )


def test_the_first_and_last_event_carry_the_jobs_cost_so_far():
    usages = [
        event_of("j", number, [output(5, 6, end=end)]).usage
        for number, end in ((1, None), (2, None), (3, EndReason.LENGTH))
    ]
    assert [usage and (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) for usage in usages] == [
        (9, 2, 4),
        None,
        (9, 2, 4),
    ]


def test_usage_counts_drafts_only_if_there_were_any():
    plain = output(5, end=EndReason.LENGTH)
    drafted = plain._replace(num_drafts=7, num_accepted_drafts=4)
    usage = decode(Event, encode(event_of("j", 2, [drafted]))).usage
    assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (4, 3)
    assert b"prediction" not in encode(event_of("j", 2, [plain]))


def test_a_first_event_without_its_end_keeps_its_usage():
    first, later = (event_of("j", number, [output(5, end=EndReason.SHUTDOWN)]) for number in (1, 2))
    assert without_end(first).usage == first.usage
    assert without_end(later).usage is None
    assert (without_end(first).end, without_end(later).end) == (None, None)


def test_the_prompt_and_the_most_branches_fit_in_one_event():
    max_n = next(field for field in fields(Settings) if field.name == "max_n").metadata["high"]
    received = (TokenLogprob(-1.0, (1, 2), (-1.0, -2.0)),)
    parts = [BranchOutput(branch, (5,), received, EndReason.LENGTH) for branch in range(max_n)]
    outputs = [RequestOutput("j", (BranchOutput(0, (3,), received, None, is_prompt=True),), None, (), 2, 0, 0)]
    outputs += [RequestOutput("j", (part,), None, (), 2, part.branch + 1, 0) for part in parts[:-1]]
    outputs.append(RequestOutput("j", (parts[-1],), EndReason.LENGTH, tuple(range(max_n)), 2, max_n, 0))
    event = event_of("01ARZ3NDEKTSV4RRFFQ69G5FAV", 1, outputs)
    assert len(event.parts) == max_n + 1
    assert decode(Event, encode(event)) == event
