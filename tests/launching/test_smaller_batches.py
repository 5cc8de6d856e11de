"""find_executable_batch_size in ranks of our launcher, with an Accelerator that was made in the kernel."""

from __future__ import annotations

import time

import pytest
import torch

from nbaccel import Accelerator, find_executable_batch_size, launch

_ACCELERATOR = Accelerator()
"""Made in the kernel, as notebooks do."""


def _program(error: type[Exception]) -> tuple[int, list[int]]:
    tried = []

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int) -> int:
        _ACCELERATOR.free_memory()
        tried.append(batch_size)
        model = torch.nn.Linear(8, 4)
        model, optimizer = _ACCELERATOR.prepare(model, torch.optim.Adam(model.parameters()))
        for step in range(3):
            loss = model(torch.randn(batch_size, 8)).square().mean()
            if step == 1 and batch_size > 8 and _ACCELERATOR.process_index == 1:
                raise error("image")
            _ACCELERATOR.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return batch_size

    return train(), tried


@pytest.mark.slow
def test_21_ranks_of_our_launcher_land_on_one_size(start_method: str) -> None:
    assert launch(_program, 2, (MemoryError,), start_method=start_method).values == [(8, [16, 8])] * 2


@pytest.mark.slow
def test_22_a_key_error_of_one_rank_is_that_error_in_the_kernel_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(KeyError, match="image") as raised:
        launch(_program, 2, (KeyError,), start_method="fork")
    assert time.monotonic() - began < 15  # 1 s on an idle machine
    assert "raised on rank 1 of 2" in raised.value.__notes__[0]
