"""Trainers of other libraries show up by themselves: their losses, their steps, their end; and stop in their own way.

Each program runs as a script of its own, with a listener where the panel would be. Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from environments import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

LISTENS = """
import json, os, signal, sys, torch
from nbaccel.base.events import Listener, Loss, Metric, Progress
from nbaccel.launching.launcher import default_launcher
from nbaccel.launching.ipc.spec import Start
from nbaccel.output.screens import ConsoleScreen
from nbaccel.launching.ipc.spec import Devices, LaunchSpec
from nbaccel.launching.tasks.function_task import FunctionTask
from nbaccel.launching.processes.supervisor import RunObservers

class Panel(Listener):
    def __init__(self, press_at):
        self.losses, self.rows, self.progress, self.press_at = [], [], [], press_at
    def feed(self, rank, at, event):
        if rank == 0:
            if isinstance(event, Loss):
                self.losses.append([event.step, event.value])
            elif isinstance(event, Metric):
                self.rows.append([event.step, event.values])
            elif isinstance(event, Progress):
                self.progress.append([event.step, event.batch, event.batches, event.epoch, event.epochs,
                                      event.is_training, event.is_over])
                if self.press_at is not None and event.step >= self.press_at:
                    self.press_at = None
                    os.kill(os.getpid(), signal.SIGINT)  # the notebook's stop button, once
    def tick(self, now):
        pass

def show(train, press_at=None):
    panel = Panel(press_at)
    spec = LaunchSpec(FunctionTask(train), Devices(2), Start("fork", ""), threads=1)
    run, ended = default_launcher().run(spec, RunObservers(ConsoleScreen(), listeners=[panel]))
    facts = {"losses": panel.losses, "rows": panel.rows, "progress": panel.progress,
             "stopped_after": ended.steps,
             "values": [ended.values(rank).get("value") for rank in range(2)],
             "status": [report.status for report in ended.reports], "error": str(run.error)}
    ended.close()
    print(json.dumps(facts))
"""

TRANSFORMERS = """
class Sentences(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        words = torch.randint(0, 50, (12,), generator=torch.Generator().manual_seed(index))
        words[0] = index % 2
        return {"input_ids": words, "labels": index % 2}

def train(count):
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                        intermediate_size=32, max_position_embeddings=16)
    arguments = TrainingArguments(
        output_dir="out", per_device_train_batch_size=4, num_train_epochs=2, use_cpu=True, eval_strategy="epoch",
        report_to=[], save_strategy="no", logging_steps=4, disable_tqdm=True,
    )
    trainer = Trainer(model=BertForSequenceClassification(config), args=arguments, train_dataset=Sentences(count),
                      eval_dataset=Sentences(16))
    trainer.train()
    return [trainer.state.global_step, trainer.state.log_history]
"""

LIGHTNING = """
def train(count):
    import lightning.pytorch
    class Module(lightning.pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)
            self.losses = []
        def training_step(self, batch, index):
            loss = self.layer(batch[0]).square().mean()
            self.losses.append(loss.item())
            return loss
        def validation_step(self, batch, index):
            self.log("val_loss", self.layer(batch[0]).square().mean(), sync_dist=True)
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)
    def loader(count):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(count, 8)), batch_size=4)
    trainer = lightning.pytorch.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=2,
    )
    module = Module()
    trainer.fit(module, loader(count), loader(16))
    return [trainer.global_step, module.losses]
"""


def shown(folder: Path, library: str, trains: str, shows: str) -> dict[str, Any]:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed; `make test` installs it")
    script = folder / "train.py"
    script.write_text(f"{LISTENS}\n{trains}\n{shows}\n")
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, str(script)], cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-1000:]
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


@pytest.mark.full
def test_a_transformers_trainer_reports_its_own_losses_steps_and_end(tmp_path: Path) -> None:
    facts = shown(tmp_path, "transformers", TRANSFORMERS, "show(lambda: train(64))")
    (global_step, log), (global_step_too, _) = facts["values"]
    assert global_step == global_step_too == 16
    assert facts["losses"] == [[row["step"], row["loss"]] for row in log if "loss" in row]
    assert len(facts["losses"]) == 4
    not_told = ("step", "total_flos")  # the second is taken out by the library's own printing
    assert facts["rows"] == [[row["step"], {k: v for k, v in row.items() if k not in not_told}] for row in log]
    training = [row for row in facts["progress"] if row[-2]]
    evaluation = [row for row in facts["progress"] if not row[-2]]
    assert training[-1] == [global_step, 8, 8, 1, 2, True, True]
    assert all(row[2:5] in ([8, 0, 2], [8, 1, 2]) and row[0] == 8 * row[3] + row[1] for row in training)
    assert [row[:3] for row in evaluation if row[-1]] == [[8, 1, 1], [16, 1, 1]]


def test_a_transformers_trainer_stops_by_itself_after_one_step_of_all_ranks(tmp_path: Path) -> None:
    """Loaded in the notebook already when the ranks are forked."""
    facts = shown(
        tmp_path, "transformers", f"import transformers.trainer\n{TRANSFORMERS}", "show(lambda: train(640_000), 20)"
    )
    (global_step, _), (global_step_too, _) = facts["values"]
    assert 20 <= global_step < 80_000
    assert global_step == global_step_too == facts["stopped_after"]
    assert facts["progress"][-1][0] == global_step
    assert facts["status"] == ["ok", "ok"]  # `train` returned, as at its own end
    assert not any("eval_loss" in values for _, values in facts["rows"])


def test_a_lightning_trainer_reports_its_own_losses_steps_and_end(tmp_path: Path) -> None:
    facts = shown(tmp_path, "lightning", LIGHTNING, "show(lambda: train(80))")
    (global_step, losses), (global_step_too, _) = facts["values"]
    assert global_step == global_step_too == 10
    assert facts["losses"] == [[at // 2, pytest.approx(loss)] for at, loss in enumerate(losses)]
    assert [step for step, _ in facts["rows"]] == [5, 10]
    assert all("val_loss" in values for _, values in facts["rows"])
    training = [row for row in facts["progress"] if row[-2]]
    evaluation = [row for row in facts["progress"] if not row[-2]]
    assert training[-1] == [10, 10, 10, 1, 2, True, True]
    assert [row[:3] for row in evaluation if row[-1]] == [[5, 2, 2], [10, 2, 2]]


@pytest.mark.full
def test_a_lightning_trainer_stops_by_itself_after_one_step_of_all_ranks(tmp_path: Path) -> None:
    facts = shown(tmp_path, "lightning", f"import lightning.pytorch\n{LIGHTNING}", "show(lambda: train(640_000), 20)")
    (global_step, _), (global_step_too, _) = facts["values"]
    assert 20 <= global_step < 80_000
    assert global_step == global_step_too == facts["stopped_after"]
    assert facts["status"] == ["ok", "ok"]


def test_a_trainer_of_a_version_that_we_do_not_know_trains_and_tells_nothing() -> None:
    """In a process of its own, since the hook stays."""
    program = """
import sys, types
from nbaccel.base.world import World
from nbaccel.launching.libraries import REPORTS, OtherLibraries
module = types.ModuleType("transformers.trainer")
class Trainer:
    def train(self, epochs):
        return epochs
module.Trainer = Trainer
sys.modules["transformers"], sys.modules["transformers.trainer"] = types.ModuleType("transformers"), module
OtherLibraries(World()).meet(REPORTS)
print(Trainer().train(3), Trainer.train.__name__)
import json, xml.dom.minidom  # everything else is found as ever
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["3", "train"]
