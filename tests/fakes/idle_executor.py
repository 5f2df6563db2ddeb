"""An executor that computes nothing: all tokens are equal, and a step takes no time."""

from __future__ import annotations

from service.engine.step import FinishedTransfer, StepPlan, StepResult

TOKEN = 65


class IdleExecutor:
    def __init__(self, num_host_blocks: int = 0):
        self.num_host_blocks = num_host_blocks
        self.runs_ahead = False
        self._transfers: list[FinishedTransfer] = []

    def launch(self, plan: StepPlan) -> StepPlan:
        self.transfer(plan)
        return plan

    def transfer(self, plan: StepPlan) -> None:
        for is_out, copies in ((True, plan.swap_outs), (False, plan.swap_ins)):
            if copies:
                self._transfers.append(FinishedTransfer(is_out, len(copies), 1e-6 * len(copies)))

    def sample(self, launched: StepPlan) -> None:
        """Do nothing: all tokens are known."""

    def collect(self, launched: StepPlan) -> StepResult:
        return StepResult([TOKEN] * len(launched.sampled_sequences))

    def finished_transfers(self) -> list[FinishedTransfer]:
        done, self._transfers = self._transfers, []
        return done

    def wait_for_transfer(self) -> None:
        """Do nothing: transfers are done at once."""
