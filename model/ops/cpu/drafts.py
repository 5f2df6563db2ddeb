"""Specification of the operations that only an EAGLE-3 head needs, in NumPy."""

from __future__ import annotations

import numpy as np

from model.ops.interface import Array, DraftPlan, DraftRuns


def plan_drafts(sampled: Array, rows: tuple[Array, Array], runs: DraftRuns, out: DraftPlan) -> None:
    """Implement `DraftOps.plan_drafts`."""
    (token_ids, positions), tables, block_size = rows, runs.block_tables, runs.block_size
    num_steps = len(out.slots)
    for s, (row, sample, length, num_tokens) in enumerate(runs.rows.tolist()):
        accepted = 0
        while accepted + 1 < length and sampled[sample + accepted] == token_ids[row + accepted + 1]:
            accepted += 1
        is_there = length > 0
        last = int(positions[row]) + accepted if is_there else -1
        out.last_rows[s], out.num_accepted[s] = row + accepted if is_there else -1, accepted
        out.places[:, s] = last + np.arange(num_steps + 2)
        out.slots[:, s] = -1
        for step in range(1, num_steps if is_there else 0):
            block, offset = divmod(last + step, block_size)
            if last + step < num_tokens and block < tables.shape[1]:
                out.slots[step, s] = int(tables[s, block]) * block_size + offset


def spread_logits(logits: Array, columns: Array) -> np.ndarray:
    """Implement `DraftOps.spread_logits`."""
    known = (columns >= 0) & (columns < logits.shape[1])
    spread: np.ndarray = np.where(known, logits[:, np.where(known, columns, 0)], np.float32(-np.inf))
    return spread
