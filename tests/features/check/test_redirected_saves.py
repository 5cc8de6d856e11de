"""What torch, safetensors and nbaccel save in a dry run lies elsewhere, and is found again."""

from __future__ import annotations

import glob
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file as imported_save

from nbaccel import Accelerator
from nbaccel.base.settings import RunSettings
from nbaccel.features.check.dry_run.redirected_checkpoints import redirect_checkpoints
from nbaccel.features.check.dry_run.redirection import Redirection
from nbaccel.features.check.folder_snapshot import FolderSnapshot
from nbaccel.launching.ipc.spec import Devices, LaunchSpec, Start
from nbaccel.launching.launcher import Launcher
from nbaccel.launching.processes.supervisor import RunObservers
from nbaccel.launching.tasks.function_task import FunctionTask
from nbaccel.output.screens import ConsoleScreen
from nbaccel.testing import run_ranks
from nbaccel.utils import ProjectConfiguration


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    torch.save(torch.zeros(1), "old.pt")
    return home


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    folder = tmp_path / "ranks" / "saves"
    folder.mkdir(parents=True)
    for name in ("originals", "records"):
        folder.with_name(name).mkdir()
    return folder


Run = Callable[..., list[Any]]


@pytest.fixture
def run(launcher: Launcher, elsewhere: Path, start_method: str) -> Run:
    """Two ranks whose saves are redirected; returns what the function returns in each."""

    def run(function: Callable[..., Any], *args: Any) -> list[Any]:
        spec = LaunchSpec(
            FunctionTask(function, args),
            Devices(2),
            Start(start_method, "a test"),
            RunSettings(cpu=True),
            parts=(("nbaccel.features.check.protected_files:ProtectedFiles", str(elsewhere.parent)),),
        )
        run, ended = launcher.run(spec, RunObservers(ConsoleScreen()))
        try:
            if run.error is not None:
                raise run.error
            return [ended.values(rank)["value"] for rank in range(2)]
        finally:
            ended.close()

    return run


def wait_for(path: str) -> None:
    while not os.path.exists(path):  # ended by the test's own timeout
        time.sleep(0.01)


def saves() -> dict[str, Any]:
    from safetensors.torch import load_file, save_file

    if os.environ["RANK"] == "0":
        torch.save(torch.ones(2), "new.pt")
        torch.save(torch.ones(3), "old.pt")
        save_file({"weight": torch.ones(4)}, "weights.safetensors")
        torch.save(torch.ones(5), "best.pt.tmp")
        os.replace("best.pt.tmp", "best.pt")
        torch.save(torch.ones(6), "removed.pt")
        os.remove("removed.pt")
        torch.save(1, "done.pt")
    wait_for("done.pt")
    with open("best.pt", "rb") as file:
        best = torch.load(file)
    return {
        "new": len(torch.load("new.pt")),
        "old": len(torch.load(os.path.abspath("old.pt"))),
        "weights": len(load_file("weights.safetensors")["weight"]),
        "best": len(best),
        "exist": [Path(name).exists() for name in ("new.pt", "best.pt.tmp", "removed.pt")],
        "is_large": os.path.getsize("new.pt") > 0,
    }


def test_saved_files_are_found_under_their_names_and_the_folder_has_not_changed(run: Run, home: Path) -> None:
    before = FolderSnapshot.of(home)
    expected = {
        **{"new": 2, "old": 3, "weights": 4, "best": 5},
        **{"exist": [True, False, False], "is_large": True},
    }
    assert run(saves) == [expected, expected]
    assert before.changed() == []


def looks_into_folders() -> dict[str, Any]:
    Accelerator(cpu=True).save_model(torch.nn.Linear(1, 1), "weights")
    if os.environ["RANK"] != "0":
        return {}
    os.makedirs("out")
    for number in range(2):
        torch.save(torch.ones(1), f"out/model{number}.pt")
    Path("out/real.txt").touch()
    names = ["model0.pt", "model1.pt", "real.txt"]
    assert sorted(os.listdir("out")) == names
    assert sorted(path.name for path in Path("out").glob("*")) == names
    assert sorted(glob.glob("out/*.pt")) == ["out/model0.pt", "out/model1.pt"]
    os.rename("out", "moved")
    assert sorted(os.listdir("moved")) == names
    shutil.copy("moved/model0.pt", "moved/copy.pt")
    shutil.rmtree("moved")
    gone = os.path.exists("out") or os.path.exists("moved") or os.path.exists("moved/model0.pt")
    Path("weights/config.json").write_text("{}")
    return {"is_left": gone, "weights": sorted(os.listdir("weights")), "here": sorted(os.listdir())}


def test_listings_of_folders_show_what_was_saved(run: Run, home: Path) -> None:
    before = FolderSnapshot.of(home)
    seen, _ = run(looks_into_folders)
    expected = {"is_left": False, "weights": ["config.json", "model.safetensors"], "here": ["old.pt", "weights"]}
    assert seen == expected
    assert before.changed() == []


def copies() -> dict[str, Any]:
    Accelerator(cpu=True).save_model(torch.nn.Linear(1, 1), "weights")
    if os.environ["RANK"] != "0":
        return {}
    torch.save(torch.ones(2), "new.pt")
    shutil.copyfile(src="new.pt", dst="old.pt")
    shutil.copy("new.pt", "copy.pt")
    shutil.copy2(Path("new.pt"), "second.pt")
    os.replace(src="second.pt", dst="moved.pt")
    lengths = [len(torch.load(name)) for name in ("old.pt", "copy.pt", "moved.pt")]
    with open(file="copy.pt", mode="rb") as file:
        lengths.append(len(torch.load(file)))
    assert os.stat(path="copy.pt").st_size > 0
    shutil.rmtree("weights")
    return {"lengths": lengths, "is_left": os.path.exists("weights"), "here": sorted(os.listdir())}


def test_copies_of_what_was_saved_lie_beside_it(run: Run, home: Path) -> None:
    before = FolderSnapshot.of(home)
    seen, _ = run(copies)
    names = ["copy.pt", "moved.pt", "new.pt", "old.pt"]
    assert seen == {"lengths": [2, 2, 2, 2], "is_left": False, "here": names}
    assert before.changed() == []


def saves_by_names(elsewhere: str) -> list[Any]:
    if os.environ["RANK"] != "0":
        return []
    imported_save({"weight": torch.ones(2)}, "named.safetensors")
    with safe_open("named.safetensors", "pt") as file:
        return [len(file.get_tensor("weight")), os.path.exists(elsewhere + os.path.abspath("named.safetensors"))]


def test_functions_that_were_imported_by_name_are_redirected(run: Run, home: Path, elsewhere: Path) -> None:
    assert run(saves_by_names, str(elsewhere)) == [[2, True], []]
    assert os.listdir(home) == ["old.pt"]


def test_what_is_not_redirected_is_listed(run: Run, home: Path) -> None:
    before = FolderSnapshot.of(home)

    def writes() -> None:
        if os.environ["RANK"] == "0":
            Path("notes.txt").write_text("real")

    run(writes)
    assert before.changed() == [str(home / "notes.txt")]


def refused(*paths: str) -> list[str]:
    errors = []
    for path in paths if os.environ["RANK"] == "0" else ():
        try:
            torch.save(torch.ones(1), path)
        except Exception as error:
            errors.append(type(error).__name__)
    return errors


def test_a_save_that_would_fail_in_the_real_run_fails(run: Run, home: Path) -> None:
    os.mkdir("folder")
    assert run(refused, "none/such.pt", "folder") == [["RuntimeError", "RuntimeError"], []]


def trains(elsewhere: str, given: str) -> dict[str, Any]:
    redirect_checkpoints(elsewhere)
    project = ProjectConfiguration(given, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    weight = accelerator.unwrap_model(model).weight
    accelerator.load_state()
    found = weight.item()
    seen: dict[str, Any] = {"of an earlier run": found}
    for name, value in (("named", 1.0), (None, 2.0)):
        torch.nn.init.constant_(weight, value)
        accelerator.save_state(name)
        accelerator.wait_for_everyone()
        torch.nn.init.zeros_(weight)
        accelerator.load_state(name)
        seen[str(name)] = weight.item()
    accelerator.save_model(model, "weights")
    accelerator.save({"epoch": 3}, "state.pt")
    accelerator.wait_for_everyone()
    torch.nn.init.zeros_(weight)
    from nbaccel.utils import load_model

    load_model(accelerator.unwrap_model(model), Path("weights"))
    return seen | {"weights": weight.item(), "numbers": accelerator.save_iteration}


def test_checkpoints_of_nbaccel_are_found_again_and_those_of_earlier_runs_are_not_touched(
    home: Path, elsewhere: Path
) -> None:
    def earlier() -> None:
        project = ProjectConfiguration("project", automatic_checkpoint_naming=True, total_limit=1)
        accelerator = Accelerator(cpu=True, project_config=project)
        model = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(model.weight, 7.0)
        accelerator.prepare(model)
        accelerator.save_state()

    run_ranks(2, earlier)
    before = FolderSnapshot.of(home)
    seen = {"of an earlier run": 7.0, "named": 1.0, "None": 2.0, "weights": 2.0, "numbers": 2}
    assert run_ranks(2, trains, str(elsewhere), "project") == [seen, seen]
    assert before.changed() == []
    assert sorted(os.listdir(home)) == ["old.pt", "project"]


def saves_by_itself(elsewhere: str) -> str:
    redirect_checkpoints(elsewhere)
    accelerator = Accelerator(cpu=True, checkpoint_every=1, resume=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    return ""


def test_automatic_checkpoints_and_a_resume_that_finds_none_leave_the_folder_as_it_was(
    home: Path, elsewhere: Path
) -> None:
    before = FolderSnapshot.of(home)
    run_ranks(1, saves_by_itself, str(elsewhere))
    assert before.changed() == []
    assert os.listdir(home) == ["old.pt"]
    assert list(elsewhere.rglob("checkpoint_*"))


def test_places_are_their_own_places(tmp_path: Path) -> None:
    places = Redirection(str(tmp_path))
    place = places.place("/home/me/model.pt")
    assert place == f"{tmp_path}/home/me/model.pt"
    assert places.place(place) == place
    assert places.to_write("/none/such/model.pt") == "/none/such/model.pt"
    assert places.to_read(place) == place
