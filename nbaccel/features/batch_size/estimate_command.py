"""`nbaccel estimate-memory`: the memory that a training takes, by strategy and number of ranks. Runs in a terminal.

The model comes from a function of a program, or from a configuration of transformers that lies on this machine; it is
made without memory. Nothing is fetched, no device is used. Takes the arguments of `accelerate estimate-memory`.
"""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from nbaccel.output.terminal import failed

__all__ = ["add_arguments"]

_PRECISIONS = {"float32": "no", "float16": "fp16", "bfloat16": "bf16", "no": "no", "fp16": "fp16", "bf16": "bf16"}
_SIZES = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "mib": 2**20, "gib": 2**30}


class _Wrong(Exception):
    """The command cannot be carried out, for a reason that the user is told."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command and its arguments to `parser`."""
    parser.set_defaults(command=_estimate_memory)
    parser.add_argument(
        "model_name",
        metavar="MODEL",
        help="file.py:function, which returns a model, (model, optimizer) or (model, optimizer, batch); or a folder or "
        "a cached name of transformers",
    )
    parser.add_argument("-n", "--num_processes", type=int, nargs="+", default=[], metavar="N", help="numbers of ranks")
    parser.add_argument("--optimizer", default=None, help="of torch.optim; default: the function's, else AdamW")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=[*_PRECISIONS, "int8", "int4"],
        default=["float32"],
        help="precisions of the computation; a table for each",
    )
    parser.add_argument(
        "--batch_size", type=int, default=0, metavar="B", help="of a transformers model: with activations"
    )
    parser.add_argument("--sequence_length", type=int, default=512, metavar="T", help="default: %(default)s")
    parser.add_argument("--memory", default=None, metavar="16GB", help="of each device, instead of this machine's")
    parser.add_argument("--devices", type=int, default=0, metavar="N", help="with --memory; default: the largest -n")
    parser.add_argument("--library_name", choices=["transformers", "timm"], help="only transformers is known")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that lies beside a configuration")


def _estimate_memory(arguments: argparse.Namespace) -> int:
    """Print a table for each precision; return the exit status."""
    try:
        from nbaccel.features.batch_size.estimate import EstimatedDevices, EstimateSetting, estimate_memory

        if unusable := [dtype for dtype in arguments.dtypes if dtype not in _PRECISIONS]:
            raise _Wrong(f"{', '.join(unusable)}: a training computes in float32, float16 or bfloat16")
        devices = _devices(arguments) or EstimatedDevices.here()
        model, optimizer, batch = _training(arguments)
        for dtype in arguments.dtypes:
            setting = EstimateSetting(_PRECISIONS[dtype], device_type="cuda" if devices.count else "cpu")
            estimate = estimate_memory(
                model,
                arguments.optimizer or optimizer or "AdamW",
                batch,
                ranks=arguments.num_processes,
                setting=setting,
                devices=devices,
            )
            print(f"{arguments.model_name}, {sum(p.numel() for p in model.parameters()):,} parameters, {dtype}")
            print(estimate)
    except (_Wrong, ValueError, TypeError) as error:
        return failed(f"estimate-memory: {error}")
    return 0


def _devices(arguments: argparse.Namespace) -> Any:
    from nbaccel.features.batch_size.estimate import EstimatedDevices

    if arguments.memory is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b)?", arguments.memory.strip(), re.IGNORECASE)
    if found is None or (unit := (found[2] or "").lower()) not in _SIZES:
        raise _Wrong(f"--memory is a number of bytes such as 16GB, got {arguments.memory!r}")
    count = arguments.devices or max(arguments.num_processes, default=1)
    return EstimatedDevices(count, int(float(found[1]) * _SIZES[unit]))


def _training(arguments: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Return the model, and its optimizer and a batch where they are known."""
    from torch.nn import Module

    path, colon, name = arguments.model_name.rpartition(":")
    if colon and path.endswith(".py"):
        made = _called(Path(path), name)
        model, optimizer, batch = (*made, None, None)[:3] if isinstance(made, tuple) else (made, None, None)
    else:
        model, optimizer, batch = _of_transformers(arguments)
    if not isinstance(model, Module):
        raise _Wrong(f"{name} returns a {type(model).__name__}, and it should return a torch.nn.Module first")
    return model, optimizer, batch


def _called(path: Path, name: str) -> Any:
    import torch

    if not path.exists():
        raise _Wrong(f"there is no file {path}")
    with _imports_from(path.parent):
        try:
            function = runpy.run_path(str(path), run_name=path.stem).get(name)
        except Exception as error:
            raise _Wrong(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
        if not callable(function):
            raise _Wrong(f"{path} has no function {name}")
        for place in (torch.device("meta"), nullcontext()):  # with memory, where it needs values
            try:
                with place:
                    return function()
            except Exception as error:
                failure = error
    raise _Wrong(f"{name} of {path} raised {type(failure).__name__}: {failure}") from failure


@contextmanager
def _imports_from(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder.resolve()))
    try:
        yield
    finally:
        sys.path.remove(str(folder.resolve()))


def _of_transformers(arguments: argparse.Namespace) -> tuple[Any, Any, Any]:
    name = arguments.model_name
    if arguments.library_name == "timm":
        raise _Wrong("timm is not known here: write a function that returns the model, file.py:function")
    try:
        import transformers
    except ImportError:
        raise _Wrong(f"{name} is no file.py:function, and transformers is not installed") from None
    import torch

    options = {"local_files_only": True, "trust_remote_code": arguments.trust_remote_code}
    try:
        config = transformers.AutoConfig.from_pretrained(name, **options)
    except Exception:
        raise _Wrong(
            f"{name} is neither file.py:function, nor a folder with a config.json, nor in the cache of transformers; "
            "nothing is fetched"
        ) from None
    kind = getattr(transformers, (getattr(config, "architectures", None) or [""])[0] or "AutoModelForCausalLM", None)
    with torch.device("meta"):
        try:
            model = kind(config) if kind is not None and "Auto" not in kind.__name__ else _automatic(config, arguments)
        except Exception as error:
            raise _Wrong(f"{name} cannot be made: {type(error).__name__}: {error}") from error
    model.float()
    if not arguments.batch_size:
        return model, None, None
    tokens = torch.zeros(arguments.batch_size, arguments.sequence_length, dtype=torch.int64, device="cpu")
    return model, None, {"input_ids": tokens, "labels": tokens}


def _automatic(config: Any, arguments: argparse.Namespace) -> Any:
    import transformers

    kinds: Any = transformers
    try:
        return kinds.AutoModelForCausalLM.from_config(config, trust_remote_code=arguments.trust_remote_code)
    except ValueError:
        return kinds.AutoModel.from_config(config, trust_remote_code=arguments.trust_remote_code)
