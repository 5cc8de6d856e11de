"""ReducedParts: refuse a step for which ranks have added gradients of different parameters. Runs in ranks.

DeepSpeed puts gradients into buckets in the order in which a backward computes them, and adds the buckets of all ranks.
Where ranks use different parts of a model, it would add gradients of one parameter to those of another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp, all_reduce, get_world_size

__all__ = ["ReducedParts"]

_STAGES_1_AND_2 = "reduce_ipg_grads"
_STAGE_3 = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"

_DIFFER = (
    "the ranks have used different parts of the model in this step, and DeepSpeed has added gradients of some "
    "parameters to those of others. The weights are as before the step. Let every rank use the same parts, in the same "
    "order (a branch by data, or random layers, differ), or use strategy='ddp' with "
    "DistributedDataParallelKwargs(find_unused_parameters=True)"
)


class ReducedParts:
    """Follows the buckets of one engine, and compares them in its steps.

    A step in which all ranks reduce what they have reduced in the last one that was compared exchanges nothing for it:
    it asks through the norm of all gradients, which the engine sums up anyway. A rank that has reduced something else
    gives NaN to that sum. So every rank finds it, all compare, and the norm is computed again.

    Args:
        engine: DeepSpeed's.
        device: That of the training.
    """

    def __init__(self, engine: Any, device: torch.device) -> None:
        self._device, self._digest, self._agreed = device, 0, 0
        self._is_open = False  # the norm of this step is still to be asked
        zero = engine.optimizer
        self._is_needed = get_world_size() > 1
        # With states on the host the engine sums up norms that it has taken in the backward.
        self._has_norm = getattr(zero, "compute_grad_norm", True) and not (
            getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False)
        )
        if self._is_needed:
            self._follow(zero)
            zero.get_grad_norm_direct = self._asking(zero.get_grad_norm_direct)

    def begin_step(self) -> None:
        """Compare what the ranks have reduced since the last step, or let the norm of this step ask. Collective.

        Raises:
            NotImplementedError: It differs; every rank raises it, here or in the norm.
        """
        self._is_open = self._is_needed and self._has_norm
        if self._is_needed and not self._has_norm:
            self._compare()

    def end_step(self) -> None:
        """Forget what was reduced for the step that ends, also for one that was left out before its norm."""
        self._digest, self._is_open = 0, False

    def _follow(self, zero: Any) -> None:
        name = _STAGE_3 if hasattr(zero, _STAGE_3) else _STAGES_1_AND_2
        reduce, buckets = getattr(zero, name), zero.ipg_buckets

        def followed(*args: Any, **kwargs: Any) -> Any:
            for bucket in buckets.values():
                # Stage 3 sorts a bucket by the numbers of its parameters.
                own = (
                    [each[2] for each in bucket.params] if name != _STAGE_3 else sorted(p.ds_id for p in bucket.params)
                )
                self._digest = hash((self._digest, *own))
            return reduce(*args, **kwargs)

        setattr(zero, name, followed)

    def _asking(self, norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return the engine's norm of a group of gradients, whose first call in a step asks the ranks."""

        def asked(gradients: Any, params: Any, *args: Any, **kwargs: Any) -> Tensor:
            if not self._is_open:
                return norm(gradients, params, *args, **kwargs)
            self._is_open = False
            if self._digest == self._agreed:
                total = norm(gradients, params, *args, **kwargs)
            else:
                unknown = torch.full((1,), torch.nan, device=self._device)
                total = norm([unknown], params[:1] or [unknown], *args, **kwargs)
            if total >= 0:
                return total
            self._compare()  # the engine's norm is -1 on all ranks, of which at least one has NaN
            return norm(gradients, params, *args, **kwargs)

        return asked

    def _compare(self) -> None:
        digest = self._digest % 2**31
        largest = torch.tensor([digest, -digest], device=self._device)
        all_reduce(largest, ReduceOp.MAX)
        most, least = largest.tolist()
        if most != -least:
            self.end_step()
            raise NotImplementedError(_DIFFER)
        self._agreed = self._digest
