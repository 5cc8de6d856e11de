"""Exchange: values of all ranks, over nested containers. The face that states and Accelerators share. Runs in ranks.

Every method here is collective: every rank calls it, in the same order. A process that is alone gets back what it
gave.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch  # noqa: F401  # its name in the examples

from nbaccel.train.faces.control import ProcessControl
from nbaccel.train.talk.collectives import holds_only_tensors
from nbaccel.train.talk.nested import map_children, slice_rows

__all__ = ["Exchange"]


class Exchange(ProcessControl):
    """`gather`, `reduce` and their kin."""

    def gather(self, tensor: Any) -> Any:
        """Every tensor in `tensor`, those of all ranks joined along the first dimension, on every rank. Collective.

        tensor: tensors in any nesting, of equal shapes on all ranks; scalars give one entry per rank, None stays
        None. A value without any tensor, such as a list of generated texts, is gathered by pickle: lists joined,
        mappings joined by key, other values listed by rank.
        Raises:
            CollectiveMismatch: the ranks called it with different structures, dtypes or shapes.
            TypeError: tensors mixed with something else, or an object that cannot be pickled on some rank.

        >>> from nbaccel import Accelerator
        >>> Accelerator().gather({"loss": torch.ones(2)})
        {'loss': tensor([1., 1.])}
        """
        return self.collectives.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """`gather` without the samples that only fill up the loader's last round: each sample once. Collective.

        Objects other than tensors are gathered by pickle, one list entry per sample.
        use_gather_object: do that also with tensors, whose shapes may differ between samples then.

        >>> from nbaccel import Accelerator
        >>> Accelerator().gather_for_metrics(["cat", "dog"])
        ['cat', 'dog']
        """
        may_be_uneven, samples = self._last_round()
        if self._counts_nothing():
            input_data = _first_samples(input_data, 0)
        if use_gather_object or not holds_only_tensors(input_data):
            joined = self.collectives.gather_objects(input_data)
            return joined if samples is None else _first_samples(joined, samples)
        joined = self.collectives.gather_uneven(input_data) if may_be_uneven else self.collectives.gather(input_data)
        return joined if samples is None else slice_rows(joined, 0, samples)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Every tensor in `tensor` reduced over the ranks by "sum", "mean", "max" or "min". Collective.

        scale: what the result is multiplied with.  `tensor` is not changed; booleans are counted.
        Raises:
            CollectiveMismatch: the ranks called it with different structures, dtypes or shapes.

        >>> from nbaccel import Accelerator
        >>> Accelerator().reduce(torch.tensor([2.0, 4.0]), "mean", scale=0.5)
        tensor([1., 2.])
        """
        return self.collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Every tensor in `tensor` padded along `dim` to the longest of all ranks. Collective.

        pad_index: what is filled in.  pad_first: in front instead of behind.
        A tensor without that dimension stays as it is.

        >>> from nbaccel import Accelerator
        >>> Accelerator().pad_across_processes(torch.ones(2)).shape
        torch.Size([2])
        """
        return self.collectives.pad(tensor, dim, pad_index, pad_first)

    def _last_round(self) -> tuple[bool, int | None]:
        """Whether ranks may hold differently many samples, and how many of all ranks' are real; None for all.

        A state knows no loader; an Accelerator does.
        """
        return False, None

    def _counts_nothing(self) -> bool:
        """Whether this rank's samples were gathered before, and only make up the number of the others' calls."""
        return False


def _first_samples(joined: Any, samples: int) -> Any:
    if isinstance(joined, Mapping):
        return map_children(lambda child: _first_samples(child, samples), joined)
    return joined[:samples] if hasattr(joined, "__getitem__") else joined
