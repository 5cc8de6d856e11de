"""`Accelerator.estimate`: what it counts and says. How near it is to what ranks hold is in test_estimated_peaks.py."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator
from nbaccel.features.batch_size.estimate import EstimatedDevices, EstimateSetting, MemoryEstimate, estimate_memory
from nbaccel.features.batch_size.optimizer_trial import CannotTry, try_optimizer
from nbaccel.features.batch_size.step_memory import Weight
from nbaccel.testing import run_ranks

P = 4 * (1000 * 1000 + 1000)
CARDS = EstimatedDevices(2, 10**9, "Small", 10**8)


def stack(blocks: int = 4, device: str = "meta") -> nn.Module:
    with torch.device(device):
        return nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(1000, 1000) for _ in range(blocks))})


class Chain(nn.Module):
    def __init__(self, blocks: int = 4, device: str = "meta") -> None:
        super().__init__()
        self.blocks = stack(blocks, device)["blocks"]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


def estimate(model: nn.Module, *args: Any, **options: Any) -> MemoryEstimate:
    return estimate_memory(model, *args, **({"ranks": [2, 4], "devices": CARDS} | options))


# -- what is counted


def test_a_step_holds_weights_gradients_states_and_buckets() -> None:
    found = estimate(Chain(), torch.optim.AdamW)
    ddp = found.of("ddp", 2)
    assert (ddp.parameters, ddp.gradients, ddp.exchange) == (4 * P, 4 * P, 4 * P)
    assert ddp.states == 8 * P + 8 * 4  # and a count of steps for each tensor
    assert found.of("single").peak < ddp.peak == found.of("ddp", 4).peak


def test_ranks_divide_rows_and_gather_some_groups() -> None:
    found = estimate(
        Chain(24), torch.optim.AdamW, setting=EstimateSetting()
    )  # on the CPU: one parameter after the other
    assert found.of("fsdp", 4).parameters == 24 * P // 4
    assert found.of("fsdp", 2).peak < 0.55 * found.of("single").peak
    assert found.of("fsdp", 2).peak < found.of("fsdp zero2", 2).peak < found.of("ddp", 2).peak


def test_rows_are_filled_up_to_the_largest_share() -> None:
    assert Weight((11, 3), True).padded(4) == 36


def test_frozen_parameters_have_neither_gradient_nor_state() -> None:
    model = Chain()
    model.blocks[:3].requires_grad_(False)
    single = estimate(model, torch.optim.AdamW).of("single")
    assert (single.parameters, single.gradients, single.states) == (4 * P, P, 2 * P + 8)


def test_tied_parameters_count_once() -> None:
    model = Chain(2)
    model.blocks[1].weight = model.blocks[0].weight
    assert estimate(model).of("single").parameters == P + 4000


def test_a_mixed_precision_keeps_weights_in_fp32_and_gathers_half() -> None:
    full, mixed = (estimate(Chain(), setting=EstimateSetting(name)).of("fsdp", 2) for name in ("no", "bf16"))
    assert mixed.parameters == full.parameters
    assert mixed.exchange < full.exchange


def test_the_state_of_an_optimizer_that_exists_is_its_own() -> None:
    model = Chain(2, "cpu")
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    heavy = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert estimate(model, plain).of("single").states == 0
    assert estimate(model, heavy).of("single").states == 2 * P
    assert not heavy.state, "the program's own optimizer has not stepped"


def test_optimizers_that_look_into_their_tensors_step_with_numbers() -> None:
    single = estimate(Chain(2), "adafactor").of("single")
    assert 0 < single.states < P


def test_all_parameters_at_once_take_as_much_again() -> None:
    at_once, one_by_one = (estimate(Chain(), setting=EstimateSetting(device_type=kind)) for kind in ("cuda", "cpu"))
    assert at_once.of("single").temporaries == 4 * P
    assert one_by_one.of("single").temporaries <= 2 * P


def test_gradients_that_stay_between_batches_are_there_in_the_forward() -> None:
    batch = torch.ones(2000, 1000)
    once, several = (
        estimate(Chain(), "SGD", batch, setting=EstimateSetting(keeps=keeps)).of("single").peak
        for keeps in (False, True)
    )
    assert several > once + 2 * P


def test_activations_of_a_batch_are_counted_and_recomputed_ones_are_not() -> None:
    batch = torch.ones(500, 100)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(100, 400), nn.GELU(), nn.Linear(400, 100)) for _ in range(6)))
    kept = estimate(model, "SGD", batch).of("single")
    Accelerator().gradient_checkpointing(model)
    recomputed = estimate(model, "SGD", batch).of("single")
    assert kept.activations > 2 * recomputed.activations


def test_a_loader_gives_the_batch() -> None:
    loader = DataLoader(TensorDataset(torch.ones(8, 1000), torch.zeros(8)), batch_size=4)
    found = estimate(Chain(), "SGD", loader, lambda model, batch: model(batch[0]).mean())
    assert found.sample_bytes is not None
    assert found.sample_bytes > 4 * 4000


# -- nothing of the program changes


def test_the_programs_own_objects_stay_as_they_are() -> None:
    model = Chain(2, "cpu").eval()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    before = [(p.clone(), p.grad.clone()) for p in model.parameters() if p.grad is not None]
    generator, threads = torch.get_rng_state(), threading.active_count()
    estimate(model, optimizer, torch.ones(3, 1000))
    assert torch.equal(torch.get_rng_state(), generator)
    assert threading.active_count() == threads
    assert not model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    for (value, gradient), parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(value, parameter)
        assert torch.equal(gradient, parameter.grad)


def of_prepared(strategy: str) -> list[int]:
    accelerator = Accelerator(strategy=strategy)
    model = Chain(3, "cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    bare = accelerator.estimate(model, optimizer, torch.ones(4, 1000), ranks=[2])
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(4, 1000)).mean())
    optimizer.step()
    prepared = accelerator.estimate(model, optimizer, torch.ones(4, 1000), ranks=[2])
    if accelerator.is_main_process:  # no collective: the other rank does not take part
        accelerator.estimate(model, optimizer)
    return [bare.of(strategy, 2).peak, prepared.of(strategy, 2).peak]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_prepared_model_takes_what_the_bare_one_takes(strategy: str) -> None:
    for bare, prepared in run_ranks(2, of_prepared, strategy, timeout_s=120):
        assert bare == prepared


# -- what it says


def test_the_table_ends_with_the_cheapest_strategy_that_fits() -> None:
    said = str(estimate(Chain(), "AdamW"))
    assert said.splitlines()[0].split() == [
        "strategy", "ranks", "parameters", "gradients", "optimizer", "exchange", "activations", "peak",
    ]  # fmt: skip
    assert "Without activations: accelerator.estimate(model, optimizer, batch, loss_fn=…)" in said
    assert said.endswith(
        "single in one process is the cheapest that fits: 155 MB per rank (with 0.10 GB for the driver), and there is "
        "2 x 1.0 GB (Small)."
    )


def test_the_strategy_of_the_least_communication_comes_first() -> None:
    needed = estimate(Chain(24), "AdamW").of("fsdp", 2).peak
    cheapest = estimate(Chain(24), "AdamW", devices=EstimatedDevices(2, needed)).cheapest
    assert cheapest is not None
    assert (cheapest.strategy, cheapest.ranks) == ("fsdp", 2)


def test_what_does_not_fit_says_how_many_ranks_it_needs() -> None:
    small = EstimatedDevices(2, 225_000_000)
    found = estimate(Chain(24), "AdamW", devices=small, ranks=[2])
    assert found.cheapest is None
    assert found.needed_ranks == 4
    assert "It does not fit on 2 x 0.23 GB under any strategy: fsdp on 2 ranks takes" in found.what_fits
    assert "(without the driver's share). fsdp needs about 4 ranks; mixed_precision," in found.what_fits


def test_no_number_of_ranks_divides_activations() -> None:
    found = estimate(Chain(2), "SGD", torch.ones(20_000, 1000), devices=EstimatedDevices(2, 10**8), ranks=[2])
    assert "More ranks do not help" in found.what_fits


def test_several_ranks_leave_room_for_nccl() -> None:
    cards = EstimatedDevices(2, 10**9, "Small", 100_000_000, 50_000_000)
    assert (cards.room(1), cards.room(2)) == (900_000_000, 850_000_000)
    two = estimate(Chain(24), "AdamW", devices=EstimatedDevices(2, 445_000_000, "", 100_000_000, 50_000_000), ranks=[2])
    assert "fsdp on 2 ranks is the cheapest" not in two.what_fits
    assert "(with 0.15 GB for the driver)" in two.what_fits


def test_on_a_gpu_cublas_and_a_copy_of_attention_are_in_it() -> None:
    block = nn.TransformerEncoderLayer(64, 2, 64, dropout=0.0, batch_first=True)
    host, card = (
        estimate_memory(block, "SGD", torch.zeros(8, 32, 64), setting=EstimateSetting(device_type=kind)).of("single")
        for kind in ("cpu", "cuda")
    )
    assert card.activations - host.activations == 8 * 32 * 64 * 4
    assert card.peak - host.peak == 75_000_000 + 8 * 32 * 64 * 4


def test_without_a_card_the_drivers_share_is_not_in_it() -> None:
    found = estimate(Chain(), "AdamW", devices=EstimatedDevices(0, 10**10, "CPU"))
    assert "(without the driver's share), and there is 10.0 GB of host memory." in found.what_fits


def test_a_step_that_looks_at_values_is_left_out_in_words() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        return model(batch).mean() if float(batch.sum()) > 0 else model(batch).sum()

    found = estimate(Chain(), "SGD", torch.ones(2, 1000), loss)
    assert "Without activations: the step cannot run without values (" in str(found)
    assert found.of("single").activations == 0


def test_an_optimizer_that_cannot_be_tried_is_assumed_to_have_two_states() -> None:
    class Strange(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("a kernel for CUDA")

    model = Chain(2, "cpu")
    found = estimate(model, Strange(model.parameters(), lr=0.1))
    assert "cannot be tried without values (RuntimeError: a kernel for CUDA): two states for each" in str(found)
    assert found.of("single").states == 4 * P
    with pytest.raises(CannotTry):
        try_optimizer(Strange, [(p, tuple(p.shape), p.dtype) for p in model.parameters()], "cpu")


def test_rows_of_one_strategy_can_be_asked_for() -> None:
    found = estimate(Chain(), "SGD")
    assert {row.strategy for row in found.only("fsdp").rows} == {"fsdp", "fsdp zero2"}
    with pytest.raises(KeyError, match="fsdp on 3 was not estimated; there is single on 1, ddp on 2"):
        found.of("fsdp", 3)


@pytest.mark.parametrize(
    ("args", "options", "error", "sentence"),
    [
        (("AdamV",), {}, ValueError, "torch.optim has no optimizer 'AdamV'; did you mean Adam"),
        (("SGD",), {"ranks": [0]}, ValueError, "a number of ranks is at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused(args: Any, options: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        estimate(Chain(), *args, **options)


def test_only_a_model_can_be_estimated() -> None:
    with pytest.raises(TypeError, match=r"estimate needs a torch.nn.Module, and this is a int"):
        Accelerator().estimate(3)  # type: ignore[arg-type]


def test_a_lazy_model_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="weight of LazyLinear has no shape before the first forward: run one batch"):
        Accelerator().estimate(nn.LazyLinear(3))
