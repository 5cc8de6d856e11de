"""What is told of a loop over a prepared loader while it goes on: how much of its time it waits for batches."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from nbaccel import Accelerator
from nbaccel.base.events import Event, Gauge, Progress, outlet


class Samples(Dataset[torch.Tensor]):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.ones(1)


class Looker:
    """Looks at every gauge a few hundred times per second, as a launcher's thread does a few times."""

    def __init__(self) -> None:
        self.gauges: list[Gauge] = []
        self.newest: Progress | None = None
        self.is_over = threading.Event()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Gauge):
            self.gauges.append(event)

    def run(self) -> None:
        while not self.is_over.wait(0.003):
            for gauge in list(self.gauges):
                if isinstance(progress := gauge.read(), Progress):
                    self.newest = progress


def waited(loader: DataLoader[torch.Tensor], work_s: float, batches: int) -> float | None:
    looker = Looker()
    thread = threading.Thread(target=looker.run)
    thread.start()
    try:
        with outlet(looker):
            for _ in range(3):  # loops are added up: one alone may be too short
                for number, _ in enumerate(loader):
                    time.sleep(work_s)
                    if number == batches:
                        break
    finally:
        looker.is_over.set()
        thread.join()
    assert looker.newest is not None
    return looker.newest.waiting


@pytest.mark.parametrize(
    ("fetch_s", "work_s", "least", "most"), [(0.02, 0.002, 0.7, 1.0), (0.002, 0.02, 0.0, 0.4), (0.01, 0.01, 0.3, 0.8)]
)
def test_the_time_that_a_loop_waits_for_data_is_seen(fetch_s: float, work_s: float, least: float, most: float) -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(Samples(fetch_s), 1))
    waiting = waited(loader, work_s, batches=15)
    assert waiting is not None
    assert least <= waiting <= most


def test_nothing_is_said_after_a_few_looks() -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(Samples(0.0), 1))
    looker = Looker()
    with outlet(looker):
        for number, _ in enumerate(loader):
            if number == 10:
                (progress,) = [gauge.read() for gauge in looker.gauges]
                assert isinstance(progress, Progress)
                assert progress.waiting is None
