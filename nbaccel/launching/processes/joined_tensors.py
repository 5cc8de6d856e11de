"""JoinedTensors: whole tensors of the rows that ranks have sent. Runs in the kernel, which needs no process group.

Every rank sends the rows that it has (`ShardedTensors`), under a key that is the same in all ranks. They are joined
when the values of a rank are rebuilt, on the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nbaccel.base.quantities import listed
from nbaccel.launching.ipc.reports import RankReport
from nbaccel.namespace.payload import rows_in
from nbaccel.namespace.sharded_tensors import Piece, RowsReport
from nbaccel.namespace.unpicklable import CannotJoin

__all__ = ["JoinedTensors"]


class JoinedTensors:
    """The tensors of which the ranks with these reports have sent rows, each joined once, when it is first read.

    The values of several ranks that hold one sharded tensor share it here too: it was one tensor there.

    Args:
        reports: By rank.
        checkpoint: The newest one of the run, which is named if ranks do not fit together.
    """

    def __init__(self, reports: Sequence[RankReport | None], checkpoint: str = "") -> None:
        self._reports = reports
        self.checkpoint = checkpoint
        self._rows: list[Mapping[str, tuple[memoryview, Piece]]] | None = None
        self._whole: dict[str, Any] = {}

    def whole(self, key: str) -> Any:
        """Return the tensor with this key.

        Raises:
            CannotJoin: Rows of it are missing, or do not belong together.
        """
        if key not in self._whole:
            if self._rows is None:
                if why := self._obstacle():
                    raise CannotJoin(why)
                fds = [-1 if report is None else report.payload_fd for report in self._reports]
                self._rows = [rows_in(fd) if fd >= 0 else {} for fd in fds]  # one may send back nothing but None
            self._whole[key] = _joined(key, [rows.get(key) for rows in self._rows])
        return self._whole[key]

    def close(self) -> None:
        """Release the memory of the rows; tensors that were joined are copies, and stay with whoever has them."""
        self._rows = None
        self._whole.clear()

    def _obstacle(self) -> str:
        """Return why the ranks' rows do not belong together; empty if they do."""
        told = {
            rank: RowsReport(**report.facts["rows"])
            for rank, report in enumerate(self._reports)
            if report is not None and report.has_values
        }
        absent = [rank for rank in range(len(self._reports)) if rank not in told]
        newest = f"; newest checkpoint: {self.checkpoint}" if self.checkpoint else ""
        if absent:
            return f"{_ranks(absent)} sent no rows of it, having ended or taken no part{newest}"
        if inside := [rank for rank, rows in told.items() if rows.is_inside]:
            return f"{_ranks(inside)} stopped in the middle of an optimizer step{newest}"
        if len({rows.steps for rows in told.values()}) > 1:
            after = listed([f"rank {rank} after {rows.steps}" for rank, rows in told.items()])
            return f"ranks stopped at different steps: {after}{newest}"
        return next((f"rank {rank}: {rows.lost}{newest}" for rank, rows in told.items() if rows.lost), "")


def _joined(key: str, rows: Sequence[tuple[memoryview, Piece] | None]) -> Any:
    import torch

    missing = [rank for rank, each in enumerate(rows) if each is None]
    if missing:
        raise CannotJoin(
            f"{_ranks(missing)} {'has' if len(missing) == 1 else 'have'} no rows for {key.partition('/')[0]} where "
            "the others have some: every rank has to bind, or return, the same"
        )
    parts = sorted((each for each in rows if each is not None), key=lambda part: part[1].start)
    _, (shape, name, *_) = parts[0]
    dtype: Any = getattr(torch, name)
    is_copy = parts[0][1].is_copy
    if is_copy:
        parts = parts[:1]
    ends = 0
    for memory, piece in parts:
        nbytes = math.prod([piece.length, *shape[1:]] if not is_copy else shape) * dtype.itemsize
        if piece[:2] != (shape, name) or piece.is_copy != is_copy or piece.start != ends or memory.nbytes != nbytes:
            raise CannotJoin(f"the ranks have tensors of {key.partition('/')[0]} that are no parts of one")
        ends += piece.length
    if not is_copy and ends != shape[0]:
        raise CannotJoin(f"the ranks have {ends} of the {shape[0]} rows of a tensor of {key.partition('/')[0]}")
    whole = torch.empty(shape, dtype=dtype, device="cpu")
    for memory, piece in parts:
        if memory.nbytes:
            part = torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
            rows_here = whole if is_copy else whole[piece.start : piece.start + piece.length]
            rows_here.copy_(part.reshape(rows_here.shape))
    return whole


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed([str(rank) for rank in ranks])}"
