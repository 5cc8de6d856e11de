"""Environment: reads flags and choices of variables. Runs anywhere."""

from __future__ import annotations

import os

__all__ = [
    "parse_choice_from_env",
    "parse_flag_from_env",
]


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return whether the variable `key` is affirmative: "1", "true", "yes", "on", …"""
    return os.environ.get(key, str(default)).lower() in ("y", "yes", "t", "true", "on", "1")


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the value of the variable `key`, else `default`."""
    return os.environ.get(key, str(default))
