"""What Accelerate, a Trainer of transformers and Lightning made in ranks serves the notebook afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel.harness import RealKernel, accelerate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

LOADER = """
import torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1)); loader = DataLoader(data, batch_size=8, shuffle=True)
"""

WITH_ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
model = torch.nn.Linear(4, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches, model, optimizer = accelerator.prepare(loader, model, optimizer)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
for x, y in batches:
    with accelerator.accumulate(model):
        accelerator.backward(((model(x) - y) ** 2).mean()); optimizer.step(); schedule.step(); optimizer.zero_grad()
there = accelerator.num_processes, len(batches)
"""

TRAINER = """
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
data = [dict(input_ids=[1, 2, 3, 4], labels=i % 2) for i in range(32)]
config = BertConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
model = BertForSequenceClassification(config)
"""

TRAINS = """
arguments = TrainingArguments("out", report_to=[], num_train_epochs=1, use_cpu=True, disable_tqdm=True)
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
trainer.train()
world = arguments.world_size
"""

LIGHTNING = """
import lightning, torch
class Model(lightning.LightningModule):
    def __init__(self): super().__init__(); self.save_hyperparameters(); self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index): return self.layer(batch[0]).mean()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)
class Data(lightning.LightningDataModule):
    def train_dataloader(self):
        data = torch.utils.data.TensorDataset(torch.ones(16, 4))
        return torch.utils.data.DataLoader(data, batch_size=4)
quiet = dict(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
             enable_model_summary=False)
"""


def test_what_accelerate_prepared_is_plain_and_its_accelerator_is_the_notebooks(kernel: RealKernel, start: str) -> None:
    kernel.do(LOADER)
    kernel.do(accelerate(WITH_ACCELERATE, start))
    assert kernel.value("there") == [2, 4]
    assert kernel.value("[type(each).__module__ for each in (model, optimizer, batches)]") == [
        *("torch.nn.modules.linear", "torch.optim.sgd", "torch.utils.data.dataloader")
    ]
    assert kernel.value("optimizer.param_groups[0]['params'][0] is model.weight and schedule.optimizer is optimizer")
    assert kernel.value("[len(batches), accelerator.num_processes, accelerator.unwrap_model(model) is model]") == [
        *(8, 1, True)
    ]
    cell = kernel.do(accelerate("accelerator.print(accelerator.num_processes)", start))
    assert cell.printed == "2\n"


def test_a_trainer_of_the_cell_evaluates_and_trains_in_later_cells(kernel: RealKernel, start: str) -> None:
    kernel.do(TRAINER)
    cell = kernel.do(accelerate(TRAINS, start), timeout_s=100)
    assert kernel.value("[world, arguments.world_size, trainer.accelerator.num_processes]") == [2, 1, 1]
    assert kernel.value("[trainer.model is model, trainer.args is arguments, trainer.state.global_step]") == [
        *(True, True, 2)
    ]
    assert "model trained in place" in cell.text
    assert "not brought back" not in cell.text
    kernel.do("assert trainer.evaluate()['eval_loss'] > 0")
    kernel.do("trainer.train()")
    if start == "zygote":
        return  # a Trainer that has trained cannot be sent
    kernel.do(accelerate("trainer.train()", start), timeout_s=100)
    kernel.do("assert trainer.evaluate()['eval_loss'] > 0")


def test_a_model_of_lightnings_is_there_for_another_trainer(kernel: RealKernel) -> None:
    kernel.do(LIGHTNING)
    body = "data = Data(); model = Model(); trainer = lightning.Trainer(**quiet); trainer.fit(model, data)"
    cell = kernel.do(accelerate(body, "fork"))
    assert (
        "not brought back: trainer (a Trainer that knows its rank: make it anew, or use it in the cell that"
        in cell.text
    )
    assert kernel.value("[model.layer.weight.shape[1], dict(model.hparams), 'trainer' in globals()]") == [4, {}, False]
    kernel.do("trainer = lightning.Trainer(**quiet); trainer.fit(model, data)")


def test_callbacks_of_lightnings_come_and_what_else_of_its_own_has_changed_is_named(
    kernel: RealKernel, tmp_path: Path
) -> None:
    kernel.do(LIGHTNING)
    kernel.do(
        "from lightning.pytorch.callbacks import EarlyStopping; from lightning.pytorch.loggers import CSVLogger\n"
        "def step(self, batch, index): loss = self.layer(batch[0]).mean(); self.log('loss', loss); return loss\n"
        "Model.training_step = step; model, data, stop = Model(), Data(), EarlyStopping('loss', patience=3)\n"
        f"first, logger, unused = lightning.Trainer(**quiet), CSVLogger({str(tmp_path)!r}), CSVLogger('none')"
    )
    cell = kernel.do(accelerate("first.fit(model, data); unused.name", "fork", n=1))
    assert "brought back: model trained in place (5 parameters)" in cell.text
    assert "not brought back: first (a Trainer that knows its rank: make it anew" in cell.text
    body = "also = EarlyStopping('loss', mode='max', patience=0)\nquiet |= dict(logger=logger, max_epochs=3)\n"
    body += "trainer = lightning.Trainer(**quiet, callbacks=[stop, also]); trainer.fit(model, data)"
    cell = kernel.do(accelerate(body, "fork"))
    assert kernel.value("[bool(stop.best_score.isfinite()), also.stopped_epoch]") == [True, 1]
    assert "logger (a CSVLogger that knows its rank" in cell.text
    assert "trainer (a Trainer that knows its rank" in cell.text


def test_what_pyro_keeps_by_itself_is_said_to_stay(kernel: RealKernel) -> None:
    """Its parameters are in a store of its module, where no name leads. Here something like it stands for Pyro."""
    kernel.do("""
        import sys, types, torch
        kept = types.SimpleNamespace(_params={"loc": torch.zeros(1)})
        sys.modules["pyro"] = types.SimpleNamespace(get_param_store=lambda kept=kept: kept)
        del kept
    """)
    store, stays = (
        "sys.modules['pyro'].get_param_store()",
        "not brought back: pyro.get_param_store() (save it to a file",
    )
    assert stays in kernel.do(accelerate(f"{store}._params['loc'].add_(1)", "fork")).stdout
    assert stays not in kernel.do(accelerate(f"print({store}._params['loc'])", "fork")).stdout
    kernel.do("del sys.modules['pyro']")
