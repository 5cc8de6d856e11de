"""The harness compares what is comparable: a wrong loop gets no numbers, and a contender that fails harms no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command, handover, memory, merging
from benchmarks.__main__ import environ_of_scripts, main
from benchmarks.findings import Finding, tell
from benchmarks.harness import Measured, Row, measure
from benchmarks.loops import Training, contenders, nbaccel, raw
from benchmarks.output import whole_lines
from benchmarks.party import Bout, ContenderFailed, Party, Sample
from benchmarks.protocol import Protocol, parser
from benchmarks.rows import GROUPS, REPORTS, rows, starts
from benchmarks.table import cells, document, lines
from benchmarks.targets import AtMost, OverRaw, Target

pytestmark = pytest.mark.full  # they test the benchmark, which is run by hand

TINY = Training(batches=4, accumulation=2, width=4)


def undivided(training: Training) -> Bout:
    """The loop that forgot to divide by the length of the window."""
    model, optimizer, loader = training.things()

    def turn() -> None:
        for index, (x,) in enumerate(loader):
            model(x).square().mean().backward()
            if index % training.accumulation:
                optimizer.step()
                optimizer.zero_grad()

    return Bout(turn, lambda: torch.cat([parameter.flatten() for parameter in model.parameters()]))


def working(seconds: float = 1.0, result: float = 0.0) -> Callable[[], Bout]:
    """A contender that says how long it took, on both clocks."""
    return lambda: Bout(lambda: Sample(seconds, seconds), lambda: torch.tensor([result]))


@pytest.mark.slow
def test_a_loop_with_other_parameters_than_raws_is_refused() -> None:
    row = Row("step", {"raw": lambda: raw(TINY), "undivided": lambda: undivided(TINY)}, units=4, turns=1)
    measured = measure(row, rounds=1)
    assert measured.refused["undivided"].startswith("WRONG RESULT: differs from raw's by 0.0")
    assert list(measured.samples) == ["raw", "raw again"]
    assert "REFUSED: WRONG RESULT" in "\n".join(lines(measured))


def test_a_result_that_is_not_a_number_is_refused() -> None:
    measured = measure(Row("nan", {"raw": working(), "nan": working(result=float("nan"))}, turns=1), rounds=1)
    assert "nan" in measured.refused


@pytest.mark.slow
def test_our_loop_ends_with_raws_parameters_and_gets_numbers() -> None:
    row = Row("step", {"raw": lambda: raw(TINY), "nbaccel": lambda: nbaccel(TINY)}, units=4, turns=2)
    measured = measure(row, rounds=2)
    assert not measured.refused
    assert [len(samples) for samples in measured.samples.values()] == [4, 4, 4]
    assert all(sample.wall_s > 0 for samples in measured.samples.values() for sample in samples)


@pytest.mark.slow
@pytest.mark.timeout(180)  # importing Lightning in three processes takes long where other programs run
def test_all_toolkits_train_alike_in_two_ranks() -> None:
    row = Row("ranks", contenders(TINY), units=4, world_size=2, turns=1, judged="wall")
    measured = measure(row, rounds=1)
    assert not measured.refused
    assert list(measured.samples) == ["raw", "raw again", "Accelerate", "Fabric", "nbaccel", "nbaccel, reporting"]


def test_a_contender_that_raises_is_refused_with_its_traceback_and_the_others_go_on() -> None:
    def broken() -> Bout:
        raise RuntimeError("no such loop")

    measured = measure(Row("broken", {"raw": working(), "broken": broken, "fine": working(2.0)}, turns=1), rounds=1)
    assert "RuntimeError: no such loop" in measured.refused["broken"]
    assert list(measured.samples) == ["raw", "raw again", "fine"]


def test_a_contender_that_dies_in_a_turn_is_refused() -> None:
    def dying() -> Bout:
        turns = iter([Sample(1, 1)])
        return Bout(lambda: next(turns, None) or os._exit(3), lambda: torch.zeros(1))

    measured = measure(Row("dying", {"raw": working(), "dying": dying}, turns=2), rounds=1)
    assert measured.refused == {"dying": "dying: rank 0 died"}


def test_without_raw_there_is_no_comparison() -> None:
    def broken() -> Bout:
        raise RuntimeError("no such loop")

    with pytest.raises(ContenderFailed, match=r"row 'r' cannot be compared with anything: (?s:.*)no such loop"):
        measure(Row("r", {"raw": broken, "fine": working()}), rounds=1)
    with pytest.raises(ValueError, match="row 'r' has no contender 'raw' to compare with"):
        Row("r", {"fine": working()})
    with pytest.raises(ValueError, match="row 'r' is judged by 'luck'; it must be 'cpu' or 'wall'"):
        Row("r", {"raw": working()}, judged="luck")


def test_a_party_counts_its_slowest_rank() -> None:
    def ranked() -> Bout:
        rank = int(os.environ["RANK"])
        return Bout(lambda: Sample(1.0 + rank, 1.0 + rank), lambda: torch.tensor([float(rank)]))

    party = Party("ranked", ranked, 2, ())
    try:
        assert party.turn() == Sample(2.0, 1.5)
        assert party.result().tolist() == [0.0, 1.0]
    finally:
        party.close()


def test_a_ratio_is_the_median_of_the_turns_and_a_target_is_missed_only_beyond_the_noise() -> None:
    row = Row(
        "r", {"raw": working(2.0), "close": working(2.1), "slow": working(5.0)}, targets={"close": 1.06, "slow": 2}
    )
    raw_cell, again, close, slow = cells(measure(row, rounds=1))
    assert (raw_cell.verdict, again.verdict) == ("", "")
    assert again.cpu_ratio.median == 1.0
    assert close.cpu_ratio.median == pytest.approx(1.05)
    assert close.verdict == "holds 1.06"
    assert slow.verdict == "FALLS SHORT of 2"


@pytest.mark.parametrize(
    ("target", "verdict"),
    [
        (AtMost(5000), "holds 5000 ms"),
        (AtMost(4000), "FALLS SHORT of 4000 ms"),
        (OverRaw(3000), "holds 3000 ms over raw"),
        (OverRaw(2000), "FALLS SHORT of 2000 ms over raw"),
    ],
)
def test_a_target_may_be_a_time_or_a_time_over_raws(target: Target, verdict: str) -> None:
    row = Row("r", {"raw": working(2.0), "slow": working(5.0)}, unit="ms", turns=2, targets={"slow": target})
    assert cells(measure(row, rounds=1))[-1].verdict == verdict


def test_a_target_is_missed_only_beyond_the_spread_of_raw_against_itself() -> None:
    again = [4.0, 2.0, 8.0]
    assert AtMost(4).verdict("ms", [5.0] * 3, [4.0] * 3, again) == "over 4 ms, within the noise"
    assert OverRaw(0.5).verdict("ms", [5.0] * 3, [4.0] * 3, again) == "over 0.5 ms over raw, within the noise"
    assert AtMost(4).verdict("ms", [9.0] * 3, [4.0] * 3, again) == "FALLS SHORT of 4 ms"


def test_of_two_ranks_it_takes_sixty_turns_to_fall_short() -> None:
    row = Row("r", {"raw": working(), "slow": working()}, world_size=2, targets={"slow": 1.5})

    def verdict(turns: int) -> str:
        times = {"raw": 1.0, "raw again": 1.0, "slow": 2.0}
        return cells(Measured(row, {who: [Sample(time, time)] * turns for who, time in times.items()}))[-1].verdict

    assert verdict(59) == "over 1.5, too few turns to tell"
    assert verdict(60) == "FALLS SHORT of 1.5"


def test_noise_that_was_not_measured_excuses_nothing() -> None:
    measured = measure(Row("r", {"raw": working(), "slow": working(2.0)}, turns=2, targets={"slow": 1.5}), rounds=1)
    del measured.samples["raw again"]
    assert cells(measured)[-1].verdict == "FALLS SHORT of 1.5"


def test_a_finding_that_misses_its_target_fails_the_report_and_is_in_its_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = Finding("4,000 lines", "arrived whole", 4000, "lines", at_least=4000)
    missed = Finding("4,000 lines", "took", 0.512, "s", at_most=0.3)
    path = tmp_path / "found.json"
    assert tell([held], str(path)) == 0
    assert tell([held, missed, Finding("more", "took", 2.0, "s")], str(path)) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[-5:] == [
        "  4,000 lines",
        "    arrived whole                            4,000 lines    holds 4000 lines",
        "    took                                     0.512 s        FALLS SHORT of 0.3 s",
        "  more",
        "    took                                         2 s",
    ]
    told = json.loads(path.read_text())
    assert [one["verdict"] for one in told] == ["holds 4000 lines", "FALLS SHORT of 0.3 s", ""]
    assert (told[1]["what"], told[1]["who"], told[1]["value"], told[1]["at_most"]) == (
        "4,000 lines",
        "took",
        0.512,
        0.3,
    )


def test_what_was_found_before_a_report_failed_is_kept(tmp_path: Path) -> None:
    def found() -> Iterator[Finding]:
        yield Finding("lines", "arrived", 3, "")
        raise ContenderFailed("no more")

    path = tmp_path / "found.json"
    with pytest.raises(ContenderFailed, match="no more"):
        tell(found(), str(path))
    assert [one["value"] for one in json.loads(path.read_text())] == [3]


def test_a_number_that_is_none_holds_no_target() -> None:
    assert not Finding("r", "took", float("nan"), "s", at_most=1).holds


def test_a_launcher_that_loses_a_rank_or_a_result_is_refused() -> None:
    def in_place(ranks_run: int) -> starts.Launch:
        """Ranks that are no processes; the guard counts what they leave behind."""

        def launch(function: Callable[[Path], None], folder: Path, ranks: int) -> None:
            for _ in range(ranks_run):
                function(folder)

        return launch

    def bout(ranks_run: int, told: float) -> Callable[[], Bout]:
        return lambda: starts.bout(in_place(ranks_run), lambda: told, 2, until_mark=False)

    contenders = {"raw": bout(2, 1.0), "loses a rank": bout(1, 1.0), "loses a result": bout(2, 0.0)}
    measured = measure(Row("start", contenders, turns=1), rounds=1)
    assert measured.refused["loses a rank"].endswith("1 of 2 ranks had run the function when the launcher returned\n")
    assert measured.refused["loses a result"] == "WRONG RESULT: differs from raw's by 2, allowed are 1e-05"


def test_lines_that_are_torn_lost_or_of_another_rank_do_not_count_as_whole() -> None:
    printed = [f"rank {rank} step {step}" for step in range(3) for rank in range(2)]
    tagged = "\n".join(f"[rank {line[5]}] {line}" for line in printed)
    assert whole_lines(tagged, 6, 2) == whole_lines("\n".join(printed), 6, 2) == 6
    assert whole_lines("\n".join(printed[1:]), 6, 2) == 5
    assert whole_lines("\n".join([*printed[1:], printed[1]]), 6, 2) == 5
    assert whole_lines(tagged.replace("[rank 0] rank 0 step 1", "[rank 1] rank 0 step 1"), 6, 2) == 5
    assert whole_lines("rank 0rank 1  step 0\nstep 0\n", 2, 2) == 0


def test_a_value_that_did_not_arrive_whole_ends_the_report() -> None:
    handover.check("a way", [4.0, 4.0], 4)
    with pytest.raises(handover.WrongValue, match=r"a way: the sums are \[4.0, 3.0\], and the tensor has 4 ones"):
        handover.check("a way", [4.0, 3.0], 4)
    with pytest.raises(handover.WrongValue):
        handover.check("a way", [], 4)


@pytest.mark.slow
def test_every_way_hands_a_tensor_over_and_back() -> None:
    code = """
from benchmarks.handover import WAYS, measured
for name, way in WAYS.items():
    print(name, [direction for direction, _, _ in measured(name, way, 1000, 1)])  # which checks the sums
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ_of_scripts())
    directions = ["to 2 ranks", "back from one"]
    assert ran.stdout.splitlines() == [f"{name} {directions}" for name in handover.WAYS], ran.stderr


@pytest.mark.slow
def test_ranks_whose_parameters_are_not_raws_get_no_number_for_their_memory() -> None:
    way = memory.WAYS["raw"]
    mib, parameters = memory.private_of("raw", way, 1, None)
    assert 0 < mib < 1000
    assert memory.private_of("raw", way, 1, parameters)[1].tolist() == parameters.tolist()
    with pytest.raises(ContenderFailed, match="WRONG RESULT: its parameters are not raw's"):
        memory.private_of("raw", way, 1, parameters + 1)


def test_a_row_whose_raw_failed_says_so_and_the_next_one_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Bout:
        raise RuntimeError("no such loop")

    path = tmp_path / "told.json"
    protocol = Protocol({}, 1, str(path))
    protocol.measure([Row("broken", {"raw": broken}), Row("fine", {"raw": working()}, turns=1)])
    assert protocol.end() == 1
    first, second = json.loads(path.read_text())["rows"]
    assert (first["turns"], first["cells"], list(first["refused"])) == (0, [], ["raw"])
    assert (second["turns"], second["refused"]) == (1, {})
    assert "REFUSED: RuntimeError: no such loop" in capsys.readouterr().out


def test_the_document_is_json_with_every_cell() -> None:
    told = json.loads(json.dumps(document(measure(Row("r", {"raw": working(), "one": working(3.0)}), rounds=1))))
    assert [cell["contender"] for cell in told["cells"]] == ["raw", "raw again", "one"]
    assert told["cells"][2]["wall_ratio"]["median"] == 3.0
    assert told["turns"] == 10


def test_a_clock_that_nobody_read_has_no_ratio() -> None:
    on_one_clock = Bout(lambda: Sample(1.0, 0.0), lambda: torch.zeros(1))
    measured = measure(Row("r", {"raw": lambda: on_one_clock}, judged="wall"), rounds=1)
    told = json.loads(json.dumps(document(measured), allow_nan=False))
    assert told["cells"][0]["cpu_ratio"] == {"low": None, "median": None, "high": None}
    assert next(line for line in lines(measured) if line.startswith("  raw ")).split() == (
        ["raw", "1000000.0", "1.000", "0.0", "-", "1.00-1.00"]
    )


def test_the_command_names_the_rows_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--rows", "stepp"])
    assert "no rows called 'stepp'; there are step, ranks, sharded, loader" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--rounds", "0"])
    assert "--rounds must be at least 1, got 0" in capsys.readouterr().err


def test_a_report_stands_in_the_json_beside_the_rows_and_its_failure_is_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "reporting.py"
    script.write_text(
        "import sys\n"
        "from benchmarks.findings import Finding, options_of, tell\n"
        "found = [Finding('lines', 'arrived', 3, '', at_least=4)]\n"
        "sys.exit(tell(found, options_of('what it is', seconds=5.0).json))\n"
    )
    monkeypatch.setattr(command, "REPORTS", ("reporting",))
    monkeypatch.setattr(command, "_script", lambda name: [str(script)])
    path = tmp_path / "told.json"
    assert main(["--rows", "reporting", "--json", str(path)]) == 1
    [report] = json.loads(path.read_text())["reports"]
    assert (report["report"], report["held"]) == ("reporting", False)
    assert report["findings"][0]["verdict"] == "FALLS SHORT of 4"


def test_every_name_of_a_report_is_a_script() -> None:
    for name in REPORTS:
        assert find_spec(f"benchmarks.{name}"), name


def test_every_name_of_a_row_has_its_rows() -> None:
    for group in GROUPS:
        for row in rows(group):
            assert row.targets.keys() <= row.contenders.keys(), row.name


def test_by_default_every_row_has_the_turns_that_it_takes_to_tell() -> None:
    rounds = parser("python -m benchmarks", "", GROUPS).parse_args([]).rounds
    for row in (row for group in GROUPS for row in rows(group) if row.targets):
        assert row.turns * rounds >= row.enough_turns, row.name


@pytest.mark.parametrize(("result", "status"), [(0.0, 0), (1.0, 1)])
def test_the_command_prints_and_writes_what_it_measured_and_fails_with_a_wrong_result(
    result: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Row("quick", {"raw": working(), "other": working(3.0, result)}, turns=2)
    monkeypatch.setattr(command, "rows", lambda group: [row] if group == "step" else [])
    assert main(["--rows", "step", "--rounds", "1", "--json", str(tmp_path / "told.json")]) == status
    printed = capsys.readouterr().out
    assert "quick -- 1 process, judged by cpu time, 2 turns" in printed
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["rounds"] == 1
    assert told["machine"]["torch"] == torch.__version__
    assert bool(told["rows"][0]["refused"]) is bool(status)


def test_a_new_run_takes_the_places_of_its_rows_and_reports_in_the_stored_one(tmp_path: Path) -> None:
    stored, new = tmp_path / "stored.json", tmp_path / "new.json"
    rows = [{"row": "step", "cells": [1]}, {"row": "save", "cells": [2]}]
    reports = [{"report": "output", "findings": [1]}, {"report": "alternatives", "findings": [2]}]
    stored.write_text(json.dumps({"machine": {"load": 0.2}, "rounds": 3, "rows": rows, "reports": reports}))
    new_rows, new_reports = [{"row": "step", "cells": [3]}], [{"report": "alternatives", "findings": [4]}]
    new.write_text(json.dumps({"machine": {"load": 9.0}, "rounds": 1, "rows": new_rows, "reports": new_reports}))
    merging.main(str(new), str(stored))
    assert json.loads(stored.read_text()) == {
        "machine": {"load": 0.2},
        "rounds": 3,
        "rows": [{**new_rows[0], "machine": {"load": 9.0}}, rows[1]],
        "reports": [reports[0], {**new_reports[0], "machine": {"load": 9.0}}],
    }
