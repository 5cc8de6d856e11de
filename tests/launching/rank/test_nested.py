"""Launchers of other libraries inside ranks: refused with a sentence; processes that form no group go on."""

from __future__ import annotations

import importlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import init_process_group
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader

from nbaccel.errors import NestedLaunch
from nbaccel.launchers import notebook_launcher
from nbaccel.launching.api import launch

REFUSED = r"this is rank [01] of 2 of a run already, and ranks do not launch ranks"
DIRECTLY = (
    r"call train\(\.\.\.\) directly\. Or call the launcher in a cell without %%accelerate, or in the main program\."
)


def train(*args: Any) -> None:
    """What a launcher of another library is given."""
    init_process_group("gloo")


def _by_elastic(backend: str = "static") -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    configuration = LaunchConfig(
        1, 1, 2, run_id="none", rdzv_backend=backend, rdzv_endpoint="127.0.0.1:29500", rdzv_configs={"rank": 0}
    )
    elastic_launch(configuration, train)()


@pytest.mark.slow
def test_a_launcher_on_torch_elastic_is_refused_in_a_rank(start_method: str) -> None:
    """As Accelerate's `notebook_launcher` uses it: each rank would start two more, all at one port."""
    with pytest.raises(NestedLaunch, match=f"{REFUSED}: a launcher on torch elastic(.*) 2 more in each.*{DIRECTLY}"):
        launch(_by_elastic, 2, start_method=start_method)


@pytest.mark.slow
def test_an_elastic_agent_that_the_kernel_has_loaded_is_refused_in_a_rank_alone() -> None:
    agents = importlib.import_module("torch.distributed.elastic.agent.server.api")
    run = agents.SimpleElasticAgent.run
    with pytest.raises(NestedLaunch, match=REFUSED):
        notebook_launcher(_by_elastic, num_processes=2)
    assert agents.SimpleElasticAgent.run is run


def _by_torchrun() -> None:
    import torch.distributed.run

    torch.distributed.run.main(["--standalone", "--nproc_per_node=2", "train.py"])


@pytest.mark.slow
def test_torchruns_own_main_is_refused_in_a_rank() -> None:
    with pytest.raises(NestedLaunch, match=f"{REFUSED}.*call the function directly"):
        launch(_by_torchrun, 2)


def _joins(index: int, method: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    if method == "name":
        init_process_group("gloo", rank=index, world_size=2)
    else:
        dist.init_process_group("gloo", init_method=method, rank=index, world_size=2)


def _forks(method: str, has_group: bool) -> None:
    if has_group:
        dist.init_process_group("gloo")
    mp.start_processes(_joins, args=(method,), nprocs=2, start_method="fork")


@pytest.mark.parametrize("has_group", [False, True])
@pytest.mark.parametrize("method", ["name", "tcp://127.0.0.1:29512"])
def test_processes_of_a_rank_form_no_group_however_they_would_meet(method: str, has_group: bool) -> None:
    with pytest.raises(ProcessRaisedException, match=f"NestedLaunch: {REFUSED}: a process that this rank started"):
        launch(_forks, 2, (method, has_group), setup=None)


@pytest.mark.full
@pytest.mark.slow
def test_processes_that_a_rank_spawns_form_no_group() -> None:
    with pytest.raises(ProcessRaisedException, match=f"NestedLaunch: {REFUSED}: a process that this rank started"):
        launch(mp.spawn, 2, (_joins, ("name",), 1))


class _File:
    """A store in a file, in the way of Accelerate's `debug_launcher`, which looks for the file in the end."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, index: int) -> None:
        store = dist.FileStore(self.path, 2)
        dist.init_process_group("gloo", store=store, rank=index, world_size=2)


def _with_a_store(folder: str) -> None:
    path = os.path.join(folder, str(os.getpid()))
    try:
        mp.start_processes(_File(path), nprocs=1, start_method="fork")
    finally:
        os.remove(path)


def test_a_store_that_a_refused_process_made_keeps_its_file(tmp_path: Any) -> None:
    with pytest.raises(ProcessRaisedException, match=REFUSED):
        launch(_with_a_store, 2, (str(tmp_path),))


def _writes(index: int, folder: str) -> None:
    with open(os.path.join(folder, f"{os.getppid()}-{index}"), "w") as file:
        file.write("prepared")


def _double(value: int) -> int:
    return 2 * value


def _prepares(folder: str) -> tuple[list[int], int]:
    mp.start_processes(_writes, args=(folder,), nprocs=2, start_method="fork")
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        doubled = list(pool.map(_double, range(3)))
    total = sum(int(batch.sum()) for batch in DataLoader(range(8), 4, num_workers=1))  # type: ignore[arg-type, var-annotated]
    init_process_group("gloo")
    ranks = torch.ones(())
    dist.all_reduce(ranks)
    return doubled, total + int(ranks)


@pytest.mark.slow
def test_processes_that_form_no_group_go_on_and_the_rank_forms_its_own(start_method: str, tmp_path: Any) -> None:
    run = launch(_prepares, 2, (str(tmp_path),), start_method=start_method)
    assert run.values == [([0, 2, 4], 30)] * 2
    assert len(list(tmp_path.iterdir())) == 4
