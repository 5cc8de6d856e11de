"""What an optimizer steps is the same training in all ranks, or the run says so before it changes anything."""

from __future__ import annotations

import importlib.util
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from nbaccel import Accelerator, LocalSGD, launch
from nbaccel.base.notices import unignored
from nbaccel.errors import NotPrepared
from nbaccel.launching.ipc.control import ControlPage
from nbaccel.namespace.parameters import checksum, checksums, fingerprint, mark, parameters_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batches(count: int = 3) -> Iterator[torch.Tensor]:
    """Other ones in each rank."""
    draw = torch.Generator().manual_seed(dist.get_rank() + 1)
    for _ in range(count):
        yield torch.randn(8, 4, generator=draw)


def train(model: nn.Module, optimizer: Any, between: Callable[[], object] = lambda: None) -> None:
    for x in batches():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        between()
        optimizer.step()


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def told(program: Callable[[], None]) -> list[str]:
    """What the program is told in this rank."""
    dist.init_process_group("gloo")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            program()
        texts = [str(warning.message) for warning in caught]
        return [text for text in texts if "steps" in text or "this backward" in text]
    finally:
        dist.destroy_process_group()


# -- programs that train one model


def ddp() -> None:
    model = DistributedDataParallel(make())
    train(model, torch.optim.AdamW(model.parameters(), fused=True))


def ddp_whose_steps_are_not_synchronised() -> None:
    model = DistributedDataParallel(make())
    with model.no_sync():
        train(model, torch.optim.SGD(model.parameters(), 0.1))


def a_part_of_a_model_in_ddp() -> None:
    model = make()
    model[0].requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    train(wrapped, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1))


def zero() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(make())
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1))


def a_scaler_that_skips() -> None:
    model = DistributedDataParallel(make())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
    for x in batches(8):
        optimizer.zero_grad()
        scaler.scale(model(x * 1e3).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


def local_sgd() -> None:
    accelerator = Accelerator(cpu=True)
    model = make()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local:
        for x in batches(4):
            optimizer.zero_grad()
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            local.step()


def models_that_are_averaged() -> None:
    model = DistributedDataParallel(make())
    averager = PeriodicModelAverager(period=2)
    train(model, torch.optim.SGD(model.parameters(), 0.1), lambda: averager.average_parameters(model.parameters()))


def nothing_to_step() -> None:
    torch.optim.SGD(make().parameters(), 0.1).step()


def parts_of_a_sharded_optimizer() -> None:
    """What an engine steps may be a rank's own part of the parameters, as with DeepSpeed's ZeRO."""
    engine = DistributedDataParallel(make())
    mine = list(make().parameters())[dist.get_rank() :: 2]
    engine.optimizer = torch.optim.SGD(mine, 0.1)
    for part in mine:
        part.grad = torch.full_like(part, dist.get_rank() + 1.0)
    engine.optimizer.step()


def fsdp() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(make(), device_id=torch.device("cpu"))
    train(model, torch.optim.SGD(model.parameters(), 0.1))


def fsdp_of_original_parameters() -> None:
    """The graph has what FSDP1 computes with, and the optimizer the parameters that programs see (use_orig_params)."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(make(), device_id=torch.device("cpu"), use_orig_params=True)
    train(model, torch.optim.SGD(model.parameters(), 0.1))


def fsdp_of_dtensors() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    train(model, torch.optim.SGD(model.parameters(), 0.1))


def fsdp_that_frees_layers_between_forward_and_backward() -> None:
    """Their gathered parameters are leaves of the graph without memory: reading them would be a SIGSEGV."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4), make())
    mesh = init_device_mesh("cpu", (2,))
    for part in (*model.children(), model):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    train(model, torch.optim.SGD(model.parameters(), 0.1))


def inputs_beside_a_model_in_ddp() -> None:
    """As adversarial training has them: each rank perturbs its own batch."""
    model = DistributedDataParallel(make())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in batches():
        change = torch.zeros_like(x, requires_grad=True)
        inner = torch.optim.SGD([change], 0.1)
        for _ in range(3):
            (-model(x + change).square().mean()).backward()
            inner.step()
        optimizer.zero_grad()
        model(x + change.detach()).square().mean().backward()
        optimizer.step()


# -- programs that train several


def step_by_hand(model: nn.Module, between: Callable[[], object] = lambda: None) -> None:
    for x in batches(4):
        model(x).square().mean().backward()
        between()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data -= 0.1 * parameter.grad  # such writes are not counted in `_version`
                parameter.grad = None


def raw_by_hand() -> None:
    step_by_hand(make())


def raw_by_hand_after_a_barrier() -> None:
    dist.barrier()
    step_by_hand(make())


def raw_by_hand_with_a_number_for_the_log() -> None:
    """Which ranks exchange in every step, as fastai does."""
    step_by_hand(make(), lambda: dist.all_reduce(torch.ones(1)))


def raw_by_an_optimizer_that_is_not_of_torch() -> None:
    class Own:
        def __init__(self, parameters: Any) -> None:
            self.parameters = list(parameters)

        @torch.no_grad()
        def step(self) -> None:
            for parameter in self.parameters:
                parameter -= 0.1 * parameter.grad

        def zero_grad(self) -> None:
            for parameter in self.parameters:
                parameter.grad = None

    model = make()
    train(model, Own(model.parameters()))


def raw() -> None:
    model = make()
    train(model, torch.optim.AdamW(model.parameters()))


def raw_and_fused() -> None:
    model = make()
    train(model, torch.optim.AdamW(model.parameters(), fused=True))


def raw_with_a_closure() -> None:
    model = make()
    optimizer = torch.optim.LBFGS(model.parameters())
    for x in batches():

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


class Sam(torch.optim.Optimizer):
    """Steps uphill by hand first, and then with another optimizer, as sharpness-aware minimisation does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, 0.1)

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=0.05)

    def step(self) -> None:  # type: ignore[override]
        self.base.step()


def raw_with_two_steps_each() -> None:
    model = make()
    optimizer = Sam(model.parameters())
    train(model, optimizer, optimizer.first_step)


def a_gan_with_one_network_unprepared() -> None:
    first, second = DistributedDataParallel(make()), make()
    train(first, torch.optim.SGD(first.parameters(), 0.1))
    train(second, torch.optim.SGD(second.parameters(), 0.1))


def one_configuration_per_rank() -> None:
    model = nn.Linear(4, 1 + dist.get_rank())
    train(model, torch.optim.SGD(model.parameters(), 0.1))


GOES_ON = [
    ddp,
    ddp_whose_steps_are_not_synchronised,
    a_part_of_a_model_in_ddp,
    zero,
    a_scaler_that_skips,
    models_that_are_averaged,
    parts_of_a_sharded_optimizer,
    fsdp,
    fsdp_of_original_parameters,
    *(
        pytest.param(
            program,
            marks=pytest.mark.skipif(
                not hasattr(torch.cpu.Stream, "record_event"),
                reason="FSDP of torch 2.6 runs on devices with streams only",
            ),
            id=program.__name__,
        )
        for program in (fsdp_of_dtensors, fsdp_that_frees_layers_between_forward_and_backward)
    ),
    inputs_beside_a_model_in_ddp,
    nothing_to_step,
]
IS_REFUSED = [
    raw,
    raw_and_fused,
    raw_with_a_closure,
    raw_with_two_steps_each,
    a_gan_with_one_network_unprepared,
    one_configuration_per_rank,
]


@pytest.mark.parametrize("program", GOES_ON, ids=lambda program: program.__name__)
def test_what_is_synchronised_trains_without_a_word(program: Callable[[], None]) -> None:
    assert launch(told, 2, (program,), cpu=True).values == [[], []]


def test_what_our_local_sgd_averages_trains_without_a_word() -> None:
    run = launch(local_sgd, 2, cpu=True, setup="nbaccel.train.setup:setup_rank")
    assert run.error is None
    assert "nothing synchronises" not in Path(run.log_path).read_text()


@pytest.mark.parametrize("program", IS_REFUSED, ids=lambda program: program.__name__)
def test_separate_trainings_are_refused_before_the_first_step(program: Callable[[], None]) -> None:
    with pytest.raises(NotPrepared, match="nothing synchronises what it steps") as caught:
        launch(told, 2, (program,), cpu=True)
    assert "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)" in str(caught.value)
    assert "independent=True" in str(caught.value)


@pytest.mark.parametrize(
    "program",
    [
        raw_by_hand,
        raw_by_hand_after_a_barrier,
        raw_by_hand_with_a_number_for_the_log,
        raw_by_an_optimizer_that_is_not_of_torch,
    ],
    ids=lambda program: program.__name__,
)
def test_separate_trainings_without_a_step_of_torch_are_refused_before_the_second_one(
    program: Callable[[], None],
) -> None:
    with pytest.raises(NotPrepared, match=r"has trained one model, and rank . another") as caught:
        launch(told, 2, (program,), cpu=True)
    assert "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)" in str(caught.value)


def test_nothing_has_changed_when_a_training_is_refused(tmp_path: Path) -> None:
    def untouched() -> None:
        dist.init_process_group("gloo")
        model = make()
        with pytest.raises(NotPrepared):
            train(model, torch.optim.SGD(model.parameters(), 0.1))
        same = all(torch.equal(new, old) for new, old in zip(model.parameters(), make().parameters(), strict=True))
        (tmp_path / str(dist.get_rank())).write_text(str(same))
        dist.barrier()

    with pytest.raises(NotPrepared):
        launch(untouched, 2, cpu=True)
    assert {path.read_text() for path in tmp_path.iterdir()} == {"True"}


def test_a_refusal_that_the_loop_swallows_ends_the_run() -> None:
    def skips_bad_batches() -> None:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x in batches():
            try:
                model(x).square().mean().backward()
                optimizer.step()
            except Exception:
                continue

    with pytest.raises(NotPrepared, match="nothing synchronises what it steps"):
        launch(told, 2, (skips_bad_batches,), cpu=True)


def test_updates_by_hand_of_averaged_gradients_train_without_a_word() -> None:
    def averaged() -> None:
        model = make()
        for _ in range(3):
            step_by_hand(model, lambda: average(model))
        assert torch.autograd.backward.__module__ == "torch.autograd", "and nothing of ours is left in the way"

    assert launch(told, 2, (averaged,), cpu=True).values == [[], []]


def test_the_same_updates_by_hand_in_all_ranks_are_one_notice() -> None:
    def twice() -> None:
        model = make()
        for _ in range(4):
            model(torch.ones(8, 4)).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        assert torch.autograd.backward.__module__ == "torch.autograd"

    (notice,), others = launch(told, 2, (twice,), cpu=True).values
    assert others == []
    assert "has changed alike in all 2 ranks, and they have exchanged nothing" in notice


def test_tensors_that_are_no_models_and_change_apart_are_one_notice() -> None:
    def from_scratch() -> None:
        w = torch.zeros(4, 1, requires_grad=True)
        for x in batches(5):
            (x @ w - 1).square().mean().backward()
            with torch.no_grad():
                w.sub_(0.1 * w.grad)
                w.grad.zero_()

    (notice,), others = launch(told, 2, (from_scratch,), cpu=True).values
    assert others == []
    assert "each rank trains its own" in notice
    assert 'p.grad = accelerator.reduce(p.grad, "mean")' in notice


def test_gradients_of_a_model_that_nobody_changes_are_no_training() -> None:
    def saliency() -> None:
        model = make()
        for x in batches(9):
            x.requires_grad_(True)
            model(x).sum().backward()

    assert launch(told, 2, (saliency,), cpu=True).values == [[], []]


def test_a_notice_is_said_where_the_notebook_ignores_warnings() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore")
        with unignored():
            warnings.warn("as it is not looked", UserWarning, stacklevel=1)
        assert [str(each.message) for each in caught] == ["as it is not looked"]
        warnings.filterwarnings("ignore", message="as it is")
        with unignored():
            warnings.warn("as it is not looked", UserWarning, stacklevel=1)
        assert len(caught) == 1, "whoever names it means it"


def test_a_library_that_has_the_loop_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fits() -> None:
        import sysconfig
        import types

        library = types.ModuleType("oaklib.net")
        path = sysconfig.get_path("purelib") + "/oaklib/net.py"
        code = "def fit(model, optimizer, batches):\n" + "".join(
            f"    {line}\n"
            for line in (
                "for x in batches:",
                "    model(x).square().mean().backward()",
                "    optimizer.step()",
            )
        )
        exec(compile(code, path, "exec"), vars(library))
        model = make()
        library.fit(model, torch.optim.SGD(model.parameters(), 0.1), batches())

    with pytest.raises(NotPrepared, match=r"fit of oaklib trains by itself, .* run this cell with -n 1"):
        launch(told, 2, (fits,), cpu=True)


def test_parameters_beside_a_prepared_model_are_counted_in_the_error() -> None:
    def head_of_the_loss() -> None:
        model, head = DistributedDataParallel(make()), nn.Linear(1, 3)
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], 0.1)
        train(nn.Sequential(model, head), optimizer)

    with pytest.raises(NotPrepared, match="nothing synchronises 2 of the 6 tensors it steps"):
        launch(told, 2, (head_of_the_loss,), cpu=True)


def test_separate_trainings_that_are_meant_are_left_alone() -> None:
    assert launch(told, 2, (raw,), cpu=True, independent=True).values == [[], []]


def test_gradients_that_were_averaged_by_hand_train_with_one_notice() -> None:
    def by_hand() -> None:
        model = make()
        train(model, torch.optim.SGD(model.parameters(), 0.1), lambda: average(model))

    (notice,), others = launch(told, 2, (by_hand,), cpu=True).values
    assert others == []
    assert "equal gradients in all 2 ranks: it is taken for synchronised by hand" in notice


def test_the_same_work_in_all_ranks_is_one_notice() -> None:
    def twice() -> None:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(8, 4)).square().mean().backward()
            optimizer.step()

    (notice,), others = launch(told, 2, (twice,), cpu=True).values
    assert others == []
    assert "each does the same work on the same data" in notice


def test_a_rank_that_steps_alone_says_so_and_goes_on() -> None:
    def calibrate() -> None:
        if dist.get_rank() == 0:
            raw()
        dist.barrier()

    (notice,), others = launch(told, 2, (calibrate,), cpu=True).values
    assert others == []
    assert notice.startswith("rank 0 of 2 steps AdamW alone: rank 1 took no such step within 5 s")


def test_a_rank_that_steps_one_of_its_optimizers_alone_is_not_refused_for_the_one_before() -> None:
    def calibrate_after_training() -> None:
        model = make()
        train(model, torch.optim.SGD(model.parameters(), 0.1), lambda: average(model))
        if dist.get_rank() == 0:
            raw()
            raw()
        dist.barrier()

    notices, others = launch(told, 2, (calibrate_after_training,), cpu=True).values
    assert others == []
    assert any(notice.startswith("rank 0 of 2 steps AdamW alone") for notice in notices)


def test_a_rank_that_comes_late_is_compared_with_what_the_other_has_left() -> None:
    """The other one waited for five seconds, and has stepped."""

    def late() -> None:
        warnings.simplefilter("always")  # rank 0 says that it steps alone
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            dist.recv(torch.zeros(1), 0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x in batches(2):
            model(x).square().mean().backward()
            optimizer.step()
        if dist.get_rank() == 0:
            dist.send(torch.zeros(1), 1)
            dist.barrier()

    with pytest.raises(NotPrepared, match="in rank 1 of 2"):
        launch(late, 2, cpu=True, timeout_s=60.0)


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
def test_a_model_of_fabric_trains_without_a_word() -> None:
    def fabric() -> None:
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=2)
        fabric.launch()
        model = make()
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
        for x in batches():
            optimizer.zero_grad()
            fabric.backward(model(x).square().mean())
            optimizer.step()

    assert launch(told, 2, (fabric,), cpu=True).values == [[], []]


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_adapters_of_a_prepared_model_train_without_a_word() -> None:
    def lora() -> None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(make(), LoraConfig(target_modules=["0", "2"], r=2))
        accelerator = Accelerator(cpu=True)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        for x in batches():
            optimizer.zero_grad()
            accelerator.backward(model(x).square().mean())
            optimizer.step()

    assert launch(told, 2, (lora,), cpu=True).values == [[], []]


# -- parts


def test_what_a_rank_has_laid_last_is_seen_by_the_others() -> None:
    page = ControlPage.create(2)
    try:
        for count in range(5):
            page.lay(1, count, 10 + count, 100 + count)
        assert page.laid(1) == {12: 102, 13: 103, 14: 104}
        assert page.laid(0) == {}
        assert page.read(1).entered == -1
        page.begin()
        assert page.laid(1) == {}
    finally:
        page.close()


def test_a_fingerprint_is_seen_whole_or_not_at_all() -> None:
    """A pair that is packed in one call is wiped first, and seen with its key and without its value."""
    page = ControlPage.create(2)
    child = os.fork()
    if child == 0:
        for count in range(3_000_000):
            page.lay(1, count, 7, 9)
        os._exit(0)
    try:
        seen = {value for _ in range(100_000) for value in page.laid(1).values()}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        page.close()
    assert seen == {9}


def test_checksums_follow_the_bits_of_parameters() -> None:
    model, other = make(), make()
    assert checksum(model) == checksum(other) is not None
    assert checksum(torch.optim.SGD(model.parameters(), 0.1)) == checksum(model)
    with torch.no_grad():
        other[0].weight[0, 0] = torch.nextafter(other[0].weight[0, 0], torch.tensor(9.0))
    assert checksum(model) != checksum(other)
    assert checksum(model.half()) is not None
    assert checksum(model.bfloat16()) is not None
    assert checksum(nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64))])) is not None
    assert checksum([1, 2]) is None


def test_parameters_are_found_in_lists_and_in_objects_that_hold_a_model() -> None:
    class Learner:
        def __init__(self, model: nn.Module) -> None:
            self.model, self.name = model, "learner"

    model = make()
    assert checksum(Learner(model)) == checksum(model)
    assert checksum([*model.parameters()]) == checksum(dict(model.named_parameters())) == checksum(model)
    assert checksum(torch.ones(2)) is None, "data wants no gradient"
    assert checksum(make()(torch.ones(1, 4))) is None, "nor is a result a parameter"


def test_tensors_of_a_module_that_are_no_parameters_of_torch_are_found() -> None:
    class FromScratch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.zeros(3, requires_grad=True)
            self.parts = [torch.ones(2, requires_grad=True)]

    assert [tuple(each.shape) for each in parameters_of(FromScratch())] == [(3,), (2,)]


def test_a_sum_that_stays_the_same_does_not_hide_a_change() -> None:
    bias = torch.tensor([0.25, 0.26], requires_grad=True)
    before = checksum(bias)
    with torch.no_grad():
        bias += torch.tensor([2.0**-10, -(2.0**-10)])
    assert checksum(bias) != before


def test_gradients_of_other_rows_are_other_gradients() -> None:
    """Sparse ones, of embeddings."""

    def gradient(row: int) -> torch.Tensor:
        return torch.sparse_coo_tensor([[row]], [[1.0, 2.0]], (9, 2), check_invariants=True)

    assert fingerprint([gradient(3)]) == fingerprint([gradient(3)]) != fingerprint([gradient(4)])


def test_what_only_holds_the_parameters_of_others_is_known_as_a_holder() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sums, holders = checksums({"a_list": [*model.parameters()], "model": model, "optimizer": optimizer, "n": 3})
    assert holders == ["a_list", "optimizer"]
    assert sums["model"] == sums["optimizer"] == sums["a_list"]
    assert checksums({"optimizer": optimizer}) == ({"optimizer": sums["model"]}, [])


def test_what_has_too_many_parts_is_not_judged_by_a_part_of_them() -> None:
    assert checksum([torch.ones(1, requires_grad=True)] * 1999) is not None
    assert checksum([torch.ones(1, requires_grad=True)] * 2001) is None


WRITES: list[tuple[Any, Callable[[Any], object]]] = [
    ([1, 2], lambda value: value.append(3)),
    ([1, 2], lambda value: value.__setitem__(0, "other")),
    ({"best": 1}, lambda value: value.update(best="other")),
    ({1}, lambda value: value.add(2)),
    (np.zeros(50_000), lambda value: value.__setitem__(slice(20_000, 40_000), 1.0)),
    (np.zeros((300, 300))[:, ::2], lambda value: value.__iadd__(1)),
    (torch.zeros(50_000), lambda value: value.add_(1)),
    (torch.zeros(6, dtype=torch.bfloat16), lambda value: value.add_(1)),
]


@pytest.mark.parametrize(("value", "write"), WRITES)
def test_marks_change_with_what_is_written(value: Any, write: Callable[[Any], object]) -> None:
    before = mark(value)
    assert mark(value) == before is not None
    write(value)
    assert mark(value) != before


def test_a_frame_that_is_written_into_has_another_mark() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1.0, 2.0]})
    before = mark(frame)
    assert mark(frame) == before is not None
    frame["a"] = 5.0
    assert mark(frame) != before


@pytest.mark.parametrize("value", [7, "text", nn.Linear(2, 2), len, np.float32(3.0), np.array([{}])])
def test_what_cannot_be_written_into_and_what_is_compared_otherwise_has_no_mark(value: Any) -> None:
    assert mark(value) is None


def test_the_mark_of_an_object_changes_with_its_attributes() -> None:
    class Estimator:
        def __init__(self) -> None:
            self.is_fitted = False

    estimator = Estimator()
    before = mark(estimator)
    assert mark(estimator) == before is not None
    estimator.is_fitted = True
    assert mark(estimator) != before


def test_the_mark_of_a_metric_changes_and_a_model_has_none() -> None:
    class Metric(nn.Module):
        count = 0

    metric = Metric()
    before = mark(metric)
    assert mark(metric.eval()) == before is not None
    metric.count = 1000
    assert mark(metric) != before
    assert mark(make()) is None
