"""A run leaves nothing in the notebook but what it brings back, however it ends.

Everything that can be read of a kernel is read before and after (`notebook_state.py`), and the differences are named.
The first run of a kind may import libraries and start the reaper; the second is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from environments import NEWEST, Environment
from fixtures.kernels import STARTS, Kernels
from kernel import notebook_state
from kernel.harness import RealKernel, accelerate

pytestmark = pytest.mark.slow

MAKES = """
get_ipython().history_manager.enabled = False  # at every fork IPython ends its thread and begins another, later
import os, time, torch
from torch.utils.data import DataLoader, TensorDataset
from nbaccel.testing import MemLimit
import importlib.util as util
spec = util.spec_from_file_location("notebook_state", {path!r})
notebook_state = util.module_from_spec(spec)
spec.loader.exec_module(notebook_state)

net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
data = TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
loss = 0.0
"""

TRAINS = """
import random, numpy, warnings, logging
model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.01), DataLoader(data, 64))
with MemLimit({limit} if accelerator.is_last_process else None):
    for a, b in loader:
        loss = ((model(a) - b) ** 2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
loss = loss.item()
{then}
"""

LEAVES_TRACES = """
os.environ["LEFT"] = "behind"; os.chdir("/"); random.seed(1); numpy.random.seed(1); torch.manual_seed(1)
warnings.simplefilter("ignore"); logging.basicConfig(level=10, force=True); torch.set_default_dtype(torch.float64)
torch.set_num_threads(1); import gc; gc.disable()
"""


def cell(start: str, then: str = "", limit: int | None = None, n: int = 2, flags: str = "--out loss") -> str:
    return accelerate(TRAINS.format(limit=limit, then=then), start, n, flags)


def runs(kernel: RealKernel, start: str) -> None:
    kernel.do(cell(start, LEAVES_TRACES))


def by_fork(kernel: RealKernel) -> None:
    runs(kernel, "fork")


def by_the_zygote(kernel: RealKernel) -> None:
    runs(kernel, "zygote")


def in_the_kernel(kernel: RealKernel) -> None:
    kernel.do(cell("inline", n=1))


def failing(kernel: RealKernel) -> None:
    kernel.run(cell("fork", f"{LEAVES_TRACES}1 / 0")).failed("ZeroDivisionError")


def interrupted(kernel: RealKernel) -> None:
    execution = kernel.begin(cell("fork", "print('under way', accelerator.process_index); time.sleep(60)"))
    execution.until_text("under way 0", "under way 1")
    kernel.interrupt()
    execution.end(30.0).failed("KeyboardInterrupt")


def killed(kernel: RealKernel) -> None:
    kernel.run(cell("fork", "os.kill(os.getpid(), 9)", flags="--oom stop")).failed("RankDied")


def out_of_memory(kernel: RealKernel) -> None:
    assert "started again with 2 x 32" in kernel.do(cell("fork", limit=60_000)).text


def in_ranks_that_stay(kernel: RealKernel) -> None:
    kernel.do("%accelerate start --cpu -n 2")
    kernel.do(f"%%accelerate --out loss\n{TRAINS.format(limit=None, then=LEAVES_TRACES)}")
    kernel.do("%accelerate stop")


@pytest.fixture(scope="module")
def notebook(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealKernel]:
    """A kernel whose temporary files are its own."""
    kernel = RealKernel(environment, tmp_path_factory.mktemp("kernel"), TMPDIR=str(tmp_path_factory.mktemp("tmp")))
    kernel.do(f"%load_ext nbaccel\n{MAKES.format(path=notebook_state.__file__)}")
    for start in STARTS:
        kernel.do(f"import nbaccel; nbaccel.launch(int, 1, start_method={start!r})")
    yield kernel
    kernel.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "run",
    [by_fork, by_the_zygote, in_the_kernel, failing, interrupted, killed, out_of_memory, in_ranks_that_stay],
    ids=lambda run: run.__name__,
)
def test_a_run_leaves_no_trace_in_the_notebook(notebook: RealKernel, run: Callable[[RealKernel], None]) -> None:
    family = notebook.family()
    run(notebook)
    family |= notebook.family()
    notebook.value("notebook_state.state()")
    before = notebook.value("notebook_state.state()")
    run(notebook)
    notebook.extra(family)
    changes = notebook_state.changes(before, notebook.value("notebook_state.state()"))
    if run is in_the_kernel:  # its seed, and what it draws, are the notebook's
        changes = [change for change in changes if not change.startswith("random_states: ")]
    assert changes == []


TRACES = """
import asyncio, gc, logging, multiprocessing.util, random, resource, signal, sys, tempfile, threading, warnings
import matplotlib, numpy, torch
os.environ["LEFT"] = "behind"
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
threading.Thread(target=threading.Event().wait, daemon=True).start()
warnings.simplefilter("ignore", BytesWarning)
random.random()
logging.getLogger("nobody").addHandler(logging.NullHandler())
sys.unraisablehook = print
os.umask(0o77)
left = open("left.txt", "w")
tempfile.mkstemp()
multiprocessing.util.Finalize(None, print, exitpriority=0)
matplotlib.rcParams["font.size"] = 30
get_ipython().events.register("post_run_cell", lambda result: None)
sys.path.append("left")
torch.set_default_dtype(torch.float64)
numpy.seterr(over="ignore")
asyncio.get_event_loop().set_debug(True)
gc.set_threshold(1000)
"""


@pytest.mark.parametrize("environment", [NEWEST], ids=["newest"], indirect=True)
def test_a_trace_of_each_kind_is_seen(new_kernel: Kernels, tmp_path: Path) -> None:
    kernel = new_kernel(TMPDIR=str(tmp_path))
    kernel.do(MAKES.format(path=notebook_state.__file__))
    kernel.value("notebook_state.state()")
    before = kernel.value("notebook_state.state()")
    kernel.do(TRACES)
    changes = notebook_state.changes(before, kernel.value("notebook_state.state()"))
    assert {change.partition(":")[0] for change in changes} == before.keys()
