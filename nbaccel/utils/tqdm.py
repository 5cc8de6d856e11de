"""A progress bar for several ranks, shown once: ``accelerate.utils.tqdm``. Runs in ranks and scripts."""

from __future__ import annotations

from typing import Any

from nbaccel.base.missing_names import missing_from
from nbaccel.train.distributed.partial_state import current_world

__all__ = [
    "tqdm",
]


def tqdm(*args: Any, main_process_only: bool = True, **options: Any) -> Any:
    """Return a progress bar of `tqdm.auto`, shown on the first rank of each machine.

    Args:
        main_process_only: False shows a bar on every rank.
        *args: Arguments of `tqdm.auto.tqdm`.
        **options: More of them.

    Example:
        >>> list(tqdm(range(2), disable=True))
        [0, 1]
    """
    from tqdm.auto import tqdm as bar

    if main_process_only and not current_world().is_local_main_process:
        options["disable"] = True
    return bar(*args, **options)


__getattr__ = missing_from(__name__, "nbaccel.utils")
