"""Uneven ranks: allows iterating a loop with different numbers of batches per rank, and refuses to train in it.

Runs in ranks. Merely iterating such a loader is harmless: data are counted, tokenised, evaluated. In a training loop
the rank with the most batches would wait for the others for ever, so the first backward is refused.
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
    """Call `refuse` where a backward begins, however it is called, while entered.

    Only loops over uneven ranks enter this, so other loops have no cost. An optimizer's step without a backward before
    it has no gradients of this loop, and waits for no rank.
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
        if torch.autograd.backward is guarded:  # otherwise it was wrapped, and only calls the original from now on
            torch.autograd.backward = original
