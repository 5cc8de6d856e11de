"""CudaWatch: which cell initialised CUDA in the notebook. Runs in the kernel after every cell; never touches CUDA."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["CudaWatch"]


class CudaWatch:
    """Remembers the first cell after which this process held a CUDA context.

    first_cell: "cell [7]"; None while there is no context, and when it is older than the watch.
    """

    def __init__(self) -> None:
        self.first_cell: str | None = None
        self._is_over = _cuda_is_initialized()

    def after_cell(self, result: Any) -> None:
        """IPython's `post_run_cell`."""
        if self._is_over or not _cuda_is_initialized():
            return
        self._is_over = True
        if result.execution_count is not None:
            self.first_cell = f"cell [{result.execution_count}]"


def _cuda_is_initialized() -> bool:
    cuda = sys.modules.get("torch.cuda")
    return cuda is not None and bool(cuda.is_initialized())
