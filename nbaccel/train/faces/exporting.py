"""Exporting: the user's methods that write a model for other programs. Runs in ranks.

The main process writes; no rank waits. `checkpoint.weights` and `saving` define the files.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from pathlib import Path
from typing import Any

from torch.nn import Module

from nbaccel.train.checkpoint.training import Training
from nbaccel.train.checkpoint.weights import save_weights
from nbaccel.train.faces.control import ProcessControl
from nbaccel.train.saving import write_object

__all__ = ["Exporting"]


class Exporting(ProcessControl):
    """`get_state_dict`, `save_model`, `save`."""

    @abstractmethod
    def _training(self) -> Training:
        """Return the parts of this Accelerator, as they are in this process."""

    @property
    @abstractmethod
    def _writes(self) -> bool:
        """True if this process writes files that are for all ranks."""

    def get_state_dict(self, model: Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole model's state dict, without prefixes of DDP and ``torch.compile``. Tensors are not copied.

        unwrap: False returns that of the module as it is. Collective with sharded strategies.

        >>> import torch
        >>> from nbaccel import Accelerator
        >>> accelerator = Accelerator()
        >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
        >>> list(accelerator.get_state_dict(model))
        ['weight', 'bias']
        """
        return self._training().strategy.state_dict(model) if unwrap else model.state_dict()

    def save_model(
        self,
        model: Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write `model` as Hugging Face libraries expect it: ``model.safetensors``, or shards and their index.

        Rank 0 writes; the others do nothing. `nbaccel.utils.load_model` reads it, and so does
        ``from_pretrained`` where there is a config.json beside it.
        max_shard_size: of one file, in bytes or as "10GB"; a larger tensor has a file of its own.
        safe_serialization: False writes ``pytorch_model.bin``, a pickle.

        Raises:
            NotADirectoryError: `save_directory` is a file.
            CannotSave: no space, or no right to write there.

        >>> import os, tempfile, torch
        >>> from nbaccel import Accelerator
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Accelerator().save_model(torch.nn.Linear(2, 1), folder)
        ...     os.listdir(folder)
        ['model.safetensors']
        """
        state = self.get_state_dict(model)
        if self._writes:
            save_weights(state, Path(save_directory), max_shard_size, safe_serialization)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False, *, save_on_each_node: bool = False) -> None:
        """Call ``torch.save(obj, f)`` on the main process only; a path is written under a temporary name and renamed.

        save_on_each_node: on the first rank of each node.
        safe_serialization: `obj` is a dict of tensors; write it as safetensors.
        """
        if self._writes or (save_on_each_node and self.is_local_main_process):
            write_object(obj, f, safe_serialization)
