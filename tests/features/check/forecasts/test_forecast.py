"""The forecast of a whole run contains the truth: programs run whole and dry by the same manual clock."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from features.check.dry_run.timed_program import DryRun, run_dry, run_whole
from nbaccel.features.check.forecasts.forecast import Forecast, ForecastPart, forecast, measure_noise

PROGRAMS = {
    "epochs of batches, the last of which is short": """
        work(3)
        train = loader([4.0] * 250 + [1.0])
        for epoch in range(7):
            for size in train:
                work(0.1 * size)
                step()
            work(2)
        work(4)
    """,
    "an evaluation that is longer than its training": """
        train, test = loader(100, 0.01), loader(1000, 0.05)
        def evaluate():
            for x in test: work(0.2)
        for epoch in range(5):
            for x in train:
                work(0.1)
                step()
            evaluate()
    """,
    "saves every 5 epochs": """
        for epoch in range(23):
            for x in loader(50):
                work(0.1)
                step()
            if (epoch + 1) % 5 == 0: work(30)
    """,
    "while True, ended by a count of steps": """
        it = 0
        while True:
            if it % 50 == 0:
                for k in range(20): work(0.05)
            work(0.3)
            step()
            it += 1
            if it > 1000: break
    """,
    "sizes that are skewed 10:1": """
        train = loader([10.0 if i % 20 == 0 else 1.0 + i % 3 for i in range(200)] + [0.5])
        for epoch in range(4):
            for x in train:
                work(0.02 + 0.1 * x)
                step()
    """,
    "a warm-up that takes as long as the rest": """
        warm_up = 20
        for x in loader(200):
            work(0.1 + warm_up)
            step()
            warm_up = 0
    """,
    "steps that are counted over epochs": """
        train = loader(100)
        steps = 0
        for epoch in range(10**6):
            for x in train:
                work(0.1)
                step()
                steps += 1
                if steps % 90 == 0: work(9)
                if steps >= 730: break
            if steps >= 730: break
    """,
    "steps that are counted over epochs, in a function that returns": """
        def fit(train):
            steps = 0
            while True:
                for x in train:
                    work(0.1)
                    step()
                    steps += 1
                    if steps >= 730: return
        fit(loader(100))
    """,
    "a while over epochs that counts batches": """
        train = loader(100)
        steps = 0
        while steps < 1000:
            for x in train:
                work(0.1)
                step()
                steps += 1
    """,
    "a flag that ends the loop around": """
        train, steps, done = loader(100), 0, False
        while not done:
            for x in train:
                work(0.1)
                step()
                steps += 1
                if steps >= 730:
                    done = True
                    break
    """,
    "a second pass that is cut later than the first": """
        train, steps = loader(100, more=17), 0
        while True:
            for x in train:
                work(0.1)
                step()
                steps += 1
                if steps >= 730: break
            if steps % 300 == 0: work(9)
            if steps >= 730: break
    """,
    "a trainer of a library": """
        for fold in range(4):
            facts = {"evaluates": ["steps", 100], "saves": ["epoch", 0]}
            training(7, loader(100), facts, {-3: 5, -4: 2})
            work(1)
    """,
    "a trainer that says nothing of its saves": """
        training(7, loader(100), {"batches": 100}, {-3: 5, -4: 2})
    """,
    "no loader": """
        for i in range(5000):
            work(0.01)
            step()
            if i % 1000 == 0: work(4)
    """,
    "a loader that begins again and again": """
        def cycle(loader):
            while True:
                for x in loader: yield x
        for i, x in zip(range(3000), cycle(loader(40, 0.05))):
            work(0.1)
            step()
    """,
    "an iterator that is drawn from by hand": """
        train = loader(40, 0.05)
        for epoch in range(10):
            it = iter(train)
            while True:
                try: x = next(it)
                except StopIteration: break
                work(0.1)
                step()
    """,
    "an iterator that is drawn from by hand, and made again": """
        train = loader(40, 0.05)
        it, n = iter(train), 0
        while n < 500:
            try: x = next(it)
            except StopIteration:
                it = iter(train)
                x = next(it)
            work(0.1)
            step()
            n += 1
    """,
    "folds": """
        for fold in range(5):
            train, test = loader(30), loader(10)
            for epoch in range(4):
                for x in train: work(0.1); step()
                for x in test: work(0.05)
    """,
    "a loop of a library that leaves its loader after two batches": """
        import itertools
        train = loader(50)
        for epoch in range(9):
            losses = [work(0.1) for x in itertools.islice(train, 2)]
            step()
    """,
    "a loop of a library": """
        train = loader(50)
        for epoch in range(9):
            losses = [work(0.1) for x in train]
            step()
        x = next(iter(train))
    """,
    "two loaders side by side, of which the shorter one ends the loop": """
        a, b = loader(80), loader(50)
        for epoch in range(6):
            for x, y in zip(a, b):
                work(0.3)
                step()
    """,
    "rounds that are skipped by continue": """
        for i in range(1000):
            work(0.1)
            step()
            if (i + 1) % 100 != 0: continue
            work(20)
    """,
    "steps of the optimizer every 8 batches": """
        for epoch in range(5):
            for i, x in enumerate(loader(100)):
                work(0.1)
                if (i + 1) % 8 == 0:
                    work(0.5)
                    step()
    """,
    "a period of epochs inside of the loop over batches": """
        for epoch in range(20):
            for x in loader(100):
                work(0.1)
                step()
                if epoch % 4 == 0: work(0.3)
    """,
    "callbacks, and a loop that only draws pictures": """
        def log(i):
            if i % 10 == 0: work(1)
        i = 0
        for epoch in range(8):
            for x in loader(100):
                work(0.1)
                step()
                for callback in (log, lambda i: work(0.01)): callback(i)
                i += 1
            for k in range(100):
                if k % 10 == 0: work(0.5)
    """,
    "a period inside of a period": """
        i = 0
        while i < 3000:
            work(0.1)
            step()
            if i % 500 == 0:
                work(1)
                if i % 1000 == 0: work(5)
            i += 1
    """,
    "episodes": """
        episode = 0
        while True:
            episode += 1
            for t in range(100): work(0.01)
            step()
            if episode >= 200: break
    """,
    "a memory that is filled before the training begins": """
        seen = 0
        for episode in range(200):
            for t in range(100):
                work(0.01)
                seen += 1
                if seen > 500:
                    work(0.5)
                    step()
    """,
    "a memory that is filled in the loop that trains": """
        for i in range(20000):
            work(0.001)
            if i > 1000:
                work(0.1)
                step()
    """,
    "epochs of a generator": """
        def epochs_of(train, epochs):
            for epoch in range(epochs):
                for x in train:
                    work(0.1)
                    step()
                yield epoch
        for epoch in epochs_of(loader(100), 4):
            work(3)
    """,
    "a loop that ends by itself": """
        for i in range(4):
            work(i)
            step()
    """,
    "a search that is left at once": """
        for x in loader(100):
            work(1)
            break
    """,
}


def dry(text: str, monkeypatch: pytest.MonkeyPatch) -> DryRun:
    return run_dry(text, monkeypatch)


def half_width(found: Forecast) -> float:
    """Return half of the range of a forecast, relative to its middle."""
    assert found.high_s is not None
    return (found.high_s - found.low_s) / (found.high_s + found.low_s)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_forecast_contains_the_truth_and_is_narrow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = run_whole(PROGRAMS[name])
    found = dry(PROGRAMS[name], monkeypatch).forecast()
    assert found.high_s is not None
    assert found.low_s <= truth <= found.high_s, found
    assert found.high_s - found.low_s <= 0.4 * truth
    assert half_width(found) <= 0.2 * (1 + 1e-9)
    assert found.unknown == found.may_end_early == ()


def test_set_up_is_told_apart_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    run = dry("work(30)\nsample = next(iter(loader(9)))\nfor i in range(9): work(1); step()", monkeypatch)
    (whole,) = run.of_kind("whole")
    assert whole["setup_s"] == 30
    assert run.forecast().low_s > 30


def test_noise_of_the_machine_makes_the_range_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    run = dry("for i in range(1000): work(1); step()", monkeypatch)
    quiet, noisy = run.forecast(), run.forecast(noise=0.1)
    assert quiet.high_s is not None
    assert noisy.high_s is not None
    assert noisy.high_s - noisy.low_s == pytest.approx(quiet.high_s - quiet.low_s + 190, rel=0.03)
    assert half_width(noisy) <= 0.22 < half_width(run.forecast(noise=0.3))


def test_rounds_that_differ_make_the_range_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "for i in range(999): work([1, 5, 1, 6, 2, 9, 1][i % 7]); step()"
    found = dry(text, monkeypatch).forecast()
    assert half_width(found) > 0.2
    assert found.high_s is not None
    assert found.low_s < run_whole(text) < found.high_s


def test_no_range_goes_beyond_the_fastest_and_the_slowest_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "for i in range(10**6): work([9, 1, 60, 2, 1, 2, 3][i % 7]); step()"
    found = dry(text, monkeypatch).forecast(noise=0.4)
    assert found.high_s is not None
    assert 0.6e6 * 0.9 < found.low_s < 1e6
    assert 10e6 < found.high_s < 100e6
    assert dry(text, monkeypatch).forecast(noise=50.0).low_s > 0


def test_parts_that_ran_in_some_rounds_only_widen_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
    train, test = loader(100), loader(50)
    for epoch in range(8):
        for x in train: work(0.1); step()
        if epoch == 1:
            for x in test: work(0.5)
    """
    found = dry(text, monkeypatch).forecast()
    assert found.high_s is not None
    assert found.low_s < run_whole(text) < 80 + 8 * 25 < found.high_s
    assert half_width(found) > 0.2


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "loss = 5\nwhile loss > 1:\n    for x in loader(100): work(0.03); step()\n    loss *= 0.99",
            "the loop in line 2 ends by a condition: each round takes 3 s",
        ),
        (
            "for epoch in range(9):\n    for x in loader(50, has_length=False): work(0.25)",
            "the loop in line 2 ends with a loader that has no length: each round takes 0.25 s",
        ),
        (
            "for epoch in range(9): sum(work(0.25) or x for x in loader(50, has_length=False))",
            "the loader loader has no length: each batch takes 0.25 s",
        ),
        (
            "import itertools\nfor i in itertools.count(): work(2); step()",
            "the loop in line 2 goes over an iterator whose length is not known, and each round takes 2 s: a list, a "
            "range or accelerator.epochs has one",
        ),
        (
            "def rounds():\n    yield from range(50)\nfor i in rounds(): work(2); step()",
            "the loop in line 3 goes over an iterator whose length is not known, and each round takes 2 s: a list, a "
            "range or accelerator.epochs has one",
        ),
    ],
)
def test_a_loop_without_a_number_of_rounds_is_named(text: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = dry(text, monkeypatch).forecast()
    assert found.unknown == (sentence,)
    assert found.high_s is None
    assert found.low_s > 0


def test_a_loop_of_another_file_is_named_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run = dry("loss = 5\nwhile loss > 1: work(2); step()", monkeypatch)
    for entry in run.table:
        entry["file"] = "/home/user/train.py"
    assert run.forecast().unknown == ("the loop in line 2 of train.py ends by a condition: each round takes 2 s",)


def test_early_stopping_is_named_and_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
    bad = 0
    for epoch in range(20):
        for x in loader(100): work(0.1); step()
        if epoch: bad += 1
        if bad >= 3: break
    """
    found = dry(text, monkeypatch).forecast()
    assert found.may_end_early == ("the loop in line 3 may end earlier, by line 6",)
    assert found.low_s < 200 < (found.high_s or 0)


def test_the_earlier_of_two_ends_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for most, fewer in [(700, 900), (900, 700)]:
        text = f"""
        i = 0
        while i < {most}:
            work(1)
            step()
            i += 1
            if i >= {fewer}: break
        """
        found = dry(text, monkeypatch).forecast()
        assert found.low_s < 700 < (found.high_s or 0)


def test_parts_say_where_the_time_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = dry(PROGRAMS["an evaluation that is longer than its training"], monkeypatch).forecast()
    evaluation, training, epochs = found.parts
    assert (evaluation.rounds, evaluation.runs) == (1000, 5)
    assert evaluation.seconds == pytest.approx(1250, rel=0.01)
    assert (training.rounds, training.runs) == (100, 5)
    assert training.seconds == pytest.approx(55, rel=0.01)
    assert (epochs.rounds, epochs.runs) == (5, 1)
    assert sum(part.seconds for part in found.parts) == pytest.approx(run_whole(PROGRAMS[list(PROGRAMS)[1]]), rel=0.01)


def test_workers_hide_what_they_load_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    run = dry("for x in loader(1000): work(0.1); step()", monkeypatch)
    (loop,) = run.of_kind("loop")
    for made_s, seconds in [(0.2, 100), (1.6, 400)]:
        for each in loop["passes"]:
            each["workers"], each["made_s"] = 4, made_s
        found = run.forecast()
        assert found.low_s < seconds < (found.high_s or 0)


def test_records_of_a_rank_that_was_killed_give_what_they_have() -> None:
    assert forecast([], []) == Forecast(0.0, 0.0)
    began = {"kind": "loop_began", "id": 1, "number": 0, "outer": 0, "outer_round": 0}
    assert forecast([began, {"kind": "setup", "seconds": 5.0}], []) == Forecast(0.0, 0.0)


def test_noise_is_the_spread_of_the_same_computation() -> None:
    class Uneven:
        """A clock by which every other computation takes twice as long."""

        now, calls = 0.0, 0

        def __call__(self) -> float:
            self.calls += 1
            self.now += 0.1 * (1 + self.calls % 4 // 3)
            return self.now

    assert measure_noise(5.0, Uneven()) > 0.2
    now = iter(range(10**6))
    assert measure_noise(50.0, lambda: float(next(now))) == 0


# --- rounds


@pytest.mark.parametrize(
    ("text", "rounds"),
    [
        ("n = 0\nwhile n < 40:\n    n += 1\n    step()", 40),
        ("n = 0\nwhile n <= 40:\n    n += 1\n    step()", 41),
        ("n = 40\nwhile n > 0:\n    n -= 1\n    step()", 40),
        ("n = 0\nwhile 40 > n:\n    n += 1\n    step()", 40),
        ("n = 3\nwhile n < 40:\n    n += 5\n    step()", 8),
        ("n = 0\nwhile not n >= 40 and True:\n    n += 1\n    step()", 40),
        ("n = 0\nwhile True:\n    step()\n    n += 1\n    if n == 40: break", 40),
        ("n = 0\nwhile True:\n    if n == 40: break\n    step()\n    n += 1", 40),
        ("n = 0\nwhile True:\n    step()\n    n += 1\n    if n > 40: break", 41),
        ("n, most = 0, 40\nwhile True:\n    step()\n    n += 1\n    if most is not None and n >= most: break", 40),
        ("n = 0\nwhile True:\n    step()\n    n += 1\n    if n < 40: continue\n    else: break", 40),
        ("a, b = 0, 80\nwhile a < b:\n    a += 1\n    b -= 1\n    step()", None),
        ("n = 1\nwhile n < 10**9:\n    n *= 2\n    step()", None),
    ],
)
def test_a_counter_tells_when_a_loop_ends(text: str, rounds: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    run = dry(text, monkeypatch)
    names: dict[str, Any] = {"step": lambda: steps.append(1)}
    steps: list[int] = []
    exec(textwrap.dedent(text), names)
    (part,) = run.forecast().parts
    assert part.rounds == rounds
    assert rounds in (None, len(steps))


def test_what_a_loop_does_is_counted_for_the_whole_run() -> None:
    part = ForecastPart(50.0, 2.0, 1.0, number=3, had=4.0)
    branch = ForecastPart(None, 10.0, 1.0, number=4, had=1, is_branch=True)
    unknown = ForecastPart(None, 1.0, 1.0, number=5, had=2.0)
    found = Forecast(1.0, 2.0, (part, branch, unknown))
    assert found.times(3, 4) == 100.0
    assert found.times(4, 1) == 10.0
    assert found.times(5, 1) is None
    assert found.times(9, 1) is None


def test_a_loop_of_a_function_is_counted_for_all_its_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
    def fit(epochs):
        for epoch in range(epochs):
            for x in loader(100): work(0.1); step()
    fit(10)
    for again in range(1): fit(50)
    """
    assert dry(text, monkeypatch).forecast().times(0, 4) == pytest.approx(60)
