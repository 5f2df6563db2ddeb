"""Ends a batch: writes its results to files, in input order, in bounded steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from service.errors import STORAGE_QUOTA_EXCEEDED
from service.gateway.batches.files import OUTPUT
from service.gateway.batches.input_file import InputFile
from service.gateway.batches.lines import BadInput, line_name, not_run_line, read_line
from service.queue.interface import GatewayQueue
from service.queue.records import ANSWERED_WELL, LINE_OVERHEAD_BYTES, Batch, BatchStatus, Move, StoredFile

LINES_AT_ONCE = 256
BYTES_AT_ONCE = 1 << 20
NOT_RUN_REASONS: Mapping[BatchStatus | None, tuple[str, str]] = {
    BatchStatus.CANCELLED: ("batch_cancelled", "The batch was cancelled."),
    BatchStatus.EXPIRED: ("batch_expired", "The batch ran past its completion window."),
    BatchStatus.FAILED: (STORAGE_QUOTA_EXCEEDED, "There was no room left to store the answer."),
}


@dataclass(frozen=True)
class _Files:
    """File ids derived from the batch's, so that every gateway writes the same files."""

    output: str
    error: str


async def write_result_files(queue: GatewayQueue, batch: Batch, input_file: InputFile) -> Batch:
    """Write or resume the batch's files; return the batch with their ids. Raises QueueUnavailable."""
    files = _Files(*(f"file-{batch.batch_id.removeprefix('batch_')}-{kind}" for kind in ("output", "error")))
    marks = await queue.batches.line_marks(batch.batch_id)
    number = (await queue.batches.moved_lines(batch.batch_id)).num_lines
    while number < batch.num_total:
        number = await _move_lines(queue, batch, input_file, files, marks, number)
    moved = await queue.batches.moved_lines(batch.batch_id)
    ids: dict[str, Any] = {}
    for kind, file_id, num_bytes in (
        ("output", files.output, moved.output_bytes),
        ("error", files.error, moved.error_bytes),
    ):
        if num_bytes:
            await queue.batches.put_file(
                StoredFile(
                    file_id=file_id,
                    tenant=batch.tenant,
                    filename=f"{batch.batch_id}_{kind}.jsonl",
                    purpose=OUTPUT,
                    num_bytes=num_bytes,
                    created_s=await queue.now_s(),
                )
            )
            ids[f"{kind}_file_id"] = file_id
    await queue.batches.drop_lines(batch)
    return replace(batch, **ids)


async def _move_lines(
    queue: GatewayQueue, batch: Batch, input_file: InputFile, files: _Files, marks: bytes, first: int
) -> int:
    """Append a bounded number of results. Return the first line that is not in the files yet."""
    sizes = await queue.batches.line_sizes(batch.batch_id, first, min(LINES_AT_ONCE, batch.num_total - first))
    sizes = sizes[: _num_that_fit(sizes)]
    answers = await queue.batches.lines(batch.batch_id, first, len(sizes))
    good: list[bytes] = []
    bad: list[bytes] = []
    for number, answer in enumerate(answers, first):
        if answer is None:
            code, message = NOT_RUN_REASONS[batch.ends_as]
            answer = not_run_line(line_name(batch, number), await _custom_id(input_file, number), code, message)
        is_good = marks[number : number + 1] == ANSWERED_WELL
        (good if is_good else bad).append(answer + b"\n")
    move = Move(
        first=first,
        past=first + len(answers),
        num_bytes=sum(size + LINE_OVERHEAD_BYTES for size in sizes if size),
        output_file_id=files.output,
        error_file_id=files.error,
        output=b"".join(good),
        errors=b"".join(bad),
    )
    return await queue.batches.move_lines(batch, move)


def _num_that_fit(sizes: Sequence[int]) -> int:
    """Return the number of lines to move, at least one."""
    total = 0
    for place, size in enumerate(sizes):
        total += size
        if total > BYTES_AT_ONCE and place:
            return place
    return len(sizes)


async def _custom_id(input_file: InputFile, number: int) -> str | None:
    try:
        return read_line(await input_file.row(number)).custom_id
    except BadInput:
        return None
