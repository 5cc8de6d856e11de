"""Exchange: values of all ranks, over nested containers. Base of states and Accelerators. Runs in ranks.

Every method here is collective: every rank calls it, in the same order. A process that is alone gets its own value
back.
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
    """`gather`, `reduce` and related methods."""

    def gather(self, tensor: Any) -> Any:
        """Gather every tensor in `tensor` on every rank: all ranks' joined along the first dimension. Collective.

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
        """Gather without the samples that only fill up the loader's last round: each sample once. Collective.

        Objects other than tensors are gathered by pickle, one list entry per sample.
        use_gather_object: use pickle for tensors too, whose shapes may then differ between samples.

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
        """Reduce every tensor in `tensor` over the ranks by "sum", "mean", "max" or "min". Collective.

        scale: factor of the result.  `tensor` is not changed; booleans are counted.
        Raises:
            CollectiveMismatch: the ranks called it with different structures, dtypes or shapes.

        >>> from nbaccel import Accelerator
        >>> Accelerator().reduce(torch.tensor([2.0, 4.0]), "mean", scale=0.5)
        tensor([1., 2.])
        """
        return self.collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Pad every tensor in `tensor` along `dim` to the longest of all ranks. Collective.

        pad_index: the value of the padding.  pad_first: at the front instead of the end.
        A tensor without that dimension is not changed.

        >>> from nbaccel import Accelerator
        >>> Accelerator().pad_across_processes(torch.ones(2)).shape
        torch.Size([2])
        """
        return self.collectives.pad(tensor, dim, pad_index, pad_first)

    def _last_round(self) -> tuple[bool, int | None]:
        """Return whether ranks may hold different numbers of samples, and how many of all are real; None for all.

        A state has no loader; an Accelerator has.
        """
        return False, None

    def _counts_nothing(self) -> bool:
        """Return whether this rank's samples were gathered before, and are only there to match the others' calls."""
        return False


def _first_samples(joined: Any, samples: int) -> Any:
    if isinstance(joined, Mapping):
        return map_children(lambda child: _first_samples(child, samples), joined)
    return joined[:samples] if hasattr(joined, "__getitem__") else joined
