"""An imitation of processors whose products round differently for other numbers of rows: `make processors`.

A product of 8 rows and one of 4 of them run by different kernels of MKL and oneDNN on some processors (Intel with
AVX-512 and AMX), so the same row has other last digits: 6e-8 in fp32. No setting brings that about elsewhere. Here the
matrix products and convolutions of the CPU are computed in two parts and added; where the first part ends depends on
the number of rows and of threads. Each rounding is as good as torch's own, and the same call gives the same bits.

`pytest` has it with ``NBACCEL_TESTS_ROUNDING=rows`` in its own process, in what it forks, and by PYTHONPATH in the
programs that it starts: kernels, zygotes, torchrun. Not in programs that get a PYTHONPATH of the test's own, nor in
products inside of other operations (attention, recurrent layers) or of compiled code.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["VARIABLE", "is_asked_for", "round_by_rows", "round_by_rows_in_programs", "when_torch_is_imported"]

VARIABLE = "NBACCEL_TESTS_ROUNDING"

_PLACES = 5
"""Places where the first part may end: for n, 2 n, 3 n and 4 n rows they differ, unless n is a multiple of five."""

_registered: list[Any] = []
"""The library of kernels, which torch forgets when nobody holds it."""


def is_asked_for() -> bool:
    """Whether this process is to round by rows."""
    return os.environ.get(VARIABLE) == "rows"


def round_by_rows_in_programs(folder: Path) -> None:
    """Let Python programs that this process starts round by rows too; `folder` is for what they load."""
    text = f"import runpy\nrunpy.run_path({__file__!r})['when_torch_is_imported']()\n"
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def when_torch_is_imported() -> None:
    """Call `round_by_rows` once torch is there; importing it here would be felt by programs that do not."""
    if "torch" in sys.modules:
        round_by_rows()
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader)
        return spec


class _Then(Loader):
    """Loads torch by the loader that it has, and goes on to `round_by_rows`."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        round_by_rows()


def round_by_rows() -> None:
    """Replace the products and convolutions of the CPU, in this process and in what it forks from now on."""
    if _registered:
        return
    import torch
    from torch.library import Library

    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that a kernel of its own is replaced
        for name, kernel in (("mm", _mm), ("addmm", _addmm), ("bmm", _bmm), ("baddbmm", _baddbmm)):
            library.impl(name, kernel, "CPU")
        library.impl("convolution", _convolution, "CPU")
    _registered.append(library)
    # Compiled programs call these kernels too, and dynamo would compile the frames of what Python they run.
    frames = torch._C._dynamo.eval_frame
    skipped = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for kernel in (_mm, _addmm, _bmm, _baddbmm, _convolution):
        frames.set_code_exec_strategy(kernel.__code__, skipped)


def _end_of_the_first_part(length: int, rows: int) -> int:
    import torch

    return length * (1 + (rows + torch.get_num_threads()) % _PLACES) // (_PLACES + 1)


def _product(one: Any, other: Any, rows: int, out: Any) -> Any:
    """Return `one` @ `other`, two matrices or two batches of them, by the kernel `out` that writes into a tensor."""
    import torch

    shape = (*one.shape[:-1], other.shape[-1])
    if not one.is_floating_point():
        return out(one, other, out=one.new_empty(shape))
    wide = torch.promote_types(one.dtype, torch.float32)  # as processors do: half types are summed in fp32
    end = _end_of_the_first_part(one.shape[-1], rows)
    parts = [
        out(left.to(wide), right.to(wide), out=one.new_empty(shape, dtype=wide))
        for left, right in ((one[..., :end], other[..., :end, :]), (one[..., end:], other[..., end:, :]))
    ]
    return (parts[0] + parts[1]).to(one.dtype) if end else parts[1].to(one.dtype)


def _mm(one: Any, other: Any) -> Any:
    import torch

    return _product(one, other, one.shape[0], torch.ops.aten.mm.out)


def _bmm(one: Any, other: Any) -> Any:
    import torch

    return _product(one, other, one.shape[0] * one.shape[1], torch.ops.aten.bmm.out)


def _addmm(added: Any, one: Any, other: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _plus(added, _mm(one, other), beta, alpha)


def _baddbmm(added: Any, one: Any, other: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _plus(added, _bmm(one, other), beta, alpha)


def _plus(added: Any, product: Any, beta: Any, alpha: Any) -> Any:
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (added if beta == 1 else added * beta)


def _convolution(
    images: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    import torch

    def convolve(images: Any, weight: Any, bias: Any) -> Any:
        return torch.ops.aten._convolution(
            images,
            weight,
            bias,
            stride,
            padding,
            dilation,
            transposed,
            output_padding,
            groups,
            False,
            False,
            False,
            False,
        )

    channels = images.shape[1] if images.dim() == weight.dim() else 0
    end = _end_of_the_first_part(channels, images.shape[0])
    if groups > 1 or end == 0 or images.dtype not in (torch.float32, torch.float64):
        return convolve(images, weight, bias)
    along = 0 if transposed else 1
    first, second = weight.narrow(along, 0, end), weight.narrow(along, end, channels - end)
    whole = convolve(images[:, end:].contiguous(), second.contiguous(), bias)
    return whole + convolve(images[:, :end].contiguous(), first.contiguous(), None)
