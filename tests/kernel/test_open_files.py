"""Files that the notebook has open: each rank reads from a place of its own, and what several ranks write is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel.harness import RealKernel, accelerate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

READ = """
import csv, gzip, os, tempfile, zipfile
import numpy as np
np.repeat(np.arange(256, dtype="f8"), 512).tofile("rows.bin")
open("table.csv", "w").write("".join(f"{i},{i * i}\\n" for i in range(9000)))
with zipfile.ZipFile("many.zip", "w") as made:
    for i in range(60): made.writestr(f"{i}", f"{i} " * 3000)
with gzip.open("lines.gz", "wt") as made: made.write("".join(f"{i}\\n" for i in range(9000)))
rows = open("rows.bin", "rb"); number = os.open("rows.bin", os.O_RDONLY)
os.link("rows.bin", "gone"); gone = open("gone", "rb"); os.unlink("gone")
lines = gzip.open("lines.gz", "rt"); head = [next(lines) for _ in range(3)]
table = csv.reader(open("table.csv", newline="")); first = next(table)
many = zipfile.ZipFile("many.zip")
text = open("table.csv"); _ = next(text)
def row(i):
    rows.seek(i * 4096), gone.seek(i * 4096), os.lseek(number, i * 4096, os.SEEK_SET)
    return [np.frombuffer(each) for each in (rows.read(4096), gone.read(4096), os.read(number, 4096))]
def wrong():
    return [
        sum(int((each != i).any()) for _ in range(4) for i in range(256) for each in row(i)),
        sum(many.read(f"{i}") != f"{i} ".encode() * 3000 for _ in range(2) for i in range(60)),
    ]
def left():
    return [sum(int(line) for line in lines), sum(int(a) * int(a) == int(b) for a, b in table)]
"""
LEFT = [sum(range(3, 9000)), 8999]


def test_each_rank_reads_files_of_the_notebook_from_a_place_of_its_own(kernel: RealKernel) -> None:
    """Also by what holds a file without a name of the notebook, after it is deleted, and by its number alone."""
    kernel.do("%load_ext nbaccel\n" + READ)
    kernel.do(
        accelerate(
            """
            import torch
            for line in text:
                if line.startswith("7000,"): break
            found = accelerator.gather(torch.tensor([*wrong(), *left()])).tolist()
            """,
            "fork",
        )
    )
    assert kernel.value("found") == [0, 0, *LEFT, 0, 0, *LEFT]
    assert kernel.value("next(text)") == "7001,49014001\n", "the notebook's file is where that of rank 0 is"
    assert kernel.value("next(lines, 'end')") == "end"
    assert kernel.value("wrong()") == [0, 0]
    refused = kernel.run(accelerate("wrong()", "zygote")).failed("CannotSend")
    assert "open file" in refused.text


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 3])
def test_files_of_the_notebook_are_read_whole_by_any_number_of_ranks(kernel: RealKernel, ranks: int) -> None:
    kernel.do("%load_ext nbaccel\n" + READ)
    code = "import torch\nfound = accelerator.gather(torch.tensor([*wrong(), *left()])).tolist()"
    kernel.do(accelerate(code, "fork", n=ranks))
    assert kernel.value("found") == [0, 0, *LEFT] * ranks
    kernel.do("lines = gzip.open('lines.gz', 'rt'); _ = [next(lines) for _ in range(3)]")
    kernel.do(f"%accelerate start -n {ranks} --start fork")
    try:
        kernel.do("%%accelerate\nimport torch\nkept = accelerator.gather(torch.tensor([*wrong(), left()[0]])).tolist()")
        kernel.do("%accelerate pull kept")
    finally:
        kernel.do("%accelerate stop")
    assert kernel.value("kept") == [0, 0, LEFT[0]] * ranks


WRITTEN = """
import csv, logging, sqlite3
log = logging.getLogger("train"); log.setLevel("INFO"); log.propagate = False
log.addHandler(logging.FileHandler("train.log"))
held = {"table": csv.writer(open("table-out.csv", "w", newline=""))}; _ = held["table"].writerow(["head"])
alone = open("alone.txt", "w"); _ = alone.write("head\\n")
both = open("both.bin", "w+b"); _ = both.write(b"0" * 100)
bound = sqlite3.connect("data.db"); free = sqlite3.connect("data.db", check_same_thread=False)
"""


def test_a_file_of_the_notebook_that_several_ranks_write_is_named(kernel: RealKernel, tmp_path: Path) -> None:
    """What they write is there once the run is over; one that a single rank writes is not named."""
    # Else the notebook would lie in a folder for temporary files, and these are not named.
    kernel.do(f"%load_ext nbaccel\nimport tempfile; tempfile.tempdir = {str(tmp_path)!r}\n" + WRITTEN)
    cell = kernel.do(accelerate("log.info('a step')\nif accelerator.is_main_process: alone.write('mine\\n')", "fork"))
    assert "nbaccel: train.log is open in the notebook and written by more than one of 2 ranks" in cell.stdout
    assert "alone.txt" not in cell.stdout
    assert (kernel.folder / "alone.txt").read_text() == "head\nmine\n"
    cell = kernel.do(accelerate("held['table'].writerow([accelerator.process_index])", "fork"))
    assert "nbaccel: table-out.csv is open in the notebook and written" in cell.stdout
    assert "not brought back" not in cell.stdout, "a writer of csv has no state"
    assert sorted((kernel.folder / "table-out.csv").read_text().split()) == ["0", "1", "head"]
    kernel.do("tempfile.tempdir = None")


def test_a_place_that_ranks_would_share_in_a_file_or_database_is_refused(kernel: RealKernel) -> None:
    kernel.do("%load_ext nbaccel\n" + WRITTEN)
    for code, words in {
        "both.seek(accelerator.process_index); both.write(b'1')": "both (both.bin) is open for writing in the notebook,"
        " at one place for all ranks, and the cell calls seek()",
        "free.execute('select 1')": "free leads to a connection of SQLite that the notebook has opened",
    }.items():
        error = kernel.run(accelerate(code, "fork")).failed("LaunchRefused")
        assert words in error.text
        assert "in this cell" in error.text
    kernel.do(accelerate("both.seek(1); both.write(b'1'); both.flush()", "fork", n=1))
    assert (kernel.folder / "both.bin").read_bytes()[:3] == b"010"
    kernel.run(accelerate("_ = both.name, both.write(b'2')", "fork")).succeeded()
    error = kernel.run(accelerate("bound.execute('select 1')", "fork")).failed("ProgrammingError")
    assert "open the database in this cell, with sqlite3.connect()" in error.text
