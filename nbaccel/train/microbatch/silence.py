"""Silence: refuses collectives in a loss function, since one rank alone may repeat it. Runs in ranks, for one forward.

It sees every collective that goes through torch's dispatcher, ours and the program's own, and refuses it before any
rank waits. Watching costs some microseconds per operation, so it is done in the first forward only.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nbaccel.errors import CannotSplit
from nbaccel.train.microbatch.task import LossFunction

__all__ = ["silenced"]


def silenced(loss_fn: LossFunction) -> LossFunction:
    """Return `loss_fn`, in which a collective raises `CannotSplit`."""

    def run(micro_batch: Any) -> Tensor:
        with _Silence():  # type: ignore[no-untyped-call]
            return loss_fn(micro_batch)

    return run


class _Silence(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # compiled models are compiled as they would be without this mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2].strip("_")
            raise CannotSplit(
                f"forward_backward cannot lead a loss function that waits for other ranks, and this one calls {name}: "
                "a rank that ran out of memory would repeat it alone. Exchange values after forward_backward, with "
                "accelerator.gather or reduce; if the loss itself needs them, use accelerator.backward, and "
                "find_executable_batch_size or %%accelerate --oom shrink where that does not fit."
            )
        return func(*args, **(kwargs or {}))
