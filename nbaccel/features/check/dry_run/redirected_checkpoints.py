"""Writes nbaccel's checkpoints and weights below another folder in a dry run. Runs in ranks.

The folders that `save_state`, automatic checkpoints, `save_model` and `save` write are made there, and `load_state`,
a resume and `load_model` find them again under the names that the program gives. In a folder of numbered checkpoints,
the checkpoints of earlier runs are found too, and are not changed. `save_state` returns the name of the other place.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbaccel.base.settings import RunSettings
from nbaccel.features.check.dry_run.redirection import Redirection
from nbaccel.train.checkpoint import model_weights
from nbaccel.train.checkpoint.autosave import CheckpointPolicy
from nbaccel.train.checkpoint.directory import CheckpointDirectory, FoundCheckpoint

__all__ = ["redirect_checkpoints"]


def redirect_checkpoints(folder: str) -> None:
    """Begin to write below `folder`. Called once per process, before the program makes an Accelerator."""
    places = Redirection(folder)
    _redirect_named(places)
    _redirect_numbered(places)
    _redirect_weights(places)


def _redirect_named(places: Redirection) -> None:
    """Redirect the folders that a program names."""
    next_folder, choose = CheckpointDirectory.next_folder, CheckpointDirectory.choose

    @functools.wraps(next_folder)
    def redirected_next(
        self: CheckpointDirectory, output_dir: str | os.PathLike[str] | None, stamp: str, writes: bool = True
    ) -> Path:
        if output_dir is None:
            return next_folder(self, None, stamp, writes)
        folder = next_folder(self, places.to_read(_whole(output_dir)), stamp, writes)
        return Path(places.to_write_folder(os.fspath(folder)))

    @functools.wraps(choose)
    def redirected_choose(self: CheckpointDirectory, input_dir: str | os.PathLike[str] | None) -> FoundCheckpoint:
        return choose(self, None if input_dir is None else places.to_read(_whole(input_dir)))

    CheckpointDirectory.next_folder = redirected_next  # type: ignore[method-assign]
    CheckpointDirectory.choose = redirected_choose  # type: ignore[method-assign]


def _redirect_numbered(places: Redirection) -> None:
    """Redirect the folders in which checkpoints have numbers."""
    numbered, policy_of = CheckpointDirectory._numbered, CheckpointPolicy.of

    @functools.wraps(numbered)
    def redirected_numbered(self: CheckpointDirectory, call: str, argument: str) -> Path:
        return Path(places.to_share(_whole(numbered(self, call, argument))))

    def redirected_policy(settings: RunSettings) -> CheckpointPolicy:
        policy = policy_of(settings)
        resume = policy.resume
        if policy.every is None and resume is None:
            return policy
        is_same = resume == policy.folder
        folder = Path(places.to_share(_whole(policy.folder)))
        return replace(policy, folder=folder, resume=folder if is_same else resume)

    CheckpointDirectory._numbered = redirected_numbered  # type: ignore[method-assign]
    CheckpointPolicy.of = staticmethod(redirected_policy)  # type: ignore[method-assign]


def _redirect_weights(places: Redirection) -> None:
    """Redirect the folders and files of weights."""
    save_weights, read_weights = model_weights.save_weights, model_weights.read_weights
    write_then_rename = model_weights.write_then_rename

    @functools.wraps(save_weights)
    def redirected_save(state: Mapping[str, Any], folder: Path, max_shard_size: int | str, safe: bool) -> None:
        save_weights(state, Path(places.to_write_folder(os.fspath(folder))), max_shard_size, safe)

    @functools.wraps(read_weights)
    def redirected_read(path: Path) -> Any:
        return read_weights(Path(places.to_read(os.fspath(path))))

    @functools.wraps(write_then_rename)
    def redirected_write(path: Path, write: Callable[[Path], object]) -> None:
        write_then_rename(Path(places.to_write(os.fspath(path))), write)

    model_weights.save_weights = redirected_save
    model_weights.read_weights = redirected_read
    model_weights.write_then_rename = redirected_write


def _whole(path: str | os.PathLike[str]) -> str:
    """Return `path` as the checkpoints read it: from the root folder, with `~` and links followed."""
    return os.fspath(Path(path).expanduser().resolve())
