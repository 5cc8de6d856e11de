"""What is said beside errors about cards: the line to change. The texts are torch's."""

from __future__ import annotations

import pytest

from nbaccel.launching.attempts import OomKillWatch
from nbaccel.launching.diagnosis import advice
from nbaccel.launching.ipc.reports import ErrorLink

OTHER_CARD = [
    "RuntimeError: Expected all tensors to be on the same device, but got mat1 is on cuda:0, different from other "
    "tensors on cuda:1 (when checking argument in method wrapper_CUDA_addmm)",
    "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:1 and cuda:0!",
    "RuntimeError: module must have its parameters and buffers on device cuda:1 (device_ids[0]) but found one of them "
    "on device: cuda:0",
    "ValueError: DistributedDataParallel device_ids and output_device arguments only work with single-device/"
    "multiple-device GPU modules or CPU modules, but got device_ids [1], output_device 1, and module parameters "
    "{device(type='cuda', index=0)}.",
]
HOST = [
    "RuntimeError: Expected all tensors to be on the same device, but got mat1 is on cpu, different from other "
    "tensors on cuda:0 (when checking argument in method wrapper_CUDA_addmm)",
    "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
]


def said_of(text: str) -> str:
    return advice([ErrorLink(text.partition(":")[0], [text], [])], OomKillWatch())


@pytest.mark.parametrize("text", OTHER_CARD)
def test_a_card_of_another_rank_ends_in_the_line_to_change(text: str) -> None:
    assert said_of(text) == (
        "Each rank computes on a GPU of its own, and a number such as 'cuda:0' names the same GPU in all ranks. "
        "In its place write device = 'cuda', or device = accelerator.device."
    )


@pytest.mark.parametrize("text", HOST)
def test_a_tensor_that_was_left_on_the_host_is_an_error_like_any_other(text: str) -> None:
    assert said_of(text) == ""


def test_a_number_that_a_rank_cannot_see_ends_in_the_line_to_change() -> None:
    said = said_of("torch.AcceleratorError: CUDA error: invalid device ordinal\nGPU device may be out of range")
    assert "has each rank see its own GPU alone, as cuda:0." in said
    assert said.endswith("Leave the number out: device = 'cuda'.")


def test_an_optimizer_that_an_error_of_memory_left_half_made_ends_in_the_line_to_run_again() -> None:
    import torch

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    optimizer.state[weight].update(step=torch.tensor(0.0), exp_avg=torch.zeros(2))  # no room was left for the other
    weight.grad = torch.ones(2)
    with pytest.raises(KeyError) as error:
        optimizer.step()
    assert "run the cell again that makes the optimizer" in said_of(f"KeyError: {error.value}")
    assert said_of("KeyError: 'labels'") == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("RuntimeError: aten.add.Tensor got mixed torch.Tensor and DTensor, need to convert all", ".full_tensor()"),
        ("RuntimeError: .numpy() is not supported for tensor subclasses.", ".full_tensor()"),
        ("TypeError: unsupported format string passed to DTensor.__format__", ".full_tensor()"),
        ("RuntimeError: Cannot flatten unevenly sharded tensor: dimension 0 (size 5)", ".full_tensor()"),
        ("RuntimeError: aten.pow_.Scalar: in-place operations that require placement changes are not", "Adafactor"),
        (
            "NotImplementedError: Operator aten.t_.default does not have a sharding strategy registered.",
            "before prepare",
        ),
        ("RuntimeError: as_strided not supported with DTensor", "before prepare"),
        ("AttributeError: 'Parameter' object has no attribute '_local_tensor'", "without assign=True"),
        ("AssertionError: FSDP does not support deepcopy. Please use state dict for serialization.", "--out model"),
        ("PicklingError: Can't pickle <class 'torch.distributed.fsdp._fully_shard._fsdp_init.FSDPNet'>", "--out model"),
        ("RuntimeError: _apply(): Couldn't swap FSDPLinear.weight", "cast it before"),
        (
            "RuntimeError: setStorage: sizes [6, 8], strides [1, 6], storage offset 0, and itemsize 4 requiring a "
            "storage size of 192 are out of bounds for storage of size 0",
            "second derivative",
        ),
        (
            "NotImplementedError: Could not run 'fsdp::chunk_cat' with arguments from the 'SparseCPU' backend.",
            "sparse=True",
        ),
    ],
)
def test_what_torch_says_of_sharded_models_is_said_in_terms_of_the_program(text: str, words: str) -> None:
    assert words in said_of(text)
