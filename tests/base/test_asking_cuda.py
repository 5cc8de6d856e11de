"""What CUDA says when a process of its own asks it: with the torch that is here, and with programs in its place."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nbaccel.base import asking_cuda
from nbaccel.base.asking_cuda import CudaAnswer, ask_cuda, ask_torch


@pytest.fixture(autouse=True)
def not_asked_yet() -> None:
    asking_cuda._asked.cache_clear()


def test_the_torch_that_is_here_is_asked_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    answer = ask_cuda()
    assert answer.torch_version == torch.__version__
    assert bool(answer.flags) is (torch.version.cuda is not None)
    assert answer.devices or answer.error
    monkeypatch.setattr(asking_cuda, "_answer", lambda *asked: CudaAnswer(error="asked again"))
    assert ask_cuda() is answer
    assert ask_torch().error == "asked again"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert ask_cuda().error == "asked again"


def test_entries_of_the_path_that_python_skips_keep_nobody_from_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere")])
    assert ask_torch().torch_version


def answer_of(program: str, patience_s: float = 30.0) -> CudaAnswer:
    return asking_cuda._answer([sys.executable, "-S", "-c", program], patience_s)


def test_what_libraries_print_meanwhile_is_no_part_of_the_answer() -> None:
    said = {"version": "2.10.0", "flags": ["sm_75"], "devices": [["T4", "aaaa", 16, [7, 5]]], "error": ""}
    answer = answer_of(f"print('a banner'); import sys; sys.stdout.write('\\n' + {json.dumps(said)!r})")
    assert answer == CudaAnswer((("T4", "aaaa", 16, (7, 5)),), "", "2.10.0", ("sm_75",))


def test_a_process_that_dies_of_the_question_is_an_answer() -> None:
    assert answer_of("import os; os._exit(7)").error == "the process that asked it ended with exit code 7"


def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []

    class Noted(subprocess.Popen[str]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    assert answer_of("import time; time.sleep(60)", patience_s=0.2).error == "no answer within 0.2 s"
    assert [process.returncode for process in started] == [-signal.SIGKILL]
