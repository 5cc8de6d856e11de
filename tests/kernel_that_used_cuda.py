"""A program that launches ranks after its process has used CUDA's driver and autograd, on a machine without a GPU.

It gets the path of a driver that only pretends, and prints as JSON what became of each launch. The GPU that autograd
finds is a device of torch's that is written in Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils import backend_registration

from nbaccel.base import forkable
from nbaccel.launching.api import launch


def train() -> float:
    weight = torch.ones(3, requires_grad=True)
    (weight * 3).sum().backward()
    assert weight.grad is not None
    return float(weight.grad.sum())


def launched(**flags: Any) -> list[Any]:
    """The method by which ranks started, why so, and what they computed; or the error."""
    try:
        run = launch(train, 2, **flags)
    except Exception as error:
        return [type(error).__name__, str(error), []]
    return [run.start_method, run.start_reason, run.values]


@contextlib.contextmanager
def blind() -> Iterator[None]:
    """This process sees nothing that would break a fork, so its ranks have to."""
    with contextlib.ExitStack() as blinded:
        for module in ("preflight", "launcher"):
            blinded.enter_context(mock.patch(f"nbaccel.launching.{module}.why_forks_fail", return_value=None))
        yield


def all_launches(name: str, **flags: Any) -> dict[str, list[Any]]:
    found = {name: launched(**flags), f"{name}, insisted": launched(start_method="fork", **flags)}
    with blind():
        found[f"{name}, unseen"] = launched(**flags)
        found[f"{name}, unseen, insisted"] = launched(start_method="fork", **flags)
    return found


def with_driver(path: str) -> dict[str, list[Any]]:
    with mock.patch.object(forkable, "has_gpu_driver", return_value=True):
        found = {"no driver": launched()}
        driver = ctypes.CDLL(path)
        found["driver loaded"] = launched()
        driver.cuInit(0)
        found |= all_launches("driver")
    return found


def with_autograd() -> dict[str, list[Any]]:
    backend_registration._setup_privateuseone_for_python_backend("fake")
    train()
    while "pt_autograd_0" not in names_of_threads():
        time.sleep(0.001)  # it gets its name when it gets the interpreter's lock
    with (
        mock.patch("nbaccel.base.forkable.loaded_driver", return_value=None),
        mock.patch("nbaccel.launching.rank.process_setup.loaded_driver", return_value=None),
    ):
        return all_launches("autograd", cpu=True)


def names_of_threads() -> set[str]:
    return {task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")}


if __name__ == "__main__":
    facts = with_driver(sys.argv[1])
    if hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):  # of newer versions of torch
        facts |= with_autograd()
    print(json.dumps(facts))
