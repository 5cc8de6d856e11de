"""The parts that the tools for public programs and public notebooks share: clones of repositories, kept results.

Both are given a folder outside of this repository. It holds the clones in `repositories`, and `results`.
"""

from __future__ import annotations

import fcntl
import json
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["KeptResults", "clone_line", "name_of_checkout", "repository_folder"]


class KeptResults:
    """Results by key, in a JSON file. Several calls may add to one at the same time, each with its part.

    Every result has "call", which identifies how it was made: a result of another call does not count.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._of = self._read()

    def get(self, key: str, call: str) -> dict[str, Any] | None:
        """Return the result under `key` if it was made by `call`."""
        result = self._of.get(key)
        return result if result and result["call"] == call else None

    def add(self, key: str, result: Mapping[str, Any]) -> None:
        self._path.parent.mkdir(exist_ok=True)
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._of = self._read() | {key: dict(result)}
            unfinished = self._path.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(self._of, indent=1), encoding="utf-8")
            unfinished.replace(self._path)

    def _read(self) -> dict[str, Any]:
        return json.loads(self._path.read_text(encoding="utf-8")) if self._path.is_file() else {}


def repository_folder(folder: Path, name: str) -> Path:
    """Return the place of the clone of `name`, which is "owner/name"."""
    return folder / "repositories" / name.replace("/", "+")


def clone_line(folder: Path, name: str, commit: str = "") -> str:
    """Return the shell line that clones `name`, with the files of `commit`, or without files."""
    path = shlex.quote(str(repository_folder(folder, name)))
    line = f"git clone --no-checkout https://github.com/{name} {path}"
    return f"{line} && git -C {path} checkout --quiet {commit}" if commit else line


def name_of_checkout() -> str:
    """Return the name that git has for the commit of this checkout, with "-dirty" where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    root = Path(__file__).parents[1]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.strip()
