"""Replicas: answers to programs that ask how a model is distributed. Here every rank holds a whole model.

In ranks, in scripts, and alone in a kernel. Programs ask before they take another way, so that most of these are
None, False or 0. Prepared objects are available under Accelerate's private names, which programs read and change too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from nbaccel.train.distributed.process_control import DistributedType, ProcessControl
from nbaccel.train.prepare.prepared import Prepared

__all__ = ["Replicas"]


class Replicas(ProcessControl):
    """Answers of `Accelerator` about DeepSpeed, FSDP, fp8 and parallelism within a model."""

    _prepared: Prepared

    deepspeed_plugin: None = None
    fp8_backend: None = None
    parallelism_config: None = None
    torch_device_mesh: None = None
    is_fsdp2 = False
    is_composable_parallelism_enabled = False
    tensor_parallel_rank = 0
    pipeline_parallel_rank = 0
    context_parallel_rank = 0
    data_parallel_shard_rank = 0

    @property
    def data_parallel_rank(self) -> int:
        return self.process_index

    @property
    def multi_device(self) -> bool:
        """True if there are several processes with a device each."""
        return self.use_distributed and self.distributed_type != DistributedType.MULTI_CPU

    @property
    def should_save_model(self) -> bool:
        """True if this process writes whole models: the first of each node."""
        return self.is_local_main_process

    def maybe_context_parallel(
        self, buffers: Any = None, buffer_seq_dims: Any = None, no_restore_buffers: Any = None
    ) -> AbstractContextManager[None]:
        """Return a block in which nothing changes: sequences are not split over the ranks."""
        return nullcontext()

    @property
    def _models(self) -> list[Any]:
        return self._prepared.models

    @property
    def _optimizers(self) -> list[Any]:
        return self._prepared.optimizers

    @property
    def _schedulers(self) -> list[Any]:
        return self._prepared.schedulers

    @property
    def _dataloaders(self) -> list[Any]:
        return self._prepared.loaders
