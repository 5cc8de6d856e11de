"""A line names each number that a loop makes of parts of its batches, and by what factor it differs; no other.

Programs are text, as cells are, and run in two real ranks that are started once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nbaccel.testing import run_ranks
from nbaccel.train.raw_loop.part_numbers import PartNumbers
from train.raw_loop.programs import STEP, run_text, said_by

HALF = "about 1/2 of the value in one process, as it counts a rank's part of each batch: {}. Divide counts by counts"
TWICE = "about 2 times the value in one process, as the loss is the whole batch's, and the length of a batch"
OF_A_PART = "nbaccel: of a rank's part of each batch: {}\n"
MISLEADING = "numbers that the loop makes"

PROGRAMS = {
    "a loss and an evaluation": (
        f"""
for x, y in loader:
    loss = F.cross_entropy(model(x), y); {STEP}
print(loss.item())
right = 0
with torch.no_grad():
    for x, y in test:
        right += (model(x).argmax(1) == y).sum().item()
print(right / len(data), len(x))
""",
        (),
    ),
    "a sum by the length": (
        f"""
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y, reduction="sum"); {STEP}
    print(f"{{i}}: {{loss.item() / len(x):.3f}}")
""",
        (f"{TWICE} that of a rank's part: loss.item() / len(x). Divide by the loader's batch_size",),
    ),
    "a sum by a size that was kept": (
        """
for x, y in loader:
    loss = nn.CrossEntropyLoss(reduction="sum")(model(x), y); step(loss)
    n, _ = x.shape
print("%.3f" % (loss.item() / n))
""",
        ("loss.item() / n",),
    ),
    "a mean by the length": (
        f"""
total = 0.0
for x, y in loader:
    loss = criterion(model(x), y); {STEP}
    total += loss.item() * x.size(0)
total = total / len(loader.dataset)
print(total)
""",
        (HALF.format("total"),),
    ),
    "a mean that ends the loop": (
        f"""
for epoch in range(2):
    total = 0.0
    for x, y in loader:
        loss = criterion(model(x), y); {STEP}
        total += loss.item() * len(x)
    if total / 24 < 0.01:
        break
""",
        (HALF.format("total / 24"),),
    ),
    "a count that ends the loop": (
        f"""
seen, best = 0, 100.0
while seen < 20:
    total = 0.0
    for x, y in loader:
        if len(x) < 2: continue
        loss = criterion(model(x), y); {STEP}
        seen += len(x); total += loss.item()
    best = total if total < best else best
""",
        (HALF.format("seen"),),
    ),
    "answers": (
        f"""
right = seen = 0
for x, y in loader:
    out = model(x); loss = criterion(out, y); {STEP}
    _, found = torch.max(out, 1); right += torch.sum(found == y); seen += len(y)
print("accuracy", right.double() / len(data)); print(f"{{right / seen:.2f}}")
""",
        (HALF.format("right.double() / len(data)"), OF_A_PART.format("right / seen")),
    ),
    "functions": (
        """
def answers(out, y):
    return (out.argmax(1) == y).float().sum().item()
def batch(x, y):
    out = model(x); loss = criterion(out, y); optimizer.zero_grad(); loss.backward(); optimizer.step()
    return loss.item() * len(x), answers(out, y)
def epoch(loader):
    total = right = n = 0
    for x, y in loader:
        its, of_them = batch(x, y); total += its; right += of_them; n += len(x)
    return total / len(loader.dataset), right / n
loss, accuracy = epoch(loader)
print(loss, accuracy)
""",
        (HALF.format("loss"), OF_A_PART.format("accuracy")),
    ),
    "a loss read before its backward": (
        f"""
total = 0
for x, y in loader:
    loss = F.cross_entropy(model(x), y, reduction="sum"); total += loss.item(); {STEP}
print(total / len(data))
""",
        (HALF.format("total / len(data)"),),
    ),
    "a list and a count that are left": (
        f"""
seen, answers, losses = 0, [], []
for x, y in loader:
    out = model(x); loss = criterion(out, y); {STEP}
    seen += len(x); answers.extend(out.argmax(1).tolist()); losses.append(loss.item())
""",
        (HALF.format("seen"), OF_A_PART.format("answers")),
    ),
    "a meter": (
        f"""
class Meter:
    def __init__(self): self.total = self.n = 0
    def update(self, value, n): self.total += value * n; self.n += n
    @property
    def mean(self): return self.total / self.n
meter = Meter()
for x, y in loader:
    loss = criterion(model(x), y); {STEP}
    meter.update(loss.item(), x.size(0))
print(meter.mean)
""",
        (OF_A_PART.format("meter.mean"),),
    ),
    "next": (
        f"""
batches, hits = iter(loader), 0
for _ in range(5):
    try:
        x, y = next(batches)
    except StopIteration:
        batches = iter(loader); x, y = next(batches)
    out = model(x); loss = criterion(out, y); {STEP}
    hits += int((out.argmax(-1) == y).sum())
print(hits / 40)
""",
        (HALF.format("hits / 40"),),
    ),
    "a list that a function fills": (
        f"""
rows = []
def fit(epochs):
    for epoch in range(epochs):
        right = n = 0; lengths = []
        for x, y in loader:
            out = model(x); loss = criterion(out, y); {STEP}
            right += (out.argmax(1) == y).sum().item(); n += len(y); lengths.append(len(y))
        rows.append({{"epoch": epoch, "accuracy": right / n}})
fit(2)
""",
        (OF_A_PART.format("rows"),),
    ),
    "a list in an attribute": (
        f"""
class Trainer:
    def __init__(self): self.accuracies = []
    def epoch(self):
        right = n = 0
        for x, y in loader:
            out = model(x); loss = criterion(out, y); {STEP}
            right += (out.argmax(1) == y).sum().item(); n += len(y)
        self.accuracies.append(right / n)
trainer = Trainer()
trainer.epoch()
""",
        (OF_A_PART.format("self.accuracies"),),
    ),
    "tables": (
        f"""
confusion, seen, by_epoch = torch.zeros(3, 3), torch.zeros(3), torch.zeros(2)
for epoch in range(2):
    for x, y in loader:
        out = model(x); loss = criterion(out, y); {STEP}
        given = torch.zeros(len(y), 3); given[range(len(y)), y] = 1
        for t, p in zip(y, out.argmax(1)):
            confusion[t, p] += 1
        seen[y] = 1
    by_epoch[epoch] = loss.item()
""",
        (OF_A_PART.format("confusion, seen"),),
    ),
    "a metric of torchmetrics": (
        f"""
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy
accuracy, whole, losses = MulticlassAccuracy(3), MulticlassAccuracy(3), MeanMetric()
for x, y in loader:
    out = model(x); loss = criterion(out, y); {STEP}
    accuracy.update(out, y); losses(loss.item())
print(accuracy.compute().item(), losses.compute())
accuracy.reset()
with torch.no_grad():
    for x, y in test:
        accuracy(model(x), y); whole(model(x), y)
print(f"{{accuracy.compute()}} {{whole.compute()}}")
""",
        (OF_A_PART.format("accuracy.compute().item()"),),
    ),
    "a function that nobody has the source of": (
        f"""
from statistics import fmean
from sklearn.metrics import accuracy_score
for x, y in loader:
    out = model(x); loss = criterion(out, y); {STEP}
    print(accuracy_score(y, out.argmax(1)))
""",
        (OF_A_PART.format("accuracy_score(y, out.argmax(1))"),),
    ),
}


DECISIONS = {
    "a count": (
        f"""
for x, y in loader:
    loss = criterion(model(x), y)
    if (x[:, 0] > 0).sum() > 6: continue
    {STEP}
""",
        "line 13: (x[:, 0] > 0).sum() > 6",
    ),
    "a count that is a name's, and Python's": (
        f"""
for x, y in loader:
    loss = criterion(model(x), y)
    n = int((x > 0).sum().item())
    if 20 <= n and n < 30:
        loss = 2 * loss
    {STEP}
""",
        "line 14: 20 <= n",
    ),
    "a factor": (
        f"""
for x, y in loader:
    found = (y == 1).sum().item()
    loss = criterion(model(x), y) * (2.0 if found > 3 else 1.0)
    {STEP}
""",
        "line 13: found > 3",
    ),
    "a sum, in a function": (
        f"""
def loss_of(out, y):
    loss = F.cross_entropy(out, y, reduction="sum")
    if loss.item() > 9.0:
        return loss * 0.1
    return loss
for x, y in loader:
    loss = loss_of(model(x), y); {STEP}
""",
        "line 13: loss.item() > 9.0",
    ),
    "a size that no part has": (
        f"""
for x, y in loader:
    if x.shape[0] != loader.batch_size: continue
    loss = criterion(model(x), y); {STEP}
""",
        "line 12: x.shape[0] != loader.batch_size",
    ),
    "gradients": (
        """
def scale(by):
    for p in model.parameters(): p.grad.mul_(1 / by)
for x, y in loader:
    loss = F.cross_entropy(model(x), y, reduction="sum"); optimizer.zero_grad(); loss.backward(); scale(len(x))
    optimizer.step()
""",
        "line 12: p.grad.mul_(1 / by)",
    ),
    "nothing": (
        f"""
kept, limit, total = [], 2.0, 0.0
for x, y in loader:
    if len(x) < 2: continue
    summed = F.cross_entropy(model(x), y, reduction="sum")
    (0.5 * summed * (1 / len(x)) + criterion(model(x), y) * len(x) * 0.1).backward()
    optimizer.param_groups[0]["lr"] = 0.1 / loader.batch_size; total += summed.data * len(x) + torch.sum(y.data == 1)
    summed /= len(x); torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    out = model(x); loss = criterion(out, y); found = (y == 1).sum()
    if found == 0 or found.item() < 1 or not (y >= 0).any(): continue
    if loss.item() > 1000 or not torch.isfinite(loss): raise ValueError(loss)
    if found > 3: print("many"); kept.append(found)
    {STEP}
    if loss.item() < 1e-9 or loss.item() > limit * 1000: break
    right = (out.argmax(1) == y).sum().item()
    if right / len(x) > 2: break
if found > 3:
    limit = 1.0
""",
        "",
    ),
}
"""Programs, and the line and the number by which one decides so that its batches stay whole."""

LOSS, STEPS = "multiplies its loss", "scales its gradients or its steps"
SCALES = {
    "loss = F.cross_entropy(model(x), y); loss *= (y == 1).sum().item(); loss.backward()": LOSS,
    "(F.cross_entropy(model(x), y) * int((y == 1).sum()) * 0.1).backward()": LOSS,
    "loss = F.cross_entropy(model(x), y, reduction='sum') * len(x); scaler.scale(loss).backward()": LOSS,
    "(F.cross_entropy(model(x), y) / (y == 1).sum().item()).backward()": LOSS,
    "(F.cross_entropy(model(x), y, reduction='sum') * (0.5 / len(x))).backward()": "",
    "(F.cross_entropy(model(x), y) * len(x) * 0.1).backward()": "",
    "loss = F.cross_entropy(model(x), y); loss.backward(); total = loss * (y == 1).sum()": "",
    "p.grad /= max(int((y == 1).sum()), 1)": STEPS,
    "p -= 0.1 / len(x) * p.grad": STEPS,
    "w.data = w.data - 0.1 * gradient * (y == 1).sum()": STEPS,
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1 * len(x))": STEPS,
    "optimizer.param_groups[0]['lr'] = 0.01 * (y == 1).sum().item()": STEPS,
    "total += torch.sum(y.data == 1); gradient = torch.autograd.grad(model(x).sum(), w)": "",
    "p.grad *= 0.5; optimizer.param_groups[0]['lr'] = 0.1 * y.double().mean()": "",
}
"""Lines of a loop, and what it does by a count of its batch."""


@pytest.mark.parametrize("line", SCALES)
def test_a_loop_that_scales_by_a_count_of_its_batch_is_found(line: str) -> None:
    """Read at the first batch, in place of which the program takes what was found."""
    batches = zip(map(PartNumbers().decision, [2], [8]), [0], strict=True)
    namespace: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "loader": batches}
    run_text(line, f"for x, y in loader:\n    break\n    {line}\n", namespace)
    does = SCALES[line] and f"the loop {SCALES[line]} by a count or a sum of the batch"
    assert namespace["x"].partition(" (")[0] == does


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    return run_ranks(2, _all_of_them)[0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_that_differ_are_named_with_their_factor(name: str, said: dict[str, str]) -> None:
    wanted = PROGRAMS[name][1]
    for line in wanted:
        assert line in said[name]
    lines = [line for line in said[name].splitlines() if "part of each batch" in line or "of the value" in line]
    assert len(lines) <= len(wanted)
    assert "split over 2 ranks" in said[name]
    assert MISLEADING not in said[name]


@pytest.mark.parametrize("name", DECISIONS)
def test_a_loop_that_decides_by_a_count_of_its_batch_has_whole_ones(name: str, said: dict[str, str]) -> None:
    decides = DECISIONS[name][1]
    does = STEPS if name == "gradients" else "decides"
    why = f"the same work: the loop {does} by a count or a sum of the batch ({decides}). -n 1 does it once"
    assert (why if decides else "split over 2 ranks") in said[name]
    assert ("split over" in said[name]) is not bool(decides)


def test_numbers_of_own_batches_are_named(said: dict[str, str]) -> None:
    assert "nbaccel: of a rank's own batches: total\n" in said["each"]


def test_a_loop_of_a_library_has_a_line_with_the_librarys_name(said: dict[str, str]) -> None:
    assert "nbaccel: what fitting counts of a training batch, beside the loss, is of a rank's part\n" in said["library"]


def _all_of_them() -> dict[str, str]:
    torch.manual_seed(0)
    found = {name: said_by(name, text) for name, (text, _) in (PROGRAMS | DECISIONS).items()}
    found["each"] = said_by("each", PROGRAMS["a mean by the length"][0], batches="each")
    library: dict[str, Any] = {"__name__": "fitting.loops"}
    text = "def fit(model, loader, optimizer, criterion):\n    for x, y in loader:\n        "
    text += "loss = criterion(model(x), y); optimizer.zero_grad(); loss.backward(); optimizer.step()\n"
    exec(compile(text, "/usr/lib/site-packages/fitting/loops.py", "exec"), library)
    found["library"] = said_by("library", "fit(model, loader, optimizer, criterion)", **{"fit": library["fit"]})
    return found
