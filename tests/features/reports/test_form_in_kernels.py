"""The form in real kernels: what is displayed, what a choice in it changes, and the same without ipywidgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from environments import Environment
from fixtures.kernels import Kernels
from kernel.harness import RealKernel, accelerate

WIDGET = "application/vnd.jupyter.widget-view+json"

MODEL_IDS = """
{widget.description: widget.model_id for widget in list(
 (vars(__import__("ipywidgets").widgets.widget).get("_instances") or __import__("ipywidgets").Widget.widgets).values())
 if hasattr(widget, "description")}
"""


def choose(kernel: RealKernel, label: str, **state: Any) -> None:
    """What a front end sends when a person uses the widget with this label; the kernel answers before the next cell."""
    model_id = kernel.value(MODEL_IDS.strip().replace("\n", ""))[label]
    kernel.send("comm_msg", {"comm_id": model_id, "data": {"method": "update", "state": state, "buffer_paths": []}})


def test_a_choice_changes_the_line_that_the_next_run_prints(kernel: RealKernel, tmp_path: Path) -> None:
    kernel.do(f"%cd -q {tmp_path}")
    shown = kernel.do("%accelerate config")
    (display,) = shown.displays
    assert display[WIDGET]["model_id"]
    assert "effective batch size: 32 x 1 x 1 = 32 (a prepared loop: your DataLoader's batch" in display["text/plain"]
    choose(kernel, "Ranks", value="2")
    choose(kernel, "Batches per optimizer step", value=4)
    choose(kernel, "Seed", value="7")
    ran = kernel.do("%%accelerate --cpu\naccelerator.num_processes")
    assert ran.stdout.startswith("2 ranks on CPU, seed 7; accumulate 4\n")
    assert ran.result is not None
    assert ran.result["text/plain"] == "2"
    kernel.do("%accelerate config num-processes= accumulate= seed=")


def test_a_cells_own_flag_wins(kernel: RealKernel, tmp_path: Path) -> None:
    kernel.do(f"%cd -q {tmp_path}\n%accelerate config")
    choose(kernel, "Batches per optimizer step", value=4)
    assert "; accumulate 2\n" in kernel.do("%%accelerate --cpu -a 2\n1").stdout
    kernel.do("%accelerate config accumulate=")


def test_without_ipywidgets_the_same_is_printed(new_kernel: Kernels, environment: Environment, tmp_path: Path) -> None:
    (tmp_path / "nbaccel.toml").write_text("accumulate = 4\n")
    kernel = new_kernel()
    kernel.do(f"import sys; sys.modules['ipywidgets'] = None\n%cd -q {tmp_path}\n%load_ext nbaccel")
    shown = kernel.do("import nbaccel; nbaccel.panel()")
    assert shown.displays == []
    assert shown.stdout.startswith("nbaccel.toml: accumulate=4\nwhat the next %%accelerate cells use; ")
    assert shown.stdout.endswith("(ipywidgets is not installed: with it, this is a form)\n")


def test_a_rank_has_no_choices_of_its_own(kernel: RealKernel, start: str) -> None:
    ended = kernel.run(accelerate("import nbaccel; nbaccel.panel()", start))
    assert ended.status == "error"
    assert ended.displays == []
    assert "UsageError: choices are the notebook's, and what a rank chooses ends with it: use %accelerate" in ended.text
