"""Why a run could not go on where its frames are: the sentences, before the second step."""

from __future__ import annotations

import pytest

from features.cell_checkpoints.marked_programs import ABOVE, Notebook, Watched
from nbaccel.features.cell_checkpoints.frame_position import NoPosition
from nbaccel.features.cell_checkpoints.marked_cell import Boundary

RUN = """
def run(fold=0):
    model = net(); opt = torch.optim.Adam(model.parameters(), 1e-2)
    for x, y in loader: last = step(model, opt, x, y)
    return last
def outer(*args): return run()
class Loss:
    value = 0.0
    def __init__(self): self.value = 0.0
"""

ELSE = "to the training, and a run could not go on in it."

SETUP = "model = net(); opt = torch.optim.Adam(model.parameters(), 1e-2)\n"


def refusal_around(boundary: Boundary) -> str:
    try:
        boundary.around()
    except NoPosition as error:
        return str(error)
    return ""


def refusals(cell: str) -> tuple[str, str]:
    """Return the sentences at the first boundary of a cell: of the innermost loop, and of those around it."""
    found: list[tuple[str, str]] = []

    def note(boundary: Boundary) -> None:
        if not found:
            found.append((boundary.refusal(), refusal_around(boundary)))

    Notebook(ABOVE, RUN).run_marked(cell, Watched(note))
    return found[0]


@pytest.mark.parametrize(
    ("cell", "sentence"),
    [
        (
            "results = [run(fold) for fold in range(2)]",
            "line 1, a comprehension leads to the training, and a run could not go on in it. "
            "for fold in range(2): results.append(run(fold)) can.",
        ),
        ("x = {k: run(k) for k in range(1)}", f"line 1, a comprehension leads {ELSE} A `for` can."),
        ("x = max(run(k) for k in range(1))", f"line 1, a comprehension leads {ELSE} A `for` can."),
        ("f = lambda: run()\nf()", f"line 2, a lambda leads {ELSE} A function with `def` can."),
        (
            "for x in range(run() > 9): pass",
            f"line 1, the head of a statement leads {ELSE} A line of its own (result = train()) can.",
        ),
        (
            "x = list(map(run, [1]))",
            f"line 1, `list` leads {ELSE.replace('training', 'training from within')} A call of your function itself, "
            "in a `for` if need be, can.",
        ),
        (
            "import timeit\ntimeit.timeit(run, number=1)",
            f"line 2, timeit of timeit leads {ELSE} A loop of the cell, or of a function of yours, can.",
        ),
        (
            "try: 1 / 0\nexcept ZeroDivisionError:\n    run()",
            "line 1, the training runs in an `except` or `finally` block, and a run could not go on in it. Behind that "
            "statement it can.",
        ),
        (
            "def batches():\n    for i in range(1):\n        yield run()\nfor x in batches(): pass",
            f"line 4, the generator batches leads {ELSE} A function can.",
        ),
    ],
    ids=["list", "dict", "genexp", "lambda", "head", "map", "library", "except", "generator"],
)
def test_what_leads_to_the_training_and_cannot_be_entered_again_is_named(cell: str, sentence: str) -> None:
    assert refusals(cell) == (sentence, sentence)


@pytest.mark.parametrize(
    "statement",
    ["total.value += run()", "x = (model(X[:2]), run())", "x = {'a': total.value, 'b': run()}"],
)
def test_a_statement_that_holds_a_value_meanwhile_is_refused_within_a_loop(statement: str) -> None:
    setup = SETUP + "total = Loss()\n"
    why, around = refusals(f"{setup}for k in range(2):\n    {statement}\n    opt.step()")
    assert why == (
        "line 4 holds a value while its call trains, and a run that goes on would not have it. Give the call a line of "
        "its own: result = train()."
    )
    assert not around
    assert refusals(setup + statement) == ("", "")  # before the outermost loop it is run again as it was


@pytest.mark.parametrize(
    ("head", "what"),
    [
        ("(b for b in loader)", "loops over a generator"),
        ("map(tuple, loader)", "loops over a map"),
        ("enumerate(b for b in loader)", "loops over a generator"),
        ("zip(loader, (b for b in loader))", "loops over a generator"),
        ("numbers", "loops over `numbers`, which had begun before"),
        ("enumerate(numbers)", "loops over `numbers`, which had begun before"),
    ],
)
def test_a_loop_that_cannot_be_passed_over_is_saved_between_rounds_of_the_one_around(head: str, what: str) -> None:
    train = f"for b in {head}:\n        step(model, opt, X, Y)"
    why, around = refusals(f"{SETUP}for k in range(2):\n    numbers = iter([1, 2])\n    {train}")
    assert what in why
    assert "how far it has come is known to nobody" in why
    assert around == ""
    why, around = refusals(f"{SETUP}numbers = iter([1, 2])\nif True:\n    {train}")
    assert why == around != ""


def test_a_loop_whose_names_do_not_say_that_it_trains_is_refused() -> None:
    cell = f"{SETUP}one = [run]\nfor k in range(2):\n    for f in one: f()\n"
    why, around = refusals(cell)
    assert why.startswith("the loop in line 3 leads to the training by names that do not say so")
    assert around == why


@pytest.mark.parametrize(
    "cell",
    [
        "x = run()",
        "results = []\nfor k in range(2): results.append(run(k))",
        "total = 0\nfor k in range(2): total += run(k)",
        "with torch.enable_grad():\n    try:\n        if True: x = outer(1, *[2])\n    finally: pass",
        "def f(): return run()\nx = (f)()",
        "f = functools.partial(run, 1)\nx = f()",
        "for f in (run, outer): x = f()",
        "@torch.enable_grad()\ndef f(): return run()\nx = f()",
        "class M(nn.Module):\n    def forward(self): return run()\nm = M()\nx = m()",
        "x = (run\n     (1))",
    ],
)
def test_plain_calls_can_be_entered_again(cell: str) -> None:
    assert refusals(cell) == ("", "")


def test_a_loop_after_a_training_that_no_run_could_leave_out_is_refused() -> None:
    found: list[str] = []

    def note(boundary: Boundary) -> None:
        found.append(boundary.refusal())

    cell = "results = [run(fold) for fold in range(1)]\nlast = run()\n"
    notebook = Notebook(ABOVE, RUN)
    assert notebook.run_marked(cell, Watched(note)).steps == 12
    assert found[-1] == found[0]
    assert found[0].startswith("line 1, a comprehension leads to the training")
