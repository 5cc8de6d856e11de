"""`--out`: results come back into the notebook, into the objects that are there, also when the cell fails."""

from __future__ import annotations

import pytest

from kernel.harness import RealKernel, accelerate

ONE_AND_TWO = pytest.mark.parametrize("n", [1, 2])


@ONE_AND_TWO
def test_arrays_tensors_and_plain_data_come_back_equal(kernel: RealKernel, start: str, n: int) -> None:
    body = """
    import numpy as np, torch
    array = np.arange(20_000.0)  # 160 kB
    tensor = torch.arange(20_000.0)
    facts = {"loss": [0.5, 0.25], "nested": {"rank": accelerator.process_index}}
    """
    cell = kernel.do(accelerate(body, start, n, flags="--out array,tensor,facts"))
    assert kernel.value("[float(array.sum()), float(tensor.double().sum()), facts]") == [
        199990000.0,
        199990000.0,
        {"loss": [0.5, 0.25], "nested": {"rank": 0}},
    ]
    assert "brought back: array (160 kB), tensor (80 kB), facts (" in cell.stdout


@pytest.mark.timed
@ONE_AND_TWO
def test_half_a_gigabyte_comes_back_within_3_s(kernel: RealKernel, start: str, n: int) -> None:
    body = "import numpy as np\nlarge = np.full(62_500_000, 3.0)"
    seconds: list[float] = []
    while len(seconds) < 4 and min(seconds, default=9.0) > 3:  # a machine that is busy has bad moments
        seconds.append(kernel.do(accelerate(body, start, n, flags="--out large")).seconds)
    assert min(seconds) < 3
    assert kernel.value("[large.nbytes, float(large[0]), float(large[-1])]") == [500_000_000, 3.0, 3.0]
    kernel.do("large += 1; del large")  # it is the notebook's own, to write to


def test_names_that_share_memory_come_back_sharing_it(kernel: RealKernel, start: str) -> None:
    kernel.do(accelerate("import torch\nwhole = torch.zeros(4)\npart = whole[2:]", start, flags="--out whole,part"))
    kernel.do("part += 1")
    assert kernel.value("whole.tolist()") == [0, 0, 1, 1]


SETS_UP = """
import torch
torch.manual_seed(0)
X, Y = torch.randn(64, 6), torch.randn(64, 1)
def make():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = make()
identity = [id(model), id(optimizer), *map(id, model.parameters())]
"""

TRAINS = """
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=8)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for epoch in range({epochs}):
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
"""

SAME = "identity == [id(model), id(optimizer), *map(id, model.parameters())]"


@ONE_AND_TWO
def test_three_and_three_epochs_in_two_cells_equal_six(kernel: RealKernel, start: str, n: int) -> None:
    kernel.do(SETS_UP)
    for _ in range(2):
        kernel.do(accelerate(TRAINS.format(epochs=3), start, n, flags="--out model,optimizer"))
        assert kernel.value(SAME)
    kernel.do("in_two = [p.detach().clone() for p in model.parameters()]")
    kernel.do(SETS_UP)
    kernel.do("before = [p.detach().clone() for p in model.parameters()]")
    kernel.do(accelerate(TRAINS.format(epochs=6), start, n, flags="--out model,optimizer"))
    assert kernel.value("all(torch.equal(a, b) for a, b in zip(in_two, model.parameters()))")
    assert kernel.value("not any(torch.equal(a, b) for a, b in zip(before, model.parameters()))")
    assert kernel.value("[g['params'][0] is next(model.parameters()) for g in optimizer.param_groups]") == [True]


def test_the_line_after_the_run_says_what_came_and_what_did_not(kernel: RealKernel, start: str) -> None:
    kernel.do(SETS_UP)
    body = f"{TRAINS.format(epochs=1)}\nimport os\nhistory = [1.0]\ndef helper(): pass"
    cell = kernel.do(accelerate(body, start, flags="--out model"))
    assert "brought back: model (updated in place, " in cell.stdout
    (hint,) = [line for line in cell.stdout.splitlines() if line.startswith("not brought back")]
    assert "history" in hint
    assert "--out" in hint
    assert "helper" not in hint
    assert "os" not in hint.replace(",", " ").split()


def test_a_model_whose_structure_changed_replaces_the_old_one_and_says_so(kernel: RealKernel, start: str) -> None:
    kernel.do(SETS_UP)
    kernel.do("old = model")
    cell = kernel.do(accelerate("model = torch.nn.Sequential(torch.nn.Linear(6, 2))", start, flags="--out model"))
    assert "model (new object: its structure changed" in cell.stdout
    assert kernel.value("[model is old, len(model), len(old)]") == [False, 1, 3]


def test_names_come_back_after_the_last_line_failed(kernel: RealKernel, start: str) -> None:
    kernel.do("reached = None")
    cell = kernel.run(accelerate("reached = 7\nmisspelt_name", start, flags="--out reached"))
    cell.failed("NameError")
    assert kernel.value("reached") == 7
    assert "brought back from the failed run: reached" in cell.stdout


def test_what_cannot_travel_is_named_and_the_rest_comes(kernel: RealKernel, start: str) -> None:
    body = "import threading\nlock = threading.Lock()\nfine = 5"
    cell = kernel.run(accelerate(body, start, flags="--out lock,fine"))
    assert "lock (a lock cannot be sent to another process" in cell.failed("ResultsMissing").evalue
    assert kernel.value("fine") == 5


def test_a_name_that_was_never_assigned_is_missed_by_name(kernel: RealKernel, start: str) -> None:
    cell = kernel.run(accelerate("there = 1\nif False: absent = 2", start, flags="--out there,absent"))
    assert "absent" in cell.failed("ResultsMissing").evalue
    assert kernel.value("there") == 1


def test_a_name_that_nobody_knows_is_refused_before_the_run(kernel: RealKernel, start: str) -> None:
    cell = kernel.run(accelerate("print('started')\nmodle = 1", start, flags="--out nowhere"))
    assert "nowhere" in cell.failed("LaunchRefused").evalue
    assert "started" not in cell.text


RECORDS_PARCELS = """
import os
from nbaccel.launching.ipc import reports as member
payload_bytes = []
original = member.RankReport.from_frame.__func__
def recording(cls, message, fds):
    payload_bytes.extend(os.fstat(fd).st_size for fd in fds)
    return original(cls, message, fds)
member.RankReport.from_frame = classmethod(recording)
"""


@pytest.mark.parametrize(("name", "flags"), [("big = ", "--out none"), ("", "")])
def test_a_model_as_last_expression_is_shown_and_not_sent(
    kernel: RealKernel, start: str, name: str, flags: str
) -> None:
    kernel.do(RECORDS_PARCELS)
    try:
        body = f"import torch\n{name}torch.nn.utils.skip_init(torch.nn.Linear, 16384, 16384)  # 1 GB"
        cell = kernel.do(accelerate(f"{body}\nbig.eval()" if name else body, start, flags=flags))
        texts = [data.get("text/plain", "") for data in [*cell.displays, cell.result or {}]]
        assert any("Linear(in_features=16384, out_features=16384" in text for text in texts), (
            cell.displays,
            cell.result,
        )
        assert sum(kernel.value("payload_bytes")) < 100_000
    finally:
        kernel.do("member.RankReport.from_frame = classmethod(original)")
