"""write_basic_config: the first line of notebooks written for Accelerate. Runs in the kernel, or in a script.

It makes the same choice for the notebooks of the folder as `%accelerate config mixed-precision=...` with `--save`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from nbaccel.options.configuration import FILE_NAME, ConfigFile
from nbaccel.settings import RunSettings

__all__ = ["write_basic_config"]


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | Literal[False]:
    """Write a configuration file, unless there is one; return its path, or False if it exists already.

    mixed_precision: "no", "fp16" or "bf16". The number of devices is not written: every run counts those that it sees.
    save_location: by default `nbaccel.toml` in the working directory, which is what notebooks in it read.

    Raises:
        ValueError: another precision, or a file that cannot be written.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     write_basic_config("fp16", Path(folder, "nbaccel.toml")).read_text().splitlines()[-1]
    'mixed-precision = "fp16"'
    """
    precision = RunSettings(mixed_precision=mixed_precision.lower()).mixed_precision or "no"
    file = ConfigFile(Path(FILE_NAME if save_location is None else save_location))
    if file.path.exists():
        print(f"still there: {file.path}; delete it, or change it by %accelerate config")
        return False
    file.write({"mixed-precision": precision})
    return file.path
