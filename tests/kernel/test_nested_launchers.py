"""Launchers of other libraries in a cell of ranks: their sentence in a real kernel, and the notebook goes on."""

from __future__ import annotations

import pytest

from kernel.harness import RealKernel, accelerate

TRAIN = """
from accelerate import debug_launcher, notebook_launcher

def train():
    from accelerate import Accelerator
    print("trained in", Accelerator().num_processes)
"""

REFUSED = "of 2 of a run already, and ranks do not launch ranks"


@pytest.mark.slow
def test_accelerates_own_launcher_in_a_cell_is_refused_and_the_cells_after_it_run(
    kernel: RealKernel, start: str
) -> None:
    kernel.do(TRAIN)
    refused = kernel.run(accelerate("notebook_launcher(train, num_processes=2)", start))
    sentence = refused.failed("NestedLaunch").evalue
    assert REFUSED in sentence
    assert "call train(...) directly" in sentence
    assert "trained in" not in refused.stdout
    assert kernel.do(accelerate("train()", start)).printed == "trained in 2\n"


@pytest.mark.slow
def test_ranks_that_stay_refuse_launchers_too(kernel: RealKernel, start: str) -> None:
    kernel.do(TRAIN)
    # Here, for a rank that is stopped while it imports, because the other one has failed, keeps half a module.
    kernel.do(accelerate("value = 1; import torch.distributed.launcher.api", start, flags="--keep"))
    try:
        for _ in range(2):
            refused = kernel.run(accelerate("notebook_launcher(train, num_processes=2)", start, flags="--keep"))
            assert REFUSED in refused.failed("NestedLaunch").evalue
        forked = kernel.run(accelerate("debug_launcher(train)", start, flags="--keep"))
        assert REFUSED in forked.failed("ProcessRaisedException").evalue
        assert "1" in kernel.do(accelerate("print(value)", start, flags="--keep")).printed.splitlines()
    finally:
        kernel.do("%accelerate stop")
