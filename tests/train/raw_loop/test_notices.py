"""Lines before the first step name what is the user's, say what to do, and are true; each is read here."""

from __future__ import annotations

import pytest

from nbaccel.errors import RanksFailed
from nbaccel.testing import run_ranks
from train.raw_loop.programs import STEP, said_by

WHOLE = (
    "whole in each of 2 ranks, the same work: {}. -n 1 does it once; --batches each gives each rank batches of its own"
)

ENGINE = """
pair = DataLoader(TensorDataset(torch.randn(10, 6), torch.arange(10) % 3), 8)
def step(x, y):  # as skorch does it: the mode is set once the batch is there
    model.train(); loss = criterion(model(x), y); optimizer.zero_grad(); loss.backward(); optimizer.step()
for epoch in range(4):
    for x, y in pair:
        step(x, y)
    model.eval()
    with torch.no_grad():
        for x, y in test:
            model(x)
"""

PROGRAMS = {
    "an engine that trains in its second batch first": (
        ENGINE,
        "pair: each of 2 batches split over 2 ranks",
        "whole in",
    ),
    "single samples": (
        f"""
ones = DataLoader(data, 1)
for epoch in range(2):
    for x, y in ones:
        loss = criterion(model(x), y); {STEP}
""",
        f"ones: {WHOLE.format('its batches have fewer than 2 samples')}",
        "split over",
    ),
    "an operation of its own": (
        f"""
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(context, x): return x * 2
    @staticmethod
    def backward(context, gradient): return gradient * 2
for x, y in loader:
    loss = Twice.apply(criterion(model(x), y)); {STEP}
""",
        "its parts cannot be added up after twicebackward",
        "not known",
    ),
    "a number of the batch in its loss": (
        f"""
for x, y in loader:
    each = F.cross_entropy(model(x), y, reduction="none"); loss = (each - each.mean()).pow(2).mean(); {STEP}
""",
        f"loader: {WHOLE.format('the loss goes on with a mean over the whole batch')}",
        "used further",
    ),
    "a search over parameters": (
        f"""
for trial in range(12):
    model = nn.Sequential(nn.Linear(6, 3 + trial % 6)); optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in loader:
        loss = criterion(model(x), y); {STEP}
""",
        "loader: each of 3 batches split over 2 ranks; gradients of ",
        "342",
    ),
}


UNSEEDED = f"""
import random
optimizer = torch.optim.SGD(model.parameters(), random.SystemRandom().random())
for x, y in loader:
    loss = criterion(model(x), y); {STEP}
"""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    return run_ranks(2, _all_of_them)[0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_line_says_what_is_done_and_what_to_do(name: str, said: dict[str, str]) -> None:
    _, wanted, unwanted = PROGRAMS[name]
    assert wanted in said[name]
    assert unwanted not in said[name]
    assert max(map(len, said[name].splitlines())) < 260


def test_a_refusal_names_a_seed_and_the_ways_to_search() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, said_by, "rates", UNSEEDED)
    assert "step with different learning rates (rank 0: " in str(caught.value)
    assert "as a sampler of hyperparameters or default_rng(), give it one; --sweep runs" in str(caught.value)
    assert "and with --independent each rank trains its own" in str(caught.value)
    assert "prepare" not in str(caught.value).partition("the ranks train one model")[2].partition("its own")[0]


def _all_of_them() -> dict[str, str]:
    return {name: said_by(name, text) for name, (text, *_) in PROGRAMS.items()}
