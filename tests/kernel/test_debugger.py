"""`%%accelerate --pdb RANK` in a kernel whose front end types, and in one whose does not."""

from __future__ import annotations

import sys

from kernel.harness import RealKernel, accelerate

BODY = """
import torch, torch.distributed as dist
total = torch.tensor(accelerator.process_index)
def look(total):
    breakpoint()
    return total + 1
total = look(total)
dist.all_reduce(total)
assert total < 100, "too much"
"""


def test_a_rank_is_debugged_in_the_cell_and_the_run_goes_on(kernel: RealKernel, start: str) -> None:
    execution = kernel.begin(accelerate(BODY, start, flags="--pdb 1 --ranks 0 --out total"))
    assert execution.prompt() == "[rank 1] (Pdb) "
    # From Python 3.13 on, breakpoint() stops where it stands, not in the line after it.
    where = (
        ("(5)look()\n", "-> breakpoint()\n")
        if sys.version_info >= (3, 13)
        else ("(6)look()\n", "-> return total + 1\n")
    )
    cell = execution.until_text(*where, "rank 1 is in the debugger")
    assert "> Cell In[" in cell.stdout
    execution.answer("total += 10")
    assert execution.prompt() == "[rank 1] (Pdb) "
    execution.answer("c")
    execution.end().succeeded()
    assert kernel.value("int(total)") == 13


def test_after_an_error_the_values_are_looked_at_and_the_cell_raises_it(kernel: RealKernel) -> None:
    execution = kernel.begin(accelerate(BODY, flags="--pdb 0"))
    for command in ("total += 1000", "c", "p int(total)", "q"):
        assert execution.prompt() == "[rank 0] (Pdb) "
        execution.answer(command)
    cell = execution.end()
    assert cell.failed("AssertionError").evalue == "too much"
    assert "1003\n" in cell.stdout
    assert "-> assert total < 100" in cell.stdout


def test_the_stop_button_at_the_prompt_leaves_the_debugger_and_stops_the_run(kernel: RealKernel) -> None:
    execution = kernel.begin(accelerate(BODY, flags="--pdb 1 --out total"))
    execution.prompt()
    kernel.interrupt()
    cell = execution.end()
    cell.failed("KeyboardInterrupt")
    assert "brought back from the stopped run: total" in cell.stdout
    assert kernel.do("print(6 * 7)").stdout == "42\n"


def test_where_nobody_can_type_the_flag_is_refused_before_anything_starts(kernel: RealKernel) -> None:
    before = kernel.family()
    cell = kernel.begin(accelerate("1", flags="--pdb 0"), allow_stdin=False).end()
    assert "here nobody can type any (this front end takes no input" in cell.failed("LaunchRefused").evalue
    assert "2 ranks" not in cell.stdout
    assert kernel.extra(before) == {}


def test_ranks_that_stay_are_debugged_and_live_on(kernel: RealKernel) -> None:
    kernel.do("%accelerate start --cpu -n 2")
    try:
        execution = kernel.begin("%%accelerate --pdb 1\nsecret = 5\n1 / 0")
        for command in ("secret += 1", "q"):
            assert execution.prompt() == "[rank 1] (Pdb) "
            execution.answer(command)
        cell = execution.end()
        cell.failed("ZeroDivisionError")
        assert "the ranks live on, with what they have" in cell.stdout
        assert "[rank 0] 5\n" in kernel.do("%%accelerate\nprint(secret)").stdout
    finally:
        kernel.do("%accelerate stop")
