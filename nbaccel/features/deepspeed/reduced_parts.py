"""ReducedParts: refuse a step for which ranks have added gradients of different parameters. Runs in ranks.

DeepSpeed puts gradients into buckets in the order in which a backward computes them, and adds the buckets of all ranks.
Where ranks use different parts of a model, it would add gradients of one parameter to those of another.
"""

from __future__ import annotations

from typing import Any

import torch
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
    """Follows the buckets of one engine.

    Args:
        engine: DeepSpeed's.
        device: That of the training.
    """

    def __init__(self, engine: Any, device: torch.device) -> None:
        self._device, self._digest = device, 0
        zero = engine.optimizer
        name = _STAGE_3 if hasattr(zero, _STAGE_3) else _STAGES_1_AND_2
        reduce, buckets = getattr(zero, name), zero.ipg_buckets
        self._is_needed = get_world_size() > 1

        def followed(*args: Any, **kwargs: Any) -> Any:
            for bucket in buckets.values():
                # Stage 3 sorts a bucket by the numbers of its parameters.
                own = (
                    [each[2] for each in bucket.params] if name != _STAGE_3 else sorted(p.ds_id for p in bucket.params)
                )
                self._digest = hash((self._digest, *own))
            return reduce(*args, **kwargs)

        if self._is_needed:
            setattr(zero, name, followed)

    def compare(self) -> None:
        """Compare what the ranks have reduced since the last call. Collective; waits for the device.

        Raises:
            NotImplementedError: It differs; every rank raises it.
        """
        if not self._is_needed:
            return
        digest, self._digest = self._digest % 2**31, 0
        largest = torch.tensor([digest, -digest], device=self._device)
        all_reduce(largest, ReduceOp.MAX)
        most, least = largest.tolist()
        if most != -least:
            raise NotImplementedError(_DIFFER)
