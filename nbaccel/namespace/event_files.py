"""Makes TensorBoard writers of the notebook usable in ranks: rank 0 writes a new file, other ranks nothing.

A `SummaryWriter` passes its events to a thread, and waits for that thread when its queue is full, when it is flushed
and when it is closed. The thread exists in the notebook alone. Used when ranks begin: a forked one has the notebook's
writers, others get them by pickle. Nothing here imports TensorBoard unless the notebook had it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from nbaccel.base.world import World

__all__ = [
    "SilentFile",
    "open_again_at_first_use",
    "reduce_writer",
    "silence",
]

_OPEN_OTHERS = ("add_scalars", "add_hparams")
"""Methods of a writer that open other files."""


def open_again_at_first_use(rank: int, kept: list[Any]) -> None:
    """Make the writers that this process inherited by a fork open their own file when the rank uses them.

    Args:
        kept: Takes objects that must not be closed in this process.
    """
    module: Any = sys.modules.get("torch.utils.tensorboard.writer")
    if module is None:
        return

    def adopt(writer: Any) -> None:
        file_writer = vars(writer).get("file_writer")
        if file_writer is not None and not file_writer.event_writer._async_writer._worker.is_alive():
            kept.append(file_writer)
            _without_file(writer, rank)

    def adopting(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(writer: Any, *args: Any, **kwargs: Any) -> Any:
            adopt(writer)
            own = vars(writer).get(method.__name__)
            return method(writer, *args, **kwargs) if own is None else own(*args, **kwargs)

        return call

    for name in ("_get_file_writer", "flush", "close", *_OPEN_OTHERS):
        setattr(module.SummaryWriter, name, adopting(getattr(module.SummaryWriter, name)))


def reduce_writer(obj: Any) -> Any:
    """Return how pickle is to send `obj`, if it is a writer of TensorBoard; None for anything else."""
    module: Any = sys.modules.get("torch.utils.tensorboard.writer")
    if module is None or not issubclass(type(obj), module.SummaryWriter):
        return None
    left_out = ("file_writer", "all_writers", "_get_file_writer", *_OPEN_OTHERS)
    return _opened_again, (type(obj), {name: value for name, value in vars(obj).items() if name not in left_out})


def _opened_again(kind: type, attributes: dict[str, Any]) -> Any:
    writer: Any = object.__new__(kind)
    vars(writer).update(attributes)
    return _without_file(writer, World.from_env().rank)


def _without_file(writer: Any, rank: int) -> Any:
    """Leave `writer` as after its `close`: in rank 0 the next event opens a file, in others it is dropped."""
    writer.file_writer = writer.all_writers = None
    if rank:
        silence(writer, writer.log_dir)
    return writer


def silence(writer: Any, log_dir: str) -> None:
    """Drop all later events of `writer`."""
    writer._get_file_writer = functools.partial(SilentFile, log_dir)
    for name in _OPEN_OTHERS:
        setattr(writer, name, _drop)


def _drop(*args: Any, **kwargs: Any) -> None:
    """Replacement of a method that writes; does nothing."""


class SilentFile:
    """Replacement of TensorBoard's FileWriter in ranks that write nothing."""

    def __init__(self, log_dir: str) -> None:
        self._log_dir = log_dir

    def get_logdir(self) -> str:
        return self._log_dir

    def add_summary(self, *args: Any, **kwargs: Any) -> None:
        """Drop an event; so do the other methods."""

    add_event = add_graph = add_onnx_graph = flush = close = reopen = add_summary
