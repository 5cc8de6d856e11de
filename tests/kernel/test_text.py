"""What ranks print arrives: whole lines, in order, in few messages, whichever way it was written."""

from __future__ import annotations

import re
from pathlib import Path

from kernel.harness import RealKernel, accelerate

PRINTS = """
import os
for step in range(2000):
    print("rank", os.environ["RANK"], f"step {step} loss {1 / (step + 1):.6f}")
"""

SENDERS = re.compile(r"\[(all|rank \d)\] (.*)")


def lines_of(rank: int, text: str) -> list[str]:
    """The lines that `rank` printed, without their tags, in the order of the screen."""
    found = (SENDERS.fullmatch(line) for line in text.splitlines())
    return [match[2] for match in found if match is not None and match[1] in ("all", f"rank {rank}")]


def test_4000_prints_arrive_whole_and_in_order_in_60_messages_at_once(kernel: RealKernel, start: str) -> None:
    cell = kernel.do(accelerate(PRINTS, start))
    for rank in range(2):
        wanted = [f"rank {rank} step {step} loss {1 / (step + 1):.6f}" for step in range(2000)]
        assert lines_of(rank, cell.printed) == wanted
    assert sum(cell.sent.values()) <= 60, cell.sent
    assert cell.seconds < 10  # 0.2 s on an idle machine


WAYS = r"""
import os, sys
print("    indented\n\n{}  # a blank line above")
print("a", 1, "b", sep="\t")
print("to stderr", file=sys.stderr)
os.system("echo from a shell")
!echo by IPython
os.write(1, b"raw bytes\n")
os.write(2, b"raw error\n")
print({"execution_count": 3, "cell_id": "x", "msg_id": "y"})
print("wide \u00e9\u4e16\U0001f600")
sys.stdout.write("half ")
sys.stdout.write("a line\n")
sys.__stdout__.write("by the original stream\n")
print("no newline at the end", end="")
"""

ARRIVED = """\
    indented

{}  # a blank line above
a\t1\tb
from a shell
by IPython
raw bytes
{'execution_count': 3, 'cell_id': 'x', 'msg_id': 'y'}
wide \u00e9\u4e16\U0001f600
half a line
by the original stream
no newline at the end"""


def test_every_way_to_write_arrives_from_one_rank(kernel: RealKernel, start: str) -> None:
    cell = kernel.do(accelerate(WAYS, start, n=1))
    assert cell.printed == ARRIVED + "\n"
    assert cell.stderr == "to stderr\nraw error\n"


def test_lines_that_two_ranks_print_alike_are_shown_once(kernel: RealKernel, start: str) -> None:
    cell = kernel.do(accelerate(WAYS, start))
    assert cell.printed == ARRIVED + "\n"
    assert cell.stderr == "to stderr\nraw error\n"


def test_only_one_ranks_output_is_shown_on_demand(kernel: RealKernel, start: str) -> None:
    cell = kernel.do(accelerate("import os; print('I am', os.environ['RANK'])", start, flags="--ranks 1"))
    assert "I am 1" in cell.stdout
    assert "I am 0" not in cell.stdout


def test_a_bar_that_is_drawn_over_itself_ends_in_its_last_state(kernel: RealKernel, start: str) -> None:
    cell = kernel.do(
        accelerate(
            r"""
            import time
            for done in range(11):
                print(f"\r{done:2}/10 done", end="")
                time.sleep(0.02)
            print()
            print("after the bar")
            """,
            start,
        )
    )
    screen = [line.rpartition("\r")[2] for line in cell.printed.split("\n")]
    assert any("10/10 done" in line for line in screen), cell.stdout
    assert any("after the bar" in line for line in screen), cell.stdout
    assert not any("5/10 done" in line for line in screen), cell.stdout


def test_output_appears_while_the_cell_runs(kernel: RealKernel, start: str) -> None:
    running = kernel.begin(accelerate("import time\nprint('first words')\ntime.sleep(1.5)\nprint('last words')", start))
    assert "last words" not in running.until_text("first words", timeout_s=10).text
    assert "last words" in running.end().succeeded().text


def test_100_mb_of_output_lose_neither_the_run_nor_the_last_line(kernel: RealKernel, start: str) -> None:
    body = """
    import sys
    block = "".join(f"{number:06d} {'x' * 92}\\n" for number in range(10_000))
    for _ in range(100):
        sys.stdout.write(block)
    print("the last line")
    """
    cell = kernel.do(accelerate(body, start, n=1))
    assert cell.printed.startswith("000000 ")
    assert "the last line" in cell.stdout
    assert len(cell.text) < 250_000, "what stays in the notebook"
    log = re.search(r"^... ([\d,]+) lines hidden, all of them are in (\S+)\n", cell.text, re.M)
    assert log is not None, cell.text[-2000:]
    with Path(log[2]).open() as lines:
        printed = [line for line in lines if "x" * 92 in line or "the last line" in line]
    assert len(printed) == 1_000_001
    assert printed[-1].endswith("the last line\n")


def test_asking_for_input_is_one_sentence_with_the_way_out(kernel: RealKernel, start: str) -> None:
    for ask in ("input('name? ')", "import getpass; getpass.getpass()", "breakpoint()"):
        error = kernel.run(accelerate(ask, start)).failed("NoInput")
        assert "nobody can type into a rank" in error.evalue
        assert "--start inline" in error.evalue
        assert re.search(r"For a debugger, %%accelerate --pdb [01] lets this rank ask", error.evalue)
