"""Ranks train whatever their kernel did before: computed with many threads, or touched CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from fixtures.kernels import Kernels
from kernel.harness import RealKernel, accelerate
from starts import ZYGOTE, needs_clean_start

WARMS_UP = """
import numpy as np, torch
torch.set_num_threads(2)
a = torch.randn(1500, 1500)
a @ a
torch.nn.functional.conv2d(torch.randn(8, 3, 64, 64, requires_grad=True), torch.randn(16, 3, 3, 3)).sum().backward()
np.ones((1500, 1500)) @ np.ones((1500, 1500))
"""

TRAINS = """
import os, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 14 * 14, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = torch.utils.data.TensorDataset(torch.randn(64, 1, 16, 16), torch.arange(64) % 4)
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
losses = []
for epoch in range(3):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
parent = os.getppid()
"""


def assert_trains(kernel: RealKernel, start: str) -> None:
    kernel.do("losses = parent = None")
    kernel.do(accelerate(TRAINS, start, flags="--out losses,parent"), timeout_s=30)
    losses = kernel.value("losses")
    assert len(losses) == 12
    assert losses[-1] < losses[0]


def was_forked_from_the_kernel(kernel: RealKernel) -> bool:
    """Whether the ranks of the last training were children of the kernel and not of the zygote."""
    return bool(kernel.value("parent") == kernel.pid)


@pytest.mark.full
def test_ranks_train_after_the_kernel_used_all_its_threads(kernel: RealKernel, start: str) -> None:
    for _ in range(5):
        kernel.do(WARMS_UP)
        assert_trains(kernel, start)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_20_of_20_trainings_end_after_the_kernel_used_all_its_threads(kernel: RealKernel, start: str) -> None:
    for _ in range(20):
        kernel.do(WARMS_UP)
        assert_trains(kernel, start)


def test_a_kernel_without_cuda_is_forked(kernel: RealKernel) -> None:
    assert_trains(kernel, "auto")
    assert was_forked_from_the_kernel(kernel)


@pytest.fixture
def pretending(kernel: RealKernel) -> Iterator[Callable[[str, str], None]]:
    """Replaces a function of torch.cuda in the kernel for the length of a test, as on a machine with a GPU."""
    kernel.do("import os, torch\ntrue = {}\nkernel_pid = os.getpid()")
    kernel.do("import nbaccel.launching.rank.process_setup as _probe; _driver = _probe.has_gpu_driver")
    kernel.do("_probe.has_gpu_driver = lambda: True")

    def pretend(name: str, function: str) -> None:
        kernel.do(f"true[{name!r}] = torch.cuda.{name}\ntorch.cuda.{name} = {function}")

    yield pretend
    kernel.do("for name, function in true.items(): setattr(torch.cuda, name, function)")
    kernel.do("_probe.has_gpu_driver = _driver")


CUDA_IS_INITIALISED = ("is_initialized", "lambda: True")
FORKS_ARE_BROKEN = ("_is_in_bad_fork", "lambda: os.getpid() != kernel_pid")


@needs_clean_start
@pytest.mark.parametrize("fact", [CUDA_IS_INITIALISED, FORKS_ARE_BROKEN], ids=lambda fact: fact[0])
def test_a_kernel_with_cuda_initialised_trains_by_the_zygote(
    kernel: RealKernel, pretending: Callable[[str, str], None], fact: tuple[str, str]
) -> None:
    pretending(*fact)
    assert_trains(kernel, "auto")
    assert not was_forked_from_the_kernel(kernel)


@pytest.mark.parametrize("fact", [CUDA_IS_INITIALISED, FORKS_ARE_BROKEN], ids=lambda fact: fact[0])
def test_a_fork_that_was_asked_for_and_cannot_use_cuda_is_refused(
    kernel: RealKernel, pretending: Callable[[str, str], None], fact: tuple[str, str]
) -> None:
    pretending(*fact)
    cell = kernel.run(accelerate("print('user code')", "fork"))
    assert "restart the kernel" in cell.failed("CannotFork").evalue
    assert "user code" not in cell.text


@needs_clean_start
def test_the_line_before_the_run_says_which_cell_initialised_cuda(new_kernel: Kernels) -> None:
    kernel = new_kernel()
    kernel.do("import torch\n%load_ext nbaccel")
    touched = kernel.do("torch.cuda.is_initialized = lambda: True")
    cell = kernel.do(accelerate("print('user code')", n=1))
    assert "zygote" in cell.stdout
    assert f"cell [{touched.number}]" in cell.stdout


HAS_A_DEVICE = """
import time
from pathlib import Path
import torch
from torch.utils import backend_registration
HAS = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
if HAS:
    backend_registration._setup_privateuseone_for_python_backend("fake")
%load_ext nbaccel
"""

GOES_BACKWARD_ON_THE_CPU = """
torch.ones(3, requires_grad=True).sum().backward()
while "pt_autograd_0" not in {task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")}:
    time.sleep(0.001)  # it gets its name when it gets the interpreter's lock
"""


@needs_clean_start
def test_a_backward_on_the_cpu_before_does_not_break_the_ranks_and_its_cell_is_named(new_kernel: Kernels) -> None:
    """As on a machine with a GPU, where it starts a thread for the GPU; here the device is one of torch's in Python."""
    kernel = new_kernel()
    kernel.do(HAS_A_DEVICE)
    if not kernel.value("HAS"):
        pytest.skip("this torch has no devices that are written in Python")
    number = kernel.do(GOES_BACKWARD_ON_THE_CPU).number
    kernel.do("x = 1")
    cell = kernel.do(accelerate(TRAINS, flags="--out losses,parent"))
    assert f"zygote, not fork: autograd has device threads in the notebook since cell [{number}]" in cell.stdout
    losses = kernel.value("losses")
    assert losses[-1] < losses[0]
    assert not was_forked_from_the_kernel(kernel)


FORMS_A_GROUP = """
import torch.distributed as dist

def meet():
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()
"""


@pytest.mark.parametrize("start", ["fork", ZYGOTE])
def test_a_program_that_forms_its_own_process_group_meets_none_of_ours(new_kernel: Kernels, start: str) -> None:
    kernel = new_kernel()
    kernel.do(f"import torch\n%load_ext nbaccel\n{FORMS_A_GROUP}")
    kernel.do(accelerate("total = meet()", start))
    assert kernel.value("total") == 2
    kernel.do(accelerate("there = accelerator.reduce(torch.ones(1)).item()", start))
    assert kernel.value("there") == 2


def test_a_loop_that_another_number_of_ranks_did_faster_says_so(new_kernel: Kernels) -> None:
    kernel = new_kernel()
    kernel.do(
        "import time, torch\n%load_ext nbaccel\nw = torch.nn.Parameter(torch.ones(3)); steps = torch.optim.SGD([w])"
    )
    loop = "for _ in range(4):\n    time.sleep(pause)\n    w.square().sum().backward()\n    steps.step()"
    kernel.do("pause = 0")
    assert "done this cell" not in kernel.do(accelerate(loop, "fork", n=1)).stdout
    kernel.do("pause = 2")
    assert "1 rank has done this cell in " in kernel.do(accelerate(loop, "fork")).stdout


IN_TURN = """
for step, batch in enumerate(loader):
    ends_at = time.perf_counter() + 0.6 * (step % 3 == torch.distributed.get_rank())
    while time.perf_counter() < ends_at:
        pass
    loss = model(batch).sum()
    loss.backward()
    steps.step()
    steps.zero_grad()
"""


def test_ranks_that_mostly_wait_for_each_other_are_told_of_speed_once(new_kernel: Kernels) -> None:
    kernel = new_kernel()
    kernel.do(
        "import time, torch\n%load_ext nbaccel\nmodel = torch.nn.Linear(3, 1)\n"
        "steps = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "loader = torch.utils.data.DataLoader(torch.ones(144, 3), batch_size=6)"
    )
    said = [kernel.do(accelerate(IN_TURN, "fork", n=3)).stdout for _ in range(2)]
    assert ["--speed 1min above this cell measures what is faster" in each for each in said] == [True, False]
