"""Which ranks go where, and what is refused before any of them starts."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

from nbaccel.base.hardware import Gpu, Survey
from nbaccel.errors import LaunchRefused
from nbaccel.features.cluster.nodes import NodeFacts, refuse_unlike, spread, survey_of, wanted_of
from nbaccel.launching.preflight import choose_devices

VERSIONS = {"nbaccel": version("nbaccel"), "torch": version("torch")}


def node(name: str, gpus: int = 0, **changed: Any) -> NodeFacts:
    import platform

    cards = tuple(Gpu(number, f"GPU-{name}{number}", "A100", 80, number=number) for number in range(gpus))
    facts: dict[str, Any] = {"python": platform.python_version(), "versions": VERSIONS, "cores": 4, "free_bytes": 10**9}
    return NodeFacts(name, name, gpus=cards, why_no_gpu="", **facts | changed)


def placed(nodes: list[NodeFacts], count: int | None = None, cpu: bool = False) -> Any:
    devices = choose_devices(count, None, cpu, survey_of(Survey(), nodes))
    return spread(devices, nodes, count is not None)


def test_every_gpu_of_every_node_gets_a_rank() -> None:
    devices, placement = placed([node("east", 4), node("west", 2)])
    assert list(placement.counts) == [4, 2]
    assert [cards["CUDA_VISIBLE_DEVICES"] for cards in placement.cards] == ["0,1,2,3", "0,1"]
    assert str(devices) == "6 ranks: 4 on east (A100), 2 on west (A100)"
    assert devices.names()[-1] == "west GPU 1"
    assert devices.environ() == {}, "each node shows its own"


def test_a_number_of_ranks_is_spread_evenly_as_far_as_there_are_gpus() -> None:
    assert list(placed([node("east", 4), node("west", 4)], 5)[1].counts) == [3, 2]
    assert list(placed([node("east", 1), node("west", 4)], 4)[1].counts) == [1, 3]


def test_nodes_without_gpus_get_one_rank_each_or_as_many_as_were_asked_for() -> None:
    nodes = [node("east"), node("west")]
    assert list(placed(nodes)[1].counts) == [1, 1]
    assert list(placed(nodes, 4)[1].counts) == [2, 2]
    assert str(placed(nodes, 3)[0]) == "3 ranks: 2 on east (CPU), 1 on west (CPU)"


def test_gpus_are_hidden_where_the_cpu_was_asked_for() -> None:
    devices, placement = placed([node("east", 2), node("west")], 2, cpu=True)
    assert (devices.gpus, list(placement.cards)) == ((), [{"CUDA_VISIBLE_DEVICES": ""}, {}])


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ("", "names no host"),
        ("east,east", "names east twice: one agent serves all ranks"),
        (
            "slurm",
            "this kernel is in none \\(SLURM_JOB_NODELIST is not set\\): start Jupyter inside of salloc or sbatch",
        ),
    ],
)
def test_nodes_that_cannot_be_meant_are_refused(nodes: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.delenv("SLURM_NODELIST", raising=False)
    with pytest.raises(LaunchRefused, match=message):
        wanted_of(nodes)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"python": "3.9.18"}, r"node west has Python 3\.9, and the notebook 3\.1\d: its objects could not travel"),
        (
            {"versions": VERSIONS | {"torch": "2.1.0"}},
            r"node west has torch 2\.1\.0, and the notebook .*: install the same",
        ),
        ({"versions": VERSIONS | {"nbaccel": ""}}, "node west has nbaccel none"),
    ],
)
def test_a_node_that_is_unlike_the_notebook_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchRefused, match=message):
        refuse_unlike([node("east"), node("west", **changed)])


def test_more_ranks_than_gpus_and_fewer_ranks_than_nodes_are_refused() -> None:
    with pytest.raises(LaunchRefused, match="9 processes were asked for"):
        placed([node("east", 4), node("west", 4)], 9)
    with pytest.raises(LaunchRefused, match="1 rank for 2 nodes: use -n 2 or more, or fewer nodes"):
        placed([node("east"), node("west")], 1)
