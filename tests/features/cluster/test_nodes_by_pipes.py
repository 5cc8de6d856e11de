"""A function on two nodes that are this machine, each behind a pipe: one small case of each kind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import nbaccel
from features.cluster.machines import local_ssh
from nbaccel import Accelerator
from nbaccel.errors import LaunchRefused, PeerFailed, RankDied
from nbaccel.features.cluster.cell_mode import clusters

NODES = "east,west"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Launches a function in four ranks on two nodes; the agents stay for all tests of this module."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("NBACCEL_SSH", local_ssh(tmp_path_factory.mktemp("ssh")))

        def launch(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            return nbaccel.launch(function, 4, args, cpu=True, nodes=NODES, **options)

        launch(_nothing)  # now, so that no test seems to leave the agents behind
        yield launch
        clusters.end()


def _nothing() -> None:
    pass


def _where(factor: int) -> tuple[int, ...]:
    accelerator = Accelerator(cpu=True)
    total = accelerator.reduce(torch.tensor([float(accelerator.process_index)], device="cpu"), "sum")
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
    return (*(int(os.environ[name]) for name in names), factor * int(total))


def test_four_ranks_on_two_nodes_meet_and_their_values_come_back(nodes: Callable[..., Any]) -> None:
    assert nodes(_where, 10).values == [(0, 0, 2, 0, 60), (1, 1, 2, 0, 60), (2, 0, 2, 1, 60), (3, 1, 2, 1, 60)]


def _numbered() -> list[str]:
    return list({"cat", "dog", "bird", "fish", "cow", "pig"})


def test_ranks_of_all_nodes_go_through_a_set_in_one_order(nodes: Callable[..., Any]) -> None:
    first, *others = nodes(_numbered).values
    assert others == [first] * 3


def _fails() -> None:
    accelerator = Accelerator(cpu=True)
    if accelerator.process_index == 3:
        raise ZeroDivisionError("of rank 3")
    accelerator.wait_for_everyone()


def test_the_error_of_a_rank_elsewhere_is_raised_and_not_those_of_its_peers(nodes: Callable[..., Any]) -> None:
    with pytest.raises(ZeroDivisionError, match="of rank 3") as caught:
        nodes(_fails)
    assert any("rank 3 of 4 on west" in note for note in caught.value.__notes__)


def _saves(folder: str, steps: int, resume: bool) -> list[float]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, checkpoint_every="0.3s", checkpoint_dir=folder, keep=99, resume=resume)
    model, data = torch.nn.Linear(4, 2), torch.randn(64, 4, device="cpu")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in accelerator.epochs(steps):
        for (x,) in loader:
            optimizer.zero_grad()
            accelerator.backward(model(x).pow(2).mean())
            optimizer.step()
            time.sleep(0.01)
    return [float(value) for value in accelerator.unwrap_model(model).weight.detach().flatten()]


def test_ranks_of_all_nodes_save_before_the_same_step_and_go_on_on_one(
    nodes: Callable[..., Any], tmp_path: Path
) -> None:
    nodes(_saves, str(tmp_path / "saved"), 40, False)
    saved = sorted((tmp_path / "saved").iterdir())
    assert saved, "nothing was saved"
    for folder in saved:
        parts = {path.name for path in folder.glob("generators_*.json")}
        assert parts == {f"generators_{rank}.json" for rank in range(4)}, folder.name
    there = nodes(_saves, str(tmp_path / "saved"), 44, True).values[0]
    here = nbaccel.launch(_saves, 4, (str(tmp_path / "undisturbed"), 44, False), cpu=True).values[0]
    assert torch.allclose(torch.tensor(there), torch.tensor(here), rtol=1e-6)


def _comes_without_the_first() -> None:
    if os.environ["RANK"] != "0":
        Accelerator(cpu=True).wait_for_everyone()


def test_ranks_that_wait_for_a_first_one_which_has_ended_are_told_so(nodes: Callable[..., Any]) -> None:
    with pytest.raises(PeerFailed, match="rank 0, on whose machine all ranks meet, has come to its end"):
        nodes(_comes_without_the_first)


def _writes_much(lines: int) -> int:
    for line in range(lines):
        print(line, "x" * 1000)
    return lines


def test_ranks_that_write_faster_than_lines_travel_lose_none_and_the_next_run_starts(
    nodes: Callable[..., Any],
) -> None:
    """Some 10 MB for each node: more than an agent keeps before it lets ranks wait."""
    run = nodes(_writes_much, 5000)
    assert run.values == [5000] * 4
    found = Counter(line.split()[-2] for line in Path(run.log_path).read_text().splitlines() if line.endswith("xxx"))
    assert set(found) == {str(line) for line in range(5000)}
    assert set(found.values()) == {4}
    assert nodes(_where, 1).values[0] == (0, 0, 2, 0, 6)


def test_what_is_about_ranks_of_this_machine_is_refused(nodes: Callable[..., Any]) -> None:
    with pytest.raises(LaunchRefused, match="start_method='zygote' is about ranks of this machine"):
        nodes(_where, 1, start_method="zygote")
    with pytest.raises(LaunchRefused, match="is not started again for memory"):
        nodes(_where, 1, oom="shrink")
    with pytest.raises(LaunchRefused, match="free_kernel=True is about this machine's GPUs"):
        nodes(_where, 1, free_kernel=True)


def _waits() -> None:
    accelerator = Accelerator(cpu=True)
    Path(os.environ["PIDS"], f"{accelerator.process_index}").write_text(str(os.getpid()))
    while True:
        accelerator.wait_for_everyone()


def test_a_node_that_is_gone_is_named_and_the_next_launch_connects_anew(
    nodes: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIDS", str(tmp_path))

    def end_the_agent() -> None:
        file = tmp_path / "2"
        while not file.exists() or not file.read_text():
            time.sleep(0.05)
        zygote = psutil.Process(int(file.read_text())).parent()
        assert zygote is not None
        agent = zygote.parent()
        assert agent is not None
        os.kill(agent.pid, signal.SIGKILL)

    thread = threading.Thread(target=end_the_agent)
    thread.start()
    with pytest.raises(
        RankDied,
        match=r"node west is gone: its connection has ended, where ranks 2, 3 of 4 ran; ranks 0, 1 had to be stopped",
    ):
        nodes(_waits)
    thread.join()
    deadline = time.monotonic() + 10  # those of the lost node end by their own watch
    while left := [pid for file in tmp_path.iterdir() if psutil.pid_exists(pid := int(file.read_text()))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert nodes(_where, 1).values[0] == (0, 0, 2, 0, 6)
    clusters.end()
