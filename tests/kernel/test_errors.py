"""A rank that fails: one error in the cell, in the user's class, with the cell's line and the rank's number."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from environments import Environment
from headless import execute
from kernel.harness import Cell, RealKernel, accelerate

FRAME = re.compile(r"Cell In\[(\d+)\], line (\d+)")

FAILS = """
import os

if os.environ["RANK"] == "{rank}":
    raise Broken("on purpose")
import torch.distributed as dist
dist.barrier()
"""
LINE = 5  # of the raise, counted with the magic's own line


def assert_one_traceback_with(cell: Cell, *, rank: int, world_size: int, line: int) -> None:
    error = cell.failed("Broken")
    assert cell.errors_shown == 1
    assert "on purpose" in error.evalue
    assert error.text.count("most recent call last") == 1, error.text
    assert FRAME.findall(error.text)[-1] == (str(cell.number), str(line)), error.text
    assert f"rank {rank} of {world_size}" in error.text
    assert cell.stderr == ""


@pytest.fixture(autouse=True)
def error_class(kernel: RealKernel) -> None:
    kernel.do("class Broken(Exception): pass")


def test_an_error_of_all_ranks_says_so_and_what_may_have_been_meant(kernel: RealKernel) -> None:
    cell = kernel.run("""
        %%accelerate -n 2
        def inner():
            nearest = 1
            accelerator.proces_index
        inner()
    """)
    error = cell.failed("AttributeError")
    assert re.search(r"^AttributeError +on all 2 ranks ", error.text), error.text
    assert error.text.rstrip().endswith(" Did you mean: 'process_index'?\nraised on all 2 ranks."), error.text


@pytest.mark.parametrize("rank", range(3))
def test_an_exception_on_any_rank_is_one_error_of_the_users_class(kernel: RealKernel, start: str, rank: int) -> None:
    cell = kernel.run(accelerate(FAILS.format(rank=rank), start, n=3))
    assert_one_traceback_with(cell, rank=rank, world_size=3, line=LINE)
    assert cell.seconds < 10  # 0.2 s on an idle machine
    assert kernel.value("__import__('sys').last_type is Broken")


def test_a_launch_that_is_refused_shows_the_users_lines_and_none_of_ours(kernel: RealKernel) -> None:
    kernel.do("""
        from nbaccel import notebook_launcher
        def train(rate): ...
        def start(): notebook_launcher(train, num_processes=2)
    """)
    error = kernel.run("start()").failed("TypeError")
    assert "cannot be called with args=(): missing a required argument: 'rate'" in error.text
    assert "def start(): notebook_launcher(train, num_processes=2)" in error.text
    assert "functions.py" not in error.text, error.text


@pytest.mark.parametrize(
    "line",
    [
        "await fails()",
        "Accelerator(mixed_precision='fp8')",
        "with accelerator.split_between_processes(3): pass",
    ],
)
def test_frames_of_python_that_only_carry_our_calls_are_not_shown(kernel: RealKernel, line: str) -> None:
    kernel.do("""
        from nbaccel import Accelerator
        async def fails(): raise ValueError("on purpose")
    """)
    cell = kernel.run(f"%%accelerate -n 2\n{line}")
    assert cell.error is not None
    assert FRAME.findall(cell.error.text), cell.error.text
    assert "File " not in cell.error.text, cell.error.text


def test_a_name_that_only_the_unwrapped_model_has_is_said_to_be_under_the_wrapper(kernel: RealKernel) -> None:
    cell = kernel.run("""
        %%accelerate -n 2
        import torch
        class Net(torch.nn.Linear):
            hidden = 8
        accelerator.prepare(Net(2, 1)).hidden
    """)
    assert "accelerator.unwrap_model(model).hidden" in cell.failed("AttributeError").text


@pytest.mark.soak
@pytest.mark.timeout(120)
def test_the_failing_rank_is_named_in_20_of_20_launches(kernel: RealKernel, start: str) -> None:
    for launch in range(20):
        rank = launch % 3
        cell = kernel.run(accelerate(FAILS.format(rank=rank), start, n=3))
        assert_one_traceback_with(cell, rank=rank, world_size=3, line=LINE)


def test_the_only_rank_can_fail_too(kernel: RealKernel, start: str) -> None:
    cell = kernel.run(accelerate(FAILS.format(rank=0), start, n=1))
    assert_one_traceback_with(cell, rank=0, world_size=1, line=LINE)


def test_a_function_of_an_earlier_cell_is_shown_with_that_cells_line(kernel: RealKernel, start: str) -> None:
    defined = kernel.do("""
        def inner():
            value = 1
            raise Broken("on purpose")
    """)
    cell = kernel.run(accelerate("inner()", start))
    error = cell.failed("Broken")
    assert FRAME.findall(error.text) == [(str(cell.number), "2"), (str(defined.number), "3")], error.text
    assert 'raise Broken("on purpose")' in error.text


def test_what_caused_the_exception_is_shown_before_it(kernel: RealKernel, start: str) -> None:
    cell = kernel.run(
        accelerate(
            """
            try:
                {}["absent"]
            except KeyError as cause:
                raise Broken("on purpose") from cause
            """,
            start,
        )
    )
    text = cell.failed("Broken").text
    assert 0 <= text.find("KeyError: 'absent'") < text.rfind("Broken: on purpose"), text
    assert cell.errors_shown == 1


def test_an_exception_class_that_was_made_in_the_cell_keeps_its_name(kernel: RealKernel, start: str) -> None:
    cell = kernel.run(accelerate('class Odd(ValueError): pass\nraise Odd("strange")', start))
    error = cell.failed("Odd")
    assert "strange" in error.evalue
    assert FRAME.findall(error.text)[-1] == (str(cell.number), "3")


def test_an_exception_that_cannot_say_what_it_is_is_shown_once(kernel: RealKernel, start: str) -> None:
    body = """
        class Mute(Exception):
            def __str__(self): raise ValueError("no words")
        raise Mute()
    """
    cell = kernel.run(accelerate(body, start))
    error = cell.failed("Mute")
    assert cell.errors_shown == 1
    assert FRAME.findall(error.text)[-1][0] == str(cell.number)


def test_the_members_of_an_exception_group_are_shown_with_their_places(kernel: RealKernel, start: str) -> None:
    body = """
        caught = []
        for kind in (KeyError, OSError):
            try:
                raise kind("inside")
            except Exception as error:
                caught.append(error)
        raise ExceptionGroup("both failed", caught)
    """
    cell = kernel.run(accelerate(body, start))
    assert cell.status == "error"
    shown = cell.stderr if cell.error is None else cell.error.text  # IPython 8 and later print groups
    assert "both failed (2 sub-exceptions)" in shown
    assert f"OSError: inside  (Cell In[{cell.number}], line 5)" in shown


def test_an_error_under_run_cell_of_the_shell_is_shown(kernel: RealKernel, start: str) -> None:
    cell = kernel.do(accelerate("get_ipython().run_cell('1/0');", start))
    assert "ZeroDivisionError" in cell.stderr
    assert ": division by zero" in cell.stderr


def test_our_own_frames_are_not_in_the_traceback(kernel: RealKernel, start: str) -> None:
    text = kernel.run(accelerate(FAILS.format(rank=1), start)).failed("Broken").text
    assert "nbaccel" not in text.replace("%%accelerate", ""), text


def test_run_all_stops_at_the_failing_cell(environment: Environment, tmp_path: Path) -> None:
    sources = ["%load_ext nbaccel", accelerate("1 / 0"), "print('too far')"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute(notebook, environment, tmp_path)
    assert notebook.cells[2].outputs == []
    assert [output.output_type for output in notebook.cells[1].outputs].count("error") == 1


# --- ranks that die ---------------------------------------------------------------------------------------------

WAITS = """
import os, time
import torch.distributed as dist
if os.environ["RANK"] == "1":
    print("victim", os.getpid())
    time.sleep(60)
print("waiting")
dist.barrier()
"""


def test_a_killed_rank_ends_the_cell_while_its_peer_waits_in_a_collective(kernel: RealKernel, start: str) -> None:
    running = kernel.begin(accelerate(WAITS, start))
    told = running.until(lambda cell: re.search(r"victim \d+\n", cell.text) and "waiting" in cell.text)
    victim = re.search(r"victim (\d+)", told.text)
    assert victim is not None
    killed_at = time.monotonic()
    os.kill(int(victim[1]), signal.SIGKILL)
    error = running.end().failed("RankDied")
    assert time.monotonic() - killed_at < 15
    assert "rank 1 of 2" in error.evalue
    assert "SIGKILL" in error.evalue


@pytest.mark.parametrize("code", [0, 3])
def test_an_exit_code_is_named(kernel: RealKernel, start: str, code: int) -> None:
    error = kernel.run(accelerate(f"import os\nif os.environ['RANK'] == '1': os._exit({code})", start)).failed(
        "RankDied"
    )
    assert "rank 1 of 2" in error.evalue
    assert f"exit code {code}" in error.evalue


def test_the_next_cell_works_after_a_rank_died(kernel: RealKernel, start: str) -> None:
    kernel.run(accelerate("import os; os._exit(3)", start)).failed("RankDied")
    assert "fine" in kernel.do(accelerate("print('fine')", start)).stdout


def test_errors_of_ranks_are_shown_as_the_class_and_the_notebook_say(kernel: RealKernel) -> None:
    kernel.do("""
        class Stop(Exception):
            def _render_traceback_(self):
                return ["stopped here"]
    """)
    assert kernel.run(accelerate("raise Stop()", "fork")).failed("Stop").text == "stopped here"
    kernel.do("%xmode Minimal")
    assert kernel.run(accelerate("raise KeyError('x')", "fork")).failed("KeyError").text.splitlines() == [
        "KeyError: 'x'",
        "raised on all 2 ranks.",
    ]
    kernel.do("%xmode Context\n%pdb on")
    error = kernel.run(accelerate("raise KeyError('x')", "fork")).failed("KeyError")
    assert error.text.endswith("%pdb: the error's frames were in its rank, which has ended; --pdb RANK asks there.")
    assert kernel.value("get_ipython().call_pdb")
    kernel.do("%pdb off")


def test_an_interrupt_while_no_code_of_the_cell_runs_shows_no_line_of_ours(kernel: RealKernel) -> None:
    kernel.do("""
        from nbaccel.notebook import cell_mode as _cell_mode
        _ours = {}
        exec(compile("def run(*_): __import__('signal').raise_signal(2)", nbaccel.__file__, "exec"), _ours)
        _run, _cell_mode.run_cell = _cell_mode.run_cell, _ours["run"]
    """)
    cell = kernel.run(accelerate("print('ran')", "fork"))
    kernel.do("_cell_mode.run_cell = _run")
    assert cell.failed("KeyboardInterrupt").text == "KeyboardInterrupt: interrupted while no code of the cell ran."
