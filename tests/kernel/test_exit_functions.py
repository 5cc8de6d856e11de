"""A rank's own last words are complete, and its kernel's are not its to say."""

from __future__ import annotations

import pytest

from kernel.harness import RealKernel, accelerate


def test_a_ranks_atexit_handlers_and_threads_finish(kernel: RealKernel, start: str) -> None:
    kernel.do(
        accelerate(
            """
            import atexit, os, threading, time
            from pathlib import Path

            rank = os.environ["RANK"]
            atexit.register(Path(f"atexit-{rank}").write_text, "complete")

            def late():
                time.sleep(0.5)
                Path(f"thread-{rank}").write_text("complete")

            threading.Thread(target=late).start()
            """,
            start,
        )
    )
    for rank in range(2):
        for name in ("atexit", "thread"):
            file = kernel.folder / f"{name}-{rank}"
            assert file.read_text() == "complete", file
            file.unlink()


def test_the_kernels_atexit_handlers_do_not_run_in_ranks(kernel: RealKernel, start: str) -> None:
    trace = kernel.folder / f"kernel-atexit-{start}"
    kernel.do(f"import atexit; _ = atexit.register(open, {str(trace)!r}, 'w')")
    kernel.do(accelerate("print('ran')", start))
    kernel.run(accelerate("raise ValueError", start)).failed("ValueError")
    kernel.do("atexit.unregister(open)")
    assert not trace.exists()


def test_atexit_handlers_run_after_an_exception_too(kernel: RealKernel, start: str) -> None:
    kernel.run(
        accelerate(
            """
            import atexit, os
            from pathlib import Path
            atexit.register(Path("atexit-failed").write_text, "complete")
            raise ValueError("on purpose")
            """,
            start,
            n=1,
        )
    ).failed("ValueError")
    assert (kernel.folder / "atexit-failed").read_text() == "complete"


LOGS_TO_WANDB = """
import os, wandb
if os.environ["RANK"] == "0":
    run = wandb.init(mode="offline", dir=os.getcwd(), settings=wandb.Settings(silent=True, console="off"))
    for step in range(25):
        run.log({"loss": 1 / (step + 1)})
    folder = run.dir
"""

READS_WANDB = """
import glob, os, struct
from wandb.proto import wandb_internal_pb2

def records(path):
    '''The records of an offline run: a LevelDB log of 32 kB blocks with 7 bytes above the first record.'''
    data = open(path, "rb").read()
    at, record = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)  # checksum; kind: 1 whole, 2 first, 3 middle, 4 last
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""

(path,) = glob.glob(os.path.join(os.path.dirname(folder), "*.wandb"))
kinds = [record.WhichOneof("record_type") for record in records(path)]
"""


@pytest.mark.full
@pytest.mark.timeout(120)
def test_an_offline_wandb_run_without_finish_is_complete(kernel: RealKernel, start: str) -> None:
    if kernel.run("import wandb").status != "ok":
        pytest.skip("wandb is not installed in this environment")
    before = kernel.family()
    kernel.do(accelerate(LOGS_TO_WANDB, start, flags="--out folder"), timeout_s=90)
    assert kernel.extra(before) == {}
    kernel.do(READS_WANDB)
    kinds = kernel.value("kinds")
    assert kinds.count("history") == 25, kinds
    assert "exit" in kinds, kinds


def test_what_ranks_put_into_a_queue_of_the_notebook_arrives_whole_and_in_order(kernel: RealKernel) -> None:
    """Also more than a pipe takes, which a thread of the rank writes while the rank ends."""
    kernel.do("import multiprocessing, queue; q = multiprocessing.Queue(); j = multiprocessing.JoinableQueue()")
    cell = kernel.do(
        accelerate(
            """
            for i in range(3):
                q.put((accelerator.process_index, i, b"x" * 200_000))
            j.put(accelerator.process_index)
            """,
            "fork",
        )
    )
    assert "at work still" not in cell.text
    assert cell.seconds < 9
    kernel.do("got = [q.get(timeout=20) for _ in range(6)]; counted = sorted(j.get(timeout=20) for _ in range(2))")
    kernel.do("j.task_done(); j.task_done(); j.join()")
    assert kernel.value("sorted((rank, i, len(item)) for rank, i, item in got)") == [
        [rank, i, 200_000] for rank in range(2) for i in range(3)
    ]
    assert kernel.value("[[i for rank, i, _ in got if rank == wanted] for wanted in range(2)]") == [[0, 1, 2]] * 2
    assert kernel.value("counted") == [0, 1]
    kernel.do("q.close(); j.close(); q.join_thread(); j.join_thread()")


@pytest.mark.full
def test_a_thread_that_is_cut_at_the_end_of_its_rank_is_named(kernel: RealKernel) -> None:
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), name='writer').start()"
    cell = kernel.do(accelerate(code, "fork", n=1))
    assert "a rank was ended 10 s after its cell, at work still: thread writer." in cell.text
