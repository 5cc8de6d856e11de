"""Names that hold times, or the number of a rank, told by the text of a cell."""

from __future__ import annotations

import ast
import textwrap
import time
from typing import Any

import pytest

from nbaccel.features.check.incomparable_names import incomparable_names


def epoch_time(start, end):  # type: ignore[no-untyped-def]
    seconds = end - start
    return int(seconds / 60), int(seconds % 60)


def fit_one(model):  # type: ignore[no-untyped-def]
    began = time.time()
    loss = model(1)
    return loss, time.time() - began


def fit_twice(model):  # type: ignore[no-untyped-def]
    loss, first = fit_one(model)
    loss, second = fit_one(model)
    return {"loss": loss}, first + second


CELLS = {
    "differences": (
        """
        start_time = time.time()
        loss = train(model)
        end_time = time.time()
        total_train_time = end_time - start_time
        print(f"{total_train_time / 60:.1f} min, loss {loss}")
        """,
        {"start_time", "end_time", "total_train_time"},
    ),
    "a function of times alone": (
        """
        began = perf_counter()
        loss = train(model)
        minutes, seconds = epoch_time(began, perf_counter())
        shown = str(datetime.timedelta(seconds=int(round(perf_counter() - began))))
        """,
        {"began", "minutes", "seconds", "shown"},
    ),
    "sums, lists and rates": (
        """
        times, losses, total = [], [], 0.0
        for epoch in range(3):
            tick = time.monotonic()
            losses.append(train(model))
            times.append(time.monotonic() - tick)
            total += times[-1]
            rate = len(loader.dataset) / times[-1]
        mean = np.mean(times)
        hours = [each / 3600 for each in times]
        best = min(losses)
        """,
        {"tick", "times", "total", "rate", "mean", "hours", "each"},
    ),
    "parts of a history": (
        """
        history = {"loss": [], "seconds": []}
        scores = {"loss": []}
        began = time.time()
        history["seconds"].append(time.time() - began)
        scores["loss"].append(train(model))
        """,
        {"history", "began"},
    ),
    "a result of a model that gets a time is none": (
        """
        began = time.time()
        noise = model(x, began)
        time = torch.rand(7)
        steps = model(time)
        """,
        {"began"},
    ),
    "functions that measure": (
        """
        def run(model):
            start = time.time()
            score = test(model)
            return score, time.time() - start
        score, took = run(model)
        loss, spent = fit_one(model)
        report, spent_twice = fit_twice(model)
        both = fit_one(model)
        start = 7
        """,
        {"took", "spent", "spent_twice", "both"},
    ),
    "dates": (
        """
        now = datetime.now()
        name = now.strftime("%Y") + "-run"
        seconds = (datetime.now() - now).total_seconds()
        """,
        {"now", "name", "seconds"},
    ),
    "numbers of ranks": (
        """
        rank = dist.get_rank()
        local, count = int(os.environ.get("LOCAL_RANK", 0)), 7
        device = torch.device(f"cuda:{rank}")
        is_main = accelerator.is_main_process
        is_first = rank == 0
        part = data[rank::world]
        score = test(part)
        world = int(os.environ["WORLD_SIZE"])
        """,
        {"rank", "local", "device", "is_main", "is_first"},
    ),
    "methods of classes": (
        """
        class Trainer:
            def fit(self):
                self.began = time.time()
                self.loss = train(model)
                return self.loss
        trainer = Trainer()
        loss = trainer.fit()
        """,
        set(),
    ),
}


@pytest.mark.parametrize("cell", CELLS)
def test_names_that_differ_by_design_are_told_by_the_text(cell: str) -> None:
    text, names = CELLS[cell]
    assert incomparable_names(ast.parse(textwrap.dedent(text)), globals()) == names


def test_clocks_are_known_by_the_names_under_which_they_were_imported() -> None:
    text = "from timeit import default_timer as now_s\nbegan = now_s()\nended = tick()\nloss = fit()"
    assert incomparable_names(ast.parse(text), {"tick": time.perf_counter, "fit": sum}) == {"began", "ended"}


def test_functions_without_a_text_and_cells_without_one_have_no_names() -> None:
    namespace: dict[str, Any] = {}
    exec("def f(x): return x", namespace)
    assert incomparable_names(ast.parse("y = f(1)"), namespace) == set()
    assert incomparable_names(ast.parse(""), {}) == set()
    long = " + ".join(["a"] * 600)
    assert incomparable_names(ast.parse(f"text = {long}; rank = dist.get_rank()"), {}) == {"rank"}
