"""The site of the documentation: no page without a way to it, and a reference of everything that is public.

What needs the built site is asked by `make full`, in tests/browser/test_site.py.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

import public_surface
from documents import PAGES, blocks, links
from environments import REPOSITORY
from nbaccel.options.parsing import COMMANDS

INDEX = REPOSITORY / "docs" / "index.md"
ORDER = REPOSITORY / "docs" / "site" / "toc.yml"
REFERENCE = sorted((REPOSITORY / "docs" / "reference").glob("*.rst"))
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))

QUESTIONS = tomllib.loads((REPOSITORY / "tests" / "newcomer_questions.toml").read_text(encoding="utf-8"))["question"]

IN_FULL = ("Notebooks", "How it works")
"""Groups of which docs/index.md names the entrance, and the menu every page."""


def groups_of_the_menu() -> dict[str, list[str]]:
    """Return the pages of each group, as paths without what their names end with, in the order of the menu."""
    order = yaml.safe_load(ORDER.read_text(encoding="utf-8"))
    return {group["caption"]: list(_pages(group["entries"])) for group in order["subtrees"]}


def _pages(entries: list[dict[str, Any]]) -> Iterator[str]:
    for entry in entries:
        if "glob" in entry:
            found = sorted(path.relative_to(REPOSITORY) for path in REPOSITORY.glob(entry["glob"]))
            yield from (str(path.with_suffix("")) for path in found if path.suffix == ".ipynb")
        else:
            yield entry["file"]
        for below in entry.get("subtrees", ()):
            yield from _pages(below["entries"])


def groups_of_the_index() -> dict[str, list[str]]:
    """Return the pages to which docs/index.md links, by the headings above them."""
    titles = re.split(r"^## (.*)$", INDEX.read_text(encoding="utf-8"), flags=re.M)[1:]
    return {
        title: [_page(link) for link in re.findall(r"^- \[[^\]]*\]\(([^)#\s]+)", text, re.M)]
        for title, text in zip(titles[::2], titles[1::2], strict=True)
    }


def _page(link: str) -> str:
    return str((INDEX.parent / link).resolve().relative_to(REPOSITORY).with_suffix(""))


def test_every_page_stands_in_one_group_of_the_menu() -> None:
    named = [page for pages in groups_of_the_menu().values() for page in pages]
    pages = {str(page.relative_to(REPOSITORY).with_suffix("")) for page in (*PAGES, *REFERENCE, *NOTEBOOKS)}
    pages -= {"docs/index"}
    where = f"a page stands in {ORDER.relative_to(REPOSITORY)} and in docs/index.md, in the group that it belongs to"
    assert not pages - {*named}, f"{where}; in none are {sorted(pages - {*named})}"
    assert not {*named} - pages, f"{where}; {sorted({*named} - pages)} are no pages"
    assert len(named) == len({*named}), f"{where}, once: {sorted(named)}"


def test_the_index_has_the_groups_of_the_menu_and_their_pages_in_the_same_order() -> None:
    menu, index = groups_of_the_menu(), groups_of_the_index()
    assert list(index) == list(menu)
    for group, pages in index.items():
        shown = [page for page in menu[group] if page in pages] if group in IN_FULL else menu[group]
        assert pages == shown, f"docs/index.md and docs/site/toc.yml differ in {group!r}"


@pytest.mark.parametrize("group", ["Start", "Guides", "Coming from"])
def test_a_page_that_says_what_to_do_begins_with_it(group: str) -> None:
    """Its first block of code stands in its first 15 lines; the README's comes after what the package is."""
    first = {
        page: [block.line for block in blocks(REPOSITORY / f"{page}.md")][:1] for page in groups_of_the_menu()[group]
    }
    late = [page for page, lines in first.items() if page != "README" and (not lines or lines[0] > 15)]
    assert not late, f"no block of code in the first 15 lines of {late}"


def below(page: str, heading: str) -> str:
    """Return what stands on `page` below `heading` and above the next one of its level, in one line."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    without_blocks = re.sub(r"^```.*?^```", lambda block: re.sub("(?m)^#", " ", block[0]), text, flags=re.M | re.S)
    found = re.search(rf"^(#+) {re.escape(heading)}$", without_blocks, re.M)
    assert found, f"{page} has no heading {heading!r}"
    end = re.search(rf"^#{{1,{len(found[1])}}} ", without_blocks[found.end() :], re.M)
    return " ".join(text[found.end() :][: end and end.start()].split())


def test_ten_questions_of_a_newcomer_have_a_page_and_a_heading_below_which_the_answer_stands() -> None:
    assert len(QUESTIONS) == len({question["asked"] for question in QUESTIONS}) == 10
    for question in QUESTIONS:
        answer = below(question["page"], question["heading"])
        assert question["answer"], question
        assert [words for words in question["answer"] if words not in answer] == [], question


def described() -> list[str]:
    """Return the names that the pages of the reference describe."""
    found = []
    for page in REFERENCE:
        for directive in re.findall(
            r"^\.\. (?:auto\w+|py:data):: (.*(?:\n {5,}\S+)*)", page.read_text(encoding="utf-8"), re.M
        ):
            found += [name.strip() for name in directive.splitlines()]
    return found


def test_every_public_name_is_described_in_the_reference_once() -> None:
    """Members stand below their class: the build says so, in tests/browser/test_site.py."""
    modules = {*public_surface.MODULES}
    public = {
        path
        for path, what in public_surface.read().items()
        if path.rpartition(".")[0] in modules and not what.startswith("= nbaccel.")
    }
    names = described()
    assert not public - {*names}, f"lacking in docs/reference/*.rst: {sorted(public - {*names})}"
    assert not {*names} - public, f"not public: {sorted({*names} - public)}"
    assert len(names) == len({*names})


def test_names_that_are_the_same_object_are_listed_with_what_they_are() -> None:
    text = (REPOSITORY / "docs" / "reference" / "utils.rst").read_text(encoding="utf-8")
    for path, what in public_surface.read().items():
        if not what.startswith("= nbaccel."):
            continue
        module, _, name = path.rpartition(".")
        line = re.search(rf"^``{re.escape(module)}``\n(.*)$", text, re.M)
        assert line, f"docs/reference/utils.rst has no entry for {module}"
        target = what.removeprefix("= ")
        shown = f"`{name} <{target}>`" if target.endswith(f".{name}") else f"``{name}`` (`"
        assert shown in line[1], f"docs/reference/utils.rst lacks {path}, which is {target}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_a_cell_is_described(command: str) -> None:
    text = (REPOSITORY / "docs" / "reference" / "cell.rst").read_text(encoding="utf-8")
    assert re.search(rf"^(\.\. describe::|  +) ?%accelerate {command}\b", text, re.M)


def test_pages_of_the_reference_link_to_pages_that_exist() -> None:
    for page in REFERENCE:
        for target in re.findall(r":doc:`[^`<]*<?(/[\w/-]+)>?`", page.read_text(encoding="utf-8")):
            assert (REPOSITORY / f"{target[1:]}.md").is_file(), f"{page.name}: {target}"
    assert links(INDEX)
