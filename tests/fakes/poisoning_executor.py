"""An executor that fills unheld blocks with NaN, so that reading one shows."""

from __future__ import annotations

from typing import Any

import numpy as np

from model.ops.interface import Array
from service.engine.execution.executor import ModelExecutor
from service.engine.kv.block_pool import BlockPool
from service.engine.step import StepPlan
from tests.support.paged import nan_of


class PoisoningExecutor(ModelExecutor):
    """Executor on a cache with one block more than `pool` has: the last one holds the poison."""

    def __init__(
        self, model, eos_token_ids: frozenset[int], max_num_seqs: int, max_blocks: int, pool: BlockPool, **how: bool
    ):
        super().__init__(model, eos_token_ids, max_num_seqs, max_blocks, **how)
        self._pool = pool

    def attach(self, kv: Array, **how: Any) -> None:
        super().attach(kv, **how)
        self.model.ops.load_parallel([kv[-1:]], lambda _, start, out: out.fill(nan_of(out.dtype)))
        self._poison()

    def launch(self, plan: StepPlan) -> Any:
        launched = super().launch(plan)
        self._poison()  # after all reads of blocks that were free before
        return launched

    def transfer(self, plan: StepPlan) -> None:
        super().transfer(plan)
        if not plan.chunks:
            self._poison()

    def _poison(self) -> None:
        free = np.array(self._pool._free, np.int32)
        if len(free):
            ops = self.model.ops
            with ops.scratch():
                ops.copy_blocks(self.kv, *ops.upload_all([np.full_like(free, self._pool.num_blocks), free]))
