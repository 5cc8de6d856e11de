"""`forward_backward` among the other calls of a step: it takes the place of forward and `backward`, of nothing else."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import warnings
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator, LocalSGD
from nbaccel.base.events import Event, Loss, OutOfMemory, StepEntered, outlet
from nbaccel.errors import CannotSplit, NotPrepared, PeerFailed, RunStopped
from nbaccel.features.micro_batches.gradient_buckets import lendable
from nbaccel.testing import MemLimit, run_ranks
from shortages import Shortage, Training, batch_of, labelled, relative_error

SAMPLES = 56  # 14 batches of 4


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64))


def _trained(recovers: bool, accumulation: int, shortage: Shortage | None = None) -> dict[str, Any]:
    """Two epochs over a loader, with a schedule and clipping, one way or the other."""
    training = Training.start(gradient_accumulation_steps=accumulation)
    accelerator, model, optimizer = training.accelerator, training.model, training.optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 2, 0.5)
    loader, scheduler = accelerator.prepare(DataLoader(_data(), 4), scheduler)
    seen: list[Event] = []

    def loss_of(batch: Any) -> torch.Tensor:
        return model(batch[0]).square().mean()

    with outlet(seen.append):
        for _ in range(2):
            for batch in loader:
                training.net.shortage = shortage
                with accelerator.accumulate(model):
                    if recovers:
                        accelerator.forward_backward(loss_of, batch)
                    else:
                        accelerator.backward(loss_of(batch))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
    return {
        "weights": training.weights(),
        "lr": scheduler.get_last_lr(),
        "steps": [(event.step, event.substep) for event in seen if isinstance(event, StepEntered)],
        "losses": [(event.step, float(event.value)) for event in seen if isinstance(event, Loss)],
    }


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_training_is_the_same_as_with_backward(world_size: int, accumulation: int) -> None:
    theirs = run_ranks(world_size, _trained, False, accumulation)
    for shortage in (None, Shortage("backward", 2, (world_size - 1,))):
        ours = run_ranks(world_size, _trained, True, accumulation, shortage)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one["weights"], other["weights"], rtol=1e-9, atol=1e-12)
            assert (one["lr"], one["steps"]) == (other["lr"], other["steps"])
            assert [step for step, _ in one["losses"]] == [step for step, _ in other["losses"]]
            assert [loss for _, loss in one["losses"]] == pytest.approx([loss for _, loss in other["losses"]], rel=1e-9)


def _last_window(scale_last_window: bool, recovers: bool) -> list[torch.Tensor]:
    from nbaccel import GradientAccumulationPlugin

    rules = GradientAccumulationPlugin(num_steps=4, scale_last_window=scale_last_window)
    training = Training.start(gradient_accumulation_plugin=rules)
    (loader,) = (training.accelerator.prepare(DataLoader(_data(), 10)),)  # two ranks, three batches each
    for batch in loader:
        with training.accelerator.accumulate(training.model):
            if recovers:
                training.accelerator.forward_backward(lambda part: training.model(part[0]).square().mean(), batch)
            else:
                training.accelerator.backward(training.model(batch[0]).square().mean())
    return training.gradients()


@pytest.mark.parametrize("scale_last_window", [True, False])
def test_a_short_last_window_is_divided_as_by_backward(scale_last_window: bool) -> None:
    ours, theirs = (run_ranks(2, _last_window, scale_last_window, recovers) for recovers in (True, False))
    assert relative_error(ours[0], theirs[0]) < 1e-9


def test_two_losses_of_one_step_add_up_as_with_backward() -> None:
    def gradients() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        training = Training.start()
        accelerator, rank = training.accelerator, training.net.rank
        batches = [batch_of(6, number, rank) for number in range(2)]
        training.net.shortage = Shortage("backward", 4, (1,))
        for batch in batches:
            accelerator.forward_backward(training.loss, batch, labelled)
        ours = training.gradients()
        training.net.shortage = None
        training.optimizer.zero_grad()
        weights = [accelerator.reduce(torch.tensor(labelled(batch))) for batch in batches]
        for batch, weight in zip(batches, weights, strict=True):
            accelerator.backward(training.loss(batch) * labelled(batch) / float(weight) * 2)
        return ours, training.gradients()

    for ours, theirs in run_ranks(2, gradients):
        assert relative_error(ours, theirs) < 1e-12


def test_no_sync_leaves_gradients_unsynchronised_until_the_batch_after_it() -> None:
    def gradients() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        training = Training.start()
        batches = [batch_of(6, number, training.net.rank)[0] for number in range(2)]
        with training.accelerator.no_sync(training.model):
            training.accelerator.forward_backward(lambda x: training.model(x).square().mean(), batches[0])
        training.accelerator.forward_backward(lambda x: training.model(x).square().mean(), batches[1])
        ours = training.gradients()
        training.optimizer.zero_grad()
        with training.accelerator.no_sync(training.model):
            training.accelerator.backward(training.model(batches[0]).square().mean())
        training.accelerator.backward(training.model(batches[1]).square().mean())
        return ours, training.gradients()

    for ours, theirs in run_ranks(2, gradients):
        assert relative_error(ours, theirs) < 1e-12


def test_local_sgd_steps_with_each_ranks_own_gradients_and_waits_for_nobody() -> None:
    def trained() -> tuple[torch.Tensor, float]:
        training = Training.start("SGD")
        losses = []
        with LocalSGD(training.accelerator, training.model, local_sgd_steps=2) as local:
            for number in range(4):
                losses.append(training.step(batch_of(4 + training.net.rank, number, training.net.rank)))
                if number == 0:
                    after_one = training.weights().sum().item()
                local.step()
        return training.weights(), after_one

    first, second = run_ranks(2, trained)
    assert torch.equal(first[0], second[0])
    assert first[1] != second[1]


def _left_in_the_middle(recovers: bool, zeroes: bool) -> list[torch.Tensor]:
    """The gradients of the window after another one that a ``break`` cut short, which the next loop continues."""
    training = Training.start(gradient_accumulation_steps=2)
    accelerator, model, rank = training.accelerator, training.model, training.net.rank

    def run(number: int, shortage: Shortage | None = None) -> None:
        training.net.shortage = shortage
        x = batch_of(6, number, rank)[0]
        with accelerator.accumulate(model):
            if recovers:
                accelerator.forward_backward(lambda part: model(part).square().mean(), x)
            else:
                accelerator.backward(model(x).square().mean())

    for _ in accelerator.prepare(DataLoader(_data(), 4)):
        run(0)
        break
    if zeroes:
        training.optimizer.zero_grad()
    loader = accelerator.prepare(DataLoader(_data(), 4))
    for number, _ in enumerate(loader):
        run(number + 1, Shortage("backward", 3, (1,)) if recovers else None)
        if number == (1 if zeroes else 2):
            return training.gradients()
    return []


@pytest.mark.parametrize("zeroes", [True, False])
def test_a_window_that_was_left_is_treated_as_by_backward(zeroes: bool) -> None:
    ours, theirs = (run_ranks(2, _left_in_the_middle, recovers, zeroes) for recovers in (True, False))
    assert relative_error(ours[0], theirs[0]) < 1e-12
    assert all(map(torch.equal, ours[0], ours[1]))


# -- stopping, losses that are not finite


def test_a_run_stops_before_a_step_and_the_next_one_is_whole() -> None:
    training = Training.start()
    stops = [False]

    def stop(event: Event) -> None:
        if isinstance(event, StepEntered) and stops[0]:
            raise RunStopped

    with outlet(stop):
        training.step(batch_of(4, 0))
        stops[0] = True
        before = training.weights()
        with pytest.raises(RunStopped):
            training.step(batch_of(4, 1))
        stops[0] = False
        assert torch.equal(before, training.weights())
        training.step(batch_of(4, 1))


def test_a_loss_that_is_not_finite_is_watched_as_in_backward() -> None:
    training = Training.start(on_nan="stop")
    x, y = batch_of(4, 0)
    training.accelerator.forward_backward(training.loss, (x * float("inf"), y), labelled)
    with pytest.raises(FloatingPointError, match="the loss is nan in step 0"):
        training.optimizer.step()


# -- DDP and we take turns


def _turns() -> list[Any]:
    training = Training.start()
    rank, model = training.net.rank, training.model
    shapes: list[Any] = [isinstance(model, DistributedDataParallel)]

    def by_backward(number: int) -> None:
        training.accelerator.backward(training.loss(batch_of(5, number, rank)))
        training.optimizer.step()
        training.optimizer.zero_grad()

    for number in range(2):
        by_backward(3 * number)
        shapes.append(hasattr(model, "reducer"))
        training.step(batch_of(5, 3 * number + 1, rank))
        shapes.append(hasattr(model, "reducer"))
        with torch.no_grad():
            model(batch_of(5, 9, rank)[0])
        shapes.append(hasattr(model, "reducer"))
    return [*shapes, training.weights()]


def test_forward_backward_and_backward_may_take_turns_and_only_one_has_buckets() -> None:
    first, second = run_ranks(2, _turns)
    assert first[:-1] == [True, True, False, False, True, False, False]
    assert torch.equal(first[-1], second[-1])


def _host_bytes() -> list[int]:
    """Private memory of this rank with a model of 40 MB: under DDP, under us, under DDP again, after free_memory."""
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(3200, 3200, bias=False))
    x = torch.ones(2, 3200)
    seen = []

    def measure() -> None:
        model.zero_grad()
        gc.collect()
        seen.append(psutil.Process().memory_full_info().uss)

    for _ in range(2):
        model(x).mean().backward()
        measure()
        accelerator.forward_backward(lambda part: model(part).mean(), x)
        measure()
    accelerator.free_memory()
    measure()
    return seen


def test_a07_the_buckets_of_ddp_and_ours_never_exist_together() -> None:
    model_bytes = 3200 * 3200 * 4
    for ddp, ours, ddp_again, ours_again, freed in run_ranks(2, _host_bytes):
        assert max(ddp, ours, ddp_again, ours_again) - min(ddp, ours, ddp_again, ours_again) < model_bytes / 2
        assert ours_again - freed > model_bytes / 2


def test_a_forward_of_the_programs_own_in_the_middle_of_a_window_is_refused() -> None:
    def mixed() -> str:
        training = Training.start(gradient_accumulation_steps=2)
        with training.accelerator.accumulate(training.model):
            training.accelerator.forward_backward(training.loss, batch_of(4, 0), labelled)
        with pytest.raises(RuntimeError) as caught:
            training.model(batch_of(4, 1)[0])
        return str(caught.value)

    assert "in the middle of an accumulation window that forward_backward began" in run_ranks(2, mixed)[0]


def test_a_model_whose_gradients_are_lent_can_be_copied_and_pickled() -> None:
    def copied() -> bool:
        training = Training.start()
        training.step(batch_of(4, 0, training.net.rank))
        twin = copy.deepcopy(training.model)
        again = pickle.loads(pickle.dumps(training.model))
        x = torch.ones(2, 6, dtype=torch.float64)
        expected = training.net(x)
        return bool(torch.equal(twin(x), expected) and torch.equal(again(x), expected))

    assert run_ranks(2, copied) == [True, True]


def test_layers_that_are_unfrozen_later_train_from_then_on() -> None:
    def trained() -> tuple[torch.Tensor, bool]:
        training = Training.start()
        training.net.first.requires_grad_(False)
        training.accelerator.free_memory()
        training.model, training.optimizer = training.accelerator.prepare(
            training.net, torch.optim.SGD(training.net.parameters(), lr=0.1)
        )
        training.step(batch_of(4, 0, training.net.rank))
        before = training.net.first.weight.detach().clone()
        training.net.first.requires_grad_(True)
        training.step(batch_of(4, 1, training.net.rank))
        return training.weights(), torch.equal(before, training.net.first.weight)

    (first, unmoved), (second, _) = run_ranks(2, trained)
    assert torch.equal(first, second)
    assert not unmoved


def test_activations_that_are_computed_again_and_blocks_used_twice_train_right() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(6, 400)
            self.block = torch.nn.Linear(400, 400)
            self.last = torch.nn.Linear(400, 1)
            self.double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            for _ in range(2):  # reentrant: the block's gradient is completed twice in one backward
                hidden = torch.utils.checkpoint.checkpoint(self.block, hidden, use_reentrant=True)
            return self.last(hidden)

    def gradients() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        from nbaccel.train.step.kwargs_handlers import DistributedDataParallelKwargs

        torch.manual_seed(0)
        accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=1)])
        net = Twice()
        model = accelerator.prepare(net)
        x = batch_of(6, 0, accelerator.process_index)[0]
        seen = []
        for _ in range(2):  # the second one sends early
            model.zero_grad()
            accelerator.forward_backward(lambda part: model(part).square().mean(), x)
            seen.append([parameter.grad.clone() for parameter in net.parameters()])
        return seen[0], seen[1]

    (first, second), (_, other) = run_ranks(2, gradients)
    assert relative_error(second, first) < 1e-12
    assert all(map(torch.equal, second, other))


# -- batches of every kind, and those that cannot be


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    scale: float = 1.0


KINDS = {
    "tuple": lambda x, y: (x, y),
    "dict": lambda x, y: {"x": x, "y": y, "scale": torch.tensor(2.0), "train": True},
    "user dict": lambda x, y: UserDict(x=x, y=y),
    "dataclass": lambda x, y: Batch(x, y),
    "nested": lambda x, y: {"in": [x], "out": (y, "name")},
}

READ = {
    "tuple": lambda b: b,
    "dict": lambda b: (b["x"], b["y"]),
    "user dict": lambda b: (b["x"], b["y"]),
    "dataclass": lambda b: (b.x, b.y),
    "nested": lambda b: (b["in"][0], b["out"][0]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_c16_batches_of_every_kind_are_led_through_a_shortage(kind: str) -> None:
    training = Training.start()
    training.net.shortage = Shortage("backward", 4)
    training.accelerator.forward_backward(
        lambda batch: training.loss(READ[kind](batch)), KINDS[kind](*batch_of(10, 0)), lambda b: labelled(READ[kind](b))
    )
    whole = Training.start()
    whole.accelerator.backward(whole.loss(batch_of(10, 0)))
    assert relative_error(training.gradients(), whole.gradients()) < 1e-12


def _unsplittable(everywhere: bool) -> tuple[str, str]:
    training = Training.start()
    rank = training.net.rank
    batch: Any = batch_of(4, 0, rank)
    if rank == 1 or everywhere:
        batch = (batch[0], batch[1][:3])
    with pytest.raises((CannotSplit, PeerFailed)) as caught:
        training.accelerator.forward_backward(training.loss, batch, labelled)
    training.step(batch_of(4, 1, rank))
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("everywhere", [True, False])
def test_c16_a_batch_that_cannot_be_split_is_an_error_on_all_ranks(everywhere: bool) -> None:
    first, second = run_ranks(2, _unsplittable, everywhere)
    assert second[0] == "CannotSplit"
    assert "batch[0] 4, batch[1] 3" in second[1]
    assert first[0] == ("CannotSplit" if everywhere else "PeerFailed")


def test_c16_a_split_function_takes_the_samples_of_what_we_do_not_know() -> None:
    class Graphs:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    training = Training.start()
    training.net.shortage = Shortage("forward", 3)
    sizes: list[int] = []

    def loss(graphs: Graphs) -> torch.Tensor:
        sizes.append(len(graphs.x))
        return training.model(graphs.x).square().mean()

    training.accelerator.forward_backward(
        loss,
        Graphs(batch_of(8, 0)[0]),
        split_fn=lambda batch, start, stop: Graphs(batch.x[start:stop]),
        samples=8,
    )
    assert sizes == [8, 4, 2, 2, 2, 2]


# -- refusals


def test_c18_a_model_that_talks_in_its_forward_is_refused_with_the_reason() -> None:
    def refused() -> list[str]:
        accelerator = Accelerator()
        messages = []
        for kind in ("ddp", "fsdp"):
            model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
            if kind == "ddp":
                model = accelerator.prepare(DistributedDataParallel(model))
            else:
                from torch.distributed.fsdp import fully_shard

                model = accelerator.prepare(fully_shard(model))
            with pytest.raises(CannotSplit) as caught:
                accelerator.forward_backward(lambda x, model=model: model(x).sum(), torch.ones(2, 2))
            messages.append(str(caught.value))
            accelerator.free_memory()
        return messages

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddp, sharded = run_ranks(2, refused)[0]
    spread = torch.nn.Sequential(torch.nn.Linear(1, 1, device="meta"), torch.nn.Linear(1, 1, device="cpu"))
    with pytest.raises(CannotSplit, match="cannot lead Sequential: what it trains is on cpu and meta, and gradients"):
        lendable([spread], torch.nn.Module)
    with pytest.raises(CannotSplit) as caught:  # DDP refuses the layer on a CPU, so it is asked for alone
        lendable([torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2))], DistributedDataParallel)
    sync = str(caught.value)
    assert "forward_backward cannot lead Sequential: 1 is a SyncBatchNorm" in sync
    assert "DistributedDataParallel of the program's own: hand prepare the bare model" in ddp
    assert "it is sharded (FSDP)" in sharded
    for message in (sync, ddp, sharded):
        assert "find_executable_batch_size" in message
        assert "--oom shrink" in message


@pytest.mark.parametrize("call", ["all_reduce", "gather"])
def test_c18_a_loss_function_that_waits_for_other_ranks_is_refused(call: str) -> None:
    def refused() -> str:
        training = Training.start()

        def loss(batch: Any) -> torch.Tensor:
            value = training.loss(batch)
            if call == "gather":
                return value + training.accelerator.gather(value).sum()
            torch.distributed.all_reduce(value.detach())
            return value

        with pytest.raises(CannotSplit) as caught:
            training.accelerator.forward_backward(loss, batch_of(4, 0), labelled)
        return str(caught.value)

    first, second = run_ranks(2, refused)
    assert first == second
    assert ("calls allreduce" if call == "all_reduce" else "calls allgather") in first
    assert "Exchange values after forward_backward" in first


def test_a_model_that_was_not_prepared_is_refused() -> None:
    accelerator = Accelerator()
    with pytest.raises(NotPrepared, match="prepare the model before the loop"):
        accelerator.forward_backward(lambda x: x.sum(), torch.ones(2))


@pytest.mark.parametrize("returned", [3.0, torch.ones(2), None])
def test_a_loss_function_that_returns_no_loss_is_told_so(returned: Any) -> None:
    training = Training.start()
    with pytest.raises(TypeError, match="loss_fn must return the mean loss"):
        training.accelerator.forward_backward(lambda batch: returned, batch_of(4, 0))


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("words", "weight must be 'samples', 'tokens' or a function"),
        ("tokens", "has no tensor called 'labels'"),
        (lambda batch: float("nan"), "it returned nan"),
        (lambda batch: -1, "it returned -1"),
    ],
)
def test_a_weight_that_counts_nothing_is_refused(weight: Any, message: str) -> None:
    training = Training.start()
    with pytest.raises(ValueError, match=message):
        training.accelerator.forward_backward(training.loss, batch_of(4, 0), weight)


# -- memory


def _under_limit(limits: list[int]) -> tuple[list[tuple[int, int]], list[int], torch.Tensor]:
    """Steps under a limit of each rank's own: what did not fit, and what is alive after each step."""
    gc.freeze()
    torch.manual_seed(0)
    accelerator = Accelerator()
    net = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
    rank = accelerator.process_index
    seen: list[Event] = []
    alive = []
    with MemLimit() as memory, outlet(seen.append):
        for number in range(6):
            x = torch.randn(128, 16, generator=torch.Generator().manual_seed(number * 2 + rank))
            accelerator.forward_backward(lambda part: model(part).square().mean(), x)
            optimizer.step()
            optimizer.zero_grad()
            del x
            alive.append(memory.live_bytes)
            memory.limit_bytes = memory.live_bytes + limits[rank]
    shortages = [(event.micro_batch_size, event.next_size) for event in seen if isinstance(event, OutOfMemory)]
    return shortages, alive, torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def test_c13_each_rank_settles_at_its_own_size_and_keeps_nothing_of_what_failed() -> None:
    first, second = run_ranks(2, _under_limit, [120_000, 400_000])
    assert [size for _, size in first[0]][-1] < [size for _, size in second[0] or [(0, 128)]][-1]
    assert torch.equal(first[2], second[2])
    for _, alive, _ in (first, second):
        assert len(set(alive[1:])) == 1  # the first step allocates the buckets


# -- elsewhere


PROGRAM = """
import torch
from nbaccel import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
rank = accelerator.process_index

def loss(x):
    if len(x) > 2 and rank == 1:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return model(x).square().mean()

for step in range(3):
    accelerator.forward_backward(loss, torch.full((5, 3), 1.0 + rank))
    optimizer.step()
    optimizer.zero_grad()
values = accelerator.gather(torch.cat([p.detach().flatten() for p in model.parameters()])[None])
if accelerator.is_main_process:
    print("equal", bool(torch.equal(values[0], values[1])), len(values))
accelerator.end_training()
"""


@pytest.mark.full
@pytest.mark.slow
def test_a_program_under_torchrun_recovers_too(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "program.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=55,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert "equal True 2" in done.stdout, done.stderr


def test_a_compiled_model_is_led_as_well() -> None:
    def trained() -> torch.Tensor:
        training = Training.start(dynamo_backend="eager")
        for number in range(2):
            training.step(batch_of(6, number, training.net.rank), Shortage("forward", 4, (1,)))
        return training.weights()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = run_ranks(2, trained)
    assert torch.equal(first, second)


def _pictures(count: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    pictures = [torch.randn(3, 4, 4 + number % 2, generator=generator, dtype=torch.float64) for number in range(count)]
    return pictures, torch.arange(float(count), dtype=torch.float64)


def _loss_of_pictures(model: Any, batch: Any) -> torch.Tensor:
    return torch.stack([(model(x[None]).mean() - y).square() for x, y in zip(*batch, strict=True)]).mean()


@pytest.mark.parametrize("count", [2, 4, 5])
def test_lists_of_pictures_are_cut_into_pictures_not_into_channels(count: int) -> None:
    accelerator = Accelerator(cpu=True)
    plain = torch.nn.Conv2d(3, 1, 2, dtype=torch.float64)
    model = accelerator.prepare(copy.deepcopy(plain))
    loss = accelerator.forward_backward(
        lambda part: _loss_of_pictures(model, part), _pictures(count), micro_batch_size=1
    )
    expected = _loss_of_pictures(plain, _pictures(count))
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    for one, other in zip(accelerator.unwrap_model(model).parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            _pictures(3),
            r"batch\[0\] is a list of 3 values of one kind with 3 rows each.*samples, or columns.*split_fn=",
        ),
        ((_pictures(2)[0], [0.0, 1.0]), r"may hold 2 or 3 samples.*forward_backward\(\.\.\., samples=\.\.\.\)"),
    ],
)
def test_pictures_that_lengths_do_not_tell_from_channels_are_refused(batch: Any, message: str) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Conv2d(3, 1, 2, dtype=torch.float64))
    with pytest.raises(CannotSplit, match=message):
        accelerator.forward_backward(lambda part: _loss_of_pictures(model, part), batch, micro_batch_size=1)


def test_a_loaders_number_of_samples_decides_what_a_batch_of_lists_holds() -> None:
    accelerator = Accelerator(cpu=True)
    pictures, _ = _pictures(6)
    rows = [(picture, float(number)) for number, picture in enumerate(pictures)]
    model, loader = accelerator.prepare(
        torch.nn.Conv2d(3, 1, 2, dtype=torch.float64),
        DataLoader(rows, 2, collate_fn=lambda rows: tuple(zip(*rows, strict=True))),  # type: ignore[arg-type]
    )
    sizes = []
    for batch in loader:

        def loss_fn(part: Any) -> torch.Tensor:
            sizes.append([tuple(picture.shape[:1]) for picture in part[0]])
            return _loss_of_pictures(model, part)

        accelerator.forward_backward(loss_fn, batch, micro_batch_size=1)
    assert sizes == [[(3,)]] * 6


def test_it_takes_batches_that_the_loader_hands_out_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(split: int) -> torch.Tensor:
        torch.manual_seed(0)
        monkeypatch.setenv("NBACCEL_SPLIT", str(split))
        accelerator = Accelerator()
        net = torch.nn.Linear(6, 1, dtype=torch.float64)
        loader = DataLoader(_data(), 8, shuffle=True)
        model, optimizer, loader = accelerator.prepare(net, torch.optim.Adam(net.parameters()), loader)
        for batch in loader:
            accelerator.forward_backward(lambda part: model(part[0]).square().mean(), batch)
            optimizer.step()
            optimizer.zero_grad()
        return net.weight.detach()

    assert (trained(1) - trained(2)).abs().max() <= 1e-6


def test_a_prepared_optimizer_is_guarded_once_it_is_used() -> None:
    accelerator = Accelerator()
    model = torch.nn.Linear(64, 64)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    batch = torch.ones(4, 64)
    accelerator.forward_backward(lambda x: model(x).square().mean(), batch)
    before = model.weight.detach().clone()
    with MemLimit(64 * 64 * 4 + 100), pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert not optimizer.state
    assert torch.equal(model.weight, before)
    optimizer.step()
    assert not torch.equal(model.weight, before)
