"""The pages that people read are true: links lead somewhere, commands exist, numbers are measured.

Cells are executed by tests/kernel/test_documents.py, the lines that install by tests/test_installation.py.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import nbformat
import pytest

import nbaccel
from documents import ADDRESS, PAGES, README, anchors, below, blocks, links
from environments import REPOSITORY
from nbaccel.cli import main
from nbaccel.options.flags import flags_parser

NAMES = {str(page.relative_to(REPOSITORY)) for page in PAGES}
MAKEFILE = (REPOSITORY / "Makefile").read_text()
PACKAGE = sorted((REPOSITORY / "nbaccel").rglob("*.py"))

DESIGN = REPOSITORY / "docs" / "design"
"""Pages for the people who work on it, which name issues and documents of other projects."""

DOCS = REPOSITORY / "docs"

NO_GUIDES = {"benchmarks", "flags", "index", "limits", "troubleshooting"}
"""Pages of docs/ that say what there is, and not what to do."""

SECTIONS = [
    "Install",
    "The cell",
    "When two ranks win",
    "What it costs",
    "Kaggle with 2 x T4",
    "With a library",
    "Coming from Accelerate",
    "When things go wrong",
    "When not to use it",
    "Help, and develop",
]


def test_the_readme_is_short_and_in_the_order_in_which_a_stranger_asks() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    assert re.findall(r"^## (.*)$", text, re.M) == SECTIONS
    assert f"nbaccel-{nbaccel.__version__}-py3-none-any.whl" in text
    assert text.index("pip install .") < text.index("![The panel") < text.index("%%accelerate -n 2\nfor")


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, ahead = set(), [README]
    while ahead:
        page = ahead.pop()
        reached.add(page)
        targets = [(page.parent / link.partition("#")[0]).resolve() for link in links(page)]
        ahead += [target for target in targets if target.suffix == ".md" and target not in reached]
    assert {str(page.relative_to(REPOSITORY)) for page in reached} == NAMES


def test_every_link_leads_to_a_file_of_the_repository_and_to_a_heading_of_it() -> None:
    wrong = [
        f"{page.relative_to(REPOSITORY)}: {link} {complaint}"
        for page in PAGES
        for link in links(page)
        if (complaint := _complaint_about(link, page))
    ]
    assert not wrong, "\n".join(wrong)


def _complaint_about(link: str, page: Path) -> str | None:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if re.match(r"\w+:", link):
        is_a_source = page.parent == DESIGN and re.match(r"https?://[\w.-]+\.\w+/\S+$", link)
        return None if is_a_source else "lies elsewhere, which cannot be checked here"
    if not target.is_file() or not target.is_relative_to(REPOSITORY):
        return "is no file of the repository"
    return f"has no heading {anchor}" if anchor and anchor not in anchors(target) else None


def test_a_guide_begins_with_what_to_write() -> None:
    """The first block of its code stands in its first fifteen lines."""
    guides = [page for page in DOCS.glob("*.md") if page.stem not in NO_GUIDES]
    first = {page.name: next((block.line for block in blocks(page)), None) for page in guides}
    assert len(guides) >= 30
    assert not {name: line for name, line in first.items() if line is None or line > 15}


def test_terms_that_people_search_for_stand_in_a_heading() -> None:
    headings = "\n".join(
        re.findall(r"^#+ .*$", "\n".join(page.read_text() for page in DOCS.glob("*.md")), re.M)
    ).lower()
    terms = [
        "gradient accumulation",
        "GradScaler",
        "autocast",
        "DistributedSampler",
        "effective batch size",
        "best model",
    ]
    assert not [term for term in [*terms, "wandb", "FSDP", "QLoRA", "out of memory"] if term.lower() not in headings]


def test_the_first_cell_is_that_of_the_readme() -> None:
    """All pages continue a notebook that begins with it."""
    assert blocks(DOCS / "first-cell.md", "python")[0].text == blocks(README, "python")[0].text


def test_lines_that_install_in_a_notebook_are_those_of_the_readme() -> None:
    shown = [block.text for page in DOCS.glob("*.md") for block in blocks(page, "text")]
    installing = {line.strip() for text in shown for line in text.splitlines() if "%pip install" in line}
    assert len(installing) >= 2
    assert not {line for line in installing if line not in README.read_text()}


def test_sentences_that_were_hard_to_read_stay_replaced() -> None:
    sentences = tomllib.loads((REPOSITORY / "tests" / "rewritten_page_sentences.toml").read_text())["sentence"]
    pages = {str(page.relative_to(REPOSITORY)): " ".join(page.read_text().split()) for page in PAGES}
    wrong = [f"{page} has again: {each['old']}" for each in sentences for page in pages if each["old"] in pages[page]]
    wrong += [f"{each['file']} lacks: {each['new']}" for each in sentences if each["new"] not in pages[each["file"]]]
    assert len(sentences) >= 80
    assert not wrong, "see tests/rewritten_page_sentences.toml\n" + "\n".join(wrong)


def test_ten_questions_have_a_page_a_heading_and_a_name_in_the_code() -> None:
    """That files and headings exist, the test of links finds out."""
    text = (DESIGN / "README.md").read_text()
    tables = text.split("## Ten questions")[1].split("\nAnd six more:")
    row = re.compile(r"^\| .* \| \[.*?\]\((\S+#\S+)\) \| \[.*?\]\((\S+\.py)\) \| `(\w+)` \|$", re.M)
    assert [len(row.findall(table)) for table in tables] == [10, 6]
    for heading, file, name in row.findall(text):
        source = (DESIGN / file).resolve()
        assert re.search(rf"^ *(class|def) {name}\b", source.read_text(), re.M), f"{file} has no {name}"
        answer = below(DESIGN, heading)
        module = str(source.relative_to(REPOSITORY / "nbaccel").with_suffix(""))
        assert name in answer or f"`{module}`" in answer, f"{heading} names neither {name} nor {module}"


def test_modules_that_pages_of_the_design_name_exist_with_the_names_beside_them() -> None:
    wrong = []
    for page in DESIGN.glob("*.md"):
        for module, name in re.findall(r"`([a-z_]+(?:/[a-z_]+)+)`(?::\s+`[\w.]*?(\w+)`)?", page.read_text()):
            if (REPOSITORY / "nbaccel" / module).is_dir() or (REPOSITORY / module).is_dir():
                continue
            found = [path for path in PACKAGE if path.match(f"{module}.py")]  # the end of its path, if that is enough
            if len(found) != 1 or not re.search(rf"\b(class|def) {name}", found[0].read_text()):
                wrong.append(f"{page.name}: {module} {name}")
    assert not wrong


def test_every_page_of_the_design_is_named_by_a_module_and_every_named_one_is_there() -> None:
    sources = [path.read_text() for path in (REPOSITORY / "nbaccel").rglob("*.py")]
    named = {name for source in sources for name in re.findall(r"^.*Reasons: docs/design/(\S+)$", source, re.M)}
    assert named == {page.name for page in DESIGN.glob("*.md")} - {"README.md", "paths.md", "tests.md"}


def test_no_address_is_made_up() -> None:
    """Of a repository, an index or a documentation that is not there; where there is one, it is the same everywhere."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert set(project.get("urls", {}).values()) <= {ADDRESS}
    assert bool(project.get("urls")) is (ADDRESS is not None)
    for page in PAGES:
        named = set(re.findall(r"\b(?:https?|git|ssh)://[^\s)\"'`]*nbaccel[^\s)\"'`]*", page.read_text()))
        assert {address for address in named if ADDRESS is None or not address.startswith(ADDRESS)} == set(), page
        assert ADDRESS is not None or not re.search(r"pip install (-q )?'?nbaccel\b(?!-)", page.read_text()), page


def test_every_command_of_a_terminal_is_one_that_exists() -> None:
    shown = [(page, block, line) for page in PAGES for block in blocks(page, "sh") for line in block.text.splitlines()]
    wrong = [f"{block}: {line!r}" for page, block, line in shown if not _is_a_command(line, page)]
    wrong += [
        f"{page.name}: make {target}"
        for page in PAGES
        for target in re.findall(r"`make ([\w-]+)", page.read_text())
        if not _is_a_target(target)
    ]
    assert not wrong, "not there, or no test knows how to try them:\n" + "\n".join(wrong)


def _is_a_command(line: str, page: Path) -> bool:
    words = shlex.split(line, comments=True)
    match words[:2]:
        case ["make", target]:
            return _is_a_target(target)
        case ["nbaccel", "launch"]:
            return "train.py" in words
        case ["pip", "install"]:
            return line in README.read_text()  # tests/test_installation.py tries those of the README
        case _:
            return False


def _is_a_target(name: str) -> bool:
    return re.search(rf"^{name}:", MAKEFILE, re.M) is not None


# In one write: two ranks without a buffer write to one pipe, and their words would mix.
_SAYS_ITS_RANK = "import os, sys; sys.stdout.write(' '.join(['rank', os.environ['RANK'], *sys.argv[1:]]) + '\\n')"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_lines_that_launch_scripts_run_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (lines,) = [block.text.splitlines() for block in blocks(REPOSITORY / "docs" / "scripts.md", "sh")]
    (tmp_path / "train.py").write_text(_SAYS_ITS_RANK)
    monkeypatch.chdir(tmp_path)
    run, dry = [shlex.split(line) for line in lines]
    done = subprocess.run([_beside_python(run[0]), *run[1:]], capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    assert {"rank 0 --epochs 3", "rank 1 --epochs 3"} <= set(re.findall(r"rank \d --epochs 3", done.stdout))
    assert main(dry[1:]) == 0


def _beside_python(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def test_every_flag_of_a_cell_is_on_a_page_and_every_flag_of_the_table_exists() -> None:
    actions = [action for action in flags_parser()._actions if action.option_strings and action.dest != "help"]
    written = "\n".join(page.read_text() for page in PAGES)
    said = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", written))
    assert not [action.dest for action in actions if not said & {*action.option_strings}]
    cells = (REPOSITORY / "docs" / "cells.md").read_text()
    table = re.findall(r"^\| (`-.*?) \|", cells, re.M)
    named = {flag for row in table for flag in re.findall(r"`(--?[a-z-]+)", row)}
    assert len(table) >= 15
    assert named <= {flag for action in actions for flag in action.option_strings}


def test_the_numbers_of_the_readme_are_those_of_the_stored_benchmark() -> None:
    bench = json.loads((REPOSITORY / "notebooks" / "what_it_costs.json").read_text())
    text = README.read_text()
    table = text[text.index("## What it costs") : text.index("## Kaggle")]
    rows = [
        re.sub(r"\[(.*?)\]\(.*?\)", r"\1", row).strip("| ").split("|")
        for row in re.findall(r"^\| [a-z0-9C].*\|$", table, re.M)
    ]
    shown = [[value.strip() for value in row] + [""] * (5 - len(row)) for row in rows]
    job = _found(bench, "alternatives", _WHOLE_JOB)
    there = {name: _cell(bench, "cell there and back, 2 ranks", name)["wall"] for name in _THERE_AND_BACK}
    step, batch = (_ratios(bench, row) for row in ("step, fp32, accumulation 1", "batch of a loader, 1 process"))
    panel = _cell(bench, "step, fp32, accumulation 1", "nbaccel, reporting")["cpu_ratio"]["median"]
    first = {name: _cell(bench, "first step of a new interpreter", name)["cpu"] for name in ("raw", *_TOOLKITS)}
    over_raw = [f"{first[name] - first['raw']:,.0f}" for name in _TOOLKITS]
    saves = ("nbaccel, in background", "Accelerate, not durable", "Fabric, not durable")
    printed = [_found(bench, "output", f"4,000 lines, {name}") for name in ("nbaccel, fork", *_TOOLKITS[1:])]
    killed = _found(bench, "orphans", "processes left 1 s after the kernel was killed, the most of 3")
    assert shown == [
        [
            "a whole job of 384 short steps in two ranks, s "
            f"(one process: {job['the loop in the kernel, one process']:.1f})",
            f"{job[_ONE_LINE]:.1f} one line, {job[_PREPARED]:.1f} prepared",
            f"**{job[_LAUNCHER]:.1f}**",
            "",
            f"{job['%%writefile and torchrun']:.1f}",
        ],
        [
            "a cell there and back in two ranks",
            f"{there['nbaccel, fork']:.0f} ms; {there['nbaccel, ranks that stay']:.0f} ms in ranks that stay",
            f"{there['Accelerate']:.0f} ms",
            "",
            f"{first['raw'] / 1000:.1f} s",
        ],
        ["CPU time of a step, plain PyTorch is 1", f"{step[0]}; {panel:.2f} with a panel", *step[1:], ""],
        ["CPU time of a batch of a loader, likewise", *batch, ""],
        [
            "first step of a new interpreter, over plain PyTorch's, ms",
            over_raw[0],
            f"**{over_raw[1]}**",
            over_raw[2],
            "",
        ],
        [
            "4,000 printed lines of two ranks: seconds; lines that arrived intact",
            *[f"{_short(found['took'])}; {found['arrived whole']:,}" for found in printed],
            "",
        ],
        [
            "how long a 600 MB checkpoint pauses training, ms",
            *[f"{_cell(bench, 'save of 600 MB', name)['wall']:,.0f}" for name in saves],
            "",
        ],
        [
            "processes left when the kernel is killed",
            *[str(killed[name]) for name in ("nbaccel, fork", *_TOOLKITS[1:])],
            "",
        ],
    ]


def test_the_times_of_whole_jobs_in_the_readme_and_the_page_are_those_of_the_stored_benchmark() -> None:
    bench = json.loads((REPOSITORY / "notebooks" / "what_it_costs.json").read_text())
    job = _found(bench, "alternatives", _WHOLE_JOB)
    text = " ".join(README.read_text().split())
    two, one = job["samples made in Python, %%accelerate -n 2"], job["samples made in Python, the loop in the kernel"]
    assert two < one
    assert f"take **{two:.1f} s in two ranks, {one:.1f} s in one process**" in text
    alone = job["nbaccel's %%accelerate -n 1, one line"] - job["the loop in the kernel, one process"]
    assert f"It costs {alone:.1f} s for a cell" in text
    page = " ".join((DOCS / "benchmarks.md").read_text().split())
    assert not [who for who, value in job.items() if f"| {who} | {value:.1f} s |" not in page]


_TOOLKITS = ("nbaccel", "Accelerate", "Fabric")
_THERE_AND_BACK = ("Accelerate", "nbaccel, fork", "nbaccel, ranks that stay")
_WHOLE_JOB = "from sending the cell until the notebook holds the trained model, median of 5"
_ONE_LINE, _PREPARED = "nbaccel's %%accelerate, one line", "nbaccel's %%accelerate, prepared"
_LAUNCHER = "Accelerate's notebook_launcher"


def _ratios(bench: Any, row: str) -> list[str]:
    return [f"{_cell(bench, row, name)['cpu_ratio']['median']:.2f}" for name in _TOOLKITS]


def _cell(bench: Any, row: str, contender: str) -> Any:
    (found,) = [one for one in bench["rows"] if one["row"] == row]
    (cell,) = [one for one in found["cells"] if one["contender"] == contender]
    return cell


def _found(bench: Any, report: str, what: str) -> dict[str, Any]:
    (one,) = [one for one in bench["reports"] if one["report"] == report]
    return {finding["who"]: finding["value"] for finding in one["findings"] if finding["what"] == what}


def _short(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 1 else f"{seconds:.0f}"


@pytest.mark.parametrize("name", ["troubleshooting", "cluster", "one-line"])
def test_what_somebody_sees_when_things_go_wrong_is_something_that_nbaccel_says(name: str) -> None:
    _, _, page = (REPOSITORY / "docs" / f"{name}.md").read_text().rpartition("| you see |")
    seen = re.findall(r"^\| [^|]*?`([^`]+)`", page, re.M)
    assert len(seen) >= 9
    sources = [*(REPOSITORY / "nbaccel").rglob("*.py"), *(REPOSITORY / "tests").rglob("test_*.py")]
    ours = "\n".join(_strings(path) for path in sources if path != Path(__file__))
    stored = "\n".join(path.read_text() for path in (REPOSITORY / "notebooks").glob("*.ipynb"))
    unsaid = [text for text in seen if text.removesuffix("...") not in ours + stored and text not in _OTHERS]
    assert not unsaid


_OTHERS = {"is not an IPython extension"}
"""What IPython says."""


def _strings(path: Path) -> str:
    """The strings and names of a module; pieces of a string that stand beside each other are one."""
    parts = [
        node.value if isinstance(node, ast.Constant) else node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Constant) and isinstance(node.value, str)) or isinstance(node, ast.ClassDef)
    ]
    return "\n".join(parts)


def test_cells_of_pages_and_of_notebooks_do_not_log_the_loss_again() -> None:
    """`backward` reports it; logged too it would be there twice."""
    cells = [block.text for page in PAGES for block in blocks(page, "python")]
    for path in (REPOSITORY / "notebooks").glob("*.ipynb"):
        cells += [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert not [cell for cell in cells if re.search(r"accelerator\.log\(\{\"loss\": loss", cell)]
