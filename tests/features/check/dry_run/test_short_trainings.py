"""Trainers of libraries end after two short epochs in a dry run, with an evaluation and a save if the run has them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from features.check.dry_run.fakes_of_loops import Cutting
from nbaccel.features.check.dry_run.short_trainings import ShortTrainings
from nbaccel.features.check.forecasts.trainer_counts import EVALUATION, SAVE, TRAINING
from nbaccel.launching.ipc.import_hooks_meanwhile import when_loaded_meanwhile


class Shortened(Cutting):
    """Trainings are short while entered.  parts: numbers of those that began."""

    def __enter__(self) -> Shortened:
        super().__enter__()
        self.parts: list[int] = []
        self._trainings = ShortTrainings(self.cuts, self.records.append, when_loaded_meanwhile, self._part)
        self._trainings.begin()
        return self

    def __exit__(self, *exception: object) -> None:
        self._trainings.end()
        super().__exit__(*exception)

    @contextmanager
    def _part(self, number: int, facts: Mapping[str, Any]) -> Iterator[None]:
        self.parts.append(number)
        yield

    @property
    def facts(self) -> dict[str, Any]:
        (record,) = [record for record in self.records if record["kind"] == "trainer"]
        return dict(record)


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((2,), float(index))}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.line(x / 100).square().mean()}


def trainer_of(folder: Path, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **{"save_strategy": "no", "num_train_epochs": 5, **options},
    )
    return transformers.Trainer(Net(), arguments, train_dataset=Rows(90), eval_dataset=Rows(50))


def test_a_trainer_of_transformers_ends_after_two_short_epochs(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, save_total_limit=2)
    with Shortened() as run:
        trainer.train()
    assert run.facts["keeps"] == 2
    assert trainer.state.global_step == sum(map(len, run.log.batches))
    assert [kinds[-1] for kinds in run.log.kinds] == ["last", "last"]
    assert [begun[2] for begun in run.log.begun] == [23, 23]
    assert run.facts["steps"] == 115
    assert run.facts["epochs"] == 5
    assert trainer.lr_scheduler.get_last_lr()[0] > 0.5 * trainer.args.learning_rate, "the schedule is the whole run's"


def test_of_accumulation_whole_windows_are_given(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, gradient_accumulation_steps=3, num_train_epochs=1)
    with Shortened() as run:
        trainer.train()
    assert run.log.kinds == [["longest"] * 3 + ["between"] * 3 + ["last"] * 2]
    assert trainer.state.global_step >= 2
    assert run.facts["batches_per_step"] == 3


@pytest.mark.parametrize(
    ("options", "evaluations", "saves"),
    [
        ({"eval_strategy": "epoch", "save_strategy": "epoch"}, 2, 2),
        ({"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}, 2, 2),
        ({"eval_strategy": "steps", "eval_steps": 500, "save_strategy": "steps", "save_steps": 500}, 1, 1),
        ({"eval_strategy": "no", "save_strategy": "no"}, 0, 0),
        ({"max_steps": 4, "eval_strategy": "steps", "eval_steps": 50}, 1, 0),
    ],
    ids=["epochs", "each step", "seldom", "never", "by steps"],
)
def test_it_evaluates_and_saves_once_or_twice(
    options: dict[str, Any], evaluations: int, saves: int, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, **options)
    with Shortened() as run:
        trainer.train()
    assert sum("eval_runtime" in entry for entry in trainer.state.log_history) == evaluations
    assert sorted(run.parts) == [SAVE] * saves + [EVALUATION] * evaluations + [TRAINING]
    assert len(list(tmp_path.glob("checkpoint-*"))) == saves
    assert len(run.log.begun) - evaluations <= 2


def test_afterwards_a_trainer_trains_as_before(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, num_train_epochs=1)
    import transformers

    before = transformers.Trainer.train, list(map(type, trainer.callback_handler.callbacks))
    with Shortened():
        trainer.train()
    assert (transformers.Trainer.train, list(map(type, trainer.callback_handler.callbacks))) == before
    trainer.train()
    assert trainer.state.global_step == 23


@pytest.mark.parametrize(
    ("options", "validations"),
    [({"min_epochs": 4}, 1), ({"val_check_interval": 1}, 2), ({"max_epochs": 1}, 1), ({"max_steps": 500}, 1)],
    ids=["least epochs", "each batch", "one epoch", "by steps"],
)
def test_a_trainer_of_lightning_ends_after_two_short_epochs(
    options: dict[str, Any], validations: int, tmp_path: Path
) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    counts = {"train": 0, "validate": 0}

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(2, 1)

        def training_step(self, batch: Any, number: int) -> Tensor:
            counts["train"] += 1
            return self.line(batch[0]).square().mean()  # type: ignore[no-any-return]

        def on_validation_epoch_end(self) -> None:
            counts["validate"] += not self.trainer.sanity_checking

        def validation_step(self, batch: Any, number: int) -> Tensor:
            return self.line(batch[0]).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    trainer = lightning.Trainer(
        default_root_dir=str(tmp_path),
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **{"max_epochs": 5, **options},
    )
    rows = TensorDataset(torch.ones(90, 2))
    with warnings.catch_warnings(), Shortened() as run:
        warnings.simplefilter("ignore")
        trainer.fit(Module(), DataLoader(rows, 4), DataLoader(rows, 8))
    epochs = min(2, trainer.max_epochs) if trainer.max_epochs > 0 else 2
    assert counts["train"] in range(3 * epochs, 3 * epochs + 2)
    assert counts["validate"] == validations
    assert run.parts.count(EVALUATION) == validations
    assert run.facts["batches"] == 23
    assert trainer.limit_val_batches == 1.0
    assert trainer.fit_loop.min_epochs == options.get("min_epochs", trainer.fit_loop.min_epochs)
