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


def done(notebook: Any, cell: str) -> Any:
    ended = notebook.run(cell)
    assert ended.error is None, ended.error
    return ended


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
    assert cell.stdout.splitlines()[0] == "2 ranks on CPU, seed 1; bf16, accumulate 4; prepared: fsdp"
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
    assert (
        "nbaccel: -p bf16 and --checkpoint-every 10min have no effect: no backward() has trained anything.\n"
        in cell.stderr
    )
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


def test_flags_of_nbaccel_toml_are_said_and_refuse_nothing(there: Any) -> None:
    Path("nbaccel.toml").write_text('checkpoint-every = "1steps"\nstrategy = "fsdp"\n', encoding="utf-8")
    cell = done(there, f"%%accelerate\n{OF_A_LIBRARY}")
    assert cell.stderr.count("--checkpoint-every 1steps (of the settings) has no effect above Lightning's Fabric") == 1
    assert cell.stderr.count("--strategy fsdp (of the settings) has no effect above Lightning's Fabric") == 1
    assert not is_untrained(there)


ABOVE_OTHERS = """
import warnings; warnings.simplefilter("ignore")
import torch
from torch.utils.data import DataLoader
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(8, 1)
    def forward(self, x):
        seeds.append(torch.initial_seed())
        if memory_ends:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return {"loss": self.line(x).square().mean()}
data = [{"x": torch.ones(8)}] * 32
"""
OTHERS = {
    "ddp": """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.is_initialized() or dist.init_process_group("gloo")
wrapped = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
for batch in DataLoader(data, 8):
    wrapped(batch["x"])["loss"].backward()
    optimizer.step()
""",
    "accelerate": """
from accelerate import Accelerator as Theirs
theirs = Theirs(cpu=True)
bare = Net()
wrapped, optimizer, batches = theirs.prepare(bare, torch.optim.SGD(bare.parameters(), 0.1), DataLoader(data, 8))
for batch in batches:
    theirs.backward(wrapped(batch["x"])["loss"])
    optimizer.step()
""",
    "transformers": """
from transformers import Trainer, TrainingArguments
arguments = TrainingArguments("out", max_steps=2, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True)
Trainer(Net(), arguments, train_dataset=data).train()
""",
    "lightning": """
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def training_step(self, batch, index):
        return self.net(batch["x"])["loss"]
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=2, **quiet).fit(Module(), DataLoader(data, 8))
""",
    "fabric": """
import lightning
fabric = lightning.Fabric(accelerator="cpu", devices=2)
fabric.launch()
bare = Net()
wrapped, optimizer = fabric.setup(bare, torch.optim.SGD(bare.parameters(), 0.1))
for batch in fabric.setup_dataloaders(DataLoader(data, 8)):
    fabric.backward(wrapped(batch["x"])["loss"])
    optimizer.step()
""",
}


@pytest.mark.parametrize("name", ["ddp", *(pytest.param(name, marks=pytest.mark.full) for name in [*OTHERS][1:])])
def test_oom_and_seed_do_above_other_trainers_what_the_table_says(there: Any, name: str) -> None:
    if name != "ddp":
        pytest.importorskip("lightning" if name == "fabric" else name)
    done(there, ABOVE_OTHERS + "seeds, memory_ends = [], False")
    said = done(there, f"%%accelerate -n 2 --seed 5\n{OTHERS[name]}\nprint('seeded by', seeds[0])").stdout
    assert ("seeded by 42\n" if name == "transformers" else "seeded by 5\n") in said
    done(there, "memory_ends = True")
    cell = there.run(f"%%accelerate -n 2\n{OTHERS[name]}")
    assert isinstance(cell.error, RuntimeError)
    assert "started again" not in cell.stdout.replace("not started again", "")
    assert "not started again: nothing of ours can be cut, since " in cell.stdout
    assert "shares its model out itself" in cell.stdout or name not in ("ddp", "accelerate")
