"""``pair.py cuda|cpu early|late|finally|killed|soak|hang``: two ranks that need each other, and one that fails.

On cards they talk by NCCL: each on its own, or both on one that NCCL takes for two machines' (`one_card`). ``cpu`` runs
the same by gloo, whose sums fail where NCCL's hang: that proves these programs, and not what they are for.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from device import exactly
from one_card import enter, let_ranks_share
from torch import Tensor, nn

from gpu.facts import fact, tell_cases
from nbaccel import Accelerator, find_executable_batch_size, launch
from nbaccel.base.hardware import Survey
from nbaccel.testing import Faults, run_ranks

SETUP = "nbaccel.train.setup:setup_rank"
EARLY = {"forward": "forward", "backward": "backward"}
LATE = {
    "optimizer step": "optimizer",
    "after the step, while peers compute": "after optimizer",
    "after peers have finished": "end",
}
_START, _STEPS = 16, 3
_PLACE_S = 30
_RUN_S = 40.0
_HANG_S = {"cuda": 12.0, "cpu": 3.0}
"""Longer than ranks take to make contexts and to connect by NCCL, while they enter nothing."""
_SOAK, _ROUND = 200, 10


def _accelerator(device: str) -> Accelerator:
    exactly()
    return Accelerator(cpu=device == "cpu")


def _digest(model: nn.Module) -> str:
    """Equal for models of equal weights, to the bit."""
    data = b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in model.state_dict().values())
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _batch(size: int, rank: int, step: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, 256, generator=generator).to(device)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 1))


# Memory that runs out on one rank -------------------------------------------------------------------------------------


def _in_the_function(device: str, point: str) -> dict[str, Any]:
    """What each attempt came to on this rank: how many steps its optimizer took, and what it raised."""
    enter(device)
    accelerator = _accelerator(device)
    rank = accelerator.process_index
    faults = Faults().oom_at(point, rank=1, **({} if point == "end" else {"step": 1}))
    attempts: list[dict[str, Any]] = []

    @find_executable_batch_size(starting_batch_size=_START)
    def train(batch_size: int) -> str:
        accelerator.free_memory()
        attempts.append({"size": batch_size, "steps": 0, "raised": ""})
        bare = _net()
        model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.01))
        inner = optimizer.optimizer

        def count(*_: Any) -> None:
            attempts[-1]["steps"] += 1

        inner.register_step_post_hook(count)
        try:
            with faults.in_model(model), faults.in_optimizer(inner):
                for faults.step in range(_STEPS):
                    accelerator.backward(
                        model(_batch(batch_size, rank, faults.step, accelerator.device)).square().mean()
                    )
                    optimizer.step()
                    optimizer.zero_grad()
            faults.at("end")
        except BaseException as error:
            attempts[-1]["raised"] = f"{type(error).__name__}: {error}"[:200]
            raise
        return _digest(accelerator.unwrap_model(model))

    with faults:
        weights = train()
    total = int(accelerator.reduce(torch.ones((), device=accelerator.device)))
    return {"attempts": attempts, "weights": weights, "sum": total, "fired": len(faults.fired)}


def _searched(device: str, places: dict[str, str]) -> dict[str, Any]:
    """What both ranks found, by the place where rank 1 ran out of memory; or why they did not."""
    told: dict[str, Any] = {}
    for place, point in places.items():
        began = time.perf_counter()
        try:
            told[place] = run_ranks(2, _in_the_function, device, point, timeout_s=_PLACE_S)
            found = [one["attempts"] for one in told[place]]
        except Exception as error:
            told[place] = found = [f"{type(error).__name__}: {error}"]
        fact(place, {"found": found, "s": round(time.perf_counter() - began, 1)})
    return told


def early(device: str) -> dict[str, Any]:
    """A search whose rank 1 runs out of memory before its gradients are in the sum."""
    return _searched(device, EARLY)


def late(device: str) -> dict[str, Any]:
    """And afterwards."""
    return _searched(device, LATE)


# Ends -----------------------------------------------------------------------------------------------------------------


def _error_of(run: Callable[[], Any]) -> tuple[str, float]:
    began = time.monotonic()
    try:
        run()
    except BaseException as error:
        notes = getattr(error, "__notes__", [])
        return "\n".join([f"{type(error).__name__}: {error}", *notes])[:1500], round(time.monotonic() - began, 2)
    return "", round(time.monotonic() - began, 2)


def _launched(device: str, function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """How the launch of `function` in two ranks ended, and how long that took, from its beginning."""
    error, took_s = _error_of(
        lambda: launch(
            function, 2, (device,), cpu=device == "cpu", start_method="fork", setup=SETUP, timeout_s=_RUN_S, **options
        )
    )
    used = [gpu.used_bytes // 10**6 for gpu in Survey.take().gpus]
    fact("ended", {"error": error, "took_s": took_s, "used_mb": used})
    return {"error": error, "took_s": took_s}


def _ends_in_finally(device: str) -> None:
    accelerator = _accelerator(device)
    bare = _net()
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.01))
    try:
        for step in range(1000):
            accelerator.backward(model(_batch(8, accelerator.process_index, step, accelerator.device)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if step == 3 and accelerator.process_index == 0:
                time.sleep(1000)  # the sum that rank 1 begins is one that it never joins
            if step == 3:
                accelerator.collectives.start_sum(torch.ones(1000, device=accelerator.device))
                raise ValueError("on purpose")
    finally:
        accelerator.end_training()


def finally_(device: str) -> dict[str, Any]:
    """`end_training` in a `finally`, while a sum is under way."""
    return _launched(device, _ends_in_finally)


def _dies_in_a_sum(device: str) -> None:
    accelerator = _accelerator(device)
    bare = _net()
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.01))
    for step in range(1000):
        if step == 3 and accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model(_batch(8, accelerator.process_index, step, accelerator.device)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()


def killed(device: str) -> dict[str, Any]:
    """A rank that is killed while its peer waits for it."""
    return _launched(device, _dies_in_a_sum)


def _never_comes(device: str) -> None:
    accelerator = _accelerator(device)
    bare = _net()
    model = accelerator.prepare(bare)
    for step in range(1000):
        if step == 3 and accelerator.process_index == 1:
            time.sleep(1000)
        loss = model(_batch(8, accelerator.process_index, step, accelerator.device)).square().mean()
        accelerator.backward(loss)
        loss.item()


def hang(device: str) -> dict[str, Any]:
    """A rank that sleeps while its peer waits for it: the report of the hang."""
    return _launched(device, _never_comes, hang_timeout_s=_HANG_S[device])


# Many steps -----------------------------------------------------------------------------------------------------------


def _soaked(device: str, steps: int) -> dict[str, Any]:
    """Steps in which memory runs out at random, in a forward or a backward, on either rank."""
    enter(device)
    accelerator = _accelerator(device)
    rank = accelerator.process_index
    chance = random.Random(rank)
    bare = _net()
    ooms = 0
    for step in range(steps):
        if step % _ROUND == 0:  # what fits is found out anew
            accelerator.free_memory()
            accelerator = _accelerator(device)
            model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.01))
        fails = chance.choice(["", "", "", "forward", "backward"])

        def loss_fn(part: Tensor, fails: str = fails, model: nn.Module = model) -> Tensor:
            nonlocal ooms

            def refuse(gradient: Tensor) -> Tensor:
                nonlocal ooms
                ooms += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. On purpose.")

            output: Tensor = model(part)
            if fails and len(part) > 8:
                if fails == "forward":
                    refuse(output)
                output.register_hook(refuse)
            return output.square().mean()

        accelerator.forward_backward(loss_fn, _batch(32, rank, step, accelerator.device), micro_batch_size=32)
        optimizer.step()
        optimizer.zero_grad()
    return {"ooms": ooms, "digest": _digest(bare), "weights": [part.detach().cpu() for part in bare.parameters()]}


def soak(device: str) -> dict[str, Any]:
    """Two ranks and their reference: all batches in one process, on the host."""
    steps = _SOAK if device == "cuda" else 20
    began = time.perf_counter()
    ranks = run_ranks(2, _soaked, device, steps, timeout_s=45)
    took_s = time.perf_counter() - began
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        batch = torch.cat([_batch(32, rank, step, torch.device("cpu")) for rank in range(2)])
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(ranks[0]["weights"], model.parameters(), strict=True)
    off = max(float((one - other).detach().abs().max()) for one, other in pairs)
    found = {"ooms": [rank["ooms"] for rank in ranks], "digests": [rank["digest"] for rank in ranks], "off": off}
    fact("soak", {**found, "steps_per_s": round(steps / took_s, 1)})
    return found


CASES = {"early": early, "late": late, "finally": finally_, "killed": killed, "soak": soak, "hang": hang}


if __name__ == "__main__":
    let_ranks_share(sys.argv[1])
    tell_cases(CASES, sys.argv[1:])
