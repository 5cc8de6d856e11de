"""The public programs: `programs.toml` names them, and says how each is called.

    preload = ["transformers", "datasets"]      # what most programs import; modules that are missing are left out

    [commits]
    "lucidrains/pytorch-custom-utils" = "a452e954eb47"   # what programs need beside their own repository

    [[program]]
    name = "nlp_example"                        # unique
    repository = "huggingface/accelerate"       # its files lie in repositories/huggingface+accelerate of the folder
    commit = "16cb6eb80dd9"
    path = "examples/nlp_example.py"            # a script, or a notebook: its code cells are run
    arguments = ["--cpu"]

    [[big_models]]                              # read only, see big_model_names.py
    repository = "mit-han-lab/llm-awq"
    commit = "d6e797a42b9e"
    paths = ["awq/entry.py"]

The other keys are the fields of `Program`. `drivers` beside this file has scripts that call a repository that is a
library only, and `stand_ins` the modules that a program imports first, to replace models and data that would be
downloaded.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from public_repositories import clone_line, repository_folder

__all__ = ["DRIVERS", "STAND_INS", "BigModelProgram", "Manifest", "Program", "read_manifest"]

_HERE = Path(__file__).parent
DRIVERS, STAND_INS = _HERE / "drivers", _HERE / "stand_ins"

_IS_NO_CALL = {"name", "starters", "sharded", "refused_sharded", "timeout_s", "steps_follow_losses"}
"""Fields of a program that do not change what it computes."""


@dataclass(frozen=True, slots=True)
class Program:
    """One public program.

    needs: packages among the repositories that take an Accelerator, whose import has to be changed too.
    skip_cells: cells of a notebook that contain one of these are left out: downloads, uploads.
    settings: values, as Python writes them, for the constants at the top of a script that takes no arguments.
    driver: a script in `drivers` that is run instead of `path`, which is then the module that it calls.
    imports: folders of the repository that are on the import path.
    uses_trainer: the loop is that of transformers' Trainer, which has an Accelerator of its own.
    steps_follow_losses: how many there are depends on the losses, which with several ranks are those of another order.
    starters: "some" for plain and torchrun, or "all".
    sharded: "some" for a run with its model in shards (FSDP) too, by flags of the launcher; "all" also by a
    configuration file of Accelerate's repository and by a cell; "" for none.
    refused_sharded: words of the error by which a sharded run is refused.
    """

    name: str
    repository: str
    commit: str
    path: str
    driver: str = ""
    arguments: list[str] = field(default_factory=list)
    stand_ins: list[str] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)
    skip_cells: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    uses_trainer: bool = False
    steps_follow_losses: bool = False
    starters: str = "some"
    sharded: str = ""
    refused_sharded: str = ""
    timeout_s: float = 180

    def __post_init__(self) -> None:
        if self.starters not in ("some", "all"):
            raise ValueError(f"starters of {self.name} is 'some' or 'all', got {self.starters!r}")
        if self.sharded not in ("", "some", "all"):
            raise ValueError(f"sharded of {self.name} is '', 'some' or 'all', got {self.sharded!r}")

    @property
    def call(self) -> str:
        """A hash of what decides how it runs: with another one a result is that of another program."""
        about = {key: value for key, value in asdict(self).items() if value and key not in _IS_NO_CALL}
        return hashlib.sha256(repr(sorted(about.items())).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class BigModelProgram:
    """A public program whose names of Accelerate's big-model API are counted. paths: the files that use them."""

    repository: str
    commit: str
    paths: list[str]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The programs, and the folder with their repositories, in which they are run.

    commits: of the repositories that programs need beside their own.
    big_models: programs that are read only.
    """

    folder: Path
    programs: list[Program]
    preload: list[str] = field(default_factory=list)
    commits: dict[str, str] = field(default_factory=dict)
    big_models: list[BigModelProgram] = field(default_factory=list)

    def repository(self, name: str) -> Path:
        return repository_folder(self.folder, name)

    def clone_commands(self, programs: Sequence[Program | BigModelProgram]) -> list[str]:
        """Return a shell line for each repository of `programs` that the folder lacks."""
        commits = {program.repository: program.commit for program in programs}
        commits |= {name: self.commits[name] for program in programs for name in getattr(program, "needs", ())}
        missing = {name: commit for name, commit in commits.items() if not self.repository(name).is_dir()}
        return [clone_line(self.folder, name, commit) for name, commit in sorted(missing.items())]


def read_manifest(folder: Path) -> Manifest:
    """Return the programs of `programs.toml`, to be run in `folder`."""
    manifest = tomllib.loads((_HERE / "programs.toml").read_text(encoding="utf-8"))
    programs = [Program(**entry) for entry in manifest["program"]]
    big_models = [BigModelProgram(**entry) for entry in manifest["big_models"]]
    return Manifest(folder, programs, manifest["preload"], manifest["commits"], big_models)
