"""Planning: the user's `find_batch_size` on an `Accelerator`. Runs in ranks, on all of them."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module

from nbaccel.errors import NotPrepared
from nbaccel.train.accumulation import Accumulation
from nbaccel.train.faces.control import ProcessControl
from nbaccel.train.planning.examples import examples_of
from nbaccel.train.planning.found import Found, FoundInFolder
from nbaccel.train.planning.meters import Gauge
from nbaccel.train.planning.planner import find_batch_size
from nbaccel.train.planning.rehearsal import Rehearsal, Scene
from nbaccel.train.prepared import Prepared
from nbaccel.train.strategies import Strategy

__all__ = ["Planning"]


class Planning(ProcessControl):
    """The method `find_batch_size` of an `Accelerator`."""

    _accumulation: Accumulation
    _found: Found
    _prepared: Prepared
    _strategy: Strategy
    _is_ready: bool

    @abstractmethod
    def _make_ready(self, call: str, models: Sequence[Module] = ()) -> None:
        """Find this process's world before its first step, or refuse to train in it."""

    def find_batch_size(
        self,
        loss_fn: Callable[[Any], Tensor],
        example: Any,
        *,
        max_batch_size: int = 4096,
        cache: str | os.PathLike[str] | None = None,
        meter: Gauge | None = None,
    ) -> int:
        """Return the largest batch per rank whose training step fits in memory, on every rank. Collective.

        Runs some four to eight trials of two whole steps each, forward, backward and optimizer; most searches never
        run out of memory. Afterwards models, optimizers and random generators are bit by bit as before, and no loader
        has moved. The size returned was run on every rank, whatever the prediction said; it is within about 3 % of
        the largest possible one, and a multiple of eight where that costs nothing.

        loss_fn: from a batch on this rank's device to its loss, ``lambda batch: F.cross_entropy(model(batch[0]),
            batch[1])``, with prepared models. State that it keeps itself is not restored.
        example: the loader that will train, of which some hundred samples are read to find the longest ones; or one
            batch. A sample longer than those can still be too large: see `forward_backward`, which survives it.
        max_batch_size: the largest useful size, such as a rank's share of a small dataset.
        cache: a folder where sizes are kept from run to run. Without it they are kept as long as this Accelerator.
            A size found before is tried once more instead of searched for.
        meter: measures memory, instead of the device's own measure: torch's allocator on CUDA; on the CPU the
            `nbaccel.testing.MemLimit` that is entered, else the bytes of tensors, against ``ulimit`` and 80 % of the
            free memory, which does not see everything: leave some memory free there. Where nothing can be measured
            (mps), sizes are tried until one does not fit, which takes more trials.

        Raises:
            torch.OutOfMemoryError: not even one sample fits; gives the memory one needs, and the limit. On every rank.
            NotPrepared: no model or no optimizer is prepared; both are part of what has to fit.
            PeerFailed: `loss_fn` failed on another rank.

        >>> import torch
        >>> from nbaccel import Accelerator
        >>> from nbaccel.testing import MemLimit
        >>> accelerator = Accelerator()
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 1000), torch.nn.GELU(), torch.nn.Linear(1000, 1))
        >>> model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        >>> with MemLimit(2_000_000) as memory:  # a small device
        ...     memory.count(model)
        ...     accelerator.find_batch_size(lambda x: model(x).mean(), torch.ones(8, 4))
        157
        """
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
        if not self._is_ready:
            self._make_ready("find_batch_size")
        if not (self._prepared.models and self._prepared.optimizers):
            kind = "optimizer" if self._prepared.models else "model"
            raise NotPrepared(
                f"find_batch_size: no {kind} is prepared, and its memory is part of what has to fit. Before it:\n"
                "    model, optimizer = accelerator.prepare(model, optimizer)"
            )
        found = self._found
        if cache is not None:
            found = FoundInFolder(cache, is_writer=self.is_main_process)
        scene = Scene(
            loss_fn,
            lambda: examples_of(example),
            self._prepared.models,
            [prepared.optimizer for prepared in self._prepared.optimizers],
            self._strategy,
            keeps_gradients=self._accumulation.steps > 1,
        )
        return find_batch_size(Rehearsal(scene, meter), max_batch_size, self.collectives, found)
