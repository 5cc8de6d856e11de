"""Functions over nested batches."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from nbaccel.utils import (
    concatenate,
    convert_outputs_to_fp32,
    convert_to_fp32,
    find_batch_size,
    is_torch_tensor,
    listify,
    recursively_apply,
    send_to_device,
    slice_tensors,
)

Pair = namedtuple("Pair", "x y")


class Movable:
    """Anything with a `to`, such as a transformers BatchEncoding."""

    device: Any = "cpu"

    def to(self, device: Any) -> Movable:
        self.device = device
        return self


def test_a_function_reaches_every_tensor_and_keeps_the_containers() -> None:
    data = {"a": [torch.ones(1), "text"], "b": Pair(torch.zeros(2), None)}
    result = recursively_apply(lambda tensor, add, by=1: (tensor + add) * by, data, 1, by=2)
    assert result["a"][0].tolist() == [4]
    assert result["a"][1] == "text"
    assert isinstance(result["b"], Pair)
    assert result["b"].x.tolist() == [2, 2]


def test_other_types_are_an_error_when_asked() -> None:
    def double(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2

    with pytest.raises(TypeError, match="double takes tensors in any nesting of containers; in it was a str"):
        recursively_apply(double, [torch.ones(1), "text"], error_on_other_type=True)
    assert recursively_apply(len, ["ab", 3], test_type=lambda leaf: isinstance(leaf, str)) == [2, 3]


def test_batches_are_sent_and_named_keys_stay() -> None:
    movable = Movable()
    batch = {"x": torch.ones(2), "stays": torch.zeros(1), "more": {"y": torch.ones(1), "stays": 3}, "m": movable}
    sent = send_to_device(batch, "meta", skip_keys="stays")
    assert [sent["x"].device.type, sent["more"]["y"].device.type, movable.device] == ["meta", "meta", "meta"]
    assert sent["stays"] is batch["stays"]
    assert list(sent) == ["x", "stays", "more", "m"]
    assert send_to_device(batch, torch.device("meta"), skip_keys=["x", "m"])["x"] is batch["x"]
    assert type(send_to_device(Pair(torch.ones(1), 2), "meta")) is Pair


def test_the_batch_size_is_that_of_the_first_tensor() -> None:
    assert find_batch_size({"id": 3, "x": [torch.ones(5, 2), torch.ones(4)]}) == 5
    with pytest.raises(ValueError, match="no batch size can be read from this dict"):
        find_batch_size({"x": torch.tensor(1.0), "y": "text"})


def test_halves_become_fp32_wherever_they_are() -> None:
    @dataclass
    class Output:
        logits: torch.Tensor
        ids: torch.Tensor

    output = convert_to_fp32({"o": Output(torch.ones(1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.int64))})
    assert output["o"].logits.dtype is torch.float32
    assert output["o"].ids.dtype is torch.int64

    @convert_outputs_to_fp32
    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        """Forward."""
        return [x.half()]

    assert forward(torch.ones(2))[0].dtype is torch.float32
    assert forward.__doc__ == "Forward."


def test_tensors_are_sliced_and_become_lists() -> None:
    batch = {"x": torch.arange(6).reshape(3, 2), "more": [torch.ones(3)], "name": "a"}
    sliced = slice_tensors(batch, slice(1, 3))
    assert listify(sliced) == {"x": [[2, 3], [4, 5]], "more": [[1.0, 1.0]], "name": "a"}
    assert [is_torch_tensor(value) for value in (batch["x"], batch["name"])] == [True, False]


def test_batches_are_joined_along_the_samples() -> None:
    joined = concatenate([{"x": torch.ones(1, 2)}, {"x": torch.zeros(2, 2)}])
    assert joined["x"].tolist() == [[1, 1], [0, 0], [0, 0]]
    nested = concatenate([(torch.arange(2), [torch.arange(1)]), (torch.arange(3), [torch.arange(2)])])
    assert [nested[0].tolist(), nested[1][0].tolist()] == [[0, 1, 0, 1, 2], [0, 0, 1]]
    assert concatenate([{"name": "a"}]) == {"name": "a"}


def test_what_is_no_tensor_is_not_joined_by_leaving_it_out() -> None:
    with pytest.raises(TypeError, match=r"concatenate joins tensors .* in it was a str"):
        concatenate([{"x": torch.ones(1), "name": "a"}, {"x": torch.ones(1), "name": "b"}])
