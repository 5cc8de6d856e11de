"""The planted faults: `faults.toml` names them, and says where each is planted.

A fault is known by a text of the package, not by a file, so that code may move. Nothing is run here.
"""

from __future__ import annotations

import itertools
import os
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Fault", "Package", "read_faults"]

_LIST = Path(__file__).with_name("faults.toml")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong in the package.

    name: what is wrong, as a sentence.  find, replace: a text of the package, and what stands there instead.
    tests: files or folders of tests that are nearest.
    """

    name: str
    find: str
    replace: str
    tests: list[str]


def read_faults(path: Path = _LIST) -> list[Fault]:
    """Return the faults in their order."""
    return [Fault(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]]


@dataclass(slots=True)
class Package:
    """The files of a package, into which faults are planted.

    folder: of the package.
    """

    folder: Path
    _seconds: Iterator[int] = field(default_factory=lambda: itertools.count(int(time.time()) + 1))

    def problem(self, fault: Fault) -> str:
        """Return why `fault` cannot be planted, as half a sentence; an empty text if it can."""
        places = self._places(fault)
        if len(places) != 1:
            where = ", ".join(str(path.relative_to(self.folder)) for path in places)
            return f"its text stands {len(places)} times in the package{where and f': {where}'}"
        if fault.find == fault.replace:
            return "nothing is replaced"
        try:
            compile(self._with(fault, places[0]), str(places[0]), "exec")
        except SyntaxError as error:
            return f"the file does not compile with it: {error}"
        return ""

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """Have `fault` in the package during the block.

        Raises:
            ValueError: it cannot be planted.
        """
        if problem := self.problem(fault):
            raise ValueError(f"{fault.name} {problem}")
        (path,) = self._places(fault)
        sound = path.read_text(encoding="utf-8")
        self._write(path, self._with(fault, path))
        try:
            yield
        finally:
            self._write(path, sound)

    def _places(self, fault: Fault) -> list[Path]:
        """Return the file in which the text of `fault` stands, as often as it does."""
        return [
            path
            for path in sorted(self.folder.rglob("*.py"))
            for _ in range(path.read_text(encoding="utf-8").count(fault.find))
        ]

    def _with(self, fault: Fault, path: Path) -> str:
        return path.read_text(encoding="utf-8").replace(fault.find, fault.replace)

    def _write(self, path: Path, text: str) -> None:
        """Write a file at a time of its own: Python takes its byte code to be current by whole seconds and the size."""
        path.write_text(text, encoding="utf-8")
        second = next(self._seconds)
        os.utime(path, (second, second))
