from service.engine.drafting.drafter import LateDrafts


def test_only_reading_a_token_waits():
    num_reads = []
    drafts = LateDrafts(range(4, 13, 3), lambda: (num_reads.append(1), [7, 8, 9])[1])
    assert len(drafts) == 3
    cut = drafts[:2]
    assert (len(cut), list(cut.rows), bool(drafts[:0])) == (2, [4, 7], False)
    assert not num_reads
    assert (tuple(drafts), tuple(cut), cut[-1]) == ((7, 8, 9), (7, 8), 8)
    assert num_reads
