"""Which cells a script consists of, and which notebooks are refused: in notebooks whose launches are recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.shells import Notebook

SEED = "import torch\ntorch.manual_seed(0)"
DATA = "lr = 0.1\nx = torch.ones(8, 4)"
MODEL = "model = torch.nn.Linear(4, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=lr)"
PREPARES = "model = accelerator.prepare(model)"
TRAIN = """%%accelerate -n 2 --cpu
for _ in range(2):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()"""


def run(notebook: Notebook, *cells: str) -> None:
    for cell in cells:
        notebook.run(cell)


def export(notebook: Notebook, path: Path, words: str = "") -> str:
    """The script, or the sentence with which it was refused."""
    ran = notebook.run(f"%accelerate export {path} {words}")
    if ran.error is not None:
        assert not path.exists()
        return str(ran.error)
    return path.read_text()


def cells_in(script: str) -> list[int]:
    return [int(line.partition("[")[2].partition("]")[0]) for line in script.splitlines() if line.startswith("# --- ")]


def test_what_the_cell_reads_is_in_the_script_and_what_nobody_reads_is_not(planned: Notebook, tmp_path: Path) -> None:
    run(planned, SEED, "def unused():\n    return 1", "%xmode Plain\nlr = 0.1", "x = torch.ones(8, 4)")
    run(planned, "print(x.shape)", "names = ['a', 'b']", MODEL, TRAIN)
    script = export(planned, tmp_path / "train.py")
    assert cells_in(script) == [1, 3, 4, 7, 8]
    assert "# %xmode Plain\nlr = 0.1" in script
    assert "seeds_alike=True" in script
    assert script.rstrip().endswith("optimizer.step()\n\nnbaccel_cell.end()")
    compile(script, "train.py", "exec")


def test_cells_are_taken_in_the_order_in_which_they_ran(planned: Notebook, tmp_path: Path) -> None:
    run(planned, SEED, "lr = 0.1", "x = torch.ones(8, 4) * lr", "lr = 0.5", MODEL, TRAIN)
    assert cells_in(export(planned, tmp_path / "train.py")) == [1, 2, 3, 4, 5, 6]


def test_a_definition_that_was_replaced_before_anybody_called_it_is_left_out(planned: Notebook, tmp_path: Path) -> None:
    run(planned, SEED, "lr = 0.1", "lr = 0.2", "x = torch.ones(8, 4)", MODEL, TRAIN)
    assert cells_in(export(planned, tmp_path / "train.py")) == [1, 3, 4, 5, 6]


def test_what_functions_read_when_they_are_called_counts(planned: Notebook, tmp_path: Path) -> None:
    run(planned, SEED, "lr = 0.1\nscale = 3", "def batch():\n    return torch.ones(8, 4) * scale", "scale = 2", MODEL)
    run(planned, TRAIN.replace("model(x)", "model(batch())"))
    script = export(planned, tmp_path / "train.py")
    assert cells_in(script) == [1, 2, 3, 4, 5, 6]


def test_cells_that_change_a_value_or_draw_after_the_seed_are_kept(planned: Notebook, tmp_path: Path) -> None:
    run(planned, SEED, DATA, "probe = torch.randn(3)", "view = x[0]", "view.zero_()", MODEL)
    run(planned, "for part in model.parameters():\n    torch.nn.init.ones_(part)", TRAIN)
    assert cells_in(export(planned, tmp_path / "train.py")) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_numbers_that_were_drawn_before_the_seed_do_not_matter(planned: Notebook, tmp_path: Path) -> None:
    run(planned, "import torch", "probe = torch.randn(3)", SEED, DATA, MODEL, TRAIN)
    assert 2 not in cells_in(export(planned, tmp_path / "train.py"))


def test_a_function_that_binds_by_global_is_called_in_the_script_too(planned: Notebook, tmp_path: Path) -> None:
    run(planned, SEED, "lr = 0.1", "def fill():\n    global x\n    x = torch.ones(8, 4)", "fill()", MODEL, TRAIN)
    assert cells_in(export(planned, tmp_path / "train.py")) == [1, 2, 3, 4, 5, 6]


def test_a_cell_that_makes_and_seeds_everything_itself_may_have_run_before(planned: Notebook, tmp_path: Path) -> None:
    cell = f"""%%accelerate -n 2 --cpu
torch.manual_seed(1)
{MODEL}
for epoch in range(2):
    for part in torch.utils.data.DataLoader(x, 4, shuffle=True):
        loss = model(part).sum()
        loss.backward()
    print(epoch, loss.item())"""
    run(
        planned, SEED, DATA, cell, "%%accelerate --check\nprint(x)", cell, "loss = 3", "for part in x:\n    print(part)"
    )
    assert cells_in(export(planned, tmp_path / "train.py")) == [1, 2, 5]
    assert cells_in(export(planned, tmp_path / "other.py", "--cell 3")) == [1, 2, 3]


def test_the_display_of_notebooks_is_imported(planned: Notebook, tmp_path: Path) -> None:
    run(planned, SEED, f"{DATA}\ndisplay(x)", MODEL, TRAIN)
    assert "\n\nfrom IPython.display import display\n\n" in export(planned, tmp_path / "train.py")


def test_lines_that_install_or_run_a_shell_become_comments_that_are_named(planned: Notebook, tmp_path: Path) -> None:
    run(planned, "import torch\nif False:\n    !pip install nothing-of-that-name", SEED)
    run(planned, "lr = 0.1\n%time x = torch.ones(8, 4)\nif False:\n    !unzip data.zip", MODEL, TRAIN)
    said = planned.run(f"%accelerate export {tmp_path / 'train.py'}").stdout
    assert "it needs: pip install nothing-of-that-name" in said
    assert "not in the script, run it before where it is needed: !unzip data.zip (cell [3])" in said
    script = (tmp_path / "train.py").read_text()
    assert "x = torch.ones(8, 4)\nif False:\n    pass  # !unzip data.zip" in script
    compile(script, "train.py", "exec")


REFUSED = {
    "another value later": (
        [DATA, MODEL, TRAIN, "lr = 0.5", "x = torch.zeros(8, 4)"],
        "cell [6] has given x another value after cell [4] trained with the one before: run the training again with "
        "it, or run the cell that made x again.",
    ),
    "a changed function": (
        [DATA, "def f(v):\n    return v", MODEL, TRAIN.replace("(x)", "(f(x))"), "def f(v):\n    return v * 2"],
        "cell [6] has given f another value after cell [5] trained with the one before",
    ),
    "a shell line": (
        ["lr = 0.1\nlines = !echo 8\nx = torch.ones(int(lines[0]), 4)", MODEL, TRAIN],
        "cell [2] cannot be in a script: lines comes from the shell line !echo 8.",
    ),
    "a shell line alone": (
        [DATA, "lines = !echo 8", MODEL, TRAIN.replace("(x)", "(x[: int(lines[0])])")],
        "cell [3] cannot be in a script: lines comes from the shell line !echo 8.",
    ),
    "a magic of a cell": (
        [
            DATA,
            "%%capture seen\nprint(3)",
            MODEL,
            TRAIN.replace("range(2)", "seen.stdout[:1]"),
        ],
        "seen comes from %%capture seen in cell [3], which a script has not: make it by Python.",
    ),
    "a magic that runs a file": (
        ["%run no_such_file.py", DATA, MODEL, TRAIN],
        "cell [2] has %run no_such_file.py, which binds names that stand in no cell: import what it makes.",
    ),
    "exec": (
        ["lr = 0.1\nexec('x = torch.ones(8, 4)')", MODEL, TRAIN],
        "cell [2] uses exec(), and what it binds cannot be read: write it as plain code.",
    ),
    "globals": (
        ["lr = 0.1", "globals()['x'] = torch.ones(8, 4)", MODEL, TRAIN],
        "cell [3] uses globals(), and what it binds cannot be read: write it as plain code.",
    ),
    "the value of a cell": (
        ["lr = 0.1\ntorch.ones(8, 4)", "x = _", MODEL, TRAIN],
        "cell [3] reads _, the value of an earlier cell: give it a name there, and run both again.",
    ),
    "an answer of a person": (
        ["lr = 0.1\ntry:\n    x = input()\nexcept Exception:\n    x = torch.ones(8, 4)", MODEL, TRAIN],
        "x comes from input() in cell [2], which nobody answers in a script: assign the value in a cell instead.",
    ),
    "a cell that awaits": (
        [
            "%autoawait sync\nclass Now:\n    def __await__(self):\n        return iter(())",
            f"await Now()\n{DATA}",
            MODEL,
            TRAIN,
        ],
        "cell [3] cannot be in a script: it awaits at its top level.",
    ),
    "a cell that failed": (
        ["lr = 0.1\nx = torch.ones(8, 4)\n1 / 0", MODEL, TRAIN],
        "cell [2] ended with an error, so how far it came is not known, and cell [4] needs lr, x: run it again without "
        "the error, and cell [4] after it.",
    ),
    "a model that another cell in ranks trained": (
        [DATA, MODEL, TRAIN, TRAIN],
        "cell [4] ran in ranks too, and may have trained model, with which cell [5] went on: a script would begin with "
        "an untrained one; run the cells that make it again before cell [5], or restart the kernel and run all once.",
    ),
    "a name of another cell in ranks": (
        ["lr = 0.1", "%%accelerate -n 2\nx = torch.ones(8, 4)", MODEL, TRAIN],
        "cell [3] ran in ranks too, and has left x, which cell [5] needs: a script has one such cell",
    ),
    "what an Accelerator prepared in the notebook": (
        ["from nbaccel import Accelerator\naccelerator = Accelerator(cpu=True)", DATA, MODEL, PREPARES, TRAIN],
        "cell [5] calls accelerator.prepare() in the notebook's own process, which is no rank: put that call into cell "
        "[6].",
    ),
    "numbers that other ranks drew after the seed": (
        [DATA, "%%accelerate -n 2\nprint(torch.randn(3))", MODEL, TRAIN],
        "cell [3] ran in ranks too, and drew random numbers (torch) after the seed and before cell [5]: run the cell "
        "with the seed again before it, or seed in cell [5].",
    ),
    "a cell that asks for IPython": (
        [f"shell = get_ipython()\n{DATA}", MODEL, TRAIN],
        "cell [2] asks for get_ipython(), which a script has not: leave it out, and run the cell again.",
    ),
    "eval": (
        ["lr = 0.1\nx = eval('torch.ones(8, 4)')", MODEL, TRAIN],
        "cell [2] uses eval(), and what it reads is unknown: write it as plain code.",
    ),
    "a magic that is not known": (
        [f"%bookmark -l\n{DATA}", MODEL, TRAIN],
        "cell [2] cannot be in a script: what the magic %bookmark -l does is not known outside of IPython. Put what "
        "the training needs into a cell of plain Python, and run that again.",
    ),
    "a sweep": (
        [DATA, MODEL, TRAIN.replace("--cpu", "--cpu --sweep lr=0.1,0.2")],
        "cell [4] ran a sweep, which is many runs: export a cell that ran once.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_history_cannot_tell_is_refused_by_name(planned: Notebook, tmp_path: Path, name: str) -> None:
    cells, sentence = REFUSED[name]
    run(planned, SEED, *cells)
    assert export(planned, tmp_path / "train.py").startswith(sentence)


def test_a_name_that_no_cell_has_made_is_refused(planned: Notebook, tmp_path: Path) -> None:
    run(planned, SEED, "lr = 0.1", MODEL)
    planned.names["x"] = 3
    run(planned, TRAIN)
    sentence = export(planned, tmp_path / "train.py")
    assert sentence.startswith("cell [4] reads x, and no cell of this kernel has made it")


def test_a_cell_of_another_language_may_have_made_a_name(planned: Notebook, tmp_path: Path) -> None:
    run(planned, SEED, "lr = 0.1", MODEL, "%%html\nx")
    planned.names["x"] = 3
    run(planned, TRAIN)
    sentence = export(planned, tmp_path / "train.py")
    assert sentence == "x may come from cell [4], and it is a cell of %%html: make it by Python."


def test_a_constant_that_something_else_has_changed_is_refused(planned: Notebook, tmp_path: Path) -> None:
    run(
        planned,
        SEED,
        "lr = 0.1\nx = torch.ones(8, 4)\ndef f():\n    return 1",
        MODEL,
        TRAIN.replace("(x)", "(x * f())"),
    )
    planned.names["lr"] = 0.5
    sentence = export(planned, tmp_path / "train.py")
    assert sentence.startswith("lr is not what cell [2] says, 0.1, but 0.5, and no cell has changed it")
    planned.names["lr"] = 0.1
    planned.names["f"] = lambda: 2
    assert export(planned, tmp_path / "train.py").startswith("f is not what cell [2] says, and no cell has changed it")


def test_without_a_cell_in_ranks_or_with_other_words_nothing_is_written(planned: Notebook, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    assert export(planned, path).startswith("no %%accelerate cell has run in this kernel")
    run(planned, SEED, DATA, MODEL, TRAIN)
    assert export(planned, path, "--cell 3").startswith("cell [3] is none that ran with %%accelerate")
    assert export(planned, path, "--now").startswith("%accelerate export takes the file to write, and maybe --cell 5")


def test_a_folder_that_is_not_there_is_said(planned: Notebook, tmp_path: Path) -> None:
    run(planned, SEED, DATA, MODEL, TRAIN)
    assert "cannot be written: No such file or directory." in export(planned, tmp_path / "no" / "train.py")


def test_a_program_of_somebody_else_is_not_replaced(planned: Notebook, tmp_path: Path) -> None:
    run(planned, SEED, DATA, MODEL, TRAIN)
    path = tmp_path / "train.py"
    path.write_text("print(1)\n")
    assert "%accelerate export has not written it" in str(planned.run(f"%accelerate export {path}").error)
    assert path.read_text() == "print(1)\n"
    path.unlink()
    for _ in range(2):
        assert planned.run(f"%accelerate export {path}").error is None


def test_flags_that_a_script_has_not_are_named_in_it(planned: Notebook, tmp_path: Path) -> None:
    run(planned, SEED, DATA, MODEL)
    run(planned, TRAIN.replace("--cpu", "--cpu --seed 3 -a 2 --plain --checkpoint-every 10min"))
    script = export(planned, tmp_path / "train.py")
    assert "Without effect in a script: --plain, --checkpoint-every." in script
    assert "gradient_accumulation_steps=2, seed=3" in script
