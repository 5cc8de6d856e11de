"""Lines of a command in a terminal, beside what it prints as its answer. Runs in the process of the command."""

from __future__ import annotations

import sys

__all__ = ["failed", "say"]


def say(message: str) -> None:
    """Print a line beside the program's own output."""
    print(f"nbaccel: {message}", file=sys.stderr, flush=True)


def failed(message: str, status: int = 1) -> int:
    """Print the reason; return the exit status."""
    say(message)
    return status
