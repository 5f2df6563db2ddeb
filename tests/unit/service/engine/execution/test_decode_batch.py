"""Rows that stay, against the same step's arrays made from nothing."""

import random
from array import array

import numpy as np
import pytest

from model.sampling_params import SamplingParams
from model.step_inputs import NO_PENDING_ROW
from service.engine.drafting.drafter import LateDrafts
from service.engine.execution.decode_batch import DecodeBatch
from service.engine.request import EngineRequest
from service.engine.sequence import Sequence, SequenceGroup
from service.engine.step import Chunk, StepPlan

BLOCK, MAX_ROWS, MAX_BLOCKS, FIRST_ROPE_ROW = 4, 9, 12, 500


def sequence(number: int, rng: random.Random) -> Sequence:
    """Make a sequence of 1 to 20 tokens, with all its blocks."""
    prompt = tuple(rng.choices(range(100), k=rng.randrange(1, 21)))
    request = EngineRequest(request_id=str(number), prompt=prompt, sampling=SamplingParams(max_tokens=20))
    made = SequenceGroup(request, frozenset(), first_rope_row=rng.choice((0, FIRST_ROPE_ROW))).branches[0]
    made.block_table.extend(rng.randrange(1000) for _ in range(-(-len(prompt) // BLOCK)))
    made.num_computed_tokens = len(prompt) - 1
    return made


class Steps:
    """Sequences that come, decode and leave as they like; what each step sampled is settled a step later."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.rows = DecodeBatch(MAX_ROWS, MAX_BLOCKS, BLOCK)
        self.seen = np.full((MAX_ROWS, MAX_BLOCKS), -1, np.int32)  # by one who looks at stale rows alone
        self.running: list[Sequence] = []
        self.last: list[Sequence] = []  # by row, of the step before
        self.count = 0

    def plan(self) -> StepPlan:
        rng = self.rng
        self.running = [one for one in self.running if rng.random() < 0.9 and one.num_tokens < 40]
        while len(self.running) < MAX_ROWS and rng.random() < 0.6:
            self.count += 1
            self.running.append(sequence(self.count, rng))
        changed = set()
        for one in self.running:
            if one.num_computed_tokens >= len(one.block_table) * BLOCK:
                one.block_table.append(rng.randrange(1000))
                changed.add(one)
            elif rng.random() < 0.1:
                one.block_table[rng.randrange(len(one.block_table))] = rng.randrange(1000)
                changed.add(one)
        rng.shuffle(self.running)
        computed = [one for one in self.running if rng.random() < 0.95]
        chunks = tuple(Chunk(one, one.num_computed_tokens, 1, (one,)) for one in computed)
        return StepPlan(chunks, changed_tables=tuple(chunk for chunk in chunks if chunk.sequence in changed))

    def settle(self, plan: StepPlan) -> None:
        """Update sequences as the engine does: the previous step is known, this one is pending."""
        for one in self.running:
            if one.num_pending_tokens:
                one.num_pending_tokens = 0
                one.token_ids.append(self.rng.randrange(100))
        for chunk in plan.chunks:
            chunk.sequence.num_pending_tokens = 1
            chunk.sequence.num_computed_tokens = chunk.end


@pytest.mark.parametrize("seed", range(6))
def test_rows_are_what_they_would_be_if_made_anew(seed):
    steps = Steps(seed)
    for _ in range(200):
        plan = steps.plan()
        # who sits out a step has no row any more: the step before that is settled, so that its token is known
        layout = steps.rows.lay_out(plan, {})
        inputs = layout.inputs
        assert [chunk.sequence for chunk in layout.chunks] == layout.decodes
        assert sorted(layout.decodes, key=id) == sorted((chunk.sequence for chunk in plan.chunks), key=id)
        assert [layout.decodes[row] for row in layout.row_of_decode] == [one.sequence for one in plan.chunks]
        steps.seen[: len(plan.chunks)][inputs.dirty_tables] = inputs.tables[inputs.dirty_tables]
        steps.rows.dirty_tables[:] = False
        for row, one in enumerate(layout.decodes):
            start, table = one.num_computed_tokens, list(one.block_table)
            assert inputs.positions[row] == start + one.group.first_rope_row
            assert inputs.context_lens[row] == start + 1
            assert inputs.slots[row] == table[start // BLOCK] * BLOCK + start % BLOCK
            assert inputs.tables[row, : len(table)].tolist() == steps.seen[row, : len(table)].tolist() == table
            if one.num_pending_tokens:
                assert steps.last[inputs.pending_token_row[row]] is one
            else:
                assert (inputs.pending_token_row[row], inputs.token_ids[row]) == (NO_PENDING_ROW, one.token_ids[start])
        steps.last = layout.decodes
        steps.settle(plan)


def test_rows_that_stay_are_not_moved_and_nothing_is_stale():
    rng = random.Random(1)
    rows, running = DecodeBatch(MAX_ROWS, MAX_BLOCKS, BLOCK), [sequence(number, rng) for number in range(4)]

    def lay_out(of: list[Sequence]):
        return rows.lay_out(StepPlan(tuple(Chunk(one, one.num_computed_tokens, 1, (one,)) for one in of)), {})

    first = lay_out(running)
    assert first.inputs.dirty_tables.all()
    rows.dirty_tables[:] = False
    for one in running:
        one.num_computed_tokens += 1
        one.num_pending_tokens = 1
    again = lay_out(running)
    assert again.decodes is first.decodes
    assert not again.inputs.dirty_tables.any()
    assert again.inputs.pending_token_row.tolist() == [0, 1, 2, 3]
    for one in running:
        one.num_computed_tokens += 1
    fewer = lay_out([running[3], running[0], running[2]])
    assert fewer.decodes == [running[0], running[3], running[2]]  # the last one fills what is left
    assert fewer.inputs.pending_token_row.tolist() == [0, 3, 2]
    assert fewer.inputs.dirty_tables.tolist() == [False, True, False]


def test_a_decode_that_branches_before_longer_chunks_is_not_plain():
    """A prompt that was found in the cache but for its last token, and is to be continued twice."""
    rng = random.Random(3)
    rows = DecodeBatch(MAX_ROWS, MAX_BLOCKS, BLOCK)
    first, leader, follower, prompt = (sequence(number, rng) for number in range(4))
    prompt.num_computed_tokens = 0
    decodes = [Chunk(one, one.num_computed_tokens, 1, due) for one, due in ((first, (first,)), (leader, (leader,)))]
    prefills = Chunk(prompt, 0, len(prompt.token_ids), (prompt,))
    assert len(prompt.token_ids) > 1
    assert rows.lay_out(StepPlan((*decodes, prefills)), {}).is_one_token_each
    decodes[1] = decodes[1]._replace(sampled_sequences=(leader, follower))
    assert not rows.lay_out(StepPlan((*decodes, prefills)), {}).is_one_token_each


def test_longer_chunks_follow_the_rows():
    rng = random.Random(2)
    rows, (decoding, prompt) = DecodeBatch(MAX_ROWS, MAX_BLOCKS, BLOCK), [sequence(number, rng) for number in range(2)]
    prompt.token_ids[:], prompt.num_pending_tokens = array("I", range(10, 16)), 1
    prompt.block_table[:] = prompt.block_table[:0]
    prompt.block_table.extend([7, 9])
    chunks = (Chunk(decoding, decoding.num_computed_tokens, 1, (decoding,)), Chunk(prompt, 3, 4, (prompt,)))
    inputs = rows.lay_out(StepPlan(chunks), {prompt: 5}).inputs
    assert inputs.token_ids[1:].tolist() == [13, 14, 15, 0]
    assert inputs.pending_token_row[1:].tolist() == [NO_PENDING_ROW] * 3 + [5]
    assert prompt.group.first_rope_row == FIRST_ROPE_ROW
    assert inputs.positions[1:].tolist() == [503, 504, 505, 506]
    assert inputs.slots[1:].tolist() == [31, 36, 37, 38]
    assert inputs.query_start.tolist() == [1, 5]
    assert inputs.logit_rows.tolist() == [0, 4]
    assert inputs.context_lens[1:].tolist() == [7]
    assert inputs.block_tables(np.arange(1), BLOCK)[1, :2].tolist() == [7, 9]


def test_drafts_are_rows_with_the_table_of_their_sequence():
    rng = random.Random(4)
    rows = DecodeBatch(MAX_ROWS, MAX_BLOCKS, BLOCK, drafts_are_decodes=True)
    decoding, drafted, other, prompt = (sequence(number, rng) for number in range(4))
    for one, block in ((drafted, 7), (other, 20)):
        one.token_ids[:], one.num_computed_tokens = array("I", range(10, 16)), 5
        one.block_table[:] = array("i", [block, block + 1])
    chunks = (
        Chunk(decoding, decoding.num_computed_tokens, 1, (decoding,)),
        Chunk(drafted, 5, 3, (drafted,), (77, 78)),
        Chunk(other, 5, 2, (other,), (88,)),
        Chunk(prompt, 0, len(prompt.token_ids), (prompt,)),
    )
    layout = rows.lay_out(StepPlan(chunks), {})
    inputs = layout.inputs
    assert (inputs.num_decodes, inputs.num_draft_rows, inputs.chunk_lens.tolist()) == (6, 5, [len(prompt.token_ids)])
    assert inputs.token_ids[1:6].tolist() == [15, 77, 78, 15, 88]
    first, last = drafted.group.first_rope_row, other.group.first_rope_row
    assert (first, last) == (0, FIRST_ROPE_ROW)
    assert inputs.positions[1:6].tolist() == [5, 6, 7, last + 5, last + 6]
    assert inputs.slots[1:6].tolist() == [33, 34, 35, 85, 86]
    assert inputs.context_lens[1:].tolist() == [6, 7, 8, 6, 7, len(prompt.token_ids)]
    assert inputs.tables[1:, :2].tolist() == [[7, 8]] * 3 + [[20, 21]] * 2
    assert inputs.dirty_tables.all()
    assert inputs.logit_rows.tolist() == [*range(6), 5 + len(prompt.token_ids)]
    assert inputs.query_start.tolist() == [6, 6 + len(prompt.token_ids)]
    assert layout.first_rows()[id(chunks[3])] == 6

    rows.dirty_tables[:] = False
    again = rows.lay_out(StepPlan((chunks[0], Chunk(other, 5, 1, (other,)))), {}).inputs
    assert again.dirty_tables.tolist() == [False, True]  # where a draft's table was
    assert again.tables[1, :2].tolist() == [20, 21]


def test_late_drafts_are_taken_from_the_device_unread():
    rows = DecodeBatch(MAX_ROWS, MAX_BLOCKS, BLOCK, drafts_are_decodes=True)
    one = sequence(0, random.Random(4))
    one.token_ids[:], one.num_computed_tokens = array("I", range(10, 16)), 5
    chunk = Chunk(one, 5, 3, (one,), LateDrafts(range(20, 24, 2), pytest.fail))
    inputs = rows.lay_out(StepPlan((chunk,)), {}).inputs
    assert inputs.token_ids.tolist() == [15, 0, 0]
    assert inputs.pending_token_row.tolist() == [NO_PENDING_ROW, 20, 22]


def test_drafts_beyond_the_rows_are_chunks():
    rng = random.Random(5)
    rows = DecodeBatch(MAX_ROWS, MAX_BLOCKS, BLOCK, drafts_are_decodes=True)
    drafted = [sequence(number, rng) for number in range(2)]
    for one in drafted:
        one.block_table.extend([3, 4])
    chunks = [Chunk(one, one.num_computed_tokens, 6, (one,), (1, 2, 3, 4, 5)) for one in drafted]
    inputs = rows.lay_out(StepPlan(tuple(chunks)), {}).inputs
    assert (inputs.num_decodes, inputs.num_draft_rows, inputs.chunk_lens.tolist()) == (6, 6, [6])
    assert len(inputs.logit_rows) == 12
    inputs = DecodeBatch(MAX_ROWS, MAX_BLOCKS, BLOCK).lay_out(StepPlan(tuple(chunks)), {}).inputs
    assert (inputs.num_decodes, inputs.chunk_lens.tolist()) == (0, [6, 6])
