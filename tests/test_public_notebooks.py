"""The tool behind `make public-notebooks`, with a made-up notebook, and with results as kernels give them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from public_notebooks import __main__ as tool
from public_notebooks.catalogue import STAND_INS, Catalogue, Notebook, read_catalogue
from public_notebooks.cells import changed, code_cells, copy_files, with_epochs
from public_notebooks.checks import cell_keys, check_notebook
from public_notebooks.kernels import Ended
from public_notebooks.pasting import Advice, CannotPaste, PastedText, advice_of, pasted, samples_per_s
from public_notebooks.verdicts import Row, is_failure, row_of_check, row_of_run, row_of_speed, sums, table
from public_repositories import KeptResults

SETUP = """\
%matplotlib inline
!pip install something
import torch
from numbers_beside import STEPS
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.ones(64, 2))
loader = torch.utils.data.DataLoader(data, batch_size=8)"""
TRAINING = """\
for epoch in range(STEPS):
    for (x,) in loader:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print(f"{loss.item():.3f}")"""
FAULTY = f"{TRAINING}\nprint(histroy)"


@pytest.fixture
def notebook(tmp_path: Path) -> Notebook:
    """A notebook of a repository that is cloned into `tmp_path`, which has a module beside it."""
    repository = tmp_path / "repositories" / "someone+lines"
    (repository / "lines").mkdir(parents=True)
    (repository / "lines" / "numbers_beside.py").write_text("STEPS = 20")
    cells = [{"cell_type": "code", "source": source.splitlines(True)} for source in (SETUP, TRAINING, FAULTY)]
    written = json.dumps({"cells": [{"cell_type": "markdown", "source": ["#"]}, *cells]})
    (repository / "lines" / "first.ipynb").write_text(written)
    git = ["git", "-c", "user.name=someone", "-c", "user.email=someone@nowhere", "-C", str(repository)]
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "lines"]):
        subprocess.run([*git, *arguments], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (repository / "lines" / "first.ipynb").unlink()  # it is read at the commit
    return Notebook("first", "someone/lines", commit, "lines/first.ipynb", [1, 2], files=["lines"], folder="lines")


@pytest.fixture
def catalogue(tmp_path: Path, notebook: Notebook) -> Catalogue:
    return Catalogue(tmp_path, [notebook])


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_training_cells_are_checked_and_run(catalogue: Catalogue, notebook: Notebook) -> None:
    results: dict[str, dict[str, Any]] = {}
    check_notebook(catalogue, notebook, results.__setitem__, 60.0)
    rows = [row_of_check(key, results[key]) for key in cell_keys(notebook)]
    assert [row.word for row in rows] == ["fine", "true alarm"], results
    assert "NameError: name 'histroy' is not defined" in rows[1].said
    assert sums("check", rows) == "2 cells: 1 fine, 1 true alarm, 0 false alarms, 0 crashes"
    assert not is_failure(rows)
    assert results["first 1"]["before"] == []


# --- notebooks and their cells ----------------------------------------------------------------------------------------


def test_what_the_notebooks_name_lies_here_and_nothing_else(tmp_path: Path) -> None:
    catalogue = read_catalogue(tmp_path)
    notebooks = catalogue.notebooks
    assert len(notebooks) >= 40
    assert sum(notebook.speed is not None for notebook in notebooks) >= 10
    assert len({notebook.name for notebook in notebooks}) == len(notebooks)
    stand_ins = {f"{name}.py" for notebook in notebooks for name in notebook.stand_ins}
    assert stand_ins == {path.name for path in STAND_INS.glob("*.py")}
    assert {name for notebook in notebooks for name in notebook.imports} == catalogue.packages.keys()
    assert all(["np\\.Inf\\b", "np.inf"] in notebook.edits for notebook in notebooks)


def test_what_is_missing_is_said_before_anything_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([str(tmp_path / "others"), "--names", "graykode_nnlm,karpathy_mlp"]) == 2
    captured = capsys.readouterr()
    made, *clones = captured.out.splitlines()
    assert made.startswith("mkdir -p ")
    assert [line.rpartition("/")[2] for line in clones] == ["graykode+nlp-tutorial", "karpathy+nn-zero-to-hero"]
    assert captured.err == "2 repositories and 0 packages are missing: `| sh` fetches them\n"
    assert not any(tmp_path.iterdir())


def test_a_package_is_installed_once_into_the_folder(tmp_path: Path) -> None:
    drawing = Notebook("n", "a/b", "0", "n.ipynb", [0], imports=["json", "no_such_drawing"])
    catalogue = Catalogue(tmp_path / "a folder", [drawing], {"no_such_drawing": "1.2"})
    [line] = catalogue.install_lines([drawing], "python")
    assert line.startswith("python -m pip install")
    assert line.endswith(f"--target '{catalogue.package_folder}' no_such_drawing==1.2")
    (catalogue.package_folder / "no_such_drawing").mkdir(parents=True)
    assert catalogue.install_lines([drawing], "python") == []


def test_cells_and_files_are_those_of_the_commit(catalogue: Catalogue, notebook: Notebook, tmp_path: Path) -> None:
    repository = catalogue.repository(notebook)
    cells = code_cells(repository, notebook)
    assert cells[1:] == [TRAINING, FAULTY]
    assert cells[0].splitlines()[:3] == ["pass", "pass", "import torch"]
    copy_files(repository, notebook, tmp_path / "copy")
    assert (tmp_path / "copy" / "lines" / "numbers_beside.py").read_text() == "STEPS = 20"
    assert (tmp_path / "copy" / "lines" / "first.ipynb").is_file()
    with pytest.raises(RuntimeError, match=r"git show .*:no.ipynb in .*someone\+lines"):
        code_cells(repository, Notebook("n", "a/b", notebook.commit, "no.ipynb", [0]))


def test_lines_stay_where_they_are_and_formats_are_no_magics() -> None:
    cell = "%%time\nif a:\n    !ls\nprint('%d'\n      %(3))\nfrom google.colab import drive\nx = np.Inf"
    assert changed(cell, [["np\\.Inf\\b", "np.inf"]]) == (
        "pass\nif a:\n    pass\nprint('%d'\n      %(3))\npass\nx = np.inf"
    )


def test_epochs_are_changed_where_they_have_a_name() -> None:
    assert with_epochs("NUM_EPOCHS = 5\nn_epochs=20; steps = 3\nfit(epochs=4)", 7) == (
        "NUM_EPOCHS = 7\nn_epochs = 7; steps = 3\nfit(epochs = 7)"
    )


def test_a_notebook_without_a_training_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="training of n names no cell"):
        Notebook("n", "a/b", "0", "n.ipynb", [])
    with pytest.raises(ValueError, match=r"speed of n is one of the cells \[1\], got 2"):
        Notebook("n", "a/b", "0", "n.ipynb", [1], speed=2)


def test_only_what_changes_a_run_makes_its_result_another_one() -> None:
    about = ("a/b", "0", "n.ipynb", [1])
    assert Notebook("n", *about).call == Notebook("other", *about, speed=1).call
    assert Notebook("n", *about).call != Notebook("n", *about, edits=[["a", "b"]]).call


# --- verdicts ---------------------------------------------------------------------------------------------------------


def ended(how: str = "well", error: str = "", printed: str = "0.5") -> dict[str, Any]:
    return Ended(how, error, 1.0, printed).facts()


FAILS = ended("error", "NameError: no")
REFUSES = ended("error", "LaunchRefused: no")
OK, RED = "ok: it ends", "red: line 3: NameError"


@pytest.mark.parametrize(
    ("word", "report", "check", "ran"),
    [
        ("fine", [OK], ended(), ended()),
        ("fine", [OK, "yellow: not reached: line 3"], ended(), ended("cut")),
        ("true alarm", [RED], ended(), FAILS),
        ("true alarm", [OK, RED], ended(), ended("hangs")),
        ("false alarm", [RED], ended(), ended()),
        ("false alarm", [], REFUSES, ended()),
        ("missed", [OK], ended(), FAILS),
        ("missed", [OK], ended(), ended("died")),
        ("refused", [], REFUSES, REFUSES),
        ("crash", [], ended(), ended()),
        ("crash", [OK], FAILS, FAILS),
        ("crash", [OK], ended("cut"), ended()),
        ("crash", [], ended("error", "RankDied: of -9"), ended()),
    ],
)
def test_an_alarm_is_true_where_the_run_fails(
    word: str, report: list[str], check: dict[str, Any], ran: dict[str, Any]
) -> None:
    row = row_of_check("n 1", {"before": [], "report": report, "check": check, "run": ran, "plain": None})
    assert row.word == word
    assert is_failure([row]) == (word in ("missed", "crash"))


@pytest.mark.parametrize(
    ("word", "ran", "plain"),
    [
        ("right", ended(), ended()),
        ("right", ended(printed="0.4"), ended()),
        ("right", ended("cut", printed=""), ended("cut")),
        ("right", ended(), FAILS),
        ("refused", REFUSES, ended()),
        ("fails alike", FAILS, FAILS),
        ("wrong", ended(printed=""), ended()),
        ("wrong", ended(printed="loss nan"), ended()),
        ("right", ended(printed="loss nan"), ended(printed="nan")),
        ("crash", FAILS, ended()),
        ("crash", ended("error", "RankDied: of -9"), ended()),
        ("crash", ended("hangs"), None),
    ],
)
def test_a_run_is_compared_with_the_plain_cell(word: str, ran: dict[str, Any], plain: dict[str, Any] | None) -> None:
    row = row_of_run("n 1", {"run": ran, "plain": plain})
    assert row.word == word
    assert is_failure([row]) == (word in ("wrong", "crash"))


def test_a_cell_that_failed_before_is_named_since_it_makes_alarms_cheap() -> None:
    result = {"before": ["cell 0: no cv2"], "report": [RED], "check": ended(), "run": FAILS, "plain": FAILS}
    assert row_of_check("n 1", result).said == f"{RED} (before it fails cell 0: no cv2)"


def rows(**counts: int) -> list[Row]:
    return [Row("n 1", word.replace("_", " ")) for word, count in counts.items() for _ in range(count)]


def test_one_false_alarm_in_25_cells_is_none_too_many() -> None:
    assert not is_failure(rows(fine=30, false_alarm=1))
    assert is_failure(rows(fine=40, false_alarm=2))
    assert not is_failure(rows(fine=48, false_alarm=2))
    assert sums("check", rows(fine=41, true_alarm=1, false_alarm=1)) == (
        "43 cells: 41 fine, 1 true alarm, 1 false alarm, 0 crashes"
    )
    assert sums("run", [*rows(right=1, crash=1), Row("n 2", "")]) == "2 cells: 1 right, 0 wrong, 1 crash; 1 not run"


def timed(before: list[float], after: list[float]) -> dict[str, Any]:
    return {"advice": "fused=True", "foretold": 1.06, "error": "", "before": before, "after": after}


def test_the_gain_of_speed_is_that_of_the_medians() -> None:
    faster, slower = row_of_speed("a", timed([9, 14, 15], [7, 7, 1])), row_of_speed("b", timed([9.7], [10]))
    nothing = row_of_speed("c", {"advice": "", "error": "", "report": ["nothing helps"]})
    unsure = row_of_speed("c", {"advice": "", "error": "", "report": ["nothing is sure to help"]})
    unmeasured = row_of_speed("d", {"advice": "", "error": "not measured: NameError: no"})
    assert (faster.gain, faster.word, slower.word) == (2.0, "faster", "slower")
    assert sums("speed", [faster, nothing, unmeasured]) == (
        "3 loops: median gain 1.50, smallest 1.00, 1 nothing helps, 1 not measured"
    )
    assert (nothing.gain, unsure.gain, unsure.word) == (1.0, 1.0, "undecided")
    assert not is_failure([faster, nothing, unsure, unmeasured])
    assert is_failure([slower])
    assert is_failure([row_of_speed("e", {"advice": "?", "error": "not pasted: no place in a cell: x"})])
    assert "| a | faster | 2.00 | 9 14 15 / 7 7 1 | fused=True: 1.06 was foretold |" in table("speed", [faster])


# --- pasting ----------------------------------------------------------------------------------------------------------

REPORT = """\
change             speed                     x     numbers equal
the cell as it is  1,151 samples/s (+-4%)    1.00
num_workers=4      3,624 samples/s           3.15  yes
num_workers=4, model.compile(): 3.15 x as fast, by
  Cell In[3], line 2: for x in DataLoader(data, num_workers=4):
  after Cell In[2], line 1: model.compile()
  Cell In[3], as its first line: torch.set_num_threads(1)
  Cell In[3], in its %%accelerate line: -p bf16
too few trials to decide about: fused=True"""


def test_advice_is_pasted_where_the_report_says() -> None:
    advice = advice_of(REPORT)
    assert advice is not None
    assert (advice.change, advice.foretold, len(advice.lines)) == ("num_workers=4, model.compile()", 3.15, 4)
    cells = ["model = Net(\n  3)\nx = 1", "for x in DataLoader(\n    data):\n    step(x)"]
    changed_cells, flags = pasted(cells, advice.lines, {2: 0, 3: 1}, running=1)
    assert changed_cells == [
        "model = Net(\n  3)\nmodel.compile()\nx = 1",
        "torch.set_num_threads(1)\nfor x in DataLoader(data, num_workers=4):\n    step(x)",
    ]
    assert flags == "-p bf16"
    assert samples_per_s(REPORT) == 1151


def test_a_report_without_advice_has_nothing_to_paste() -> None:
    assert advice_of("the cell as it is  1,151 samples/s  1.00\nnothing helps") is None
    assert samples_per_s("no table") is None


def test_advice_that_has_no_place_is_a_defect() -> None:
    with pytest.raises(CannotPaste, match="no place in a cell: where the model is made"):
        advice_of("compile: 1.20 x as fast, by\n  where the model is made, after it: model.compile()")
    line = PastedText("line", 3, 2, "x = 2")
    with pytest.raises(CannotPaste, match="no statement begins in line 2 of the cell: x = 2"):
        pasted(["x = (\n1)"], [line], {3: 0}, running=5)
    with pytest.raises(CannotPaste, match="no cell had the number 3"):
        pasted(["x = 1"], Advice("c", 1.1, (line,)).lines, {2: 0}, running=5)


# --- the call ---------------------------------------------------------------------------------------------------------


def test_a_cell_that_has_a_result_is_not_repeated(
    catalogue: Catalogue,
    notebook: Notebook,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = []

    def examined(catalogue: Catalogue, notebook: Notebook, add: Any, limit_s: float) -> None:
        calls.append(notebook.name)
        for key in cell_keys(notebook)[: len(calls)]:  # the first time it is interrupted after one
            add(
                key,
                {"call": notebook.call, "before": [], "report": [OK], "check": ended(), "run": ended(), "plain": None},
            )
        if len(calls) == 1:
            raise RuntimeError("the kernel is gone")

    monkeypatch.setattr(tool, "read_catalogue", lambda folder: catalogue)
    monkeypatch.setattr(tool, "check_notebook", examined)
    arguments = [str(catalogue.folder), "--commit", "c"]
    assert tool.main(arguments) == 0
    assert "1 cell: 1 fine, 0 true alarms, 0 false alarms, 0 crashes; 1 not run" in capsys.readouterr().out
    assert [tool.main(arguments) for _ in range(2)] == [0, 0]
    assert calls == ["first", "first"]
    assert "\n2 cells: 2 fine" in capsys.readouterr().out
    kept = KeptResults(catalogue.folder / "results" / "check-c.json")
    assert kept.get("first 1", notebook.call)
    assert not kept.get("first 1", "another")
    with pytest.raises(SystemExit, match="no notebook for --mode speed is called first"):
        tool.main([*arguments, "--mode", "speed", "--names", "first"])
