"""The report of a check, from what ranks have recorded: which lines it has, and which of them are red."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from nbaccel.base.hardware import Gpu, Platform
from nbaccel.base.settings import RunSettings
from nbaccel.features.check.findings import DryRunResult, FoundError
from nbaccel.features.check.forecasts.trainer_counts import SAVE
from nbaccel.features.check.report import CheckReport
from nbaccel.launching.ipc.spec import Devices, Start
from nbaccel.launching.plan import LaunchPlan
from nbaccel.launching.tasks.cell_code import CellSource
from nbaccel.options.run_options import RunOptions

CODE = "\nfor epoch in range(9):\n    train()\nif rare:\n    evaluate()\nsave()\n"
SOURCE = CellSource(CODE, "Cell In[7]")
ALL = [2, 3, 4, 5, 6]


def plan(devices: Devices | None = None, **options: Any) -> LaunchPlan:
    start = Start("fork", "the notebook has not used CUDA")
    return LaunchPlan(RunOptions(**options), devices or Devices(2), start, RunSettings(mixed_precision="no"), 1)


def found(
    *records: Mapping[str, Any],
    reached: Sequence[int] = ALL,
    facts: Sequence[Mapping[str, Any]] = ({}, {}),
    error: FoundError | None = None,
    free_bytes: int = 10**10,
    **more: Any,
) -> DryRunResult:
    whole = [
        {"kind": "table", "table": []},
        *records,
        {"kind": "end", "reached": list(reached), "left": ""},
    ]
    return DryRunResult(
        [whole, [{"kind": "table", "table": []}]], facts, error, 2.0, 0.0, lambda path: free_bytes, **more
    )


def said(result: DryRunResult, **options: Any) -> list[str]:
    return str(CheckReport.of(result, SOURCE, plan(**options))).splitlines()


def test_a_cell_without_faults_has_ok_lines_alone() -> None:
    assert said(found()) == ["ok: the cell comes to its end (2 ranks, set-up 0 s, dry run 2 s)"]


def test_lines_that_were_not_reached_are_yellow() -> None:
    result = found(reached=[2, 3, 4, 6])
    assert said(result)[0] == "yellow: not reached: line 5"
    result.records[1].append({"kind": "end", "reached": [5]})  # type: ignore[attr-defined]
    assert not [line for line in said(result) if "not reached" in line]


def test_an_error_is_red_with_its_line_and_what_follows_is_not_reached() -> None:
    error = FoundError("NameError: name 'x' is not defined", "all 2 ranks", "Cell In[7]", 4, "What to do.\nAnd more.")
    lines = said(found(error=error))
    assert lines[:3] == [
        "red: line 4, all 2 ranks: NameError: name 'x' is not defined",
        "  What to do.",
        "  And more.",
    ]
    assert lines[3] == "yellow: not reached: line 6"
    assert not [line for line in lines if "comes to its end" in line]


@pytest.mark.parametrize(
    ("text", "reached", "level"),
    [
        ("NameError: name 'final' is not defined", [1, 2, 3], "yellow"),
        ("UnboundLocalError: cannot access local variable 'final' where it is not", [1, 2, 3], "yellow"),
        ("NameError: name 'final' is not defined", [1, 2, 3, 4], "red"),
        ("NameError: name 'fianl' is not defined", [1, 2, 3], "red"),
        ("NameError: name 'late' is not defined", [1, 2, 3], "red"),
    ],
)
def test_a_name_that_the_last_epoch_would_bind_is_yellow(text: str, reached: list[int], level: str) -> None:
    code = (
        "for epoch in range(9):\n    fit()\n    if epoch == 8:\n        final = 1\nprint(final)\nif x:\n    late = 1\n"
    )
    error = FoundError(text, "all 2 ranks", "Cell In[7]", 5)
    loop = {"kind": "loop", "number": 0, "total": 9, "rounds": 2}
    result = found(loop, error=error, reached=reached)
    (line,) = [
        each for each in CheckReport.of(result, CellSource(code, "Cell In[7]"), plan()).lines if text in each.text
    ]
    assert line.level == level


def test_an_error_in_another_file_names_the_file() -> None:
    error = FoundError("ValueError: no", "rank 1", "/work/data.py", 12)
    assert said(found(error=error))[0] == "red: /work/data.py, line 12, rank 1: ValueError: no"


def test_of_a_rank_that_died_the_loop_is_said_that_it_was_in() -> None:
    error = FoundError("rank 1 of 2 was killed by SIGKILL", "", rank=1)
    result = found(error=error)
    entry = {"number": 0, "file": "Cell In[7]", "line": 2, "head": "for epoch in range(9)"}
    result.records[0][0]["table"] = [entry, {**entry, "number": 1, "file": "/w/fit.py"}]  # type: ignore[index]
    assert "was in the loop" not in str(said(result))
    for number, place in enumerate(("line 2", "line 2 of /w/fit.py")):
        result.records[1].append({"kind": "loop_began", "id": number + 1, "number": number})  # type: ignore[attr-defined]
        assert said(result)[1] == f"  rank 1 was in the loop in {place}: for epoch in range(9)"


def test_memory_that_runs_out_at_the_longest_batch_is_said_so() -> None:
    error = FoundError("torch.OutOfMemoryError: no room", "rank 0", "Cell In[7]", 3, is_memory=True)
    peak = {"kind": "peak", "peaks": {}, "batch": {"kind": "longest", "size": 512.0}}
    assert said(found(peak, error=error))[0].startswith(
        "red: line 3, rank 0: out of memory at the longest batch (size 512): torch.OutOfMemoryError"
    )


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("OSError: cannot find the file, and offline mode is enabled", ""),
        (
            "OSError: We couldn't connect to 'https://huggingface.co' to load the files",
            "see how to run in offline mode",
        ),
        ("LocalEntryNotFoundError: not in the disk cache and outgoing traffic has been disabled.", ""),
    ],
)
def test_what_needs_the_network_is_yellow(text: str, more: str) -> None:
    error = FoundError(text, "all 2 ranks", "Cell In[7]", 3, more)
    assert said(found(error=error))[0].startswith("yellow: line 3, all 2 ranks: it needs the network")


@pytest.mark.parametrize(
    ("count", "is_of_cuts"), [(24, True), (48, True), (33, True), (32, False), (40, False), (1000, False)]
)
def test_an_error_about_the_number_of_samples_of_a_cut_loader_is_yellow(count: int, is_of_cuts: bool) -> None:
    cut = {"kind": "cut", "place": "f:3", "number": 0, "samples": 24, "last_samples": 8, "remainder": 1}
    text = f"RuntimeError: The size of tensor a ({count}) must match the size of tensor b (500)"
    result = found(cut, error=FoundError(text, "all 2 ranks", "Cell In[7]", 4))
    result.records[1].append(cut)  # type: ignore[attr-defined]
    line = said(result)[0]
    assert line.startswith("yellow: line 4" if is_of_cuts else "red: line 4")
    assert (f"; {count} is what the rounds of this check come to" in line) == is_of_cuts


@pytest.mark.parametrize(
    ("epochs", "losses", "is_of_cuts"),
    [(100, 2, True), (101, 3, True), (400, 7, True), (40, 3, True), (100, 5, False), (99, 2, False)],
)
def test_an_error_about_the_rounds_of_cut_loops_is_yellow(epochs: int, losses: int, is_of_cuts: bool) -> None:
    rounds = [(0, 10, 2), (1, 100, 2), (2, 40, 3), (2, 40, 4)]
    loops = [{"kind": "loop", "number": each[0], "total": each[1], "rounds": each[2]} for each in rounds]
    shapes = f"({epochs},) and ({losses},)"
    text = f"ValueError: x and y must have same first dimension, but have shapes {shapes}"
    line = said(found(*loops, error=FoundError(text, "all 2 ranks", "Cell In[7]", 4)))[0]
    assert line.startswith("yellow: line 4" if is_of_cuts else "red: line 4"), line


def test_a_small_number_in_an_error_is_not_taken_for_one_of_samples() -> None:
    cut = {"kind": "cut", "place": "f:3", "number": 0, "samples": 3, "last_samples": 1, "remainder": -1}
    error = FoundError("RuntimeError: expected input to have 3 channels", "rank 0", "Cell In[7]", 4)
    assert said(found(cut, error=error))[0].startswith("red: ")


def test_a_value_of_out_that_depends_on_the_rank_is_red_and_others_are_yellow() -> None:
    facts = [
        {"seen": {"acc": ["1", "0.5"], "loss": ["3", "2.0"]}},
        {"seen": {"acc": ["2", "0.6"], "loss": ["3", "2.0"]}},
    ]
    assert said(found(facts=facts), out=("acc",))[0].startswith(
        "red: acc depends on the rank (0.5 in rank 0, 0.6 in rank 1)"
    )
    assert said(found(facts=facts))[0] == "yellow: differs between the ranks, and the notebook gets that of rank 0: acc"
    assert not [line for line in said(found(facts=facts), out=("loss",)) if "differs" in line or "depends" in line]


def test_times_of_ranks_are_not_compared() -> None:
    facts = [{"seen": {"took": ["1", "1.5"], "acc": ["3", "2.0"]}}, {"seen": {"took": ["2", "1.6"], "acc": ["4", "1"]}}]
    result = found(facts=facts, incomparable={"took"})
    assert said(result)[0].endswith("gets that of rank 0: acc")
    assert not [line for line in said(result, out=("took",)) if "took" in line]


def test_values_of_a_batch_differ_by_design() -> None:
    code = "\nfor epoch in range(9):\n    for x in loader:\n        loss = step(x)\n    accuracy = test()\n"
    facts = [
        {"seen": {"accuracy": ["1", "0.5"], "loss": ["3", "2.0"]}},
        {"seen": {"accuracy": ["2", "0.6"], "loss": ["4", "3.0"]}},
    ]
    report = CheckReport.of(found(facts=facts), CellSource(code, "Cell In[7]"), plan())
    assert str(report.lines[0]).endswith("gets that of rank 0: accuracy")


def test_a_gather_is_named_once() -> None:
    gather = {"kind": "gather", "file": "Cell In[7]", "line": 3, "rows": 64, "repeated": 27}
    lines = said(found(gather, gather))
    assert lines[0].startswith("red: line 3: accelerator.gather counts 27 samples twice")
    assert sum("gather" in line for line in lines) == 1


def test_a_gather_whose_samples_are_cut_off_by_hand_is_yellow() -> None:
    gather = {"kind": "gather", "file": "Cell In[7]", "line": 3, "rows": 64, "repeated": 27}
    by_hand = "if step == len(loader) - 1:\n    found = found[: len(loader.dataset) - samples_seen]\n"
    for code, level in [(by_hand, "yellow"), ("found = found[:5]\ncount = len(found[1])\n", "red")]:
        report = CheckReport.of(found(gather), CellSource(code, "Cell In[7]"), plan())
        (line,) = [each for each in report.lines if "accelerator.gather counts" in each.text]
        assert line.level == level
        assert ("unless they are cut off afterwards" in line.text) == (level == "yellow")


def test_saves_that_fill_the_disk_are_red() -> None:
    save = {"kind": "save", "path": "/data/model_1.pt", "bytes": 10**9, "seconds": 0.5, "loops": []}
    (line,) = [line for line in said(found(save, free_bytes=10**8)) if "save" in line]
    assert line.startswith("red: a save to /data")
    assert (
        "has 1.0 GB and takes 500 ms, 1 time in the whole run: that is 1.0 GB, and the disk has 100.0 MB free" in line
    )
    (line,) = [line for line in said(found(save)) if "save" in line]
    assert line.startswith("ok: ")


def test_saves_under_names_that_count_up_add_up_and_others_replace_each_other() -> None:
    def saves(*names: str) -> str:
        records = [{"kind": "save", "path": f"/data/{n}", "bytes": 10**9, "seconds": 0.5, "loops": []} for n in names]
        (line,) = [line for line in said(found(*records, free_bytes=15 * 10**8)) if "save" in line]
        return line

    assert "that is 2.0 GB, and the disk has 1.5 GB free" in saves("model_1.pt", "model_2.pt")
    assert saves("model.pt", "model.pt").startswith("ok: ")


def test_of_a_run_that_has_failed_the_number_of_saves_is_not_known() -> None:
    branch = {
        "kind": "branch",
        "id": 1,
        "number": 3,
        "outer": 0,
        "outer_round": 0,
        "seconds": 1.0,
        "own_s": 1.0,
    }
    save = {"kind": "save", "path": "/data/model.pt", "bytes": 10**9, "seconds": 0.5, "loops": [3]}
    whole = {"kind": "whole", "seconds": 1.0, "setup_s": 0.0}
    records = [branch, save, whole, {"kind": "root", "own_s": 0.0}]
    assert "takes 500 ms, 1 time in the whole run" in "".join(said(found(*records)))
    failed = said(found(*records, error=FoundError("ValueError: no", "rank 0")))
    assert [line for line in failed if "takes 500 ms; " in line], failed


ALL_LEFT = [f"/data/model_{number}.pt" for number in range(1, 10)]


@pytest.mark.parametrize(
    ("left", "keeps", "needed"),
    [([], None, "9.0 GB"), (ALL_LEFT[-1:], None, "2.0 GB"), (ALL_LEFT, None, "9.0 GB"), (ALL_LEFT, 4, "5.0 GB")],
    ids=["all have other names", "the one before is deleted", "none is deleted", "a project keeps four"],
)
def test_saves_that_do_not_stay_do_not_add_up(left: Sequence[str], keeps: int | None, needed: str) -> None:
    of_one = {"kind": "save", "bytes": 10**9, "seconds": 0.5, "loops": [], "keeps": keeps}
    saves = [of_one | {"path": path} for path in ALL_LEFT]
    lines = said(found(*saves, {"kind": "saves_left", "paths": left}, free_bytes=0))
    assert f"9 times in the whole run: that is {needed}, and the disk has" in "".join(lines), lines


def test_a_trainer_says_how_many_saves_it_keeps() -> None:
    save = {"kind": "save", "path": "/data/checkpoint-3/model.pt", "bytes": 10**9, "seconds": 0.5}
    saves = [save | {"loops": [SAVE]}, save | {"path": "/other/model.pt", "loops": []}]
    trained, other = found(*saves, {"kind": "trainer", "keeps": 2}).saves()
    assert (trained.keeps, other.keeps) == (2, None)


def test_files_of_one_save_are_one_line_and_numbers_do_not_part_them() -> None:
    saves = [
        {"kind": "save", "path": f"/data/checkpoint-{step}/{name}", "bytes": size, "seconds": 0.25, "loops": []}
        for step in (3, 6)
        for name, size in (("model.safetensors", 3000), ("optimizer.pt", 6000))
    ]
    (line,) = [line for line in said(found(*saves)) if "save" in line]
    assert "a save to /data/checkpoint-6 has 9 kB and takes 500 ms, 2 times in the whole run" in line


def times(place: str = "fit:3", number: int = 0, **more: Any) -> dict[str, Any]:
    return {"kind": "step_times", "batches": 3, "name": "loader", "place": place, "number": number, **more}


def test_a_batch_is_one_of_the_training() -> None:
    training = times(seconds={"forward": 0.1, "backward": 0.15, "optimizer": 0.05})
    evaluation = times("test:9", 1, seconds={"forward": 8.0}, batches=40)
    whole = times("", seconds={"program": 90.0}, batches=0)
    lines = said(found(training, evaluation, whole))
    assert "ok: a batch takes 100 ms: forward 33%, backward 50%, optimizer 17%" in lines
    assert "ok: a batch takes 200 ms: forward 100%" in said(found(evaluation, whole))


def test_a_slow_loader_is_worth_a_line() -> None:
    lines = said(found(times(seconds={"loader": 0.9, "program": 0.3})))
    assert lines[0].startswith("yellow: loader takes 75% of each batch")
    quick = said(found(times(seconds={"loader": 0.0009, "program": 0.0003})))
    assert "ok: a batch takes 0.4 ms: loader 75%, your own code 25%" in quick
    assert not [line for line in quick if line.startswith("yellow")]
    assert "ok: a batch takes 400 ms: loader 75%, your own code 25%" in lines


def test_a_batch_that_is_drawn_alone_does_not_show_a_step() -> None:
    """``next(iter(loader))`` leaves its pass before the model is called."""
    look = {"kind": "step_times", "name": "loader", "batches": 1, "seconds": {"loader": 0.9, "program": 0.1}}
    assert not [line for line in said(found(look)) if "batch" in line]
    loop = {**look, "seconds": {"loader": 0.1, "forward": 0.3}}
    assert "ok: a batch takes 400 ms: loader 25%, forward 75%" in said(found(look, loop))


def test_memory_is_said_against_the_device() -> None:
    gpu = Gpu(0, "GPU-0", "Tesla T4", 15 * 10**9, 0, (7, 5))
    peak = {"kind": "peak", "peaks": {"device_reserved": {"bytes": 149 * 10**8, "batch": {"kind": "longest"}}}}
    report = CheckReport.of(found(peak), SOURCE, plan(Devices(1, (gpu,))))
    assert "yellow: memory at the longest batch: 14.3 GB to 16.1 GB of 15.0 GB on the device, which may" in str(report)


def test_of_a_device_others_have_a_part() -> None:
    gpu = Gpu(0, "GPU-0", "Tesla T4", 16 * 10**9, 0, (7, 5))
    peak = {"kind": "peak", "room": 14 * 10**9, "peaks": {"device_reserved": {"bytes": 135 * 10**8, "batch": None}}}
    report = str(CheckReport.of(found(peak), SOURCE, plan(Devices(1, (gpu,)))))
    assert (
        "yellow: memory: 13.0 GB to 14.6 GB of 16.0 GB on the device, where CUDA itself and other processes" in report
    )
    assert "have 2.0 GB, which may be too little: a smaller batch_size leaves more of it" in report
    peak = {"kind": "peak", "room": 157 * 10**8, "peaks": {"device_reserved": {"bytes": 10**9, "batch": None}}}
    report = str(CheckReport.of(found(peak), SOURCE, plan(Devices(1, (gpu,)))))
    assert "ok: memory: 960.0 MB to 1.1 GB of 16.0 GB on the device" in report
    assert "other processes" not in report


def test_the_time_is_said_against_the_limit_or_the_session() -> None:
    records = [
        {"kind": "whole", "seconds": 1.0, "setup_s": 0.0},
        {"kind": "root", "own_s": 100_000.0},
    ]
    (line,) = [line for line in said(found(*records), time_limit=3600.0) if "whole run" in line]
    assert line.startswith("red: the whole run takes 26 h ")
    assert "and --time-limit ends it after 1 h: fewer epochs" in line
    report = CheckReport.of(found(*records), SOURCE, plan(), platform=Platform.KAGGLE_BATCH)
    (line,) = [str(line) for line in report.lines if "whole run" in line.text]
    assert line.startswith("red: ")
    assert "a session of Kaggle ends it after 12 h" in line


def test_a_loop_that_was_left_has_no_forecast() -> None:
    whole = {"kind": "whole", "seconds": 1.0, "setup_s": 0.0}
    result = found(whole, {"kind": "root", "own_s": 1.0})
    result.records[0][-1]["left"] = "a loop of a library"  # type: ignore[index]
    lines = said(result)
    assert "yellow: the time cannot be forecast: a loop was left, and its rounds are not known" in lines
    assert not [line for line in lines if "whole run" in line or "comes to its end" in line]


def test_a_run_that_may_end_early_is_not_called_too_long() -> None:
    seen = {"op": ">=", "values": [[1, 0.9, 3, True], [2, 0.4, 3, True], [3, 0.7, 3, True]]}
    loop = {
        "kind": "loop", "id": 1, "number": 0, "outer": 0, "outer_round": 0, "end": "cut", "total": 1000, "rounds": 3,
        "timed": 3, "seconds": 300.0, "start_s": 0.0, "own_s": 300.0, "waited_s": 0.0,
        "kept": [[100.0, 0.0, None, False]] * 3, "is_cut_by_pass": False, "passes": [], "every": {},
        "compared": {"1": seen},
    }  # fmt: skip
    table = [
        {"number": 0, "kind": "for", "line": 2},
        {"number": 1, "line": 4, "ends": [0], "when": True, "is_test": False},
    ]
    whole = {"kind": "whole", "seconds": 300.0, "setup_s": 0.0}
    result = found(loop, whole, {"kind": "root", "own_s": 0.0})
    result.records[0][0]["table"] = [entry | {"file": "Cell In[7]"} for entry in table]  # type: ignore[index]
    lines = said(result, time_limit=3600.0)
    assert "ok: the loop in line 2 of Cell In[7] may end earlier, by line 4 of Cell In[7]" in lines
    (line,) = [line for line in lines if "whole run" in line]
    assert line.startswith("yellow: the whole run takes 23 h")
    assert line.endswith("unless it ends earlier, and --time-limit ends it after 1 h")


def test_red_comes_first_and_html_has_the_words_and_colours() -> None:
    error = FoundError("ValueError: <b>no", "rank 1", "Cell In[7]", 2)
    report = CheckReport.of(found(error=error), SOURCE, plan(), changed=["/work/real.txt"])
    assert [line.level for line in report.lines] == ["red", "yellow", "yellow"]
    assert report.has_red
    page = report.bundle()["text/html"]
    assert "ValueError: &lt;b&gt;no" in page
    assert "<b>no" not in page
    assert [page.count(f'<div class="{level}">') for level in ("red", "yellow", "ok")] == [1, 2, 0]
    assert str(report.lines[-1]) == "yellow: changed by this check: /work/real.txt"


def test_large_results_are_listed_and_small_ones_only_where_they_were_asked_for() -> None:
    facts = [{"left_bytes": {"model": 5 * 10**6, "epoch": 28, "accelerator": 10**5}}, {}]
    assert said(found(facts=facts))[-1] == "ok: comes back: model (5.0 MB)"
    assert said(found(facts=facts), out=("epoch", "model"))[-1] == (
        "ok: comes back: model (5.0 MB), accelerator (100 kB), epoch (28 bytes)"
    )
    code = "for epoch in range(9):\n    fit()\n    if epoch == 8:\n        score = test()\n"
    why = {"score": "the cell ended without assigning it", "other": "it cannot be pickled"}
    report = CheckReport.of(found(reached=[1, 2, 3], missing=why), CellSource(code, "Cell In[7]"), plan())
    assert (
        "yellow: --out would not bring score (the cell ended without assigning it), unless by a line that was"
        in str(report)
    )
    assert "red: --out would not bring other (it cannot be pickled)" in str(report).splitlines()
    missing = found(missing={"score": "the cell ended without assigning it"})
    assert said(missing, out=("score",))[0] == (
        "red: --out would not bring score (the cell ended without assigning it)"
    )
