"""Lines that a dry run did not reach are found by what has run; what nobody expects to run is not named."""

from __future__ import annotations

import textwrap

import pytest

from features.check.dry_run.timed_program import run_dry
from nbaccel.features.check.dry_run.unreached_lines import not_reached


def gaps_of(text: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Run a program as a dry run does, and return what was not reached of it."""
    text = textwrap.dedent(text)
    return not_reached(text, run_dry(text, monkeypatch, marks_lines=True).lines)


@pytest.mark.parametrize(
    ("text", "gaps"),
    [
        ("a = 1\nfor i in range(3):\n    a += i\n", []),
        ("a = 1\nif a:\n    b = 2\nelse:\n    c = 3\n", [(4, 5)]),
        ("a = 0\nif a:\n    b = 2\nelse:\n    c = 3\n", [(3, 3)]),
        ("a = 0\nif a:\n    b = 2\n\n    # why\n    c = (\n        3)\nd = 1\n", [(3, 7)]),
        (
            "a = 0\nif a:\n    b = 2\nelif a == 1:\n    b = 3\nelif a == 0:\n    b = 4\nelse:\n    b = 5\n",
            [(3, 3), (5, 5), (8, 9)],
        ),
        ("for i in range(2):\n    if i == 5:\n        a = 1\n        b = 2\n    c = 1\n", [(3, 4)]),
        ("for i in []:\n    a = 1\nelse:\n    b = 2\n", [(2, 2)]),
        ("while True:\n    break\nelse:\n    b = 2\nc = 3\n", [(3, 4)]),
        ("with open('/dev/null') as f:\n    for line in f:\n        a = line\nb = 1\n", [(3, 3)]),
        ("match 3:\n    case 1:\n        a = 1\n    case 3:\n        a = 2\n", [(2, 3)]),
        ("a = 0\nif a: b = 1\nc = 2\n", []),  # it stands in the line of its test
    ],
)
def test_gaps_are_ranges_of_lines(text: str, gaps: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert gaps_of(text, monkeypatch) == gaps


def test_gaps_are_joined_over_blank_lines_and_comments_and_not_over_code() -> None:
    text = "a = 1\n\n# text\nb = 2\nc = 3\nd = 4\n"
    assert not_reached(text, {5}) == [(1, 4), (6, 6)]


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    a = 1\nexcept ValueError:\n    a = 2\n    b = 3\nfinally:\n    c = 1\n",
        "a = 1\nif a > 2:\n    raise ValueError('too large')\n",
        "a = 1\nif a > 2:\n    print('too large')\n    raise ValueError\n",
        "import warnings\na = 1\nif a > 2:\n    warnings.warn('large')\n",
        "a = 1\nif a == 1:\n    b = 1\nelse:\n    raise ValueError(a)\n",
        "if __name__ == '__main__':\n    a = 1\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy\n    x = 1\n",
        "def f():\n    a = 1\n    return a\nclass A:\n    def g(self):\n        for x in self:\n            yield x\n",
        "for i in range(9):\n    step()\n    if i == 50:\n        break\n",
        "def f(x):\n    if x is None:\n        return\n    return x + 1\nf(1)\n",
        '"""Text."""\nfrom __future__ import annotations\ndef f():\n    """Text."""\n    return 1\nf()\n',
    ],
)
def test_what_nobody_expects_to_run_is_no_gap(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gaps_of(text, monkeypatch) == []


def test_a_function_that_has_run_in_part_has_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
    def f(x):
        if x:
            return 1
        y = 2
        return y
    f(1)
    """
    assert gaps_of(text, monkeypatch) == [(5, 6)]


def test_a_handler_that_has_run_in_part_has_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
    try:
        1 / 0
    except ZeroDivisionError as error:
        if not error.args:
            a = 1
        b = 2
    """
    assert gaps_of(text, monkeypatch) == [(6, 6)]


def test_lines_after_a_loop_that_was_left_are_a_gap() -> None:
    text = "for i in range(9):\n    work(i)\nmodel.save()\n\n\nprint('done')\n"
    assert not_reached(text, {1, 2}) == [(3, 6)]


def test_a_statement_over_several_lines_and_its_decorators_belong_together() -> None:
    text = "@first\n@second(\n    3)\ndef f():\n    pass\n"
    assert not_reached(text, set()) == [(1, 5)]
