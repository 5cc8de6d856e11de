# ruff: noqa
# fmt: off
"""Functions whose marks `test_code_text` knows. Never edited: their marks were taken once, under Python 3.11."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import Any

LIMIT, NAMES = 3, ("a", "é", "\N{BULLET}")
PATTERN = re.compile(r"\d+\s", re.ASCII)


@dataclass
class Settings:
    size: int = 4
    rate: float = 1e-3
    parts: list[int] = field(default_factory=list)


settings = Settings(5)


def strings(x: Any, width: int = 3) -> list[Any]:
    """Write all kinds of texts."""
    return [
        f"{x!r:>{width}} and {x:} or {x=}" "joined" f"{{}}{x['key']:{width}.{width}f}",
        f"a" f"{x}" "" f"",
        rb"\x00\n" b"\xff",
        "\u1234 \\u1234 \x7f \U0001fae8",
        u"old",
        1_000, 0x_FF, 1e999, -1.5, 2j, ..., None, True,
    ]


async def statements(x: Any, /, *rest: Any, key: Any = None, **more: Any) -> Any:
    global LIMIT
    async with x as (a, [b, *c]), rest:
        async for _ in x:
            await x
    try:
        del a[1:2, ...], b.c
    except* (ValueError, TypeError) as error:
        raise RuntimeError from error
    else:
        pass
    finally:
        LIMIT += 1
    match x:
        case {"a": 1, **others} if others:
            return lambda *args, y=1: (yield args)
        case [1, *_] | (2 | 3):
            return {**more, "b": key}, {*rest}, [i async for i in x if (j := i) if not j]
        case Settings(size=4) as found:
            return found
    while x:
        x = x @ rest[0] if not -x < key <= ~x else x[::2]
        continue
    else:
        assert x, "message"


def many(x: Any) -> Any:
    pair, three = (lambda y: y + 1, lambda y: y + 2), lambda y: (lambda z: z + y)
    return pair, three, strings(x), NAMES, PATTERN, settings, statements


@functools.cache
def kept(x: int) -> int:
    """Return a value that a library keeps."""
    return x + LIMIT


class Base:
    """A class with a name to read."""

    limit = 4

    def __init__(self, count: int) -> None:
        self.count = count

    @property
    def half(self) -> float:
        return self.count / 2

    @staticmethod
    def twice(x: int) -> int:
        return 2 * x


class Answerer(Base):
    """A docstring that the base class may read."""

    def __call__(self, items: list[int]) -> list[float]:
        return [self.twice(kept(item)) + self.half for item in items]


answer = Answerer(3)
