"""Cells on two machines, in a real kernel: what comes back, stops, ends of ranks, of nodes, of cables; what is left."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from environments import NEWEST
from features.cluster.launches import ABOVE, PREPARED, RAW
from features.cluster.machines import HOSTS, Machines, NoMachines, two_machines
from kernel.harness import Cell, RealKernel
from leftovers import MARK

pytestmark = [pytest.mark.full, pytest.mark.timeout(280)]

CELL = "%%accelerate --cpu -n 4 --seed 0 --plain"
NODES = f"{CELL} --nodes east,west"

NOTE = """
with open("here", "a") as file:
    print(f"{os.environ['NODE_RANK']}:{os.environ['LOCAL_RANK']} {os.getpid()}", file=file)
"""
"""Says where each rank is, and which process of its machine."""

LONG = RAW.format(epochs=1000, pause=0.02)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    try:
        with two_machines(tmp_path_factory.mktemp("machines")) as made:
            yield made
    except NoMachines as error:
        pytest.skip(f"no machines can be made here: {error}")


@pytest.fixture(scope="module")
def notebook(machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealKernel]:
    # Without the mark of this session: tests that lose a node have it connected anew, which is no leftover of theirs.
    environ = {"NBACCEL_SSH": machines.ssh, "OMP_NUM_THREADS": "1", MARK: ""}
    kernel = RealKernel(NEWEST, tmp_path_factory.mktemp("kernel"), **environ)
    try:
        kernel.do(ABOVE)
        kernel.do(f"{NODES}\nprint(accelerator.process_index)", timeout_s=120)
        yield kernel
        kernel.run("%accelerate stop")  # an error if the last test has ended them
        assert not [command for host in HOSTS for command in machines.processes(host).values()], "agents have ended"
    finally:
        kernel.close()


def begun(kernel: RealKernel, cell: str, wait_s: float = 3.0) -> tuple[object, float]:
    """Begin a cell whose ranks train for long; return when they do."""
    (kernel.folder / "here").unlink(missing_ok=True)
    line, _, body = cell.partition("\n")
    execution = kernel.begin(f"{line}\n{NOTE}\n{body}")
    deadline = time.monotonic() + 60
    while not (kernel.folder / "here").exists() or len(_ranks(kernel)) < 4:
        assert time.monotonic() < deadline, "no rank has begun"
        time.sleep(0.05)
    time.sleep(wait_s)
    return execution, time.monotonic()


def _ranks(kernel: RealKernel) -> list[tuple[str, str]]:
    """The node and place of each rank that has begun, and its process there."""
    lines = (kernel.folder / "here").read_text().splitlines()
    return [(line.split()[0], line.split()[1]) for line in lines]


def agent_of(machines: Machines, host: str) -> int:
    (pid,) = (pid for pid, command in machines.processes(host).items() if "features.cluster.agent" in command)
    return pid


def works_again(notebook: RealKernel) -> None:
    notebook.do(f"{NODES}\naccelerator.wait_for_everyone()", timeout_s=60)


@pytest.mark.parametrize("program", [RAW, PREPARED], ids=["raw", "prepared"])
def test_parameters_are_those_of_four_local_ranks_and_classes_the_notebooks(notebook: RealKernel, program: str) -> None:
    cell = program.format(epochs=3, pause=0)
    notebook.do("model.load_state_dict(begun); torch.manual_seed(1)")
    notebook.do(f"{CELL}\n{cell}")
    notebook.do("here = copy.deepcopy(model.state_dict()); model.load_state_dict(begun); torch.manual_seed(1)")
    notebook.do(f"{NODES}\n{cell}")
    assert (
        notebook.value("max((here[name] - value).abs().max().item() for name, value in model.state_dict().items())")
        < 1e-6
    )
    assert notebook.value("(model.state_dict()['last.bias'] != begun['last.bias']).any().item()"), "it has trained"
    assert notebook.value("type(model) is Net")


def test_twenty_launches_in_a_row_do_not_hang(notebook: RealKernel) -> None:
    took = []
    for number in range(20):
        began = time.monotonic()
        notebook.do(f"{NODES}\naccelerator.wait_for_everyone()\nnumber = {number}")
        took.append(time.monotonic() - began)
        assert notebook.value("number") == number
    assert max(took[1:]) < 20, took


def test_twenty_stops_are_at_one_step_on_both_machines(notebook: RealKernel) -> None:
    for _ in range(20):
        execution, at = begun(notebook, f"{NODES}\n{LONG}", wait_s=0.7)
        notebook.interrupt()
        cell: Cell = execution.end(30)  # type: ignore[attr-defined]
        assert time.monotonic() - at < 10
        assert cell.error is not None
        assert re.search(r"every rank had done \d+ steps?\.", cell.error.evalue), cell.error.evalue
    works_again(notebook)


def test_a_second_press_ends_all_and_nothing_is_left_of_the_run(notebook: RealKernel, machines: Machines) -> None:
    waiting = "time.sleep(1000)"
    execution, _ = begun(notebook, f"{NODES}\n{waiting}")
    ranks = [pid for host in HOSTS for pid in machines.processes(host)]
    notebook.interrupt()
    notebook.interrupt()
    cell: Cell = execution.end(30)  # type: ignore[attr-defined]
    assert cell.error is not None
    assert cell.error.ename == "KeyboardInterrupt"
    time.sleep(1.0)
    left = [pid for host in HOSTS for pid in machines.processes(host)]
    assert len(left) < len(ranks), "four ranks have ended"
    works_again(notebook)


def test_an_error_of_a_rank_elsewhere_is_the_one_that_is_raised(notebook: RealKernel) -> None:
    failing = "if accelerator.process_index == 3: raise ZeroDivisionError('of rank 3')\naccelerator.wait_for_everyone()"
    began = time.monotonic()
    cell = notebook.run(f"{NODES}\n{failing}")
    assert cell.error is not None
    assert (cell.error.ename, cell.error.evalue) == ("ZeroDivisionError", "of rank 3")
    assert "rank 3 of 4 on west" in cell.error.text
    assert time.monotonic() - began < 15


def test_a_rank_that_is_killed_is_named_before_its_peers(notebook: RealKernel, machines: Machines) -> None:
    execution, at = begun(notebook, f"{NODES}\n{LONG}")
    (own,) = (int(pid) for node, pid in _ranks(notebook) if node == "1:1")
    os.kill(machines.process("west", own), 9)
    cell: Cell = execution.end(30)  # type: ignore[attr-defined]
    assert time.monotonic() - at < 10
    assert cell.error is not None
    assert cell.error.ename == "RankDied"
    assert re.search(r"rank 3 of 4 on west was killed by SIGKILL", cell.error.evalue), cell.error.evalue
    works_again(notebook)


def test_an_agent_that_is_killed_is_its_node_and_the_next_launch_works(
    notebook: RealKernel, machines: Machines
) -> None:
    execution, at = begun(notebook, f"{NODES}\n{LONG}")
    os.kill(agent_of(machines, "west"), 9)
    cell: Cell = execution.end(30)  # type: ignore[attr-defined]
    assert time.monotonic() - at < 10
    assert cell.error is not None
    assert re.search("node west is gone: its connection has ended.*ranks 2, 3 of 4 ran", cell.error.evalue)
    assert not machines.processes("west"), "its ranks have ended with it"
    works_again(notebook)


def test_a_node_that_ends_is_named_and_the_next_launch_works(notebook: RealKernel, machines: Machines) -> None:
    execution, at = begun(notebook, f"{NODES}\n{LONG}")
    machines.kill_node("west")
    cell: Cell = execution.end(30)  # type: ignore[attr-defined]
    assert time.monotonic() - at < 10
    assert cell.error is not None
    assert "node west is gone" in cell.error.evalue
    works_again(notebook)


def test_a_pause_of_the_network_ends_nothing(notebook: RealKernel, machines: Machines) -> None:
    execution, _ = begun(notebook, f"{NODES}\n{LONG}")
    machines.cable("west", "down")
    time.sleep(30)
    machines.cable("west", "up")
    time.sleep(8)
    notebook.interrupt()
    cell: Cell = execution.end(60)  # type: ignore[attr-defined]
    assert "node west has not answered for 5 s; it is given up after 60 s (--node-timeout)" in cell.text
    assert "node west answers again" in cell.text
    assert cell.error is not None
    assert cell.error.ename == "KeyboardInterrupt"


def test_a_cut_node_is_named_ends_itself_and_comes_back(notebook: RealKernel, machines: Machines) -> None:
    nodes = f"{NODES} --node-timeout 12s"
    notebook.do(f"{nodes}\naccelerator.wait_for_everyone()", timeout_s=60)
    execution, at = begun(notebook, f"{nodes}\n{LONG}")
    try:
        machines.cable("west", "down")
        cell: Cell = execution.end(60)  # type: ignore[attr-defined]
        assert time.monotonic() - at < 25
        assert cell.error is not None
        assert re.search(r"node west has not answered for 1\d s, where ranks 2, 3 of 4 ran", cell.error.evalue)
        deadline = time.monotonic() + 20
        while (left := machines.processes("west")) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert not left, "the machine that was cut off has ended its ranks itself"
    finally:
        machines.cable("west", "up")
    time.sleep(1)
    notebook.do(f"{nodes}\naccelerator.wait_for_everyone()", timeout_s=60)


def test_lines_arrive_all_of_them_in_the_order_of_each_rank(notebook: RealKernel) -> None:
    lines = "for line in range(1000): print('line', accelerator.process_index, line)"
    cell = notebook.do(f"{NODES}\n{lines}")
    found = [(int(rank), int(line)) for rank, line in re.findall(r"line (\d) (\d+)", cell.stdout)]
    assert len(found) == 4000
    for rank in range(4):
        assert [line for each, line in found if each == rank] == list(range(1000))


def test_a_file_that_all_ranks_save_is_written_by_rank_0_alone(notebook: RealKernel) -> None:
    saving = (
        RAW.format(epochs=1, pause=0)
        + """
    torch.save({"rank": os.environ["RANK"], "pid": os.getpid()}, "saved.pt")
    with open("writers", "a") as file:
        print(os.environ["RANK"], torch.load("saved.pt")["rank"], file=file)
"""
    )
    (notebook.folder / "writers").unlink(missing_ok=True)
    began = time.monotonic()
    notebook.do(f"{NODES}\n{saving}")
    assert time.monotonic() - began < 20
    lines = sorted((notebook.folder / "writers").read_text().splitlines())
    assert lines == ["0 0", "1 0", "2 0", "3 0"]


def test_a_hundred_megabytes_are_sent_once_to_each_node(notebook: RealKernel, machines: Machines) -> None:
    def received(host: str) -> int:
        path = "/sys/class/net/eth0/statistics/rx_bytes"
        command = ["ip", "netns", "exec", machines.spaces[host], "cat", path]
        return int(subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout)

    notebook.do("big = torch.zeros(25_000_000)")
    before = {host: received(host) for host in HOSTS}
    cell = notebook.do(f"{NODES}\nprint(big.shape)", timeout_s=120)
    assert "100.0 MB to each node" in cell.stdout
    for host in HOSTS:
        assert 100e6 < received(host) - before[host] < 130e6
    notebook.do("del big")


def test_only_torchs_store_and_gloo_listen_and_only_to_the_other_machine(
    notebook: RealKernel, machines: Machines
) -> None:
    execution, _ = begun(notebook, f"{NODES}\n{LONG}")
    found = {host: machines.listeners(host) for host in HOSTS}
    notebook.interrupt()
    execution.end(30)  # type: ignore[attr-defined]
    for host, address in HOSTS.items():
        assert found[host], host
        assert all(where.rpartition(":")[0] == address for where, _ in found[host]), found[host]


def test_checkpoints_have_every_ranks_part_and_go_on_on_one_machine(notebook: RealKernel) -> None:
    folder = notebook.folder / "saved"
    flags = f"--checkpoint-every 2s --keep-checkpoints 99 --checkpoint-dir {folder}"
    cell = PREPARED.format(epochs=50, pause=0.08)  # 100 steps
    notebook.do("model.load_state_dict(begun)")
    said = notebook.do(f"{NODES} {flags}\n{cell}", timeout_s=120)
    assert f"checkpoints in {folder} (all nodes see it)" in said.stdout
    saved = [each for each in folder.iterdir() if (each / "manifest.json").exists()]
    assert len(saved) > 1
    for each in saved:
        assert {path.name for path in each.glob("generators_*")} == {f"generators_{rank}.json" for rank in range(4)}
    notebook.do("model.load_state_dict(begun)")
    more = PREPARED.format(epochs=54, pause=0)
    assert "continuing from" in notebook.do(f"{CELL} {flags} --resume\n{more}", timeout_s=60).stdout
    notebook.do("went_on = copy.deepcopy(model.state_dict()); model.load_state_dict(begun)")
    notebook.do(f"{CELL}\n{more}", timeout_s=60)
    worst = "max((went_on[name] - value).abs().max().item() for name, value in model.state_dict().items())"
    assert notebook.value(worst) < 1e-12


def test_nothing_is_left_anywhere_after_the_kernel_was_killed(machines: Machines, tmp_path: Path) -> None:
    kernel = RealKernel(NEWEST, tmp_path, NBACCEL_SSH=machines.ssh, OMP_NUM_THREADS="1")
    before = {host: machines.processes(host).keys() for host in HOSTS}
    try:
        kernel.do(ABOVE)
        begun(kernel, f"{NODES}\n{LONG}")
        kernel.kill()
        assert not kernel.survivors(within_s=5.0)
        for host in HOSTS:
            assert not machines.processes(host).keys() - before[host]
    finally:
        kernel.close()


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ("north,west", "node north: .*(Could not resolve hostname|Name or service not known)"),
        ("east,10.77.0.99", "node 10.77.0.99: .*(timed out|No route to host)"),
    ],
)
def test_a_host_that_cannot_be_reached_is_named_within_seconds(notebook: RealKernel, nodes: str, message: str) -> None:
    began = time.monotonic()
    cell = notebook.run(f"{CELL} --nodes {nodes}\nprint(1)")
    assert cell.error is not None
    assert cell.error.ename == "LaunchRefused"
    assert re.search(message, cell.error.evalue), cell.error.evalue
    assert time.monotonic() - began < 12
