"""Recovery from running out of memory: from the failure to the next step that is done, in wall time.

Raw is a plain step of the same training, so a ratio says how many steps a recovery costs. Beside it: a retry within
the step (`forward_backward`), a restart of the function (`find_executable_batch_size`, ours and Accelerate's, which
has no word for a peer and would wait for ever in two ranks), and a restart of the ranks from their newest checkpoint.

The last rank fails, once, at the beginning of a step. All samples of a batch are alike, so that the parameters must be
raw's whatever size a batch was tried with. A turn is a launch; how long it takes to start is not counted.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Row, installed
from benchmarks.party import Bout, Sample

__all__ = ["row", "rows"]

_STEPS, _FAILS_AT = 6, 4
_SAMPLES, _WIDTH = 64, 512

Things = tuple[torch.nn.Module, torch.optim.Optimizer]


def _things(device: str = "cpu") -> Things:
    torch.manual_seed(0)
    layers = torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.ReLU(), torch.nn.Linear(_WIDTH, 1)
    model = torch.nn.Sequential(*layers).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=1e-2)


def _sample(step: int, device: str = "cpu") -> Tensor:
    """What all samples of the batch of `step` are; all ranks have the same."""
    return torch.randn(_WIDTH, generator=torch.Generator().manual_seed(step)).to(device)


def _loss(output: Tensor) -> Tensor:
    return output.square().mean()


def _parameters(model: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten()[:1000].cpu() for parameter in model.parameters()])


class _Clock:
    """When each rank began the step that fails, and when it had done one after that; for all attempts of a turn.

    In memory that ranks inherit and share, so that nothing is lost with a process.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._times = RawArray("d", 4 * ranks)

    def reset(self) -> None:
        self._times[:] = [0.0] * len(self._times)

    def enter(self, rank: int) -> bool:
        """A process begins; whether it is a second one, which has used no processor time before the failure."""
        if self._times[4 * rank]:
            self._times[4 * rank + 1] = 0.0
            return True
        return False

    def begin(self, rank: int) -> bool:
        """The step that fails begins; False where it did so before."""
        return self._note(4 * rank)

    def end(self, rank: int) -> None:
        """A step is done."""
        if self._times[4 * rank]:
            self._note(4 * rank + 2)

    def _note(self, at: int) -> bool:
        if self._times[at]:
            return False
        self._times[at : at + 2] = time.monotonic(), time.process_time()
        return True

    def sample(self) -> Sample:
        """From the failure of the last rank to the step of the slowest; processor time is the mean of the ranks."""
        began, began_s, ended, ended_s = (self._times[column::4] for column in range(4))
        if not all(began) or not all(ended):
            raise RuntimeError("a rank did not fail, or did no step after that")
        cpu_s = sum(after - before for after, before in zip(ended_s, began_s, strict=True))
        return Sample(max(ended) - began[-1], cpu_s / self._ranks)


@dataclass(frozen=True)
class _Scene:
    """What the ranks of a turn share.  folder: for checkpoints.  device: "cpu", or "cuda" for a card of each rank."""

    clock: _Clock
    ranks: int
    folder: Path
    device: str = "cpu"

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"

    def enter(self) -> tuple[int, bool]:
        """In each process, once the group is there: its rank, and whether it goes on after another."""
        torch.set_num_threads(1)
        rank = dist.get_rank() if dist.is_initialized() else 0
        return rank, self.clock.enter(rank)

    def end(self, rank: int) -> None:
        """A step is done, also on the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.clock.end(rank)

    def fail(self, step: int, rank: int) -> None:
        """At the beginning of `step`: run out of memory, on the last rank, the first time."""
        if step == _FAILS_AT and self.clock.begin(rank) and rank == self.ranks - 1:
            raise torch.OutOfMemoryError("CPU out of memory. Tried to allocate 2.00 GiB. On purpose.")


def _raw(scene: _Scene) -> Tensor:
    if scene.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    model, optimizer = _things(scene.device)
    if scene.ranks > 1:
        dist.init_process_group("nccl" if scene.device == "cuda" else "gloo")
        model = DistributedDataParallel(model)
    rank, _ = scene.enter()
    for step in range(_STEPS):
        if step == _FAILS_AT:
            scene.clock.begin(rank)
        _loss(model(_sample(step, scene.device).expand(_SAMPLES, -1))).backward()
        optimizer.step()
        optimizer.zero_grad()
        scene.end(rank)
    return _parameters(model)


def _within_the_step(scene: _Scene) -> Tensor:
    from nbaccel import Accelerator

    accelerator = Accelerator(cpu=scene.is_cpu)
    model, optimizer = accelerator.prepare(*_things(scene.device))
    rank, _ = scene.enter()

    for step in range(_STEPS):

        def loss_fn(batch: Tensor, step: int = step) -> Tensor:
            scene.fail(step, rank)
            return _loss(model(batch))

        with accelerator.accumulate(model):
            accelerator.forward_backward(loss_fn, _sample(step, scene.device).expand(_SAMPLES, -1))
            optimizer.step()
            optimizer.zero_grad()
        scene.end(rank)
    return _parameters(model)


def _in_the_function(scene: _Scene, search: Callable[..., Any], accelerator: Any) -> Tensor:
    """search: a decorator that calls the training with smaller and smaller batches."""
    rank, _ = scene.enter()

    def train(batch_size: int) -> Tensor:
        accelerator.free_memory()
        model, optimizer = accelerator.prepare(*_things(scene.device))
        for step in range(_STEPS):
            scene.fail(step, rank)
            accelerator.backward(_loss(model(_sample(step, scene.device).expand(batch_size, -1))))
            optimizer.step()
            optimizer.zero_grad()
            scene.end(rank)
        return _parameters(model)

    trained: Tensor = search(train, starting_batch_size=_SAMPLES)()
    return trained


def _by_the_function(scene: _Scene) -> Tensor:
    from nbaccel import Accelerator, find_executable_batch_size

    return _in_the_function(scene, find_executable_batch_size, Accelerator(cpu=scene.is_cpu))


def _by_accelerates(scene: _Scene) -> Tensor:
    from accelerate import Accelerator
    from accelerate.utils import find_executable_batch_size

    return _in_the_function(scene, find_executable_batch_size, Accelerator(cpu=scene.is_cpu))


class _Batches(torch.utils.data.Dataset[Tensor]):
    """The samples of all steps, in their order."""

    def __init__(self, ranks: int) -> None:
        self._each = _SAMPLES * ranks

    def __len__(self) -> int:
        return _STEPS * self._each

    def __getitem__(self, index: int) -> Tensor:
        return _sample(index // self._each)


def _by_the_launcher(scene: _Scene) -> Tensor:
    from nbaccel import Accelerator

    accelerator = Accelerator(
        cpu=scene.is_cpu, checkpoint_every=f"{_FAILS_AT}steps", checkpoint_dir=scene.folder, resume=True
    )
    loader = torch.utils.data.DataLoader(_Batches(scene.ranks), batch_size=_SAMPLES)
    model, optimizer, loader = accelerator.prepare(*_things(scene.device), loader)
    (rank, goes_on), steps = scene.enter(), 0
    for _ in accelerator.epochs(1):
        for x in loader:
            while steps == _FAILS_AT and not any(scene.folder.glob("checkpoint_*")):
                time.sleep(0.001)  # what is measured is a restart from a checkpoint, not how soon one is there
            scene.fail(steps, rank)
            with accelerator.accumulate(model):
                accelerator.backward(_loss(model(x)))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                steps += 1
                scene.end(rank)
    if goes_on and steps != _STEPS - _FAILS_AT:
        raise RuntimeError(f"{steps} steps were done after the restart, which had a checkpoint of step {_FAILS_AT}")
    return _parameters(model)


def _bout(train: Callable[[_Scene], Tensor], ranks: int, device: str = "cpu") -> Bout:
    """In the contender's process: each turn is a launch of `train`."""
    from nbaccel.launching.api import launch

    if device == "cuda":
        os.environ.pop("ACCELERATE_USE_CPU", None)  # a party's, for the rows that run on the host
    clock, results = _Clock(ranks), []

    def turn() -> Sample:
        clock.reset()
        with tempfile.TemporaryDirectory(prefix="nbaccel-bench-") as folder, _quiet():
            scene = _Scene(clock, ranks, Path(folder), device)
            run = launch(train, ranks, (scene,), start_method="fork", cpu=scene.is_cpu, oom="shrink")
        results[:] = [run.value]
        return clock.sample()

    return Bout(turn, lambda: results[0])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what a launch says about its restarts."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def row(ranks: int, device: str = "cpu") -> Row:
    """Of so many ranks, each with a device of its own."""
    trainings: dict[str, Callable[[_Scene], Tensor]] = {
        "raw": _raw,
        "nbaccel, in the step": _within_the_step,
        "nbaccel, the function": _by_the_function,
        "nbaccel, the ranks": _by_the_launcher,
    }
    if ranks == 1:
        trainings["Accelerate, the function"] = _by_accelerates
    makes = {name: (lambda train=train: _bout(train, ranks, device)) for name, train in trainings.items()}  # type: ignore[misc]
    return Row(
        f"recovery, {ranks} rank{'s' if ranks > 1 else ''}{'' if device == 'cpu' else f' on {device}'}",
        installed(makes, {"Accelerate, the function": "accelerate"}),
        unit="ms",
        turns=5,
        judged="wall",
    )


def rows() -> Sequence[Row]:
    return [row(ranks) for ranks in (1, 2)]
