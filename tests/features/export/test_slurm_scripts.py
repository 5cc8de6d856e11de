"""An exported script in an allocation of Slurm: srun starts one command on each machine, and says the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from features.cluster.machines import HOSTS
from features.cluster.test_slurm_nodes import allocation  # noqa: F401  # the fixture
from features.export.test_exported_scripts import RAW, assert_equal, exported, saved
from fixtures.shells import Notebook

pytestmark = [pytest.mark.full, pytest.mark.timeout(280)]

SRUN = """
import json, subprocess, sys

command = ["srun", "--ntasks-per-node={tasks}", sys.executable, "-m", "nbaccel", "launch", "-n", "1", "--cpu"]
command += ["--master-addr", "{address}", "{path}"]  # the machines of tests have no names that they know
done = subprocess.run(command, capture_output=True, text=True)
print(json.dumps([done.returncode, done.stderr]))
"""


@pytest.mark.filterwarnings("ignore:saved.pt is one file")
def test_srun_trains_on_two_machines_what_the_cell_trained_in_two_ranks(
    notebook: Notebook,
    allocation: Any,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = exported(notebook, RAW, 2, tmp_path)
    text = path.read_text()
    assert text.count('path + "/saved.pt"') == 1
    path.write_text(text.replace('path + "/saved.pt"', f'{str(tmp_path)!r} + "/" + os.environ["SLURMD_NODENAME"]'))
    address = next(iter(HOSTS.values()))
    (ended,) = allocation(SRUN.format(tasks=1, address=address, path=path))
    assert ended[0] == 0, ended[1]
    for number, host in enumerate(HOSTS):
        assert f"node {number} of 2" in ended[1]
        assert_equal(saved(tmp_path / "notebook"), torch.load(tmp_path / host))
    (refused,) = allocation(SRUN.format(tasks=2, address=address, path=path))
    assert refused[0] != 0
    assert "srun has started 2(x2) commands on each machine" in refused[1]
