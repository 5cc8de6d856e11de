"""The testing kit as its page shows it."""

from __future__ import annotations

from documents import blocks
from environments import REPOSITORY


def test_the_examples_of_tests_run_as_they_stand_on_their_page() -> None:
    examples = blocks(REPOSITORY / "docs" / "testing.md", "python")
    assert len(examples) == 2
    for example in examples:
        exec(compile(example.text, str(example), "exec"), {})
