"""Models without memory for their weights."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch import nn

from nbaccel.features.big_models.empty_weights import init_empty_weights, init_on_device


def test_parameters_are_on_the_meta_device_and_buffers_are_real() -> None:
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model[1].running_var, torch.ones(4))


def test_buffers_too_where_they_are_asked_for() -> None:
    with init_empty_weights(include_buffers=True):
        model = nn.BatchNorm1d(4)
    assert all(tensor.is_meta for tensor in model.state_dict().values())


@pytest.mark.skipif("MALLOC_PERTURB_" in os.environ, reason="glibc fills memory there that nobody reads: 120 GB of it")
def test_a_model_that_no_memory_could_hold_is_made() -> None:
    with init_empty_weights():
        model = nn.Sequential(*(nn.Linear(10**4, 10**4) for _ in range(300)))
    assert sum(parameter.nbytes for parameter in model.parameters()) > 10**11


def test_tied_parameters_stay_tied() -> None:
    """Accelerate makes two of them, so that `tie_weights` has to be called again."""
    with init_empty_weights():
        model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
    assert model[1].weight is model[0].weight


def test_everything_is_as_before_afterwards_also_after_an_error() -> None:
    before = nn.Module.register_parameter, nn.Module.register_buffer, nn.init.kaiming_uniform_
    with pytest.raises(KeyError), init_empty_weights(include_buffers=True):
        raise KeyError
    assert before == (nn.Module.register_parameter, nn.Module.register_buffer, nn.init.kaiming_uniform_)
    assert not nn.Linear(2, 2).weight.is_meta


def test_blocks_nest() -> None:
    with init_empty_weights():
        with init_on_device("cpu"):
            inner = nn.Linear(2, 2)
        outer = nn.Linear(2, 2)
    assert outer.weight.is_meta
    assert inner.weight.is_meta  # the outer block moves what the inner one has made


def test_requires_grad_and_marks_of_a_parameter_go_along() -> None:
    with init_empty_weights():
        module = nn.Module()
        parameter = nn.Parameter(torch.ones(2), requires_grad=False)
        parameter.is_special = True
        module.weight = parameter
    assert module.weight.is_meta
    assert not module.weight.requires_grad
    assert module.weight.is_special


def test_a_subclass_of_parameters_stays_one() -> None:
    class Scaled(nn.Parameter):
        def __new__(cls, data: torch.Tensor, requires_grad: bool = True, scale: float = 1.0) -> Scaled:
            made = super().__new__(cls, data, requires_grad)
            made.scale = scale
            return made

    with init_empty_weights():
        module = nn.Module()
        module.weight = Scaled(torch.ones(2), scale=3.0)
    assert type(module.weight) is Scaled
    assert module.weight.is_meta
    assert module.weight.scale == 3.0


def test_lazy_parameters_wait_for_their_shape() -> None:
    with init_empty_weights():
        model = nn.LazyLinear(3)
    model(torch.ones(1, 2))
    assert model.weight.shape == (3, 2)


def test_initialisations_of_real_tensors_work_inside_of_the_block() -> None:
    with init_empty_weights():
        assert torch.equal(nn.init.ones_(torch.zeros(2)), torch.ones(2))
        model = nn.Linear(2, 2)
        nn.init.trunc_normal_(model.weight)
        nn.init.orthogonal_(model.weight)


def test_nothing_of_torch_is_imported_for_it() -> None:
    """torch imports hundreds of modules for initialisations on the meta device: sympy among them."""
    before = set(sys.modules)
    with init_empty_weights():
        nn.TransformerEncoderLayer(8, 2, 16)
    assert not {name for name in set(sys.modules) - before if name.startswith(("sympy", "torch._refs"))}


def test_a_device_is_named_in_any_form() -> None:
    with init_on_device(torch.device("cpu")):
        assert nn.Linear(2, 2).weight.device.type == "cpu"
    with init_on_device("meta"):
        assert nn.Linear(2, 2).weight.is_meta


def test_models_of_transformers_are_made_empty_and_tied() -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
