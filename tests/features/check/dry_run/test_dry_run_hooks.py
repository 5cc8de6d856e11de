"""Prepared and unprepared loaders in ranks of a dry run: equally many batches, and what follows from them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from environments import REPOSITORY
from features.check.dry_run.fakes_of_loops import Cutting, Sentences, padded
from nbaccel import Accelerator
from nbaccel.base.settings import RunSettings
from nbaccel.features.check.dry_run.dry_run_hooks import DryRunHooks
from nbaccel.features.check.dry_run.loop_log import DryRunEnded, LoopLog
from nbaccel.features.check.dry_run.saved_files import SavedFiles
from nbaccel.features.check.dry_run.step_times import StepTimes
from nbaccel.features.check.rank_setup import dry_run_parts
from nbaccel.testing import run_ranks
from nbaccel.train.checkpoint.directory import ProjectConfiguration
from nbaccel.train.distributed.partial_state import current_world
from nbaccel.train.raw_loop.loop import RawLoopTraining

LENGTHS = [1 + number * 7 % 13 for number in range(41)]


class DryRun(Cutting):
    """The parts of a dry run in one rank, as its task begins them."""

    def __init__(self, folder: Path, **options: Any) -> None:
        world = current_world()
        self.times = StepTimes(lambda record: self.records.append(record))
        super().__init__(folder, world.rank, world.world_size, watchers=[self.times], part=self.times.part, **options)
        self.saves = SavedFiles(self.records.append, part=self.times.part)
        self.hooks = DryRunHooks(self.cuts, self.times, self.saves, self.records.append)

    def __enter__(self) -> DryRun:
        self.times.begin()
        self.cuts.begin()
        self.saves.begin()
        self.hooks.begin()
        return self

    def __exit__(self, *exception: object) -> None:
        self.hooks.end()
        self.saves.end()
        self.cuts.end()
        self.times.end()

    def seconds(self) -> list[dict[str, float]]:
        return [record["seconds"] for record in self.records if record["kind"] == "step_times" and record["place"]]


def sentences(**options: Any) -> DataLoader[Tensor]:
    return DataLoader(Sentences(LENGTHS), 4, collate_fn=padded, **options)


def train(accelerator: Accelerator, run: DryRun, loader: Any, epochs: int = 1) -> list[Any]:
    """Return for each batch its shape, the samples that are gathered, and whether it is a step, and the last one."""
    model = nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    seen = []
    for _ in run.rounds(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch.float().mean(1, keepdim=True)).mean())
                optimizer.step()
                optimizer.zero_grad()
            gathered = len(accelerator.gather_for_metrics(batch[:, 0]))
            seen.append((tuple(batch.shape), gathered, accelerator.sync_gradients, loader.end_of_dataloader))
    return seen


def prepared(folder: Path, workers: int, epochs: int) -> Any:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    with DryRun(folder) as run:
        seen = train(accelerator, run, sentences(shuffle=True, num_workers=workers), epochs)
    samples = [[record["samples"], record["remainder"]] for record in run.records if record["kind"] == "cut"]
    return seen, run.log.batches, run.log.ended, [begun[2] for begun in run.log.begun], run.seconds(), samples


@pytest.mark.parametrize("workers", [0, 1])
def test_a_prepared_loader_gives_each_rank_its_own_longest_batch(workers: int, tmp_path: Path) -> None:
    for seen, batches, ended, lengths, seconds, _ in run_ranks(2, prepared, tmp_path, workers, 1):
        assert [kind for _, kind in batches[0]] == ["longest", "between", "last"]
        sizes = [size for size, _ in batches[0]]
        assert sizes[0] >= sizes[1]
        assert [shape[0] * shape[1] for shape, *_ in seen] == sizes
        assert ended == [False]
        assert lengths == [6]
        assert {"loader", "forward", "backward", "optimizer", "communication", "program"} <= seconds[0].keys()


def test_the_last_batch_is_the_true_one_for_accumulation_and_metrics(tmp_path: Path) -> None:
    """Of 41 samples in rounds of 8 the last round has one, which both ranks' batches are filled up with."""
    for seen, *_, samples in run_ranks(2, prepared, tmp_path, 0, 1):
        assert samples == [[12, 1]]
        assert [gathered for _, gathered, _, _ in seen] == [8, 8, 1]
        assert [is_step for *_, is_step, _ in seen] == [False, True, True]
        assert [is_last for *_, is_last in seen] == [False, False, True]


def test_ranks_give_equally_many_more_batches_in_a_second_epoch(tmp_path: Path) -> None:
    first, second = run_ranks(2, prepared, tmp_path, 0, 2)
    assert [len(batches) for batches in first[1]] == [len(batches) for batches in second[1]] == [3, 6]
    assert len(list(tmp_path.iterdir())) == 1


def drawn_by_next(folder: Path) -> list[int]:
    with DryRun(folder) as run:
        iterator = iter(Accelerator().prepare(sentences()))
        return [len(next(iterator)) for _ in run.rounds(5)]


def test_a_prepared_loader_gives_what_a_loop_draws_that_counts_its_steps(tmp_path: Path) -> None:
    assert run_ranks(2, drawn_by_next, tmp_path) == [[4] * 5] * 2


def on_a_device(folder: Path) -> Any:
    with DryRun(folder) as run:
        loader = Accelerator().prepare(sentences())
        loader.move_to(torch.device("meta"))
        seen = [(batch.device.type, loader.end_of_dataloader) for batch in loader]
    return seen, run.seconds()[0]


def test_of_batches_that_are_moved_the_time_of_the_copies_is_known(tmp_path: Path) -> None:
    for seen, seconds in run_ranks(2, on_a_device, tmp_path):
        assert seen == [("meta", False), ("meta", False), ("meta", True)]
        assert seconds["host to device"] > 0


def no_backward(folder: Path) -> int:
    """Rank 0 alone looks, which must not wait for rank 1."""
    accelerator = Accelerator()
    with DryRun(folder) as run:
        loader = accelerator.prepare(sentences())
        count = 0
        if accelerator.is_main_process:
            for _ in run.rounds(2):
                with torch.no_grad():
                    count += len(list(loader))
        accelerator.wait_for_everyone()
    return count


def test_a_pass_of_one_rank_alone_does_not_hang(tmp_path: Path) -> None:
    assert run_ranks(2, no_backward, tmp_path) == [9, 0]


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([number]) for number in range(100))


def streamed(folder: Path, dispatches: bool, over_stream: bool) -> Any:
    from nbaccel.utils import DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatches))
    loader = DataLoader(Stream() if over_stream else TensorDataset(torch.arange(100)), 3)
    if not over_stream:
        loader = DataLoader([torch.tensor([number]) for number in range(100)], 3)
    with DryRun(folder) as run:
        seen = train(accelerator, run, loader)
    return seen, run.log.kinds, run.log.ended


@pytest.mark.parametrize("dispatches", [True, False])
def test_a_stream_gives_three_batches_to_each_rank(dispatches: bool, tmp_path: Path) -> None:
    for seen, kinds, ended in run_ranks(2, streamed, tmp_path, dispatches, True):
        assert [shape for shape, *_ in seen] == [(3, 1)] * 3
        assert [is_last for *_, is_last in seen] == [False, False, True]
        assert [len(each) for each in kinds] == [3]
        assert ended == [False]


def test_what_rank_0_reads_for_all_is_cut_in_rounds(tmp_path: Path) -> None:
    """Of 100 samples in rounds of 6 the last round has 4, dealt in equal parts."""
    for seen, kinds, _ in run_ranks(2, streamed, tmp_path, True, False):
        assert [shape[0] for shape, *_ in seen] == [3, 3, 2]
        assert [gathered for _, gathered, *_ in seen] == [6, 6, 4]
        assert len(kinds[0]) == 3


def uneven(folder: Path) -> Any:
    accelerator = Accelerator(even_batches=False)
    with DryRun(folder) as run:
        model = nn.Linear(1, 1)
        model, loader = accelerator.prepare(model, DataLoader([torch.ones(1)] * 9, 1))
        with accelerator.join_uneven_inputs([model]):
            for batch in loader:
                accelerator.backward(model(batch).mean())
    return run.log.kinds


def test_joined_ranks_end_together(tmp_path: Path) -> None:
    assert run_ranks(2, uneven, tmp_path) == [[["longest", "between", "last"]]] * 2


# -- loops that prepare nothing


def raw_loop(run: DryRun, loader: Any, epochs: int) -> list[list[int]]:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    taken = []
    for _ in run.rounds(epochs):
        for batch in loader:
            loss = model(batch.float().mean(1, keepdim=True)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            taken.append(batch[:, 0].tolist())
    return taken


def raw(folder: Path, batches: str, epochs: int, workers: int, begins_late: bool = False) -> Any:
    world = current_world()
    training = RawLoopTraining(world, RunSettings(batches=batches))
    options = {"stride": world.world_size} if batches == "each" else {"begins_whole": True}
    run = DryRun(folder, **options)
    if not begins_late:
        run.__enter__()
    training.begin({})
    if begins_late:
        run.__enter__()
    taken = raw_loop(run, sentences(num_workers=workers), epochs)
    training.end()
    run.__exit__()
    return taken, run.log.batches, run.seconds(), [begun[2] for begun in run.log.begun]


@pytest.mark.parametrize("begins_late", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_split_the_same_batches(workers: int, begins_late: bool, tmp_path: Path) -> None:
    first, second = run_ranks(2, raw, tmp_path, "split", 2, workers, begins_late)
    assert first[1] == second[1]
    assert [kind for _, kind in first[1][0]] == ["between", "longest", "between", "last"], "two are cut unevenly"
    one, more = (len(batches) for batches in first[1])
    assert one == 4 < more <= 11, "as many as fit into a time, for the forecast"
    assert first[0][0] == second[0][0], "the first batch is whole"
    longest = first[0][1] + second[0][1]
    assert len(longest) == 4
    assert max(LENGTHS[item] for item in longest) * 4 == first[1][0][1][0] == 52


def test_ranks_with_batches_of_their_own_are_given_rounds(tmp_path: Path) -> None:
    first, second = run_ranks(2, raw, tmp_path, "each", 2, 0, True)
    assert [len(batches) for batches in first[1]] == [len(batches) for batches in second[1]] == [3, 6]
    assert first[3] == second[3] == [6, 6]
    assert first[0][0] == second[0][0], "the first batch is whole"
    assert all(mine != theirs for mine, theirs in zip(first[0][1:], second[0][1:], strict=True))


def left(folder: Path) -> str:
    """Return the error by which an endless loop of a library is left."""
    with DryRun(folder):
        loader = Accelerator().prepare(sentences())
        try:
            for _ in range(9):
                list(loader)
        except DryRunEnded as error:
            return str(error)
    return ""


def test_a_prepared_loader_ends_the_loop_of_a_library(tmp_path: Path) -> None:
    for text in run_ranks(2, left, tmp_path):
        assert "has begun the same loader 2 times at left:" in text


# -- all parts of a rank, with the log of the loops


def whole_rank(folder: Path, is_raw: bool) -> Any:
    records: list[Any] = []
    log = LoopLog(records.append)
    parts, training = dry_run_parts(log, records.append, folder), None
    if is_raw:
        training = RawLoopTraining(current_world(), RunSettings())
        training.begin({})
    parts.begin()
    model: Any = nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), 1e-9)
    loader: Any = DataLoader(TensorDataset(torch.arange(4000.0).reshape(-1, 1)), 4, shuffle=True)
    backward: Callable[[Tensor], None] = Tensor.backward
    if not is_raw:
        accelerator = Accelerator()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        backward = accelerator.backward
    batches = []
    with log.loop(0) as epochs:
        for _ in epochs.over(range(10)):
            batches.append(0)
            with log.loop(1) as loop:
                for (x,) in loop.over(loader):
                    backward(model(x).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                    batches[-1] += 1
    parts.end()
    if training is not None:
        training.end()
    log.close()
    return batches, records


def without_an_optimizer(folder: Path) -> int:
    """Return the backwards of a raw loop that changes its weights by hand, with batches from worker processes."""
    log = LoopLog(lambda record: None)
    parts, training = dry_run_parts(log, lambda record: None, folder), RawLoopTraining(current_world(), RunSettings())
    training.begin({})
    parts.begin()
    weight = torch.ones(1, requires_grad=True)
    loader = DataLoader(TensorDataset(torch.arange(64.0)), 4, shuffle=True, num_workers=2)
    count = 0
    with log.loop(0) as epochs:
        for _ in epochs.over(range(5)):
            for (x,) in loader:
                (weight * x).mean().backward()
                assert weight.grad is not None
                weight.data.sub_(1e-3 * weight.grad)
                weight.grad = None
                count += 1
    parts.end()
    training.end()
    return count


def test_workers_read_the_same_batches_in_all_ranks_where_no_optimizer_steps(tmp_path: Path) -> None:
    first, second = run_ranks(2, without_an_optimizer, tmp_path)
    assert first == second > 4  # torch draws the order of the second pass while a part is still out


@pytest.mark.parametrize("is_raw", [False, True])
def test_a_loop_gets_all_that_its_loader_gives(is_raw: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "nbaccel.features.check.dry_run.loader_cuts._MORE_SECONDS", 600.0
    )  # also of the ranks, which are forks
    for batches, records in run_ranks(2, whole_rank, tmp_path, is_raw):
        begun = 3 + is_raw  # a first pass that is split has one more
        assert batches == [begun, 160]
        of = {kind: [record for record in records if record["kind"] == kind] for kind in ("loop", "peak")}
        assert [(loop["number"], loop["rounds"], loop["is_cut_by_pass"]) for loop in of["loop"]] == [
            (1, begun, True),
            (1, 160, True),
            (0, 2, False),
        ]
        assert len(of["peak"]) == 3


# -- checkpoints, and what is undone


def saved(folder: Path, background: bool) -> Any:
    accelerator = Accelerator()
    with DryRun(folder) as run:
        model = accelerator.prepare(nn.Linear(1000, 10))
        accelerator.save_state(str(folder / "checkpoint"), **({"blocking": False} if background else {}))
        accelerator.wait_for_everyone()
    accelerator.end_training()
    del model
    return [record for record in run.records if record["kind"] == "save"]


def test_a_checkpoint_is_one_save_with_all_its_bytes(tmp_path: Path) -> None:
    first, second = run_ranks(2, saved, tmp_path, False)
    (save,) = first
    assert save["path"] == str(tmp_path / "checkpoint")
    files = [path for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
    assert 40_000 < save["bytes"] <= sum(path.stat().st_size for path in files)
    assert second == []


def saved_in_a_project(folder: Path) -> Any:
    naming = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=3)
    accelerator = Accelerator(project_config=naming)
    with DryRun(folder) as run:
        model = accelerator.prepare(nn.Linear(10, 10))
        accelerator.save_state()
        accelerator.save_state(str(folder / "named"))
    accelerator.end_training()
    del model
    return [record["keeps"] for record in run.records if record["kind"] == "save"]


def test_a_checkpoint_says_how_many_of_its_kind_are_kept(tmp_path: Path) -> None:
    assert run_ranks(1, saved_in_a_project, tmp_path) == [[3, None]]


def test_hooks_are_taken_away() -> None:
    from nbaccel.train.checkpoint import manager, saving
    from nbaccel.train.data import loader
    from nbaccel.train.distributed.transport import Transport

    def hooked() -> list[Callable[..., Any]]:
        owners = [(loader.PreparedLoader, "_iterate"), (loader, "place"), (manager.Checkpoints, "save")]
        owners += [(saving.Save, "write"), (Transport, "barrier"), (torch.autograd, "backward"), (torch, "save")]
        return [getattr(owner, name) for owner, name in owners]

    before = hooked()
    with DryRun(Path()):
        assert not any(now is then for now, then in zip(hooked(), before, strict=True))
    assert hooked() == before


@pytest.mark.slow
def test_ranks_of_other_runs_import_nothing_of_it() -> None:
    names = "[name for name in sys.modules if 'dry_run' in name]"
    program = f"import sys; import nbaccel.train.setup; assert not {names}, {names}"
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
