"""``planning.py gpt2|resnet50``: batch sizes of a real model in fp16 on a T4's memory, ours and Accelerate's."""

from __future__ import annotations

import json
import math
import sys
import time
from typing import Any

import torch
from device import TRAININGS, Training, cut_down, release

from nbaccel import Accelerator
from nbaccel.failures import can_retry
from nbaccel.train.data.placement import to_device

CUDA = torch.device("cuda", 0)


def trains(training: Training, size: int) -> bool:
    """Whether a plain prepared loop gets through three steps of `size`."""
    accelerator = Accelerator(mixed_precision="fp16")
    try:
        model, optimizer = accelerator.prepare(*training.make())
        for _ in range(3):
            batch = to_device(training.batch(size), CUDA)
            accelerator.backward(training.loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
    except RuntimeError as error:
        if not can_retry(error):
            raise
        return False
    return True


def find(training: Training) -> tuple[int, list[int]]:
    """What `find_batch_size` finds, and the sizes that it tried."""
    tried: list[int] = []
    accelerator = Accelerator(mixed_precision="fp16")
    model, _ = accelerator.prepare(*training.make())

    def loss_fn(batch: Any) -> torch.Tensor:
        size = len(batch if isinstance(batch, torch.Tensor) else batch[0])
        if tried[-1:] != [size]:
            tried.append(size)
        return training.loss(model, batch)

    return accelerator.find_batch_size(loss_fn, training.batch(2)), tried


def accelerates_way(training: Training) -> int:
    from accelerate.utils import find_executable_batch_size

    def train(batch_size: int) -> int:
        accelerator = Accelerator(mixed_precision="fp16")
        model, optimizer = accelerator.prepare(*training.make())
        for _ in range(2):
            accelerator.backward(training.loss(model, to_device(training.batch(batch_size), CUDA)))
            optimizer.step()
            optimizer.zero_grad()
        return batch_size

    found: int = find_executable_batch_size(train, starting_batch_size=1024)()
    return found


def main() -> None:
    training = TRAININGS[sys.argv[1]]
    cut_down()
    before = torch.cuda.memory_stats().get("num_ooms", 0)
    began = time.perf_counter()
    size, tried = find(training)
    took_s = time.perf_counter() - began
    failed = torch.cuda.memory_stats()["num_ooms"] - before
    release()
    fits = trains(training, size)
    release()
    more_fits = trains(training, max(math.ceil(size / 0.97), size + 3))
    release()
    began = time.perf_counter()
    theirs = accelerates_way(training)
    result = {
        "size": size, "tried": tried, "failed": failed, "took_s": took_s, "fits": fits, "more_fits": more_fits,
        "theirs": theirs, "their_s": time.perf_counter() - began,
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
