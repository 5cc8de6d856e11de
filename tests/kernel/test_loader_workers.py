"""Loaders with worker processes in ranks: data sets that a cell defines, under each default of Python.

Python 3.14 starts processes by a fork server, which knows no class of the notebook. Older versions are made to do so
here: what `multiprocessing` takes for the platform's default is changed in the kernel. A zygote has a default of its
own, so its ranks meet the fork server only where the tests run on 3.14.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernel.harness import RealKernel, accelerate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DATA = """
import gc, multiprocessing, multiprocessing.context as contexts, multiprocessing.forkserver, torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

class Numbers(Dataset):
    def __len__(self): return 16
    def __getitem__(self, i): return torch.tensor(float(i))

def loaders(dataset, workers=2, **options):
    return [DataLoader(dataset, batch_size=2, num_workers=workers, persistent_workers=persistent, **options)
            for persistent in (False, True)]
"""
ALL_LOADERS = """
sums = []
for raw, loader in zip(loaders(data), map(accelerator.prepare, loaders(data))):
    for epoch in range(2):
        sums.append(sum(float(x.sum()) for x in raw))
        sums.append(sum(float(accelerator.gather(x).sum()) for x in loader))
"""
"""120 is the sum of the samples, and each rank sees all of them, by itself or together with its peers."""

DEFAULTS = {
    "the_default": "",
    "fork_server": 'contexts._default_context._default_context = contexts._concrete_contexts["forkserver"]',
}

PUT_BACK = """
contexts._default_context._default_context = _default
contexts._default_context._actual_context = None
gc.collect()  # semaphores, which the tracker would report as leaked
multiprocessing.forkserver._forkserver._stop()
multiprocessing.resource_tracker._resource_tracker._stop()
"""


@pytest.fixture(params=DEFAULTS)
def with_data(kernel: RealKernel, request: pytest.FixtureRequest) -> Iterator[RealKernel]:
    """A kernel with a data set of its own, whose `multiprocessing` starts processes as Python does, or by a server."""
    kernel.do(DATA + "_default = contexts._default_context._default_context")
    kernel.do("contexts._default_context._actual_context = None\n" + DEFAULTS[request.param])
    yield kernel
    kernel.do(PUT_BACK)


def test_a_data_set_of_the_notebook_has_workers_in_ranks(with_data: RealKernel, start: str) -> None:
    with_data.do("data = Numbers()")
    with_data.do(accelerate(ALL_LOADERS, start, flags="--out sums"))
    assert with_data.value("sums") == [120.0] * 8


def test_a_data_set_of_the_notebook_has_workers_where_the_cell_runs_in_the_kernel(with_data: RealKernel) -> None:
    with_data.do("data = Numbers(); before = multiprocessing.get_start_method()")
    with_data.do(accelerate(ALL_LOADERS, "inline", n=1, flags="--out sums"))
    assert with_data.value("sums") == [120.0] * 8
    assert with_data.value("multiprocessing.get_start_method() == before")


@pytest.mark.sample(1)
def test_workers_that_the_notebook_used_before_do_not_disturb_those_of_ranks(with_data: RealKernel) -> None:
    """The kernel's fork server and resource tracker are no children of a rank."""
    with_data.do("data = TensorDataset(torch.arange(16.)); looked_at = sum(float(x.sum()) for x, in loaders(data)[0])")
    with_data.do(accelerate(ALL_LOADERS.replace("for x in", "for x, in"), "fork", flags="--out sums"))
    assert with_data.value("sums") == [120.0] * 8
    with_data.do("after = sum(float(x.sum()) for x, in loaders(data)[0])")
    assert (with_data.value("looked_at"), with_data.value("after")) == (120.0, 120.0)


@pytest.mark.parametrize(
    "call", ["nbaccel.launch(total, 2).value", "nbaccel.notebook_launcher(total, num_processes=2)"]
)
def test_a_data_set_of_the_notebook_has_workers_in_functions(with_data: RealKernel, call: str) -> None:
    with_data.do("import nbaccel\ndef total(): return [sum(float(x.sum()) for x in raw) for raw in loaders(Numbers())]")
    with_data.do(f"sums = {call}")
    assert with_data.value("sums") == [120.0, 120.0]


CHOICES = {
    "for_the_loader": ("", 'multiprocessing_context="spawn"'),
    "for_the_notebook": ('multiprocessing.set_start_method("spawn", force=True)', ""),
}


@pytest.fixture(params=CHOICES)
def chosen(kernel: RealKernel, request: pytest.FixtureRequest) -> Iterator[str]:
    """The options of a loader in a kernel whose user chose that workers start afresh."""
    everywhere, here = CHOICES[request.param]
    kernel.do(f"{DATA}\n{everywhere}")
    yield here
    kernel.do("_default = contexts._default_context._default_context\n" + PUT_BACK)


def test_a_start_method_that_the_user_chose_stays(kernel: RealKernel, chosen: str) -> None:
    cell = f"""
    iterator = iter(loaders(TensorDataset(torch.arange(16.)), workers=1, {chosen})[0])
    methods = sorted({{type(worker._popen).__module__ for worker in iterator._workers}})
    total = sum(float(x.sum()) for x, in iterator)
    """
    kernel.do(accelerate(cell, "fork", n=1, flags="--out methods,total"))
    assert kernel.value("methods") == ["multiprocessing.popen_spawn_posix"]
    assert kernel.value("total") == 120.0


@pytest.mark.full
def test_a_class_of_the_notebook_in_workers_that_start_afresh_is_named(kernel: RealKernel, chosen: str) -> None:
    kernel.do("from torch.utils.data import Subset")
    cell = f"sums = [float(x.sum()) for x in loaders(Subset(Numbers(), range(4)), workers=1, {chosen})[0]]"
    error = kernel.run(accelerate(cell, "fork", n=1)).failed("RuntimeError")
    assert "by spawn, so they cannot know Numbers, which is defined in the notebook" in error.text
    assert "multiprocessing_context" in error.text
    assert "memory" not in error.text.rpartition("on rank")[2]
