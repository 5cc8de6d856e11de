"""Models of transformers with parts on the disk: generation, adapters of peft, weights under transformers' names."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nbaccel import (
    Accelerator,
    PartialState,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from nbaccel.testing import run_ranks

pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft asks transformers for it
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated"),
    pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules"),
]


def config(tied: bool) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )


def whole(tied: bool = False) -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(config(tied)).eval()


def empty(tied: bool = False) -> Any:
    from transformers import AutoModelForCausalLM

    with init_empty_weights():
        return AutoModelForCausalLM.from_config(config(tied)).eval()


def prompts() -> Tensor:
    return torch.arange(2, 14).view(2, 6)


def generated(model: Any) -> Tensor:
    found: Tensor = model.generate(prompts(), max_new_tokens=8, do_sample=False)
    return found


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Written by transformers, in shards."""
    whole().save_pretrained(tmp_path / "llama", max_shard_size="40KB")
    return tmp_path / "llama"


@pytest.mark.parametrize(
    "places",
    [
        {"": "disk"},
        {"": "cpu", "model.layers": "disk"},
        {"": "cpu", "model.layers.1": "disk", "lm_head": "disk", "model.layers.2.mlp": "disk"},
    ],
    ids=["disk", "layers", "mixed"],
)
def test_texts_are_those_of_the_whole_model(checkpoint: Path, places: dict[str, Any]) -> None:
    model = load_checkpoint_and_dispatch(empty(), checkpoint, places)
    assert torch.equal(generated(model), generated(whole()))
    with torch.no_grad():
        assert torch.equal(model(prompts()).logits, whole()(prompts()).logits)


def test_a_map_is_made_of_whole_layers(checkpoint: Path) -> None:
    model = empty()
    found = infer_auto_device_map(model, max_memory={0: "160KB", 1: "40KB", "cpu": "1GB"})
    assert set(found.values()) <= {0, 1, "cpu"}
    assert not [name for name in found if name.startswith("model.layers.") and name.count(".") > 2]
    size = sum(parameter.nbytes for parameter in model.parameters())
    loaded = load_checkpoint_and_dispatch(model, checkpoint, "auto", max_memory={"cpu": int(size * 0.9)})
    assert "disk" in loaded.hf_device_map.values()
    assert torch.equal(generated(loaded), generated(whole()))


def test_tied_weights_are_found_under_their_other_name(tmp_path: Path) -> None:
    whole(tied=True).save_pretrained(tmp_path)
    model = empty(tied=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for places in ({"": "disk"}, {"": "cpu", "lm_head": "disk"}):
        loaded = load_checkpoint_and_dispatch(empty(tied=True), tmp_path, places)
        assert torch.equal(generated(loaded), generated(whole(tied=True)))


def test_a_dispatched_model_is_saved_by_transformers(checkpoint: Path, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model = load_checkpoint_and_dispatch(empty(), checkpoint, {"": "cpu", "model.layers": "disk"})
    model.save_pretrained(tmp_path / "again", state_dict=model.state_dict())
    again = LlamaForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(generated(again.eval()), generated(whole()))


def adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def longer_prompts() -> Tensor:
    return torch.arange(2, 26).view(4, 6)


def trained(model: nn.Module, ids: Tensor, device_map: dict[str, Any] | None = None) -> dict[str, Tensor]:
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer, device_map=device_map)
    for _ in range(2):
        accelerator.backward(model(ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
    inner = accelerator.unwrap_model(model)
    return {name: each.detach().clone() for name, each in inner.named_parameters() if each.requires_grad}


def test_adapters_of_peft_are_trained_on_layers_that_are_on_the_disk(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    wanted = trained(adapted(whole()), prompts())
    model = dispatch_model(
        adapted(whole()), {"": "cpu", "base_model.model.model.layers": "disk"}, offload_dir=tmp_path / "offloaded"
    )
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert layer.base_layer.weight.is_meta
    assert not layer.lora_A["default"].weight.is_meta
    found = trained(model, prompts())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_adapters_that_peft_makes_after_the_map_have_no_numbers(checkpoint: Path) -> None:
    """It makes them where the weight is, which is nowhere then."""
    pytest.importorskip("peft")
    loaded = load_checkpoint_and_dispatch(empty(), checkpoint, {"": "cpu", "model.layers": "disk"})
    with pytest.raises(ValueError, match=r"so they would never be trained: .* adapters \(peft\), made before"):
        trained(adapted(loaded), prompts())


def test_activations_of_transformers_may_be_recomputed(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    models = [adapted(whole()).train() for _ in range(2)]
    for model in models:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    dispatch_model(models[1], {"": "cpu", "base_model.model.model.layers": "disk"}, offload_dir=tmp_path)
    wanted, found = (trained(model, prompts()) for model in models)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_two_ranks_generate_what_one_does(checkpoint: Path) -> None:
    wanted = generated(whole())

    def shared() -> bool:
        state = PartialState()
        loaded = load_checkpoint_and_dispatch(empty(), checkpoint, {"": "disk"})
        model = Accelerator().prepare_model(loaded, evaluation_mode=True)
        with state.split_between_processes(prompts()) as mine:
            texts = model.generate(mine, max_new_tokens=8, do_sample=False)
        return torch.equal(Accelerator().gather(texts), wanted)

    assert run_ranks(2, shared) == [True, True]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("max_memory", [None, {0: "1GB", 1: "1GB"}, {"cpu": "1GB"}], ids=str)
def test_a_prepared_model_generates_what_the_plain_one_does(max_memory: Any, world_size: int) -> None:
    def generate() -> list[bool]:
        accelerator = Accelerator(cpu=True)
        model, wanted = whole(), generated(whole())
        if max_memory is None:
            model = accelerator.prepare_model(model, evaluation_mode=True)
        else:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="device_map names device 0")  # which is not there
                model = accelerator.prepare(model, device_map=infer_auto_device_map(model, max_memory=max_memory))
        with accelerator.split_between_processes(prompts()) as mine:
            texts = model.generate(mine, max_new_tokens=8, do_sample=False)
        return [torch.equal(accelerator.gather(texts), wanted), torch.equal(generated(model), wanted)]

    assert run_ranks(world_size, generate) == [[True, True]] * world_size


@pytest.mark.parametrize("place", ["", "cpu", "disk"], ids=["no map", "cpu", "disk"])
def test_adapters_in_two_ranks_are_those_of_one_process(place: str, tmp_path: Path) -> None:
    """Also where all layers wait on the disk: what is exchanged are the adapters, which do not."""
    pytest.importorskip("peft")
    places = {"": "cpu", "base_model.model.model.layers": place}

    def of_a_rank(of_ranks: int) -> dict[str, Tensor]:
        """Those of all texts, or of this rank's half."""
        model, rank = adapted(whole()), Accelerator(cpu=True).process_index
        if place == "disk" and of_ranks > 1:
            dispatch_model(model, places, offload_dir=tmp_path / str(rank))
            assert sum(parameter.is_meta for parameter in model.parameters()) > 20
        device_map = places if place == "cpu" else None
        return trained(model, longer_prompts().chunk(of_ranks)[rank], device_map)

    (wanted,) = run_ranks(1, of_a_rank, 1)
    for found in run_ranks(2, of_a_rank, 2):
        assert found.keys() == wanted.keys()
        assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)


def test_a_model_that_transformers_has_dispatched_is_not_moved(checkpoint: Path, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    places = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    theirs = LlamaForCausalLM.from_pretrained(
        checkpoint, device_map={**places, "lm_head": "cpu"}, offload_folder=tmp_path / "theirs"
    ).eval()
    wanted = generated(theirs)
    prepared = Accelerator().prepare(theirs)
    assert torch.equal(generated(prepared), wanted)

    def refused() -> str:
        try:
            Accelerator().prepare(copy.copy(theirs))
        except ValueError as error:
            return str(error)
        return ""

    for sentence in run_ranks(2, refused):
        assert "has parts that wait on the host or on the disk, and there are 2 processes" in sentence
