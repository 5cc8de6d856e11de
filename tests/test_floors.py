"""The house stands: imports point down only, and what only a few files may do is done only there.

The sources are read, not imported: an import inside a function counts, and so does a string in a registry that
names one of our modules.
"""

from __future__ import annotations

import ast
import functools
import re

import pytest

from layout import PACKAGE, Source

FLOORS = {
    **dict.fromkeys(["base", "errors"], 0),  # errors stand where people import them
    **dict.fromkeys(["output", "options"], 1),
    **dict.fromkeys(["display", "namespace"], 2),
    **dict.fromkeys(["train", "launching"], 3),
    **dict.fromkeys(["notebook", "testing"], 4),
    "features": 5,
    # the top, whose files see each other too; "" is nbaccel/__init__.py
    **dict.fromkeys(["", "__main__", "utils", "logging", "data_loader", "launchers", "local_sgd", "state"], 6),
    **dict.fromkeys(["accelerator", "memory_utils", "optimizer", "scheduler", "cli"], 6),
    **dict.fromkeys(["answers", "big_modeling", "hooks", "tracking", "checkpointing", "commands", "inference"], 6),
    **dict.fromkeys(["parallelism_config", "test_utils"], 6),
}
"""Each part of the package and its layer. A part sees the layers below it; the ground and the top also see
their neighbours."""

OPEN_FLOORS = (0, 6)

TABLE = tuple(f"nbaccel.features.{name}" for name in ("feature", "mode_flag", "modules_of", "named"))
"""The functions of the table of features: whoever may name a feature asks them, and they import nothing of one."""

READS_ENVIRONMENT = {
    "base/world.py": "what launchers set",
    "base/settings.py": "what was chosen for a run",
    "base/gpu_driver.py": "the variables of CUDA",
    "base/asking_cuda.py": "the same, to know whether an answer still holds",
    "base/hardware.py": "which devices are visible, and on which platform",
    "features/accelerate_helpers/rank_logging.py": "the level that programs written for Accelerate choose",
    "features/cluster/node_environment.py": "what ssh, Slurm and Ray say of nodes",
    "features/deepspeed/native_build.py": "where compilers lie",
    "features/deepspeed/partitions.py": "the rank that DeepSpeed reads, which a kernel does not keep",
    "launching/inline.py": "puts back the variables that it changed",
    "launching/processes/start.py": "sets a variable around the start, unless the user has",
    "features/other_libraries/one_process.py": "variables by which transformers and accelerate speak to each other",
    "features/other_libraries/tracked_runs.py": "the variables by which wandb's user chooses a mode and a group",
    "train/distributed/process_group.py": "the variable by which torch's watchdog leaves errors to the program",
    "train/step/environment.py": "functions by which programs read theirs",
    "features/accelerate_helpers/environment_blocks.py": "functions by which programs set and read theirs",
    "features/export/exported_cell.py": "puts the variables of ranks aside while the cells above run",
    "features/scripts/accelerate_config.py": "where Accelerate keeps its configuration file",
    "features/trackers/clearml.py": "the variables by which ClearML's user names a project and a task",
}

PRINTS = {
    "cli/__init__.py": "a command answers by printing",
    "output/terminal.py": "a line beside what a command prints",
    "features/accelerate_helpers/small_functions.py": "answers as Accelerate's does",
    "features/scripts/script_command.py": "the command that would run",
    "features/scripts/demo_command.py": "a command answers by printing",
    "features/batch_size/estimate_command.py": "a command answers by printing",
    "launching/rank/debugger.py": "a debugger speaks beside the lines of pdb",
    "launching/tasks/cell_task.py": "`%%time` inside a cell answers in the rank's output",
    "features/clean_start/patches.py": "a line of the rank before its cell",
    "features/clean_start/library_settings.py": "a line of the rank before its cell",
    "notebook/magics.py": "the table of the flags, without a session",
    "train/distributed/process_control.py": "`accelerator.print` is print",
}


@functools.cache
def sources() -> tuple[Source, ...]:
    """Return every file of the package. Each rule is one test over all of them, which lists every offender."""
    return tuple(Source.read(path) for path in sorted(PACKAGE.rglob("*.py")))


def listed(offenders: list[str]) -> str:
    """Return the offenders, one a line, for the message of a test."""
    return "".join(f"\n  {offender}" for offender in offenders)


def part(module: str) -> str:
    """The part of the house that a module belongs to; public names belong to the roof."""
    name = module.split(".")[1] if "." in module else ""
    return name if name in FLOORS else ""


def is_allowed(arrow_from: str, arrow_to: str) -> bool:
    here, there = part(arrow_from), part(arrow_to)
    if here == there or arrow_to in TABLE:
        return True
    return FLOORS[there] < FLOORS[here] or (FLOORS[here] == FLOORS[there] and FLOORS[here] in OPEN_FLOORS)


def test_the_package_is_found() -> None:
    """Else every rule would hold, of no file."""
    assert {"__init__.py", "base/world.py", "train/accelerator.py"} <= {source.name for source in sources()}


def test_every_file_has_a_floor() -> None:
    homeless = [
        source.name for source in sources() if source.module != "nbaccel" and source.module.split(".")[1] not in FLOORS
    ]
    assert not homeless, (
        f"on no floor: put them into a room, or draw their floor here and in CONTRIBUTING.md{listed(homeless)}"
    )


def test_no_arrow_points_up_or_sideways() -> None:
    wrong = [
        f"{source.name}:{line} (floor {FLOORS[part(source.module)]}) names {target}"
        for source in sources()
        for line, target in source.arrows()
        if not is_allowed(source.module, target)
    ]
    assert not wrong, f"these name what they may not know:{listed(wrong)}"


@pytest.mark.parametrize(
    ("here", "there", "allowed"),
    [
        ("nbaccel.train.oom", "nbaccel.base.events", True),
        ("nbaccel.train.oom", "nbaccel.train.oom.memory", True),
        ("nbaccel.notebook.magics", "nbaccel.launching.ipc.spec", True),
        ("nbaccel.base.failures", "nbaccel.errors", True),
        ("nbaccel.cli", "nbaccel.testing", True),
        ("nbaccel.train.oom", "nbaccel.launching.ipc.spec", False),
        ("nbaccel.launching.rank.main", "nbaccel.notebook.render", False),
        ("nbaccel.base.events", "nbaccel.train.oom", False),
        ("nbaccel.train.oom", "nbaccel.Accelerator", False),
    ],
)
def test_arrows_are_judged_by_the_drawing(here: str, there: str, allowed: bool) -> None:
    assert is_allowed(here, there) is allowed


def test_imports_in_functions_relative_imports_and_registry_strings_are_arrows() -> None:
    code = """
def f():
    from ..launching import spec
    "nbaccel.launching is the beginning of a sentence"
ROWS = {"a": "nbaccel.notebook.panel:Panel"}
"""
    source = Source("train/example.py", ast.parse(code))
    assert sorted(source.arrows()) == [(3, "nbaccel.launching.spec"), (5, "nbaccel.notebook.panel")]


def test_the_environment_is_read_in_few_files() -> None:
    readers = [
        f"{source.name}:{node.lineno}"
        for source in sources()
        if source.name not in READS_ENVIRONMENT
        for node in ast.walk(source.tree)
        if _reads_environment(node)
    ]
    assert not readers, f"these read the environment; only {sorted(READS_ENVIRONMENT)} may:{listed(readers)}"


def _reads_environment(node: ast.AST) -> bool:
    """A look-up of one variable. Setting one, or handing all of them to a program, is no reading."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.ctx, ast.Load) and _is_environ(node.value)
    if isinstance(node, ast.Compare):
        return any(isinstance(op, ast.In | ast.NotIn) for op in node.ops) and any(map(_is_environ, node.comparators))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        function = node.func
        return function.attr == "getenv" or (function.attr == "get" and _is_environ(function.value))
    return False


def _is_environ(node: ast.AST) -> bool:
    return ast.unparse(node) in ("os.environ", "environ", "os.environb")


def test_processes_are_never_ended_by_name() -> None:
    """By id only: a name pattern once killed a stranger's `my_dataloader_worker.py`."""
    names = [
        f"{source.name}:{node.lineno} {word}"
        for source in sources()
        for node in ast.walk(source.tree)
        for word in [getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "value", None)]
        if isinstance(word, str) and re.search(r"\b(pkill|killall|process_iter|pidof)\b", word)
    ]
    assert not names, f"these end processes by their names:{listed(names)}"


def test_library_code_does_not_print() -> None:
    calls = [
        f"{source.name}:{node.lineno}"
        for source in sources()
        if source.name not in PRINTS
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not calls, f"emit an event or raise, only {sorted(PRINTS)} print:{listed(calls)}"


def test_every_file_says_what_it_is() -> None:
    silent = [source.name for source in sources() if not ast.get_docstring(source.tree)]
    assert not silent, f"no docstring: what is it, who runs it, what does it not do?{listed(silent)}"


@pytest.mark.parametrize("table", [READS_ENVIRONMENT, PRINTS], ids=["reads environment", "prints"])
def test_exceptions_are_not_kept_for_files_that_are_gone(table: dict[str, str]) -> None:
    gone = [name for name in table if not (PACKAGE / name).exists()]
    assert not gone, f"no longer there: {gone}"
