"""A kernel that is killed or restarted leaves no process, whatever its ranks started and block."""

from __future__ import annotations

import time

import pytest

from fixtures.kernels import Kernels
from kernel.harness import RealKernel, accelerate

CLINGS = """
import os, signal, subprocess, time
import torch

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        time.sleep(0.01)
        return index

batches = iter(torch.utils.data.DataLoader(Slow(), num_workers=1))
next(batches)
subprocess.Popen(["sleep", "1000"])
subprocess.Popen(["sleep", "1001"], start_new_session=True)
subprocess.Popen(["sleep", "1002"], start_new_session=True, env={})
signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
print("clinging", os.environ["RANK"])
if os.environ["RANK"] == "0":
    time.sleep(1000)
sum(range(10**13))  # one call into C, which never lets go of the interpreter's lock
"""


def assert_no_survivors(kernel: RealKernel) -> None:
    assert kernel.survivors(within_s=1.0) == {}


def with_clinging_ranks(kernel: RealKernel, start: str) -> None:
    """Leave the kernel running a cell whose two ranks hold on to life by all means."""
    kernel.do("import torch\n%load_ext nbaccel")
    kernel.begin(accelerate(CLINGS, start)).until_text("clinging 0", "clinging 1")


def _sleepers(kernel: RealKernel) -> int:
    return sum(command.startswith("sleep 100") for command in kernel.family().values())


@pytest.mark.product  # ranks of a fork are ended by the reaper, those of the zygote by it
def test_nothing_survives_the_kernels_sigkill(new_kernel: Kernels, start: str) -> None:
    kernel = new_kernel()
    with_clinging_ranks(kernel, start)
    until = time.monotonic() + 5.0
    while (sleepers := _sleepers(kernel)) != 6 and time.monotonic() < until:
        time.sleep(0.1)
    assert sleepers == 6
    kernel.kill()
    assert_no_survivors(kernel)


@pytest.mark.full
def test_nothing_survives_a_restart_and_the_new_kernel_works_at_once(new_kernel: Kernels, start: str) -> None:
    kernel = new_kernel()
    with_clinging_ranks(kernel, start)
    kernel.restart()
    assert_no_survivors(kernel)
    kernel.do("%load_ext nbaccel")
    assert "again" in kernel.do(accelerate("print('again')")).stdout


@pytest.mark.sample(1)
@pytest.mark.slow
def test_an_idle_kernels_helpers_do_not_survive_it(new_kernel: Kernels, start: str) -> None:
    kernel = new_kernel()
    kernel.do("%load_ext nbaccel")
    kernel.do(accelerate("print(1)", start))
    kernel.kill()
    assert_no_survivors(kernel)
