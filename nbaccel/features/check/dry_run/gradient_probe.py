"""Record the gradients at a cell's first step, to compare those of several ranks with one process. Runs in ranks.

For `%%accelerate --check full` alone. The cell runs in fp32, without dropout and without clipping. It ends when a step
is about to be taken; a process that does the work of several ranks takes as many batches as they all first, and none
of its optimizers steps meanwhile.
"""

from __future__ import annotations

import functools
import math
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from nbaccel.errors import CannotSplit
from nbaccel.features.check.dry_run.batch_choice import count_rows
from nbaccel.features.check.dry_run.function_hooks import FunctionHooks
from nbaccel.features.check.dry_run.loop_log import DryRunEnded
from nbaccel.features.clean_start.torch_flags import TorchFlags
from nbaccel.features.source.fingerprint import checksum_of
from nbaccel.train.data.counting import as_counted
from nbaccel.train.data.loader import PreparedLoader
from nbaccel.train.data.prepare_loader import LoaderChoice
from nbaccel.train.data.sources import Source
from nbaccel.train.distributed.counted_batch import CountedBatch

__all__ = ["GradientProbe", "plain_arithmetic"]

_MOST_VALUES = 1_000_000
"""Values of one parameter that are compared, evenly spaced: all of a layer of 1000 x 1000."""

_MOST_SAMPLES = 4096
"""Samples of which a checksum is kept."""

_RAW_STEPS, _PREPARED_STEPS = 2, 1
"""Step whose gradients are compared. The first batch of a loop that prepares nothing is whole in each rank."""

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


class GradientProbe:
    """Watches the program of one rank until the step whose gradients are compared.

    Args:
        write: Appends a record.
        path: The path of the file that gets the values of the gradients, as float32.
        turns: Ranks whose batches this process takes one after the other; their mean is recorded.
        steps: The step, counted from 1; None: the first one, or the second one of a loop that prepares nothing.
    """

    def __init__(self, write: Callable[[Mapping[str, Any]], None], path: Path, turns: int, steps: int | None) -> None:
        self._write = write
        self._path = path
        self._turns = turns
        self._steps = steps
        self._optimizer: Any = None  # the one that steps first
        self._done = 0
        self._sums: dict[int, Tensor] = {}
        self._withheld: list[tuple[Tensor, Tensor]] = []
        self._parameters = ""  # their checksum before the first step
        self._samples: list[str] = []  # their checksums
        self._drawn: Any = None  # states of generators when the last batch was there
        self._model: nn.Module | None = None  # the one that is called first, with the others in it
        self._rows = 0  # that it has got
        self._kinds: set[str] = set()
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._why_not = ""
        self._thread = threading.get_ident()
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        self._undo.enter_context(plain_arithmetic())
        for handle in (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
            register_module_forward_pre_hook(self._before_forward),
        ):
            self._undo.callback(handle.remove)
        replaced = FunctionHooks()
        self._undo.callback(replaced.undo)
        for kind in (dataloader._SingleProcessDataLoaderIter, dataloader._MultiProcessingDataLoaderIter):
            replaced.wrap(kind, "_next_data", self._next_data)
        replaced.wrap(PreparedLoader, "_iterate", self._iterate)
        replaced.wrap(LoaderChoice, "source", _as_of_ranks)
        replaced.wrap(torch, "compile", _uncompiled)  # compilers fail at the hook on every forward
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            self._undo.enter_context(torch.compiler.set_stance("force_eager"))
        if self._turns > 1 and distributed.is_available() and not distributed.is_initialized():
            # a cell that calls torch's collectives itself calls them here, too
            distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
            self._undo.callback(distributed.destroy_process_group)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._undo.close()
        return isinstance(error, DryRunEnded)

    # --- what the program does ----------------------------------------------------------------------------------

    def _next_data(self, real: Callable[..., Any], iterator: Any) -> Any:
        batch = real(iterator)
        if threading.get_ident() == self._thread:
            counted = as_counted(batch.batch if isinstance(batch, CountedBatch) else batch, None)
            if counted is not None:
                with suppress(CannotSplit):  # then its samples are not compared; one process and several judge alike
                    for row in range(min(counted.samples, _MOST_SAMPLES - len(self._samples))):
                        self._samples.append(checksum_of([counted.take(row, row + 1)]))
            self._drawn = _generators()
        return batch

    def _iterate(self, real: Callable[..., Any], loader: PreparedLoader, *args: Any, **kwargs: Any) -> Any:
        self._kinds.add("split" if loader._source.is_split else "prepared")
        return real(loader, *args, **kwargs)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        _forbid_tf32()  # the program itself may have chosen it
        if module.training and torch.is_grad_enabled():
            self._model = module if self._model is None else self._model
            self._rows += (count_rows(args) or 0) * (module is self._model)
        self._modules.add(module)
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            self._kinds.add("batch norm")
        if isinstance(module, nn.parallel.DistributedDataParallel):
            self._kinds.add("ddp")

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        if not parameters:  # nothing is trained, or the step waits for the other parts of its batch
            return
        if any(type(parameter.grad).__name__ == "DTensor" for parameter in parameters):
            self._why_not = "the parameters are sharded"
        if self._optimizer is None:
            self._optimizer = optimizer
            self._parameters = "" if self._why_not else checksum_of([each.detach() for each in parameters])
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:
            self._why_not = "the optimizer computes the gradients itself, by a closure"
        if any(parameter.dtype not in (torch.float32, torch.float64) for parameter in parameters):
            self._why_not = "the parameters are not in fp32"
        if self._drawn is not None and self._drawn != _generators():
            self._kinds.add("draws")
        if optimizer is self._optimizer:
            self._done += 1
            self._note(parameters)
        if self._turns > 1:
            self._withheld = [(parameter, parameter.grad) for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None

    def _after_step(self, *_: Any) -> None:
        for parameter, gradient in self._withheld:
            parameter.grad = gradient
        self._withheld = []

    # --- what is recorded ---------------------------------------------------------------------------------------

    def _note(self, parameters: Sequence[Tensor]) -> None:
        last = self._turns if self._turns > 1 else self._steps or self._usual_steps()
        if not self._why_not and (self._turns > 1 or self._done == last):
            for number, parameter in enumerate(parameters):
                assert parameter.grad is not None
                values = _some_values(parameter.grad)
                self._sums[number] = self._sums[number] + values if number in self._sums else values
        if self._done < last and not self._why_not:
            return
        names = self._names()
        with self._path.open("wb") as file:
            for number in sorted(self._sums):
                (self._sums[number] / self._turns).numpy().tofile(file)
        self._write(
            {
                "kind": "gradients",
                "why_not": self._why_not,
                "step": self._done,
                "kinds": sorted(self._kinds),
                "parameters": self._parameters,
                "samples": self._samples,
                "rows": self._rows,
                "names": [names.get(id(each), f"parameter {at}") for at, each in enumerate(parameters)],
                "sizes": [len(self._sums[number]) for number in sorted(self._sums)],
            }
        )
        raise DryRunEnded("the gradients of the step are known")

    def _usual_steps(self) -> int:
        return _PREPARED_STEPS if self._kinds & {"prepared", "split", "ddp"} else _RAW_STEPS

    def _names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for module in sorted(self._modules, key=lambda each: -sum(1 for _ in each.modules())):
            for name, parameter in module.named_parameters():
                names.setdefault(id(parameter), name.removeprefix("module."))
        return names


def _as_of_ranks(real: Callable[..., Source], choice: LoaderChoice, *args: Any, **kwargs: Any) -> Source:
    """Return the source of one process with the order that several ranks share: alone it would draw another one."""
    is_alone = not choice.world.is_distributed
    return choice.indexed() if is_alone and choice.has_indices else real(choice, *args, **kwargs)


def _uncompiled(real: Any, model: Any = None, *args: Any, **kwargs: Any) -> Any:
    return (lambda each: each) if model is None else model


def _some_values(gradient: Tensor) -> Tensor:
    """Return values of a gradient, evenly spaced where there are many."""
    values = gradient.detach()
    values = (values.coalesce().to_dense() if values.is_sparse else values).flatten()
    return values[:: math.ceil(len(values) / _MOST_VALUES) or 1].to("cpu", torch.float32, copy=True)


def _generators() -> tuple[Any, ...]:
    """Return the states of the generators of torch, Python and NumPy."""
    states: list[Any] = [torch.get_rng_state().numpy().tobytes(), hash(random.getstate())]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state().numpy().tobytes())
    if (numpy := sys.modules.get("numpy")) is not None:
        _, keys, *rest = numpy.random.get_state()
        states.append((keys.tobytes(), *rest))
    return tuple(states)


# --- the arithmetic --------------------------------------------------------------------------------------------------


@contextmanager
def plain_arithmetic() -> Iterator[None]:
    """Compute in fp32, without dropout and without clipping, until the block ends."""
    with ExitStack() as undo:

        def replace(owner: Any, name: str, ours: Any) -> None:
            real = getattr(owner, name)
            setattr(owner, name, functools.wraps(real)(functools.partial(ours, real)))
            undo.callback(setattr, owner, name, real)
            program = vars(sys.modules["__main__"])
            for bound in [bound for bound, value in program.items() if value is real]:  # imported by name
                program[bound] = getattr(owner, name)
                undo.callback(program.__setitem__, bound, real)

        for name in _DROPOUTS:
            replace(functional, name, _without_dropout)
        replace(functional, "scaled_dot_product_attention", _attention_without_dropout)
        replace(nn.utils, "clip_grad_norm_", _norm_alone)
        replace(nn.utils, "clip_grad_value_", _nothing)
        undo.callback(setattr, torch.autocast, "__init__", torch.autocast.__init__)
        torch.autocast.__init__ = _disabled(torch.autocast.__init__)  # type: ignore[method-assign]
        undo.callback(TorchFlags.capture().apply)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        _forbid_tf32()
        yield


def _forbid_tf32() -> None:
    """Compute products in fp32, whichever of torch's interfaces has chosen otherwise."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def _without_dropout(real: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return input


def _attention_without_dropout(real: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    mask, _, *rest = (*args, None, 0.0)[: max(len(args), 2)]
    if args:
        kwargs = {"attn_mask": mask, **dict(zip(("is_causal",), rest, strict=False)), **kwargs}
    return real(query, key, value, **{**kwargs, "dropout_p": 0.0})


def _norm_alone(real: Any, parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
    return real(parameters, math.inf, *args, **kwargs)


def _nothing(real: Any, *args: Any, **kwargs: Any) -> None:
    """Clip nothing."""


def _disabled(real: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(real)
    def init(autocast: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        dtype = args[0] if args else kwargs.get("dtype")
        real(autocast, device_type, dtype, enabled=False)

    return init
