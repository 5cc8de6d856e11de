"""Files with made-up text and numbers, for notebooks that read some from beside them."""

import random
from pathlib import Path
from string import ascii_lowercase as LETTERS

_FIRST = (4, 6, 3, 8, 6)
"""Letters of the first names: notebooks count on them."""


def names(path, count=3000):
    """Write words, one a line."""
    chosen = random.Random(0)
    lengths = [*_FIRST, *(chosen.randint(3, 9) for _ in range(count - len(_FIRST)))]
    Path(path).write_text("\n".join("".join(chosen.choices(LETTERS, k=length)) for length in lengths))


def sentences(path, count=1500):
    """Write sentences of such words."""
    chosen = random.Random(1)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    words = ["".join(chosen.choices(LETTERS, k=chosen.randint(2, 8))) for _ in range(200)]
    Path(path).write_text("".join(" ".join(chosen.choices(words, k=12)).capitalize() + ". " for _ in range(count)))


def months(path, count=144):
    """Write a table of months and of numbers that rise."""
    rows = (f"{1949 + month // 12}-{month % 12 + 1:02d},{112 + 3 * month}" for month in range(count))
    Path(path).write_text("\n".join(["Month,Number", *rows]))
