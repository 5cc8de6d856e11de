"""The tool behind `make programs`, with a folder of one small program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from public_programs import server as server_module
from public_programs.__main__ import main
from public_programs.big_model_names import names_table
from public_programs.copies import change_import, notebook_script, with_settings
from public_programs.manifest import DRIVERS, STAND_INS, BigModelProgram, Manifest, Program, read_manifest
from public_programs.runs import SHARDED, Run, Runner, last_words, runs_of
from public_programs.table import Comparison, table

CLIENT = Path(server_module.__file__).with_name("client.py")
PROGRAM = """
import sys
import torch
from accelerate import Accelerator

STEPS = 10_000

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(STEPS):
    accelerator.backward(model(torch.full((4, 2), float(step))).square().mean())
    optimizer.step()
    optimizer.zero_grad()
assert sys.argv[1:] == ["--really"]
"""

LINE = Program(
    "line", "someone/lines", "0", "train.py", settings={"STEPS": "3"}, arguments=["--really"], needs=["someone/library"]
)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    manifest = Manifest(tmp_path, [LINE], ["torch", "no_such_module"], {"someone/library": "1"})
    for name in ("someone/lines", "someone/library"):
        manifest.repository(name).mkdir(parents=True)
    (manifest.repository(LINE.repository) / "train.py").write_text(PROGRAM, encoding="utf-8")
    return manifest


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_program_is_run_with_both_libraries_and_compared(manifest: Manifest) -> None:
    pytest.importorskip("accelerate")
    folder = manifest.folder
    runs = [Run(LINE, library, "plain", 1) for library in ("accelerate", "nbaccel")]
    with Runner(manifest) as runner:
        theirs, ours = map(runner.carry_out, runs)
    assert [(optimizer["name"], optimizer["steps"]) for optimizer in ours["ranks"][0]["optimizers"]] == [("SGD", 3)]
    assert Comparison(runs[1], theirs, ours).verdict() == "3 losses equal, parameters equal"
    assert "from nbaccel import" in (folder / "copies/nbaccel/someone+lines/train.py").read_text(encoding="utf-8")
    assert (folder / "repositories/someone+lines/train.py").read_text(encoding="utf-8") == PROGRAM


def test_what_the_programs_name_lies_here_and_nothing_else(tmp_path: Path) -> None:
    manifest = read_manifest(tmp_path)
    programs = manifest.programs
    assert len({program.name for program in programs}) == len(programs)
    commits = {(program.repository, program.commit) for program in programs}
    assert len({repository for repository, _ in commits}) == len(commits)  # they share a folder
    assert {program.driver for program in programs if program.driver} == {path.name for path in DRIVERS.glob("*.py")}
    stand_ins = {f"{name}.py" for program in programs for name in program.stand_ins}
    assert stand_ins == {path.name for path in STAND_INS.glob("*.py")}
    assert {name for program in programs for name in program.needs} == manifest.commits.keys()


def test_a_repository_that_is_missing_is_cloned_at_its_commit(manifest: Manifest) -> None:
    assert manifest.clone_commands([LINE]) == []
    missing = Manifest(manifest.folder / "a folder", [LINE], commits=manifest.commits)
    [library, lines] = missing.clone_commands([LINE])
    path = f"'{missing.folder}/repositories/someone+library'"
    assert f"clone --no-checkout https://github.com/someone/library {path} " in library
    assert library.endswith(f"git -C {path} checkout --quiet 1")
    assert lines.endswith("+lines' checkout --quiet 0")


def test_what_is_missing_is_said_before_anything_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--names", "palm,spin"]) == 2
    captured = capsys.readouterr()
    assert captured.out.count("git clone") == 3
    assert captured.err == "3 repositories are missing: `| sh` fetches them\n"
    assert not any(tmp_path.iterdir())


CELLS = ["!python main.py \\\n  --model 7b", "import accelerate\naccelerate.hooks.add_hook_to_module(m, h)"]
READER = """
from accelerate import Accelerator, infer_auto_device_map as planned
from accelerate.utils.offload import offload_weight

def late():
    from accelerate.big_modeling import init_empty_weights
"""


def test_names_of_the_big_model_api_are_counted_by_program(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    readers = [BigModelProgram("someone/loads", "0", ["load.py", "demo.ipynb"])]
    manifest = Manifest(tmp_path, [], big_models=readers)
    assert len(manifest.clone_commands(readers)) == 1
    folder = manifest.repository("someone/loads")
    folder.mkdir(parents=True)
    (folder / "load.py").write_text(READER, encoding="utf-8")
    cells = [{"cell_type": "code", "source": [cell]} for cell in CELLS]
    (folder / "demo.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    *rows, _, sums = list(names_table(manifest))[2:]
    assert [row.split(" | ")[0].removeprefix("| accelerate.") for row in rows] == [
        "big_modeling.init_empty_weights",
        "hooks.add_hook_to_module",
        "utils.modeling.infer_auto_device_map",
        "utils.offload.offload_weight",
    ]
    assert [row.endswith("| 1 | someone/loads | here |") for row in rows] == [True, True, True, False]
    assert "nbaccel.utils.offload has no offload_weight" in rows[-1]
    assert sums == "1 programs use 4 names of the big-model API; 1 of them are not here."


WAITS = "import time; print('here', flush=True); time.sleep(600)"
STARTS_A_SESSION = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {WAITS!r}], start_new_session=True)
"""


@pytest.mark.parametrize("program", [WAITS, STARTS_A_SESSION])
@pytest.mark.parametrize("ends_first", ["server", "client"])
def test_what_a_server_has_forked_ends_with_it_and_with_the_client(
    tmp_path: Path, program: str, ends_first: str
) -> None:
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    server = subprocess.Popen(
        [sys.executable, server_module.__file__, str(tmp_path / "socket")],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    while not (tmp_path / "socket").exists():
        assert server.poll() is None
    client = subprocess.Popen(
        [sys.executable, str(CLIENT), str(tmp_path / "socket"), "program.py"],
        cwd=tmp_path, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert client.stdout is not None
    assert client.stdout.readline() == "here\n"
    if ends_first == "client":
        client.kill()
    else:
        server.communicate()
    assert client.stdout.read() == ""  # nobody has it open any more
    client.wait()
    client.stdout.close()
    server.communicate()


def test_the_last_words_are_those_of_the_program_and_not_of_its_starter() -> None:
    output = """
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in <module>
[rank1]: torch.AcceleratorError: out of memory
E1126 failed (exitcode: 1) local_rank: 1
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
    assert last_words(1, output, 60) == "torch.AcceleratorError: out of memory"
    assert last_words(None, output, 60) == "did not end in 60 s"
    assert last_words(137, "step 1\nKilled\n\n", 60) == "Killed"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from accelerate.utils import x", "from nbaccel.utils import x"),
        ("  import accelerate", "  import nbaccel as accelerate"),
        ("import accelerate as a", "import nbaccel as a"),
        ("import accelerate.state", "import nbaccel.state, nbaccel as accelerate"),
        ("from accelerated import x", "from accelerated import x"),
        ("x = 'import accelerate'", "x = 'import accelerate'"),
    ],
)
def test_only_the_import_is_changed(before: str, after: str) -> None:
    assert change_import(before, "nbaccel") == after
    assert change_import(before, "accelerate") == before


def test_a_setting_that_the_program_does_not_have_is_an_error() -> None:
    assert with_settings("A = 1\nif A == 1: B = A\n", {"A": "2"}) == "A = 2\nif A == 1: B = A\n"
    with pytest.raises(ValueError, match="no line assigns B"):
        with_settings("A = 1", {"B": "2"})


def test_a_notebook_becomes_its_code_without_shell_and_magics() -> None:
    sources = ["!pip install x\na = 1", "%%time\nb = 1", "login()", "if a:\n    !ls"]
    cells = [{"cell_type": "code", "source": source} for source in sources] + [{"cell_type": "markdown", "source": "#"}]
    assert notebook_script(json.dumps({"cells": cells}), ["login"]) == "pass\na = 1\n\nif a:\n    pass"


def result(losses: list[float], steps: int = 2, ends: str = "aa") -> dict[str, Any]:
    """A run in as many ranks as `ends` has letters, the hashes."""
    ranks = [
        {"losses": losses, "optimizers": [{"name": "SGD", "steps": steps, "sum": 1.0, "hash": end}]} for end in ends
    ]
    return {"ok": True, "seconds": 1.0, "error": "", "ranks": ranks}


def generated(*outputs: str) -> dict[str, Any]:
    """An inference in two ranks, by the hashes of what the first one has generated."""
    ranks = [{"losses": [], "optimizers": [], "outputs": [*outputs]}, {"losses": [], "optimizers": [], "outputs": []}]
    return {"ok": True, "seconds": 1.0, "error": "", "ranks": ranks}


def compared(theirs: dict[str, Any], ours: dict[str, Any], **about: Any) -> Comparison:
    program = Program("p", "a/b", "0", "p.py", **about)
    return Comparison(Run(program, "nbaccel", "torchrun", 2), theirs, ours)


EQUAL = "2 losses equal, parameters equal"
OTHER = "losses differ by up to 0.09, parameters differ by 0"
UNEQUAL = "ranks end unequal"


@pytest.mark.parametrize(
    ("comparison", "is_defect", "verdict"),
    [
        (compared(result([1.0]), result([1.0])), False, EQUAL),
        (compared(result([1.0]), result([1.1], ends="bb")), False, OTHER),
        (compared(result([1.0]), result([1.0], ends="ab")), True, UNEQUAL),
        (compared(result([1.0], ends="ab"), result([1.0], ends="cd")), False, f"{UNEQUAL}, with Accelerate too"),
        (compared(result([1.0]), result([1.0], steps=1)), True, "steps [1], with Accelerate [2]"),
        (compared(result([1.0]), result([1.0], steps=1), steps_follow_losses=True), False, EQUAL),
        (compared(result([1.0]), {"ok": False, "error": "E: no", "ranks": []}), True, "E: no"),
        (compared({"ok": False, "error": "E", "ranks": []}, result([1.0])), False, "works"),
        (compared(generated("a", "b"), generated("a", "b")), False, "2 outputs equal"),
        (compared(generated("a", "b"), generated("a", "c")), True, "2 outputs, unlike Accelerate's 2"),
    ],
)  # fmt: skip
def test_what_counts_as_a_defect(comparison: Comparison, is_defect: bool, verdict: str) -> None:
    assert comparison.verdict() == verdict
    assert comparison.is_defect == is_defect
    assert verdict in "\n".join(table([comparison]))


SHARDED_RUN = Run(Program("p", "a/b", "0", "p.py", sharded="some"), "nbaccel", "fsdp", 2)
REFUSED_RUN = Run(Program("p", "a/b", "0", "p.py", sharded="some", refused_sharded="LocalSGD"), "nbaccel", "fsdp", 2)
REFUSAL = {"ok": False, "error": "NotImplementedError: LocalSGD averages whole models", "ranks": []}


@pytest.mark.parametrize(
    ("comparison", "is_defect", "verdict"),
    [
        (Comparison(SHARDED_RUN, result([1.0]), result([2.0]), result([2.0])), False, f"of replicas: {EQUAL}"),
        (
            Comparison(SHARDED_RUN, result([1.0]), result([2.0], ends="bb"), result([2.2])),
            True,
            f"of replicas: {OTHER}",
        ),
        (Comparison(SHARDED_RUN, result([1.0]), result([1.1], ends="bb"), None), False, OTHER),
        (Comparison(SHARDED_RUN, result([1.0]), REFUSAL, result([1.0])), True, REFUSAL["error"]),
        (Comparison(REFUSED_RUN, result([1.0]), REFUSAL, result([1.0])), False, f"refused: {REFUSAL['error']}"),
        (Comparison(REFUSED_RUN, result([1.0]), result([1.0]), result([1.0])), True, "works, and was to be refused"),
        (Comparison(REFUSED_RUN, result([1.0]), {**REFUSAL, "error": "E: no"}, None), True, "E: no"),
    ],
)
def test_losses_in_shards_are_those_of_replicas(comparison: Comparison, is_defect: bool, verdict: str) -> None:
    assert comparison.verdict() == verdict
    assert comparison.is_defect == is_defect
    assert verdict in "\n".join(table([comparison]))


def test_sharded_runs_have_the_replicated_one_beside_them() -> None:
    some, all_ = (Program("p", "a/b", "0", "p.py", sharded=sharded) for sharded in ("some", "all"))
    assert [run.starter for run in runs_of(some, "nbaccel")] == ["plain", "torchrun", "fsdp"]
    assert [run.starter for run in runs_of(some, "accelerate")] == ["plain", "torchrun"]
    runs = [run for run in runs_of(all_, "nbaccel") if run.starter in SHARDED]
    assert [(run.starter, run.ranks, run.replicated) for run in runs] == [
        ("fsdp", 2, "p torchrun 2"),
        ("fsdp_config", 2, "p torchrun 2"),
        ("fsdp_cell", 2, "p torchrun 2"),
    ]
    by_flags, by_file, by_cell = (run.command(["python"], ["train.py"], Path("clone")) for run in runs)
    assert "--use_fsdp" in by_flags
    assert by_file[by_file.index("--config_file") + 1].startswith("clone/examples")
    assert by_cell == ["python", "train.py"]


def test_programs_for_every_starter_are_compared_with_as_many_ranks() -> None:
    some, all_ = (Program("p", "a/b", "0", "p.py", starters=starters) for starters in ("some", "all"))
    assert [run.key for run in runs_of(some, "nbaccel")] == ["p plain 1", "p torchrun 2"]
    assert runs_of(all_, "accelerate") == [Run(all_, "accelerate", "plain", 1), Run(all_, "accelerate", "torchrun", 2)]
    others = [run for run in runs_of(all_, "nbaccel") if run.key != run.reference]
    assert {(run.starter, run.ranks, run.reference) for run in others} == {
        ("torchrun", 1, "p plain 1"),
        ("launch", 1, "p plain 1"),
        ("launch", 2, "p torchrun 2"),
        ("notebook_launcher", 1, "p plain 1"),
        ("notebook_launcher", 2, "p torchrun 2"),
    }
