"""What the notebook's packages have put into torch is there in ranks of the zygote, which read none of their names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nbaccel.features.clean_start.patches import PatchFinder

PACKAGES = {
    "of_a_class": "import torch\ntorch.nn.Identity.forward = lambda self, x: x + 41\n",
    "of_a_module": (
        "import torch\nown = torch.typename\n"
        "def typename(value): return 'seen ' + own(value)\n"
        "torch.typename = typename\n"
    ),
    "of_a_module_by_a_call": "import torch\ndef change():\n    torch.seed = lambda: 7\n",
    "before_torch": "",
    "adds_a_name": "import torch\ntorch.nn.Module.smart = lambda self: 1\n",
}

NOTEBOOK = """
import os, sys
sys.path.insert(0, {folder!r})
import adds_a_name, before_torch, of_a_class, of_a_module, of_a_module_by_a_call, torch
from nbaccel import launch

of_a_module_by_a_call.change()
torch.manual_seed = lambda seed: None

def seen():
    names = ("of_a_class", "of_a_module", "before_torch", "adds_a_name")
    begun_with = [name for name in names if name in sys.modules]
    text = torch.typename(1)
    return [torch.nn.Identity()(1), begun_with, text, torch.typename(1), "of_a_module" in sys.modules]

if __name__ == "__main__":
    for start in ("fork", "zygote"):
        print(launch(seen, 1, cpu=True, start_method=start).value, flush=True)
"""


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_patches_of_torch_are_made_again_in_a_clean_process(tmp_path: Path) -> None:
    """At once what lies in a class, at its first call what is a function of a module; nothing else is imported."""
    for name, text in PACKAGES.items():
        (tmp_path / f"{name}.py").write_text(text)
    program = tmp_path / "notebook.py"
    program.write_text(NOTEBOOK.format(folder=str(tmp_path)))
    ran = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=110)
    fork, zygote = (line for line in ran.stdout.splitlines() if line.startswith("["))
    assert fork == "[42, ['of_a_class', 'of_a_module', 'before_torch', 'adds_a_name'], 'seen int', 'seen int', True]", (
        ran.stderr
    )
    assert zygote == "[42, ['of_a_class'], 'seen int', 'seen int', True]", ran.stderr
    sentence = "torch.manual_seed: changed in the notebook by a cell, and torch's own in ranks"
    assert ran.stderr.count("changed in the notebook") == 1
    assert sentence in ran.stderr


def test_a_change_is_found_where_nothing_had_changed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    finder = PatchFinder()
    before = set(finder.find().found)
    assert set(finder.find().found) == before
    monkeypatch.setattr(torch.nn.Identity, "forward", pytest.importorskip)
    (new,) = set(finder.find().found) - before
    assert (new.package, str(new), new.is_function) == ("_pytest", "torch.nn.modules.linear.Identity.forward", False)
    monkeypatch.undo()
    assert set(finder.find().found) == before
