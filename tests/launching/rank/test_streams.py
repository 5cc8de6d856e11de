"""The output of a rank is a pipe, whatever that of the notebook is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from nbaccel.launching.api import launch


def test_the_output_of_a_rank_cannot_seek_where_that_of_the_notebook_is_a_file(tmp_path: Path) -> None:
    def can_seek() -> list[bool]:
        return [stream.seekable() for stream in (sys.stdout, sys.stderr)]

    before = os.dup(1)
    try:
        with open(tmp_path / "jupyter.log", "wb") as log:
            os.dup2(log.fileno(), 1)
        assert launch(can_seek, 1, start_method="fork").value == [False, False]
    finally:
        os.dup2(before, 1)
        os.close(before)


def test_lines_of_both_streams_stay_in_the_order_in_which_they_were_printed() -> None:
    def prints() -> None:
        for number in range(100):
            print(f"{number}: out")
            print(f"{number}: error", file=sys.stderr)
            print("of a bar", file=sys.stderr, end=f"\rbar {number}\n")

    shown = Path(launch(prints, 2, start_method="fork").log_path).read_bytes().decode().split("\n")
    printed = [line for n in range(100) for line in (f"{n}: out", f"{n}: error", f"of a bar\rbar {n}")]
    for rank in range(2):
        own = [line.removeprefix(f"[rank {rank}] ") for line in shown if line.startswith(f"[rank {rank}]")]
        assert own == printed


def test_text_goes_where_the_program_points_descriptor_2(tmp_path: Path) -> None:
    def writes() -> None:
        before = os.dup(2)
        with open(tmp_path / "errors", "wb") as file:
            os.dup2(file.fileno(), 2)
            print("to the file", file=sys.stderr)
            os.dup2(before, 2)
        os.close(before)
        print("to the notebook", file=sys.stderr)
        os.write(2, b"by a library\n")

    log = Path(launch(writes, 1, start_method="fork").log_path).read_text()
    assert (tmp_path / "errors").read_text() == "to the file\n"
    assert sorted(log.splitlines()) == ["[rank 0] by a library", "[rank 0] to the notebook"]


def test_a_child_that_closed_what_it_inherited_prints_to_descriptor_2() -> None:
    def forks() -> None:
        sys.stderr.flush()
        child = os.fork()
        if not child:
            os.closerange(3, 1000)
            os.open(os.devnull, os.O_WRONLY)  # a file with the number of one that was closed
            print("of the child", file=sys.stderr)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

    assert "of the child" in Path(launch(forks, 1, start_method="fork").log_path).read_text()
