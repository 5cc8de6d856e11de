"""Cells that prepare nothing are saved, end, and go on: in real ranks, in a notebook whose names are made anew."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel.errors import CannotResume, CannotSave, CheckpointCorrupt
from nbaccel.features.cell_checkpoints import difference, marked_cell
from nbaccel.features.cell_checkpoints.difference import CellDifference
from nbaccel.features.cell_checkpoints.head_state import HeadState
from nbaccel.train.checkpoint import rng_files
from nbaccel.train.checkpoint.manifest import Manifest, read_sealed, write_sealed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ABOVE = """
import time, torch
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)

def end_here(step):
    end = Path("end")
    try:
        is_here = step == int(end.read_text())
    except FileNotFoundError:  # another rank has ended it
        return
    if is_here:
        end.unlink(missing_ok=True)
        raise RuntimeError("the session ends")

def takes(inputs):
    if len(inputs) > int(Path("full").read_text()):
        raise torch.OutOfMemoryError("out of memory")

rate = 1e-2
dropout = torch.nn.Dropout(0.2)
model = torch.nn.Sequential(torch.nn.Linear(3, 8), dropout, torch.nn.Linear(8, 1)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
x = torch.linspace(0, 1, 96, dtype=torch.double).reshape(-1, 3)
data = TensorDataset(x, x.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=8, shuffle=True)
history = []
"""
LOOP = """
step = 0
for epoch in range(3):
    for inputs, targets in loader:
        end_here(step)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
    history.append(loss.item())
"""
SAVES = "--cpu --seed 3 --checkpoint-every 2steps --checkpoint-dir {}"


class Sessions:
    """Sessions of one notebook, one after the other: the names of each are gone when the next begins."""

    def __init__(self, notebook: Any, above: str = ABOVE) -> None:
        self._notebook, self._first, self.above = notebook, set(notebook.names), above

    def begin(self, above: str = "") -> None:
        for name in self._notebook.names.keys() - self._first:
            del self._notebook.names[name]
        self.do(above or self.above)

    def run(self, cell: str) -> Any:
        return self._notebook.run(cell)

    def do(self, cell: str) -> Any:
        done = self.run(cell)
        assert done.error is None, f"{done.error}\n{done.stdout}{done.stderr}"
        return done

    def end(self, flags: str, step: int, loop: str = LOOP) -> None:
        """Begin a session, which ends before `step`; then begin another."""
        self.begin()
        Path("end").write_text(str(step))
        ended = self.run(f"%%accelerate {flags}\n{loop}")
        assert str(ended.error) == "the session ends", ended.error
        self.begin()

    def trained(self) -> tuple[list[float], list[float], int]:
        names = self._notebook.names
        weights = torch.cat([value.flatten() for value in names["model"].state_dict().values()])
        return weights.tolist(), list(names["history"]), names["step"]

    def best(self) -> list[float]:
        best = self._notebook.names["best"]
        return [best["score"].value, *torch.cat([each.flatten() for each in best["state"].values()]).tolist()]


@pytest.fixture
def sessions(notebook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sessions:
    monkeypatch.chdir(tmp_path)
    return Sessions(notebook)


def undisturbed(sessions: Sessions, flags: str, loop: str = LOOP) -> Any:
    sessions.begin()
    sessions.do(f"%%accelerate {flags.format('undisturbed')}\n{loop}")
    return sessions.trained()


@pytest.mark.sample(2)
@pytest.mark.parametrize("step", [5, 3, 11])
@pytest.mark.parametrize(("n", "start"), [(2, "fork"), (2, "zygote"), (1, "zygote"), (1, "inline")])
def test_a_loop_that_was_ended_goes_on_bit_by_bit(sessions: Sessions, n: int, start: str, step: int) -> None:
    flags = f"-n {n} --start {start} {SAVES}"
    expected = undisturbed(sessions, flags)
    sessions.end(flags.format("saved"), step)
    cell = sessions.do(f"%%accelerate {flags.format('saved')} --resume\n{LOOP}")
    assert f"continuing from saved/checkpoint_{step // 2 * 2}: step {step // 2 * 2}\n" in cell.stdout
    is_counted = f", {12 - step // 2 * 2} steps, loss " in cell.stdout
    assert is_counted or start == "inline", "batches that were passed over are no steps"
    assert sessions.trained() == expected
    kept = sorted(Manifest.read(path).step for path in Path("saved").iterdir())
    assert kept == [8, 10, 12] if step < 8 else len(kept) == 3


@pytest.mark.sample(1)
@pytest.mark.parametrize("start", ["fork", "zygote"])
def test_statistics_of_parts_of_a_batch_go_on_in_two_ranks(sessions: Sessions, start: str) -> None:
    """Its first batch is split at once: in a run from the beginning it is whole in each rank."""
    sessions.above = ABOVE.replace("dropout, ", "torch.nn.BatchNorm1d(8), dropout, ")
    flags = f"-n 2 --start {start} {SAVES}"
    expected = undisturbed(sessions, flags)
    sessions.end(flags.format("saved"), 5)
    cell = sessions.do(f"%%accelerate {flags.format('saved')} --resume\n{LOOP}")
    assert "the first loss is" not in cell.stdout + cell.stderr
    assert sessions.trained() == expected


@pytest.mark.parametrize(("then", "now"), [(2, 2), (1, 2), (1, 1)])
@pytest.mark.parametrize("step", [7, 9], ids=["within an epoch", "at its end"])
def test_a_run_that_goes_on_counts_the_epochs_of_the_one_before(
    sessions: Sessions, then: int, now: int, step: int
) -> None:
    flags = f"--start fork {SAVES.format('saved')}"
    sessions.end(f"-n {then} {flags}", step)
    Path("end").write_text("10")
    ended = sessions.run(f"%%accelerate -n {now} {flags} --resume\n{LOOP}")
    assert str(ended.error) == "the session ends"
    assert ", epoch 3, batch 3/4, step 1" in ended.stdout, ended.stdout


OTHER_NAMES = """
an_alias = model
all_of_it = [model, optimizer, loader, history]
drawn_anew = torch.rand(3, generator=torch.Generator().manual_seed(time.time_ns() % 2**31))
another = torch.nn.Linear(2, 2)
another_optimizer = torch.optim.SGD(another.parameters(), lr=time.time_ns() % 1000 / 1e3)
others = DataLoader([1, 2, 3], batch_size=1 + time.time_ns() % 3)
loss = inputs = [time.time_ns()]
class Score:
    def __init__(self, value):
        self.value = value
best = {"score": Score(9.0), "state": None, "kept": all_of_it}
def note(value):
    if value < best["score"].value:
        best["score"], best["state"] = Score(value), {k: v.clone() for k, v in model.state_dict().items()}
"""
"""Names that the cell does not read, some before those that it does, and objects that it finds by several names."""

NOTES = LOOP.replace("    history.append(loss.item())\n", "    history.append(loss.item())\n    note(loss.item())\n")
STARTS = ("-n 1 --start fork", "-n 1 --start zygote", "--start inline", "-n 2 --start fork", "-n 2 --start zygote")


@pytest.mark.sample(2)
@pytest.mark.parametrize("then", STARTS)
@pytest.mark.parametrize("now", STARTS)
def test_a_run_goes_on_however_the_ranks_are_started(sessions: Sessions, then: str, now: str) -> None:
    """A forked rank has all names of the notebook, and a clean process those that the cell reads."""
    sessions.above = ABOVE + OTHER_NAMES
    sessions.begin()
    sessions.do(f"%%accelerate {now} {SAVES.format('undisturbed')}\n{NOTES}")
    expected, best = sessions.trained(), sessions.best()
    sessions.end(f"{then} {SAVES.format('saved')}", 7, NOTES)
    cell = sessions.do(f"%%accelerate {now} {SAVES.format('saved')} --resume\n{NOTES}")
    assert "continuing from saved/checkpoint_6: step 6\n" in cell.stdout
    if then[:4] == now[:4] or ("inline" in then + now and "-n 2" not in then + now):
        assert (sessions.trained(), sessions.best()) == (expected, best)
    else:
        assert sessions.trained()[0] == pytest.approx(expected[0], abs=0.05), "dropout draws other numbers"


TWO_LOADERS = LOOP.replace(
    "for inputs, targets in loader:", "for (inputs, targets), (more, _) in zip(loader, other):"
).replace("(inputs), targets", "(inputs) + 0.1 * model(more), targets")
STREAM = """
class Noise(torch.utils.data.IterableDataset):
    def __init__(self):
        self.generator = torch.Generator().manual_seed(7)
    def __iter__(self):
        for _ in range(32):
            inputs = torch.randn(3, dtype=torch.double, generator=self.generator)
            yield inputs, inputs.sum(0, keepdim=True)
"""


OF_ITS_CLASS = STREAM.replace("    def __init__(self):\n        self.generator", "    generator")


@pytest.mark.sample(3)
@pytest.mark.parametrize("start", ["fork", "zygote"])
@pytest.mark.parametrize(
    ("above", "loop"),
    [
        ("other = DataLoader(data, batch_size=8, shuffle=True)\n", TWO_LOADERS),
        (f"{STREAM}loader = DataLoader(Noise(), batch_size=8)\n", LOOP),
        (f"{OF_ITS_CLASS}loader = DataLoader(Noise(), batch_size=8)\n", LOOP),
    ],
    ids=["two loaders", "a stream", "a stream with the generator of its class"],
)
def test_what_loaders_draw_after_a_first_batch_was_split_is_drawn_again(
    sessions: Sessions, above: str, loop: str, start: str
) -> None:
    """The second loader draws when ranks already have their own random numbers; a rank sees its part of a stream."""
    sessions.above = ABOVE + above
    flags = f"-n 2 --start {start} {SAVES}"
    sessions.begin()
    sessions.do(f"%%accelerate {flags.format('undisturbed')}\n{loop}")
    expected = sessions.trained()
    sessions.end(flags.format("saved"), 7, loop)
    sessions.do(f"%%accelerate {flags.format('saved')} --resume\n{loop}")
    assert sessions.trained() == expected


ITS_OWN_ITERATOR = """
step, batches = 0, iter(loader)
while step < 12:
    end_here(step)
    batch = next(batches, None)
    if batch is None:
        history.append(loss.item())
        batches = iter(loader)
        continue
    inputs, targets = batch
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
"""


@pytest.mark.sample(4)
@pytest.mark.parametrize("step", [1, 3, 5])
@pytest.mark.parametrize(
    ("workers", "loop", "flag"),
    [(2, LOOP, ""), (0, ITS_OWN_ITERATOR, ""), (0, LOOP, "--batches each")],
    ids=["two workers", "an iterator of its own", "batches of its own in each rank"],
)
def test_batches_of_a_pass_that_goes_on_are_cut_as_they_were(
    sessions: Sessions, workers: int, loop: str, flag: str, step: int
) -> None:
    """Workers have drawn whole batches before the first step, and the first that are cut are cut unevenly."""
    more = f"\nloader = DataLoader(data, batch_size=8, shuffle=True, num_workers={workers})\n"
    sessions.above = ABOVE.replace("dropout, ", "torch.nn.BatchNorm1d(8), dropout, ") + more
    flags = f"-n 2 --start fork {flag} {SAVES}".replace("2steps", "1steps")
    expected = undisturbed(sessions, flags, loop)
    sessions.end(flags.format("saved"), step, loop)
    sessions.do(f"%%accelerate {flags.format('saved')} --resume\n{loop}")
    assert sessions.trained() == expected


SEVERAL_STEPS = """
step = 0
it = iter(loader)
for n in range(10):
    try:
        inputs, targets = next(it)
    except StopIteration:
        it = iter(loader)
        inputs, targets = next(it)
    for again in range(3):
        end_here(step)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
    history.append(loss.item())
"""
OF_A_BATCH = {
    "in a loop over the loader": (
        SEVERAL_STEPS.replace("it = iter(loader)\nfor n in range(10)", "for inputs, targets in loader")
        .replace(
            "    try:\n        inputs, targets = next(it)\n    except StopIteration:\n        it = iter(loader)\n", ""
        )
        .replace("        inputs, targets = next(it)\n", "")
    ),
    "by next(it)": SEVERAL_STEPS,
    "by next(it), in a while": SEVERAL_STEPS.replace("for n in range(10):", "n = 0\nwhile n < 10:\n    n += 1"),
    "by an iterator that nobody keeps": SEVERAL_STEPS.replace("next(it)", "next(iter(loader))"),
}
"""Loops that take three steps for a batch. Rank 0 writes names for all, and each rank has its own part in its hands."""
EVERY_THIRD = SEVERAL_STEPS.replace(
    "    for again in range(3):\n        end_here", "    if True:\n        end_here"
).replace("    try:\n        inputs", "    try:\n        if n < 4 or n % 3 == 0: inputs")


@pytest.mark.parametrize("step", [8, 11])
@pytest.mark.parametrize("shape", OF_A_BATCH)
def test_a_loop_of_several_steps_for_a_batch_goes_on_before_a_batch_in_two_ranks(
    sessions: Sessions, shape: str, step: int
) -> None:
    flags = f"-n 2 --start fork {SAVES}"
    expected = undisturbed(sessions, flags, OF_A_BATCH[shape])
    sessions.end(flags.format("saved"), step, OF_A_BATCH[shape])
    cell = sessions.do(f"%%accelerate {flags.format('saved')} --resume\n{OF_A_BATCH[shape]}")
    assert f"continuing from saved/checkpoint_{step // 3 * 3}: step {step // 3 * 3}\n" in cell.stdout
    assert sessions.trained() == expected


def test_a_loop_that_takes_a_batch_now_and_then_is_not_saved_in_two_ranks_once_that_is_seen(
    sessions: Sessions,
) -> None:
    sessions.begin()
    cell = sessions.do(f"%%accelerate -n 2 --start fork {SAVES.format('saved')}\n{EVERY_THIRD}")
    assert (
        "--checkpoint-every 2steps: not saved: the loop in line 5 trains more than once on a batch, of which each rank "
        "has a part in its hands. A loop over the loader, with one over these steps in it, can go on before each "
        "batch. saved/checkpoint_4 stays the newest checkpoint, and the training goes on.\n"
    ) in cell.stdout


def test_a_save_before_that_was_seen_is_not_continued(sessions: Sessions) -> None:
    flags = f"-n 2 --start fork {SAVES.format('saved')}"
    sessions.end(flags, 4, EVERY_THIRD)
    cell = sessions.run(f"%%accelerate {flags} --resume\n{EVERY_THIRD}")
    assert isinstance(cell.error, CannotResume)
    assert "the loop in line 5 trains on that batch once more" in str(cell.error)
    assert "nothing was saved, since" not in cell.stdout


ROUNDS = """
def epoch_of(batches):
    global step
    total = 0.0
    for x, y in batches:
        end_here(step)
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        step += 1
    return total

def batches_of(loader):
    yield from loader
"""


def test_a_run_that_trains_before_it_comes_to_its_place_is_refused(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cell is known in which it does; it would train from the beginning, and nobody would see that."""
    sessions.above = ABOVE + ROUNDS
    loop = "step = 0\nfor epoch in range(3):\n    total = epoch_of(loader)\n    history.append(total)"
    flags = f"--start inline {SAVES}"
    sessions.end(flags.format("saved"), 5, loop)
    monkeypatch.setattr(marked_cell._Way, "come_to_head", lambda *_: None)
    monkeypatch.setattr(marked_cell._Way, "rest", lambda self, top, iterable, is_last: iterable)
    cell = sessions.run(f"%%accelerate {flags.format('saved')} --resume\n{loop}")
    assert str(cell.error).startswith("saved/checkpoint_4 cannot be continued: the cell trains before it has come to")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("n", "start"), [(1, "fork"), (2, "zygote")])
@pytest.mark.parametrize(
    "update", ["p.data += -0.1 * p.grad", "p.data = p.data - 0.1 * p.grad", "with torch.no_grad(): p -= 0.1 * p.grad"]
)
def test_a_loop_that_steps_by_hand_goes_on_bit_by_bit(sessions: Sessions, update: str, n: int, start: str) -> None:
    sessions.above = re.sub("optimizer = .*", "", ABOVE)
    loop = LOOP.replace("optimizer.zero_grad()", "model.zero_grad()").replace(
        "optimizer.step()", f"for p in model.parameters():\n            {update}"
    )
    flags = f"-n {n} --start {start} {SAVES}"
    expected = undisturbed(sessions, flags, loop)
    sessions.end(flags.format("saved"), 7, loop)
    cell = sessions.do(f"%%accelerate {flags.format('saved')} --resume\n{loop}")
    assert re.search(r"continuing from saved/checkpoint_\d+: step ", cell.stdout)
    assert sessions.trained() == expected


def test_a_function_that_loops_over_a_generator_goes_on_between_the_rounds_of_its_caller(sessions: Sessions) -> None:
    """What the function holds, such as the generator itself, is not there between the rounds, and refuses nothing."""
    sessions.above = ABOVE + ROUNDS
    loop = "step = 0\nfor epoch in range(3):\n    total = epoch_of(batches_of(loader))\n    history.append(total)"
    flags = f"--start inline {SAVES}"
    expected = undisturbed(sessions, flags, loop)
    sessions.end(flags.format("saved"), 9, loop)
    cell = sessions.do(f"%%accelerate {flags.format('saved')} --resume\n{loop}")
    assert "continuing from saved/checkpoint_8: step 8\n" in cell.stdout
    assert sessions.trained() == expected


@pytest.mark.parametrize("n", [1, 2])
def test_a_loop_whose_steps_are_of_several_batches_goes_on_at_the_end_of_a_window(sessions: Sessions, n: int) -> None:
    schedule = "schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=36)\n"
    sessions.above = ABOVE.replace("history = []", schedule + "history = []")
    loop = LOOP.replace("optimizer.step()\n", "optimizer.step()\n        schedule.step()\n")
    flags = f"-n {n} -a 3 {SAVES}"
    expected = undisturbed(sessions, flags, loop)
    sessions.end(flags.format("saved"), 11, loop)
    cell = sessions.do(f"%%accelerate {flags.format('saved')} --resume\n{loop}")
    assert re.search(r"continuing from saved/checkpoint_\d+: step ", cell.stdout)
    assert "lr_scheduler.step()" not in cell.stdout + cell.stderr  # as torch warns of a step that was not called
    assert sessions.trained() == expected


def test_the_training_goes_on_while_a_checkpoint_is_written(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = CellDifference.write

    def write(difference: CellDifference, folder: Path) -> Any:
        deadline = time.monotonic() + 30
        while not Path("trained").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert Path("trained").exists(), "the training waits"
        return really(difference, folder)

    monkeypatch.setattr(CellDifference, "write", write)
    loop = LOOP.replace("        step += 1\n", "        step += 1\n        if step == 7: Path('trained').touch()\n")
    flags = "-n 1 --start fork --cpu --seed 3 --checkpoint-every 4steps --checkpoint-dir {}"
    sessions.end(flags.format("saved"), 7, loop)
    assert [path.name for path in Path("saved").iterdir()] == ["checkpoint_4"], "whole as soon as the cell has ended"
    assert Path("saved/checkpoint_4/next_loss.json").exists(), "known before the folder was whole"
    sessions.do(f"%%accelerate {flags.format('saved')} --resume\n{loop}")
    found = sessions.trained()
    assert found == undisturbed(sessions, flags, loop)


def test_a_checkpoint_that_cannot_be_written_is_an_error_and_hides_no_other_one(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(difference: CellDifference, folder: Path) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(CellDifference, "write", write)
    flags = "-n 1 --start inline --cpu --checkpoint-every 10steps --checkpoint-dir saved"
    said = "cannot write the checkpoint saved/checkpoint_10: No space left on device. It needs "
    sessions.begin()
    cell = sessions.run(f"%%accelerate {flags}\n{LOOP}")
    assert isinstance(cell.error, CannotSave), cell.error
    assert str(cell.error).startswith(said)
    sessions.begin()
    Path("end").write_text("11")
    cell = sessions.run(f"%%accelerate {flags}\n{LOOP}")
    assert str(cell.error) == "the session ends"
    assert said in cell.stdout


HAS_MOVED = """        step += 1
        earlier = moved if step > 1 else None  # what no later line reads is left out of a checkpoint
        moved = iter([step, step]) if 4 < step < 7 else None
        moved and next(moved)
"""
CANNOT_BE_SAVED = LOOP.replace("        step += 1\n", HAS_MOVED)


@pytest.mark.parametrize("n", [1, 2])
def test_a_later_save_that_cannot_be_made_is_left_out_and_said(sessions: Sessions, n: int) -> None:
    """The ranks save at the same steps afterwards."""
    flags = f"-n {n} {SAVES}"
    expected = undisturbed(sessions, flags)
    sessions.begin()
    cell = sessions.do(f"%%accelerate {flags.format('saved')} --keep-checkpoints 9\n{CANNOT_BE_SAVED}")
    said = "--checkpoint-every 2steps: not saved: moved is a list_iterator, which no file of data can hold, and "
    assert cell.stdout.count(said) == 1, cell.stdout
    assert ". saved/checkpoint_4 stays the newest checkpoint, and the training goes on.\n" in cell.stdout
    found = [*Path("saved").glob("checkpoint_*")]
    assert sorted(int(path.name.rpartition("_")[2]) for path in found) == [2, 4, 8, 10, 12]
    assert sessions.trained() == expected
    for each in found:
        assert (each / f"generators_{n - 1}.json").exists(), each


def test_a_run_that_is_stopped_where_it_cannot_be_saved_names_its_newest_checkpoint(sessions: Sessions) -> None:
    sessions.begin(ABOVE + "pause = 0.3\n")
    loop = CANNOT_BE_SAVED.replace("< step < 7", "< step")
    loop = loop.replace("step += 1\n", "step += 1\n        time.sleep(pause)\n")
    cell = sessions.do(f"%%accelerate -n 1 {SAVES.format('saved')} --time-limit 3s\n{loop}")
    assert " saved/checkpoint_4 stays the newest checkpoint.\n" in cell.stdout, cell.stdout
    assert re.search(r"stopped after \d+ steps at the time limit of 3 s; --resume goes on from its", cell.stdout)


UNSTABLE = """
class Anew(torch.utils.data.Sampler):
    def __len__(self):
        return len(data)
    def __iter__(self):
        own = torch.Generator().manual_seed(time.time_ns() % 2**31)
        return iter(torch.randperm(len(data), generator=own).tolist())

loader = DataLoader(data, batch_size=8, sampler=Anew())
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize("start", ["fork", "zygote", "inline"])
def test_a_resume_that_is_refused_on_the_way_leaves_nothing_in_the_notebook(sessions: Sessions, start: str) -> None:
    sessions.above = ABOVE + UNSTABLE
    flags = f"-n 1 --start {start} {SAVES.format('saved')}"
    sessions.end(flags, 5)
    before = sessions._notebook.names["model"][0].weight.tolist()
    cell = sessions.run(f"%%accelerate {flags} --resume\n{LOOP}")
    assert isinstance(cell.error, CannotResume)
    assert "draws other samples than in the run that is continued" in str(cell.error)
    notes = getattr(cell.error, "__notes__", [])
    if start == "inline":
        assert any("have the values of the checkpoint by now: run the cells above again" in note for note in notes)
    else:
        assert sessions._notebook.names["model"][0].weight.tolist() == before
        assert not any("by now" in note for note in notes)


@pytest.mark.parametrize(("then", "now"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_trains_on_the_same_samples(sessions: Sessions, then: int, now: int) -> None:
    sessions.above = ABOVE.replace("Dropout(0.2)", "Dropout(0.0)")
    weights, history, step = undisturbed(sessions, f"-n 1 {SAVES}")
    sessions.end(f"-n {then} {SAVES.format('saved')}", 5)
    cell = sessions.do(f"%%accelerate -n {now} {SAVES.format('saved')} --resume\n{LOOP}")
    assert f"the checkpoint was written by {then} rank(s) and continues in {now}: the same samples" in cell.stdout
    found = sessions.trained()
    assert found[2] == step
    assert torch.allclose(torch.tensor(found[0]), torch.tensor(weights), rtol=0, atol=1e-12)
    assert torch.allclose(torch.tensor(found[1]), torch.tensor(history), rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2])
def test_without_a_checkpoint_a_resume_begins_anew_and_says_so(sessions: Sessions, n: int) -> None:
    sessions.begin()
    cell = sessions.do(f"%%accelerate -n {n} {SAVES.format('saved')} --resume\n{LOOP}")
    assert "nothing to resume in saved yet: the training starts at its beginning\n" in cell.stdout


def test_a_time_limit_saves_and_the_next_run_goes_on_there(sessions: Sessions) -> None:
    slow = LOOP.replace("        step += 1\n", "        step += 1\n        time.sleep(pause)\n")
    expected = undisturbed(sessions, f"-n 2 {SAVES}")
    sessions.begin(ABOVE + "pause = 0.3\n")
    cell = sessions.do(f"%%accelerate -n 2 --cpu --seed 3 --checkpoint-every 100steps --time-limit 2s\n{slow}")
    said = re.search(r"stopped after (\d+) steps? at the time limit of 2 s; --resume goes on from its", cell.stdout)
    assert said is not None, cell.stdout
    assert [path.name for path in Path("nbaccel_checkpoints").iterdir()] == [f"checkpoint_{said[1]}"]
    sessions.begin(ABOVE + "pause = 0.0\n")
    cell = sessions.do(f"%%accelerate -n 2 --cpu --resume\n{slow}")
    assert "pause" in cell.stdout
    assert sessions.trained() == expected


CHANGES: dict[str, tuple[Callable[[str], str], Callable[[str], str], str]] = {
    "the cell": (lambda above: above, lambda loop: loop.replace("range(3)", "range(4)"), "its source has changed"),
    "a function": (
        lambda above: above.replace("end = Path", "end = 1 and Path"),
        lambda loop: loop,
        "end_here() has changed",
    ),
    "data": (
        lambda above: above.replace("linspace(0, 1", "linspace(0, 2"),
        lambda loop: loop,
        "data",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_cell_that_has_changed_does_not_go_on(sessions: Sessions, change: str) -> None:
    above, loop, said = CHANGES[change]
    sessions.end(f"-n 1 {SAVES.format('saved')}", 5)
    sessions.begin(above(ABOVE))
    cell = sessions.run(f"%%accelerate -n 1 {SAVES.format('saved')} --resume\n{loop(LOOP)}")
    assert isinstance(cell.error, CannotResume), cell.error
    assert said in str(cell.error)


def test_a_session_that_has_trained_already_makes_its_objects_again_first(sessions: Sessions) -> None:
    """Otherwise its later saves would be differences to what no other session has."""
    expected = undisturbed(sessions, f"-n 1 {SAVES}")
    sessions.begin()
    Path("end").write_text("7")
    flags = f"-n 1 {SAVES.format('saved')}"
    assert str(sessions.run(f"%%accelerate {flags}\n{LOOP}").error) == "the session ends"
    before = sessions.trained()
    again = sessions.run(f"%%accelerate {flags} --resume\n{LOOP}")
    assert isinstance(again.error, CannotResume)
    assert str(again.error).startswith("history: of another size than at the head")
    assert sessions.trained()[:2] == before[:2]
    sessions.do(ABOVE)
    sessions.do(f"%%accelerate {flags} --resume\n{LOOP}")
    assert sessions.trained() == expected


def test_a_model_of_another_shape_does_not_go_on(sessions: Sessions) -> None:
    sessions.end(f"-n 1 {SAVES.format('saved')}", 5)
    sessions.begin(ABOVE.replace("3, 8)", "3, 16)").replace("(8, 1)", "(16, 1)"))
    cell = sessions.run(f"%%accelerate -n 1 {SAVES.format('saved')} --resume\n{LOOP}")
    assert isinstance(cell.error, CannotResume)
    assert str(cell.error).startswith("model[0].weight, ")


def test_a_constant_above_may_be_another_and_is_named(sessions: Sessions) -> None:
    sessions.end(f"-n 1 {SAVES.format('saved')}", 5)
    sessions.begin(ABOVE + "note = 1\n")
    sessions.do(f"%%accelerate -n 1 {SAVES.format('saved')} --resume\n{LOOP}")


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(sessions: Sessions) -> None:
    expected = undisturbed(sessions, f"-n 1 {SAVES}")
    sessions.end(f"-n 1 {SAVES.format('saved')}", 7)
    largest = max(Path("saved/checkpoint_6").iterdir(), key=lambda path: path.stat().st_size)
    with open(largest, "r+b") as file:
        file.seek(largest.stat().st_size // 2)
        file.write(b"damage")
    cell = sessions.do(f"%%accelerate -n 1 {SAVES.format('saved')} --resume\n{LOOP}")
    assert re.search(r"saved/checkpoint_6/\S+ is damaged: .*\. Loading saved/checkpoint_4 instead\.", cell.stdout)
    assert "continuing from saved/checkpoint_4: step 4\n" in cell.stdout
    assert sessions.trained() == expected


def test_a_forged_place_is_damage_and_runs_no_code(sessions: Sessions) -> None:
    sessions.end(f"-n 1 {SAVES.format('saved')}", 5)
    path = Path("saved/checkpoint_4/cell.json")  # whole again, as by somebody who wants to run code
    write_sealed(path, read_sealed(path) | {"place": {"os.system": ["touch owned"]}})
    Manifest.read(path.parent).seal(path.parent)
    cell = sessions.run(f"%%accelerate -n 1 {SAVES.format('saved')} --resume saved/checkpoint_4\n{LOOP}")
    assert isinstance(cell.error, CheckpointCorrupt), cell.error
    assert "saved/checkpoint_4/cell.json is damaged" in str(cell.error)


def changed_loss(factor: float) -> None:
    path = Path("saved/checkpoint_4/next_loss.json")
    content = read_sealed(path)
    write_sealed(path, content | {"loss": content["loss"] * factor})


def test_a_first_loss_that_nothing_explains_ends_the_run_before_a_step(sessions: Sessions) -> None:
    sessions.end(f"-n 1 {SAVES.format('saved')}", 5)
    changed_loss(1.5)
    cell = sessions.run(f"%%accelerate -n 1 --out none {SAVES.format('saved')} --resume\n{LOOP}")
    assert isinstance(cell.error, CannotResume), cell.error
    assert "continued from saved/checkpoint_4, by as many ranks on the same processor" in str(cell.error)


def test_a_first_loss_that_is_equal_to_rounding_is_said(sessions: Sessions) -> None:
    sessions.end(f"-n 1 {SAVES.format('saved')}", 5)
    changed_loss(1 + 1e-6)
    cell = sessions.do(f"%%accelerate -n 1 {SAVES.format('saved')} --resume\n{LOOP}")
    assert "in the run that is continued from saved/checkpoint_4 (equal to rounding)" in cell.stdout


PREPARED = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)" + LOOP.replace(
    "loss.backward()", "accelerator.backward(loss)"
)


def test_a_prepared_loop_is_its_accelerators(sessions: Sessions) -> None:
    sessions.end(f"-n 1 {SAVES.format('saved')}", 5, PREPARED)
    cell = sessions.run(f"%%accelerate -n 1 --cpu --checkpoint-dir saved --resume\n{LOOP}")
    assert isinstance(cell.error, CannotResume)
    assert re.search(
        r"saved/checkpoint_\d+ is a checkpoint of a prepared loop, and this loop prepares", str(cell.error)
    )


def test_a_prepared_loop_does_not_go_on_from_one_that_prepared_nothing(sessions: Sessions) -> None:
    sessions.end(f"-n 1 {SAVES.format('saved')}", 5)
    cell = sessions.run(f"%%accelerate -n 1 --cpu --checkpoint-dir saved --resume\n{PREPARED}")
    assert isinstance(cell.error, CannotResume), cell.error


def test_a_loop_in_a_module_is_refused_before_its_first_step(sessions: Sessions) -> None:
    Path("engine_of_test.py").write_text("def train(model, optimizer, loader):\n    for x, y in loader:\n"
                                         "        model(x).sum().backward()\n        optimizer.step()\n")  # fmt: skip
    sessions.begin()
    cell = f"%%accelerate -n 1 {SAVES.format('saved')}\nimport sys; sys.path.insert(0, '')\nimport engine_of_test\n"
    ended = sessions.run(f"{cell}engine_of_test.train(model, optimizer, loader)")
    assert isinstance(ended.error, CannotSave), ended.error
    assert str(ended.error).startswith("--checkpoint-every 2steps: the loop that trains is neither in the cell nor")
    assert not Path("saved").exists()


def test_a_cell_that_trains_before_it_comes_to_its_loop_does_not_go_on(sessions: Sessions) -> None:
    Path("warm_of_test.py").write_text(
        "import os\ndef warm(optimizer):\n    if os.path.exists('w'): optimizer.step()\n"
    )
    loop = f"import sys; sys.path.insert(0, '')\nimport warm_of_test\nwarm_of_test.warm(optimizer)\n{LOOP}"
    sessions.end(f"-n 1 {SAVES.format('saved')}", 5, loop)
    Path("w").touch()
    cell = sessions.run(f"%%accelerate -n 1 --cpu --resume saved\n{loop}")
    assert isinstance(cell.error, CannotResume), cell.error
    assert str(cell.error).startswith("saved/checkpoint_4 cannot be continued: the cell trains before it has come to")


LOGS = "with open('log.csv', 'w') as log:\n" + "".join(
    f"    {line}\n" for line in LOOP.replace("step += 1", "print(step, file=log, flush=True); step += 1").splitlines()
)


def test_a_log_that_a_resume_would_begin_anew_is_refused_before_the_first_step(sessions: Sessions) -> None:
    sessions.begin()
    cell = sessions.run(f"%%accelerate -n 1 {SAVES.format('saved')}\n{LOGS}")
    assert isinstance(cell.error, CannotSave), cell.error
    said = "--checkpoint-every 2steps: log is a file that is open for writing: a run that goes on would begin it anew. "
    assert str(cell.error) == f"{said}Open it with mode 'a', which keeps what is in it."
    assert Path("log.csv").read_text() == ""
    appends = LOGS.replace("'w'", "'a'")
    sessions.end(f"-n 1 {SAVES.format('saved')}", 4, appends)
    sessions.do(f"%%accelerate -n 1 {SAVES.format('saved')} --resume\n{appends}")
    assert Path("log.csv").read_text().split() == [*map(str, range(12))]


def test_random_states_that_a_rank_did_not_save_are_said(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(rng_files, "add", full)
        flags = f"-n 2 --start fork {SAVES.format('saved')}"
        sessions.begin()
        Path("end").write_text("5")
        ended = sessions.run(f"%%accelerate {flags}\n{LOOP}")
        assert str(ended.error) == "the session ends"
    left_out = "rank 1: cannot write the checkpoint saved/checkpoint_4: No space left on device."
    assert left_out in ended.stdout
    assert "The others are saved." in ended.stdout
    sessions.begin()
    cell = sessions.do(f"%%accelerate {flags} --resume\n{LOOP}")
    assert "rank 1: the random states of this rank were not saved (saved/checkpoint_4/generators_1.json " in cell.stdout
    assert "its random numbers are others\n" in cell.stdout


def test_what_may_have_changed_unseen_is_said_once(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    doubt = "tree: a Tree keeps its state in C, which cannot be compared, and is not in the checkpoint"
    monkeypatch.setattr(HeadState, "doubts", lambda head: [doubt])
    sessions.begin()
    cell = sessions.do(f"%%accelerate -n 2 --start fork {SAVES.format('saved')}\n{LOOP}")
    assert cell.stdout.count(f"--checkpoint-every 2steps: {doubt}\n") == 1, cell.stdout


BY_HAND = """
step = 0
for epoch in range(2):
    for inputs, targets in loader:
        end_here(step)
        model.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        step += 1
    history.append(loss.item())
"""


def test_a_loop_that_steps_by_hand_is_saved_too(sessions: Sessions) -> None:
    flags = f"-n 1 {SAVES}"
    expected = undisturbed(sessions, flags, BY_HAND)
    sessions.end(flags.format("saved"), 7, BY_HAND)
    sessions.do(f"%%accelerate {flags.format('saved')} --resume\n{BY_HAND}")
    assert sessions.trained() == expected


PLAIN = """
C, W, b = (torch.randn(*shape, dtype=torch.double) for shape in [(9, 2), (6, 9), (9,)])
parameters = [C, W, b]
for p in parameters:
    p.requires_grad = True
words, following = torch.randint(0, 9, (64, 3)), torch.randint(0, 9, (64,))

def in_turn(size):
    order = list(range(len(words)))
    np.random.shuffle(order)
    for i in range(0, len(words), size):
        yield order[i : i + size]

def loss_of(chosen):
    hidden = C[words[chosen]].view(len(chosen), -1)
    return torch.nn.functional.cross_entropy(hidden @ W + b, following[chosen])
"""
DRAWN = """
for step in range(18):
    end_here(step)
    loss = loss_of(torch.randint(0, 64, (16,)))
    for p in parameters:
        p.grad = None
    loss.backward()
    for p in parameters:
        p.data += -0.1 * p.grad
    history.append(loss.item())
"""
GENERATED = """
step = 0
for epoch in range(3):
    for chosen in in_turn(16):
        end_here(step)
        loss = loss_of(chosen)
        loss.backward()
        with torch.no_grad():
            for p in parameters:
                p -= 0.1 * p.grad
                p.grad.zero_()
        step += 1
    history.append(loss.item())
"""


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("n", "start", "loop"),
    [(2, "fork", DRAWN), (1, "inline", DRAWN), (2, "fork", GENERATED), (3, "zygote", GENERATED)],
    ids=["drawn-2", "drawn-inline", "generated-2", "generated-3"],
)
def test_tensors_that_a_loop_steps_by_hand_go_on_bit_by_bit(sessions: Sessions, n: int, start: str, loop: str) -> None:
    """They are no parameters, and no loader hands out batches, by which the tensors that are trained are known."""
    sessions.above = "import numpy as np\n" + ABOVE + PLAIN
    flags = f"-n {n} --start {start} {SAVES}"

    def ends() -> list[Any]:
        names = sessions._notebook.names
        return [*(each.tolist() for each in names["parameters"]), names["history"]]

    sessions.begin()
    whole = sessions.do(f"%%accelerate {flags.format('undisturbed')}\n{loop}")
    assert "nothing was" not in f"{whole.stdout}{whole.stderr}"
    expected = ends()
    sessions.end(flags.format("saved"), 10, loop)
    cell = sessions.do(f"%%accelerate {flags.format('saved')} --resume\n{loop}")
    assert re.search(r"continuing from saved/checkpoint_\d+: step ", cell.stdout)
    assert ends() == expected


def test_ranks_that_stay_save_and_go_on(sessions: Sessions) -> None:
    flags = f"-n 1 {SAVES}"
    expected = undisturbed(sessions, flags)
    sessions.end(f"{flags.format('saved')} --keep -o model,history,step", 5)
    sessions.run("%accelerate stop")
    sessions.do(f"%%accelerate {flags.format('saved')} --resume\n{LOOP}")
    assert sessions.trained() == expected


FAILS_ON_THE_WAY = """
class Fails(torch.utils.data.Sampler):
    def __len__(self):
        return len(data)
    def __iter__(self):
        if Path("fail").exists():
            raise OSError("no such disk")
        return iter(range(len(data)))

loader = DataLoader(data, batch_size=8, sampler=Fails())
"""


@pytest.mark.parametrize("start", ["fork", "inline"])
def test_an_error_of_the_program_on_the_way_of_a_resume_leaves_nothing_either(sessions: Sessions, start: str) -> None:
    """What was written at the head is not the state of any step; another attempt would meet it."""
    sessions.above = ABOVE + FAILS_ON_THE_WAY
    flags = f"-n 1 --start {start} {SAVES.format('saved')}"
    sessions.end(flags, 5)
    before = sessions._notebook.names["model"][0].weight.tolist()
    Path("fail").touch()
    cell = sessions.run(f"%%accelerate {flags} --resume\n{LOOP}")
    assert str(cell.error) == "no such disk"
    notes = "".join(getattr(cell.error, "__notes__", []))
    assert ("have the values of the checkpoint by now" in notes) == (start == "inline")
    assert (sessions._notebook.names["model"][0].weight.tolist() == before) == (start == "fork")


def test_an_error_while_values_are_written_says_that_some_are(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = f"-n 1 --start inline {SAVES.format('saved')}"
    sessions.end(flags, 5)
    monkeypatch.setattr(difference, "_digest", lambda seen: "another")
    cell = sessions.run(f"%%accelerate {flags} --resume\n{LOOP}")
    assert isinstance(cell.error, CannotResume), cell.error
    assert "have the values of the checkpoint by now" in "".join(getattr(cell.error, "__notes__", []))


def test_ranks_that_stay_say_that_they_have_values_of_a_checkpoint_that_was_refused(sessions: Sessions) -> None:
    sessions.above = ABOVE + UNSTABLE
    flags = f"-n 1 {SAVES.format('saved')}"
    sessions.end(flags, 5)
    before = sessions._notebook.names["model"][0].weight.tolist()
    cell = sessions.run(f"%%accelerate {flags} --keep -o model,step --resume\n{LOOP}")
    assert isinstance(cell.error, CannotResume), cell.error
    assert "have the values of the checkpoint by now" in "".join(getattr(cell.error, "__notes__", []))
    assert sessions._notebook.names["model"][0].weight.tolist() == before
    sessions.run("%accelerate stop")


OUT_OF_MEMORY = """
step = 0
for epoch in range(3):
    for inputs, targets in loader:
        end_here(step)
        if Path("full").exists() and optimizer.state and epoch == 1:
            takes(inputs)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
    history.append(float(loss.detach()))
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_loop_that_ran_out_of_memory_goes_on_from_its_newest_checkpoint_in_parts(
    sessions: Sessions, workers: int
) -> None:
    """What was saved of a run in parts goes on in whole batches, too."""
    above = ABOVE.replace("Dropout(0.2)", "Dropout(0.0)")
    sessions.above = above.replace("shuffle=True", f"shuffle=True, num_workers={workers}")
    flags = f"-n 2 {SAVES} --keep-checkpoints 9"
    weights = torch.tensor(undisturbed(sessions, flags, OUT_OF_MEMORY)[0])
    Path("full").write_text("2")
    sessions.begin()
    cell = sessions.do(f"%%accelerate {flags.format('saved')}\n{OUT_OF_MEMORY}")
    assert re.search(r"ran out of memory at 2 x 4; started again from saved/checkpoint_[24] with 4 x 2", cell.stdout)
    assert torch.allclose(torch.tensor(sessions.trained()[0]), weights, rtol=0, atol=1e-12)
    Path("full").unlink()
    for step in (6, 8):
        sessions.begin()
        resumed = f"{flags.format('again')} --resume saved/checkpoint_{step}"
        cell = sessions.do(f"%%accelerate {resumed}\n{OUT_OF_MEMORY}")
        assert torch.allclose(torch.tensor(sessions.trained()[0]), weights, rtol=0, atol=1e-12)


def test_the_only_rank_of_a_loop_that_ran_out_of_memory_is_not_started_again(sessions: Sessions) -> None:
    sessions.begin()
    Path("full").write_text("2")
    cell = sessions.run(f"%%accelerate -n 1 {SAVES.format('saved')}\n{OUT_OF_MEMORY}")
    assert isinstance(cell.error, torch.OutOfMemoryError)
    assert "not started again: nothing of ours can be cut, since a loop that prepares nothing is left as it is" in str(
        cell.stdout + cell.stderr
    )
    assert Path("saved/checkpoint_4").exists()


@pytest.mark.parametrize("n", [1, 2])
def test_a_run_that_was_over_says_so_and_has_its_results(sessions: Sessions, n: int) -> None:
    flags = f"-n {n} {SAVES}"
    expected = undisturbed(sessions, flags)
    sessions.begin()
    cell = sessions.do(f"%%accelerate {flags.format('undisturbed')} --resume\n{LOOP}")
    assert "continuing from undisturbed/checkpoint_12: step 12\n" in cell.stdout
    said = "the run was over at step 12, its last: nothing was left to train, and its results are in place\n"
    assert said in cell.stdout
    for word in ("nothing was", "whole in each", "same work"):
        assert word not in (cell.stdout + cell.stderr).replace(said, "")
    assert sessions.trained() == expected
