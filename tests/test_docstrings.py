"""Docstrings of what programs can call say what a caller needs, in Google's form; their examples run.

The form is that of the Google Python style guide, section 3.8, as torch and Lightning write it: `Args:`, `Returns:`,
`Raises:`, `Example:`. What programs can call is what tests/public_surface.txt lists.
"""

from __future__ import annotations

import ast
import builtins
import doctest
import functools
import inspect
import re
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import public_surface
from environments import REPOSITORY

PACKAGE = REPOSITORY / "nbaccel"

REWRITTEN = tomllib.loads((REPOSITORY / "tests" / "rewritten_sentences.toml").read_text(encoding="utf-8"))
"""Sentences and names that were replaced, with what replaced them."""

MODULES = [
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]

SEAMS = (
    "nbaccel.features.feature",
    "nbaccel.features.map.formats.Format",
    "nbaccel.features.map.item_source.ItemSource",
    "nbaccel.features.mode_flag",
    "nbaccel.features.named",
    "nbaccel.launching.ipc.rank_part.RankPart",
    "nbaccel.launching.processes.start.StartMethod",
    "nbaccel.namespace.kind.Kind",
    "nbaccel.notebook.cell_mode.CellMode",
    "nbaccel.output.painter.Screen",
    "nbaccel.train.checkpoint.autosave.Schedule",
    "nbaccel.features.memory.meters.PeakGauge",
    "nbaccel.train.strategies.single.Strategy",
)
"""What developers extend: these are documented like what programs call."""

SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example")
"""Headings, in the order in which they stand."""

UNNAMED = ("self", "cls", "args", "kwargs")
"""Parameters that need no entry; the last two are passed on to something that the docstring names."""


@pytest.mark.sample(60)
@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    result = doctest.testmod(import_module(name))
    vars(builtins).pop("_", None)  # the last value of an example; IPython sets no `_` where the program has one
    assert not result.failed, f"{result.failed} of {result.attempted} lines differ; see the output"


@pytest.mark.parametrize("name", MODULES)
def test_examples_that_do_not_run_here_are_statements(name: str) -> None:
    """Those that need a notebook, several ranks or a service are skipped where examples run."""
    tests = doctest.DocTestFinder(exclude_empty=True).find(import_module(name))
    skipped = [each for test in tests for each in test.examples if each.options.get(doctest.SKIP)]
    for example in skipped:
        compile(example.source, name, "single")


def test_every_public_name_has_an_example_and_so_has_every_call_of_what_a_cell_gets() -> None:
    """Names that programs import, and the methods of `Accelerator`, `Run` and `Runs`."""
    public = {
        path: getattr(import_module(module), name)
        for path, what in public_surface.read().items()
        for module, _, name in [path.rpartition(".")]
        if module in public_surface.MODULES and not what.startswith("= ")
    }
    public = {path: value for path, value in public.items() if callable(value) and path not in public_surface._CHANGING}
    public |= {
        path: value
        for kind in ("Accelerator", "Run", "Runs")
        for path, value in _described(kind, public[f"nbaccel.{kind}"])
    }
    lacking = [
        path for path, value in public.items() if not re.search(r"^Example:$", inspect.getdoc(value) or "", re.M)
    ]
    assert not lacking, "these have no Example:\n" + "\n".join(lacking)


LIBRARY_CALLS_THEM = {
    **dict.fromkeys(("AcceleratorState", "PartialState"), "`Accelerator` and `end_training` do what these methods do"),
    **dict.fromkeys(("AcceleratedOptimizer", "AcceleratedScheduler"), "as torch's; the example of `prepare` has them"),
    **dict.fromkeys(("DataLoaderDispatcher", "DataLoaderShard", "SkipDataLoader"), "made by `prepare`, and iterated"),
    **dict.fromkeys(("BatchSamplerShard", "IterableDatasetShard", "SeedableRandomSampler"), "called by loaders"),
    **dict.fromkeys(("FullyShardedDataParallelPlugin", "DeepSpeedPlugin", "TorchDynamoPlugin"), "asked by `prepare`"),
    **dict.fromkeys(("RunSettings", "World"), "asked by a launch"),
}
"""Classes whose methods a program need not call, with the reason."""


def test_every_method_that_a_program_calls_has_an_example_or_is_in_that_of_its_class() -> None:
    lacking = []
    for path, what in public_surface.read().items():
        owner, _, name = path.rpartition(".")
        module, _, kind = owner.rpartition(".")
        is_method = module in public_surface.MODULES and owner not in public_surface.MODULES and what.startswith("(")
        if not is_method or "__" in name or kind in LIBRARY_CALLS_THEM:
            continue
        bases = [base for base in getattr(import_module(module), kind).__mro__ if _is_ours(base)]
        examples = [(inspect.getdoc(base) or "").partition("Example:")[2] for base in bases]
        docs = [inspect.getdoc(vars(base)[name]) or "" for base in bases if name in vars(base)]
        in_class = any(re.search(rf"\.{name}\(|\bdef {name}\(", example) for example in examples)
        if not in_class and not any("Example:" in text for text in docs):
            lacking.append(path)
    assert not lacking, "these have no Example:\n" + "\n".join(lacking)


def test_each_parameter_of_a_public_call_is_documented_under_args() -> None:
    """Of functions, methods and constructors. Enumerations, and classes that `prepare` makes, are not constructed."""
    wrong = [f"{path}: {', '.join(missing)}" for path, value in _callables() if (missing := _undocumented(value))]
    assert not wrong, "these parameters are not named under Args:\n" + "\n".join(wrong)


def test_what_a_public_call_returns_is_said() -> None:
    """Under Returns or Yields, or by a first line that begins with Return or Yield, as the style guide allows.

    A context manager that yields nothing, and a method that returns its own object, need not say so.
    """
    wrong = [path for path, value in _callables() if _returns(value) and not _says_what_it_returns(value)]
    assert not wrong, "these do not say what they return:\n" + "\n".join(wrong)


def test_sections_of_public_docstrings_stand_in_one_order_after_a_first_line_that_ends_a_sentence() -> None:
    wrong = []
    for path, value in _callables():
        text = inspect.getdoc(value) or ""
        found = re.findall(rf"^({'|'.join(SECTIONS)}):$", text, re.M)
        summary = re.split(r"\n\s*\n", text)[0].strip()
        if found != sorted(set(found), key=SECTIONS.index) or not re.search(r"[.!?:)]$", summary):
            wrong.append(f"{path}: {found}")
        wrong += [f"{path}: an example without a heading" for line in text.splitlines() if line.startswith(">>> ")]
    assert not wrong, "\n".join(wrong)


def _callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every function, method and class of ours that tests/public_surface.txt lists, once, and those of the seams."""
    seen: set[int] = set()
    for module_name, others in public_surface.MODULES.items():
        module = import_module(module_name)
        for name in sorted({*getattr(module, "__all__", ()), *others}):
            for path, value in _described(f"{module_name}.{name}", getattr(module, name)):
                if id(value) not in seen and _is_ours(value):
                    seen.add(id(value))
                    yield path, value
    yield from _of_seams()


def _of_seams() -> list[tuple[str, Callable[..., Any]]]:
    parts = [(path, getattr(import_module(path.rpartition(".")[0]), path.rpartition(".")[2])) for path in SEAMS]
    return [each for path, value in parts for each in _described(path, value)]


def _described(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, type):
        yield path, value
        for base in value.__mro__:
            for name, member in vars(base).items() if _is_ours(base) else ():
                plain = member.__func__ if isinstance(member, staticmethod | classmethod) else member
                if not name.startswith("_") and inspect.isfunction(plain):
                    yield f"{path}.{name}", getattr(value, name)
    elif callable(value):
        yield path, value


def _is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == "nbaccel"


def _parameters(value: Any) -> list[str]:
    if isinstance(value, type):
        line = public_surface._class(value)
        if not line.startswith("class (") or value.__name__ in public_surface._MADE_BY_PREPARE:
            return []
        if issubclass(value, BaseException):
            return [name for name in inspect.signature(value).parameters if name != "message"]
        maker = next(vars(base) for base in value.__mro__ if {"__init__", "__new__"} & vars(base).keys())
        value = maker.get("__init__") or maker["__new__"]
    return [name for name in inspect.signature(value).parameters if name not in UNNAMED]


def _undocumented(value: Any) -> list[str]:
    section = re.search(r"^Args:\n((?: {4}.*\n?|\n)+)", inspect.getdoc(value) or "", re.M)
    entries = re.findall(r"^ {4}([*\w, ]+)(?: \([^)]*\))?: \S", section[1], re.M) if section else []
    named = {name.strip("* ") for entry in entries for name in entry.split(",")}
    return [name for name in _parameters(value) if name not in named]


def _returns(value: Any) -> bool:
    if isinstance(value, type):
        return False
    annotation = str(inspect.signature(value).return_annotation)
    return annotation not in ("None", "Self", "NoReturn", "Iterator[None]", "AbstractContextManager[None]")


def _says_what_it_returns(value: Any) -> bool:
    text = inspect.getdoc(value) or ""
    return bool(re.match(r"Returns? |Yields? ", text) or re.search(r"^(Returns|Yields):$", text, re.M))


def test_sentences_that_were_hard_to_read_stay_replaced() -> None:
    wrong = []
    for each in REWRITTEN["sentence"]:
        wrong += [f"{name} has again: {each['old']}" for name, text in _prose().items() if each["old"] in text]
        if each["new"] and each["new"] not in _prose().get(each["file"], ""):
            wrong.append(f"{each['file']} lacks: {each['new']}")
    assert not wrong, "see tests/rewritten_sentences.toml\n" + "\n".join(wrong)


def test_names_that_were_given_up_for_the_fields_words_are_not_defined_again() -> None:
    names = "|".join(REWRITTEN["names"])
    defined = re.compile(rf"\b(?:class|def) ({names})\b|^ *(?:self\.)?({names}) *(?:=|:)", re.M)
    wrong = [
        f"{path.relative_to(PACKAGE)}: {match[0].strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for match in defined.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


def test_each_folder_says_what_it_is_who_runs_it_and_what_it_may_import() -> None:
    """In the docstring of its `__init__`, which names the folders that its modules import, or says "every folder"."""
    wrong = []
    for folder in sorted({path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE}):
        name = str(folder.relative_to(PACKAGE))
        start = folder / "__init__.py"
        text = (ast.get_docstring(ast.parse(start.read_text(encoding="utf-8"))) or "") if start.is_file() else ""
        if not re.search(r"\b[Rr]uns? (in|it)\b|\b[Ii]n (ranks|kernel)\b", text):
            wrong.append(f"{name} does not say who runs it")
        if not (said := re.search(r"\b([Mm]ay import|[Ii]mports?)\s.*", text, re.S)):
            wrong.append(f"{name} does not say what it may import")
        elif "every folder" not in said[0]:
            named = {each.partition("/")[0] for each in re.findall(r"`([a-z_/]+)`", said[0])}
            wrong += [f"{name} imports {each}" for each in sorted(_imported(folder) - named - {name.partition("/")[0]})]
    assert not wrong, "\n".join(wrong)


@functools.cache
def _prose() -> dict[str, str]:
    """Return the text of each file by its path, on one line and without the marks of comments."""
    return {
        str(path.relative_to(PACKAGE)): " ".join(path.read_text(encoding="utf-8").replace("# ", "").split())
        for path in PACKAGE.rglob("*.py")
    }


def _imported(folder: Path) -> set[str]:
    """Return the other folders of the package whose modules are imported by those of `folder`."""
    found = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nbaccel."):
                found.add((node.module or "").split(".")[1])
    return {name for name in found if (PACKAGE / name).is_dir()}
