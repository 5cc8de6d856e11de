"""What only some ranks do, who waits for whom, and who ends each wait."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nbaccel import Accelerator, PartialState, PeerFailed
from nbaccel.base.failures import Failure, classify
from nbaccel.base.world import World
from nbaccel.testing import run_ranks
from nbaccel.train.distributed.partial_state import AcceleratorState
from nbaccel.train.distributed.process_control import DistributedType
from nbaccel.train.distributed.process_group import process_group
from nbaccel.train.prepare.contexts import GradientState
from nbaccel.utils import GradientAccumulationPlugin


def _who_ran(host: type) -> dict[str, Any]:
    state = host()
    return {
        "main": state.on_main_process(lambda: "ran")(),
        "local main": state.on_local_main_process(lambda: "ran")(),
        "last": state.on_last_process(lambda: "ran")(),
        "first": state.on_process(lambda: "ran", process_index=0)(),
        "second": state.on_process(process_index=1)(lambda: "ran")(),
        "local second": state.on_local_process(local_process_index=1)(lambda: "ran")(),
    }


@pytest.mark.parametrize("host", [PartialState, Accelerator])
def test_decorated_functions_run_where_they_say_and_are_none_elsewhere(host: type) -> None:
    first, second = run_ranks(2, _who_ran, host)
    here = {name for name, ran in first.items() if ran}
    assert here == {"main", "local main", "first"}
    assert {name for name, ran in second.items() if ran} == {"last", "second", "local second"}


def test_a_process_that_is_alone_runs_all_of_them() -> None:
    assert set(_who_ran(PartialState).values()) == {"ran"}


def test_a_decorated_function_keeps_its_name_and_its_arguments() -> None:
    @PartialState().on_main_process
    def add(left: int, right: int = 2) -> int:
        """Adds."""
        return left + right

    assert (add.__name__, add.__doc__, add(1, right=3)) == ("add", "Adds.", 4)


def test_a_function_decorated_before_the_ranks_exist_asks_in_the_rank() -> None:
    state = PartialState()

    @state.on_last_process
    def rank() -> int:
        return state.process_index

    assert rank() == 0
    assert run_ranks(2, rank) == [None, 1]


def test_a_decorator_that_needs_a_number_asks_for_it() -> None:
    with pytest.raises(ValueError, match=r"which process.*process_index=0"):
        PartialState().on_process(lambda: None)
    with pytest.raises(ValueError, match="local_process_index=0"):
        PartialState().on_local_process()


def _first(name: str, folder: str) -> float:
    state = PartialState()
    cache = Path(folder) / "cache"
    with getattr(state, name)():
        if state.is_main_process:
            time.sleep(0.2)
            cache.write_text("ready")
        return float(cache.exists())


@pytest.mark.parametrize("name", ["main_process_first", "local_main_process_first"])
def test_the_others_find_what_the_main_process_has_prepared(name: str, tmp_path: Path) -> None:
    assert run_ranks(2, _first, name, str(tmp_path)) == [1.0, 1.0]


def test_one_process_enters_its_block_at_once() -> None:
    with Accelerator().main_process_first():
        pass


def _failing_first() -> str:
    state = PartialState()
    try:
        with state.main_process_first():
            if state.is_main_process:
                raise OSError("no such dataset")
            pytest.fail("the block was entered without what it needs")
    except (OSError, PeerFailed) as error:
        text = f"{type(error).__name__}: {error}"
    state.wait_for_everyone()  # the group is still good
    return text


def test_a_failure_of_the_main_process_ends_the_others_wait_and_is_named() -> None:
    first, second = run_ranks(2, _failing_first, timeout_s=20)
    assert first == "OSError: no such dataset"
    assert second == (
        "PeerFailed: rank 1 did not enter its main_process_first block. It failed on rank 0: OSError: no such dataset"
    )


def test_a_peer_that_failed_is_a_consequence_and_never_blamed() -> None:
    assert classify("PeerFailed", "anything") is Failure.PEER_LOST


def _triggers() -> list[bool]:
    accelerator = Accelerator()
    seen = [accelerator.check_trigger()]
    if accelerator.process_index == 1:
        accelerator.set_trigger()
    return [*seen, accelerator.check_trigger(), accelerator.check_trigger()]


def test_a_trigger_of_one_rank_is_seen_by_all_and_once() -> None:
    assert run_ranks(2, _triggers) == [[False, True, False]] * 2


def test_distributed_type_is_a_word_that_programs_compare() -> None:
    accelerator = Accelerator()
    assert accelerator.distributed_type == DistributedType.NO == "NO"
    assert not accelerator.use_distributed
    types = run_ranks(2, lambda: (str(PartialState().distributed_type), PartialState().use_distributed))
    assert types == [("MULTI_CPU", True)] * 2


@pytest.mark.parametrize(
    ("world_size", "device", "expected"),
    [(1, "cuda", "NO"), (2, "cuda", "MULTI_GPU"), (2, "xpu", "MULTI_XPU"), (2, "mps", "MULTI_CPU"), (1, "xla", "XLA")],
)
def test_the_type_follows_from_world_and_device(world_size: int, device: str, expected: str) -> None:
    world = World(0, world_size, 0, world_size)
    assert DistributedType.of(world, torch.device(device)) == expected


def test_the_words_are_those_of_accelerate() -> None:
    theirs = pytest.importorskip("accelerate.utils").DistributedType
    assert {kind.name: kind.value for kind in theirs} == {kind.name: kind.value for kind in DistributedType}


def _options() -> tuple[str, list[str]]:
    import warnings
    from datetime import timedelta

    state = PartialState(backend="gloo", timeout=timedelta(seconds=50))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PartialState(timeout=timedelta(seconds=50))
        PartialState(timeout=timedelta(seconds=70))
    return dist.get_backend(), [str(warning.message) for warning in caught], state.initialized


def test_options_of_the_group_are_taken_where_it_is_formed_and_warned_of_later() -> None:
    for backend, warnings_, is_initialized in run_ranks(2, _options):
        assert backend == "gloo"
        assert warnings_ == [
            "the process group exists already, without timeout=0:01:10. Ask where it is formed, or call "
            "destroy_process_group() on every rank first."
        ]
        assert is_initialized


def test_a_rank_that_comes_too_late_is_named() -> None:
    def form() -> str:
        from datetime import timedelta

        if int(os.environ["RANK"]):
            return ""
        with pytest.raises(TimeoutError) as caught:
            PartialState(timeout=timedelta(seconds=1))
        return str(caught.value)

    assert run_ranks(2, form)[0] == "rank 0 of 2 waited 1 s for ranks [1] to form the process group"


def _one_after_the_other() -> list[Any]:
    seen: list[Any] = []
    for steps in (1, 4, 2):
        accelerator = Accelerator(gradient_accumulation_steps=steps)
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        accelerator.backward(model(torch.ones(1, 1)).sum())
        seen.append((accelerator.gradient_accumulation_steps, int(accelerator.reduce(torch.ones(())))))
        accelerator.destroy_process_group()
    seen.append(int(accelerator.reduce(torch.ones(()))))  # formed anew by its first use
    return seen


def test_accelerators_come_and_go_in_one_process_and_groups_are_formed_again() -> None:
    assert run_ranks(2, _one_after_the_other) == [[(1, 2), (4, 2), (2, 2), 2]] * 2


def test_a_group_of_the_programs_own_can_be_destroyed_by_name() -> None:
    def destroy() -> bool:
        state = PartialState()
        group = dist.new_group([0, 1])
        state.wait_for_everyone()  # a rank that is still connecting would meet closed sockets
        state.destroy_process_group(group)
        return dist.is_initialized()

    assert run_ranks(2, destroy) == [True, True]


def test_a_second_accelerator_does_not_disturb_the_first_ones_accumulation() -> None:
    first = Accelerator(gradient_accumulation_steps=4)
    second = Accelerator()
    assert first.gradient_state.num_steps == 4
    assert second.gradient_state.num_steps == 1


def test_the_gradient_state_says_what_the_plugin_says() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, adjust_scheduler=False, sync_with_dataloader=False)
    state = Accelerator(gradient_accumulation_plugin=plugin).gradient_state
    assert (state.num_steps, state.adjust_scheduler, state.sync_with_dataloader) == (2, False, False)
    usual = Accelerator().gradient_state
    assert (usual.adjust_scheduler, usual.sync_with_dataloader) == (True, True)


def test_the_gradient_state_follows_a_loop() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    state = accelerator.gradient_state
    assert (state.in_dataloader, state.remainder, state.active_dataloader) == (False, -1, None)
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(3)))
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    seen = []
    for _ in loader:
        assert state.active_dataloader is loader
        with accelerator.accumulate(model):
            seen.append((state.sync_gradients, state.end_of_dataloader))
    assert seen == [(False, False), (True, False), (True, True)]
    assert not state.in_dataloader
    assert "num_steps=2" in repr(state)


def test_a_gradient_state_of_nobody_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "users", {})
    with pytest.raises(RuntimeError, match="belongs to an Accelerator, and none has been made in this process"):
        GradientState()


def test_the_state_of_an_accelerator_knows_its_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Accelerator(mixed_precision="bf16").state.mixed_precision == "bf16"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert AcceleratorState().mixed_precision == "bf16"
    assert AcceleratorState(mixed_precision="no").mixed_precision == "no"
    with pytest.raises(ValueError, match="mixed_precision must be one of"):
        AcceleratorState(mixed_precision="fp17")


def test_another_precision_later_is_no_reason_to_restart_the_notebook() -> None:
    AcceleratorState(mixed_precision="bf16")
    AcceleratorState._reset_state()
    assert AcceleratorState(mixed_precision="no").mixed_precision == "no"


def test_a_state_travels_and_finds_its_own_world() -> None:
    state = pickle.loads(pickle.dumps(PartialState(cpu=True)))
    assert repr(state) == "PartialState(rank 0 of 1, device cpu)"
    assert state.default_device.type in ("cpu", "cuda", "mps")
    state.set_device()


def test_a_later_state_computes_where_the_group_does() -> None:
    def device() -> bool:
        Accelerator(cpu=True)
        return PartialState().device == torch.device("cpu")

    assert run_ranks(2, device) == [True, True]
