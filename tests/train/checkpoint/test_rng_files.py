"""Random states travel one file per rank, and whichever side is second puts them together."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from nbaccel.train.checkpoint import generators, rng_files
from nbaccel.train.checkpoint.manifest import Manifest, Stamp

CPU = torch.device("cpu")


def commit(target: Path, stamp: Stamp) -> Manifest:
    target.mkdir(parents=True, exist_ok=True)
    manifest = Manifest(str(stamp), stamp.step, 0, 0, 2)
    manifest.seal(target)
    return manifest


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_all_generators_continue_from_what_was_read() -> None:
    state = generators.read(CPU)
    random.gauss(0, 1)  # leaves half of a pair behind
    with_gauss = generators.read(CPU)
    expected = draws()
    generators.restore(with_gauss, CPU)
    assert draws() == expected
    generators.restore(state, CPU)
    assert generators.read(CPU) == state


def test_derived_numbers_differ_by_rank_step_and_seed_and_repeat() -> None:
    seen = []
    for seed, step, rank in [(0, 5, 1), (0, 5, 1), (0, 5, 2), (0, 6, 1), (1, 5, 1)]:
        generators.derive(seed, step, rank)
        seen.append(draws())
    assert seen[0] == seen[1]
    assert len(set(seen)) == 4


@pytest.mark.parametrize("rank_is_first", [True, False])
def test_a_rank_finds_its_state_whoever_was_first(tmp_path: Path, rank_is_first: bool) -> None:
    target, stamp = tmp_path / "last", Stamp(3, 0, "run")
    state = generators.read(CPU)
    if rank_is_first:
        rng_files.add(target, 1, stamp, state)
        manifest = commit(target, stamp)
        rng_files.adopt(target, stamp)
    else:
        manifest = commit(target, stamp)
        rng_files.adopt(target, stamp)
        rng_files.add(target, 1, stamp, state)
    found, reason = rng_files.find(target, 1, manifest)
    assert reason == ""
    assert found is not None
    assert {name: found[name] for name in state} == state
    assert os.listdir(tmp_path) == ["last"]


def test_what_waits_beside_is_found_even_if_rank_0_died_right_after_its_commit(tmp_path: Path) -> None:
    target, stamp = tmp_path / "last", Stamp(3, 0, "run")
    rng_files.add(target, 1, stamp, generators.read(CPU))
    assert rng_files.find(target, 1, commit(target, stamp))[0] is not None


def test_states_of_other_saves_and_other_runs_are_not_used(tmp_path: Path) -> None:
    target = tmp_path / "last"
    for stamp in (Stamp(2, 0, "run"), Stamp(3, 1, "run"), Stamp(3, 0, "other"), Stamp(4, 0, "run")):
        rng_files.add(target, 1, stamp, generators.read(CPU))
    manifest = commit(target, Stamp(3, 0, "run"))
    rng_files.adopt(target, Stamp(3, 0, "run"))
    found, reason = rng_files.find(target, 1, manifest)
    assert found is None
    assert reason.endswith("generators_1.json is missing")
    assert ".last.rank1.step2" not in os.listdir(tmp_path), "what is outdated goes"
    assert ".last.rank1.step4" in os.listdir(tmp_path), "a rank may be ahead"


def test_an_older_folder_with_an_equal_stamp_hands_its_states_on(tmp_path: Path) -> None:
    target, stamp = tmp_path / "last", Stamp(0, 0, "")
    commit(target, stamp)
    rng_files.add(target, 1, stamp, generators.read(CPU))
    newer = tmp_path / "newer"
    newer.mkdir()
    rng_files.carry(target, newer, str(stamp))
    assert os.listdir(newer) == ["generators_1.json"]
    rng_files.carry(target, newer, str(Stamp(1, 0, "")))
    assert os.listdir(newer) == ["generators_1.json"]
