"""ReducedParts with an engine of a few lines, so without the package: what is compared when, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import all_reduce, get_rank

from nbaccel import Accelerator
from nbaccel.features.deepspeed.reduced_parts import ReducedParts
from nbaccel.testing import run_ranks

REFUSED = "the ranks have used different parts"


class Zero:
    """An optimizer of stage 1 or 2: it reduces buckets, and sums up a norm unless its states are on the host."""

    def __init__(self, cpu_offload: bool) -> None:
        self.cpu_offload = cpu_offload
        self.ipg_buckets = {torch.float32: SimpleNamespace(params=[])}
        self.norms = 0

    def reduce_ipg_grads(self) -> None:
        self.ipg_buckets[torch.float32].params.clear()

    def get_grad_norm_direct(self, gradients: Sequence[Tensor], params: Sequence[Tensor]) -> Tensor:
        self.norms += 1
        total = sum((each.square().sum() for each, _ in zip(gradients, params, strict=False)), torch.zeros(()))
        all_reduce(total)
        return total.sqrt() if total.isfinite() else torch.tensor(-1.0)


def _steps(steps: Sequence[tuple[str, str]], cpu_offload: bool = False) -> list[Any]:
    """Reduce the parts of each step, a letter each, of this rank; return its norms and how often they were taken."""
    Accelerator(cpu=True)
    zero = Zero(cpu_offload)
    parts = ReducedParts(SimpleNamespace(optimizer=zero), torch.device("cpu"))
    found: list[Any] = []
    gradient = torch.tensor([3.0, 4.0])
    for step in steps:
        for part in step[get_rank()].rstrip("!"):
            zero.ipg_buckets[torch.float32].params.append((0, None, ord(part)))
            zero.reduce_ipg_grads()
        value = gradient / 0 if "!" in step[get_rank()] else gradient  # infinite in this rank
        own = [value] if get_rank() == 0 else [value, value]  # two groups of gradients, of unequal numbers
        before = zero.norms
        try:
            parts.begin_step()
            norms = [] if cpu_offload else [float(zero.get_grad_norm_direct(own, own)) for _ in range(2)]
        except NotImplementedError as error:
            found.append(str(error)[: len(REFUSED)])
            continue
        parts.end_step()
        found.append((norms[0] if norms else None, zero.norms - before))
    return found


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        ([("ab", "ab")] * 3, [3, 2, 2]),
        ([("ab", "ab"), ("a", "a"), ("a", "a"), ("ab", "ab")], [3, 3, 2, 3]),
        ([("ab", "ab"), ("ab", "ba"), ("ab", "ab")], [3, REFUSED, 2]),
        ([("ab", "ba"), ("ba", "ba"), ("ba", "ab")], [REFUSED, 3, REFUSED]),
        ([("", ""), ("", "a")], [2, REFUSED]),
    ],
)
def test_only_a_step_of_other_parts_is_compared_by_itself(steps: list[tuple[str, str]], wanted: list[Any]) -> None:
    norm = pytest.approx(75**0.5)
    expected = [each if each == REFUSED else (norm, each) for each in wanted]
    assert run_ranks(2, lambda: _steps(steps)) == [expected] * 2


def test_a_gradient_that_is_not_finite_is_no_difference_of_parts() -> None:
    steps = [("a", "a"), ("a!", "a"), ("a", "a")]
    assert [[count for _, count in found] for found in run_ranks(2, lambda: _steps(steps))] == [[3, 3, 2]] * 2


def test_states_on_the_host_are_compared_in_every_step() -> None:
    steps = [("a", "a"), ("a", "a"), ("a", "b")]
    assert run_ranks(2, lambda: _steps(steps, cpu_offload=True)) == [[(None, 0), (None, 0), REFUSED]] * 2
