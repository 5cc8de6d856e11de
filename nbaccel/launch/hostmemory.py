"""Host memory: finds out whether the system's out-of-memory killer ended a rank. Runs in the kernel.

A killed process reports nothing, so this compares the control group's own count before and after. `rank.oomscore` makes
sure that a rank is killed and not the notebook.
"""

from __future__ import annotations

from pathlib import Path

from nbaccel.hardware import out_of_memory_kills, usable_memory

__all__ = ["HostMemory"]

_GB = 1e9


class HostMemory:
    """The state of the machine's memory when a run began, and what has changed since.

    root: replaces the root of the file system, in tests.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._kills = out_of_memory_kills(root)
        self._available_bytes = usable_memory(root).available_bytes

    @property
    def kills(self) -> int | None:
        """Return the number of processes killed for memory since then; None if that is not counted."""
        now = out_of_memory_kills(self._root)
        return None if now is None or self._kills is None else now - self._kills

    def explain_kill(self) -> str:
        """Explain why a rank got a SIGKILL that the kernel did not send; a guess is named as such."""
        kills = self.kills
        available = f"{self._available_bytes / _GB:.1f} GB were available when the run began"
        if kills is None:
            return f"probably for host memory, but that is a guess: this system does not count such kills; {available}"
        if kills > 0:
            return (
                f"the machine ran out of memory (the control group's oom_kill count rose by {kills}, from "
                f"{self._kills}; {available})"
            )
        return (
            "if you did not do that yourself, a guess is host memory, though the control group's oom_kill count did "
            f"not rise; {available}"
        )
