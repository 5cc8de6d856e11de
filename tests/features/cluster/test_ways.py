"""The doctor's row on ways to other machines: what there is, and no variable's value."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from nbaccel.base.hardware import Survey
from nbaccel.features.cluster import node_environment
from nbaccel.features.reports.doctor import MachineFacts, report


def absent(name: str) -> str:
    raise PackageNotFoundError(name)


def test_the_doctor_says_which_ways_to_nodes_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBACCEL_SSH", "sh -F secret.conf")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "secret[1-4]")
    monkeypatch.setattr(node_environment, "version", lambda name: "2.60.0")
    text = report(Survey(), MachineFacts.of_this_process(Survey()))
    assert "\nnodes     NBACCEL_SSH; Ray 2.60.0; an allocation of Slurm" in text
    assert "secret" not in text


def test_what_is_missing_on_the_way_to_nodes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(node_environment, "version", absent)
    monkeypatch.setenv("NBACCEL_SSH", "no-such-program")
    assert (
        node_environment.ways_to_nodes()
        == "no NBACCEL_SSH; no Ray (pip install 'nbaccel[ray]'); no allocation of Slurm"
    )
    monkeypatch.delenv("NBACCEL_SSH")
    monkeypatch.setattr(node_environment.shutil, "which", lambda name: None if name == "ssh" else name)
    assert node_environment.ways_to_nodes().startswith("no ssh; ")
