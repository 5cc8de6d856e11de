"""How a batch size is found, by us and by others: ``make bench ROWS=planner``.

Two models under three limits each (`MemLimit`, byte-exact). The truth is the largest batch that a plain loop trains
with, found by trying. Each way begins where its users begin: Accelerate's decorator (x 0.9) and halving at 1024,
Lightning's binsearch at 2, `find_batch_size` with a cap of 4096. A row says how many sizes were tried, how many
of those ran out of memory, what share of the truth was returned, and in how many seconds.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.findings import Finding, options_of, write
from hungry import CNN, GPT, Hungry
from nbaccel import Accelerator
from nbaccel.testing import MemLimit

LIMITS_BYTES = (5_000_000, 20_000_000, 60_000_000)
START = 1024
OURS = "nbaccel"


class Device(MemLimit):
    """A `MemLimit` that complains in CUDA's words, the only ones that all ways understand."""

    def _refuse(self, asked_bytes: int) -> None:
        try:
            super()._refuse(asked_bytes)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(str(error).replace("CPU", "CUDA", 1)) from None


@dataclass
class Sizes:
    """The batch sizes that a way has run, in order; each once per trial."""

    tried: list[int]

    def note(self, size: int) -> None:
        if self.tried[-1:] != [size]:
            self.tried.append(size)


Way = Callable[[Hungry, int, Sizes], tuple[int, int]]
"""Returns the size it found, and how many trials ran out of memory."""


def ours(hungry: Hungry, limit_bytes: int, sizes: Sizes) -> tuple[int, int]:
    accelerator = Accelerator(cpu=True)
    model, _ = accelerator.prepare(*hungry.make_seeded())

    def loss_fn(batch: Any) -> Tensor:
        sizes.note(len(batch if isinstance(batch, Tensor) else batch[0]))
        return hungry.loss(model, batch)

    with Device(limit_bytes) as device:
        device.count(model)
        return accelerator.find_batch_size(loss_fn, hungry.batch(2)), device.refusals


def decorated(reduce: Callable[[int], int] | None) -> Way:
    """Accelerate's decorator, around a training that is built anew in each try, as its guide shows."""
    from accelerate.utils import find_executable_batch_size

    def way(hungry: Hungry, limit_bytes: int, sizes: Sizes) -> tuple[int, int]:
        def train(batch_size: int) -> int:
            sizes.note(batch_size)
            model, optimizer = hungry.make_seeded()
            device.count(model)
            for _ in range(2):
                batch = hungry.batch(batch_size)
                loss = hungry.loss(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return batch_size

        state = {"size": START}

        def smaller() -> int:
            state["size"] = reduce(state["size"]) if reduce else state["size"]
            return state["size"]

        options = {"reduce_batch_size_fn": smaller} if reduce else {}
        with Device(limit_bytes) as device:
            return find_executable_batch_size(train, starting_batch_size=START, **options)(), device.refusals

    return way


class _Samples(Dataset[Any]):
    """As many samples as Lightning may ask for."""

    def __init__(self, hungry: Hungry) -> None:
        self._batch = hungry.batch(1)

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Any:
        return self._batch[0] if isinstance(self._batch, Tensor) else tuple(part[0] for part in self._batch)


def lightning(hungry: Hungry, limit_bytes: int, sizes: Sizes) -> tuple[int, int]:
    """``Tuner.scale_batch_size(mode="binsearch")``."""
    import lightning.pytorch as pl
    from lightning.pytorch.tuner import Tuner

    class Module(pl.LightningModule):
        batch_size = 2

        def __init__(self) -> None:
            super().__init__()
            self.model, self._optimizer = hungry.make_seeded()

        def training_step(self, batch: Any, index: int) -> Tensor:
            sizes.note(len(batch if isinstance(batch, Tensor) else batch[0]))
            return hungry.loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self._optimizer

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(_Samples(hungry), batch_size=self.batch_size)

    module = Module()
    with tempfile.TemporaryDirectory() as folder, Device(limit_bytes) as device:
        device.count(module)
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder,
        )  # fmt: skip
        found = Tuner(trainer).scale_batch_size(module, mode="binsearch", init_val=2)
    return found or 0, device.refusals


@dataclass(frozen=True, slots=True)
class Landing:
    """How a way came to its batch size. share: of the largest that fits. was_run: whether it ever trained with it."""

    trials: int
    failed: int
    size: int
    share: float
    was_run: bool
    seconds: float

    @classmethod
    def of(cls, way: Way, hungry: Hungry, limit_bytes: int, largest: int) -> Landing:
        sizes = Sizes([])
        began = time.perf_counter()
        size, failed = way(hungry, limit_bytes, sizes)
        seconds = time.perf_counter() - began
        return cls(len(sizes.tried), failed, size, size / largest, size in sizes.tried, seconds)

    def __str__(self) -> str:
        share = f"{self.share:.1%}{'' if self.was_run else '*'}"
        return f"{self.trials} ({self.failed}) {self.size:5} {share:>7} {self.seconds:4.1f}"

    def findings(self, what: str, name: str) -> Iterator[Finding]:
        most = {"trials": 7, "failed": 1} if name == OURS else {}
        yield Finding(what, f"{name}: trials", self.trials, "", at_most=most.get("trials"))
        yield Finding(what, f"{name}: of them out of memory", self.failed, "", at_most=most.get("failed"))
        yield Finding(what, f"{name}: landed", self.share * 100, "%", at_least=97 if most else None)
        yield Finding(what, f"{name}: took", self.seconds, "s")


def report() -> Iterator[Finding]:
    """Prints a table of its own: a line per model and limit."""
    ways: dict[str, Way] = {
        OURS: ours,
        "Accelerate x0.9": decorated(None),
        "halving": decorated(lambda size: size // 2),
        "Lightning binsearch": lightning,
    }
    print(f"{'model':5} {'limit':>6} {'truth':>6}  " + "".join(f"{name:>31}" for name in ways))
    print(f"{'':5} {'MB':>6} {'':>6}  " + f"{'trials(failed) size  share     s':>31}" * len(ways), flush=True)
    for hungry in (GPT, CNN):
        for limit_bytes in LIMITS_BYTES:
            largest = hungry.largest(limit_bytes)
            landings = {name: Landing.of(way, hungry, limit_bytes, largest) for name, way in ways.items()}
            cells = "".join(f"{landing!s:>31}" for landing in landings.values())
            print(f"{hungry.name:5} {limit_bytes / 1e6:6.0f} {largest:6}  {cells}", flush=True)
            what = f"{hungry.name} in {limit_bytes / 1e6:.0f} MB, {largest} samples fit"
            for name, landing in landings.items():
                yield from landing.findings(what, name)
    print("* returned without having been run")


def main() -> int:
    options = options_of(__doc__)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # Lightning tells of every trial
    findings = list(report())
    write(findings, options.json)
    missed = [f"{one.what}, {one.who}: {one.verdict}" for one in findings if not one.holds]
    print("\n".join(missed), end="\n" * bool(missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
