"""Which loops are marked, and what the text becomes."""

from __future__ import annotations

import ast
import textwrap

import pytest

from nbaccel.features.cell_checkpoints.marked_loops import LOOPS, UsersProgram, marked


def text_of(source: str, other: str = "") -> str:
    """Return the marked text of a cell without the body that compilers read."""
    trees = {"cell": ast.parse(textwrap.dedent(source)), "other": ast.parse(textwrap.dedent(other))}
    return ast.unparse(marked(UsersProgram(trees), "cell", [], lambda: False)).replace(LOOPS, "LOOPS")


def test_a_for_and_a_while_ask_before_each_round() -> None:
    assert text_of("for x in loader:\n    opt.step()\nwhile n < 3:\n    opt.step()") == textwrap.dedent("""\
        with LOOPS.loop(0):
            for x in LOOPS.over(0, loader):
                opt.step()
        with LOOPS.loop(1):
            while LOOPS.turn(1) and n < 3:
                opt.step()""")


@pytest.mark.parametrize(
    "source",
    [
        "for p in model.parameters(): p.requires_grad_(False)",
        "for step in range(9): print(step)",
        "def f():\n    for x in loader:\n        opt.step()\n        yield x",
        "async def f():\n    for x in loader: opt.step()",
        "@torch.compile\ndef f():\n    for x in loader: opt.step()",
        "class Net:\n    def forward(self, x):\n        for layer in self.layers: layer.step()",
        "[opt.step() for x in loader]",
    ],
    ids=["no step", "a step by name", "generator", "coroutine", "compiled", "forward", "comprehension"],
)
def test_what_cannot_come_to_a_step_or_cannot_be_left_in_the_middle_stays(source: str) -> None:
    assert text_of(source) == ast.unparse(ast.parse(source))


def test_a_loop_trains_by_a_function_of_an_earlier_cell_that_calls_another() -> None:
    other = (
        "def one(x):\n    opt.step()\nclass T:\n    def a(self):\n        one(1)\n    def go(self):\n        self.a()"
    )
    assert "LOOPS.over(0, r)" in text_of("for x in r: t.go()", other)
    assert "LOOPS" not in text_of("for x in r: t.show()", other)


def test_a_function_has_its_plain_body_for_compilers() -> None:
    text = text_of("def f():\n    for x in loader:\n        opt.step()")
    assert text.count("opt.step()") == 2
    assert text.count("LOOPS.over") == 1


def test_every_line_keeps_its_number() -> None:
    source = "def f():\n    a = 1\n\n    for x in loader:\n        opt.step()\n    return a\n"
    tree = marked(UsersProgram({"cell": ast.parse(source)}), "cell", [], lambda: False)
    lines = {ast.unparse(node): node.lineno for node in ast.walk(tree) if isinstance(node, ast.Expr | ast.Return)}
    assert lines["opt.step()"] == 5
    assert lines["return a"] == 6
