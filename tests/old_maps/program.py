"""The functions whose answers lie in this folder, and the items. Never edited: the folder holds their sources."""

from __future__ import annotations

from typing import Any

ITEMS = ["one", "three", "four"]


def load(accelerator: Any) -> str:
    """Return the state of a rank."""
    return "!"


def shout(state: str, texts: list[str]) -> list[str]:
    """Return the texts in capitals."""
    # comments were left out by the version before, docstrings were not
    return [f"{text.upper()}{state}" for text in texts]


whisper = lambda texts: [text.lower() for text in texts]  # noqa: E731
