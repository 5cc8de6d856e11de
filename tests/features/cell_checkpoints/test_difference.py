"""The difference of a cell to the head of its loop, through its file."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from features.cell_checkpoints.continued_cells import continued, executed, saved
from nbaccel.errors import CannotResume, CannotSave, CheckpointCorrupt
from nbaccel.features.cell_checkpoints.difference import CellDifference, StoredDifference
from nbaccel.features.cell_checkpoints.head_state import HeadState
from nbaccel.features.cell_checkpoints.loader_draws import DRAWN

TRAINING = """
import random
from collections import Counter, OrderedDict, defaultdict, deque
import numpy as np
import torch

class Net(torch.nn.Module):
    seen = 0
    def __init__(self):
        super().__init__()
        self.fc, self.norm = torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)
    def forward(self, x):
        Net.seen += 1
        return self.norm(self.fc(x))

class Meter:
    def __init__(self):
        self.total, self.best = 0.0, None

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)
average = torch.optim.swa_utils.AveragedModel(model)
data = torch.randn(20, 4)
drawn, numbers, dice = torch.Generator().manual_seed(3), np.random.default_rng(0), random.Random(4)
old = np.random.RandomState(5)
history, table, last, meter = [], defaultdict(list), deque(maxlen=3), Meter()
curve, seen = np.zeros(8), set()
"""
ROUND = """
for turn in range(3):
    loss = model(data[torch.randperm(20, generator=drawn)[:8]]).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    plateau.step(loss.item())
    average.update_parameters(model)
    history.append(loss.item())
    table["a"].append(numbers.random())
    last.append(dice.random())
    seen.add(len(history))
    curve[turn] = old.normal()
    meter.total += loss.item()
    meter.best = {name: value.clone() for name, value in model.state_dict().items()}
    newest = Meter()
    newest.itself, newest.other = newest, meter
"""


def test_a_training_goes_on_bit_for_bit_in_a_new_notebook(tmp_path: Path) -> None:
    undisturbed = saved(tmp_path, TRAINING, ROUND)
    other, _ = continued(tmp_path, TRAINING)

    for _ in range(2):
        for name in ("model", "average"):
            states = [notebook[name].state_dict() for notebook in (undisturbed, other)]
            assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
        for name in ("optimizer", "scheduler", "plateau", "scaler"):
            first, second = (notebook[name].state_dict() for notebook in (undisturbed, other))
            assert repr(first) == repr(second)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(*_parameters(undisturbed, other), strict=True))
        for name in ("history", "table", "last", "seen", "turn"):
            assert other[name] == undisturbed[name]
        assert np.array_equal(other["curve"], undisturbed["curve"])
        assert (other["Net"].seen, other["meter"].total) == (undisturbed["Net"].seen, undisturbed["meter"].total)
        executed(ROUND, undisturbed)
        executed(ROUND, other)
    assert other["newest"].itself is other["newest"]
    assert other["newest"].other is other["meter"]


def _parameters(*notebooks: dict[str, Any]) -> list[list[Any]]:
    return [list(notebook["model"].parameters()) for notebook in notebooks]


def test_objects_of_the_cells_above_keep_their_identity(tmp_path: Path) -> None:
    above = "import torch\nweights = [torch.zeros(2)]\nsame = {'w': weights[0], 'all': weights}\nview = weights[0][:1]"
    saved(tmp_path, above, "weights[0] += 1\nweights.append(weights[0])\nfirst = weights[0]\nrow = weights[0][1:]")

    notebook, _ = continued(tmp_path, above)

    assert notebook["weights"] == [notebook["same"]["w"]] * 2
    assert notebook["first"] is notebook["same"]["w"]
    assert notebook["same"]["all"] is notebook["weights"]
    notebook["first"].fill_(7)
    assert (notebook["view"].item(), notebook["row"].item()) == (7, 7)


def test_names_are_bound_and_deleted_as_in_the_loop(tmp_path: Path) -> None:
    above = "kept = step = 1\ngone = 2\nbest = None"
    saved(tmp_path, above, "del gone\nstep = 5\nbest = new = [step]")

    notebook, _ = continued(tmp_path, above)

    assert (notebook["kept"], notebook["step"], notebook["new"]) == (1, 5, [5])
    assert notebook["best"] is notebook["new"]
    assert "gone" not in notebook


def test_locals_of_functions_are_roots_of_their_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    head = HeadState({"model": model, "1:net": model, "1:epoch": 0})
    with torch.no_grad():
        model.weight += 1

    difference = CellDifference.between(
        head, {"model": model, "1:net": model, "1:epoch": 3, "2:net": model, "2:lr": 0.5}
    )

    difference.write(tmp_path)
    torch.manual_seed(0)
    again = torch.nn.Linear(2, 1)
    restored = StoredDifference.read(tmp_path).apply(HeadState({"model": again, "1:net": again, "1:epoch": 0}), None)
    assert restored.names == {"1:epoch": 3, "2:net": again, "2:lr": 0.5}
    assert torch.equal(again.weight, model.weight)


def test_contents_that_code_has_moved_meanwhile_are_written_again(tmp_path: Path) -> None:
    above = "import torch\nweight, history, table = torch.zeros(2), [], {'old': 1}"
    saved(tmp_path, above, "weight += 1\nhistory.append(3)\ndel table['old']\nnew = [history]")
    notebook, restored = continued(tmp_path, above)
    new = notebook["new"]
    executed("weight += 1\nhistory += [4, 5]\ntable['old'] = 2\nnew.clear()", notebook)

    restored.write_again()

    assert notebook["weight"].tolist() == [1, 1]
    assert (notebook["history"], notebook["table"]) == ([3], {})
    assert new == [notebook["history"]]


CLASSES = """
import dataclasses, enum, typing
class Color(enum.Enum):
    RED = 1
class Point(typing.NamedTuple):
    x: int
    y: object
@dataclasses.dataclass(slots=True)
class Slotted:
    value: object = None
@dataclasses.dataclass(frozen=True)
class Frozen:
    value: object = None
class Row(dict):
    pass
class Rows(list):
    pass
class Outer:
    class Inner:
        pass
"""
VALUES = """
import datetime, decimal, fractions, pathlib, types, uuid, argparse
import numpy as np, torch
from collections import Counter, OrderedDict, defaultdict, deque
{classes}
value = {value}
"""


@pytest.mark.parametrize(
    "value",
    [
        *("1 << 200", "float('inf')", "2j", "b'\\xff'", "'\\ud800 \\u1234'", "range(2, 9, 3)", "slice(1, None)", "..."),
        *("(1, (2, [3]))", "frozenset({1, 2})", "{1, 2}", "{(1, 2): {3: None}}", "deque([1, 2], maxlen=4)"),
        *("OrderedDict(b=1, a=2)", "Counter('aab')", "defaultdict(list, a=[1])", "bytearray(b'abc')"),
        *("types.SimpleNamespace(a=1)", "argparse.Namespace(lr=0.1)"),
        *("datetime.datetime(2026, 1, 2, 3, 4, 5, 6)", "datetime.date(2026, 1, 2)", "datetime.time(3, 4)"),
        "datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc)",
        *("datetime.timedelta(1, 2, 3)", "decimal.Decimal('1.10')", "fractions.Fraction(1, 3)", "uuid.UUID(int=5)"),
        *("pathlib.Path('a/b')", "torch.float16", "torch.device('cpu')", "torch.Size([2, 3])"),
        *("np.float32(1.5)", "np.int64(-3)", "np.bool_(True)", "np.str_('a')", "np.datetime64('2026-01-02')"),
        *("np.complex64(1j)", "np.arange(6).reshape(2, 3)", "np.asfortranarray(np.ones((2, 3), 'f4'))"),
        *("np.array(['a', 'bcd'])", "np.array([1, 'a', None], dtype=object)", "np.zeros((0, 3))"),
        *("np.array(['2026-01-02'], dtype='M8[D]')", "np.array(3.0)"),
        *("Color.RED", "Point(1, [2])", "Slotted([1])", "Frozen((1,))", "Row(a=Rows([1]))", "Outer.Inner()"),
    ],
)
def test_a_value_comes_back_as_it_was(tmp_path: Path, value: str) -> None:
    above = VALUES.format(classes=CLASSES, value="None")
    there = saved(tmp_path, above, f"value = {value}")["value"]

    notebook, _ = continued(tmp_path, above)

    back = notebook["value"]
    assert repr(back).partition(" at 0x")[0] == repr(there).partition(" at 0x")[0]
    assert type(back).__qualname__ == type(there).__qualname__
    if isinstance(there, np.ndarray):
        assert (back.dtype, back.shape, back.strides) == (there.dtype, there.shape, there.strides)


@pytest.mark.parametrize(
    "value",
    [
        *("torch.arange(6).reshape(2, 3).t()", "torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)"),
        *("torch.ones(3, dtype=torch.bfloat16)", "torch.randn(2, dtype=torch.complex128)", "torch.tensor(2.5)"),
        *("torch.zeros(0, 3)", "torch.ones(1).expand(4)", "torch.randn(3, dtype=torch.complex64).conj()"),
        *("torch.nn.Parameter(torch.ones(2))", "torch.randn(100, 4)[3]", "torch.ones(2).to(torch.float8_e4m3fn)"),
        "torch.ones(2, requires_grad=True)",
    ],
)
def test_a_tensor_comes_back_as_it_was(tmp_path: Path, value: str) -> None:
    above = "import torch\ntorch.manual_seed(0)"
    there = saved(tmp_path, above, f"value = {value}")["value"]

    back = continued(tmp_path, above)[0]["value"]

    assert (type(back), back.dtype, back.requires_grad) == (type(there), there.dtype, there.requires_grad)
    assert torch.equal(torch.view_as_real(back).double() if back.is_complex() else back.double(), _numbers(there))
    assert (tmp_path / "difference.safetensors").stat().st_size < 2_000


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()).double() if tensor.is_complex() else tensor.double()


def test_random_generators_that_the_loop_has_made_go_on(tmp_path: Path) -> None:
    made = "import random, numpy as np, torch\n"
    loop = """
        drawn = [torch.Generator().manual_seed(1), np.random.default_rng(2), np.random.RandomState(3), random.Random(4)]
        draw = lambda: (torch.rand(2, generator=drawn[0]).tolist(), *(each.random() for each in drawn[1:]))
        first = draw()
        drawn.append(np.random.Generator(np.random.Philox(5)))
        del draw
    """
    there = saved(tmp_path, made, loop)["drawn"]

    back = continued(tmp_path, made)[0]["drawn"]

    assert torch.rand(2, generator=back[0]).tolist() == torch.rand(2, generator=there[0]).tolist()
    assert [each.random() for each in back[1:]] == [each.random() for each in there[1:]]
    assert isinstance(back[3], random.Random)


TABLES = """
import numpy as np, pandas as pd
dates = pd.Series(pd.to_datetime(["2026-01-02"]))
curve = pd.DataFrame({"epoch": [0], "loss": [0.5]})
"""


@pytest.mark.parametrize(
    "value",
    [
        *("pd.DataFrame({'a': [1, 2], 'b': [0.5, None]})", "pd.DataFrame({'t': ['x', None]}, index=[5, 6])", "dates"),
        *("pd.Series([1, 2], name='n', index=['a', 'b'])", "pd.DataFrame()", "pd.DataFrame({3: [True]})"),
        "pd.DataFrame(np.ones((2, 2), 'f4'), columns=pd.Index(['u', 'v'], name='w'))",
    ],
)
def test_a_table_comes_back_as_it_was(tmp_path: Path, value: str) -> None:
    there = saved(tmp_path, TABLES, f"value = {value}\ncurve.loc[len(curve)] = [1, 0.25]")

    here, _ = continued(tmp_path, TABLES)

    assert type(here["value"]) is type(there["value"])
    assert here["value"].equals(there["value"])
    assert list(map(repr, here["value"].axes)) == list(map(repr, there["value"].axes))
    assert here["curve"].equals(there["curve"])


@pytest.mark.parametrize(
    "value",
    [
        "pd.RangeIndex(2, 9, 3, name='n')",
        "pd.Index([4, 2])",
        "pd.Index(['a', 'b'], name='t')",
        "pd.Index([0.5, None])",
        "pd.Index([(1, 2), ('a', None)], tupleize_cols=False)",
        "pd.Index([])",
        "pd.DataFrame({'a': [1, 2, 3]}, index=[7, 8, 9]).query('a > 1').index",
    ],
)
def test_labels_come_back_as_they_were(tmp_path: Path, value: str) -> None:
    there = saved(tmp_path, TABLES, f"value = {value}\nboth = [value, 1]")

    here, _ = continued(tmp_path, TABLES)

    assert here["value"].identical(there["value"])
    assert repr(here["value"]) == repr(there["value"])
    assert here["both"][0] is here["value"]


def test_labels_of_types_of_pandas_own_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotSave, match="days is a DatetimeIndex, which no file of data can hold"):
        saved(tmp_path, "import pandas as pd", "days = pd.to_datetime(['2026-01-02'])")


def test_a_table_of_types_of_pandas_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotSave, match="table is a column of category, which no file of data can hold"):
        saved(tmp_path, "import pandas as pd", "table = pd.DataFrame({'c': ['a', 'b']}).astype('category')")


def test_what_follows_from_other_objects_is_passed_over(tmp_path: Path) -> None:
    above = "import threading, weakref\nclass A: pass\na, seen, lock = A(), weakref.WeakSet(), threading.Lock()"

    saved(tmp_path, above, "seen.add(a)\nlock.acquire()")

    assert not continued(tmp_path, above)[0]["lock"].locked()


def test_new_tensors_that_share_memory_still_do(tmp_path: Path) -> None:
    saved(tmp_path, "import torch", "flat = torch.zeros(6)\nrows = [flat[:3], flat[3:]]")

    notebook, _ = continued(tmp_path, "")

    notebook["flat"].fill_(2)
    assert [row.tolist() for row in notebook["rows"]] == [[2, 2, 2], [2, 2, 2]]


def test_a_backward_through_rounds_before_the_checkpoint_is_an_error(tmp_path: Path) -> None:
    above = "import torch\nweight = torch.ones(2, requires_grad=True)"
    saved(tmp_path, above, "total = (weight * 2).sum()")

    total = continued(tmp_path, above)[0]["total"]

    assert total.item() == 4
    with pytest.raises(CannotResume, match=r"whose graph no file holds\. Detach what is kept from round to round"):
        (total + 1).backward()


@pytest.mark.parametrize(
    ("above", "loop", "sentence"),
    [
        ("a = {}", "a['f'] = lambda: 0", r"a\['f'\] is a function, which no file of data can hold"),
        (
            "import re\na = [1]",
            "a.append([re.compile('x')])",
            r"a\[0\]\[0\] is a Pattern, which no file of data can hold",
        ),
        ("class A: pass\na = A()", "a.f = len", r"a\['f'\] is a function"),
        ("a = iter([1, 2])", "next(a)", "a is a list_iterator: what it has handed out is known to nobody"),
        ("a = (x for x in range(3))", "next(a)", "a is a generator: .* Loop over what it reads itself"),
        ("", "a = {'__class__': 1}", "a is a name of Python's own, __class__"),
        ("class A:\n    def __del__(self): pass", "a = A()", "a is an A, which no file"),
        ("", "class A: pass\na = A()", "a is an A, whose class was made in the loop"),
    ],
)
def test_what_no_file_of_data_can_hold_is_refused_by_name(tmp_path: Path, above: str, loop: str, sentence: str) -> None:
    with pytest.raises(CannotSave, match=sentence):
        saved(tmp_path, above, loop)


def test_a_file_that_the_loop_writes_is_refused_unless_it_is_closed(tmp_path: Path) -> None:
    notebook = executed(f"log = open({str(tmp_path / 'log')!r}, 'w')")
    notebook["log"].write("begun")
    with notebook["log"], pytest.raises(CannotSave, match="log is a TextIOWrapper, which no file of data can hold"):
        CellDifference.between(HeadState({}), notebook)

    assert CellDifference.between(HeadState({}), notebook).unsaved == {"log": "a file"}


def test_a_file_that_is_open_for_writing_at_the_head_is_refused_at_the_first_save(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as log, pytest.raises(CannotSave) as refused:
        CellDifference.between(HeadState({"log": log}), {"log": log})

    assert str(refused.value) == (
        "log is a file that is open for writing: a run that goes on would begin it anew. "
        "Open it with mode 'a', which keeps what is in it"
    )


def test_code_that_the_loop_has_bound_is_left_to_its_statements(tmp_path: Path) -> None:
    above = "act = len"
    notebook = executed(above)
    head = HeadState(notebook)
    executed("act = lambda x: x\ndef helper(): pass\nimport json", notebook)

    difference = CellDifference.between(head, notebook)

    assert set(difference.unsaved) == {"act", "helper", "json"}
    difference.write(tmp_path)
    resumed, restored = continued(tmp_path, above)
    assert restored.deleted == ["act"]
    assert not {"act", "helper", "json"} & resumed.keys()


@pytest.mark.parametrize(
    ("above", "again", "named"),
    [
        ("indices = [3, 1, 2]", "indices = [1, 2, 3]", "indices"),
        ("words = ('a', 'b')", "words = ('a', 'c')", "words"),
        ("import numpy as np\nx = np.zeros(9)", "import numpy as np\nx = np.ones(9)", "x"),
        ("import torch\nx = torch.zeros(9)", "import torch\nx = torch.ones(9)", "x"),
        ("import torch\nd = {'x': torch.zeros(2)}", "import torch\nd = {'x': torch.zeros(3)}", r"d\['x'\]"),
        ("import random\nr = random.Random(1)", "import random\nr = random.Random(2)", "r"),
        ("rows = [(1, 'a')] * 2", "rows = [(1, 'b')] * 2", r"rows\[0\]"),
        ("ids = {1, 2}", "ids = {1, 3}", "ids"),
        ("data = [5, 6]", "data = None", "data"),
    ],
)
def test_other_data_above_the_loop_is_named_and_nothing_is_written(
    tmp_path: Path, above: str, again: str, named: str
) -> None:
    saved(tmp_path, above + "\nhistory = []", "history.append(1)")
    notebook = executed(again + "\nhistory = []")

    with pytest.raises(CannotResume, match=rf"^{named}: other than in the run that is continued\. The cells above"):
        StoredDifference.read(tmp_path).apply(HeadState(notebook), None)

    assert notebook["history"] == []


def test_what_the_loop_has_replaced_may_differ_at_the_head(tmp_path: Path) -> None:
    """An earlier run of the cell has left `x` and `rows`: a new session does not have them."""
    above = "import torch\ndata = torch.ones(3)\nrows = [data, [5]]\n"
    saved(tmp_path, above + "x = torch.zeros(2)", "x = data * 2\nrows = [x]")

    notebook, _ = continued(tmp_path, above.replace("[5]", "[6, 7]"))

    assert notebook["x"].tolist() == [2, 2, 2]
    assert notebook["rows"][0] is notebook["x"]


def test_plain_values_of_a_session_are_its_own_and_are_said(tmp_path: Path) -> None:
    saved(tmp_path, "began, rate = 100.5, 0.1\nhistory = []", "history.append(1)")

    notebook, restored = continued(tmp_path, "began, rate = 200.5, 0.1\nhistory = []")

    assert notebook["began"] == 200.5
    assert restored.notes == ["began is 200.5 here, and was 100.5 in the run that is continued"]


OPTIMIZED = """
import torch
model = torch.nn.Linear(2, 1)
torch.nn.init.ones_(model.weight), torch.nn.init.ones_(model.bias)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.3, betas=(0.9, 0.99))
"""
STEPS = "for turn in range(3):\n    model(torch.ones(1, 2)).sum().backward()\n    optimizer.step()\n"


def test_an_optimizer_has_the_settings_of_the_checkpoint_and_those_here_are_said(tmp_path: Path) -> None:
    """Also where no scheduler has moved them."""
    saved(tmp_path, OPTIMIZED, STEPS)

    notebook, restored = continued(tmp_path, OPTIMIZED.replace("0.3", "0.1"))

    assert notebook["optimizer"].param_groups[0]["lr"] == 0.3
    said = "optimizer.param_groups[0]['lr'] is 0.1 here, and was 0.3 in the run that is continued, which is taken"
    assert restored.notes == [said]


def test_a_scheduler_has_the_curve_of_the_checkpoint(tmp_path: Path) -> None:
    above = f"{OPTIMIZED}curve = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20)\n"
    loop = f"{STEPS}    curve.step()\n"
    expected = saved(tmp_path, above, loop)

    notebook, restored = continued(tmp_path, above.replace("0.5, total_steps=20", "0.7, total_steps=40"))

    assert len(restored.notes) == 3
    for _ in range(5):
        for each in (expected, notebook):
            executed(loop, each)
        assert notebook["optimizer"].param_groups[0]["lr"] == expected["optimizer"].param_groups[0]["lr"]


def test_a_loader_of_another_batch_size_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    above = "from torch.utils.data import DataLoader\nloader = DataLoader(range(9), batch_size=2)\nhistory = []"
    saved(tmp_path, above, "history.append(1)")
    notebook = executed(above.replace("batch_size=2", "batch_size=3"))

    with pytest.raises(
        CannotResume, match=r"^loader: its batch_size is 3 here, and was 2 in the run that is continued"
    ):
        StoredDifference.read(tmp_path).apply(HeadState(notebook), None)

    assert notebook["history"] == []


def test_entries_that_the_loop_does_not_write_may_be_others(tmp_path: Path) -> None:
    """Such as those of a cache that cells above fill."""
    saved(tmp_path, "cache = {'a': 1, 'b': 2}", "cache['c'] = 3\ncache['a'] += 4")

    assert continued(tmp_path, "cache = {'a': 1, 'z': 0}")[0]["cache"] == {"a": 5, "z": 0, "c": 3}


@pytest.mark.parametrize("kind", ["dict", "collections.OrderedDict", "collections.Counter", "Own"])
@pytest.mark.parametrize("now", ["a=1, c=7", "b=2"])
def test_entries_that_the_loop_writes_are_at_the_head_as_they_were(tmp_path: Path, kind: str, now: str) -> None:
    """Otherwise this session has trained already, or the cells above make another dictionary."""
    above = f"import collections\nclass Own(dict): pass\nhistory, table = [], {kind}"
    saved(tmp_path, f"{above}(a=1)", "table['c'] = 3\ntable['a'] += 4\nhistory.append(1)")
    notebook = executed(f"{above}({now})")

    with pytest.raises(CannotResume, match=r"^table: with other entries than at the head of the loop .* has trained"):
        StoredDifference.read(tmp_path).apply(HeadState(notebook), None)

    assert notebook["history"] == []


def test_an_optimizer_that_has_stepped_already_is_not_gone_on_with(tmp_path: Path) -> None:
    saved(tmp_path, OPTIMIZED, STEPS)
    notebook = executed(STEPS, executed(OPTIMIZED))

    with pytest.raises(CannotResume, match=r"^optimizer.state: with other entries than at the head"):
        StoredDifference.read(tmp_path).apply(HeadState(notebook), None)


def test_sums_show_writes_that_torch_does_not_count(tmp_path: Path) -> None:
    above = "import torch\nweight = torch.zeros(3)"
    saved(tmp_path, above, "weight.data[1] = 5")

    assert continued(tmp_path, above)[0]["weight"].tolist() == [0, 5, 0]


def test_a_value_that_is_written_and_reads_otherwise_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path, "a = [1]", "a.append(2)")
    _edit(tmp_path, lambda data: data["written"].update({key: [0, 0] for key in data["written"]}))

    with pytest.raises(CannotResume, match="a: other than in the run that is continued"):
        continued(tmp_path, "a = [1]")


def test_a_new_loader_iterator_comes_back_by_its_position(tmp_path: Path) -> None:
    from torch.utils.data import DataLoader

    class Drawn:
        def __init__(self, loader: Any) -> None:
            self.loader, self.created, self.first = lambda: loader, {"torch": "a"}, {"torch": "b"}

        def begin_of_pass(self) -> list[int]:
            return [7, 1, 1, 0]

    loader = DataLoader(list(range(4)))
    iterator = iter(loader)
    head = HeadState({"loader": loader, "it": iterator})
    next(iterator)
    vars(iterator)[DRAWN] = Drawn(loader)
    CellDifference.between(head, {"loader": loader, "it": iterator}).write(tmp_path)
    again = DataLoader(list(range(4)))

    restored = StoredDifference.read(tmp_path).apply(
        HeadState({"loader": again, "it": iter(again)}), lambda *given: list(given)
    )

    assert restored.names == {"it": [again, {"torch": "a"}, {"torch": "b"}, 1, [7, 1, 1, 0]]}


def _edit(folder: Path, change: Callable[[Any], None]) -> None:
    path = folder / "difference.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_a_file_of_another_version_is_named(tmp_path: Path) -> None:
    saved(tmp_path, "", "a = 1")
    _edit(tmp_path, lambda data: data.update(version=99))

    with pytest.raises(CheckpointCorrupt, match="was written by another version of nbaccel"):
        StoredDifference.read(tmp_path)
