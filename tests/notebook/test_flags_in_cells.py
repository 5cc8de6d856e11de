"""Cells with flags that have no effect above their loop, in real ranks: what is said, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nbaccel.errors import FlagWithoutEffect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.usefixtures("few_objects")]

SETUP = """
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.ones(8, 2), batch_size=4)
before = model.weight.clone()
"""
LOOP = """
for x in loader:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""
OF_A_LIBRARY = f"""
library = {{"__name__": "lightning.fabric.example"}}
exec("def train(model, optimizer, loader):" + {LOOP!r}.replace(chr(10), chr(10) + "    "), library)
library["train"](model, optimizer, loader)
"""
"""The loop, as a function of a library that has checkpoints of its own."""

PREPARED = """
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()
"""
LOST = (
    "--checkpoint-every 1steps has no effect above Lightning's Fabric: its own arguments decide. Instead: "
    "fabric.save(path, state). Nothing was trained yet."
)


@pytest.fixture
def there(notebook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    notebook.run(SETUP)
    return notebook


def is_untrained(notebook: Any) -> bool:
    return bool(notebook.names["model"].weight.equal(notebook.names["before"]))


@pytest.mark.parametrize("start", ["fork", "zygote"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_flag_that_saves_work_is_refused_before_the_first_step_of_a_library(there: Any, start: str, n: int) -> None:
    cell = there.run(f"%%accelerate -n {n} --start {start} --checkpoint-every 1steps\n{OF_A_LIBRARY}")
    assert isinstance(cell.error, FlagWithoutEffect)
    assert str(cell.error) == LOST
    assert is_untrained(there)
    assert not Path("nbaccel_checkpoints").exists()


def test_a_program_that_goes_on_after_the_refusal_trains_nothing_and_ends_with_it(there: Any) -> None:
    caught = OF_A_LIBRARY.replace('library["train"]', 'try: library["train"]') + "except Exception: pass"
    cell = there.run(f"%%accelerate --checkpoint-every 1steps\n{caught}")
    assert isinstance(cell.error, FlagWithoutEffect)
    assert is_untrained(there)


def test_a_resume_of_the_cells_own_is_refused_and_one_of_the_settings_is_said(there: Any) -> None:
    there.run(f"%%accelerate --checkpoint-every 1steps\n{PREPARED}")
    assert Path("nbaccel_checkpoints").exists()
    there.run(SETUP)
    cell = there.run(f"%%accelerate --resume\n{OF_A_LIBRARY}")
    assert isinstance(cell.error, FlagWithoutEffect)
    assert str(cell.error).startswith("--resume has no effect above Lightning's Fabric: ")
    there.run("%accelerate config resume=nbaccel_checkpoints checkpoint-every=1steps mixed-precision=bf16")
    cell = there.run(f"%%accelerate -n 2\n{OF_A_LIBRARY}")
    assert cell.error is None
    for flag in ("checkpoint-every 1steps", "resume nbaccel_checkpoints", "p bf16"):
        assert cell.stderr.count(f"-{flag} (of the settings)") == 1, cell.stderr
    assert not is_untrained(there)


def test_other_flags_get_one_line_of_rank_0_and_the_loop_trains(there: Any) -> None:
    cell = there.run(f"%%accelerate -n 2 -p bf16 -a 4 --strategy fsdp --batches split --seed 1\n{LOOP}")
    assert cell.error is None
    assert cell.stdout.splitlines()[0] == "2 ranks on CPU, fork, seed 1; bf16, accumulate 4; prepared: fsdp"
    assert cell.stderr.count("no effect") == 1, cell.stderr
    assert "-a 4: 4 batches make one step of an optimizer" in cell.stdout
    assert "--strategy fsdp has no effect above an unmodified loop: the loop prepares nothing, and every" in cell.stderr
    assert not is_untrained(there)
    run = there.session.launcher.last_run
    assert "batches of this loop are split" in run.text
    assert "batches of this loop are split, bf16, accumulate 4" in run.text


def test_above_a_prepared_loop_they_are_in_force_and_shown(there: Any) -> None:
    cell = there.run(f"%%accelerate -n 2 -p bf16 -a 4 --checkpoint-every 1steps --batches each\n{PREPARED}")
    assert cell.error is None
    assert "no effect" not in cell.stdout + cell.stderr
    text = there.session.launcher.last_run.text
    assert "each rank has its own batches: prepared, bf16, accumulate 4" in text


def test_a_cell_that_trains_nothing_is_told_at_its_end(there: Any) -> None:
    cell = there.run("%%accelerate -n 2 -p bf16 --checkpoint-every 10min --time-limit 1h\nx = 1")
    assert cell.error is None
    assert "nbaccel: -p bf16 and --checkpoint-every 10min have no effect: nothing was trained.\n" in cell.stderr
    there.run("%accelerate config mixed-precision=bf16")
    assert "no effect" not in there.run("%%accelerate -n 2\nx = 1").stderr


def test_a_cell_in_the_notebooks_own_process_is_told_the_same(there: Any) -> None:
    cell = there.run(f"%%accelerate --start inline --strategy fsdp\n{LOOP}")
    assert cell.error is None
    assert cell.stderr.count("--strategy fsdp has no effect above an unmodified loop") == 1
    there.run(SETUP)
    cell = there.run(f"%%accelerate --start inline --checkpoint-every 1steps\n{OF_A_LIBRARY}")
    assert str(cell.error) == LOST
    assert is_untrained(there)
    assert "no effect" not in there.run(f"%%accelerate --start inline -p bf16\n{PREPARED}").stderr
    there.run(SETUP + LOOP)  # nothing is left in this process
    assert not is_untrained(there)


def test_ranks_that_stay_say_it_in_each_cell_and_refuse_what_a_cell_asks_for(there: Any) -> None:
    there.run("%accelerate start -n 2 -p bf16 --checkpoint-every 1steps")
    for _ in range(2):
        cell = there.run(f"%%accelerate\n{SETUP}{OF_A_LIBRARY}")
        assert cell.error is None
        assert cell.stderr.count("-checkpoint-every 1steps (of the settings)") == 1, cell.stderr
    cell = there.run(f"%%accelerate --checkpoint-every 1steps\n{SETUP}{OF_A_LIBRARY}")
    assert isinstance(cell.error, FlagWithoutEffect)
    assert "no effect" not in there.run(f"%%accelerate\n{SETUP}{PREPARED}").stderr
    there.run("%accelerate stop")
