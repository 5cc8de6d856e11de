"""What `import nbaccel` shows, and what it costs."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from importlib.metadata import version

import pytest

import nbaccel
import public_surface

HEAVY = ("IPython", "torch", "matplotlib", "ipywidgets", "numpy", "psutil", "pynvml")

BUDGET_S = 0.020
"""Over bare Python (5 ms wanted, 20 promised); the tests guard against five times as much, for busy machines."""


def fresh_python(code: str) -> str:
    """What `code` prints in a new interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, timeout=60
    ).stdout.strip()


@pytest.mark.parametrize("statement", ["import nbaccel", "import nbaccel; dir(nbaccel)"])
def test_importing_loads_nothing_heavy(statement: str) -> None:
    loaded = json.loads(fresh_python(f"{statement}; import sys, json; print(json.dumps(list(sys.modules)))"))
    assert "nbaccel" in loaded
    assert not {name.partition(".")[0] for name in loaded} & set(HEAVY)


@pytest.mark.timed
def test_importing_costs_next_to_nothing() -> None:
    code = "import time; s = time.perf_counter(); import nbaccel; print(time.perf_counter() - s)"
    assert min(float(fresh_python(code)) for _ in range(3)) < 5 * BUDGET_S


FIRST_STEP = """
import json, sys, torch

def step(prepare, backward):
    model = torch.nn.Linear(4, 1)
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    backward(model(torch.ones(1, 4)).sum())
    optimizer.step()

step(lambda *things: things, torch.Tensor.backward)
raw = set(sys.modules)
from nbaccel import Accelerator
accelerator = Accelerator(cpu=True)
step(accelerator.prepare, accelerator.backward)
print(json.dumps([name for name in sys.modules if name not in raw]))
"""


@pytest.mark.slow
def test_a_first_step_alone_loads_what_it_needs() -> None:
    loaded = json.loads(fresh_python(FIRST_STEP))
    assert "nbaccel.train.accelerator" in loaded
    # `resource` is of the standard library; loaded when memory has run out, it might not load any more.
    assert {name.partition(".")[0] for name in loaded} == {"nbaccel", "resource"}
    elsewhere = ("cli", "display", "launch", "notebook", "output", "testing", "features.")
    assert not [name for name in loaded if name.startswith(tuple(f"nbaccel.{room}" for room in elsewhere))]
    later = ("strategies.replicated", "checkpoint.saving", "checkpoint.loading", "checkpoint.content")
    assert not {f"nbaccel.train.{each}" for each in later} & {*loaded}


def test_all_is_what_is_visible() -> None:
    assert nbaccel.__all__ == sorted(nbaccel.__all__)
    others = {"map", "runs", "__version__", "last_run", "load_ipython_extension", "unload_ipython_extension"}
    assert set(dir(nbaccel)) == {*nbaccel.__all__, *others}


def test_there_is_no_last_run_before_the_first_and_asking_loads_nothing() -> None:
    code = "import sys, nbaccel; print(nbaccel.last_run, 'nbaccel.launching' in sys.modules)"
    assert fresh_python(code) == "None False"


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(inspect.getsource(nbaccel))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom) and node.module.startswith("nbaccel.")]
    seen = {alias.asname: node.module for node in imports for alias in node.names}
    assert seen == nbaccel._HOME


def test_every_public_name_loads_and_says_what_it_is() -> None:
    values = {name: getattr(nbaccel, name) for name in nbaccel.__all__}
    assert not [name for name, value in values.items() if not inspect.getdoc(value)], "these have no docstring"
    assert not [name for name, value in values.items() if not callable(value)], "these cannot be called"


@pytest.mark.parametrize("kind", [nbaccel.Accelerator, nbaccel.AcceleratorState], ids=lambda kind: kind.__name__)
def test_notebooks_and_editors_show_the_arguments_of_a_class(kind: type) -> None:
    """They ask `inspect.signature`, which looks at `__new__` first."""
    of_init = list(inspect.signature(kind.__init__).parameters.values())[1:]
    assert list(inspect.signature(kind).parameters.values()) == of_init
    assert "mixed_precision" in inspect.signature(kind).parameters


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'nbaccel' has no attribute 'Acelerator'"):
        nbaccel.Acelerator  # noqa: B018


def test_launch_is_the_function_whatever_is_imported_before() -> None:
    code = "import nbaccel.launching.launcher, nbaccel, types; print(type(nbaccel.launch) is types.FunctionType)"
    assert fresh_python(code) == "True"


def test_version_is_that_of_the_distribution() -> None:
    assert nbaccel.__version__ == version("nbaccel")


def test_a_program_that_calls_it_accelerate_compares_the_version_of_its_interface() -> None:
    """As the examples of diffusers do, in their `main`."""
    program = "import nbaccel as accelerate\ndef main(): return accelerate.__version__\ninside = main()"
    names: dict[str, str] = {}
    exec(program, names)
    assert names["inside"] == "1.15.0"
    accelerates = version("accelerate")
    assert accelerates.startswith("1.15."), "the interface is that of another version now: _INTERFACE"
    exec("import nbaccel; own = nbaccel.__version__", names := {})
    assert names["own"] == version("nbaccel")


def test_asking_for_a_name_twice_does_not_look_it_up_twice() -> None:
    assert nbaccel.World is nbaccel.World
    assert vars(nbaccel)["World"] is nbaccel.World


def test_no_public_name_or_signature_changes() -> None:
    """Programs use them, whatever module defines them; a line of the file is edited by hand, if nobody can use it."""
    now, frozen = public_surface.surface(), public_surface.read()
    gone = [f"{path} {what}" for path, what in frozen.items() if path not in now]
    assert not gone, "public names that are gone:\n" + "\n".join(gone)
    changed = [f"{path} {what}\n  is now {now[path]}" for path, what in frozen.items() if now[path] != what]
    assert not changed, "public names that are something else:\n" + "\n".join(changed)
    new = [f"{path} {what}" for path, what in now.items() if path not in frozen]
    assert not new, f"new public names; add them: {public_surface.COMMAND}\n" + "\n".join(new)


def test_a_signature_is_described_without_its_annotations_and_addresses() -> None:
    def function(first: int, /, *rest: str, key: object = object(), kind: type = int, size: int = 3) -> None: ...

    described = public_surface._signature(function)
    assert described == "(first, /, *rest, key=<object>, kind=<object>, size=3)"
