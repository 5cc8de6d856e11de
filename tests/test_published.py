"""What a release quotes is what it is: version, platforms, license; and an address, once there is one."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

import nbaccel
from documents import ADDRESS, README
from environments import REPOSITORY
from published import _PLACES, main, publish

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CITATION = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
SOMEWHERE = "https://example.org/somebody/nbaccel"

if_unpublished = pytest.mark.skipif(ADDRESS is not None, reason="the address has been written already")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files of the repository that may name its address."""
    pages = (page.relative_to(REPOSITORY) for page in REPOSITORY.glob("docs/*.md"))
    for name in (*_PLACES, "README.md", *pages):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    return tmp_path


@if_unpublished
def test_one_variable_fills_all_that_names_the_address(tree: Path) -> None:
    changed = publish(tree, SOMEWHERE)
    assert {*_PLACES, "README.md", "docs/install.md", "docs/kaggle.md"} <= {*changed}
    project = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["urls"] == {"Repository": SOMEWHERE}
    assert project["optional-dependencies"] == PROJECT["optional-dependencies"]
    assert yaml.safe_load((tree / "CITATION.cff").read_text(encoding="utf-8"))["repository-code"] == SOMEWHERE
    names: dict[str, object] = {"__file__": str(REPOSITORY / "tests" / "documents.py"), "__name__": "documents_there"}
    source = (tree / "tests" / "documents.py").read_text(encoding="utf-8")
    exec(re.search(r"^ADDRESS: .*$", source, re.M)[0], names)
    assert names["ADDRESS"] == SOMEWHERE
    for page in (tree / "README.md", tree / "docs" / "install.md", tree / "docs" / "kaggle.md"):
        text = page.read_text(encoding="utf-8")
        assert f'pip install "git+{SOMEWHERE}"' in text or f'pip install -q "git+{SOMEWHERE}"' in text
        assert not re.search(r"(?<!ip route get )\bADDRESS\b", text), f"{page.name} still says ADDRESS"


@if_unpublished
def test_an_address_is_written_once_and_nothing_else_is_taken_for_one(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=r"https://host/owner/name, without more; got 'git@example.org:nbaccel'"):
        publish(tree, "git@example.org:nbaccel")
    publish(tree, SOMEWHERE)
    with pytest.raises(ValueError, match=r"have an address already, .*: pyproject.toml, CITATION.cff"):
        publish(tree, SOMEWHERE)
    assert main(["nowhere"]) == 2
    assert "make address ADDRESS=https://host/owner/nbaccel: an address is" in capsys.readouterr().err


def test_the_citation_names_the_version_the_license_and_the_subject_of_the_package() -> None:
    assert CITATION["cff-version"] == "1.2.0"
    assert {"title", "message", "authors"} <= CITATION.keys()
    assert str(CITATION["version"]) == nbaccel.__version__
    assert CITATION["license"] == PROJECT["license"]
    assert CITATION["abstract"].rstrip(".") == PROJECT["description"]
    assert CITATION["keywords"] == PROJECT["keywords"]
    assert CITATION.get("repository-code") == ADDRESS


def test_pages_that_quote_a_wheel_quote_the_version() -> None:
    pages = (README, *REPOSITORY.glob("docs/*.md"))
    quoted = {version for page in pages for version in re.findall(r"nbaccel-(\d[\w.]*?)-py3", page.read_text())}
    assert quoted == {nbaccel.__version__}


def test_badges_say_what_the_project_says_and_load_nothing() -> None:
    pythons = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", name)]
    torch = next(package for package in PROJECT["dependencies"] if package.startswith("torch>="))
    expected = [
        f"nbaccel {nbaccel.__version__}",
        f"Python {pythons[0]} to {pythons[-1]}",
        f"torch {torch.removeprefix('torch>=')} or newer",
        f"license {PROJECT['license']}",
    ]
    badges = re.findall(r"!\[([^\]]*)\]\((docs/badges/\w+\.svg)\)", README.read_text())
    assert [text for text, _ in badges] == expected
    assert sorted(path for _, path in badges) == sorted(
        str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob("docs/badges/*")
    )
    for text, path in badges:
        picture = (REPOSITORY / path).read_text()
        assert f"<title>{text}</title>" in picture
        assert " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", picture)) == text
        assert re.findall(r"\w+://[^\"]*", picture) == ["http://www.w3.org/2000/svg"]
        assert "href" not in picture


def test_whoever_reports_a_problem_is_asked_for_the_doctor() -> None:
    form = (REPOSITORY / ".github" / "ISSUE_TEMPLATE" / "problem.md").read_text()
    assert yaml.safe_load(form.split("---")[1]).keys() == {"name", "about"}
    assert "`nbaccel doctor`" in form
    assert "`%accelerate doctor`" in form
    assert "`%accelerate why`" in form
