"""The launchers with Accelerate's signatures. Run in the kernel, in a notebook or a script.

As in Accelerate, `notebook_launcher` calls a function that needs one process in the notebook's own process: its
arguments and globals are the notebook's own objects. Programs import these names beside `Accelerator`, and many of them
launch nothing; so this module is small, and `launches_as_accelerate` is loaded by the first call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from nbaccel.base.settings import STOP
from nbaccel.base.short_tracebacks import without_our_frames

__all__ = ["debug_launcher", "notebook_launcher"]

_IGNORED: Mapping[str, Any] = {
    "use_port": "29500",
    "master_addr": "127.0.0.1",
    "rdzv_backend": "static",
    "rdzv_endpoint": "",
    "rdzv_conf": None,
    "rdzv_id": "none",
    "monitor_interval": 0.1,
    "log_line_prefix_template": None,
}
"""Arguments of Accelerate's launcher that have no effect here, with their defaults."""


def _explain_ignored(given: Mapping[str, Any]) -> None:
    """Warn of ignored arguments that differ from their defaults, at the line that calls the launcher."""
    changed = sorted(name for name, value in given.items() if value != _IGNORED[name])
    if changed:
        warnings.warn(
            f"{', '.join(changed)}: accepted and not used. The ranks of one machine meet in a private file, and are "
            "watched without polling.",
            stacklevel=4,
        )


@without_our_frames
def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    oom: str = STOP,
    strategy: str | None = None,
) -> Any:
    """Run a function in several processes, with Accelerate's signature.

    It works from a notebook and from a script, also when CUDA was used before, and raises the user's own error.

    One process is this one, as in Accelerate: the function is called here. What it changes is changed afterwards, and
    what it returns is the object itself. The settings hold while it runs. An interrupt ends it before its next step; a
    second one ends it at once. Restarts, a watch for hangs, and a notebook whose device memory stays as it is need a
    process of their own: use ``launch(function, num_processes=1)`` or ``oom="shrink"`` for these.

    The arguments about ports and rendezvous have no meaning here; if they are given, one line says so.

    Args:
        function: Called as ``function(*args)`` in every rank.
        args: Its arguments.
        num_processes: The number of ranks. None is one per GPU, or one.
        mixed_precision: "no", "fp16" or "bf16": the default of `Accelerator()` in the function.
        use_port, master_addr, node_rank, num_nodes, rdzv_backend, rdzv_endpoint, rdzv_conf, rdzv_id: Accepted as by
            Accelerate, without effect.
        max_restarts: How often ranks that failed, for whatever reason, are started again. The function then begins
            anew.
        monitor_interval, log_line_prefix_template: Accepted as by Accelerate, without effect.
        oom: "stop"; or "shrink": start again with smaller batches when a rank runs out of memory, see `launch`.
        strategy: "ddp", "fsdp" or the name of an installed strategy: the default of `Accelerator()` in the function.

    Returns:
        What rank 0 returned.

    Example:
        >>> notebook_launcher(train, args=(3,), num_processes=2)  # doctest: +SKIP
    """
    if num_nodes != 1 or node_rank != 0:
        raise ValueError(
            f"num_nodes={num_nodes}, node_rank={node_rank}: one notebook starts the ranks of all machines. Use "
            "nbaccel.launch(function, nodes='host1,host2'), see docs/cluster.md; or write the function to a script and "
            "start that on every machine with torchrun."
        )
    given = {
        "use_port": use_port,
        "master_addr": master_addr,
        "rdzv_backend": rdzv_backend,
        "rdzv_endpoint": rdzv_endpoint,
        "rdzv_conf": rdzv_conf,
        "rdzv_id": rdzv_id,
        "monitor_interval": monitor_interval,
        "log_line_prefix_template": log_line_prefix_template,
    }
    _explain_ignored(given)
    from nbaccel.features.accelerate_helpers.launches_as_accelerate import launch_as_accelerate

    precision = str(mixed_precision).lower()
    return launch_as_accelerate(function, args, num_processes, precision, oom, strategy, max_restarts)


def debug_launcher(function: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> Any:
    """Run a function in several CPU ranks, whatever devices there are.

    Args:
        function: Called as ``function(*args)`` in every rank.
        args: Its arguments.
        num_processes: The number of ranks.

    Returns:
        What rank 0 returned.

    Example:
        >>> debug_launcher(train, args=(3,), num_processes=2)  # doctest: +SKIP
    """
    from nbaccel.launching.api import launch

    return launch(function, num_processes, args, cpu=True).value
