"""Cells in real ranks, from the flags to the variables that come back and the error that is raised."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from environments import reads_assigned_commands
from nbaccel.errors import NestedLaunch, RankDied, ResultsMissing
from starts import ZYGOTE

pytestmark = pytest.mark.slow


def lines(cell: Any) -> list[str]:
    """What a cell printed, without the line before the run, and the one after a run that took seconds."""
    first, *rest = cell.stdout.splitlines()
    assert re.match(r"\d ranks? on CPU", first)
    return [line for line in rest if not re.match(r"(done in|(stopped|failed) after) \d", line)]


def test_a_model_trains_in_two_ranks_and_comes_back_into_the_same_object(notebook: Any) -> None:
    notebook.run(
        "import torch\n"
        "torch.manual_seed(0)\n"
        "x, y = torch.randn(8, 2), torch.randn(8, 1)\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
        "before = model.weight.clone()\n"
    )
    model, optimizer = notebook.names["model"], notebook.names["optimizer"]
    cell = notebook.run(
        "#@title Training\n"
        "%%accelerate -n 2 --out model, optimizer, history --seed 5\n"
        "model, optimizer = accelerator.prepare(model, optimizer)\n"
        "history = []\n"
        "for step in range(3):\n"
        "    part = slice(accelerator.process_index, None, accelerator.num_processes)\n"
        "    loss = (model(x[part]) - y[part]).square().mean()\n"
        "    accelerator.backward(loss)\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "    history.append(float(accelerator.reduce(loss.detach(), 'mean')))\n"
    )
    assert cell.error is None
    assert cell.stdout.startswith("2 ranks on CPU, ")
    assert cell.stdout.splitlines()[0].endswith("seed 5")
    assert "brought back: model (updated in place, " in cell.stdout
    assert notebook.names["model"] is model
    assert notebook.names["optimizer"] is optimizer
    assert not model.weight.equal(notebook.names["before"])
    assert len(notebook.names["history"]) == 3
    assert "accelerator" not in notebook.names


@pytest.mark.parametrize("start", ["fork", ZYGOTE])
def test_prepared_models_inside_of_other_values_come_back_as_they_were_written(notebook: Any, start: str) -> None:
    cell = notebook.run(
        f"%%accelerate -n 2 -p bf16 --out folds,scores --start {start}\n"
        "import torch\n"
        "folds, scores = [], [0.5, 0.25]\n"
        "for fold in range(2):\n"
        "    model = torch.nn.Linear(2, 1)\n"
        "    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "    folds.append({'model': model, 'own': accelerator.unwrap_model(model), 'optimizer': optimizer})\n"
    )
    assert cell.error is None
    assert notebook.names["scores"] == [0.5, 0.25]
    for fold in notebook.names["folds"]:
        assert type(fold["model"]).__name__ == "Linear"
        assert fold["own"] is fold["model"]
        assert "forward" not in vars(fold["model"])
        assert type(fold["optimizer"]).__name__ == "SGD"
        assert fold["optimizer"].param_groups[0]["params"][0] is fold["model"].weight


@pytest.mark.parametrize("start", ["fork", ZYGOTE, "inline"])
def test_only_what_out_names_comes_back(notebook: Any, start: str) -> None:
    notebook.run("kept = [0]; class_of_the_notebook = type('C', (), {})")
    cell = notebook.run(
        f"%%accelerate -o made,thing --start {start}\nkept = made = [1]\nother = 2\nthing = class_of_the_notebook()"
    )
    assert cell.error is None
    assert notebook.names["kept"] == [0]
    assert notebook.names["made"] == [1]
    assert "other" not in notebook.names
    assert type(notebook.names["thing"]) is notebook.names["class_of_the_notebook"]


MAKES_NAMES = "import math\nscores = [1]\nnames = {'a': 1}\ndef helper(): return scores\n"


def test_what_a_cell_makes_comes_and_data_is_named(notebook: Any) -> None:
    cell = notebook.run(f"%%accelerate\n{MAKES_NAMES}")
    assert lines(cell) == ["brought back: scores, names"]
    assert notebook.names["math"].pi > 3
    assert notebook.names["helper"]() is notebook.names["scores"]
    assert notebook.names["names"] == {"a": 1}


def test_another_name_for_a_trained_model_is_no_news(notebook: Any) -> None:
    notebook.run("import torch\nmodel = torch.nn.Linear(2, 1)")
    cell = notebook.run(
        "%%accelerate\nsame, descent = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))\n"
        "accelerator.backward(same(torch.ones(1, 2)).sum())\ndescent.step()\n"
    )
    assert cell.error is None
    assert lines(cell)[0] == "brought back: model trained in place (3 parameters), descent"
    assert notebook.names["same"] is notebook.names["model"]


@pytest.mark.parametrize("start", ["fork", "inline"])
def test_a_cell_that_only_prints_says_nothing_more(notebook: Any, start: str) -> None:
    notebook.run("x = [1]")
    assert lines(notebook.run(f"%%accelerate --start {start}\nprint(x)\n")) == ["[1]"]


@pytest.mark.parametrize("out", ["none", "named"])
def test_data_that_was_not_asked_for_is_hinted_at(notebook: Any, out: str) -> None:
    cell = notebook.run(f"%%accelerate --out {out}\n{MAKES_NAMES}")
    assert lines(cell) == ["not brought back: names, scores; add them to --out"]
    assert not {"math", "scores", "names", "helper"} & notebook.names.keys()


def test_the_configuration_says_what_cells_leave_and_a_cell_says_otherwise(notebook: Any) -> None:
    notebook.run("%accelerate config out=named")
    notebook.run("%%accelerate\na = 1\n")
    notebook.run("%%accelerate --out cell\nb = 1\n")
    assert "a" not in notebook.names
    assert notebook.names["b"] == 1


@pytest.mark.parametrize("start", ["fork", "inline"])
def test_the_last_expression_is_the_output_of_the_cell(notebook: Any, start: str) -> None:
    assert notebook.run(f"%%accelerate --start {start}\n{{'loss': 0.5}}").value == {"loss": 0.5}
    assert notebook.run("_['loss']").value == 0.5
    assert notebook.run(f"%%accelerate --start {start}\n3;").value is None


def test_a_heavy_last_expression_sends_only_what_is_shown(notebook: Any) -> None:
    cell = notebook.run("%%accelerate\nimport torch\ntorch.nn.Linear(2000, 1000).eval()")
    text = "Linear(in_features=2000, out_features=1000, bias=True)"
    assert cell.stdout.endswith(f"Out[1]: {text}\n")
    assert repr(cell.value) == text
    data, _ = notebook.shell.display_formatter.format(cell.value)
    assert data == {"text/plain": text}


def test_a_name_that_was_never_assigned_fails_the_cell_after_the_others_came(notebook: Any) -> None:
    cell = notebook.run("%%accelerate -o a,b,c\na = 1\nif False:\n    b = 2\nimport threading\nc = threading.Lock()\n")
    assert isinstance(cell.error, ResultsMissing)
    assert set(cell.error.names) == {"b", "c"}
    assert notebook.names["a"] == 1
    assert lines(cell) == [
        "brought back: a (28 bytes)",
        "ResultsMissing: 2 of the 3 names of --out did not come back: b (the cell ended without assigning it), "
        "c (a lock cannot be sent to another process). "
        "Assign it in the cell on rank 0 as tensors, arrays, modules or plain data, or leave it out of --out.",
    ]


def test_results_come_back_from_a_failed_run_too(notebook: Any) -> None:
    cell = notebook.run("%%accelerate -n 2 -o a,b\na = 1\nundefined\nb = 2\n")
    assert isinstance(cell.error, NameError)
    assert notebook.names["a"] == 1
    assert lines(cell)[:2] == [
        "brought back from the failed run: a (28 bytes)",
        "not brought back: b (the cell ended without assigning it)",
    ]
    assert "Cell In[1], line 3" in cell.stdout
    assert cell.stdout.count("most recent call last") == 1


def test_results_come_back_from_a_run_that_met_its_time_limit(notebook: Any) -> None:
    cell = notebook.run("%%accelerate -n 2 -o a -t 0.3\nimport time\na = 1\ntime.sleep(60)\n")
    assert isinstance(cell.error, TimeoutError)
    assert lines(cell) == [
        "brought back from the stopped run: a (28 bytes)",
        "TimeoutError: the run was stopped at its time limit of 0.3 s (--timeout).",
    ]
    assert "last run: Cell In[1] stopped after" in notebook.run("%accelerate").stdout


def test_a_cell_that_met_the_limit_of_its_accelerator_ends_well_and_says_so(notebook: Any) -> None:
    cell = notebook.run(
        "%%accelerate -n 2 -o a\nimport time\nfrom nbaccel import Accelerator\na = 1\n"
        "accelerator = Accelerator(time_limit='0.1s')\ntime.sleep(60)\n"
    )
    assert cell.error is None
    assert lines(cell) == [
        "stopped at the time limit of 0.1 s; nothing was saved, which --checkpoint-every does at a limit too",
        "brought back: a (28 bytes)",
    ]
    assert "last run: Cell In[1] stopped after" in notebook.run("%accelerate").stdout


def test_a_cell_in_the_notebooks_own_process_ends_well_at_the_limit_of_its_accelerator_too(notebook: Any) -> None:
    cell = notebook.run(
        "%%accelerate --start inline -o a,b\nimport torch\nfrom nbaccel import Accelerator\na = 1\n"
        "loader = Accelerator(time_limit=0.2).prepare(torch.utils.data.DataLoader(range(10**9)))\n"
        "b = sum(1 for x in loader)\n"
    )
    assert cell.error is None
    assert lines(cell) == [
        "stopped before step 0: the time limit of 0.2 s is over. Nothing was saved: with checkpoint_every a training "
        "is, also when it is stopped.",
        "not brought back: b (the cell ended without assigning it)",
    ]
    assert notebook.names["a"] == 1


def test_an_interrupted_run_raises_keyboard_interrupt_in_one_line(notebook: Any) -> None:
    cell = notebook.run(
        f"%%accelerate -n 2 -o a\nimport os, signal, time\na = 1\n"
        f"if accelerator.is_main_process: os.kill({os.getpid()}, signal.SIGINT)\ntime.sleep(60)\n"
    )
    assert isinstance(cell.error, KeyboardInterrupt)
    assert notebook.names["a"] == 1
    said = lines(cell)
    assert said[0] == "brought back from the stopped run: a (28 bytes)"
    assert said[1].startswith("KeyboardInterrupt: the run was interrupted after ")
    assert len(said) == 2


def test_what_a_dead_rank_owed_is_named(notebook: Any) -> None:
    cell = notebook.run("%%accelerate -o a\na = 1\nimport os\nos._exit(3)\n")
    assert isinstance(cell.error, RankDied)
    assert lines(cell)[0] == "not brought back: a (rank 0 had ended)"
    assert "exit code 3" in lines(cell)[1]


def test_shown_ranks_and_text_of_all(notebook: Any) -> None:
    assert lines(notebook.run("%%accelerate -n 2 -r 1\nprint('rank', accelerator.process_index)")) == ["rank 1"]


def test_plain_shows_rich_output_as_text(notebook: Any) -> None:
    cell = notebook.run(
        "%%capture caught\n%%accelerate --plain\nfrom IPython.display import display, HTML\ndisplay(HTML('<b>'))"
    )
    assert cell.error is None
    assert "<IPython.core.display.HTML object>" in notebook.names["caught"].stdout
    assert not notebook.names["caught"].outputs


def test_capture_above_takes_text_and_rich_output(notebook: Any) -> None:
    notebook.run(
        "%%capture caught\n%%accelerate -n 2\nfrom IPython.display import display, HTML\ndisplay(HTML('x'))\nprint(7)"
    )
    caught = notebook.names["caught"]
    assert caught.stdout.endswith("7\n")
    assert [output.data["text/html"] for output in caught.outputs] == ["x"]


def test_time_above_and_below(notebook: Any) -> None:
    above = notebook.run("%%time\n%%accelerate -o a\na = 1\n")
    assert "Wall time: " in above.stdout
    assert notebook.names["a"] == 1
    assert lines(notebook.run("%%accelerate\n%%time\nx = 1;\n"))[0].startswith("Wall time: ")


def test_commands_and_line_magics_work_in_ranks(notebook: Any) -> None:
    cell = notebook.run("%%accelerate -n 2 -o x\n!echo hello\n%time x = 1\n")
    assert cell.error is None
    assert "hello" in cell.stdout
    assert notebook.names["x"] == 1


@reads_assigned_commands
def test_what_a_command_prints_is_a_value_in_ranks(notebook: Any) -> None:
    assert notebook.run("%%accelerate -n 2 -o files\nfiles = !echo one two\n").error is None
    assert list(notebook.names["files"]) == ["one two"]


def test_a_rank_does_not_launch_ranks(notebook: Any) -> None:
    error = notebook.run("%%accelerate\nget_ipython().run_cell_magic('accelerate', '', 'x = 1')\n").error
    assert isinstance(error, NestedLaunch)


def test_inline_leaves_other_names_alone_after_an_error_too(notebook: Any) -> None:
    notebook.run("a = 0; b = 0")
    cell = notebook.run("%%accelerate --start inline -o a\na = 1\nb = 2\nc = 3\n1 / 0\n")
    assert isinstance(cell.error, ZeroDivisionError)
    assert "Cell In[2]" in cell.stdout
    assert "nbaccel/launching" not in cell.stdout
    assert (notebook.names["a"], notebook.names["b"], "c" in notebook.names) == (1, 0, False)


def test_the_same_seed_gives_the_same_numbers_and_ranks_differ(notebook: Any) -> None:
    cell = "%%accelerate -n 2 --seed 3\nimport torch\naccelerator.gather(torch.rand(1)).tolist()"
    first, second = notebook.run(cell).value, notebook.run(cell).value
    assert first == second
    assert first[0] != first[1]
