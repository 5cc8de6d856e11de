"""Logs: a logger with rank-aware calls. Runs in ranks, in scripts, and alone in a kernel.

It adds to Python's `logging` which rank logs; handlers, formats and files stay the program's. It opens nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from nbaccel.train.distributed.partial_state import PartialState, current_world

__all__ = ["RankLogger", "get_logger"]


_CALLER = 2
"""The `stacklevel` of the line that a record names: the caller of the logger, one above the logger's own."""


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose calls take two more keywords.

    `main_process_only`: True, the default, logs on rank 0 only, once for all. False logs on every rank, and with
    several ranks the line begins with the rank. `in_order`: every rank logs, one after the other. Collective: all of
    them make the call.

    A `stacklevel` counts as in Accelerate: 2, the default, is the line of the call.

    Args:
        logger: The logger of Python's `logging`.
        extra: Passed on to `logging.LoggerAdapter`.

    Example:
        >>> log = get_logger("train")
        >>> log.info("epoch %d", 3)  # once, by rank 0
        >>> log.info("loader is ready", main_process_only=False)  # by every rank
    """

    def __init__(self, logger: logging.Logger, extra: Mapping[str, object] | None = None) -> None:
        super().__init__(logger, extra or {})
        self._said: set[str] = set()

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a message, on the ranks that the keywords name.

        Args:
            level: The level, as in `logging`.
            msg: The message, with the arguments of a call of `logging` after it.

        Example:
            >>> get_logger("train").log(20, "epoch %d", 3)
        """
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", _CALLER)
        if in_order:
            self._log_in_order(level, msg, args, kwargs)
        elif self.isEnabledFor(level):
            world = current_world()
            if world.is_main_process or not main_process_only:
                rank = None if main_process_only or not world.is_distributed else world.rank
                self._speak(rank, level, msg, args, kwargs)

    def _log_in_order(self, level: int, msg: object, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        """Log rank after rank.

        Also waits where the level is off: levels may differ between ranks, and the others wait.
        """
        state = PartialState()
        kwargs["stacklevel"] += 1
        for rank in range(state.num_processes):
            if rank == state.process_index and self.isEnabledFor(level):
                self._speak(rank if state.num_processes > 1 else None, level, msg, args, kwargs)
            state.wait_for_everyone()

    def _speak(
        self, rank: int | None, level: int, msg: object, args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> None:
        kwargs["stacklevel"] += 1
        self.logger.log(level, msg if rank is None else f"[rank {rank}] {msg}", *args, **kwargs)

    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a warning the first time that this logger gets this message with these arguments.

        Args:
            msg: The message, with the arguments of a call of `logging` after it.

        Example:
            >>> logger = get_logger(__name__)
            >>> logger.warning_once("said once", main_process_only=True)  # doctest: +SKIP
        """
        text = repr((msg, args))
        if text not in self._said:
            self._said.add(text)
            self.warning(msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", _CALLER) + 1})


def get_logger(name: str, log_level: str | None = None) -> RankLogger:
    """Return a logger that logs once for all ranks. It works before there is any state or process group.

    Args:
        name: The name of the logger, as for `logging.getLogger`.
        log_level: The lowest level that is shown: "DEBUG", "INFO" and so on. By default the variable
            ACCELERATE_LOG_LEVEL, else the level that the program gave to Python's `logging`.

    Example:
        >>> logger = get_logger(__name__)
        >>> logger.info("once")
        >>> logger.info("on every rank", main_process_only=False)
        >>> logger.debug("rank after rank", in_order=True)
    """
    logger = logging.getLogger(name)
    level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    if level:
        logger.setLevel(level.upper())
    return RankLogger(logger)
