"""Checkpoints that are named by themselves: no run replaces, counts or deletes what another one has saved."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel import Accelerator
from nbaccel.testing import run_ranks
from nbaccel.train.checkpoint.directory import ProjectConfiguration
from nbaccel.train.checkpoint.manifest import MANIFEST, Manifest, read_sealed, write_sealed
from trainings import Trained


def numbered(folder: str | Path, **options: Any) -> ProjectConfiguration:
    return ProjectConfiguration(folder, automatic_checkpoint_naming=True, **options)


def saved(folder: Path) -> dict[int, Manifest]:
    found = [path for path in (folder / "checkpoints").iterdir() if not path.name.startswith(".")]
    return {int(path.name.removeprefix("checkpoint_")): Manifest.read(path) for path in found}


def ranks_in(folder: Path, number: int) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints" / f"checkpoint_{number}").glob("generators_*"))


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def run_once(folder: Path, saves: int = 1, **options: Any) -> list[str]:
    """A run of one process; the names of its checkpoints."""
    training = Trained.start(project_config=numbered(folder, **options))
    return [Path(training.accelerator.save_state()).name for _ in range(saves)]


# -- room


@pytest.mark.parametrize(
    ("limit", "free", "said"),
    [
        (3, 3.5, "room for 3, and 3 are kept while the next is written"),
        (None, 2.5, "room for 2, and none is deleted"),
        (3, 4.5, ""),
        (None, 3.5, ""),
    ],
)
def test_a_disk_without_room_for_what_is_kept_is_said_at_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, limit: int | None, free: float, said: str
) -> None:
    training = Trained.start(project_config=numbered(tmp_path / "runs", total_limit=limit))
    state = training.accelerator._lifecycle.training()
    content = state.content(state.weights(), [])
    monkeypatch.setattr("nbaccel.train.checkpoint.directory.free_bytes", lambda folder: int(free * content.nbytes))
    training.accelerator.save_state()
    training.accelerator.save_state()
    printed = capsys.readouterr().out
    assert said in printed
    assert printed.count("a checkpoint takes") == bool(said)


# -- ranks


def _save_twenty_times(folder: str, late: int, prepares: bool) -> list[str]:
    """No rank waits for another, and `late` begins when the others are done."""
    accelerator = Accelerator(project_config=numbered(folder))
    if prepares:
        accelerator.prepare(torch.nn.Linear(1, 1))
    others = [rank for rank in range(3) if rank != late]
    if accelerator.process_index == late:
        for rank in others:
            _wait_for(Path(folder, f"done_{rank}"))
    names = [Path(accelerator.save_state()).name for _ in range(20)]
    Path(folder, f"done_{accelerator.process_index}").touch()
    accelerator.wait_for_everyone()
    return names


@pytest.mark.slow
@pytest.mark.parametrize(("late", "prepares"), [(0, True), (2, True), (2, False)])
def test_a_rank_that_is_late_adds_its_random_states_to_the_right_checkpoints(
    tmp_path: Path, late: int, prepares: bool
) -> None:
    run_once(tmp_path, 2)
    names = [f"checkpoint_{number}" for number in range(2, 22)]
    assert run_ranks(3, _save_twenty_times, str(tmp_path), late, prepares) == [names] * 3
    assert sorted(saved(tmp_path)) == list(range(22))
    for number in range(2, 22):
        assert ranks_in(tmp_path, number) == [f"generators_{rank}.json" for rank in range(3)]
    assert not [name for name in os.listdir(tmp_path / "checkpoints") if name.startswith(".")]


def _main_then_all(folder: str, trains_between: bool, blocking: bool) -> list[str]:
    training = Trained.start(project_config=numbered(folder))
    accelerator = training.accelerator
    training.epoch()
    names = []
    if accelerator.is_main_process:
        names.append(Path(accelerator.save_state(blocking=blocking)).name)
    if trains_between:
        training.epoch()
    names.append(Path(accelerator.save_state()).name)
    accelerator.wait_for_everyone()
    accelerator.load_state()  # warns, and so fails, where random states are missing
    return names[:1]


@pytest.mark.parametrize(("trains_between", "blocking"), [(True, True), (False, True), (True, False)])
def test_a_save_by_all_behind_one_by_the_main_process_has_the_random_states_of_all(
    tmp_path: Path, trains_between: bool, blocking: bool
) -> None:
    run_ranks(2, _main_then_all, str(tmp_path), trains_between, blocking)
    assert sorted(saved(tmp_path)) == [0, 1]
    assert ranks_in(tmp_path, 0) == ["generators_0.json"]
    assert ranks_in(tmp_path, 1) == ["generators_0.json", "generators_1.json"]
    assert not [name for name in os.listdir(tmp_path / "checkpoints") if name.startswith(".")]


def _numbers(folder: str) -> list[int]:
    first = Accelerator(project_config=numbered(folder))
    first.prepare(torch.nn.Linear(1, 1))
    numbers = [int(first.save_iteration)]
    first.save_state()
    first.wait_for_everyone()
    second = Accelerator(project_config=ProjectConfiguration(automatic_checkpoint_naming=True))
    second.project_configuration.set_directories(folder)  # known later than the Accelerator
    second.prepare(torch.nn.Linear(1, 1))
    numbers.append(int(second.save_iteration))
    second.save_state()
    second.wait_for_everyone()
    return numbers


def test_ranks_agree_on_the_first_number_when_the_first_model_is_prepared(tmp_path: Path) -> None:
    for first in (0, 2):
        assert run_ranks(2, _numbers, str(tmp_path)) == [[first, first + 1]] * 2
    assert len({manifest.run for manifest in saved(tmp_path).values()}) == 4
    assert ranks_in(tmp_path, 3) == ["generators_0.json", "generators_1.json"]


def _goes_back(folder: str) -> list[str]:
    """Two steps come twice, each with a save at the same line; rank 0 is first, then last."""
    training = Trained.start(project_config=numbered(folder))
    accelerator = training.accelerator
    names = []
    for turn in range(2):
        is_first = accelerator.process_index == turn
        for number in range(2):
            training.epoch()
            if not is_first:
                _wait_for(Path(folder, f"saved_{turn}_{number}"))
            names.append(Path(accelerator.save_state()).name)
            if is_first:
                Path(folder, f"saved_{turn}_{number}").touch()
            accelerator.wait_for_everyone()
        if turn == 0:
            before = Path(folder, "checkpoints", "checkpoint_0", "generators_1.json").read_text()
            accelerator.load_state(Path(folder, "start"))
    assert Path(folder, "checkpoints", "checkpoint_0", "generators_1.json").read_text() == before
    return names


def _begin(folder: str) -> None:
    Trained.start().accelerator.save_state(folder)


def test_a_step_that_comes_again_is_another_save(tmp_path: Path) -> None:
    run_ranks(2, _begin, str(tmp_path / "start"))
    names = [f"checkpoint_{number}" for number in range(4)]
    assert run_ranks(2, _goes_back, str(tmp_path)) == [names] * 2
    assert [manifest.step for _, manifest in sorted(saved(tmp_path).items())] == [2, 4, 2, 4]
    for number in range(4):
        assert ranks_in(tmp_path, number) == ["generators_0.json", "generators_1.json"]


def _limited(folder: str) -> None:
    training = Trained.start(project_config=numbered(folder, total_limit=1))
    accelerator = training.accelerator
    for clock in range(3):
        training.epoch()
        if accelerator.is_main_process or clock == 0:
            accelerator.save_state()
    accelerator.wait_for_everyone()


def test_random_states_that_came_too_late_for_their_checkpoint_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    late = tmp_path / "checkpoints" / ".checkpoint_0.rank1.step0"
    late.write_text("of a checkpoint that is gone")
    run_ranks(2, _limited, str(tmp_path))
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_2"]


# -- runs


def test_a_second_run_in_the_folder_goes_on_behind_the_first_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_once(tmp_path, 2) == ["checkpoint_0", "checkpoint_1"]
    assert capsys.readouterr().out == ""
    before = {number: manifest.stamp for number, manifest in saved(tmp_path).items()}
    assert run_once(tmp_path, 2) == ["checkpoint_2", "checkpoint_3"]
    assert capsys.readouterr().out == (
        f"{tmp_path / 'checkpoints'} holds 2 checkpoint(s) of earlier runs, left as they are; this run goes on with "
        "checkpoint_2\n"
    )
    after = saved(tmp_path)
    assert {number: after[number].stamp for number in before} == before
    assert after[0].run == after[1].run != after[2].run == after[3].run


def test_a_run_that_resumes_continues_the_line_of_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_once(tmp_path, 2)
    training = Trained.start(project_config=numbered(tmp_path))
    training.accelerator.load_state()
    assert training.accelerator.save_iteration == 2
    training.accelerator.save_state()
    assert "earlier runs" not in capsys.readouterr().out
    manifests = saved(tmp_path)
    assert manifests[2].ancestors == {manifests[1].run: manifests[1].saved_at}
    third = Trained.start(project_config=numbered(tmp_path))
    third.accelerator.load_state()
    third.accelerator.save_state()
    assert list(saved(tmp_path)[3].ancestors) == [manifests[1].run, manifests[2].run]


def test_a_limit_counts_and_deletes_the_own_line_only(tmp_path: Path) -> None:
    run_once(tmp_path, 3)
    run_once(tmp_path, 4, total_limit=2)
    assert sorted(saved(tmp_path)) == [0, 1, 2, 5, 6]
    training = Trained.start(project_config=numbered(tmp_path, total_limit=2))
    training.accelerator.load_state()
    training.accelerator.save_state()
    assert sorted(saved(tmp_path)) == [0, 1, 2, 6, 7]


def test_two_continuations_of_one_checkpoint_leave_each_others_alone(tmp_path: Path) -> None:
    run_once(tmp_path, 2)
    for _ in range(2):
        training = Trained.start(project_config=numbered(tmp_path, total_limit=2))
        training.accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_1")
        training.accelerator.save_state()
    assert sorted(saved(tmp_path)) == [1, 2, 3]  # 0 was the oldest of the first one's line, 2 is not of the second's
    assert training.accelerator.save_state().endswith("checkpoint_4")
    assert sorted(saved(tmp_path)) == [2, 3, 4]


def test_a_run_that_goes_back_to_a_checkpoint_of_its_own_stays_that_run(tmp_path: Path) -> None:
    training = Trained.start(project_config=numbered(tmp_path, total_limit=2))
    for _ in range(2):
        training.accelerator.save_state()
    training.accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_0")
    training.accelerator.save_state()
    manifests = saved(tmp_path)
    assert sorted(manifests) == [1, 2]
    assert manifests[1].run == manifests[2].run
    assert manifests[2].ancestors == {}


def test_checkpoints_of_an_older_nbaccel_are_read_and_belong_to_nobody(tmp_path: Path) -> None:
    run_once(tmp_path, 2)
    for number in range(2):
        path = tmp_path / "checkpoints" / f"checkpoint_{number}" / MANIFEST
        content = read_sealed(path)
        content = {name: value for name, value in content.items() if name not in ("run", "ancestors")}
        path.unlink()
        write_sealed(path, {**content, "layout": 1})
    assert json.loads((tmp_path / "checkpoints" / "checkpoint_0" / MANIFEST).read_text())["layout"] == 1
    training = Trained.start(project_config=numbered(tmp_path, total_limit=1))
    training.accelerator.load_state()
    for _ in range(2):
        training.accelerator.save_state()
    assert sorted(saved(tmp_path)) == [0, 1, 3]


# -- numbers that are set by hand


def test_a_number_that_was_set_by_hand_and_exists_is_refused(tmp_path: Path) -> None:
    run_once(tmp_path, 3)
    for number in (0, 1):
        training = Trained.start(project_config=numbered(tmp_path, iteration=number))
        with pytest.raises(ValueError, match=rf"checkpoint_{number} exists already, and iteration {number} was set by"):
            training.accelerator.save_state()
    accelerator = training.accelerator
    for number in (2, 2):  # refused again, and nothing is counted
        accelerator.project_configuration.iteration = number
        with pytest.raises(ValueError, match=r"was set by hand; 3 is free\. Where no number is set"):
            accelerator.save_state()
    accelerator.project_configuration.iteration = 10
    assert [Path(accelerator.save_state()).name for _ in range(2)] == ["checkpoint_10", "checkpoint_11"]
    accelerator.project_configuration.iteration = 1
    with pytest.raises(ValueError, match="12 is free"):
        accelerator.save_state()
    assert sorted(saved(tmp_path)) == [0, 1, 2, 10, 11]


def _refused(folder: str, number: int) -> str:
    training = Trained.start(project_config=numbered(folder))
    training.accelerator.project_configuration.iteration = number
    try:
        training.accelerator.save_state()
    except ValueError as error:
        return str(error).partition(" was set by hand")[0].rpartition(" ")[2]
    training.accelerator.wait_for_everyone()
    return "saved"


def test_every_rank_refuses_the_number_and_every_rank_takes_a_free_one(tmp_path: Path) -> None:
    run_once(tmp_path, 2)
    assert run_ranks(2, _refused, str(tmp_path), 1) == ["1"] * 2
    assert run_ranks(2, _refused, str(tmp_path), 7) == ["saved"] * 2
    assert ranks_in(tmp_path, 7) == ["generators_0.json", "generators_1.json"]


def test_a_number_counted_past_one_set_by_hand_goes_on_behind_the_newest(tmp_path: Path) -> None:
    run_once(tmp_path, 3)
    accelerator = Trained.start(project_config=numbered(tmp_path)).accelerator
    accelerator.save_state()
    (tmp_path / "checkpoints" / "checkpoint_4").mkdir()  # another program's, meanwhile
    assert accelerator.save_state().endswith("checkpoint_5")
