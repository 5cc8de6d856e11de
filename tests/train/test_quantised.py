"""Quantised models with adapters: the base is never moved, sent, copied or saved, and one training is one training."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from four_bit_models import FourBitNet, Params4bit, made, names_of_base, samples, trained_of
from nbaccel import Accelerator, find_executable_batch_size
from nbaccel.base.quantised import TrainedTensors, base_of, is_quantised, is_quantised_tensor, trained_state
from nbaccel.errors import CollectiveMismatch, RanksFailed
from nbaccel.testing import run_ranks
from nbaccel.train.checkpoint.model_weights import load_model

CPU = torch.device("cpu")
HEADER = 3000  # bytes, and more than any header of a file here


def trained_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in trained_of(model))


def buffer_bytes(model: nn.Module) -> int:
    return sum(buffer.nbytes for buffer in model.buffers())


def loader(batch_size: int) -> Any:
    return torch.utils.data.DataLoader(samples(), batch_size=batch_size)  # type: ignore[arg-type]


def steps(accelerator: Accelerator, model: Any, optimizer: Any, data: Any, count: int = 100) -> list[float]:
    """Train for `count` batches at most; return the losses, averaged over the ranks."""
    losses = []
    for ids, _ in zip(data, range(count), strict=False):
        loss = model(ids).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def training(batch_size: int = 8, **choices: Any) -> tuple[Any, ...]:
    """Return an Accelerator, and a model, an optimizer and a loader that it has prepared."""
    accelerator = Accelerator(cpu=True)
    model = made(**choices)
    model.norm.eval()  # its statistics are those of a rank's own batch
    optimizer = torch.optim.AdamW(trained_of(model), lr=0.01)
    return accelerator, *accelerator.prepare(model, optimizer, loader(batch_size))


# --- what counts as the base ----------------------------------------------------------------------------------------


def test_the_base_is_what_is_frozen_in_a_quantised_model() -> None:
    model = made()
    layers = {"blocks.0.base_layer.weight", "blocks.1.base_layer.weight"}
    assert base_of(model) == {"embed.weight", "head.weight"} | layers
    kept = trained_state(model, model.state_dict(), base_of(model))
    assert kept.keys() == model.state_dict().keys() - set(names_of_base(model))
    assert "norm.running_mean" in kept


def test_a_frozen_model_that_is_not_quantised_has_no_base() -> None:
    assert not base_of(nn.Linear(2, 2).requires_grad_(False))


def test_weights_are_recognised_without_marks_and_marks_without_weights() -> None:
    assert is_quantised(made(is_marked=False))
    layer = nn.Linear(2, 2)
    assert not is_quantised(layer)
    layer.hf_quantizer = object()  # type: ignore[assignment]
    assert is_quantised(layer)
    assert is_quantised(nn.Sequential(layer))  # as inside of a wrapper of peft
    assert is_quantised_tensor(made().blocks[0].base_layer.weight)  # type: ignore[union-attr]
    assert not is_quantised_tensor(nn.Parameter(torch.ones(2)))


def test_buffers_of_packed_weights_are_base_and_those_of_statistics_are_not() -> None:
    class PackedLinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("qweight", torch.ones(4, 4, dtype=torch.int32))
            self.register_buffer("scales", torch.ones(4))

    model = nn.Sequential(PackedLinear(), nn.BatchNorm1d(4))
    model.quantization_method = "gptq"  # type: ignore[assignment]
    assert base_of(model) == {"0.qweight", "0.scales"}


# --- prepare --------------------------------------------------------------------------------------------------------


@contextmanager
def bytes_sent(function: str) -> Iterator[list[int]]:
    """Record the bytes of the tensors that are sent by this function of torch.distributed."""
    sent: list[int] = []
    torchs: Any = getattr(dist, function)

    def counted(*args: Any, **options: Any) -> Any:
        sent.append(sum(each.nbytes for arg in args for each in (arg if isinstance(arg, list) else [arg]) if _is(each)))
        return torchs(*args, **options)

    setattr(dist, function, counted)
    try:
        yield sent
    finally:
        setattr(dist, function, torchs)


def _is(value: object) -> bool:
    return isinstance(value, Tensor)


def prepared_facts() -> dict[str, Any]:
    with bytes_sent("_broadcast_coalesced") as sent:
        accelerator, model, optimizer, data = training(4)
        inner = accelerator.unwrap_model(model)
        before = {name: tensor.detach().as_subclass(Tensor).clone() for name, tensor in inner.named_parameters()}
        losses = steps(accelerator, model, optimizer, data)
    changed = {name for name, tensor in inner.named_parameters() if not before[name].equal(tensor.as_subclass(Tensor))}
    return {
        "losses": losses,
        "sent": sent,
        "changed": changed,
        "base": base_of(inner),
        "buckets": sum(map(int, str(model._get_ddp_logging_data()["bucket_sizes"]).split(","))),
        "trained": trained_bytes(inner),
        "buffers": buffer_bytes(inner),
        "kind": type(inner.blocks[0].base_layer.weight) is Params4bit,
        "left": "_ddp_params_and_buffers_to_ignore" in vars(inner),
    }


@pytest.mark.slow
def test_two_ranks_send_trained_tensors_alone_and_train_as_one_process() -> None:
    first, second = run_ranks(2, prepared_facts)
    assert first["losses"] == second["losses"]
    assert first["losses"] == pytest.approx(steps(*training(8)), abs=1e-6)
    assert first["buckets"] == first["trained"]
    assert first["sent"][0] == first["trained"] + first["buffers"]
    assert max(first["sent"]) == first["sent"][0]
    assert first["changed"]
    assert not first["changed"] & first["base"]
    assert first["kind"]
    assert not first["left"]


def test_half_precision_neither_moves_nor_casts_it() -> None:
    model = made()
    types = {name: tensor.dtype for name, tensor in model.named_parameters()}
    assert Accelerator(mixed_precision="bf16", cpu=True).prepare(model) is model
    assert {name: tensor.dtype for name, tensor in model.named_parameters()} == types


def test_a_model_without_adapters_is_refused_beside_its_optimizer() -> None:
    frozen = made(adapted=False)
    optimizer = torch.optim.AdamW(frozen.parameters())
    with pytest.raises(ValueError, match=r"nothing of FourBitNet is trained: .*get_peft_model\(prepare_model_for_kbit"):
        Accelerator(cpu=True).prepare(frozen, optimizer)
    accelerator = Accelerator(cpu=True)
    assert accelerator.prepare(frozen) is frozen  # for inference
    with pytest.raises(ValueError, match="nothing of FourBitNet is trained"):
        accelerator.prepare(optimizer)


def test_an_optimizer_of_all_parameters_trains_the_adapters() -> None:
    model = made()
    accelerator = Accelerator(cpu=True)
    model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader(8))
    losses = steps(accelerator, model, optimizer, data)
    assert losses[-1] < losses[0]


def test_what_a_last_save_reads_of_a_base_is_loaded_when_the_model_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, too, where no other rank's base is compared: memory may be short when it saves."""
    known = "nbaccel.features.quantised_base.frozen_base"
    monkeypatch.delitem(sys.modules, known, raising=False)
    training()
    assert known in sys.modules


def quantised_on_one_rank() -> str:
    accelerator = Accelerator()
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    model.is_quantized = accelerator.is_main_process  # type: ignore[assignment]
    try:
        accelerator.prepare(model)
    except CollectiveMismatch as error:
        return str(error)
    return ""


def test_a_model_that_is_quantised_on_one_rank_alone_is_refused() -> None:
    """Its rank would wait for the others, to compare bases."""
    for sentence in run_ranks(2, quantised_on_one_rank):
        assert "prepare Linear of 2 parameters, with a quantised base of 1 tensors" in sentence


def other_bases() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(made(seed=accelerator.process_index))


@pytest.mark.slow
def test_bases_that_differ_between_ranks_are_refused() -> None:
    with pytest.raises(RanksFailed, match=r"frozen weights of FourBitNet are not the same on all ranks: rank\(s\) 1 "):
        run_ranks(2, other_bases)


# --- checkpoints ----------------------------------------------------------------------------------------------------


def save_after(folder: Path, count: int = 2, **choices: Any) -> list[float]:
    """Save after `count` batches; return the losses of the batches that follow."""
    accelerator, model, optimizer, data = training(**choices)
    rest: list[float] = []
    for number, ids in enumerate(data):
        loss = model(ids).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if number + 1 == count:
            accelerator.save_state(folder)
        elif number >= count:
            rest.append(float(accelerator.reduce(loss.detach(), "mean")))
    return rest


def resumed(folder: Path, **choices: Any) -> list[float]:
    accelerator, model, optimizer, data = training(**choices)
    with torch.no_grad():
        for parameter in trained_of(model):
            parameter.add_(1.0)
    accelerator.load_state(folder)
    return steps(accelerator, model, optimizer, data)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_checkpoint_has_no_base_and_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, tied: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, model = tmp_path / "saved", made(tied=tied)
    rest = save_after(folder, tied=tied)
    assert not list(folder.glob("*frozen*"))
    assert not set(load_file(folder / "model.safetensors")) & set(names_of_base(model))
    size = (folder / "model.safetensors").stat().st_size
    assert trained_bytes(model) < size < trained_bytes(model) + buffer_bytes(model) + HEADER
    capsys.readouterr()
    assert resumed(folder, tied=tied) == rest
    assert "the checkpoint has what was trained of FourBitNet; its base, " in capsys.readouterr().out


def save_and_resume(folder: Path) -> tuple[list[float], list[float]]:
    rest = save_after(folder, batch_size=4)
    return rest, resumed(folder, batch_size=4)


@pytest.mark.slow
def test_two_ranks_save_and_resume_the_same_training(tmp_path: Path) -> None:
    for rest, again in run_ranks(2, save_and_resume, tmp_path / "saved"):
        assert again == rest
        assert len(again) == 2


def test_what_an_optimizer_has_stepped_is_saved_though_it_is_frozen_now(tmp_path: Path) -> None:
    accelerator, model, optimizer, data = training()
    steps(accelerator, model, optimizer, data, 1)
    model.blocks[0].lora_A.requires_grad_(False)
    accelerator.save_state(tmp_path / "saved")
    everything: dict[str, Tensor] = {}
    for file in (tmp_path / "saved").glob("model*.safetensors"):
        everything |= load_file(file)
    assert "blocks.0.lora_A.weight" in everything
    assert not set(everything) & set(names_of_base(model))


def test_a_checkpoint_of_another_base_is_refused(tmp_path: Path) -> None:
    save_after(tmp_path / "saved")
    with pytest.raises(ValueError, match="FourBitNet alone, and they were trained on another base than this one"):
        resumed(tmp_path / "saved", seed=1)


def test_other_bits_of_packed_weights_alone_are_a_warning(tmp_path: Path) -> None:
    save_after(tmp_path / "saved")
    accelerator = Accelerator(cpu=True)
    model = made()
    model.blocks[0].base_layer.weight.data[0] += 1  # type: ignore[union-attr,index,operator]
    accelerator.prepare(model, torch.optim.AdamW(trained_of(model)), loader(8))
    with pytest.warns(UserWarning, match="quantised weights of FourBitNet are not bit for bit those"):
        accelerator.load_state(tmp_path / "saved")


def test_a_base_in_another_precision_takes_the_adapters_with_a_warning(tmp_path: Path) -> None:
    save_after(tmp_path / "saved")
    model = made()
    for block in model.blocks:
        plain = nn.Linear(64, 64, bias=False).requires_grad_(False)
        plain.weight.copy_(block.base_layer.weight.dequantised(torch.float32))  # type: ignore[union-attr,operator]
        block.base_layer = plain  # type: ignore[assignment]
    model.is_loaded_in_4bit = model.is_quantized = False
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, torch.optim.AdamW(trained_of(model)), loader(8))
    with pytest.warns(UserWarning, match="whose base was 4 tensors of .* in another precision or form"):
        accelerator.load_state(tmp_path / "saved")
    came = load_file(tmp_path / "saved" / "model.safetensors")["blocks.0.lora_B.weight"]
    assert model.state_dict()["blocks.0.lora_B.weight"].equal(came)


def test_other_adapters_are_refused_by_name(tmp_path: Path) -> None:
    save_after(tmp_path / "saved")
    accelerator = Accelerator(cpu=True)
    model = made()
    model.blocks[1].extra = nn.Linear(2, 2)  # type: ignore[union-attr]
    accelerator.prepare(model, torch.optim.AdamW(trained_of(made())), loader(8))
    with pytest.raises(RuntimeError, match=r"2 missing \(blocks.1.extra.bias, blocks.1.extra.weight\)\. Make the same"):
        accelerator.load_state(tmp_path / "saved")


def test_save_model_writes_what_was_trained_and_load_model_puts_it_beside_the_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerator, model, optimizer, data = training()
    steps(accelerator, model, optimizer, data)
    accelerator.save_model(model, tmp_path)
    assert "of FourBitNet only what was trained is written: 9 tensors" in capsys.readouterr().out
    assert not set(load_file(tmp_path / "model.safetensors")) & set(names_of_base(model))
    other = made()
    assert set(load_model(other, tmp_path)) == base_of(model)
    ids = torch.stack(samples(4))
    assert other.eval()(ids).equal(model.eval()(ids))


def test_weights_that_were_saved_with_the_base_are_compared_and_what_is_trained_is_loaded(tmp_path: Path) -> None:
    model = made()
    save_file(
        {name: tensor.detach().as_subclass(Tensor) for name, tensor in model.state_dict().items()},
        tmp_path / "m.safetensors",
    )
    other = made()
    with torch.no_grad():
        trained_of(other)[0].zero_()
    load_model(other, tmp_path / "m.safetensors")
    assert trained_of(other)[0].equal(trained_of(model)[0])
    with pytest.raises(RuntimeError, match=r"the checkpoint has other frozen weights than this FourBitNet, .*: embed"):
        load_model(made(seed=1), tmp_path / "m.safetensors")


def test_save_model_of_a_model_without_adapters_writes_it_whole(tmp_path: Path) -> None:
    Accelerator(cpu=True).save_model(made(adapted=False), tmp_path)
    assert "blocks.0.weight" in load_file(tmp_path / "model.safetensors")


# --- memory that runs out -------------------------------------------------------------------------------------------


def smaller_after_a_shortage() -> tuple[list[float], int, int]:
    accelerator = Accelerator(cpu=True)
    model = made()
    model.norm.eval()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(trained_of(model), lr=0.01))

    @find_executable_batch_size(starting_batch_size=8)
    def run(batch_size: int) -> tuple[list[float], int]:
        if batch_size == 8 and accelerator.process_index == 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        data = accelerator.prepare(loader(batch_size))
        with bytes_sent("broadcast") as sent:
            losses = steps(accelerator, model, optimizer, data, 2)
        return losses, sum(sent)

    losses, sent = run()
    return losses, sent, trained_bytes(accelerator.unwrap_model(model))


@pytest.mark.slow
def test_ranks_that_go_on_with_a_smaller_batch_share_trained_tensors_alone() -> None:
    (losses, sent, trained), (others, _, _) = run_ranks(2, smaller_after_a_shortage)
    assert losses == others
    assert trained <= sent < trained + HEADER


# --- what comes back ------------------------------------------------------------------------------------------------


def test_trained_tensors_carry_their_names_and_say_what_does_not_fit() -> None:
    model = made()
    came = TrainedTensors("FourBitNet", trained_state(model, model.state_dict(), base_of(model)))
    assert repr(came).startswith("TrainedTensors of FourBitNet: 9 tensors, ")
    other = FourBitNet()
    came.load_into(other)
    assert all(other.state_dict()[name].equal(tensor) for name, tensor in came.items())
    with pytest.raises(ValueError, match=r"blocks.0.lora_A.weight of the ranks has no place in it"):
        came.load_into(made(adapted=False))
    other.head.requires_grad_(True)
    with pytest.raises(ValueError, match=r"it trains head.weight, which did not come"):
        came.load_into(other)
