"""What a cell sees of its notebook: everything under fork, without copying it; what can travel under the zygote."""

from __future__ import annotations

import re

from kernel.harness import RealKernel, accelerate

DEFINES = """
import numpy as np
class Scaler:
    def __init__(self, factor):
        self.factor = factor
    def __call__(self, x):
        return self.factor * x
double = Scaler(2)
add_one = lambda x: x + 1
large = np.ones(2**27)  # 1 GB
small = np.ones(2**17)
"""

USES = """
import os
def private_mb():
    rows = dict(line.split(":") for line in open("/proc/self/smaps_rollup") if ":" in line)
    return sum(int(rows[kind].split()[0]) for kind in ("Private_Clean", "Private_Dirty")) / 1024

total = large[::512].sum()
print(f"rank {os.environ['RANK']} holds {private_mb()} MB of its own")
print("computed", add_one(double(20.5)), total)
assert type(double) is Scaler
"""


def test_a_fork_sees_a_lambda_a_class_an_open_file_and_a_gigabyte_without_copying(kernel: RealKernel) -> None:
    kernel.do(DEFINES)
    kernel.do("opened = open('/proc/self/cmdline')")
    cell = kernel.do(accelerate(f"{USES}\nprint(type(opened).__name__, opened.closed)", "fork"))
    assert "[all] computed 42.0 262144.0" in cell.printed
    assert "[all] TextIOWrapper False" in cell.printed
    private = {rank: float(size) for rank, size in re.findall(r"rank (\d) holds ([\d.]+) MB of its own", cell.printed)}
    assert private.keys() == {"0", "1"}, cell.printed
    assert sum(private.values()) < 100
    kernel.do("del large; opened.close()")


def test_the_zygote_gets_the_lambda_the_class_and_the_gigabyte(kernel: RealKernel) -> None:
    kernel.do(DEFINES)
    cell = kernel.do(accelerate(USES, "zygote"))
    assert "[all] computed 42.0 262144.0" in cell.printed
    assert "1.1 GB to copy to the ranks first" in cell.stdout  # said before the run
    kernel.do("del large")


def test_an_open_file_is_refused_by_name_before_a_zygote_rank_starts(kernel: RealKernel) -> None:
    kernel.do("opened = open('/proc/self/cmdline')")
    cell = kernel.run(accelerate("print('started')\nopened.read()", "zygote"))
    error = cell.failed("CannotSend")
    assert "opened: an open file cannot be sent to another process" in error.evalue
    assert "inside the cell" in error.evalue
    assert "started" not in cell.text
    kernel.do("opened.close()")


def test_a_zygote_is_sent_only_the_names_that_the_cell_reads(kernel: RealKernel) -> None:
    kernel.do("mentioned, unmentioned = 1, 2")
    kernel.do(accelerate("print(mentioned); assert 'unmentioned' not in globals()", "zygote"))


def test_a_missing_name_says_how_to_send_it(kernel: RealKernel) -> None:
    kernel.do("hidden = 3\ndef by_name(name): return globals()[name]")
    error = kernel.run(accelerate("eval('hid' + 'den')", "zygote")).failed("NameError")
    assert "--in hidden" in error.text
    assert "3" in kernel.do(accelerate("print(eval('hid' + 'den'))", "zygote", flags="--in hidden")).printed


def test_what_a_cell_assigns_does_not_reach_the_notebook(kernel: RealKernel, start: str) -> None:
    kernel.do("untouched = [1]\nname = 'LOCAL'")
    kernel.do(accelerate("untouched.append(2); name = 'changed'; fresh = 1", start))
    assert kernel.value("[untouched, name, 'fresh' in globals()]") == [[1], "LOCAL", False]


def test_views_of_one_storage_stay_views(kernel: RealKernel, start: str) -> None:
    kernel.do("import torch\nwhole = torch.zeros(10)\nhalf = whole[5:]")
    cell = kernel.do(accelerate("whole[7] = 1.0\nprint(half.tolist())", start, n=1))
    assert "[0.0, 0.0, 1.0, 0.0, 0.0]" in cell.printed
