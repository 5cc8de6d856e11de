"""The source of a function in real kernels: the same in the notebook and in its ranks, however they start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kernel.harness import RealKernel, accelerate

DEFINES = """
LIMIT = {limit}

def clean(text):
    return text[:LIMIT]

def answer(texts):  # a comment
    return [clean(text) for text in texts]
"""
IN_RANKS = "answers = accelerator.map({function}, ['one', 'three', 'four'] * 9, out={out!r})"
HERE = "import nbaccel\nnbaccel.map({function}, ['one', 'three', 'four'] * 9, out={out!r}, cpu=True);"


def marks(out: Path) -> dict[str, str]:
    """The marks of the function in the manifest."""
    found: dict[str, str] = json.loads(out.with_name(f"{out.name}.manifest.json").read_text())["function"]
    return found


def test_ranks_and_the_notebook_find_the_same_source(kernel: RealKernel, start: str, tmp_path: Path) -> None:
    call: dict[str, Any] = {"function": "answer", "out": str(tmp_path / "a.jsonl")}
    kernel.do(DEFINES.format(limit=2))
    kernel.do(accelerate(IN_RANKS.format(**call), start))
    assert marks(tmp_path / "a.jsonl")["LIMIT"] == "= 2"
    assert all(marks(tmp_path / "a.jsonl")[name].startswith("code ") for name in ("", "clean"))
    assert "are in" in kernel.do(HERE.format(**call)).stdout
    kernel.do(DEFINES.format(limit=3))
    for code in (accelerate(IN_RANKS.format(**call), start), HERE.format(**call)):
        error = kernel.run(code).failed("CannotContinue")
        assert "a.jsonl has answers of other code: LIMIT was 2 then, and is 3 now" in error.text


def test_a_function_of_the_cell_itself_has_its_text(kernel: RealKernel, start: str, tmp_path: Path) -> None:
    call = IN_RANKS.format(function="lambda texts: [text * 2 for text in texts]", out=str(tmp_path / "a.jsonl"))
    kernel.do(accelerate(f"!true\n{call}", start))
    kernel.do(HERE.format(function="lambda texts: [text*2 for text in texts]", out=str(tmp_path / "b.jsonl")))
    assert marks(tmp_path / "a.jsonl") == marks(tmp_path / "b.jsonl")
    assert marks(tmp_path / "a.jsonl")[""].startswith("code ")


def test_ranks_that_stay_find_the_source_of_a_later_cell(kernel: RealKernel, start: str, tmp_path: Path) -> None:
    out = str(tmp_path / "a.jsonl")
    kernel.do(f"%accelerate start -n 2 --cpu --start {start}")
    try:
        # Names of files of cells are made of their texts: this one has never run.
        kernel.do(DEFINES.format(limit=2) + f"# {tmp_path}, {start}\n")
        kernel.do(f"%%accelerate\n{IN_RANKS.format(function='answer', out=out)}")
        assert marks(tmp_path / "a.jsonl")[""].startswith("code ")
        kernel.do(f"def second(texts):\n    return texts  # {tmp_path}, {start}\n")
        kernel.do("%accelerate push second")
        out_2 = str(tmp_path / "b.jsonl")
        kernel.do(f"%%accelerate\n{IN_RANKS.format(function='second', out=out_2)}")
        assert marks(tmp_path / "b.jsonl")[""].startswith("code ")
    finally:
        kernel.do("%accelerate stop")
    assert "are in" in kernel.do(HERE.format(function="answer", out=out)).stdout
