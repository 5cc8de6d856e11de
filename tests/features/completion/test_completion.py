"""What Tab and a question mark answer in a notebook whose kernel has no Accelerator."""

from __future__ import annotations

import subprocess
import sys
from inspect import getattr_static
from types import NoneType
from typing import Any

import IPython
import pytest
from IPython.core.completer import provisionalcompleter

from nbaccel import Accelerator

needs_matchers = pytest.mark.skipif(
    IPython.version_info < (8, 6), reason="before 8.6 IPython adds what jedi finds, whatever a completer says"
)
CELL = "%%accelerate -n 2\n"


def offered(notebook: Any, code: str, *, jedi: bool) -> dict[str, str]:
    """Text and kind of each completion at the end of `code`."""
    notebook.shell.Completer.use_jedi = jedi
    with provisionalcompleter():
        return {each.text: each.type for each in notebook.shell.Completer.completions(code, len(code))}


@needs_matchers
@pytest.mark.parametrize("jedi", [True, False])
def test_the_line_of_a_magic_is_completed_by_what_may_stand_there_and_by_no_python(planned: Any, jedi: bool) -> None:
    flags = offered(planned, "%%accelerate --", jedi=jedi)
    assert {"--num-processes", "--plot"} <= flags.keys()
    assert all(text.startswith("--") and kind == "flag" for text, kind in flags.items()), flags
    assert list(offered(planned, "%%accelerate --ch", jedi=jedi)) == [
        "--check",
        "--checkpoint-dir",
        "--checkpoint-every",
    ]
    assert offered(planned, "# a title\n%%accelerate -p b", jedi=jedi) == {"bf16": "value"}
    commands = offered(planned, "%accelerate ", jedi=jedi)
    assert set(commands.values()) == {"command"}
    assert {"config", "why"} <= commands.keys()
    assert offered(planned, "%accelerate config oo", jedi=jedi) == {"oom=": "setting"}
    assert not offered(planned, "%%accelerate pri", jedi=jedi), "no print"
    assert not offered(planned, "%accelerate doctor ", jedi=jedi)
    assert "print" in offered(planned, f"{CELL}pri", jedi=jedi), "the code below the line is Python"
    with pytest.warns(PendingDeprecationWarning):  # the way of front ends without kinds
        _, classic = planned.shell.complete("", "%%accelerate --ch", len("%%accelerate --ch"))
    assert classic == ["--check", "--checkpoint-dir", "--checkpoint-every"]


@needs_matchers
@pytest.mark.parametrize("jedi", [True, False])
def test_the_accelerator_of_a_cell_is_completed_though_the_kernel_has_none(planned: Any, jedi: bool) -> None:
    public = {  # constants of the class only answer programs that ask for what is not here
        name
        for name in dir(Accelerator)
        if not name.startswith("_") and not isinstance(getattr_static(Accelerator, name), bool | int | NoneType)
    }
    assert offered(planned, f"{CELL}x = accelerator.", jedi=jedi).keys() == public
    assert offered(planned, f"{CELL}model = wrap(accelerator.unw", jedi=jedi) == {"unwrap_model": "function"}
    assert offered(planned, f"{CELL}accelerator.process_i", jedi=jedi) == {"process_index": "property"}
    assert "backward" not in offered(planned, "accelerator.", jedi=jedi), "this cell runs in the kernel"
    assert "backward" not in offered(planned, f"{CELL}my_accelerator.", jedi=jedi)
    assert "accelerator" not in planned.names
    planned.names["accelerator"] = "of the user"
    assert "backward" not in offered(planned, f"{CELL}accelerator.", jedi=jedi)
    assert "Type:        str" in planned.shell.object_inspect_mime("accelerator")["text/plain"]


def test_help_for_the_accelerator_is_that_of_its_class(planned: Any) -> None:
    shown = planned.shell.object_inspect_mime("accelerator.backward")["text/plain"]
    assert "accelerator.backward(loss: " in shown.replace("\n", "")
    assert "scaled for fp16 and divided by the length of the accumulation window" in shown
    assert "Train one model on every process" in planned.run("accelerator?").stdout
    assert planned.run("accelerator.nothing_of_it?").stdout.strip() == "Object `accelerator.nothing_of_it` not found."
    assert "accelerator" not in planned.names


def test_completing_imports_no_torch() -> None:
    program = (
        "import sys\n"
        "from nbaccel.features.completion.offers import public_members\n"
        "assert len(public_members()) > 50\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
