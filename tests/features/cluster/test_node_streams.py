"""The command that leads to an agent: what it says of a node that cannot be reached, and the next move."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

import nbaccel
from nbaccel.errors import LaunchRefused
from nbaccel.features.cluster.cell_mode import clusters
from nbaccel.features.cluster.node_streams import advice


@pytest.mark.parametrize(
    ("said", "move"),
    [
        ("sh: 1: cd: can't cd to /home/ann/work", "Each node needs the notebook's folder"),
        (
            "sh: 1: exec: /opt/python: not found",
            f"Each node needs the notebook's Python at the same path, {sys.executable}",
        ),
        (
            "/usr/bin/python: No module named nbaccel",
            f"Install it on each node, {sys.executable} -m pip install nbaccel",
        ),
        ("ann@west: Permission denied (publickey,password).", "Ssh must not ask for a password: ssh-copy-id west"),
        ("Host key verification failed.", "Its key is not known: connect once by hand, ssh west"),
        ("ssh: Could not resolve hostname west: Name or service not known", "No machine of that name is known"),
        ("ssh: connect to host west port 22: Connection refused", "Is the machine on, and does its ssh server run?"),
    ],
)
def test_a_node_that_cannot_be_reached_comes_with_the_next_move(said: str, move: str) -> None:
    assert move.lower() in advice(said, "west").lower()
    assert advice(said, "west").startswith(said.rstrip("."))


def _nothing() -> None:
    pass


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "echo 'ann@west: Permission denied (publickey).' >&2; exit 255",
            "node (east|west): ann@west: Permission denied .*ssh-copy-id",
        ),
        ("echo Welcome; exit 0", "node (east|west): Welcome"),
        ("exit 3", "node (east|west): exit code 3"),
    ],
)
def test_what_ssh_says_is_the_reason_and_nothing_is_left(
    script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ssh"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    monkeypatch.setenv("NBACCEL_SSH", str(path))
    began = time.monotonic()
    with pytest.raises(LaunchRefused, match=message):
        nbaccel.launch(_nothing, 2, cpu=True, nodes="east,west")
    assert time.monotonic() - began < 60
    assert not clusters.is_open


def test_a_folder_that_a_node_lacks_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ssh"
    path.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$(echo "$last" | sed \'s,cd [^ ]*,cd /nowhere,\')"\n')
    path.chmod(0o700)
    monkeypatch.setenv("NBACCEL_SSH", str(path))
    with pytest.raises(LaunchRefused, match=r"node (east|west): .*cd.*/nowhere.*Each node needs the notebook's folder"):
        nbaccel.launch(_nothing, 2, cpu=True, nodes="east,west")
