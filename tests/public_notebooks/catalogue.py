"""The public notebooks: `notebooks.toml` names them, and says which cells train and what they need.

    edits = [['np\\.Inf\\b', "np.inf"]]          # made to every cell: what is written for older packages, GPUs

    [packages]                                  # beside nbaccel[dev], by the name of their import
    seaborn = "0.13.2"

    [[notebook]]
    name = "udacity_mlp"                        # unique
    repository = "udacity/deep-learning-v2-pytorch"
    commit = "c9404fc86181"
    path = "mnist-mlp/solution.ipynb"           # a notebook, or a script: one cell
    training = [7]                              # code cells, counted from 0

The other keys are the fields of `Notebook`. `stand_ins` beside this file has the modules that are imported before the
first cell, to replace data that would be downloaded. No text of a notebook stands here, but for small edits.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

from public_repositories import clone_line, repository_folder

__all__ = ["STAND_INS", "Catalogue", "Notebook", "read_catalogue"]

_HERE = Path(__file__).parent
STAND_INS = _HERE / "stand_ins"

_IS_NO_CALL = {"name", "speed", "samples"}
"""Fields that change nothing in what a check or a run of a cell is given."""


@dataclass(frozen=True, slots=True)
class Notebook:
    """One public notebook.

    training: the code cells that train, counted from 0.  speed: the one whose loader can be made faster; None if none.
    samples: of its training, for the number of epochs that take some seconds.
    files: files and folders of the repository that the notebook needs.  folder: in which of them its kernel starts.
    edits: pairs of a regular expression and what to write instead, in every cell.
    skip_cells: cells with one of these words are left out: downloads.
    stand_ins: modules of `stand_ins`.  prelude: lines that run after their import.
    imports: packages that nbaccel[dev] does not bring.
    """

    name: str
    repository: str
    commit: str
    path: str
    training: list[int]
    speed: int | None = None
    samples: int = 4000
    files: list[str] = field(default_factory=list)
    folder: str = ""
    edits: list[list[str]] = field(default_factory=list)
    skip_cells: list[str] = field(default_factory=list)
    stand_ins: list[str] = field(default_factory=list)
    prelude: str = ""
    imports: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.training:
            raise ValueError(f"training of {self.name} names no cell")
        if self.speed is not None and self.speed not in self.training:
            raise ValueError(f"speed of {self.name} is one of the cells {self.training}, got {self.speed}")
        for pattern, _ in self.edits:
            re.compile(pattern)

    @property
    def call(self) -> str:
        """A hash of what decides how it runs: a result with another one is of another notebook."""
        about = {key: value for key, value in asdict(self).items() if value and key not in _IS_NO_CALL}
        return hashlib.sha256(repr(sorted(about.items())).encode()).hexdigest()[:12]

    @property
    def first_cell(self) -> str:
        """The text of a cell before the first one."""
        return "\n".join(["%load_ext nbaccel", *(f"import {name}" for name in self.stand_ins), self.prelude])


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The notebooks, and the folder with their repositories and packages.

    packages: versions by the name of the import.
    """

    folder: Path
    notebooks: list[Notebook]
    packages: dict[str, str] = field(default_factory=dict)

    @property
    def package_folder(self) -> Path:
        return self.folder / "packages"

    def repository(self, notebook: Notebook) -> Path:
        return repository_folder(self.folder, notebook.repository)

    def clone_lines(self, notebooks: Sequence[Notebook]) -> list[str]:
        """Return a shell line for each repository of `notebooks` that the folder lacks."""
        missing = {notebook.repository for notebook in notebooks if not self.repository(notebook).is_dir()}
        return [clone_line(self.folder, name) for name in sorted(missing)]

    def install_lines(self, notebooks: Sequence[Notebook], python: str) -> list[str]:
        """Return a shell line for each package of `notebooks` that neither `python` nor the folder has.

        python: the interpreter that runs this. torchvision's wheel is one for CUDA: beside a torch for CPUs it works
        without its operators, which these notebooks do not use.
        """
        folder = shlex.quote(str(self.package_folder))
        install = f"{shlex.quote(python)} -m pip install --quiet --no-deps --target {folder}"
        lines = []
        for name in sorted({name for notebook in notebooks for name in notebook.imports}):
            if find_spec(name) is None and not (self.package_folder / name).is_dir():
                without = f" && sed -i '/^    _.*_registrations,/d' {folder}/torchvision/__init__.py"
                lines.append(f"{install} {name}=={self.packages[name]}{without * (name == 'torchvision')}")
        return lines


def read_catalogue(folder: Path) -> Catalogue:
    """Return the notebooks of `notebooks.toml`, to be run in `folder`."""
    entries = tomllib.loads((_HERE / "notebooks.toml").read_text(encoding="utf-8"))
    notebooks = [
        Notebook(**{**entry, "edits": [*entry.get("edits", ()), *entries["edits"]]}) for entry in entries["notebook"]
    ]
    return Catalogue(folder, notebooks, entries["packages"])
