"""What a notebook holds when ranks start is the notebook's: no run ends, joins, flushes or deletes any of it.

One cell makes a collection of things with a life of their own; `CHECK` uses every one of them again and names those
that have suffered. Between the two a run ends in one way or another.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from fixtures.kernels import Kernels
from kernel.harness import RealKernel, accelerate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

HOLDS = """
import asyncio, atexit, concurrent.futures, gc, multiprocessing, os, shutil, sqlite3, subprocess, sys, tempfile
import threading, weakref
from multiprocessing import shared_memory
import torch
from torch.utils.data import DataLoader, TensorDataset

class Owner:
    '''Says in a file that one of its ways to end was taken in a rank.'''
    def __init__(self, name): self.name = name
    def end(self):
        if "RANK" in os.environ: open(self.name, "a").write(f"{os.getpid()} ")
    __del__ = end

numbers = TensorDataset(torch.arange(64.))
looked_at = DataLoader(numbers, batch_size=4, num_workers=2)
look = iter(looked_at); first = next(look)
dropped = iter(looked_at); _ = next(dropped)
lasting = DataLoader(numbers, batch_size=4, num_workers=2, persistent_workers=True)
for _ in lasting: pass
loaders = {"train": lasting}
pool = multiprocessing.Pool(2)
thread_pool = multiprocessing.pool.ThreadPool(2)
manager = multiprocessing.Manager(); shared = manager.dict(a=1)
processes = concurrent.futures.ProcessPoolExecutor(2); assert processes.submit(abs, -4).result() == 4
threads = concurrent.futures.ThreadPoolExecutor(2); assert threads.submit(abs, -4).result() == 4
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
folder = tempfile.TemporaryDirectory(); scratch = tempfile.NamedTemporaryFile("w")
written = open("written.txt", "w"); _ = written.write("once\\n")
memory = shared_memory.SharedMemory(create=True, size=8); memory.buf[0] = 7
database = sqlite3.connect("data.db"); _ = database.execute("create table t (x)"); database.commit()
_ = database.execute("insert into t values (1)")  # a transaction that is open
loop = asyncio.new_event_loop(); task = loop.create_task(asyncio.sleep(0, "done"))
mark = Owner("ended-finalizer.txt"); held = set(); finalizer = weakref.finalize(held, mark.end)
at_exit = Owner("ended-atexit.txt"); _ = atexit.register(at_exit.end)
only_at_exit = Owner("ended-only-atexit.txt"); _ = atexit.register(only_at_exit.end); del only_at_exit
threading._register_atexit(Owner("ended-threads.txt").end)
deleted = Owner("ended-deleted.txt")
"""

JOBLIB = """
import joblib
assert joblib.Parallel(2)(joblib.delayed(abs)(-x) for x in range(4)) == [0, 1, 2, 3]
"""

CHECK = """
def _suffered():
    import collections
    def look_goes_on():
        global look
        rest = list(look)
        look = iter(looked_at); next(look)
        return len(rest) == 15
    def file_is_written_once():
        written.flush()
        return open("written.txt").read() == "once\\n"
    def dropped_one_is_whole():
        global dropped
        rest = list(dropped)
        dropped = iter(looked_at); next(dropped)
        return len(rest) == 15
    ways = dict(
        a_loader_that_was_looked_at=look_goes_on,
        another_that_ranks_drop=dropped_one_is_whole,
        persistent_workers=lambda: len(list(lasting)) == 16,
        pool=lambda: pool.map_async(abs, [-1, -2]).get(20) == [1, 2],
        thread_pool=lambda: thread_pool.map_async(abs, [-1, -2]).get(20) == [1, 2],
        manager=lambda: shared["a"] == 1,
        processes=lambda: processes.submit(abs, -9).result(20) == 9,
        threads=lambda: threads.submit(abs, -9).result(20) == 9,
        subprocess=lambda: child.poll() is None,
        temporary_folder=lambda: os.path.isdir(folder.name),
        temporary_file=lambda: os.path.exists(scratch.name),
        file=file_is_written_once,
        shared_memory=lambda: memory.buf[0] == 7 and os.path.exists("/dev/shm/" + memory.name),
        database=lambda: database.execute("select count(*) from t").fetchone() == (1,),
        event_loop=lambda: threads.submit(loop.run_until_complete, asyncio.shield(task)).result(20) == "done",
        finalizer=lambda: finalizer.alive,
        exit_functions=lambda: [name for name in os.listdir() if name.startswith("ended-")] or True,
        joblib=lambda: "joblib" not in globals()
            or joblib.Parallel(2, timeout=20)(joblib.delayed(abs)(-x) for x in range(4)) == [0, 1, 2, 3],
    )
    suffered = {}
    for name, is_well in ways.items():
        try:
            if (found := is_well()) is not True: suffered[name] = f"is not as it was: {found!r}"
        except BaseException as error:
            suffered[name] = f"{type(error).__name__}: {error}"
    return suffered
"""

TAKE_DOWN = """
pool.terminate(); thread_pool.terminate(); manager.shutdown(); processes.shutdown(); threads.shutdown()
child.communicate(b"\\n"); memory.close(); memory.unlink(); database.close(); loop.close()
for _owner in (mark, at_exit, deleted): _owner.name = os.devnull
del look, dropped, lasting, loaders
if "joblib" in globals():
    from joblib.externals.loky import get_reusable_executor; get_reusable_executor().shutdown(wait=True)
"""

REBIND = """
import gc, logging.config
look = dropped = looked_at = pool = thread_pool = shared = manager = processes = threads = child = folder = None
scratch = written = memory = database = loop = task = held = finalizer = deleted = mark = at_exit = None
logging.config.dictConfig({"version": 1})
gc.collect()
"""

ENDINGS = {
    "done": "pass",
    "names bound anew": REBIND,
    "an error": "raise ValueError",
    "SystemExit": "raise SystemExit(3)",
    "one killed": "import os, signal\nif accelerator.process_index: os.kill(os.getpid(), signal.SIGKILL)\n"
    "accelerator.wait_for_everyone()",
    "out of memory": "raise MemoryError",
    "a time limit": "import time\ntime.sleep(60)",
}
FLAGS = {"a time limit": "-t 2", "names bound anew": "--out none"}


@pytest.fixture
def owner(new_kernel: Kernels) -> Iterator[RealKernel]:
    """A kernel that holds everything."""
    kernel = new_kernel()
    kernel.do("%load_ext nbaccel\n" + HOLDS, timeout_s=150)  # Python 3.14 imports torch in each worker anew
    kernel.do(JOBLIB)
    kernel.do(CHECK)
    assert kernel.value("_suffered()") == {}, "without any run"
    yield kernel
    kernel.do(TAKE_DOWN)


@pytest.mark.timeout(300)
def test_what_the_notebook_owns_outlives_every_end_of_a_run(owner: RealKernel) -> None:
    suffered = {}
    for ending, body in ENDINGS.items():
        owner.run(accelerate(body, "fork", flags=FLAGS.get(ending, "")), timeout_s=90)
        suffered[ending] = owner.value("_suffered()")
    for interrupts in (1, 2):
        running = owner.begin(accelerate("import time\nprint('here', flush=True)\ntime.sleep(60)", "fork"))
        running.until_text("here")
        for _ in range(interrupts):
            os.kill(owner.pid, signal.SIGINT)  # a front end signals the whole group, also children of the notebook
        running.end(timeout_s=60)
        suffered[f"{interrupts} interrupts"] = owner.value("_suffered()")
    owner.do("%accelerate start -n 2 --start fork")
    owner.do("%%accelerate\npass")
    suffered["ranks that stay"] = owner.value("_suffered()")
    owner.do("%accelerate stop")
    suffered["their stop"] = owner.value("_suffered()")
    assert {ending: found for ending, found in suffered.items() if found} == {}


@pytest.mark.timeout(120)
def test_ranks_use_pools_executors_loaders_managers_and_files_as_their_own(owner: RealKernel) -> None:
    owner.do(
        accelerate(
            """
            rows = (
                sum(float(x.sum()) for _ in range(2) for x, in loaders["train"]),
                len([*looked_at]),
                pool.map(abs, [-1, -4]),
                thread_pool.map(abs, [-1, -4]),
                processes.submit(abs, -9).result(),
                threads.submit(abs, -9).result(),
                shared["a"],
                (attached := shared_memory.SharedMemory(memory.name)).buf[0],
                joblib.Parallel(2)(joblib.delayed(abs)(-x) for x in range(4)),
            )
            pool.close(), pool.join(), threads.shutdown(), processes.shutdown()
            """,
            "fork",
            flags="--out rows",
        ),
        timeout_s=90,
    )
    assert owner.value("rows") == [4032.0, 16, [1, 4], [1, 4], 9, 9, 1, 7, [0, 1, 2, 3]]
    assert owner.value("_suffered()") == {}
    owner.do(accelerate("_ = written.write('rank\\n'); written.flush()", "fork"))
    owner.do("written.flush()")
    assert (owner.folder / "written.txt").read_text() == "once\nrank\nrank\n"
    error = owner.run(accelerate("next(look)", "fork")).failed("NotInRanks")
    assert "write iter(loader) in the cell" in error.text
    owner.do("look = iter(looked_at)")


@pytest.mark.full
@pytest.mark.parametrize("start", ["fork", "zygote", "kept"])
def test_look_train_look_and_train_again_with_loader_workers(new_kernel: Kernels, start: str) -> None:
    """Weights are those of plain training, whatever was looked at before, and nothing is left."""
    kernel = new_kernel()
    kernel.do(
        """
        %load_ext nbaccel
        import copy, nbaccel, torch
        from torch.utils.data import DataLoader, TensorDataset
        torch.manual_seed(0); torch.set_default_dtype(torch.float64)
        x = torch.randn(64, 4); data = TensorDataset(x, x.sum(1, keepdim=True))
        model = torch.nn.Linear(4, 1); plain = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = DataLoader(data, batch_size=8, num_workers=2)
        lasting = DataLoader(data, batch_size=8, num_workers=2, persistent_workers=True)
        """
    )
    kernel.do("nbaccel.launch(int, 1, start_method='fork'); nbaccel.launch(int, 1, start_method='zygote')")
    kernel.do("_ = list(loader)")  # Python 3.14 starts a server for the notebook's workers
    before = kernel.family()
    train = """
        prepared, descent, batches = accelerator.prepare(model, optimizer, {loader})
        for a, b in batches:
            descent.zero_grad(); accelerator.backward(((prepared(a) - b) ** 2).mean()); descent.step()
        """
    if start == "kept":
        kernel.do("%accelerate start -n 2 --start fork")
    for loader in ("loader", "lasting"):
        kernel.do(f"look = iter({loader}); seen = next(look)")
        if start == "kept":
            kernel.do("%%accelerate" + train.format(loader=loader).replace("\n        ", "\n"))
            kernel.do("%accelerate pull model")
        else:
            kernel.do(accelerate(train.format(loader=loader), start, flags="--out model"))
        assert kernel.value("len(list(look))") == 7
    if start == "kept":
        kernel.do("%accelerate stop")
    kernel.do(
        """
        del look, lasting
        descent = torch.optim.SGD(plain.parameters(), 0.1)
        for _ in range(2):
            for a, b in DataLoader(data, batch_size=16):
                descent.zero_grad(); ((plain(a) - b) ** 2).mean().backward(); descent.step()
        difference = float((plain.weight - model.weight).abs().max())
        """
    )
    assert kernel.value("difference") < 1e-12
    assert kernel.extra(before) == {}
