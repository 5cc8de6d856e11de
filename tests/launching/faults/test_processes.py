"""Faults 1 to 10 of 26, as launched ranks meet them: processes that raise, die, hang, leave or are left.

Each test is named after its fault; what surrounds each mechanism is tested beside it in the other rooms.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from nbaccel import Accelerator, CollectiveMismatch, RankDied, launch
from nbaccel.errors import RanksFailed

pytestmark = pytest.mark.slow


def trains(rank: int, fault: Callable[[], object]) -> None:
    """Gathers for ever, until `fault` comes over `rank` in its third step."""
    accelerator = Accelerator(cpu=True)
    for step in range(10_000):
        if (step, accelerator.process_index) == (3, rank):
            fault()
        accelerator.gather(torch.ones(1))


def boom() -> None:
    raise ValueError("boom: expected 10 classes, got 11")


@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", range(3))
def test_fault_01_a_rank_raises(rank: int) -> None:
    for _ in range(5):
        with pytest.raises(ValueError, match="boom: expected 10 classes, got 11") as caught:
            launch(trains, 3, (rank, boom), start_method="fork", cpu=True)
        assert f"raised on rank {rank} of 3" in caught.value.__notes__[0]


def test_fault_02_sigkill_in_a_collective() -> None:
    with pytest.raises(RankDied, match=r"rank 1 of 2 was killed by SIGKILL \(signal 9\): .*memory") as caught:
        launch(trains, 2, (1, lambda: os.kill(os.getpid(), signal.SIGKILL)), start_method="fork", cpu=True)
    assert (caught.value.rank, caught.value.exit_code) == (1, -signal.SIGKILL)


def turns() -> None:
    while True:
        pass


def test_fault_03_a_rank_hangs() -> None:
    with pytest.raises(RanksFailed, match="rank 1 seems to hold up the others") as caught:
        launch(trains, 2, (1, turns), start_method="fork", cpu=True, hang_timeout_s=1.0)
    assert re.search(r"  rank 1: .*test_processes.py, line \d+, in turns: ", str(caught.value)), str(caught.value)


CALLS: dict[str, tuple[Callable[[Accelerator], object], Callable[[Accelerator], object]]] = {
    "operation": (lambda here: here.reduce(torch.ones(2)), lambda here: here.gather(torch.ones(2))),
    "shape": (lambda here: here.gather(torch.ones(2)), lambda here: here.gather(torch.ones(3))),
    "dtype": (lambda here: here.gather(torch.ones(2)), lambda here: here.gather(torch.ones(2, dtype=torch.int32))),
    "barrier": (lambda here: here.gather(torch.ones(2)), lambda here: here.wait_for_everyone()),
}


def mismatches(kind: str) -> str:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(CollectiveMismatch) as caught:
        CALLS[kind][accelerator.process_index](accelerator)
    return str(caught.value)


@pytest.mark.parametrize("kind", CALLS)
def test_fault_04_different_collectives(kind: str) -> None:
    for text in launch(mismatches, 2, (kind,), start_method="fork", cpu=True).values:
        assert re.search(r"rank 0: (reduce|gather)", text), text
        assert re.search(r"rank 1: (gather|wait_for_everyone)", text), text


def test_fault_05_early_exit_of_a_rank() -> None:
    for _ in range(20):
        assert launch(int, 2, start_method="fork", cpu=True).values == [0, 0]


def ignores() -> None:
    while True:
        with contextlib.suppress(BaseException):  # as many a training loop does
            time.sleep(0.01)


def waits_in_a_barrier(go: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    os.write(go, b"!")
    if dist.get_rank() == 0:
        time.sleep(60)
    dist.barrier()


WORKERS: dict[str, Callable[[int], object]] = {
    "in a loop": lambda go: (os.write(go, b"!"), turns()),
    "in a barrier": waits_in_a_barrier,
    "with a bare except": lambda go: (os.write(go, b"!"), ignores()),
}


@pytest.mark.parametrize("worker", WORKERS)
def test_fault_06_the_kernel_is_interrupted(worker: str) -> None:
    reading, writing = os.pipe()

    def interrupt() -> None:
        """Once when both ranks are at it, and a second time when they do not listen."""
        for _ in range(2):
            os.read(reading, 1)
        os.kill(os.getpid(), signal.SIGINT)
        if not is_over.wait(3):
            os.kill(os.getpid(), signal.SIGINT)

    is_over = threading.Event()
    presser = threading.Thread(target=interrupt)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        launch(WORKERS[worker], 2, (writing,), start_method="fork", cpu=True)
    is_over.set()
    presser.join()
    for fd in (reading, writing):
        os.close(fd)
    assert launch(int, 2, start_method="fork", cpu=True).values == [0, 0]


KERNEL = """
import os, sys, time
import torch, torch.distributed as dist
from nbaccel import launch

def rank(number):
    dist.init_process_group("gloo")
    print("pid", os.getpid(), flush=True)
    if number() == 0:
        while True:
            try:
                time.sleep(0.01)
            except BaseException:
                pass
    dist.barrier()

launch(rank, 2, (dist.get_rank,), start_method="fork", cpu=True)
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_gone(pids: list[int], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if is_alive(pid)]}"
        time.sleep(0.02)  # they are no children of ours, so nobody can wait for them


def pids_said(kernel: subprocess.Popen[str]) -> list[int]:
    assert kernel.stdout is not None
    lines = [kernel.stdout.readline() for _ in range(2)]
    return [int(re.findall(r"pid (\d+)", line)[0]) for line in lines]


def test_fault_07_the_kernel_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", KERNEL], stdout=subprocess.PIPE, text=True) as kernel:
        pids = pids_said(kernel)
        kernel.kill()
        assert_gone(pids, within_s=10)  # 0.1 s on an idle machine


SAVES = """
import os, sys
import torch
from nbaccel import Accelerator, launch

def train(folder):
    accelerator = Accelerator(cpu=True, checkpoint_every="100000steps", checkpoint_dir=folder)
    model = torch.nn.Linear(3200, 3200)  # 41 MB, and twice that in the optimizer
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    data = accelerator.prepare(torch.utils.data.DataLoader(torch.ones(10_000, 3200), 1))
    for epoch in accelerator.epochs(1):
        for step, x in enumerate(data):
            accelerator.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                print("pid", os.getpid(), flush=True)

launch(train, 2, (sys.argv[1],), start_method="fork", cpu=True)
"""


def test_fault_08_the_session_ends(tmp_path: Path) -> None:
    program = [sys.executable, "-c", SAVES, str(tmp_path / "saved")]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as kernel:
        pids = pids_said(kernel)
        kernel.terminate()
        assert_gone(pids, within_s=25)  # a last checkpoint may take 20
    (saved,) = (tmp_path / "saved").iterdir()
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3200, 3200)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()), DataLoader(torch.ones(10_000, 3200), 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of another number of ranks
        accelerator.load_state(saved)
    assert accelerator._lifecycle.training().step >= 4


def test_fault_09_the_launching_thread_ends() -> None:
    values: list[object] = []

    def run() -> None:
        values.extend(launch(lambda: time.sleep(0.5) or 7, 2, start_method="fork", cpu=True).values)

    def begin() -> None:
        threading.Thread(target=run, name="launches").start()

    starter = threading.Thread(target=begin)
    starter.start()
    starter.join()  # the thread that began it all is gone while the ranks work
    (launching,) = (thread for thread in threading.enumerate() if thread.name == "launches")
    launching.join()
    assert values == [7, 7]


def test_fault_10_fork_after_openmp() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.randn(400, 400)
        expected = float((x @ x).softmax(-1).sum())
        totals = launch(lambda: float((x @ x).softmax(-1).sum()), 2, start_method="fork", cpu=True).values
        assert totals == pytest.approx([expected] * 2)
    finally:
        torch.set_num_threads(threads)
