"""Who a process is, what setup gives a rank, and that nothing is touched before it is used."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nbaccel import Accelerator, PartialState
from nbaccel.state import AcceleratorState, is_initialized
from nbaccel.testing import run_ranks
from nbaccel.train.setup import setup_rank


def _facts() -> dict[str, Any]:
    accelerator = Accelerator()
    return {
        "rank": accelerator.process_index,
        "local": accelerator.local_process_index,
        "n": accelerator.num_processes,
        "main": (accelerator.is_main_process, accelerator.is_local_main_process, accelerator.is_last_process),
        "device": accelerator.device == torch.ones(1).device,
        "group": dist.is_initialized(),
    }


def test_ranks_of_a_machine_without_a_gpu_form_a_group_without_being_asked_to() -> None:
    first, second = run_ranks(2, _facts)
    assert first == {"rank": 0, "local": 0, "n": 2, "main": (True, True, False), "device": True, "group": True}
    assert second == {"rank": 1, "local": 1, "n": 2, "main": (False, False, True), "device": True, "group": True}


def _initialized() -> list[bool]:
    AcceleratorState._reset_state()  # of the tests before, in whose process this rank began
    found = [is_initialized()]
    found.append(PartialState().initialized and not is_initialized())
    state = pickle.dumps(Accelerator().state)
    found.append(is_initialized())
    AcceleratorState._reset_state()
    found.append(is_initialized())
    pickle.loads(state)  # as a notebook's Accelerator arrives in a rank
    return [*found, is_initialized()]


def test_a_process_is_initialized_once_it_has_an_accelerator_and_until_a_reset() -> None:
    """Programs ask `is_initialized` in order to make the Accelerator that they need."""
    assert run_ranks(1, _initialized) == [[False, True, True, False, True]]


def test_one_process_makes_no_group() -> None:
    assert _facts() == {"rank": 0, "local": 0, "n": 1, "main": (True, True, True), "device": True, "group": False}


def _own_group() -> tuple[bool, int]:
    accelerator = Accelerator.__new__(Accelerator)
    dist.init_process_group("gloo")
    accelerator.__init__()  # type: ignore[misc]
    total = int(accelerator.reduce(torch.ones(())))
    accelerator.end_training()
    still_there = dist.is_initialized()
    return still_there, total


def test_a_group_that_the_program_made_is_used_and_left_alone() -> None:
    assert run_ranks(2, _own_group) == [(True, 2), (True, 2)]


def _groups_again_and_again() -> list[int]:
    seen = []
    for _ in range(3):
        state = PartialState()
        seen.append(int(state.collectives.reduce(torch.ones(()))))
        state.destroy_process_group()
        assert not dist.is_initialized()
    return seen


def test_a_group_can_be_left_and_formed_again() -> None:
    assert run_ranks(2, _groups_again_and_again) == [[2, 2, 2]] * 2


TORCHRUN = r"""
import torch
from nbaccel import Accelerator
for _ in range(2):
    accelerator = Accelerator()
    total = int(accelerator.reduce(torch.tensor(accelerator.process_index + 1)))
    print(f"total {total}\n", end="", flush=True)
    accelerator.end_training()
"""


@pytest.mark.slow
def test_under_plain_torchrun_groups_form_twice(tmp_path: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=50, env={**os.environ, "PYTHONPATH": os.getcwd()}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("total 3") == 4


@pytest.mark.slow
def test_an_accelerator_that_is_only_made_touches_no_device() -> None:
    code = (
        "import nbaccel, torch, sys; torch.cuda.is_available = torch.cuda.current_device = None;"
        "torch.backends.mps.is_available = None; a = nbaccel.Accelerator(); a.process_index; a.is_main_process;"
        "a.sync_gradients; print('IPython' in sys.modules, 'nbaccel.launching' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.stdout.strip() == "False False", done.stderr


def _bound(namespace: dict[str, Any] | None) -> tuple[Any, bool, list[float]]:
    os.environ["NBACCEL_SEED"] = "7"
    setup_rank(namespace)
    return type((namespace or {}).get("accelerator")).__name__, dist.is_initialized(), [random.random(), torch.rand(1)]


def test_setup_gives_a_cell_its_accelerator_and_its_group() -> None:
    for name, group, _ in run_ranks(2, _bound, {}):
        assert (name, group) == ("Accelerator", True)


def test_setup_leaves_a_name_of_the_user_and_a_function_alone() -> None:
    assert [row[:2] for row in run_ranks(2, _bound, {"accelerator": "mine"})] == [("str", False)] * 2
    assert [row[:2] for row in run_ranks(2, _bound, None)] == [("NoneType", False)] * 2


def test_setup_seeds_each_rank_differently_and_repeatably() -> None:
    first, second = (row[2] for row in run_ranks(2, _bound, None))
    assert first != second
    assert [row[2] for row in run_ranks(2, _bound, None)] == [first, second]


def test_only_the_main_process_prints(capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, lambda: PartialState().print("once", flush=True))
    assert capfd.readouterr().out.count("once") == 1


def test_free_memory_forgets_what_was_prepared_and_gives_nones() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    assert accelerator.free_memory(model, 1) == [None, None]
    assert not accelerator._context.prepared


def test_a_dropped_accelerator_is_gone_at_once_with_what_it_prepared() -> None:
    """A circle would keep models on the device, and worker processes of loaders, until the garbage collector came."""
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    left = [weakref.ref(accelerator), weakref.ref(model)]
    del accelerator, model
    assert [reference() for reference in left] == [None, None]
