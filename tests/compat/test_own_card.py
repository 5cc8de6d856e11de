"""Which card each program of several ranks takes, where a rank sees its own alone and where it sees all. No real ones.

The ranks are real; what torch says of cards is made up, and so are devices that are taken. What the table says of a
program that takes a card there is not, is what `card_numbers` decides by.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nbaccel.base.hardware import Gpu
from nbaccel.base.world import World
from nbaccel.launching.ipc.spec import Devices, LaunchSpec, Start
from nbaccel.launching.launcher import Launcher
from nbaccel.launching.libraries.own_card import let_the_local_rank_be_the_only_card
from nbaccel.launching.processes.supervisor import RunObservers
from nbaccel.launching.tasks.function_task import FunctionTask
from nbaccel.output.screens import ConsoleScreen

NONE = "invalid device ordinal"


def pretend_cards() -> None:
    """Let torch speak of as many cards as this rank sees; only those can be taken."""
    count = len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: count
    torch.cuda.is_initialized = lambda: True
    taken = [0]

    def take(number: int) -> None:
        if number >= count:
            raise RuntimeError(f"CUDA error: {NONE}")
        taken.append(number)

    torch._C._cuda_setDevice = take  # type: ignore[attr-defined]
    torch.cuda.current_device = lambda: taken[-1]


def card(device: Any) -> str:
    """The card behind a device of this rank, by the machine's name."""
    device = torch.device(device)
    seen = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    index = torch.cuda.current_device() if device.index is None else device.index
    return seen[index] if index < len(seen) else NONE


def ours() -> str:
    from nbaccel import PartialState

    return card(PartialState(backend="gloo").device)


def accelerates() -> str:
    from accelerate import PartialState

    dist.init_process_group("gloo")
    return card(PartialState().device)


def trainers() -> str:
    from transformers import TrainingArguments

    dist.init_process_group("gloo")
    arguments = TrainingArguments("nowhere", report_to=[])
    assert (arguments.n_gpu, arguments.world_size) == (1, 2)
    return card(arguments.device)


def lightnings() -> str:
    import lightning.pytorch as pl

    try:
        trainer = pl.Trainer(accelerator="gpu", logger=False, enable_checkpointing=False, barebones=True)
    except Exception as error:
        return NONE if "your machine only has: [0]" in str(error) else str(error)
    trainer.strategy.set_world_ranks()
    return card(trainer.strategy.root_device)


def by_local_rank() -> str:
    return card(torch.device("cuda", int(os.environ["LOCAL_RANK"])))


def by_set_device() -> str:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return card("cuda")


def by_a_variable_of_its_own() -> str:
    os.environ["CUDA_VISIBLE_DEVICES"] = "GPU-a,GPU-b"
    pretend_cards()  # as CUDA, which has not begun
    return by_set_device()


BOTH, FIRST = ["GPU-a", "GPU-b"], ["GPU-a", "GPU-a"]
PROGRAMS: dict[str, tuple[Callable[[], str], list[str], list[str]]] = {
    "cuda:0": (lambda: card("cuda:0"), BOTH, FIRST),
    "PartialState, ours": (ours, BOTH, BOTH),
    "PartialState of Accelerate": (accelerates, BOTH, BOTH),
    "TrainingArguments of Transformers": (trainers, BOTH, BOTH),
    "Trainer of Lightning": (lightnings, [NONE, NONE], BOTH),
    "a device by LOCAL_RANK": (by_local_rank, ["GPU-a", NONE], BOTH),
    "set_device by LOCAL_RANK": (by_set_device, BOTH, BOTH),
    "all cards by itself": (by_a_variable_of_its_own, BOTH, BOTH),
}
"""Programs, and the cards of their ranks where each sees its own alone, and where each sees all."""


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    """Loaded once, for the ranks to share; what their import sets in the environment is no leftover of a test."""
    import accelerate
    import lightning.pytorch
    import transformers.training_args

    assert accelerate
    assert lightning.pytorch
    assert transformers.training_args


@pytest.fixture(scope="module")
def launcher(libraries: None) -> Iterator[Launcher]:
    """One for all tests here: its reaper starts before the first of them."""
    launcher = Launcher()
    launcher.resources.guard("+0")  # nobody has the number 0
    launcher.resources.guard("-0")
    launcher.resources.new_log()
    yield launcher
    launcher.close()


def in_ranks(launcher: Launcher, program: Callable[[], Any], own_devices: bool) -> list[Any]:
    def task() -> Any:
        pretend_cards()
        return program()

    cards = Devices(2, tuple(Gpu(number, f"GPU-{name}", "Tesla T4", 16 * 10**9) for number, name in enumerate("ab")))
    spec = LaunchSpec(FunctionTask(task), cards, Start("fork", "a test"), own_devices=own_devices)
    run, ended = launcher.run(spec, RunObservers(ConsoleScreen()))
    try:
        if run.error is not None:
            raise run.error
        return [ended.values(rank)["value"] for rank in range(2)]
    finally:
        ended.close()


@pytest.mark.parametrize("sees", ["its own", "all"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_each_rank_takes_a_card(launcher: Launcher, program: str, sees: str) -> None:
    function, own, all_ = PROGRAMS[program]
    assert in_ranks(launcher, function, sees == "its own") == (own if sees == "its own" else all_)


def of_accelerates_barrier() -> list[list[int]]:
    from accelerate import PartialState

    dist.init_process_group("gloo")
    state, given = PartialState(), []
    c10d: Any = dist.distributed_c10d

    class Options:
        """What a barrier was told."""

        def __init__(self) -> None:
            given.append(self)

    class Group:
        """Takes the place of the ranks' group, which has no cards."""

        bound_device_id = None

        def barrier(self, opts: Any) -> None:
            assert opts is given[-1]

        def rank(self) -> int:
            return 1

    torchs = c10d._get_default_group, c10d._rank_not_in_group
    c10d.BarrierOptions, c10d._get_default_group, c10d._rank_not_in_group = Options, Group, lambda group: False
    try:
        state.wait_for_everyone()
    finally:
        c10d._get_default_group, c10d._rank_not_in_group = torchs
    return [each.device_ids for each in given]


def of_accelerates_ddp() -> str:
    from accelerate import Accelerator

    dist.init_process_group("gloo")
    accelerator = Accelerator(device_placement=False)
    model = torch.nn.Linear(1, 1)
    try:
        accelerator.prepare_model(model)
    except ValueError as error:  # of torch: the model is on the CPU
        return str(error)
    raise AssertionError("DDP took a model of the CPU for one of a card")


def test_accelerate_gives_ddp_and_barriers_the_only_card_in_place_of_the_local_rank(launcher: Launcher) -> None:
    assert in_ranks(launcher, of_accelerates_barrier, True) == [[[0]], [[0]]]
    assert in_ranks(launcher, of_accelerates_barrier, False) == [[[0]], [[1]]]
    own, all_ = in_ranks(launcher, of_accelerates_ddp, True)[1], in_ranks(launcher, of_accelerates_ddp, False)[1]
    assert "got device_ids [0], output_device 0," in own
    assert "got device_ids [1], output_device 1," in all_


@pytest.mark.parametrize(
    ("given", "taken"), [(1, 0), ("cuda:1", 0), (torch.device("cuda", 1), 0), (0, 0), ("cuda", "cuda"), (2, 2)]
)
def test_the_local_rank_means_the_only_card_however_it_is_written(
    monkeypatch: pytest.MonkeyPatch, given: Any, taken: Any
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr(dist.distributed_c10d, "barrier", dist.barrier)
    monkeypatch.setattr(dist, "barrier", dist.barrier)
    kind = torch.nn.parallel.DistributedDataParallel
    monkeypatch.setattr(kind, "__init__", kind.__init__)
    let_the_local_rank_be_the_only_card(World(1, 2, 1, 2))
    torch.cuda.set_device(given)
    assert asked == [taken]
