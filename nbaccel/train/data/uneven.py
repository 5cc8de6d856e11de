"""Uneven ranks: a loop in which they get different numbers of batches may be gone through, but not be trained on.

Runs in ranks. Merely iterating such a loader is harmless: data are counted, tokenised, evaluated. A backward in it is
the first of which the rank with the most batches would wait for the others for ever, so that is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["counted", "refuse_uneven", "until_backward"]


def counted(lengths: list[int]) -> str:
    """Return how many batches each rank gets, in words."""
    return ", ".join(f"rank {rank}: {length}" for rank, length in enumerate(lengths))


def refuse_uneven(lengths: list[int]) -> None:
    """Refuse the backward of a loop in which the ranks get `lengths` batches.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"the ranks would see different numbers of batches ({counted(lengths)}), and rank "
        f"{lengths.index(max(lengths))} would wait for the others for ever in its last backward. Leave "
        "even_batches=True, or loop inside `with accelerator.join_uneven_inputs([model]):`"
    )


@contextmanager
def until_backward(refuse: Callable[[], None]) -> Iterator[None]:
    """While entered, call `refuse` where a backward begins, however it is called.

    Only loops over uneven ranks enter it, so other loops pay nothing. An optimizer's step without a backward before
    has no gradients of this loop, and waits for nobody.
    """
    original = torch.autograd.backward
    is_entered = True

    def guarded(*args: Any, **kwargs: Any) -> None:
        if is_entered:
            refuse()
        original(*args, **kwargs)

    torch.autograd.backward = guarded
    try:
        yield
    finally:
        is_entered = False
        if torch.autograd.backward is guarded:  # else somebody has wrapped it, and it only passes on from now on
            torch.autograd.backward = original
