"""SpeedChange: the differences of one trial from the cell as it is. A value; ranks apply it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["NEED_WORKERS", "SpeedChange"]

NEED_WORKERS = ("prefetch_factor", "persistent_workers")
"""Arguments of a loader that one without workers refuses."""


@dataclass(frozen=True, slots=True)
class SpeedChange:
    """The differences of a trial; none in the trial of the cell as it is.

    Args:
        loader, optimizer: Keyword arguments with new values, of the training's loader and of its optimizers.
        batch_factor: The batch size is this many times that of the cell.
        compiles: ``model.compile()``.
        channels_last: The memory format of the model.
        threads: The threads of torch in each rank; 0 for those of the launcher.
        precision: That of `-p`; empty for the cell's.
        ranks: That of `-n`; 0 for the cell's.
    """

    loader: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    batch_factor: int = 1
    compiles: bool = False
    channels_last: bool = False
    threads: int = 0
    precision: str = ""
    ranks: int = 0

    def with_(self, other: SpeedChange) -> SpeedChange:
        """Return both changes together; `other` decides where both change the same.

        Example:
            >>> faster = SpeedChange(loader={"pin_memory": True}, batch_factor=2)
            >>> str(SpeedChange(loader={"num_workers": 2}).with_(faster))
            'num_workers=2, pin_memory=True, batch size x 2'
        """
        loader = {**self.loader, **other.loader}
        if loader.get("num_workers") == 0:
            loader = {name: value for name, value in loader.items() if name not in NEED_WORKERS}
        return replace(
            self,
            loader=loader,
            optimizer={**self.optimizer, **other.optimizer},
            batch_factor=other.batch_factor if other.batch_factor > 1 else self.batch_factor,
            compiles=self.compiles or other.compiles,
            channels_last=self.channels_last or other.channels_last,
            threads=other.threads or self.threads,
            precision=other.precision or self.precision,
            ranks=other.ranks or self.ranks,
        )

    @property
    def is_nothing(self) -> bool:
        return self == SpeedChange()

    def __str__(self) -> str:
        """Return the change as a table names it."""
        if self.is_nothing:
            return "the cell as it is"
        parts = [f"{name}={value}" for name, value in {**self.loader, **self.optimizer}.items()]
        if self.batch_factor > 1:
            parts.append(f"batch size x {self.batch_factor}")
        parts += ["model.compile()"] * self.compiles + ["channels_last"] * self.channels_last
        parts += [f"{self.threads} thread{'s' * (self.threads > 1)} in each rank"] if self.threads else []
        parts += [f"-p {self.precision}"] if self.precision else []
        parts += [f"-n {self.ranks}"] if self.ranks else []
        return ", ".join(parts)
