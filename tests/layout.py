"""The layout of the package in numbers, and what breaks its rules.

    PYTHONPATH=tests python -m layout            print the numbers and every offender
    PYTHONPATH=tests python -m layout --write    keep the offenders of today, where a rule has no more than before

Sources are read, not imported: an import inside of a function counts, and so does a string in a registry that names
one of our modules. Offenders of today are in layout_offenders.txt, which may only become shorter: test_layout.py. Files
may move and be renamed meanwhile, so what is compared before writing is how many offenders a rule has.

Not here, since test_floors.py is strict about it: who may import whom between parts, who reads the environment.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

PACKAGE = Path(__file__).resolve().parent.parent / "nbaccel"

FILE = Path(__file__).with_name("layout_offenders.txt")

COMMAND = "PYTHONPATH=tests python -m layout --write"

Graph = Mapping[str, set[str]]

MOST_FILES = 24

SEAMS = ("cell_mode", "rank_setup")
"""Names of files that a feature has to hook in: several have one."""

ACCELERATES_MODULES = {
    "accelerator.py",
    "answers.py",
    "big_modeling.py",
    "checkpointing.py",
    "data_loader.py",
    "errors.py",
    "hooks.py",
    "inference.py",
    "launchers.py",
    "local_sgd.py",
    "logging.py",
    "memory_utils.py",
    "optimizer.py",
    "parallelism_config.py",
    "scheduler.py",
    "state.py",
    "tracking.py",
}
"""Files that exist because programs import Accelerate's module names; so do those of utils, commands and test_utils."""

STARTS_WORKERS = ("start", "zygote", "inline", "elastic", "ranks")
"""Stems of the files that run the code of workers, or hand it to a process that does."""

OF_THE_PROCESS = {
    "namespace/tensor_devices.py": "where a tensor's memory lies, asked by pickle, which passes nothing along",
    "launching/rank/process_setup.py": "groups that must outlive whoever ended them, until the process ends",
    "train/raw_loop/graph.py": "what patched methods of torch ask: torch is patched once in a process",
    "train/step/raw_loop_hooks.py": "what prepares and what trains unprepared meet here, and neither knows the other",
}
"""Files whose state is the process's, for the reason given."""

SHOWS_HELP = "notebook/shell_hooks.py"
"""The file that imports the Accelerator's class when somebody asks for its help."""

OUT_OF_MEMORY = re.compile(
    r"train/(oom|executable|memory|microbatch|planning)/.*"
    r"|train/(gate|bypass|memlimit)\.py|train/data/cut\.py|train/faces/(recovering|planning|replicas)\.py"
    r"|launching(oom_restart|restarting|witness|holdings|hostmemory)\.py"
)
"""Files about running out of memory, in the old places and in the new one."""

FEATURES, TABLE = "nbaccel.features.", "features/__init__.py"

A_MODULE = re.compile(r"nbaccel(?!\.toml$)(\.[A-Za-z_]\w*)+(:\w+)?")

_QUESTION = re.compile(r"(What|Whether|How|Which|Where|Who|Whose|When|Why|Of)\b")

_RUNS_IN = re.compile(
    r"\b(kernels?|notebook|ranks?|workers?|both|anywhere|anything|scripts?|terminal|process|tests?)\b", re.I
)

_CHANGES = re.compile(r"add|append|appendleft|clear|discard|extend|insert|pop|popleft|popitem|remove|setdefault|update")
"""Methods by which a list, dict, set or deque changes."""


@dataclass(frozen=True)
class Source:
    """One file of the package.

    name: its path inside the package, "train/oom.py".  lines: how many it has.
    code: those that are neither empty, nor a comment, nor of a string that stands alone, such as a docstring.
    """

    name: str
    tree: ast.Module
    lines: int = 0
    code: int = 0

    @classmethod
    def read(cls, path: Path) -> Source:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, str(path))
        return cls(path.relative_to(PACKAGE).as_posix(), tree, len(text.splitlines()), _lines_of_code(text, tree))

    @property
    def module(self) -> str:
        parts = ["nbaccel", *self.name.removesuffix(".py").split("/")]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def folder(self) -> str:
        """The folder inside the package; empty for its own files, but for the errors, which are of the base."""
        return "base" if self.name == "errors.py" else self.name.rpartition("/")[0]

    @property
    def stem(self) -> str:
        return Path(self.name).stem

    def arrows(self) -> Iterator[tuple[int, str]]:
        """Line and module for every module of ours that this file imports or names.

        Where a name that is not there is looked up (`missing_from`) is no import: nothing of the module needs it.
        """
        lookups = {id(each) for node in ast.walk(self.tree) if _looks_up(node) for each in ast.walk(node)}
        read_only = {id(each) for node in ast.walk(self.tree) if _is_for_editors(node) for each in node.body}
        for node in ast.walk(self.tree):
            if id(node) in lookups:
                continue
            if id(node) in read_only and isinstance(node, ast.ImportFrom) and (node.module or "").startswith(FEATURES):
                continue  # what a documented method of a feature returns: nothing is imported when it runs
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "nbaccel")
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                if base.split(".")[0] == "nbaccel":
                    yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and A_MODULE.fullmatch(node.value):
                yield node.lineno, node.value.partition(":")[0]

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        here = self.module.split(".")
        package = here if self.name.endswith("__init__.py") else here[:-1]
        return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])

    def classes(self) -> Iterator[ast.ClassDef]:
        """The classes that the module itself defines."""
        return (node for node in self.tree.body if isinstance(node, ast.ClassDef))


def _lines_of_code(text: str, tree: ast.AST) -> int:
    """Return the number of lines that are neither empty nor a comment, nor of a docstring."""
    said: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            said.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(number not in said and line.strip()[:1] not in ("", "#") for number, line in lines)


def _is_for_editors(node: ast.AST) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _looks_up(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "missing_from"


class Layout:
    """The files of the package and who imports whom."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self.sources = {source.name: source for source in sources}
        self.imports: dict[str, set[str]] = {name: set() for name in self.sources}
        by_module = {source.module: source.name for source in self.sources.values()}
        for source in self.sources.values():
            for _, target in source.arrows():
                while target and target not in by_module:
                    target = target.rpartition(".")[0]
                if target and by_module[target] != source.name:
                    self.imports[source.name].add(by_module[target])

    @classmethod
    def of_the_package(cls) -> Layout:
        return cls(Source.read(path) for path in sorted(PACKAGE.rglob("*.py")))

    @property
    def files(self) -> list[Source]:
        """All but `__init__.py`."""
        return [source for source in self.sources.values() if source.stem != "__init__"]

    @functools.cached_property
    def importers(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = defaultdict(set)
        for name, targets in self.imports.items():
            for target in targets:
                found[target].add(name)
        return found

    def place(self, name: str, depth: int | None = None) -> str:
        """The folder of a file, or its first `depth` levels.

        The package's own files are its ground and its public top: a file of the ground imports no folder, also not by
        way of other files of the package's own.
        """
        folder = self.sources[name].folder or (
            "cli" if name == "__main__.py" else ""
        )  # the command `python -m nbaccel`
        if folder:
            return folder if depth is None else "/".join(folder.split("/")[:depth])
        return "(public)" if name in self._public else "(ground)"

    @functools.cached_property
    def _public(self) -> set[str]:
        own = {name for name, source in self.sources.items() if not source.folder}
        public = {name for name in own if any(self.sources[target].folder for target in self.imports[name])}
        public |= own & {"__init__.py", "__main__.py"}
        while more := {name for name in own - public if self.imports[name] & public}:
            public |= more
        return public

    def between_folders(self, depth: int | None = None) -> dict[str, set[str]]:
        """Which folder imports which others."""
        found: dict[str, set[str]] = defaultdict(set)
        for name, targets in self.imports.items():
            here = self.place(name, depth)
            found[here] |= {there for target in targets if (there := self.place(target, depth)) != here}
        return found

    def inside(self, area: str) -> dict[str, set[str]]:
        """What the parts of a folder, its files and its subfolders, import of each other."""

        def part(name: str) -> str | None:
            rest = name.removeprefix(f"{area}/")
            return None if rest in (name, "__init__.py") else rest.partition("/")[0]

        found: dict[str, set[str]] = {}
        for name, targets in self.imports.items():
            if (here := part(name)) is not None:
                parts = {part(target) for target in targets} - {None, here}
                found.setdefault(here, set()).update(filter(None, parts))
        return found

    def upward(self) -> Iterator[tuple[str, str]]:
        """Each folder and each file of an enclosing folder that it imports."""
        pairs = set()
        for name, targets in self.imports.items():
            here = self.sources[name].folder
            for target in targets:
                above = self.sources[target].folder
                if above and here.startswith(f"{above}/") and target != TABLE:
                    pairs.add((here, target))
        return iter(sorted(pairs))


def rings(graph: Graph) -> list[set[str]]:
    """Return the sets of nodes that reach each other, of two or more (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            ring = set(stack[stack.index(node) :])
            del stack[stack.index(node) :]
            if len(ring) > 1:
                found.append(ring)

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 10 * len(graph) + 1000))
    try:
        for node in sorted(graph):
            if node not in index:
                visit(node)
    finally:
        sys.setrecursionlimit(limit)
    return found


def layers(graph: Graph) -> int:
    """Return the length of the longest chain of imports, a ring counting as one."""
    ring_of = {node: min(ring) for ring in rings(graph) for node in ring}
    above: dict[str, set[str]] = defaultdict(set)
    for node, others in graph.items():
        here = ring_of.get(node, node)
        above[here] |= {ring_of.get(other, other) for other in others} - {here}

    @functools.cache
    def depth(node: str) -> int:
        return 1 + max(map(depth, above.get(node, ())), default=0)

    return max(map(depth, list(above)), default=0)


# -- rules: each gives its offenders, a line each; one that ends in a number counts for that many

Rule = Callable[[Layout], Iterator[str]]


def folders_in_a_ring(layout: Layout) -> Iterator[str]:
    """A folder is a layer: imports between folders have no cycle, on two levels and on all."""
    found = {
        (here, there)
        for graph in (layout.between_folders(2), layout.between_folders())
        for ring in rings(graph)
        for here in ring
        for there in graph[here] & ring
    }
    yield from (f"{here} -> {there}" for here, there in found)


def files_in_a_ring(layout: Layout) -> Iterator[str]:
    """Imports between files have no cycle."""
    for ring in rings(layout.imports):
        yield " <-> ".join(sorted(ring))


def files_imported_from_below(layout: Layout) -> Iterator[str]:
    """A folder's own files stand above its subfolders: none of these imports them."""
    yield from (f"{folder} -> {target}" for folder, target in layout.upward())


def importers_of_the_workers_code(layout: Layout) -> Iterator[str]:
    """What runs inside of ranks is imported there, and by what starts them."""
    for name, targets in layout.imports.items():
        source = layout.sources[name]
        if source.name.startswith(("launching/rank/", "features/")) or source.stem in STARTS_WORKERS:
            continue
        if any(target.startswith("launching/rank/") for target in targets):
            yield name


def kernel_files_that_import_train(layout: Layout) -> Iterator[str]:
    """The kernel's code imports nothing of train but what frees or estimates memory, what a string names, and help."""
    for name, targets in layout.imports.items():
        if name.startswith(("launching", "notebook/", "options/", "output/", "display/")) and name != SHOWS_HELP:
            for target in sorted(targets):
                may = target.startswith(("train/memory/", "train/oom/memory/"))
                may |= target in ("train/setup.py", "features/batch_size/estimate.py")
                if target.startswith("train/") and not may:
                    yield f"{name} -> {target}"


def docstrings_that_do_not_say_who_runs_it(layout: Layout) -> Iterator[str]:
    """Every file says which process runs it: kernel, ranks, both, anywhere."""
    for source in layout.sources.values():
        if not _RUNS_IN.search(ast.get_docstring(source.tree) or ""):
            yield source.name


def crowded_folders(layout: Layout) -> Iterator[str]:
    """A folder has 24 files at most, without `__init__`, and without Accelerate's modules, which only name."""
    counts = Counter(source.folder for source in layout.files if source.name not in ACCELERATES_MODULES)
    yield from (f"{folder or '(root)'}" for folder, count in sorted(counts.items()) if count > MOST_FILES)


def stems_used_twice(layout: Layout) -> Iterator[str]:
    """No module has the name of another, but for Accelerate's names, and for what features hook in by."""
    stems: dict[str, list[str]] = defaultdict(list)
    for source in layout.files:
        if (
            source.name not in ACCELERATES_MODULES
            and source.folder not in ("utils", "commands", "test_utils")
            and source.stem not in ("__main__", *SEAMS)
        ):
            stems[source.stem].append(source.name)
    yield from (" = ".join(names) for _, names in sorted(stems.items()) if len(names) > 1)


def class_names_used_twice(layout: Layout) -> Iterator[str]:
    """No public class has the name of another."""
    names: dict[str, list[str]] = defaultdict(list)
    for source in layout.sources.values():
        for node in source.classes():
            if not node.name.startswith("_"):
                names[node.name].append(source.name)
    yield from (f"{name}: {', '.join(places)}" for name, places in sorted(names.items()) if len(places) > 1)


def bases_of_the_accelerator(layout: Layout) -> Iterator[str]:
    """The Accelerator has one base of ours, ProcessControl."""
    yield from (name for name in accelerator_bases(layout) if name != "ProcessControl")


def classes_with_several_bases(layout: Layout) -> Iterator[str]:
    """No class of train has more than one base of ours, besides Protocols."""
    ours = {node.name for source in layout.sources.values() for node in source.classes() if not _is_protocol(node)}
    for source in layout.sources.values():
        if source.name.startswith("train/"):
            for node in source.classes():
                if len([name for name in map(_last_name, node.bases) if name in ours]) > 1:
                    yield f"{source.name}: {node.name}"


def parts_that_hold_the_accelerator(layout: Layout) -> Iterator[str]:
    """No attribute of a class in train is an Accelerator."""
    for source in layout.sources.values():
        if source.name.startswith("train/") and source.name != "train/accelerator.py":
            for node in ast.walk(source.tree):
                annotated = node.annotation if isinstance(node, ast.AnnAssign | ast.arg) else None
                if annotated is not None and re.search(r"\bAccelerator\b", ast.unparse(annotated)):
                    yield f"{source.name}: {ast.unparse(node)}"


def helpers_defined_twice(layout: Layout) -> Iterator[str]:
    """Each of Accelerate's helpers is defined in one module: what `nbaccel.utils` shows."""
    shown = set(_all_of(layout.sources["utils/__init__.py"].tree))
    places: dict[str, list[str]] = defaultdict(list)
    for source in layout.sources.values():
        for node in source.tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in shown:
                places[node.name].append(source.name)
    yield from (f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1)


def state_of_modules(layout: Layout) -> Iterator[str]:
    """No module has a state: no function sets a name of its module, or changes a list, dict or set of it."""
    for source in layout.sources.values():
        held = set(_containers(source.tree))
        found = set()
        for _, function in _functions(source.tree):
            for node in ast.walk(function):
                if isinstance(node, ast.Global):
                    found |= set(node.names)
                elif name := _changed(node):
                    found |= {name} & held
        if source.name not in OF_THE_PROCESS:
            yield from (f"{source.name}: {name}" for name in sorted(found))


def docstrings_that_begin_like_a_question(layout: Layout) -> Iterator[str]:
    """The first line of a docstring says what the thing does: not "What ...", "Whether ...", "How ..."."""
    for source in layout.sources.values():
        nodes = [node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        count = sum(bool(_QUESTION.match(ast.get_docstring(node) or "")) for node in nodes)
        if count:
            yield f"{source.name} {count}"


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        folders_in_a_ring,
        files_in_a_ring,
        files_imported_from_below,
        importers_of_the_workers_code,
        kernel_files_that_import_train,
        docstrings_that_do_not_say_who_runs_it,
        crowded_folders,
        stems_used_twice,
        class_names_used_twice,
        bases_of_the_accelerator,
        classes_with_several_bases,
        parts_that_hold_the_accelerator,
        helpers_defined_twice,
        state_of_modules,
        docstrings_that_begin_like_a_question,
    )
}


def _functions(tree: ast.AST, above: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{above}{node.name}", node
            yield from _functions(node, f"{above}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{above}{node.name}.")
        else:
            yield from _functions(node, above)


def _last_name(node: ast.expr) -> str:
    """`Base` of ``module.Base[int]``."""
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(_last_name(base) == "Protocol" for base in node.bases)


def accelerator_bases(layout: Layout) -> list[str]:
    """Return the classes of ours that the Accelerator inherits from, near or far, by their names."""
    known = {node.name: node for source in layout.sources.values() for node in source.classes()}
    own = {node.name: node for node in layout.sources["train/accelerator.py"].classes()}
    found: list[str] = []
    ahead = [own["Accelerator"]]
    while ahead:
        names = [name for name in map(_last_name, ahead.pop().bases) if name in known and name not in found]
        found += names
        ahead += [known[name] for name in names]
    return sorted(found)


def _all_of(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def _containers(tree: ast.Module) -> Iterator[str]:
    """Names of the module that hold something which can be changed."""
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if value is not None else []
        if isinstance(value, ast.List | ast.Dict | ast.Set | ast.DictComp | ast.ListComp | ast.Call):
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def _changed(node: ast.AST) -> str | None:
    """The name of what a statement or a call changes from within."""
    place: ast.expr | None = None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _CHANGES.fullmatch(node.func.attr):
        place = node.func.value
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        place = node.value
    return place.id if isinstance(place, ast.Name) else None


# -- what is kept


def weight(offenders: Iterable[str]) -> int:
    """Return how much they are: a line that ends in a number counts for that many."""
    return sum(int(last) if (last := line.rpartition(" ")[2]).isdecimal() else 1 for line in offenders)


def read() -> dict[str, list[str]]:
    """Return the offenders that were known, by rule."""
    found: dict[str, list[str]] = {}
    for line in FILE.read_text(encoding="utf-8").splitlines() if FILE.exists() else ():
        if line.startswith("["):
            offenders = found.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            offenders.append(line)
    return found


def write(now: dict[str, list[str]]) -> list[str]:
    """Keep the offenders of `now`; returns the rules that have more than before, whose lines stay as they were."""
    known = read()
    more = [rule for rule, lines in now.items() if rule in known and weight(lines) > weight(known[rule])]
    kept = {rule: known[rule] if rule in more else lines for rule, lines in now.items()}
    sections = [f"[{rule}]\n" + "".join(f"{line}\n" for line in lines) for rule, lines in kept.items()]
    FILE.write_text(
        f"# What breaks the rules of layout.py today. {COMMAND}\n\n" + "\n".join(sections), encoding="utf-8"
    )
    return more


def offenders(layout: Layout) -> dict[str, list[str]]:
    return {name: sorted(rule(layout)) for name, rule in RULES.items()}


def numbers(layout: Layout) -> Iterator[str]:
    """The numbers of the layout, a line each."""
    sources, files = layout.sources.values(), layout.files
    lines, inside = sum(source.lines for source in sources), sum(source.lines for source in files)
    means = f"{lines / len(sources):.0f} / {inside / len(files):.0f}"
    yield f"files / without __init__                    {len(sources)} / {len(files)}"
    yield f"lines / per file / per file, no __init__    {lines:,} / {means}"
    code = {source.module: source.code for source in sources}
    inside_features = sum(count for name, count in code.items() if name.startswith(FEATURES))
    yield f"lines of code: all / core / features        {_three(code, inside_features)}"
    short = [sum(source.lines < most for source in sources) for most in (60, 101)]
    yield f"files < 60 / <= 100 lines                   {short[0]} / {short[1]}"
    lone = sum(len(layout.importers.get(source.name, ())) == 1 for source in files)
    yield f"modules with one importer                   {lone}"
    folders, ringed = rings(layout.between_folders()), rings(layout.imports)
    sizes = f" ({', '.join(str(len(ring)) for ring in folders)} folders)" if folders else ""
    yield f"import cycles of folders / of files         {len(folders)}{sizes} / {len(ringed)}"
    upward = Counter(target.partition("/")[0] for _, target in layout.upward())
    for area in ("train", "launching", "notebook"):
        graph = layout.inside(area)
        between = sum(map(len, graph.values()))
        yield (
            f"{area + ': parts, layers, imports, upward':<43} {len(graph)}, {layers(graph)}, {between}, {upward[area]}"
        )
    twice = [len(list(rule(layout))) for rule in (stems_used_twice, class_names_used_twice)]
    yield f"stems / class names used twice              {twice[0]} / {twice[1]}"
    yield f"bases of the Accelerator that are ours      {len(accelerator_bases(layout))}"
    memory = [source for source in sources if OUT_OF_MEMORY.fullmatch(source.name)]
    yield f"files of out of memory / their folders      {len(memory)} / {len({source.folder for source in memory})}"
    longest = sorted(files, key=lambda source: -source.lines)[:6]
    yield f"longest files                               {', '.join(f'{each.lines} {each.name}' for each in longest)}"


def _three(code: Mapping[str, int], inside_features: int) -> str:
    total = sum(code.values())
    return f"{total:,} / {total - inside_features:,} / {inside_features:,}"


_TRAINS = """
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(4, 2)).mean())
optimizer.step()
"""

_PROGRAMS = {
    "a script's prepared step": f"""
import torch, nbaccel
accelerator = nbaccel.Accelerator(cpu=True)
{_TRAINS}
""",
    "the kernel, after a prepared cell": f"""
import torch
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "nbaccel")
shell.user_ns["torch"] = torch
shell.run_cell_magic("accelerate", "-n 2 --cpu --plain", {_TRAINS!r})
""",
}
"""Programs whose modules are counted."""


def loaded(layout: Layout) -> Iterator[str]:
    """The modules of ours that a program loads, and their lines of code; each program is run."""
    code = {source.module: source.code for source in layout.sources.values()}
    tells = "\nimport sys\nprint('loaded', *(name for name in sys.modules if name.split('.')[0] == 'nbaccel'))"
    for what, program in _PROGRAMS.items():
        line = [sys.executable, "-c", program + tells]
        done = subprocess.run(line, cwd=PACKAGE.parent, capture_output=True, text=True, check=True, timeout=120)
        names = next(row for row in done.stdout.splitlines() if row.startswith("loaded ")).split()[1:]
        yield f"{what + ':':<43} {len(names)} modules, {sum(code.get(name, 0) for name in names):,} lines of code"


def main() -> int:
    parser = argparse.ArgumentParser(prog="layout", description="The layout of the package.")
    parser.add_argument("--write", action="store_true", help=f"keep the offenders of today in {FILE.name}")
    is_writing = parser.parse_args().write
    layout = Layout.of_the_package()
    now = offenders(layout)
    if is_writing:
        known = read()
        for rule in (more := write(now)):
            new = sorted(set(now[rule]) - set(known[rule]))
            print(f"{rule}: {weight(now[rule])}, more than the {weight(known[rule])} before:", *new, sep="\n  ")
        return 1 if more else 0
    print("\n".join([*numbers(layout), *loaded(layout)]))
    for rule, lines in now.items():
        print(f"\n{rule}: {weight(lines)}\n  {(RULES[rule].__doc__ or '').strip()}", *lines, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
