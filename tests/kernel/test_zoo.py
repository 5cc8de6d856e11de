"""Whatever a notebook holds, looking at it ends: each of 120 values travels, or a sentence names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel.foreign_programs import in_one_environment
from kernel.harness import RealKernel, accelerate

ZOO = Path(__file__).with_name("zoo.py").read_text(encoding="utf-8")

STAY_IN_ONE_PROCESS = frozenset(
    {
        *("nditer", "flat", "numbers", "lock", "held_by_attribute", "thread", "thread_local", "event", "open_file"),
        *("socket", "memory_map", "reference", "dead_proxy", "weak_dict", "context_variable", "context", "match"),
        *("with_graph", "iterator_of_loader", "nested", "storage", "cached", "pointer", "c_array", "counter", "cycled"),
        *("zipped", "context_proxy", "structure"),
        *("mock", "magic_mock", "mock_of_a_class", "any_name", "deceiver", "deceiving_module", "unbound", "refuses"),
        *("refuses_silently", "reduces_for_ever", "cannot_be_rebuilt", "by_hand", "chain", "linked", "figure", "axes"),
        *("grouped", "generator", "image", "masked", "quantized", "lazy_layer", "weak_proxy"),
    }
)
"""What may be refused, by this version of a library or that; all else has to arrive."""

DRIVER = """
import contextlib, io, json, time
import nbaccel
from nbaccel.errors import CannotSend, ResultsMissing

names = ["z_" + name for name in ZOO]
told = []

def tell(way, began, arrived, refused, now=time.monotonic):
    told.append([way, now() - began, sorted(arrived), {name: str(why) for name, why in refused.items()}])

def magic(line, cell=None):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        shell = get_ipython()
        if cell is None:
            return shell.run_line_magic("accelerate", line)
        return shell.run_cell_magic("accelerate", line, cell)

def in_one_launch(way, launch):
    "Launch with all names, and again without those that cannot travel."
    refused, began = {}, time.monotonic()
    while True:
        rest = [name for name in names if name not in refused]
        try:
            launch(rest)
            return tell(way, began, rest, refused)
        except (CannotSend, ResultsMissing) as error:
            refused |= error.names
            if isinstance(error, ResultsMissing):  # the others have come
                return tell(way, began, set(rest) - set(refused), refused)

def one_by_one(way, act):
    for name in names:
        began = time.monotonic()
        try:
            act(name)
        except (CannotSend, ResultsMissing) as error:
            tell(way, began, [], {name: error})
        else:
            tell(way, began, [name], {})

def reading(names):
    return "kinds = {}\\n" + "\\n".join(f"kinds[{name!r}] = type({name}).__name__" for name in names)
"""

FORK = """
magic("-n 2 --cpu --start fork --out kinds", reading(names))
tell("read by forked ranks", time.monotonic(), kinds, {})
in_one_launch("--out", lambda names: magic("-n 1 --cpu --start fork --out " + ",".join(names), "pass"))
by_fork = dict(cpu=True, start_method="fork")
one_by_one("the value of launch", lambda name: nbaccel.launch(lambda: globals()[name], 1, **by_fork))
began = time.process_time()  # of these two, which wait for no other process
magic("memory")
tell("%accelerate memory", began, names, {}, time.process_time)
began = time.process_time()
nbaccel.free_memory(history=True)
tell("free_memory", began, names, {}, time.process_time)
magic("start -n 1 --cpu --start fork")
one_by_one("last expression", lambda name: magic("", f"[{name}][0]"))
magic("stop")
"""

ZYGOTE = """
flags = "-n 1 --cpu --start zygote --out kinds"
in_one_launch("read by ranks of the zygote", lambda names: magic(flags, reading(names)))
assert kinds.keys() == set(told[-1][2]), set(told[-1][2]) ^ kinds.keys()
magic("start -n 1 --cpu --start zygote")
in_one_launch("push", lambda names: magic("push " + ",".join(names)))
pushed = names = told[-1][2]
in_one_launch("pull", lambda names: magic("pull " + ",".join(names)))
magic("stop")
"""


@in_one_environment
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_value_travels_or_is_named_and_none_hides_another(kernel: RealKernel, start: str, tmp_path: Path) -> None:
    kernel.do(f"import tempfile, warnings; tempfile.tempdir = {str(tmp_path)!r}; warnings.simplefilter('ignore')")
    kernel.do(ZOO, timeout_s=90)
    print("left out:", kernel.value("ABSENT"))
    kernel.do(DRIVER)
    kernel.do(FORK if start == "fork" else ZYGOTE, timeout_s=300)
    told: list[tuple[str, float, list[str], dict[str, str]]] = kernel.value("told")
    names = {f"z_{name}" for name in kernel.value("list(ZOO)")}
    assert len(names) > 80
    by_way: dict[str, tuple[set[str], dict[str, str]]] = {}
    for way, seconds, arrived, refused in told:
        # One of many names, or one after the other: on a busy machine, with the libraries that a rank has to import.
        limit_s = 5 if len(arrived) + len(refused) == 1 or way in ("free_memory", "%accelerate memory") else 60
        assert seconds < limit_s, (way, arrived, refused, seconds)
        everything = by_way.setdefault(way, (set(), {}))
        everything[0].update(arrived)
        everything[1].update(refused)
    for way, (arrived, refused) in by_way.items():
        expected = names if way != "pull" else by_way["push"][0]
        assert arrived | refused.keys() == expected, (way, expected - arrived - refused.keys())
        wrongly = {name: why for name, why in refused.items() if name[2:] not in STAY_IN_ONE_PROCESS}
        assert not wrongly, (way, wrongly)
        assert all(refused.values()), (way, refused)
    kernel.do("import gc; tempfile.tempdir = None; z_socket.close(); z_open_file.close()\nZOO.clear()")


ENDLESS = """
import itertools, time
class Endless:
    def __reduce__(self):
        print("is packed", flush=True)
        return list, (), None, itertools.count()
class Sleeps:
    def __getstate__(self):
        time.sleep(3600)
endless, sleeps = Endless(), Sleeps()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["endless", "sleeps"])
def test_the_time_limit_ends_the_packing_and_names_the_value(kernel: RealKernel, name: str) -> None:
    kernel.do(ENDLESS)
    cell = kernel.run(accelerate(f"print({name})", "zygote", flags="-t 1"), timeout_s=30)
    error = cell.failed("TimeoutError")
    assert (
        f"the time limit of 1 s was over before a rank had its work: interrupted while {name} was packed" in error.text
    )
    assert cell.seconds < 20


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--bg"])
def test_an_interrupt_ends_the_packing_and_names_the_value(kernel: RealKernel, flags: str) -> None:
    kernel.do(ENDLESS)
    running = kernel.begin(accelerate("print(endless)", "zygote", flags=flags))
    running.until_text("is packed")
    kernel.interrupt()
    cell = running.end(20)
    error = cell.failed("KeyboardInterrupt")
    assert "interrupted while endless was packed for another process" in error.text
    kernel.do(accelerate("x = 1", "zygote", flags="--out x"))
    assert kernel.value("x") == 1


@pytest.mark.slow
def test_the_time_limit_ends_the_packing_for_ranks_that_stay(kernel: RealKernel) -> None:
    kernel.do(ENDLESS + "endless_too = endless")
    kernel.do("%accelerate start -n 1 --cpu --start zygote")
    try:
        error = kernel.run("%%accelerate -t 1\nprint(endless)", timeout_s=30).failed("TimeoutError")
        assert "interrupted while endless was packed" in error.text
        kernel.do("%%accelerate --out x\nx = 2")
        assert kernel.value("x") == 2, "they live on"
    finally:
        kernel.do("%accelerate stop")


def test_a_numpy_scalar_comes_back(kernel: RealKernel, start: str) -> None:
    kernel.do("import numpy as np; lowest = np.float32(0.5)")
    cell = kernel.do(accelerate("best = np.argmin([3, 1]); least = lowest\nbest", start, flags="--out best,least"))
    assert kernel.value("[type(best).__name__, int(best), float(least)]") == ["int64", 1, 0.5]
    assert cell.result is not None
    assert cell.result["text/plain"] == "np.int64(1)"
