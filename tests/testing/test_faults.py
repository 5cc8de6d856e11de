"""`Faults`: a chosen rank fails at a chosen place and step."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nbaccel import RankDied, World
from nbaccel.testing import Faults, run_ranks
from nbaccel.train import PartialState
from trainings import Trained


def small_training(faults: Faults, steps: int = 3) -> list[tuple[int, str]]:
    """Steps and the errors that they raised, caught each for itself."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    errors = []
    with faults, faults.in_model(model), faults.in_optimizer(optimizer):
        for faults.step in range(steps):
            try:
                for _ in range(2):  # micro-batches
                    model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            except RuntimeError as error:
                errors.append((faults.step, str(error)))
    return errors


@pytest.mark.parametrize("point", ["forward", "output", "backward", "optimizer", "after optimizer"])
def test_memory_runs_out_at_every_place_of_a_step(point: str) -> None:
    faults = Faults().oom_at(point, step=1)
    expected = f"CPU out of memory. On purpose, at '{point}' on rank 0, step 1, passing 0."
    assert small_training(faults) == [(1, expected)]
    assert faults.pending == []


def test_a_micro_batch_is_chosen_by_its_passing() -> None:
    faults = Faults().oom_at("backward", passing=1, step=2)
    ((step, text),) = small_training(faults)
    assert step == 2
    assert "passing 1" in text


def test_a_fault_comes_once_unless_it_is_told_otherwise() -> None:
    assert len(small_training(Faults().oom_at("forward"))) == 1
    assert len(small_training(Faults().oom_at("forward", times=2))) == 2
    assert len(small_training(Faults().oom_at("forward").oom_at("forward"))) == 2


def test_outside_of_the_block_and_for_other_ranks_and_points_nothing_happens() -> None:
    faults = Faults().oom_at("forward").oom_at("output", rank=1).oom_at("elsewhere")
    assert faults.at("forward", 3) == 3
    with faults:
        assert faults.at("output", 3) == 3
        assert faults.at("nowhere", 3) == 3
    assert len(faults.pending) == 3


def test_hooks_are_gone_after_their_block() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    faults = Faults().oom_at("forward").oom_at("optimizer").oom_at("collective")
    with faults.in_model(model), faults.in_optimizer(optimizer), faults.in_collectives():
        pass
    with faults:
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    assert len(faults.pending) == 3


def test_any_error_can_be_raised_and_says_that_it_was_on_purpose() -> None:
    wanted = KeyError("label")
    with pytest.raises(KeyError, match="label") as caught, Faults().raise_at("x", wanted) as faults:
        faults.at("x")
    assert caught.value is not wanted, "or its traceback would grow from raise to raise"
    assert caught.value.__notes__ == ["on purpose, at 'x' on rank 0, step 0, passing 0"]


def test_a_value_becomes_nan_in_the_forward_and_in_the_backward_pass() -> None:
    for point in ("output", "backward"):
        model = torch.nn.Linear(2, 1)
        faults = Faults().nan_at(point)
        with faults, faults.in_model(model):
            output = model(torch.ones(1, 2))
            output.sum().backward()
        assert output.isnan().all().item() == (point == "output")
        assert model.weight.grad is not None
        assert model.weight.grad.isnan().all(), "NaN in the output is NaN in what follows from it"


def test_nan_where_no_tensor_is_says_so() -> None:
    message = r"no tensor is at 'x' on rank 0, step 0, passing 0, but int; nan_at needs one to make it NaN"
    with Faults().nan_at("x") as faults, pytest.raises(TypeError, match=message):
        faults.at("x", 3)


def test_models_that_return_dicts_have_the_points_too() -> None:
    class Model(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"labels": torch.ones(1, dtype=torch.long), "logits": super().forward(x)}

    model = Model(2, 1)
    faults = Faults().nan_at("output")
    with faults, faults.in_model(model):
        assert model(torch.ones(1, 2))["logits"].isnan().all()


@pytest.mark.parametrize("point", ["collective", "after collective"])
def test_a_rank_fails_before_a_collective_is_launched_or_after(point: str) -> None:
    def meet() -> tuple[bool, float]:
        PartialState()
        dist.barrier()
        faults = Faults().oom_at(point, rank=1)
        total, has_failed = torch.ones(()), False
        with faults, faults.in_collectives():
            try:
                dist.all_reduce(total)
            except torch.OutOfMemoryError:
                has_failed = True
                if point == "collective":
                    dist.all_reduce(total)  # or the other rank would wait for it
        dist.barrier()  # "after" is after the launch: the sum may still be under way
        return has_failed, total.item()

    assert run_ranks(2, meet) == [(False, 2.0), (True, 2.0)]


def test_ddp_launches_collectives_that_can_be_hit_in_its_backward() -> None:
    def train() -> list[str]:
        state = PartialState()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        faults = Faults().raise_at("after collective", ValueError("late"), rank=1)
        with faults, faults.in_collectives():
            try:
                model(torch.ones(1, 2)).sum().backward()
            except (ValueError, RuntimeError) as error:
                return [str(error)]
        assert state.process_index == 0
        return []

    quiet, hit = run_ranks(2, train)
    assert quiet == []
    assert "late" in hit[0]


@pytest.mark.parametrize(("fault", "exit_code"), [("kill_at", -9), ("leave_at", 0)])
def test_a_rank_dies_or_leaves_without_a_word(fault: str, exit_code: int) -> None:
    faults = getattr(Faults(), fault)("here", rank=1, step=2)

    def work() -> None:
        with faults:
            for faults.step in range(3):
                faults.at("here")

    with pytest.raises(RankDied, match=rf"rank 1 of 2 ended without a value, exit code {exit_code}"):
        run_ranks(2, work)


def test_a_rank_hangs_until_it_is_killed() -> None:
    faults = Faults().hang_at("here", rank=0)

    def work() -> int:
        with faults:
            faults.at("here")
        return World.from_env().rank

    with pytest.raises(TimeoutError, match=r"ranks \[0\] of 2 were not done"):
        run_ranks(2, work, timeout_s=0.5)


def test_faults_travel_to_ranks_by_pickle() -> None:
    faults = pickle.loads(pickle.dumps(Faults().oom_at("forward", step=1).raise_at("x", KeyError("k")).kill_at("y")))
    assert [fault.point for fault in faults.pending] == ["forward", "x", "y"]
    assert len(small_training(faults)) == 1


@pytest.mark.parametrize("point", ["sync", "rename"])
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "background"])
def test_a_disk_that_is_full_at_any_point_of_a_save_leaves_the_checkpoint_before(
    tmp_path: Path, point: str, blocking: bool
) -> None:
    training = Trained.start(on_save_error="warn")
    training.epoch()
    training.accelerator.save_state(tmp_path / "last")
    faults = Faults().enospc_at(point)
    with faults, faults.in_saves(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        training.accelerator.save_state(tmp_path / "last", blocking=blocking)
        training.accelerator._checkpoints.writer.join()
    assert "No space left on device" in str(said[0].message)
    assert faults.pending == []
    training.accelerator.load_state(tmp_path / "last")
