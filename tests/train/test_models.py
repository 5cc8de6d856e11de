"""The models people bring: wrapped, quantised, spread, compiled, checkpointed, with adapters, with unused parts."""

from __future__ import annotations

import contextlib
import io
import pickle
import time
import types
import warnings
from contextlib import closing
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from nbaccel import Accelerator, RanksFailed
from nbaccel.base.world import World
from nbaccel.launching import api
from nbaccel.launching.launcher import Launcher
from nbaccel.testing import run_ranks
from nbaccel.train.distributed import store_exchange
from nbaccel.train.prepare.models import admit, may_move
from nbaccel.train.step.kwargs_handlers import DistributedDataParallelKwargs
from nbaccel.train.strategies.replicated import Replica

CPU = torch.device("cpu")
SECOND = World(1, 2, 1, 2)


def _marked(**marks: Any) -> Any:
    model = torch.nn.Linear(1, 1)
    for name, value in marks.items():
        object.__setattr__(model, name, value)
    return model


def test_data_parallel_is_taken_off_with_a_note() -> None:
    plain = torch.nn.Linear(1, 1)
    with pytest.warns(UserWarning, match=r"wrapped in nn.DataParallel; prepare took it out"):
        assert Accelerator().prepare(torch.nn.DataParallel(plain)) is plain


def test_a_model_spread_over_devices_is_refused_in_several_processes() -> None:
    spread = _marked(hf_device_map={"encoder": 0, "decoder": 1, "head": "disk"})
    with pytest.raises(ValueError, match="Linear is spread over cuda:0, cuda:1, and there are 2 processes") as caught:
        admit(spread, SECOND, CPU)
    assert "no device_map='auto'" in str(caught.value)
    assert "start one process that has several (-n 1 --devices 0,1)" in str(caught.value)
    assert "as many (-n 2 --devices 0,1,2,3)" in str(caught.value)
    mixed = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1, device="meta"))
    assert admit(mixed, SECOND, CPU) is mixed  # nothing lies on meta


def test_a_rank_with_two_devices_of_its_own_takes_a_model_that_is_spread_over_them() -> None:
    world = World(1, 2, 1, 2, own_devices=2)
    spread = _marked(hf_device_map={"encoder": 0, "decoder": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert admit(spread, world, torch.device("cuda", 0)) is spread
    assert not may_move(spread)
    with pytest.raises(ValueError, match="Linear is spread over cuda:0, cuda:2, and there are 2 processes"):
        admit(_marked(hf_device_map={"encoder": 0, "decoder": 2}), world, torch.device("cuda", 0))
    waits = _marked(hf_device_map={"encoder": 0, "decoder": 1, "head": "cpu"})
    assert admit(waits, world, torch.device("cuda", 0), trains=False) is waits
    with pytest.raises(ValueError, match="is spread over cpu, cuda:0, cuda:1"):
        admit(waits, world, torch.device("cuda", 0))


def test_a_device_map_over_several_devices_is_recognised() -> None:
    accelerator = Accelerator()
    spread = _marked(hf_device_map={"encoder": 0, "decoder": 1})
    assert accelerator.verify_device_map(torch.nn.Sequential(spread))
    assert not accelerator.verify_device_map(torch.nn.Sequential(_marked(hf_device_map={"": 0})))


def test_a_model_spread_over_devices_stays_where_it_is_in_one_process() -> None:
    spread = _marked(hf_device_map={"encoder": 0, "decoder": "cpu"})
    assert admit(spread, World(), CPU) is spread
    assert not may_move(spread)
    assert may_move(torch.nn.Linear(1, 1))


def test_parameters_left_on_the_cpu_are_moved_and_those_on_two_devices_are_not() -> None:
    def lying_on(*devices: str) -> Any:
        parameters = [types.SimpleNamespace(device=torch.device(device)) for device in devices]
        return _marked(parameters=lambda: iter(parameters))

    assert may_move(lying_on("cpu", "cuda:0", "meta"))
    assert not may_move(lying_on("cuda:0", "cuda:1"))
    with pytest.raises(ValueError, match="Linear is spread over cuda:0, cuda:1, and there are 2 processes"):
        admit(lying_on("cpu", "cuda:1", "cuda:0"), SECOND, CPU)


@pytest.mark.parametrize(
    "marks",
    [
        {"is_loaded_in_8bit": True},
        {"is_loaded_in_4bit": True},
        {"hf_quantizer": object()},
        {"config": types.SimpleNamespace(quantization_config={"bits": 4})},
    ],
    ids=lambda marks: next(iter(marks)),
)
def test_quantised_models_are_not_moved_or_cast(marks: dict[str, Any]) -> None:
    model = _marked(**marks)

    def to(*_: Any, **__: Any) -> Any:
        raise AssertionError("moved")

    object.__setattr__(model, "to", to)
    assert Accelerator(mixed_precision="bf16").prepare(model) is model
    assert model.weight.dtype == torch.float32


def test_marks_that_say_no_are_no_quantisation() -> None:
    assert may_move(_marked(is_loaded_in_8bit=False, is_quantized=False, config=types.SimpleNamespace()))


def test_a_quantised_model_on_another_ranks_device_is_refused() -> None:
    quantised = _marked(is_loaded_in_8bit=True, hf_device_map={"": 0})
    with pytest.raises(ValueError, match="quantised and lies on cuda:0, so it cannot be moved to cuda:1 of rank 1"):
        admit(quantised, SECOND, torch.device("cuda", 1))


def test_a_model_made_on_another_ranks_device_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="rank 1 of 2 made Linear on cuda:0, where another rank trains") as caught:
        admit(_marked(hf_device_map={"": 0}), SECOND, torch.device("cuda", 1))
    assert ".to(accelerator.device)" in str(caught[0].message)


class Partly(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(1, 1)
        self.head = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def _unused(find: bool) -> str:
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=find)])
    model = accelerator.prepare(Partly())
    try:
        for _ in range(2):
            accelerator.backward(model(torch.ones(1, 1)).sum())
    except RuntimeError as error:
        return str(error)
    return "fine"


def test_unused_parameters_are_named_with_the_remedy_and_the_remedy_works() -> None:
    for rank, message in enumerate(run_ranks(2, _unused, False)):
        assert message.startswith(
            f"rank {rank} of 2: 2 of 4 parameters (head.weight, head.bias) of Partly got no gradient in the last"
        )
        assert "DistributedDataParallelKwargs(find_unused_parameters=True)" in message
    assert run_ranks(2, _unused, True) == ["fine", "fine"]


class Twice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(1, 1)
        self.second = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return sum(checkpoint(self.second, y, use_reentrant=True) for _ in range(2))  # type: ignore[return-value]


def _reentrant(static: bool) -> str:
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(static_graph=static)])
    model = accelerator.prepare(Twice())
    try:
        for _ in range(2):
            accelerator.backward(model(torch.ones(1, 1)).sum())
    except RuntimeError as error:
        return str(error)
    return "fine"


def test_a_parameter_that_is_ready_twice_is_named_with_the_remedy_and_the_remedy_works() -> None:
    for rank, message in enumerate(run_ranks(2, _reentrant, False)):
        assert message.startswith(f"rank {rank} of 2: the gradient of second.bias of Twice was complete twice")
        assert "use_reentrant=False" in message
        assert "DistributedDataParallelKwargs(static_graph=True)" in message
    assert run_ranks(2, _reentrant, True) == ["fine", "fine"]


def _prunes_for_good(others: bool) -> list[list[float]]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).double()
    if others:
        net.register_buffer("other", torch.zeros(1))
    prune.l1_unstructured(net[0], "weight", 0.3)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.randn(4, 4, dtype=torch.float64).chunk(accelerator.num_processes)[accelerator.process_index]
    for step in range(4):
        if step == 2:
            prune.remove(net[0], "weight")
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [value.flatten().tolist() for value in net.state_dict().values()]


@pytest.mark.parametrize("others", [False, True])
def test_a_pruned_model_whose_masks_are_removed_trains_on_as_in_one_process(others: bool) -> None:
    alone = run_ranks(1, _prunes_for_good, others)[0]
    for values in run_ranks(2, _prunes_for_good, others):
        for value, expected in zip(values, alone, strict=True):
            assert value == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_other_errors_of_the_forward_come_through_as_they_are() -> None:
    def message() -> str:
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied") as caught:
            Accelerator().prepare(Partly())(torch.ones(1, 3))
        return str(caught.value)

    assert "got no gradient" not in run_ranks(2, message)[0]


def _evaluated() -> tuple[bool, float]:
    accelerator = Accelerator(mixed_precision="bf16")
    model = accelerator.prepare_model(torch.nn.Linear(1, 1), evaluation_mode=True)
    output = model(torch.ones(1, 1))
    return isinstance(model, DistributedDataParallel), output.dtype == torch.float32


def test_a_model_for_evaluation_is_not_replicated() -> None:
    assert run_ranks(2, _evaluated) == [(False, True), (False, True)]
    assert run_ranks(2, lambda: type(Accelerator().prepare_model(torch.nn.Linear(1, 1))).__name__)[0] == "Replica"


def _trained(when: str) -> tuple[list[float], list[bool]]:
    """One step with ``torch.compile`` before `prepare`, after it, by argument, or not at all."""
    torch.manual_seed(0)
    accelerator = Accelerator(dynamo_backend="EAGER" if when == "argument" else None)
    plain = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = torch.compile(plain, backend="eager") if when == "before" else plain
    model, optimizer = accelerator.prepare(model, optimizer)
    if when == "after":
        model = torch.compile(model, backend="eager")
    x = torch.full((4, 2), 1.0 + accelerator.process_index)
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    kept = accelerator.unwrap_model(model)
    checks = [
        accelerator.unwrap_model(model, keep_torch_compile=False) is plain,
        ("_orig_mod" in kept._modules) == (when != "not"),
        torch.equal(kept(x), plain(x)),
    ]
    return [value for parameter in plain.parameters() for value in parameter.flatten().tolist()], checks


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_before_or_after_prepare_trains_the_same(ranks: int) -> None:
    reference = run_ranks(ranks, _trained, "not")
    for when in ("before", "after", "argument"):
        for (weights, checks), (expected, _) in zip(run_ranks(ranks, _trained, when), reference, strict=True):
            assert weights == pytest.approx(expected, abs=1e-6), when
            assert checks == [True] * 3, when


@pytest.mark.slow
def test_unwrapping_a_compiled_model_leaves_the_prepared_one_replicated() -> None:
    def still_ddp() -> bool:
        accelerator = Accelerator()
        model = torch.compile(accelerator.prepare(torch.nn.Linear(1, 1)), backend="eager")
        accelerator.unwrap_model(model)
        return isinstance(model._orig_mod, DistributedDataParallel)  # type: ignore[union-attr]

    assert run_ranks(2, still_ddp) == [True, True]


class Blocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


def _recomputed(is_on: bool) -> list[float]:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    plain = Blocks()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(plain, optimizer)
    if is_on:
        assert accelerator.gradient_checkpointing(model) is model
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 2), 1.0 + accelerator.process_index)).sum())
            optimizer.step()
            optimizer.zero_grad()
    return [value for parameter in plain.parameters() for value in parameter.flatten().tolist()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_recomputed_blocks_train_the_same_with_ddp_and_accumulation(ranks: int) -> None:
    assert run_ranks(ranks, _recomputed, True) == run_ranks(ranks, _recomputed, False)


def test_blocks_are_recomputed_in_training_only_and_once() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Sequential(Spy(), torch.nn.ReLU()))
    for _ in range(2):
        accelerator.gradient_checkpointing(model)
    spy: Any = model[0]
    accelerator.backward(model(torch.ones(1, 2)).sum())
    assert spy.calls == 2
    model.eval()
    model(torch.ones(1, 2))
    assert spy.calls == 3
    assert [name for name, _ in model.named_parameters()] == ["0.linear.weight", "0.linear.bias"]
    pickle.loads(pickle.dumps(model))(torch.ones(1, 2))


class Spy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x)


def test_blocks_may_be_named_and_must_be_where_none_are_to_be_seen() -> None:
    accelerator = Accelerator()
    spy = Spy()
    with pytest.raises(ValueError, match="Spy has no ModuleList or Sequential to recompute block by block: name the"):
        accelerator.gradient_checkpointing(spy)
    accelerator.gradient_checkpointing(spy, blocks=[spy])
    accelerator.backward(spy(torch.ones(1, 2)).sum())
    assert spy.calls == 2


def test_a_model_that_can_do_it_itself_is_told_to() -> None:
    told: list[Any] = []
    model = _marked(gradient_checkpointing_enable=lambda **kwargs: told.append(kwargs))
    Accelerator().gradient_checkpointing(model)
    assert told == [{"gradient_checkpointing_kwargs": {"use_reentrant": False}}]


def _adapted() -> tuple[list[float], list[str], bool]:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    base = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    before = base[0].weight.detach().clone()
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"], r=2, init_lora_weights=False))
    optimizer = torch.optim.SGD((p for p in adapted.parameters() if p.requires_grad), lr=0.1)
    model, optimizer = accelerator.prepare(adapted, optimizer)
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((2, 4), 1.0 + accelerator.process_index)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    inner = accelerator.unwrap_model(model)
    assert inner is adapted
    trained = [value for p in inner.parameters() if p.requires_grad for value in p.flatten().tolist()]
    return trained, sorted(peft.get_peft_model_state_dict(inner)), torch.equal(before, base[0].base_layer.weight)


@pytest.mark.slow
def test_lora_adapters_train_as_one_and_the_base_stays() -> None:
    pytest.importorskip("peft")
    first, second = run_ranks(2, _adapted)
    assert first == second
    assert first[1] == ["base_model.model.0.lora_A.weight", "base_model.model.0.lora_B.weight"]
    assert first[2]


def _language_model(is_recomputed: bool) -> tuple[float, list[float]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 16, "n_positions": 8}
    # Without dropout, which a wrapped model would draw in another order.
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    plain = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **off, use_cache=False))
    plain.train()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    if is_recomputed:
        accelerator.gradient_checkpointing(model)
        assert plain.transformer.gradient_checkpointing
    tokens = torch.arange(8)[None] + accelerator.process_index
    for _ in range(4):
        with accelerator.accumulate(model):
            output = model(input_ids=tokens, labels=tokens)
            accelerator.backward(output.loss)
            optimizer.step()
            optimizer.zero_grad()
    assert output.logits.dtype == torch.float32
    return output.loss.item(), plain.lm_head.weight[0].tolist()


@pytest.mark.slow
def test_a_model_of_transformers_trains_the_same_with_recomputed_blocks() -> None:
    pytest.importorskip("transformers")
    plain, recomputed = (run_ranks(2, _language_model, is_on) for is_on in (False, True))
    assert plain[0][1] == plain[1][1]
    assert recomputed == plain


def _where_prepare_warns() -> list[str]:
    accelerator = Accelerator()
    data = torch.utils.data.TensorDataset(torch.arange(12.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.prepare(torch.nn.DataParallel(torch.nn.Linear(2, 2)))
        accelerator.prepare_model(torch.nn.DataParallel(torch.nn.Linear(2, 2)))
        accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=64))
        accelerator.prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=64))
    return [warning.filename for warning in caught]


def test_what_prepare_warns_of_stands_at_the_users_line() -> None:
    of_main, of_other = run_ranks(2, _where_prepare_warns)
    assert of_main == [__file__] * 4
    assert of_other == [__file__] * 2


def _registers_late(where: str) -> Any:
    """What a model with a buffer leaves to which one more is registered in some ranks, in front of the third step."""
    accelerator = Accelerator()
    torch.manual_seed(accelerator.process_index)
    model, optimizer = accelerator.prepare(*_with_statistics())
    for step in range(4):
        if step == 2 and where in ("all", str(accelerator.process_index)):
            accelerator.unwrap_model(model).register_buffer("late", torch.rand(7))
        accelerator.backward(model(torch.rand(8, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.tolist() for name, value in accelerator.unwrap_model(model).state_dict().items()}


def _registers_late_and_slowly() -> list[str]:
    """The same in all ranks, where rank 0 sees 200 seconds for each one that rank 1 comes later.

    gloo itself waits for a rank that is late. A GPU does not, and here nothing is sent.
    """
    real = time.monotonic
    with patch.object(Replica, "_sync_module_buffers", lambda *_: None):
        if World.from_env().rank:
            with patch.object(torch.nn.Module, "register_buffer", _slowly(torch.nn.Module.register_buffer)):
                _registers_late("all")
            return []
        said = io.StringIO()
        with contextlib.redirect_stdout(said), patch.object(store_exchange, "time") as clock:
            clock.monotonic, clock.sleep = lambda: 200 * real(), time.sleep
            _registers_late("all")
            return said.getvalue().splitlines()


def _slowly(real: Any) -> Any:
    def register(module: Any, name: str, *values: Any) -> None:
        time.sleep(0.6 if name == "late" else 0)
        real(module, name, *values)

    return register


def _with_statistics() -> tuple[Any, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    return model, torch.optim.SGD(model.parameters(), 0.1)


def test_a_buffer_that_all_ranks_register_after_prepare_is_that_of_rank_0_from_the_next_forward_on() -> None:
    first, second = run_ranks(2, _registers_late, "all")
    assert len(first["late"]) == 7
    assert [first[name] for name in ("0.weight", "1.weight", "late")] == [
        second[name] for name in ("0.weight", "1.weight", "late")
    ]


def test_a_rank_that_registers_the_same_buffer_minutes_later_is_waited_for() -> None:
    said, _ = run_ranks(2, _registers_late_and_slowly)
    assert [line for line in said if "waits in a forward of Sequential with new or fewer buffers (late)" in line]


def test_a_buffer_that_another_rank_than_0_registers_after_prepare_is_named_before_anything_of_it_is_sent() -> None:
    """gloo ends the process of a rank that gets more bytes than it expects, and leaves memory as it was for others."""
    with pytest.raises(RanksFailed, match=r"(?s)rank 1 of 2 failed.*rank 1 has late, rank 0 has not"):
        run_ranks(2, _registers_late, "1")


@pytest.mark.slow
def test_a_buffer_that_rank_0_alone_registers_ends_the_run_by_where_the_others_are() -> None:
    with (
        closing(Launcher()) as launcher,
        patch.object(api, "default_launcher", lambda: launcher),
        pytest.raises(RanksFailed, match=r"(?s)they wait in different calls.*_registers_late: .*_registers_late: "),
    ):
        api.launch(_registers_late, 2, ("0",), cpu=True, start_method="fork", independent=True)
