from service.engine.drafting.drafter import NGRAM, SOURCES, SUFFIX
from service.engine.drafting.stats import DraftStats


def test_accepted_tokens_count_by_position_and_source():
    stats = DraftStats()
    stats.add(NGRAM, 2, 4)
    stats.add(SUFFIX, 0, 3)
    stats.add(NGRAM, 1, 1)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 8, 3)
    assert stats.num_accepted_per_pos[:3] == [2, 1, 0]
    assert stats.num_drafted_by_source[SOURCES.index(NGRAM)] == 5
    assert stats.num_accepted_by_source[SOURCES.index(SUFFIX)] == 0
