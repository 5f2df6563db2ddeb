"""What of an output goes into which event."""

from service.engine.outputs import BranchOutput, Output
from service.errors import EndReason
from service.worker.job_events import event_of, without_end


def output(*token_ids: int, end: EndReason | None = None) -> Output:
    parts = (BranchOutput(0, token_ids, (), None),)
    return Output("j/1", parts, end, (), num_prompt_tokens=9, num_output_tokens=len(token_ids), num_cached_tokens=4)


def test_the_first_event_and_the_last_tell_what_the_job_has_cost_so_far():
    usages = [
        event_of("j", number, [output(5, 6, end=end)]).usage
        for number, end in ((1, None), (2, None), (3, EndReason.LENGTH))
    ]
    assert [usage and (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) for usage in usages] == [
        (9, 2, 4),
        None,
        (9, 2, 4),
    ]


def test_news_of_a_job_that_goes_on_elsewhere_keep_what_only_a_first_event_tells():
    first, later = (event_of("j", number, [output(5, end=EndReason.SHUTDOWN)]) for number in (1, 2))
    assert without_end(first).usage == first.usage
    assert without_end(later).usage is None
    assert (without_end(first).end, without_end(later).end) == (None, None)
