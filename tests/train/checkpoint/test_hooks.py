"""Hooks of `save_state` and `load_state` get the program's own models, in any number of ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import Module

from nbaccel import Accelerator
from nbaccel.testing import run_ranks


class Pretrained(Module):
    """A model of a library that writes and reads its own folder."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.config = {"size": size}
        self.layer = torch.nn.Linear(size, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def save_pretrained(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        save_file(self.state_dict(), os.path.join(folder, "weights.safetensors"))

    @classmethod
    def from_pretrained(cls, folder: str, subfolder: str) -> Pretrained:
        model = cls()
        model.load_state_dict(load_file(os.path.join(folder, subfolder, "weights.safetensors")))
        return model


class Denoiser(Pretrained):
    pass


class TextEncoder(Pretrained):
    pass


def _train_and_come_back(folder: str, asks_each: bool) -> list[list[float]]:
    """A program whose hooks write and read both of its models.  asks_each: they unwrap what they get, too."""
    torch.manual_seed(0)
    accelerator = Accelerator()
    denoiser, text_encoder = accelerator.prepare(Denoiser(), TextEncoder())
    optimizer = accelerator.prepare(torch.optim.Adam([*denoiser.parameters(), *text_encoder.parameters()], lr=0.1))

    def is_denoiser(model: Module) -> bool:
        if asks_each:
            model = accelerator.unwrap_model(model)
        return isinstance(model, type(accelerator.unwrap_model(denoiser)))

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if accelerator.is_main_process:
            for model in models:
                model.save_pretrained(os.path.join(output_dir, "denoiser" if is_denoiser(model) else "text_encoder"))
                weights.pop()

    def load(models: list[Any], input_dir: str) -> None:
        while len(models) > 0:
            model = models.pop()
            kind: Any = Denoiser if is_denoiser(model) else TextEncoder
            loaded = kind.from_pretrained(input_dir, "denoiser" if is_denoiser(model) else "text_encoder")
            model.config = loaded.config
            model.load_state_dict(loaded.state_dict())

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)

    def step() -> list[float]:
        x = torch.ones(4, 2) * (1 + accelerator.process_index)
        accelerator.backward((denoiser(x) - text_encoder(x)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        parameters = [*denoiser.parameters(), *text_encoder.parameters()]
        return [value for parameter in parameters for value in parameter.flatten().tolist()]

    step()
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    first = step()
    accelerator.load_state(folder)
    return [first, step()]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("asks_each", [False, True])
def test_hooks_as_diffusers_programs_have_them_save_and_load_their_models(
    tmp_path: Path, ranks: int, asks_each: bool
) -> None:
    folder = tmp_path / "last"
    for first, again in run_ranks(ranks, _train_and_come_back, str(folder), asks_each):
        assert first == again
    assert {"denoiser", "text_encoder"} < set(os.listdir(folder))
    assert not list(folder.glob("model*"))  # the hook has taken them


def _takes_one_of_two(folder: str) -> tuple[bool, bool, bool]:
    """Hooks that take the second model and leave the first to us."""
    accelerator = Accelerator()
    first, second = torch.nn.Linear(1, 1), Denoiser()
    prepared = accelerator.prepare(first, torch.compile(second, backend="eager"))
    given: list[list[Module]] = []

    def save(models: list[Module], weights: list[Any], folder: str) -> None:
        given.append(list(models))
        weights.pop()
        models.pop()  # of a list of the hook's own

    def load(models: list[Module], folder: str) -> None:
        given.append(list(models))
        models.pop()

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    with torch.no_grad():
        was = first.weight.clone()
        first.weight.zero_()
        second.layer.weight.zero_()
    accelerator.load_state(folder)
    are_own = all(
        models[0] is first and accelerator.unwrap_model(models[1], keep_torch_compile=False) is second
        for models in given
    )
    assert len(prepared) == 2
    return are_own, torch.equal(first.weight, was), bool(second.layer.weight.any())


@pytest.mark.parametrize("ranks", [1, 2])
def test_hooks_get_the_objects_that_were_handed_in_and_what_they_leave_is_filled(tmp_path: Path, ranks: int) -> None:
    assert run_ranks(ranks, _takes_one_of_two, str(tmp_path / "last")) == [(True, True, False)] * ranks


def _saves_itself_with_hooks(folder: str, resumes: bool) -> tuple[list[int], list[int]]:
    torch.manual_seed(0)
    accelerator = Accelerator(checkpoint_every=2, checkpoint_dir=folder, resume=resumes)
    saved: list[int] = []
    loaded: list[int] = []
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: saved.append(len(weights)))
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.clear())
    accelerator.register_load_state_pre_hook(lambda models, folder: loaded.append(len(models)))
    accelerator.register_load_state_pre_hook(lambda models, folder: models.clear())
    model = Denoiser()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), torch.utils.data.DataLoader(torch.ones(20, 2), 2)
    )
    for x in loader:
        accelerator.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    return saved, loaded


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_that_saves_itself_calls_the_hooks_of_every_rank(tmp_path: Path, ranks: int) -> None:
    steps = 10 // ranks
    first = run_ranks(ranks, _saves_itself_with_hooks, str(tmp_path), False)
    assert first == [([1] * ((steps - 1) // 2), [])] * ranks
    assert [loaded for _, loaded in run_ranks(ranks, _saves_itself_with_hooks, str(tmp_path), True)] == [[1]] * ranks


def _each_rank_keeps_files(folder: str, later: int) -> tuple[list[str], str, str]:
    """Hooks as of a data set that each rank reads by itself: files of a rank's own, and one that all ranks write."""
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    rank, rounds = accelerator.process_index, 0

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if rank == later:
            others = Path(folder).with_name(f"done{rounds}")
            while not others.exists():  # the other rank's part in this save
                time.sleep(0.01)
        Path(output_dir, f"position_{rank}.txt").write_text(f"{rank} {rounds}")
        os.makedirs(os.path.join(output_dir, "ema"), exist_ok=True)
        Path(output_dir, "ema", "of_all.txt").write_text(str(rank))

    accelerator.register_save_state_pre_hook(save)
    for rounds in range(2):
        accelerator.save_state(folder)
        if rank != later:
            Path(folder).with_name(f"done{rounds}").touch()
        accelerator.wait_for_everyone()
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
    found: list[str] = []
    accelerator.register_load_state_pre_hook(
        lambda models, place: found.append(Path(place, f"position_{rank}.txt").read_text())
    )
    accelerator.load_state(folder)
    names = sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*.txt"))
    return names, found[0], Path(folder, "ema", "of_all.txt").read_text()


@pytest.mark.parametrize("later", [0, 1])
def test_files_of_hooks_of_all_ranks_are_in_the_checkpoint(tmp_path: Path, later: int) -> None:
    ranks = run_ranks(2, _each_rank_keeps_files, str(tmp_path / "last"), later)
    names = ["ema/of_all.txt", "position_0.txt", "position_1.txt"]
    assert ranks == [(names, "0 1", "0"), (names, "1 1", "0")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["done0", "done1", "last"]
