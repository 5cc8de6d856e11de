"""Advice: the next move for what GPUs, their driver and NCCL say, read off the text of the error alone."""

from __future__ import annotations

import pytest

from nbaccel.launching.attempts import OomKillWatch
from nbaccel.launching.diagnosis import advice, diagnose
from nbaccel.launching.ipc.reports import ErrorLink, RankReport
from nbaccel.launching.processes.rank_results import RankResults
from nbaccel.launching.tasks.function_task import FunctionTask

BAD_FORK = "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must …"


def next_move(text: str, *, is_fork: bool = True) -> str:
    name = text.partition(":")[0].rpartition(".")[2]
    return advice([ErrorLink(name, text.splitlines(), [])], OomKillWatch(), is_fork=is_fork)


@pytest.mark.parametrize(
    ("text", "move"),
    [
        (
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system error\nLast error:\n"
            "Error while creating shared memory segment /dev/shm/nccl-sBJb8i (size 9637892), error: No space left (28)",
            "/dev/shm is full, and NCCL passes through it what GPUs without a direct way exchange: start the container "
            "with --shm-size=1g, or set os.environ['NCCL_SHM_DISABLE'] = '1'",
        ),
        (
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, invalid usage\nLast error:\n"
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 50",
            "Two ranks use one GPU, and NCCL wants one for each: put the model on accelerator.device",
        ),
        (
            "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device",
            "was built without code for this GPU; %accelerate doctor says for which torch was. Install a build",
        ),
        (
            "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
            "The GPU takes one process at a time (exclusive mode) and another one holds it, or it takes none",
        ),
        (BAD_FORK, "restart the kernel, and ranks can be forked again, or let them start from a clean process by "),
        (
            "RuntimeError: Unable to handle autograd's threading in combination with fork-based multiprocessing.",
            "The rank is a fork of the notebook, which has used CUDA, or a backward of autograd",
        ),
        (
            f"RuntimeError: Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback …\n{BAD_FORK}",
            "A worker of a DataLoader used CUDA, which no fork of a process that uses it can",
        ),
    ],
)
def test_what_a_card_or_nccl_says_has_a_next_move(text: str, move: str) -> None:
    assert move in next_move(text)


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: CUDA driver initialization failed, you might not have a CUDA gpu.",
        "torch.AcceleratorError: CUDA error: initialization error",
    ],
)
def test_a_driver_that_lets_no_process_in_is_not_blamed_on_a_fork(text: str) -> None:
    assert "The rank is a fork of the notebook" in next_move(text)
    assert "The driver of the GPU does not let this process in: `nvidia-smi` in a terminal" in next_move(
        text, is_fork=False
    )


def test_memory_and_mistakes_are_left_to_those_who_know_more() -> None:
    assert next_move("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB") == ""
    assert next_move("RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)") == ""


@pytest.mark.parametrize(("started_clean", "move"), [(False, "is a fork of the notebook"), (True, "does not let this")])
def test_a_failed_run_says_it_by_how_its_ranks_started(started_clean: bool, move: str) -> None:
    text = "RuntimeError: CUDA driver initialization failed, you might not have a CUDA gpu."
    ended = RankResults(
        FunctionTask(print),
        [RankReport("failed", -1, links=[ErrorLink("RuntimeError", [text], [])])],
        [1],
        [False],
        0,
        False,
        False,
        1.0,
    )
    error = diagnose(ended, started_clean, OomKillWatch(), lambda name: None)
    assert error is not None
    assert move in error.__notes__[-1]
