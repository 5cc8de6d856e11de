"""`nbaccel launch`: real ranks of real scripts, and what is refused before any of them starts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nbaccel.base.hardware import Gpu, Survey
from nbaccel.cli import main

TRAIN = """
import json, os, sys
import psutil, torch
from nbaccel import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    with accelerator.accumulate(model):
        accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
weights = accelerator.gather(model.module.weight.detach().sum()[None]).tolist()
agent = psutil.Process().parent()
listening = {
    connection.laddr.ip
    for process in (agent, *agent.children())
    for connection in process.connections("inet")
    if connection.status == "LISTEN"
}
facts = {
    "world": [accelerator.process_index, accelerator.num_processes],
    "precision": accelerator.mixed_precision,
    "accumulate": accelerator.gradient_accumulation_steps,
    "threads": os.environ["OMP_NUM_THREADS"],
    "arguments": sys.argv[1:],
    "weights": weights,
    "listening": sorted(listening),
    "numbered": list({"cat", "dog", "bird", "fish", "cow", "pig"}),
}
sys.stdout.write(json.dumps(facts) + "\\n")
sys.stdout.flush()
accelerator.wait_for_everyone()
sys.exit(int(os.environ["RANK"]) * 7)
"""


def launch(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; from nbaccel.cli import main; sys.exit(main())", "launch", *words]
    env = {**os.environ, "PYTHONPATH": os.getcwd(), **environ}
    env.pop("PYTHONHASHSEED", None)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=110, check=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_ranks_train_agree_and_follow_flags_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "nbaccel.toml").write_text(
        'num-processes = 2\nmixed-precision = "bf16"\naccumulate = 4\nplain = true\n'
    )
    done = launch(tmp_path, "-a", "2", "train.py", "-n", "5", "--resume")
    assert done.returncode == 7, done.stderr  # rank 1's
    by_rank = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda facts: facts["world"])
    assert [facts["world"] for facts in by_rank] == [[0, 2], [1, 2]]
    assert by_rank[0]["weights"] == by_rank[1]["weights"]
    assert len(set(by_rank[0]["weights"])) == 1
    assert by_rank[0]["numbered"] == by_rank[1]["numbered"]  # 720 orders, if each process has hashes of its own
    for facts in by_rank:
        assert (facts["precision"], facts["accumulate"]) == ("bf16", 2)
        assert facts["arguments"] == ["-n", "5", "--resume"]
        assert facts["listening"] == ["127.0.0.1"]
    assert "nbaccel.toml sets plain too, which a script cannot follow." in done.stderr
    assert "2 ranks on the CPU, precision bf16, accumulate 2, " in done.stderr
    assert "nbaccel: rank 1 (process " in done.stderr
    assert "ended with exit status 7; what it said is above this line." in done.stderr


@pytest.mark.full
@pytest.mark.timeout(120)
def test_a_script_is_sharded_by_the_flags_of_accelerate_launch(tmp_path: Path) -> None:
    (tmp_path / "shard.py").write_text(
        "import sys, torch\n"
        "from torch.distributed.fsdp import FSDPModule\n"
        "from nbaccel import Accelerator\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "accelerator = Accelerator()\n"
        "model, optimizer = accelerator.prepare(model, optimizer)\n"
        "accelerator.backward(model(torch.ones(2, 4)).sum())\n"
        "optimizer.step()\n"
        "groups = sum(isinstance(module, FSDPModule) for module in model.modules())\n"
        "rows = model[1].weight.to_local().shape[0]\n"
        "sys.stdout.write(f'{groups} {rows} {accelerator.distributed_type!s}\\n')\n"  # print writes the end apart
        "accelerator.wait_for_everyone()\n"
    )
    done = launch(tmp_path, "--use_fsdp", "--fsdp_auto_wrap_policy", "NO_WRAP", "--cpu", "-n", "2", "shard.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["1 1 FSDP", "1 2 FSDP"]
    assert "2 ranks on the CPU, strategy fsdp, " in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_module_of_plain_torch_runs_and_a_killed_rank_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import os, signal, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(())\n"
        "dist.all_reduce(total)\n"
        "assert total == 2\n"
        "os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == os.environ['RANK'] else dist.barrier()\n"
    )
    done = launch(tmp_path, "-n", "2", "-m", "job", "1")
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert "was ended by signal 9, as the system does when memory runs out; the other ranks were ended." in done.stderr


def test_a_dry_run_prints_the_line_and_starts_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "-n", "2", "--seed", "3", "--dry-run", "train.py", "two words"]) == 0
    line = capsys.readouterr().out.strip()
    assert line.endswith(" NBACCEL_SEED=3 torchrun --standalone --nproc-per-node 2 train.py 'two words'")
    assert "GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo " in line


def test_what_keeps_a_gpu_from_computing_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = Gpu(0, "GPU-a", "Tesla T4", 16 * 10**9, used_bytes=16 * 10**9, number=0)
    monkeypatch.setattr(Survey, "take", classmethod(lambda cls: Survey(gpus=(full,))))
    assert main(["launch", "--dry-run", "train.py"]) == 0
    said = capsys.readouterr()
    assert "GPU 0 Tesla T4 is full: 0.0 GB of 16.0 GB are free" in said.err
    assert "CUDA_VISIBLE_DEVICES=0 " in said.out


def test_what_the_shell_says_about_threads_and_interfaces_holds(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "11")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    settings = "OMP_NUM_THREADS=11 GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=lo PYTHONHASHSEED="
    assert main(["launch", "--dry-run", "train.py"]) == 0
    assert capsys.readouterr().out.startswith(f"{settings}0 ")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert main(["launch", "--dry-run", "train.py"]) == 0
    assert capsys.readouterr().out.startswith(f"{settings}7 ")


def test_several_machines_get_the_interface_of_the_route(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "203.0.113.7"]
    status = main(["launch", *nodes, "--master-port", "1234", "--dry-run", "train.py"])
    out, err = capsys.readouterr()
    if "no way leads from this machine" in err:
        pytest.skip("this machine has no route to another one")
    assert status == 0
    assert "SOCKET_IFNAME=lo" not in out
    assert f"torchrun {' '.join(nodes)} --master-port 1234 --nproc-per-node 1 train.py" in out


def under_slurm(monkeypatch: pytest.MonkeyPatch, tasks: str) -> None:
    step = {"JOB_ID": "4001", "NODEID": "1", "STEP_NUM_NODES": "2", "STEP_NODELIST": "203.0.113.[7-8]"}
    for name, value in (step | {"STEP_TASKS_PER_NODE": tasks}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)


def test_srun_says_which_machine_this_is(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    under_slurm(monkeypatch, "1(x2)")
    status = main(["launch", "-n", "1", "--cpu", "--dry-run", "train.py"])
    out, err = capsys.readouterr()
    if "no way leads from this machine" in err:
        pytest.skip("this machine has no route to another one")
    assert status == 0
    nodes = "--nnodes 2 --node-rank 1 --master-addr 203.0.113.7 --master-port 29501 --nproc-per-node 1"
    assert f"torchrun {nodes} train.py" in out
    assert "node 1 of 2" in err


def test_a_command_for_each_rank_of_slurm_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    under_slurm(monkeypatch, "4(x2)")
    assert main(["launch", "--dry-run", "train.py"]) == 2
    assert "srun has started 4(x2) commands on each machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("", "a script is missing: nbaccel launch -n 2 train.py. nbaccel launch --help lists every flag."),
        ("-m", "a module is missing: "),
        ("absent.py", "there is no script absent.py in "),
        ("--resume here train.py", "there is no script here in "),
        ("notes.ipynb", "notes.ipynb is a notebook: jupyter nbconvert --to script notes.ipynb makes a script of it."),
        ("-n 0 train.py", "-n/--num-processes: a number of ranks is 1 or more, or auto; got '0'."),
        ("-n", "-n/--num-processes needs a value. nbaccel launch --help lists every flag."),
        ("-p fp8 train.py", "-p/--mixed-precision: a precision is auto, no, fp16 or bf16; got 'fp8'."),
        (
            "--out model train.py",
            "--out is for the cells of a notebook; a script has no use for it. nbaccel launch ",
        ),
        ("--sed 3 train.py", "there is no flag --sed; did you mean --seed? nbaccel launch --help lists every flag."),
        ("--cpu=1 train.py", "--cpu takes no value; got '1'."),
        ("--cpu --devices 0 train.py", "--cpu and --devices 0 contradict each other: leave one of them out."),
        ("--nnodes 0 train.py", "--nnodes: machines are 1 or more; got '0'."),
        ("--nnodes 2 train.py", "--nnodes 2 needs --node-rank and --master-addr: every machine gets the same command"),
        ("--nnodes 2 --node-rank -1 train.py", "--node-rank: nodes are numbered from 0; got '-1'."),
        (
            "--nnodes 2 --node-rank 2 --master-addr 10.0.0.1 train.py",
            "--node-rank 2: 2 nodes (--nnodes) have the numbers 0..1.",
        ),
        ("--master-addr 10.0.0.1 train.py", "--master-addr is for a launch on several machines: say how many with "),
        ("--master-port 70000 train.py", "--master-port: a port lies in 1..65535; got '70000'."),
        (
            "--nnodes 2 --node-rank 0 --master-addr localhost train.py",
            "on this machine, which no other machine can reach (stock Debian gives a host's own name such an address); "
            "give the IP address of node 0 (this machine has ",
        ),
        (
            "--nnodes 2 --node-rank 0 --master-addr no.such.host.invalid train.py",
            "--master-addr no.such.host.invalid: this machine knows no address of that name (",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence_and_nothing_starts(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, sentence: str
) -> None:
    monkeypatch.setattr("torch.distributed.run.run", lambda _: pytest.fail("it starts, and waits for other machines"))
    assert main(["launch", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("nbaccel: ")
    assert sentence in last


def test_a_file_that_cannot_be_followed_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "nbaccel.toml").write_text("accumulate = 0\n")
    assert main(["launch", "train.py"]) == 2
    assert (
        "nbaccel.toml: -a/--accumulate: batches per optimizer step are 1 or more; got '0'." in capsys.readouterr().err
    )


def test_help_lists_every_flag_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: nbaccel launch [flags] SCRIPT [arguments of the script]\n")
    assert re.search(r"^  --dry-run +print the command that would run, and end$", out, re.MULTILINE)
    assert re.search(r"^  --main-process-port PORT +as --master-port$", out, re.MULTILINE)
    assert "default what the script says, else no\n" in out


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_interrupt_of_the_command_ends_its_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    # In one piece: what two ranks print goes the same way.
    script.write_text("import os, threading\nos.write(1, b'%d\\n' % os.getpid())\nthreading.Event().wait(100)\n")
    command = [sys.executable, "-c", "import sys; from nbaccel.cli import main; sys.exit(main())", "launch", "-n", "2"]
    with subprocess.Popen(
        [*command, str(script)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        ranks = [int(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert said.splitlines()[-1] == "nbaccel: stopped by SIGINT; the ranks of this machine are gone."
    assert [pid for pid in ranks if os.path.exists(f"/proc/{pid}")] == []


WAITS = """
import os, sys, torch
from nbaccel import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
data = torch.utils.data.DataLoader(torch.ones(32, 4), batch_size=2)
model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
for number, x in enumerate(data):
    try:
        loss = model(x).sum()
        if accelerator.process_index == 1 and number == 3:
            if sys.argv[1] == "breaks":
                break
            if sys.argv[1] == "catches":
                raise RuntimeError("of one rank")
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    except RuntimeError:
        pass
    if sys.argv[1] == "gathers" and accelerator.is_main_process:
        accelerator.gather(loss.detach())
if sys.argv[1] == "breaks":
    accelerator.gather(loss.detach())
"""


def launch_soon_sure(folder: Path, what: str) -> subprocess.CompletedProcess[str]:
    """Launch a script of which one rank `what`, with a watch that is sure of a hang after two seconds."""
    (folder / "waits.py").write_text(WAITS)
    code = "import sys; from nbaccel.launching.processes import hangs; hangs._CERTAIN_S = 2.0; "
    code += "from nbaccel.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "launch", "-n", "2", "--cpu", "waits.py", what]
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("what", ["breaks", "gathers"])
def test_ranks_of_a_script_that_wait_in_different_calls_are_ended_with_the_line_of_each(
    what: str, tmp_path: Path
) -> None:
    done = launch_soon_sure(tmp_path, what)
    assert done.returncode == 1, done.stderr
    assert "the ranks are out of step: they wait in different calls" in done.stderr
    assert len(re.findall(r"rank [01]: .*waits\.py, line \d+", done.stderr)) == 2, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_script_whose_ranks_end_a_step_apart_is_told_so(tmp_path: Path) -> None:
    done = launch_soon_sure(tmp_path, "catches")
    assert done.returncode == 0, done.stderr
    assert "the ranks have begun different numbers of training steps: rank 0 8, rank 1 7." in done.stderr
