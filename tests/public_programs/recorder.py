"""Run one public program in this process, and write down what it trained.

    python recorder.py task.json

A starter (python, torchrun, `nbaccel launch`, ...) runs this file in the program's place, so the same hooks see
Accelerate and nbaccel. A rank's record holds every loss given to `Accelerator.backward`, a hash of what each call of
transformers' `generate` and of a pipeline of diffusers returned, and per optimizer the number of its steps and the
parameters after the last one: their sum in float64 and a hash of their bits. They are read right after each step,
because a program may have dropped its model by the end. What changes parameters otherwise is not seen.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import random
import runpy
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

SEED = 20


class Record:
    """What this process trained, in `folder/rank<RANK>.json` after every optimizer step and at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._losses: list[float] = []
        self._outputs: list[str] = []
        self._optimizers: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._optimizer_records: list[dict[str, Any]] = []

    def add_loss(self, loss: torch.Tensor) -> None:
        self._losses.append(loss.detach().double().sum().item())

    def add_output(self, output: Any) -> None:
        self._outputs.append(hashlib.sha256(repr(output).encode()).hexdigest()[:16])
        self.write()

    def add_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = {"name": type(optimizer).__name__, "steps": 0}
            self._optimizer_records.append(self._optimizers[optimizer])
        record = self._optimizers[optimizer]
        record["steps"] += 1
        record["sum"], record["hash"] = fingerprint(optimizer)
        self.write()

    def write(self) -> None:
        if self._losses or self._optimizer_records or self._outputs:
            record = {"losses": self._losses, "optimizers": self._optimizer_records, "outputs": self._outputs}
            text = json.dumps(record)
            (self._folder / f"rank{os.environ.get('RANK', '0')}.json").write_text(text, encoding="utf-8")


def fingerprint(optimizer: torch.optim.Optimizer) -> tuple[float, str]:
    """The parameters of `optimizer`: the sum of their magnitudes in float64, and a hash of their bits.

    Those of a model in shards are joined, which all ranks do together, as they step.
    """
    total, bits = 0.0, hashlib.sha256()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            whole = parameter.detach()
            whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
            values = whole.cpu().contiguous()
            total += values.double().abs().sum().item()
            bits.update(values.flatten().view(torch.uint8).numpy().tobytes())
    return total, bits.hexdigest()[:16]


def watch_backward(library: str, record: Record) -> None:
    """Have `record` see every loss that the Accelerator of `library` is given."""
    accelerator = importlib.import_module(library).Accelerator
    original = accelerator.backward

    @functools.wraps(original)
    def backward(self: Any, loss: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        record.add_loss(loss)
        return original(self, loss, *arguments, **options)

    accelerator.backward = backward


def watch_generation(record: Record) -> None:
    """Have `record` see what transformers and diffusers generate, where a program has imported them."""

    def watch(owner: Any, name: str, plain: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def watched(*arguments: Any, **options: Any) -> Any:
            found = original(*arguments, **options)
            record.add_output(plain(found))
            return found

        setattr(owner, name, watched)

    if "transformers" in sys.modules:
        mixin = importlib.import_module("transformers").GenerationMixin
        watch(mixin, "generate", lambda found: getattr(found, "sequences", found).tolist())
    if "diffusers" in sys.modules:
        pipeline = importlib.import_module("diffusers").StableDiffusionPipeline
        watch(pipeline, "__call__", lambda found: [picture.tobytes() for picture in found.images])


def run(task: dict[str, Any], record: Record) -> None:
    """The program, as `python SCRIPT ARGUMENTS` would run it."""
    script = task["script"]
    sys.argv = [script, *task["arguments"]]
    random.seed(SEED)
    torch.manual_seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        record.write()


def run_in_cell(line: str, program: Callable[[], None]) -> None:
    """Call `program` in a cell that begins with ``%%accelerate LINE``, of a notebook without a front end."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "nbaccel")
    shell.user_ns["program"] = program
    shell.run_cell(f"%%accelerate {line}\nprogram()").raise_error()


def main(task: dict[str, Any]) -> None:
    sys.path[:0] = [str(Path(task["script"]).parent)]
    for module in task["stand_ins"]:
        importlib.import_module(module)
    record = Record(Path(task["folder"]))
    register_optimizer_step_post_hook(record.add_step)
    for library in task["watched"]:
        watch_backward(library, record)
    watch_generation(record)

    def program() -> None:
        run(task, record)

    if ranks := task["notebook_launcher"]:
        importlib.import_module(task["library"]).notebook_launcher(program, num_processes=ranks)
    elif line := task["cell"]:
        run_in_cell(line, program)
    else:
        program()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
