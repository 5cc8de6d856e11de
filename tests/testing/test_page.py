"""The testing kit as its page shows it."""

from __future__ import annotations

from documents import blocks
from environments import REPOSITORY


def test_the_example_of_a_test_runs_as_it_stands_on_its_page() -> None:
    (example,) = blocks(REPOSITORY / "docs" / "testing.md", "python")
    exec(compile(example.text, str(example), "exec"), {})
