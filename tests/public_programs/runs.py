"""One run: a program, a library, a starter and a number of ranks; what came of it as a dictionary for JSON."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed.run as torchrun

from public_programs.copies import change_import, copy_of, notebook_script, with_settings
from public_programs.manifest import DRIVERS, STAND_INS, Manifest, Program
from public_programs.server import end_session

__all__ = ["SHARDED", "STARTERS", "Run", "Runner", "last_words", "runs_of"]

STARTERS = ("plain", "torchrun", "launch", "notebook_launcher")

SHARDED = ("fsdp", "fsdp_config", "fsdp_cell")
"""Starters with the model in shards, of nbaccel alone: on CPUs Accelerate trains replicas where FSDP is asked for."""

_CONFIG = "examples/config_yaml_templates/fsdp.yaml"
"""In Accelerate's repository. Its precision is bf16, with which losses would not be those of other starters."""

_SHARDED_FLAGS = ("--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")

_HERE = Path(__file__).parent
_OUTPUT = 8_000
"""Characters from the end of a run's output that are looked at for its last words."""


@dataclass(frozen=True, slots=True)
class Run:
    """library: "accelerate" or "nbaccel"; starter: one of `STARTERS` or `SHARDED`."""

    program: Program
    library: str
    starter: str
    ranks: int

    @property
    def key(self) -> str:
        return f"{self.program.name} {self.starter} {self.ranks}"

    @property
    def reference(self) -> str:
        """The key of Accelerate's run with as many ranks: how it was started makes no difference there."""
        return f"{self.program.name} {STARTERS[self.ranks > 1]} {self.ranks}"

    @property
    def replicated(self) -> str:
        """The key of the run of the same library that holds the model on every rank; the run's own if it does."""
        return self.reference if self.starter in SHARDED else self.key

    def command(self, served: Sequence[str], script: Sequence[str], repository: Path) -> list[str]:
        """What to execute; `served` before a script has the server run it. The recorder calls `notebook_launcher`.

        repository: the copy of the program's repository.
        """
        ranks = str(self.ranks)
        if self.starter == "torchrun":
            return [*served, torchrun.__file__, "--standalone", "--nproc-per-node", ranks, *served[1:], *script]
        sharding = {"launch": (), "fsdp": _SHARDED_FLAGS}
        if self.starter == "fsdp_config":
            sharding[self.starter] = ("--config_file", str(repository / _CONFIG), "--mixed_precision", "no")
        if self.starter in sharding:
            flags = ["launch", "--cpu", "-n", ranks, *sharding[self.starter]]
            return [
                served[0],
                "-c",
                "import sys; from nbaccel.cli import main; sys.exit(main())",
                *flags,
                *served[1:],
                *script,
            ]
        return [*served, *script]


def runs_of(program: Program, library: str) -> list[Run]:
    """Plain alone and by torchrun in two ranks; with nbaccel, where the program says so, by others and in shards."""
    kinds = [("plain", 1), ("torchrun", 2)]
    if program.starters == "all" and library == "nbaccel":
        kinds += [("torchrun", 1), *((starter, ranks) for starter in STARTERS[2:] for ranks in (1, 2))]
    if program.sharded and library == "nbaccel":
        kinds += [(starter, 2) for starter in (SHARDED if program.sharded == "all" else SHARDED[:1])]
    return [Run(program, library, starter, ranks) for starter, ranks in kinds]


class Runner:
    """Carries out the runs of a folder, one after the other; owns the server that their processes are forked from."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._folder = manifest.folder
        self._private = tempfile.TemporaryDirectory(prefix="programs-")
        self._socket = Path(self._private.name, "server")
        self._environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HOME": str(self._folder / "work" / "huggingface"),
            "HF_HUB_OFFLINE": "1",
            "ACCELERATE_USE_CPU": "true",  # without it ranks of torchrun are each alone with Accelerate
            "WANDB_MODE": "offline",
        }
        self._server = subprocess.Popen(
            [sys.executable, "-m", "public_programs.server", self._socket, *manifest.preload],
            env={**self._environ, "PYTHONPATH": str(_HERE.parent)},
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        while not self._socket.exists():
            if self._server.poll() is not None:
                raise RuntimeError(f"the server of programs ended with {self._server.returncode}")
            time.sleep(0.1)

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._server.communicate()  # its standard input ends: it ends what it has forked, and then itself
        self._private.cleanup()

    def carry_out(self, run: Run) -> dict[str, Any]:
        """Run it in a fresh working directory, and end whatever it left.

        Returns `ok`, `call` (that of `Program`), `seconds`, `error` (its last words, empty when it ended well) and
        `ranks`, their records in order.
        The directory of a run that failed is kept: `output.txt`, and `cwd` with what it wrote.
        """
        program = run.program
        copies = [self._copy(name, run.library) for name in (program.repository, *program.needs)]
        work = self._folder / "work" / f"{run.key} {run.library}".replace("/", "_").replace(" ", "-")
        shutil.rmtree(work, ignore_errors=True)
        (work / "cwd").mkdir(parents=True)
        for entry in (self._folder / "hub").iterdir() if (self._folder / "hub").is_dir() else ():
            (work / "cwd" / entry.name).symlink_to(entry)
        task = {
            "library": run.library,
            "watched": ["nbaccel", "accelerate"]
            if program.uses_trainer and run.library == "nbaccel"
            else [run.library],
            "folder": str(work),
            "script": str(self._script(run, copies[0], work)),
            "arguments": program.arguments,
            "stand_ins": program.stand_ins,
            "notebook_launcher": run.ranks if run.starter == "notebook_launcher" else 0,
            "cell": f"-n {run.ranks} --cpu --strategy fsdp" if run.starter == "fsdp_cell" else "",
        }
        (work / "task.json").write_text(json.dumps(task), encoding="utf-8")
        imports = [
            *(copies[0] / place for place in program.imports),
            *copies[1:],
            STAND_INS,
            _HERE.parents[1],
        ]
        environ = {**self._environ, "PYTHONPATH": os.pathsep.join(map(str, imports)), **program.environ}
        served = [sys.executable, str(_HERE / "client.py"), str(self._socket)]
        command = run.command(served, [str(_HERE / "recorder.py"), str(work / "task.json")], copies[0])
        started = time.monotonic()
        status, output = _finish(command, work, environ, program.timeout_s)
        result = {
            "ok": status == 0,
            "call": program.call,
            "seconds": round(time.monotonic() - started, 1),
            "error": "" if status == 0 else last_words(status, output, program.timeout_s),
            "ranks": [json.loads(path.read_text(encoding="utf-8")) for path in sorted(work.glob("rank*.json"))],
        }
        if status == 0:
            shutil.rmtree(work)
        return result

    def _copy(self, repository: str, library: str) -> Path:
        return copy_of(self._manifest.repository(repository), self._folder / "copies", library)

    def _script(self, run: Run, copy: Path, work: Path) -> Path:
        """The program's file in the copy, or its driver, whose import is changed like the program's."""
        program = run.program
        if program.driver:
            script = work / f"driver_of_{program.name}.py"  # not a name that it imports: it stands first on the path
            source = (DRIVERS / program.driver).read_text(encoding="utf-8")
            script.write_text(change_import(source, run.library), encoding="utf-8")
            return script
        script = copy / program.path
        if script.suffix != ".ipynb" and not program.settings:
            return script
        source = script.read_text(encoding="utf-8")
        if script.suffix == ".ipynb":
            source = change_import(notebook_script(source, program.skip_cells), run.library)
        changed = script.with_name(f"{program.name}_for_{run.library}.py")
        changed.write_text(with_settings(source, program.settings), encoding="utf-8")
        return changed


def _finish(command: list[str], work: Path, environ: dict[str, str], timeout_s: float) -> tuple[int | None, str]:
    """The exit status, None where it took longer than `timeout_s`, and the output's end."""
    log = work / "output.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=work / "cwd", env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_session(process.pid)  # ranks that the starter left are in groups of their own
            process.wait()
    return status, log.read_text(encoding="utf-8", errors="replace")[-_OUTPUT:]


def last_words(status: int | None, output: str, timeout_s: float) -> str:
    """The last exception that the output names, not the one by which torchrun reports it, or the last line."""
    if status is None:
        return f"did not end in {timeout_s:.0f} s"
    raised = re.findall(
        r"^(?:\[rank\d+\]: *)?((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Warning|Failed|Refused)\b.*)", output, re.MULTILINE
    )
    raised = [words for words in raised if "ChildFailedError" not in words and "Warning:" not in words]
    lines = [line for line in output.splitlines() if line.strip()]
    return (raised or lines or [f"status {status}"])[-1][:300]
