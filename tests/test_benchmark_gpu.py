"""The GPU's benchmark on the host: its cells run, its guard refuses a wrong loop, and without a device it says so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as command, memory, rows
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.place import PLACES
from benchmarks.gpu.rows import GROUPS, Steps
from benchmarks.gpu.work import REAL, SMALL
from benchmarks.harness import Row, measure
from benchmarks.party import Bout
from benchmarks.rows import saves
from nbaccel.base.hardware import Survey

pytestmark = pytest.mark.full  # they test the benchmark, which is run by hand

HOST = replace(PLACES["cpu"], steps=2)


def _cut(row: Row) -> Row:
    """Raw and one of ours, one turn: peers take seconds to import, and guard themselves whenever the command runs."""
    ours = next(name for name in row.contenders if name.startswith("nbaccel"))
    return replace(row, contenders={name: row.contenders[name] for name in ("raw", ours)}, targets={}, turns=1)


def test_without_a_device_it_says_so_and_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = replace(Survey.take(), gpus=())
    monkeypatch.setattr(command.Survey, "take", lambda: nothing)
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("no CUDA device: NVML finds none here, and these numbers need one.")
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--rows", "stepps"])
    assert (
        "no rows called 'stepps'; there are steps, transfers, first, saves, recovery, ranks, line, memory"
        in capsys.readouterr().err
    )


def test_the_rows_of_a_card_are_made_without_touching_one() -> None:
    names = [row.name for group in GROUPS.values() for row in group(PLACES["cuda"])]
    assert {f"step on cuda, transformer, {precision}" for precision in ("no", "tf32", "bf16", "fp16")} <= set(names)
    assert {"first step on cuda", "save of 600 MB from cuda", "recovery, 1 rank on cuda"} <= set(names)
    assert len(names) == len(set(names)) == 14
    assert not torch.cuda.is_initialized()


def test_a_training_of_a_cards_size_does_not_diverge() -> None:
    card = PLACES["cuda"]
    model, optimizer = SMALL.make(card)
    batch, losses = SMALL.samples(card, 4), []
    for _ in range(4):
        loss = SMALL.loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert max(losses) < 10 * losses[0]


def _hoarding(steps: Steps) -> Bout:
    """The loop that forgot `zero_grad`."""
    device = steps.enter()
    model, optimizer, loader = steps.things()

    def epoch() -> None:
        for (batch,) in loader:
            steps.work.loss(model(batch.to(device)), batch).backward()
            optimizer.step()

    return steps.bout(model, epoch)


def test_tf32_is_a_switch_of_torch_and_toolkits_are_told_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    switched: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", switched.append)
    for precision in ("no", "tf32", "bf16"):
        Steps(HOST, REAL, precision).enter()
    assert switched == ["highest", "high", "highest"]
    assert [Steps(HOST, REAL, precision).mixed_precision for precision in ("no", "tf32", "bf16")] == [
        "no",
        "no",
        "bf16",
    ]


@pytest.mark.slow
def test_a_wrong_step_is_refused_and_ours_train_as_raw_does() -> None:
    ways = {"raw": rows.raw, "hoarding": _hoarding, "nbaccel": rows.nbaccel, "nbaccel, too": rows.recovering}
    row = rows._step_row("step", Steps(HOST, REAL), ways, 1.05)
    assert list(measure(replace(row, turns=1), rounds=1).refused) == ["hoarding"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows_of",
    [
        {
            "transfers": ["batches moved to cpu"],
            "ranks": ["step of 2 gloo ranks on one cpu, transformer"],
            "line": ["unmodified loop, 2 ranks on two cpus, transformer"],
        },
        {"first": ["first step on cpu"], "saves": ["save of 6 MB from cpu"]},
        pytest.param({"recovery": ["recovery, 1 rank", "recovery, 2 ranks"]}, marks=pytest.mark.full),
    ],
    ids=lambda rows_of: ",".join(rows_of),
)
def test_rows_come_to_raws_result(
    rows_of: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saves, "_DISK", tmp_path)
    cut = {name: (lambda place, group=group: [_cut(row) for row in group(HOST)]) for name, group in GROUPS.items()}  # type: ignore[misc]
    monkeypatch.setattr(command, "GROUPS", cut)
    arguments = [
        "--device",
        "cpu",
        "--rows",
        ",".join(rows_of),
        "--rounds",
        "1",
        "--json",
        str(tmp_path / "told.json"),
    ]
    assert main(arguments) == 0
    told = json.loads((tmp_path / "told.json").read_text())
    assert [row["row"] for row in told["rows"]] == [name for names in rows_of.values() for name in names]
    assert not any(row["refused"] for row in told["rows"])
    assert told["machine"]["device"] == "cpu"


@pytest.mark.slow
def test_two_ranks_that_share_a_card_train_as_one_process_does(capfd: pytest.CaptureFixture[str]) -> None:
    (_, alone), (_, together) = rows._unmodified(HOST), rows._sharing_a_card(HOST)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    assert "each of 2 batches split over 2 ranks" in capfd.readouterr().out


@pytest.mark.slow
def test_a_search_is_told_with_its_trials_and_a_run_leaves_nothing() -> None:
    found = memory._Found.by(memory._ours, HOST)
    assert 1 <= found.trials <= 7
    assert found.size > 1
    assert memory._in_a_process(lambda: memory._left_in_the_process(HOST)) == [0.0]
