"""`save_state` and `load_state` continue a training where it was, in any number of ranks."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from killing import die_at, points_passed
from nbaccel import Accelerator
from nbaccel.errors import CannotSave, CheckpointCorrupt, UntrustedPickle
from nbaccel.testing import run_ranks
from nbaccel.train.checkpoint.directory import CheckpointDirectory, ProjectConfiguration
from nbaccel.train.checkpoint.manifest import Manifest
from trainings import Tally, Tied, Trained


def numbered(folder: Path, **options: Any) -> ProjectConfiguration:
    return ProjectConfiguration(folder, automatic_checkpoint_naming=True, **options)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "checkpoints"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# -- the round trip


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_training_continues_bit_for_bit(tmp_path: Path, precision: str) -> None:
    training = Trained.start(mixed_precision=precision, gradient_accumulation_steps=2)
    training.epoch()
    training.accelerator.save_state(tmp_path / "a" / "last")
    expected = training.epoch(), training.weights(), training.scheduler.get_last_lr()
    again = Trained.start(mixed_precision=precision, gradient_accumulation_steps=2)
    again.accelerator.load_state(tmp_path / "a" / "last")
    assert (again.epoch(), again.weights(), again.scheduler.get_last_lr()) == expected
    assert again.accelerator._lifecycle.training().step == 4


def _two_epochs(folder: str | None, resume: bool) -> tuple[list[float], list[float]]:
    training = Trained.start()
    if resume:
        training.accelerator.load_state(folder)
    else:
        training.epoch()
        if folder:
            training.accelerator.save_state(folder)
    return training.epoch(), training.weights()


def test_each_of_two_ranks_continues_with_its_own_random_numbers(tmp_path: Path) -> None:
    folder = str(tmp_path / "last")
    expected = run_ranks(2, _two_epochs, folder, False)
    assert run_ranks(2, _two_epochs, folder, True) == expected
    assert expected[0][0] != expected[1][0]
    assert sorted(os.listdir(tmp_path)) == ["last"]
    assert {"generators_0.json", "generators_1.json"} <= set(os.listdir(tmp_path / "last"))


def test_python_and_numpy_continue_too(tmp_path: Path) -> None:
    import random

    accelerator = Accelerator()
    accelerator.save_state(tmp_path / "last")
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    accelerator.load_state(tmp_path / "last")
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected


def _next_loss(folder: str, loads: bool) -> tuple[float, list[float]]:
    """One step of a training without random numbers; the global batch is 4 whatever the number of ranks."""
    torch.manual_seed(1)
    accelerator = Accelerator(split_batches=True)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(8, 3, generator=torch.Generator().manual_seed(2)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if loads:
            accelerator.load_state(folder)
    losses = []
    for (x,) in loader:
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    if not loads:
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
    return losses[-1], [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 2), (2, 1), (2, 3)])
def test_another_number_of_ranks_takes_the_same_steps(tmp_path: Path, saved_by: int, loaded_by: int) -> None:
    folder = str(tmp_path / "last")
    if loaded_by == 3:  # a batch of 4 does not divide by 3; it is enough that all ranks agree
        run_ranks(saved_by, _two_epochs, folder, False)
        weights = run_ranks(3, _loaded_weights, folder)
        assert weights[0] == weights[1] == weights[2]
        return
    run_ranks(saved_by, _next_loss, folder, False)
    expected = run_ranks(saved_by, _next_loss, folder, True)[0]
    got = run_ranks(loaded_by, _next_loss, folder, True)[0]
    assert got[0] == pytest.approx(expected[0], rel=1e-5)
    assert got[1] == pytest.approx(expected[1], rel=1e-5)


def _loaded_weights(folder: str) -> tuple[list[float], int]:
    training = Trained.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training.accelerator.load_state(folder)
    return training.weights(), training.accelerator._lifecycle.training().step


def _saves_in_every_way(folder: str) -> list[int]:
    os.chdir(folder)
    training = Trained.start()
    accelerator = training.accelerator
    for epoch in range(2):
        training.epoch()
        accelerator.save_state(f"checkpoints/epoch_{epoch}")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            accelerator.save_state("checkpoints/last")
            torch.save(accelerator.unwrap_model(training.model).state_dict(), "model_final.pth")
        accelerator.wait_for_everyone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerator.save_state(output_dir="checkpoints/")
        steps = []
        for name in ("checkpoints/epoch_0", "checkpoints/epoch_1", "checkpoints/last", "checkpoints/"):
            again = Trained.start()
            again.accelerator.load_state(name)
            steps.append(again.accelerator._lifecycle.training().step)
    plain = Tied()
    plain.load_state_dict(torch.load("model_final.pth"))
    assert [value for parameter in plain.parameters() for value in parameter.flatten().tolist()] == training.weights()
    return steps


@pytest.mark.parametrize("ranks", [1, 2])
def test_programs_that_save_on_all_ranks_on_one_and_into_one_another_load_again(tmp_path: Path, ranks: int) -> None:
    steps_per_epoch = 4 // ranks
    expected = [steps_per_epoch, 2 * steps_per_epoch, 2 * steps_per_epoch, 2 * steps_per_epoch]
    assert run_ranks(ranks, _saves_in_every_way, str(tmp_path)) == [expected] * ranks


# -- ranks that come early, late, or never


def _saved_by_main_only(folder: str) -> tuple[list[float], list[str]]:
    training = Trained.start()
    accelerator = training.accelerator
    training.epoch()
    if accelerator.is_main_process:
        accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    again = Trained.start()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        again.accelerator.load_state(folder)
    assert torch.rand(()) != 0
    return again.weights(), [str(warning.message) for warning in said]


def test_the_main_process_alone_may_save_and_what_is_missing_is_said_once(tmp_path: Path) -> None:
    (first, said), (second, silent) = run_ranks(2, _saved_by_main_only, str(tmp_path / "checkpoint_epoch_0"))
    assert first == second
    assert silent == []
    (text,) = said
    assert text.startswith("rank(s) 1 of 2 begin new random numbers, derived from the seed, the step and rank: ")
    assert "generators_1.json is missing" in text


def _rank_by_rank(folder: str, first: int) -> list[str]:
    """One rank is done with its save before the other begins."""
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    for rank in (first, 1 - first):
        if accelerator.process_index == rank:
            accelerator.save_state(folder)
        accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    assert model is not None
    return sorted(os.listdir(os.path.dirname(folder)))


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_may_add_its_random_states_before_or_after_the_commit(tmp_path: Path, first: int) -> None:
    for _ in range(2):  # the second time a folder of that name is replaced
        assert run_ranks(2, _rank_by_rank, str(tmp_path / "last"), first) == [["last"]] * 2
    assert "generators_1.json" in os.listdir(tmp_path / "last")


def _rank_one_runs_ahead(folder: str) -> list[str]:
    accelerator = Accelerator()
    clock = accelerator._lifecycle.training().accumulation.clock
    if not accelerator.is_main_process:
        for clock.step in (1, 2, 3):
            accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        for clock.step in (1, 2):
            accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)  # warns, and so fails, if rank 1 had nothing for step 2
    return sorted(os.listdir(os.path.dirname(folder)))


def test_a_rank_that_is_saves_ahead_finds_its_random_states_in_the_right_checkpoint(tmp_path: Path) -> None:
    assert run_ranks(2, _rank_one_runs_ahead, str(tmp_path / "last"))[0] == [".last.rank1.step3", "last"]


@pytest.mark.parametrize("damage", ["flip", "remove", "other save"])
def test_damaged_random_states_are_derived_and_the_rest_loads(tmp_path: Path, damage: str) -> None:
    training = Trained.start()
    training.accelerator.save_state(tmp_path / "last")
    path = tmp_path / "last" / "generators_0.json"
    if damage == "flip":
        flip(path)
    elif damage == "remove":
        path.unlink()
    else:
        saved = path.read_bytes()
        training.epoch()
        training.accelerator.save_state(tmp_path / "last")
        path.write_bytes(saved)
    message = {"flip": "is damaged", "remove": "is missing", "other save": "is of another save"}[damage]
    draws = []
    for _ in range(2):
        with pytest.warns(UserWarning, match=rf"rank\(s\) 0 of 1 begin new .*generators_0.json {message}"):
            training.accelerator.load_state(tmp_path / "last")
        draws.append(torch.rand(()).item())
    assert draws[0] == draws[1]


FILES = [
    "generators_0.json",
    "manifest.json",
    "model.json",
    "model.safetensors",
    "optimizer.json",
    "optimizer.safetensors",
    "scheduler.json",
    "training.json",
]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
@pytest.mark.parametrize("file", FILES)
def test_damage_to_any_file_is_named_and_never_loaded(tmp_path: Path, file: str, damage: str) -> None:
    training = Trained.start()
    training.epoch()
    training.accelerator.save_state(tmp_path / "last")
    training.epoch()
    before = training.weights()
    path = tmp_path / "last" / file
    if damage == "flip":
        flip(path)
    elif damage == "truncate":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    if file == "generators_0.json":
        with pytest.warns(UserWarning, match=file):
            training.accelerator.load_state(tmp_path / "last")
        return
    with pytest.raises(CheckpointCorrupt, match=file):
        training.accelerator.load_state(tmp_path / "last")
    assert training.weights() == before, "nothing is taken from a damaged checkpoint"


class Canary:
    """Sings when a pickle builds it."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["CANARY"],)


@pytest.mark.parametrize("part", ["model", "optimizer", "scheduler", "custom", "training"])
def test_a_malicious_pickle_never_runs_even_under_a_whole_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setenv("CANARY", str(tmp_path / "sung"))
    training = Trained.start()
    training.accelerator.register_for_checkpointing(Tally(a=1))
    folder = Path(training.accelerator.save_state(tmp_path / "last"))
    torch.save({"state": Canary()}, folder / f"{part}.pkl")
    manifest = replace(Manifest.read(folder), files={})
    (folder / f"{part}.json").unlink()
    (folder / "manifest.json").unlink()
    manifest.seal(folder)
    with pytest.raises(UntrustedPickle, match=rf"{part}.pkl is a pickle that asks for .*mkdir"):
        training.accelerator.load_state(folder)
    assert not (tmp_path / "sung").exists()


# -- names, limits, choice


def test_checkpoints_are_numbered_and_the_oldest_go(tmp_path: Path) -> None:
    accelerator = Accelerator(project_config=numbered(tmp_path, total_limit=2))
    saved = [accelerator.save_state() for _ in range(11)]
    assert saved[0] == str(tmp_path / "checkpoints" / "checkpoint_0")
    assert names(tmp_path) == ["checkpoint_10", "checkpoint_9"]
    assert accelerator.save_iteration == 11


def test_a_limit_never_touches_what_the_program_named_itself(tmp_path: Path) -> None:
    accelerator = Accelerator(project_config=numbered(tmp_path, total_limit=1))
    accelerator.save_state(tmp_path / "checkpoints" / "best")
    (tmp_path / "checkpoints" / "checkpoint_best").mkdir()
    accelerator.save_state()
    accelerator.save_state()
    assert names(tmp_path) == ["best", "checkpoint_1", "checkpoint_best"]


def test_load_state_takes_the_newest_by_number_and_goes_on_behind_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Trained.start(project_config=numbered(tmp_path))
    for _ in range(11):
        training.accelerator.save_state()
    training.epoch()
    training.accelerator.save_state()
    again = Trained.start(project_config=numbered(tmp_path))
    again.accelerator.load_state()
    assert again.weights() == training.weights()
    assert re_line(capsys) == f"continuing from {tmp_path / 'checkpoints' / 'checkpoint_11'}: step 4, epoch 2"
    again.accelerator.save_state()
    assert "checkpoint_12" in names(tmp_path)


def re_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.strip().split(", batch")[0]


def test_damaged_checkpoints_are_passed_over_with_a_warning_that_names_them(tmp_path: Path) -> None:
    training = Trained.start(project_config=numbered(tmp_path))
    for _ in range(3):
        training.accelerator.save_state()
    flip(tmp_path / "checkpoints" / "checkpoint_2" / "model.safetensors")
    (tmp_path / "checkpoints" / "checkpoint_1" / "manifest.json").unlink()
    again = Accelerator(project_config=numbered(tmp_path))
    again.prepare(training.model, training.optimizer.optimizer, training.scheduler.scheduler)
    with pytest.warns(UserWarning, match=r"Loading .*checkpoint_0 instead") as said:
        again.load_state()
    first, second = (str(warning.message) for warning in said)
    assert "checkpoint_2/model.safetensors is damaged: its checksum is" in first
    assert "checkpoint_1/manifest.json is missing" in second
    assert {warning.filename for warning in said} == {__file__}, "the user's line"


def test_what_a_resume_passes_over_is_said_at_the_line_that_prepares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Trained.start(project_config=numbered(tmp_path))
    for _ in range(2):
        training.accelerator.save_state()
    flip(tmp_path / "checkpoints" / "checkpoint_1" / "model.safetensors")
    monkeypatch.setenv("NBACCEL_RESUME", str(tmp_path / "checkpoints"))
    with pytest.warns(UserWarning, match=r"Loading .*checkpoint_0 instead") as said:
        Trained.start(project_config=numbered(tmp_path))
    assert [warning.filename for warning in said] == [inspect.getfile(Trained)]


def test_no_whole_checkpoint_is_an_error_that_names_all(tmp_path: Path) -> None:
    accelerator = Accelerator(project_config=numbered(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint in .*checkpoints: save_state\(\) was never"):
        accelerator.load_state()
    for _ in range(2):
        accelerator.save_state()
    for name in names(tmp_path):
        flip(tmp_path / "checkpoints" / name / "training.json")
    with pytest.raises(CheckpointCorrupt, match=r"none of the 2 checkpoint\(s\) .* is whole:\n.*_1/tr.*\n.*_0/tr"):
        accelerator.load_state()


def test_an_empty_numbered_folder_is_passed_over(tmp_path: Path) -> None:
    accelerator = Accelerator(project_config=numbered(tmp_path))
    accelerator.save_state()
    (tmp_path / "checkpoints" / "checkpoint_7").mkdir()  # as a killed save of Accelerate leaves it
    with pytest.warns(UserWarning, match=r"checkpoint_7: the folder is empty\. Loading .*checkpoint_0 instead"):
        accelerator.load_state()
    assert accelerator.save_iteration == 8


def test_numbering_goes_on_behind_the_newest_whichever_checkpoint_is_loaded(tmp_path: Path) -> None:
    accelerator = Accelerator(project_config=numbered(tmp_path))
    for _ in range(3):
        accelerator.save_state()
    accelerator.load_state(tmp_path / "checkpoints" / ".." / "checkpoints" / "checkpoint_1")
    assert accelerator.save_iteration == 3
    accelerator.save_state(tmp_path / "elsewhere")
    accelerator.load_state(tmp_path / "elsewhere")
    assert accelerator.save_iteration == 3


def test_without_a_folder_and_without_numbering_both_calls_say_what_to_do() -> None:
    for call in (Accelerator().save_state, Accelerator().load_state):
        with pytest.raises(ValueError, match=r"needs a folder: give it (output|input)_dir, or make the Accelerator w"):
            call()


def test_missing_and_empty_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*nowhere: no such folder"):
        Accelerator().load_state(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint in .*: the folder is empty"):
        Accelerator().load_state(tmp_path)


def _numbered_in_ranks(folder: str) -> list[str]:
    training = Trained.start(project_config=numbered(Path(folder), total_limit=2))
    for _ in range(3):
        training.epoch()
        training.accelerator.save_state()
    again = Trained.start(project_config=numbered(Path(folder)))
    again.accelerator.load_state()
    assert again.weights() == training.weights()
    return names(Path(folder))


def test_ranks_agree_on_names_and_on_what_to_load(tmp_path: Path) -> None:
    for listing in run_ranks(2, _numbered_in_ranks, str(tmp_path)):
        assert [name for name in listing if not name.startswith(".")] == ["checkpoint_1", "checkpoint_2"]


def _loads_damaged(folder: str) -> str:
    accelerator = Accelerator()
    try:
        accelerator.load_state(folder)
    except CheckpointCorrupt as error:
        return error.file
    return "loaded"


def test_damage_that_rank_0_finds_is_an_error_on_every_rank(tmp_path: Path) -> None:
    Accelerator().save_state(tmp_path / "last")
    flip(tmp_path / "last" / "training.json")
    assert run_ranks(2, _loads_damaged, str(tmp_path / "last")) == [str(tmp_path / "last" / "training.json")] * 2


@pytest.mark.slow
def test_a_rotation_that_is_killed_anywhere_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    """``total_limit=1``: Accelerate deletes the only checkpoint before it writes the next one."""
    training = Trained.start(project_config=numbered(tmp_path / "first", total_limit=1))
    accelerator, project = training.accelerator, training.accelerator.project_configuration
    accelerator.save_state()
    training.epoch()

    def second_save(name: str) -> Callable[[], object]:
        shutil.copytree(tmp_path / "first", tmp_path / name)
        project.project_dir, project.iteration = tmp_path / name, 1
        return accelerator.save_state

    steps = []
    for point, name in enumerate(points_passed(second_save("probe"))):
        die_at(point, second_save(f"{point}-{name}"))
        assert project.project_dir is not None
        choice = CheckpointDirectory(project).choose(None)
        assert choice.manifest is not None
        steps.append(choice.manifest.step)
        project.iteration = 2
        accelerator.save_state()
        assert os.listdir(Path(project.project_dir) / "checkpoints") == ["checkpoint_2"]
    assert len(steps) >= 8
    assert steps == sorted(steps)
    assert set(steps) == {0, 4}


# -- the program's own objects and hooks


def test_registered_objects_are_saved_and_survive_free_memory(tmp_path: Path) -> None:
    tally, other = Tally(best=0.5, seen={3, 4}, noise=np.ones(2)), torch.nn.Linear(1, 1)
    accelerator = Accelerator()
    accelerator.register_for_checkpointing(tally, other)
    accelerator.free_memory()
    accelerator.save_state(tmp_path / "last")
    weight = other.weight.item()
    tally.state = {}
    other.weight.data.zero_()
    accelerator.load_state(tmp_path / "last")
    assert tally.state.pop("noise").tolist() == [1, 1]
    assert tally.state == {"best": 0.5, "seen": {3, 4}}
    assert other.weight.item() == weight


def test_objects_without_a_state_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"these lack one: dict \(argument 0\), Tied \(argument 2\)"):
        model = Tied()
        model.load_state_dict = None  # type: ignore[assignment]
        Accelerator().register_for_checkpointing({}, Tally(), model)


def test_another_number_of_registered_objects_is_refused(tmp_path: Path) -> None:
    accelerator = Accelerator()
    accelerator.register_for_checkpointing(Tally(a=1))
    accelerator.save_state(tmp_path / "last")
    with pytest.raises(RuntimeError, match=r"the state of 1 registered object\(s\), and 0 are registered \(none\)"):
        Accelerator().load_state(tmp_path / "last")


def test_other_prepared_objects_are_refused_with_the_numbers(tmp_path: Path) -> None:
    Trained.start().accelerator.save_state(tmp_path / "last")
    with pytest.raises(ValueError, match=r"holds 1 model\(s\), and 0 are prepared"):
        Accelerator().load_state(tmp_path / "last")
    accelerator = Accelerator()
    accelerator.prepare(Tied())
    with pytest.raises(ValueError, match=r"holds 1 optimizer\(s\), and 0 are prepared"):
        accelerator.load_state(tmp_path / "last")


class Opaque:
    """More than data, and it says when it is built by a pickle."""

    built = 0

    def __reduce__(self) -> Any:
        return build_opaque, ()


def build_opaque() -> Opaque:
    Opaque.built += 1
    return Opaque()


def test_a_state_that_is_more_than_data_is_a_pickle_that_only_trust_loads(tmp_path: Path) -> None:
    accelerator = Accelerator()
    tally = Tally(policy=Opaque())
    accelerator.register_for_checkpointing(tally)
    with pytest.warns(UserWarning, match=r"policy is an Opaque\. It is saved as a pickle, from .* trust=True"):
        accelerator.save_state(tmp_path / "last")
    Opaque.built = 0
    with pytest.raises(UntrustedPickle, match=r"custom.pkl is a pickle that asks for .*build_opaque, and loading it"):
        accelerator.load_state(tmp_path / "last")
    assert Opaque.built == 0
    accelerator.load_state(tmp_path / "last", trust=True)
    assert Opaque.built == 1
    assert isinstance(tally.state["policy"], Opaque)


def test_tensors_without_plain_memory_are_pickled_and_need_no_trust(tmp_path: Path) -> None:
    accelerator = Accelerator()
    tally = Tally(edges=torch.eye(3).to_sparse())
    accelerator.register_for_checkpointing(tally)
    with pytest.warns(UserWarning, match=r"edges is a tensor without plain memory"):
        accelerator.save_state(tmp_path / "last")
    tally.state = {}
    accelerator.load_state(tmp_path / "last")
    assert torch.equal(tally.state["edges"].to_dense(), torch.eye(3))


def test_hooks_may_write_files_of_their_own_and_take_models_over(tmp_path: Path) -> None:
    training = Trained.start()
    calls: list[Any] = []

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        calls.append((len(models), len(weights)))
        torch.save(weights.pop(), os.path.join(folder, "adapter.bin"))
        for name in ("model.txt", "custom.json", "scheduler.pkl", "optimizer_1.json"):  # none of these is ours
            Path(folder, name).write_text("mine")

    def load(models: list[Any], folder: str) -> None:
        models.pop().load_state_dict(torch.load(os.path.join(folder, "adapter.bin")))

    handle = training.accelerator.register_save_state_pre_hook(save)
    training.accelerator.register_load_state_pre_hook(load)
    training.accelerator.save_state(tmp_path / "last")
    assert calls == [(1, 1)]
    assert {"model.json", "model.safetensors"}.isdisjoint(os.listdir(tmp_path / "last"))
    assert (tmp_path / "last" / "custom.json").read_text() == "mine"
    before = training.weights()
    training.epoch()
    training.accelerator.load_state(tmp_path / "last")
    assert training.weights() == before
    assert "adapter.bin" in json.loads((tmp_path / "last" / "manifest.json").read_text())["files"]
    flip(tmp_path / "last" / "adapter.bin")
    with pytest.raises(CheckpointCorrupt, match=r"adapter\.bin is damaged"):
        training.accelerator.load_state(tmp_path / "last")
    handle.remove()
    training.accelerator.save_state(tmp_path / "last")
    assert len(calls) == 1


def _hooked(folder: str) -> list[tuple[int, str]]:
    accelerator = Accelerator()
    accelerator.prepare(torch.nn.Linear(1, 1))
    calls: list[tuple[int, str]] = []
    accelerator.register_save_state_pre_hook(lambda _, weights, place: calls.append((len(weights), place)))
    accelerator.save_state(folder)
    return calls


def test_hooks_run_on_every_rank_each_with_an_unfinished_folder(tmp_path: Path) -> None:
    ((_, first),), ((models, second),) = run_ranks(2, _hooked, str(tmp_path / "last"))
    assert first.startswith(str(tmp_path / ".last.tmp-"))
    assert models == 1
    assert second.startswith(str(tmp_path / ".last.hooks1."))
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


# -- what is in a checkpoint


def test_a_checkpoint_is_these_files_and_its_manifest_says_where_the_training_stood(tmp_path: Path) -> None:
    training = Trained.start(mixed_precision="bf16")
    training.epoch()
    assert training.accelerator.save_state(tmp_path / "last") == str(tmp_path / "last")
    assert sorted(os.listdir(tmp_path / "last")) == FILES
    manifest = json.loads((tmp_path / "last" / "manifest.json").read_text())
    assert (manifest["step"], manifest["epoch"], manifest["world_size"]) == (4, 1, 1)
    assert manifest["settings"] == {"mixed_precision": "bf16", "gradient_accumulation_steps": 1}
    assert manifest["versions"]["torch"] == torch.__version__


def test_the_saved_model_is_a_model_file_for_everybody(tmp_path: Path) -> None:
    from nbaccel.train.checkpoint.model_weights import load_model

    training = Trained.start()
    training.epoch()
    training.accelerator.save_state(tmp_path / "last")
    model = Tied()
    load_model(model, tmp_path / "last")
    assert [value for parameter in model.parameters() for value in parameter.flatten().tolist()] == training.weights()


def test_project_folders_are_those_of_the_configuration(tmp_path: Path) -> None:
    both = Accelerator(project_dir=tmp_path)
    assert (both.project_dir, both.logging_dir, both.save_iteration) == (tmp_path, tmp_path, 0)
    config = ProjectConfiguration(logging_dir="logs")
    filled = Accelerator(project_dir="runs", project_config=config)
    assert (filled.project_dir, filled.logging_dir) == ("runs", "logs")
    assert filled.project_configuration is config
    with pytest.raises(ValueError, match=r"total_limit must be at least 1 \(checkpoints to keep\), got 0"):
        ProjectConfiguration(total_limit=0)


def test_a_project_folder_that_cannot_be_written_to_is_said_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)  # root may write anywhere
    with pytest.warns(UserWarning, match=r"project_dir .*/runs/1 cannot be written to: checkpoints and logs will fail"):
        Accelerator(project_dir=tmp_path / "runs" / "1")
    assert os.listdir(tmp_path) == []


def test_a_disk_without_space_keeps_the_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Trained.start()
    training.accelerator.save_state(tmp_path / "last")
    before = training.weights()
    training.epoch()
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with pytest.raises(CannotSave, match=r"last: No space left on device\. It needs \d+ bytes.* has 10 bytes free"):
        training.accelerator.save_state(tmp_path / "last")
    training.accelerator.load_state(tmp_path / "last")
    assert training.weights() == before


def test_an_accelerator_with_checkpoints_travels_by_pickle() -> None:
    import pickle

    accelerator = Accelerator(project_config=ProjectConfiguration("runs"))
    accelerator.register_for_checkpointing(Tally(a=1))
    again = pickle.loads(pickle.dumps(accelerator))
    assert again.project_dir == "runs"
    assert again._checkpoints.registered.objects[0].state == {"a": 1}
