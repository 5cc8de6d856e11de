"""The parts of an Accelerator: they share one equipment, do not hold it, and use what a subclass overrides."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Module
from torch.utils.data import DataLoader

from nbaccel import Accelerator
from nbaccel.state import GradientState
from nbaccel.train.prepare.training_context import TrainingContext

_PARTS = ("_checkpoints", "_resuming", "_preparer", "_gradients", "_lifecycle")


class _Own(Accelerator):
    """A program's own Accelerator, which notes what its methods are asked."""

    def __init__(self, **options: Any) -> None:
        self.said: list[str] = []
        self.unwrapped: list[Module] = []
        super().__init__(cpu=True, **options)

    def print(self, *values: Any, **options: Any) -> None:
        self.said.append(" ".join(map(str, values)))

    def unwrap_model(self, model: Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Module:
        self.unwrapped.append(model)
        return super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: Module, unwrap: bool = True) -> dict[str, Any]:
        return {f"own.{name}": value for name, value in super().get_state_dict(model, unwrap).items()}


def _trained(accelerator: Accelerator) -> tuple[Any, Any]:
    model = torch.nn.Linear(2, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch.ones(8, 2), 2)
    )
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


def _used_up() -> list[weakref.ref[Any]]:
    accelerator = Accelerator(cpu=True)
    model, _ = _trained(accelerator)
    return [weakref.ref(thing) for thing in (accelerator, accelerator._lifecycle, accelerator._context, model)]


def _context_of(part: Any) -> TrainingContext:
    context: TrainingContext = vars(part).get("_context") or part.context
    return context


def _share_one(accelerator: Accelerator) -> bool:
    return {id(_context_of(getattr(accelerator, name))) for name in _PARTS} == {id(accelerator._context)}


def test_a_line_about_checkpoints_goes_through_a_print_of_the_programs_own(tmp_path: Path) -> None:
    accelerator = _Own(checkpoint_dir=tmp_path, resume=True)
    _trained(accelerator)
    assert accelerator.said == [f"nothing to resume in {tmp_path} yet: the training starts at its beginning"]


def test_hooks_get_models_that_a_method_of_the_programs_own_unwraps(tmp_path: Path) -> None:
    accelerator = _Own()
    model, _ = _trained(accelerator)
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    accelerator.save_state(tmp_path / "saved")
    assert accelerator.unwrapped == [model]


def test_a_saved_model_is_the_state_that_a_method_of_the_programs_own_returns(tmp_path: Path) -> None:
    accelerator = _Own()
    model, _ = _trained(accelerator)
    accelerator.save_model(model, tmp_path, safe_serialization=False)
    assert list(torch.load(tmp_path / "pytorch_model.bin")) == ["own.weight", "own.bias"]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda accelerator: pickle.loads(pickle.dumps(accelerator))])
def test_the_parts_of_a_copy_share_its_equipment(again: Any) -> None:
    accelerator = Accelerator(cpu=True)
    _trained(accelerator)
    copied = again(accelerator)
    assert _share_one(accelerator)
    assert _share_one(copied)
    assert copied._context is not accelerator._context
    assert GradientState()._accumulation is copied._context.accumulation


def test_an_accelerator_that_is_dropped_is_gone_at_once() -> None:
    _trained(Accelerator(cpu=True))  # the first one of a process waits for the garbage collector, by what torch makes
    gc.collect()
    gc.disable()
    try:
        gone = _used_up()
        assert [reference() for reference in gone] == [None] * len(gone)
    finally:
        gc.enable()


def test_a_device_placement_that_is_changed_concerns_what_is_prepared_afterwards() -> None:
    accelerator = Accelerator(cpu=True, device_placement=False)
    assert not accelerator.device_placement
    accelerator.device_placement = True
    assert accelerator._context.moves
