"""Models that `prepare` gets with a device map, or that have one, in one process and in several."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from features.big_models.placed_models import PlacedNet, empty, ids, outputs, plain, saved
from nbaccel import Accelerator, PartialState, dispatch_model, infer_auto_device_map, load_checkpoint_and_dispatch
from nbaccel.base.world import World
from nbaccel.errors import NoSuchDevice
from nbaccel.features.big_models import map_of_rank
from nbaccel.testing import run_ranks


def test_the_inference_of_the_tutorials(tmp_path: Path) -> None:
    """As it is written there; without a GPU the map's device is the CPU, which a warning says."""
    state = PartialState()
    accelerator = Accelerator()
    model = plain().to(state.device)
    device_map = infer_auto_device_map(model, max_memory={0: "16GiB", 1: "16GiB"})
    if state.device.type == "cpu":
        with pytest.warns(UserWarning, match="device_map names device 0, and this run computes on the CPU, as"):
            model = accelerator.prepare(model, device_map=device_map)
    else:
        model = accelerator.prepare(model, device_map=device_map)
    with state.split_between_processes(["prompt"] * 3) as inputs:
        found = [outputs(model) for _ in inputs]
    assert all(torch.equal(each, outputs(plain())) for each in found)


def test_the_inference_of_the_tutorials_in_two_ranks() -> None:
    def infer() -> tuple[int, bool]:
        state, accelerator = PartialState(), Accelerator()
        model = plain().to(state.device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the map's device, which a machine without a GPU does not have
            device_map = infer_auto_device_map(model, max_memory={0: "16GiB", 1: "16GiB"})
            model = accelerator.prepare(model, device_map=device_map)
        with state.split_between_processes(["prompt"] * 4) as inputs:
            found = torch.stack([outputs(model) for _ in inputs])
        gathered = accelerator.gather(found)
        return len(gathered), all(torch.allclose(each, outputs(plain())) for each in gathered)

    assert run_ranks(2, infer) == [(4, True)] * 2


def test_a_model_is_prepared_on_the_disk(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    loaded = load_checkpoint_and_dispatch(empty(), saved(plain(), tmp_path), {"": "disk"})
    model, loader = accelerator.prepare(loaded, DataLoader(ids(), batch_size=1))
    assert accelerator.unwrap_model(model) is loaded
    with torch.no_grad():
        found = [model(batch)["logits"] for batch in loader]
    assert torch.allclose(torch.cat(found), outputs(plain()), atol=1e-4)
    assert accelerator.get_state_dict(model)["head.weight"].device.type == "cpu"


def test_adapters_are_trained_beside_weights_that_wait(tmp_path: Path) -> None:
    class Adapted(nn.Module):
        def __init__(self, model: PlacedNet) -> None:
            super().__init__()
            self.model = model.requires_grad_(False)
            self.adapter = nn.Linear(32, 32)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.adapter(self.model(ids)["logits"])
            return found

    def trained(model: nn.Module, accelerator: Accelerator) -> torch.Tensor:
        optimizer = torch.optim.AdamW(model.adapter.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(3):
            accelerator.backward(model(ids()).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        weight: torch.Tensor = accelerator.unwrap_model(model).adapter.weight.detach()
        return weight

    torch.manual_seed(0)
    model = Adapted(plain())
    loaded = copy.deepcopy(model)
    loaded.model = load_checkpoint_and_dispatch(empty(), saved(plain(), tmp_path), {"": "disk"}).requires_grad_(False)
    mapped = dispatch_model(copy.deepcopy(model), {"": "disk"}, offload_dir=tmp_path / "offloaded")
    assert mapped.model.blocks[0].scale.is_meta
    assert not mapped.adapter.weight.is_meta  # what is trained beside frozen weights does not wait
    wanted = trained(model, Accelerator(cpu=True))
    assert torch.equal(trained(loaded, Accelerator(cpu=True)), wanted)
    assert torch.equal(trained(mapped, Accelerator(cpu=True)), wanted)


def test_a_graph_does_not_keep_the_weights_that_were_read(tmp_path: Path) -> None:
    """The memory of one block is used by the next one, also while autograd records."""
    model = load_checkpoint_and_dispatch(empty(), saved(plain(), tmp_path), {"": "cpu", "blocks": "disk"})
    model.requires_grad_(False).embed.requires_grad_(True)
    places = []
    for block in model.blocks:
        block.register_forward_hook(lambda block, *_: places.append(block.mlp[0].weight.data_ptr()), prepend=True)
    loss = model(ids())["logits"].square().mean()
    assert len(places) == len(model.blocks)
    assert len(set(places)) == 1
    loss.backward()
    wanted = plain()
    wanted.requires_grad_(False).embed.requires_grad_(True)
    wanted(ids())["logits"].square().mean().backward()
    assert torch.equal(model.embed.weight.grad, wanted.embed.weight.grad)


def test_weights_that_will_wait_are_not_trained(tmp_path: Path) -> None:
    model = load_checkpoint_and_dispatch(empty(), saved(plain(), tmp_path), {"": "cpu", "blocks": "disk"})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(
        ValueError, match=r"the optimizer has blocks\.0\.scale, .* which wait on the host or on the disk"
    ):
        Accelerator(cpu=True).prepare(model, optimizer)
    with pytest.raises(ValueError, match="so they would never be trained"):
        Accelerator(cpu=True).prepare_optimizer(optimizer)
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"device_map puts blocks\.0\.scale, .* on the host or on the disk"):
        Accelerator(cpu=True).prepare(model, optimizer, device_map={"": "cpu", "blocks": "disk"})
    assert torch.equal(outputs(model), outputs(plain()))


def test_a_map_belongs_to_one_model() -> None:
    with pytest.raises(ValueError, match=r"takes one model, and there are 2 in this call"):
        Accelerator().prepare(plain(), plain(), device_map="auto")


def test_a_map_of_the_cpu_alone_changes_nothing() -> None:
    model = plain()
    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), device_map={"": "cpu"})
    accelerator.backward(prepared(ids())["logits"].mean())
    optimizer.step()
    assert not torch.equal(outputs(model), outputs(plain()))


def test_a_map_is_made_by_its_name() -> None:
    model = Accelerator(cpu=True).prepare(plain(), device_map="auto")
    assert torch.equal(outputs(model), outputs(plain()))


# -- several processes


def test_each_of_several_processes_has_its_own_model_with_parts_on_the_disk(tmp_path: Path) -> None:
    saved(plain(), tmp_path)

    def infer() -> Any:
        accelerator = Accelerator()
        loaded = load_checkpoint_and_dispatch(empty(), tmp_path, {"": "disk"})
        model = accelerator.prepare_model(loaded, evaluation_mode=True)
        mapped = load_checkpoint_and_dispatch(empty(), tmp_path, {"": "cpu"})
        mapped = accelerator.prepare(mapped, device_map=None)
        return accelerator.gather(outputs(model)).shape, torch.equal(outputs(model), outputs(plain()))

    assert run_ranks(2, infer) == [(torch.Size([4, 5, 32]), True)] * 2


def test_what_several_processes_cannot_do_is_said(tmp_path: Path) -> None:
    saved(plain(), tmp_path)

    def refused() -> list[str]:
        accelerator, found = Accelerator(), []
        waiting = load_checkpoint_and_dispatch(empty(), tmp_path, {"": "cpu", "blocks": "disk"})
        trained = torch.optim.SGD([waiting.embed.weight], 0.1)
        model = plain()
        for attempt in (
            lambda: accelerator.prepare(waiting),
            lambda: accelerator.prepare(model, device_map={"": 0, "blocks": 1}),
            lambda: accelerator.prepare(waiting, trained),
        ):
            try:
                attempt()
            except ValueError as error:
                found.append(str(error))
        return found

    for sentences in run_ranks(2, refused):
        assert len(sentences) == 3
        assert "PlacedNet has parts that wait on the host or on the disk, and there are 2 processes" in sentences[0]
        assert "prepare_model(model, evaluation_mode=True)" in sentences[0]
        assert (
            "device_map spreads PlacedNet over 0, 1, and there are 2 processes that need a whole model" in sentences[1]
        )
        assert "(-n 1 --devices 0,1), give each process as many (-n 2 --devices 0,1,2,3)" in sentences[1]
        assert "start one process (-n 1)" in sentences[2]


@pytest.mark.parametrize("device_map", [{"": 0, "blocks": 1}, {"": 1}])
def test_a_rank_with_two_devices_of_its_own_means_these_by_their_numbers(
    monkeypatch: pytest.MonkeyPatch, device_map: dict[str, int]
) -> None:
    """On a machine that is made up: what would be put where, and that the map stays as it is."""
    seen: list[Any] = []
    monkeypatch.setattr(map_of_rank, "dispatch_model", lambda *arguments: seen.append(arguments))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    world = World(1, 2, 1, 2, own_devices=2)
    model = plain()
    assert map_of_rank.place_for_rank([model], device_map, world, torch.device("cuda", 0)) is model  # for inference
    assert seen == [(model, device_map, torch.device("cuda", device_map[""]))]
    with pytest.raises(NoSuchDevice, match="device_map names device 2, and this machine has devices 0 to 1"):
        map_of_rank.place_for_rank([model], {"": 2}, world, torch.device("cuda", 0))


def test_what_is_frozen_may_wait_in_several_processes(tmp_path: Path) -> None:
    saved(plain(), tmp_path)

    def trained() -> tuple[bool, bool, str]:
        accelerator = Accelerator()
        model = load_checkpoint_and_dispatch(empty(), tmp_path, {"": "cpu", "blocks": "disk"}).requires_grad_(False)
        model.head.requires_grad_(True)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.head.parameters(), 0.1))
        accelerator.backward(model(ids().flip(0)[accelerator.process_index :])["logits"].square().mean())
        optimizer.step()
        inner = accelerator.unwrap_model(model)
        is_equal = torch.equal(*accelerator.gather(inner.head.weight.detach()[None]))
        try:  # rows of what waits cannot be cut
            Accelerator(strategy="fsdp").prepare(inner)
        except ValueError as error:
            return is_equal, not hasattr(inner, "_ddp_params_and_buffers_to_ignore"), str(error)
        return is_equal, True, ""

    for is_equal, may_be_plain_again, sentence in run_ranks(2, trained):
        assert is_equal
        assert may_be_plain_again
        assert "freeze what waits (requires_grad_(False)) and use --strategy ddp" in sentence
