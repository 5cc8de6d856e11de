"""A file that every rank saves is rank 0's, once; what is read back is complete; files of each rank are written."""

from __future__ import annotations

import io
import os
import shutil
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import torch as safetensors

from nbaccel.base.world import World
from nbaccel.launching.api import launch
from nbaccel.launching.libraries.one_file import OneFile, _Folders, _Journal
from nbaccel.testing import run_ranks
from nbaccel.train.checkpoint.model_weights import write_object

ONE_FILE = "nbaccel.launching.libraries.one_file"


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{ONE_FILE}._LONGEST_DELAY_S", 0.3)


def _in_ranks(folder: Path, loop: Callable[[int], Any], world_size: int = 2) -> list[tuple[Any, list[str]]]:
    """What `loop` returned, and the warnings, by rank; `loop` runs in `folder` and is told its rank."""
    (folder / "run").mkdir()

    def run() -> tuple[Any, list[str]]:
        os.chdir(folder)
        world = World.from_env()
        OneFile(world, str(folder / "run" / "store")).install()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            return loop(world.rank), [str(each.message) for each in told]

    return run_ranks(world_size, run)


@pytest.mark.parametrize("late", [0, 1])
def test_a_file_that_ranks_save_load_and_remove_is_there_for_each_until_it_removes_it(
    tmp_path: Path, late: int
) -> None:
    def loop(rank: int) -> list[Any]:
        found = []
        for epoch in range(3):
            torch.save(epoch, "best.pt")
            time.sleep(0.1 * (rank == late))
            found.append(torch.load("best.pt"))
            os.remove("best.pt")
            torch.save(epoch, "new.tmp")
            os.replace("new.tmp", f"epoch{epoch}.pt")
            time.sleep(0.1 * (rank == late))
            if epoch:
                Path(f"epoch{epoch - 1}.pt").unlink()
        return [*found, os.path.exists("best.pt")]

    assert [values for values, _ in _in_ranks(tmp_path, loop)] == [[0, 1, 2, False]] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch2.pt", "run"]


@pytest.mark.parametrize("late", [0, 1])
def test_a_saved_file_that_is_moved_is_still_rank_0s(tmp_path: Path, late: int) -> None:
    def loop(rank: int) -> list[Any]:
        found = []
        for epoch in range(3):
            Path("new").mkdir()
            torch.save(epoch, "new/model.pt")
            os.replace("new", f"epoch{epoch}")
            time.sleep(0.1 * (rank == late))
            found.append(torch.load(f"epoch{epoch}/model.pt"))
            os.rename(f"epoch{epoch}/model.pt", dst=f"epoch{epoch}/best.pt")
            time.sleep(0.1 * (rank == late))
            found.append(torch.load(f"epoch{epoch}/best.pt"))
            shutil.move(f"epoch{epoch}", "kept" if epoch else "first")
            Path("kept").mkdir(exist_ok=True)
        return [*found, *(torch.load(f"{place}/best.pt") for place in ("first", "kept/epoch1", "kept/epoch2"))]

    assert [values for values, _ in _in_ranks(tmp_path, loop)] == [[0, 0, 1, 1, 2, 2, 0, 1, 2]] * 2


def test_a_folder_that_its_maker_moves_at_this_moment_counts_as_made(tmp_path: Path) -> None:
    folder, moved = tmp_path / "new", tmp_path / "epoch0"

    def make_and_see_it_move(path: str) -> None:
        """Make the folder, or find it there, and have it moved before anybody looks again."""
        try:
            os.mkdir(path)
        finally:
            os.rename(path, moved)

    folders = [_Folders(_Journal(str(tmp_path / "store.files"))) for _ in range(2)]
    folders[0].make(str(folder), folder.mkdir)
    folders[1].make(str(folder), lambda: make_and_see_it_move(str(folder)))
    assert moved.is_dir()
    folder.write_text("a file")
    with pytest.raises(FileExistsError):
        folders[1].make(str(folder), folder.mkdir)


def test_a_file_that_no_rank_has_removed_is_missed_by_all(tmp_path: Path) -> None:
    def loop(rank: int) -> str:
        with pytest.raises(FileNotFoundError):
            os.remove("never.txt")
        if rank == 0:
            Path("own.txt").write_text("of rank 0")
            os.remove("own.txt")
        return "missed"

    assert [values for values, _ in _in_ranks(tmp_path, loop)] == ["missed"] * 2


def test_rank_0_writes_what_all_save_and_one_rank_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def loop(rank: int) -> tuple[int, bool]:
        for epoch in range(3):
            torch.save((rank, epoch), "best.pt")
        return torch.load("best.pt")[0], os.path.exists("best.pt")

    assert _in_ranks(tmp_path, loop, 3) == [((0, True), [])] * 3
    told = [line for line in capfd.readouterr().out.splitlines() if line.startswith("nbaccel: ")]
    assert told == ["nbaccel: best.pt is saved by rank 0 alone; for a file of each rank put the rank into its name"]


def test_a_file_that_a_library_writes_by_itself_is_no_news(tmp_path: Path) -> None:
    """Nobody can put the rank into its name."""
    file = f"{sysconfig.get_path('purelib')}/checkpoints/saving.py"
    save = compile("torch.save(rank, 'weight_checkpoint.pt')", file, "exec")

    def loop(rank: int) -> int:
        exec(save, {"torch": torch, "rank": rank})
        return int(torch.load("weight_checkpoint.pt"))

    assert _in_ranks(tmp_path, loop) == [(0, []), (0, [])]


def test_a_slow_save_is_complete_when_others_go_on(tmp_path: Path) -> None:
    class Slow:
        def __reduce__(self) -> Any:
            time.sleep(0.3)
            return str, ("slow",)

    def loop(rank: int) -> tuple[int, str]:
        torch.save(Slow(), Path("model.pt"))
        return os.path.getsize("model.pt"), torch.load("model.pt", weights_only=False)

    (first, _), (second, _) = _in_ranks(tmp_path, loop)
    assert first == second
    assert first[1] == "slow"


def test_a_file_that_is_read_back_and_saved_again_is_never_torn(tmp_path: Path) -> None:
    def loop(rank: int) -> list[int]:
        read = []
        for number in range(40):
            torch.save(torch.full((20_000,), number), "state.pt")
            state = torch.load("state.pt")
            read.append(int(state.unique()))  # one value: of one save
        return read

    (first, _), (second, _) = _in_ranks(tmp_path, loop)
    assert first == list(range(40))
    assert second == sorted(second)


@pytest.mark.usefixtures("_soon")
def test_ranks_that_save_paths_of_their_own_write_them(tmp_path: Path) -> None:
    def loop(rank: int) -> list[int]:
        torch.save(rank, f"model_{rank}.pt")
        return [torch.load(f"model_{rank}.pt"), torch.load(f=f"model_{rank}.pt")]

    assert _in_ranks(tmp_path, loop) == [([0, 0], []), ([1, 1], [])]


def test_a_program_that_saves_in_rank_0_alone_is_not_slowed_and_reads_a_complete_file(tmp_path: Path) -> None:
    def loop(rank: int) -> tuple[float, int]:
        began = time.monotonic()
        if rank == 0:
            torch.save(7, "model.pt")
        took = time.monotonic() - began
        while not os.path.exists("model.pt"):
            time.sleep(0.001)
        return took, torch.load("model.pt")

    (first, none), (second, also_none) = _in_ranks(tmp_path, loop)
    assert (first[1], second[1], none, also_none) == (7, 7, [], [])
    assert second[0] < 0.5


@pytest.mark.usefixtures("_soon")
def test_a_load_waits_no_longer_than_until_rank_0_loads(tmp_path: Path) -> None:
    """Ranks that differ about what is best: rank 1 saves once more, and goes on when rank 0 reads."""

    def loop(rank: int) -> tuple[int, float]:
        for epoch in range(1 + rank):
            torch.save(epoch, "best.pt")
        began = time.monotonic()
        return torch.load("best.pt"), time.monotonic() - began

    (first, _), (second, told) = _in_ranks(tmp_path, loop)
    assert first[0] == second[0] == 0
    assert second[1] < 5
    assert not told


@pytest.mark.usefixtures("_soon")
def test_a_rank_that_waits_in_vain_goes_on_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{ONE_FILE}._LONGEST_WAIT_S", 0.2)

    def loop(rank: int) -> int:
        if rank == 0:
            torch.save(0, "best.pt")
            return 0
        while not os.path.exists("best.pt"):
            time.sleep(0.001)
        torch.save(1, "best.pt")
        torch.save(2, "best.pt")
        return int(torch.load("best.pt"))

    _, (value, told) = _in_ranks(tmp_path, loop)
    assert value == 0
    assert told[0].startswith("rank 1 loads ")
    assert told[0].endswith(
        "best.pt although rank 0 of 2 has not saved what this rank skipped, in 0 s. It may be older: let all ranks "
        "save it equally often."
    )


def test_open_files_and_our_own_saves_are_left_alone(tmp_path: Path) -> None:
    def loop(rank: int) -> tuple[int, list[int]]:
        buffer = io.BytesIO()
        torch.save(rank, buffer)
        buffer.seek(0)
        write_object(rank, f"own_{rank}.pt")
        write_object(rank, "ours.pt")
        with open(f"open_{rank}.pt", "wb") as file:
            torch.save(rank, file)
        return torch.load(buffer), [torch.load(f"{kind}_{rank}.pt") for kind in ("own", "open")]

    assert _in_ranks(tmp_path, loop) == [((0, [0, 0]), []), ((1, [1, 1]), [])]
    journal = (tmp_path / "run" / "store.files").read_text().splitlines()
    assert sorted(os.path.basename(line.strip('"]')) for line in journal) == ["open_0.pt", "open_1.pt"]


def test_a_folder_that_another_rank_has_made_is_there(tmp_path: Path) -> None:
    """Each rank has asked before the other made it; a program that makes one twice is told so as ever."""

    def loop(rank: int) -> list[str]:
        errors = []
        makes: list[Callable[[], None]] = [
            lambda: os.mkdir("plain"),
            lambda: os.makedirs("deep/er"),
            lambda: Path("by_path").mkdir(),
            lambda: os.mkdir("plain"),
            lambda: os.mkdir("before"),
            lambda: tempfile.mkdtemp(dir=".") and None,
        ]
        for make in makes:
            try:
                make()
            except FileExistsError as error:
                errors.append(str(error.filename))
        return errors

    (tmp_path / "before").mkdir()
    assert _in_ranks(tmp_path, loop, 3) == [(["plain", "before"], [])] * 3


def test_a_file_that_several_ranks_write_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))

    def loop(rank: int) -> None:
        Path(f"own_{rank}.csv").write_text("own")
        Path(".hidden").write_text("a cache")
        with tempfile.TemporaryFile(), tempfile.TemporaryFile(dir="."):  # its folder is opened, and no name
            pass
        torch.save(rank, "model.pt")
        with open("model.pt", "rb") as file:
            file.read()
        for _ in range(2):
            with open("log.csv", "a") as file:
                file.write("1,2\n")
        Path("other.csv").write_text("rows")

    _in_ranks(tmp_path, loop)
    assert (tmp_path / "log.csv").read_text() == 4 * "1,2\n"
    told = [line for line in capfd.readouterr().out.splitlines() if line.startswith("nbaccel: ")]
    assert [line for line in told if "saved by rank 0 alone" not in line] == [
        "nbaccel: log.csv is opened for writing by more than one of 2 ranks: lines that are added stand there once for "
        "each rank, and of a whole file the last rank's is left. Let one rank write it (if "
        "accelerator.is_main_process:), or put the rank into its name"
    ]


def test_a_file_of_a_users_line_is_named_below_the_temporary_folder_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    library: dict[str, Any] = {}
    source = "def keep():\n    with open('cache.bin', 'w') as file:\n        file.write('kept')\n"
    exec(compile(source, "/usr/lib/python3/dist-packages/library.py", "exec"), {"__name__": "library"}, library)

    def loop(rank: int) -> None:
        library["keep"]()
        with tempfile.NamedTemporaryFile("w", dir=".") as file:
            file.write("own")
        with Path("log.csv").open("a") as file:
            file.write("1,2\n")

    _in_ranks(tmp_path, loop)
    assert (tmp_path / "log.csv").read_text() == 2 * "1,2\n"
    told = [line for line in capfd.readouterr().out.splitlines() if line.startswith("nbaccel: ")]
    assert [line.partition(":")[2][1:8] for line in told] == ["log.csv"]


def test_safetensors_are_one_file_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def loop(rank: int) -> list[float]:
        safetensors.save_file({"weight": torch.full((2,), float(rank))}, "model.safetensors")
        return list(safetensors.load_file("model.safetensors")["weight"].tolist())

    assert _in_ranks(tmp_path, loop) == [([0.0, 0.0], [])] * 2
    assert capfd.readouterr().out.count("nbaccel: model.safetensors is saved by rank 0 alone") == 1


def test_torchs_functions_keep_their_names_and_are_found_where_pickle_looks(tmp_path: Path) -> None:
    def loop(rank: int) -> bool:
        return torch.save is torch.serialization.save and torch.load.__qualname__ == "load"

    assert _in_ranks(tmp_path, loop) == [(True, []), (True, [])]


def test_ranks_of_a_launch_write_one_file(tmp_path: Path, start_method: str) -> None:
    def loop(path: str) -> Any:
        warnings.simplefilter("ignore")
        torch.save(os.environ["RANK"], path)
        return torch.load(path)

    assert launch(loop, 2, args=(str(tmp_path / "model.pt"),), start_method=start_method, cpu=True).values == ["0", "0"]


def test_independent_ranks_save_as_ever() -> None:
    def is_wrapped() -> bool:
        return hasattr(torch.save, "__wrapped__")

    assert launch(is_wrapped, 2, start_method="fork", cpu=True, independent=True).values == [False, False]
