"""`%load_ext nbaccel` and the first cell: quick, silent, and nothing is touched that was not asked for."""

from __future__ import annotations

import time

import pytest

from fixtures.kernels import Kernels
from kernel.harness import RealKernel, accelerate
from kernel.sockets import listening_addresses

UNTOUCHED = ("torch", "matplotlib.pyplot", "ipywidgets")


@pytest.mark.timed
def test_loading_the_extension_is_quick_and_silent_and_imports_nothing_large(new_kernel: Kernels) -> None:
    kernel = new_kernel()
    kernel.do("import sys")
    cell = kernel.do("%load_ext nbaccel")
    assert cell.seconds < 2  # 0.1 s on an idle machine
    assert cell.text == ""
    assert cell.displays == []
    assert kernel.value(f"[name for name in {UNTOUCHED} if name in sys.modules]") == []


def test_loading_the_extension_opens_no_listening_socket_and_starts_no_process(new_kernel: Kernels) -> None:
    kernel = new_kernel()
    kernel.do("1")
    sockets, family = listening_addresses(kernel.pid), kernel.family()
    kernel.do("%load_ext nbaccel")
    assert listening_addresses(kernel.pid) == sockets
    assert kernel.family() == family


def test_cuda_is_untouched_by_loading_and_by_a_run(kernel: RealKernel, start: str) -> None:
    kernel.do(accelerate("print(accelerator.device)", start))
    assert kernel.value("torch.cuda.is_initialized()") is False


_MEETS_BARS = "nbaccel.features.other_libraries.progress_bars"


@pytest.mark.timed
def test_both_ranks_of_the_first_cell_are_in_the_group_at_once(new_kernel: Kernels) -> None:
    kernel = new_kernel()
    kernel.do("import torch, time\n%load_ext nbaccel\nsent = time.time()")
    body = "import torch.distributed as dist\ndist.barrier()\nseconds = time.time() - sent"
    kernel.do(accelerate(body, flags="--out seconds"))
    assert kernel.value("seconds") < 5 * 1.5  # 1.5 s on an idle machine; this machine may be busy


def test_a_plain_cell_loads_and_looks_for_nothing_that_it_does_not_need(new_kernel: Kernels) -> None:
    kernel = new_kernel()
    kernel.do("import sys, torch\n%load_ext nbaccel")
    kernel.do(accelerate("pass", flags="--plain"))  # a slow one has a panel
    not_needed = ("nbaccel.features.", "matplotlib", "ipywidgets")
    loaded = kernel.value(f"[name for name in sys.modules if name.startswith({not_needed})]")
    assert set(loaded) <= {
        "nbaccel.features.other_libraries",
        _MEETS_BARS,
    }  # torch has loaded tqdm, so ranks may have bars

    kernel.do(accelerate("named = 1", flags="--plain --out named"))
    kernel.do("known = set(sys.modules)")
    kernel.do(accelerate("loaded = sorted(set(sys.modules) - known)", flags="--plain --out loaded"))
    assert set(kernel.value("loaded")) <= {"tqdm.notebook"}  # what stands in for it
    assert kernel.value("sorted(set(sys.modules) - known)") == []

    # Of the kernel's own, each would make the start look at all of its objects.
    kernel.do("from nbaccel.launching.rank import connections, jupyter")
    assert kernel.value("connections.Connections.find(jupyter.kernel_ports()).families") == {}


def test_an_idle_kernel_loads_what_the_first_cell_in_ranks_needs(new_kernel: Kernels) -> None:
    kernel = new_kernel()
    kernel.do("import sys, torch\n%load_ext nbaccel")
    is_loaded = "all(name in sys.modules for name in ('nbaccel.train.setup', 'nbaccel.notebook.cell_mode'))"
    deadline = time.monotonic() + 120
    while not kernel.value(is_loaded):  # each look is a cell, after which the kernel has to be idle again
        assert time.monotonic() < deadline
        time.sleep(3)
    assert kernel.value("'torch._dynamo' in sys.modules") is False, "a later cell may set variables that it reads"
    kernel.do("known = set(sys.modules)")
    kernel.do(accelerate("pass", flags="--plain"))
    assert kernel.value("sorted(name for name in set(sys.modules) - known if name.startswith('nbaccel'))") == []
