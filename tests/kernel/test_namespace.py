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
large = np.ones(2**25)  # 268 MB
small = np.ones(2**17)
"""

USES = """
import os
def copied_mb(array):  # of its pages alone; a clean page is of a file, and private while no other rank has read it
    at, is_there = array.ctypes.data + array.nbytes // 2, False
    for line in open("/proc/self/smaps"):
        key, _, rest = line.partition(" ")
        if not key.endswith(":"):
            begin, end = (int(place, 16) for place in key.split("-"))
            is_there = begin <= at < end
        elif is_there and key == "Private_Dirty:":
            yield int(rest.split()[0]) / 1024

total = large[::512].sum()
print(f"rank {os.environ['RANK']} holds {sum(copied_mb(large))} MB of its own")
print("computed", add_one(double(20.5)), total)
assert type(double) is Scaler
"""


def test_a_fork_sees_a_lambda_a_class_an_open_file_and_a_large_array_without_copying(kernel: RealKernel) -> None:
    kernel.do(DEFINES)
    kernel.do("opened = open('/proc/self/cmdline')")
    cell = kernel.do(accelerate(f"{USES}\nprint(type(opened).__name__, opened.closed)", "fork"))
    assert "computed 42.0 65536.0" in cell.printed
    assert "TextIOWrapper False" in cell.printed
    copied = {rank: float(size) for rank, size in re.findall(r"rank (\d) holds ([\d.]+) MB of its own", cell.printed)}
    assert copied.keys() == {"0", "1"}, cell.printed
    assert max(copied.values()) < 64
    kernel.do("del large; opened.close()")


def test_the_zygote_gets_the_lambda_the_class_and_the_array(kernel: RealKernel) -> None:
    kernel.do(DEFINES)
    kernel.do("from nbaccel.launching import plan as _plan; _limit = _plan._WORTH_SAYING_BYTES")
    kernel.do("_plan._WORTH_SAYING_BYTES = 10**8")
    cell = kernel.do(accelerate(USES, "zygote"))
    assert "computed 42.0 65536.0" in cell.printed
    assert "268.4 MB to copy to the ranks first" in cell.stdout  # said before the run
    kernel.do("del large; _plan._WORTH_SAYING_BYTES = _limit")


def test_what_a_cell_binds_before_it_reads_it_need_not_travel(kernel: RealKernel) -> None:
    loop = "for i in range(2):\n    loss = (weight * i).sum()\n    loss.backward()"
    kernel.do(f"import torch\nweight = torch.ones(2, requires_grad=True)\n{loop}")
    kernel.do(accelerate(loop, "zygote", n=1))
    assert kernel.value("[loss.item(), loss.requires_grad]") == [2.0, False]
    kernel.do("loss = (weight * 2).sum()")
    error = kernel.run(accelerate("for i in range(2):\n    loss = loss * i", "zygote", n=1)).failed("NameError")
    assert "the notebook's loss was not sent to the ranks, as the cell binds it" in error.text
    kernel.do("del weight, loss")


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


ASSIGNS = "changed.append(2); name = 'changed'; fresh = 1; del gone"


def test_what_a_cell_assigns_changes_and_deletes_reaches_the_notebook(kernel: RealKernel, start: str) -> None:
    kernel.do("changed = same = [1]\nname = 'LOCAL'\ngone = 1")
    cell = kernel.do(accelerate(ASSIGNS, start))
    assert kernel.value("[changed is same, changed, name, fresh, 'gone' in globals()]") == [
        True,
        [1, 2],
        "changed",
        1,
        False,
    ]
    assert {"changed", "name", "fresh"} == {*re.findall(r"\w+", cell.stdout.rpartition("brought back: ")[2])}


def test_what_a_cell_assigns_does_not_reach_the_notebook_with_out_none(kernel: RealKernel, start: str) -> None:
    kernel.do("changed = [1]\nname = 'LOCAL'\ngone = 1")
    kernel.do(accelerate(ASSIGNS, start, flags="--out none"))
    assert kernel.value("[changed, name, 'fresh' in globals(), gone]") == [[1], "LOCAL", False, 1]


def test_views_of_one_storage_stay_views(kernel: RealKernel, start: str) -> None:
    kernel.do("import torch\nwhole = torch.zeros(10)\nhalf = whole[5:]")
    cell = kernel.do(accelerate("whole[7] = 1.0\nprint(half.tolist())", start, n=1))
    assert "[0.0, 0.0, 1.0, 0.0, 0.0]" in cell.printed
