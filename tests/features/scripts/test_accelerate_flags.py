"""`nbaccel launch` with the command lines of `accelerate launch`: the same flags, and its configuration file."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from IPython.core.error import UsageError

from environments import REPOSITORY
from nbaccel.base.hardware import Gpu, Survey
from nbaccel.cli import main
from nbaccel.features.scripts.accelerate_config import read_plain_yaml
from nbaccel.features.scripts.accelerate_flags import _FSDP, fsdp_environ, is_elsewhere, take
from nbaccel.features.scripts.script_command import _parser


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, on a machine with two GPUs where nobody has run `accelerate config`."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    gpus = tuple(Gpu(index, f"GPU-{index}", "Tesla T4", 16 * 10**9, number=index) for index in range(2))
    monkeypatch.setattr(Survey, "take", classmethod(lambda cls: Survey(gpus=gpus, cpu_count=4)))
    monkeypatch.setattr("nbaccel.features.scripts.script_command.before_a_run", lambda gpus: [])
    return tmp_path


@pytest.fixture
def launched(capsys: pytest.CaptureFixture[str]) -> Any:
    """What a launch would run, its exit status, and what it says."""

    def launch(line: str) -> tuple[str, int, list[str]]:
        status = main(["launch", "--dry-run", *line.split()])
        out, err = capsys.readouterr()
        return out.strip(), status, [said.removeprefix("nbaccel: ") for said in err.splitlines()]

    return launch


@pytest.mark.slow  # to import Accelerate
def test_every_flag_of_accelerate_launch_is_known_and_takes_as_many_words() -> None:
    """Both spellings; a flag that took one word more or less would eat the script, or leave its value as one."""
    launcher = pytest.importorskip("accelerate.commands.launch")
    ours = _parser()._option_string_actions
    wrong = []
    for action in launcher.launch_command_parser()._actions:
        for flag in {*action.option_strings, *(name.replace("_", "-") for name in action.option_strings)}:
            theirs = 1 if action.nargs == 0 else 2
            if is_elsewhere(flag):
                try:
                    takes = take([flag, "value"])[0]
                except UsageError as refused:
                    takes = theirs if str(refused).startswith(f"{flag}: ") else 0
            else:
                known = ours.get(flag if not flag.startswith("--") else flag.replace("_", "-"))
                takes = 0 if known is None else 1 if known.nargs == 0 else 2
            if takes != theirs:
                wrong.append((flag, takes, theirs))
    assert not wrong


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("--num_processes 2 --mixed_precision=fp16 train.py --num_processes 7",
         ["ACCELERATE_MIXED_PRECISION=fp16 ", "CUDA_VISIBLE_DEVICES=0,1 ",
          "--nproc-per-node 2 train.py --num_processes 7"]),
        ("--multi_gpu --num-processes=1 train.py", ["CUDA_VISIBLE_DEVICES=0 ", "--nproc-per-node 1 "]),
        ("--multi_gpu --gpu_ids all train.py", ["CUDA_VISIBLE_DEVICES=0,1 ", "--nproc-per-node 2 "]),
        ("--gpu_ids 1 train.py", ["CUDA_VISIBLE_DEVICES=1 ", "--nproc-per-node 1 "]),
        ("--cpu --num_processes 3 train.py", ["CUDA_VISIBLE_DEVICES='' ", "--nproc-per-node 3 "]),
        ("--gradient_accumulation_steps 4 --num_cpu_threads_per_process 3 --debug train.py",
         ["OMP_NUM_THREADS=3 ", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4 ", "ACCELERATE_DEBUG_MODE=1 "]),
        ("--dynamo_backend INDUCTOR --dynamo_mode max-autotune --dynamo_use_dynamic train.py",
         ["ACCELERATE_DYNAMO_BACKEND=inductor ACCELERATE_DYNAMO_MODE=max-autotune ",
          "ACCELERATE_DYNAMO_USE_FULLGRAPH=False ACCELERATE_DYNAMO_USE_DYNAMIC=True "]),
        ("--tee 3 --log_dir my_logs --role r --max_restarts 2 --monitor_interval 1 -m train",
         [" --tee 3 --log-dir my_logs --role r --max-restarts 2 --monitor-interval 1.0 --module train"]),
        ("--no_python sh -c true", [" --no-python sh -c true"]),
        ("--strategy FSDP train.py", ["NBACCEL_STRATEGY=fsdp "]),
        ("--use_deepspeed --zero_stage=3 --offload-param-device cpu --gradient_clipping 0.5 --zero3_init_flag true "
         "--deepspeed_config_file z.json train.py",
         ["NBACCEL_STRATEGY=deepspeed ", "ACCELERATE_USE_DEEPSPEED=true ", "ACCELERATE_DEEPSPEED_ZERO_STAGE=3 ",
          "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE=cpu ", "ACCELERATE_GRADIENT_CLIPPING=0.5 ",
          "ACCELERATE_DEEPSPEED_CONFIG_FILE=z.json ", "ACCELERATE_DEEPSPEED_ZERO3_INIT=true "]),
        ("--use_fsdp --fsdp_version 2 --fsdp-offload-params=true --fsdp_sharding_strategy 2 train.py",
         ["NBACCEL_STRATEGY=fsdp ", "ACCELERATE_USE_FSDP=true ", "FSDP_VERSION=2 ", "FSDP_OFFLOAD_PARAMS=true ",
          "FSDP_SHARDING_STRATEGY=SHARD_GRAD_OP "]),
        ("--quiet --same_network train.py", ["--nproc-per-node 2 train.py"]),
    ],
)  # fmt: skip
def test_a_flag_means_what_it_means_to_accelerate(launched: Any, line: str, parts: list[str]) -> None:
    command, status, said = launched(line)
    assert status == 0, said
    assert [part for part in parts if part not in command] == [], command
    assert len(said) == 1, "the devices, and nothing else"


def test_machines_share_the_processes_and_meet_as_they_are_told(launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbaccel.features.scripts.elastic.interface_to", lambda address, port: "eth0")
    where = "--num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1"
    meeting = "--nnodes 2 --node-rank 0 --master-addr 10.0.0.1"
    command, _, _ = launched(f"--num_processes 4 {where} --main_process_port 1234 train.py")
    assert command.endswith(f"torchrun {meeting} --master-port 1234 --nproc-per-node 2 train.py")
    command, _, _ = launched(f"-n 2 {meeting} train.py")  # torchrun's spelling: ranks of this machine
    assert command.endswith(f"{meeting} --master-port 29500 --nproc-per-node 2 train.py")
    command, _, _ = launched(f"--num_processes 2 {where} --rdzv_backend c10d --rdzv_conf timeout=60 train.py")
    meeting = "--rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29500 --rdzv-conf timeout=60"
    assert command.endswith(f"--nnodes 2 --node-rank 0 {meeting} --nproc-per-node 1 train.py")
    _, status, said = launched(f"--num_processes 3 {where} train.py")
    assert (status, said) == (
        2,
        [
            "--num_processes 3 are the ranks of all machines, and 2 of them (--num_machines) cannot have equally many; "
            "-n 3 on each is --nnodes 2 -n 3."
        ],
    )


def test_what_has_no_effect_is_said_in_a_line_for_each_reason(launched: Any) -> None:
    command, status, said = launched(
        "--fsdp_version 2 --fsdp-offload-params=true --fsdp_tp_size 2 --enable_cpu_affinity --zero_stage 3 "
        "--main_process_port 29501 --rdzv_backend static train.py"
    )
    assert status == 0
    assert command.endswith("torchrun --standalone --nproc-per-node 2 train.py")
    devices = "2 ranks on GPU 0 Tesla T4, GPU 1 Tesla T4, 2 CPU threads each"
    assert sorted(said) == sorted(
        [
            devices,
            "--fsdp_version, --fsdp_offload_params have no effect here: it goes with --use_fsdp.",
            "--fsdp_tp_size has no effect here: FSDP2, which is what runs, has no such option.",
            "--enable_cpu_affinity has no effect here: ranks are not bound to cores; taskset or numactl before the "
            "command binds them.",
            "--zero_stage has no effect here: it goes with --use_deepspeed.",
            "--main_process_port has no effect here: the ranks of one machine meet at a free port of its loopback "
            "interface.",
        ]
    )


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--use_fsdp --strategy ddp train.py", "--use_fsdp and --strategy ddp contradict each other: leave one of"),
        ("--strategy zero train.py", "--strategy: a strategy is auto, single, ddp, fsdp or deepspeed; got 'zero'."),
        ("--use_fsdp --fsdp_sharding_strategy NO_SHARD train.py",
         "--fsdp-sharding-strategy: NO_SHARD leaves the model whole on every rank, which is --strategy ddp."),
        ("--use_fsdp --fsdp_sharding_strategy 4 train.py",
         "what is sharded over all ranks is full_shard or shard_grad_op; got 'hybrid_shard'."),
        ("--use_fsdp --fsdp_reshard_after_forward maybe train.py", "this is true or false; got 'maybe'."),
        ("--use_fsdp --fsdp_auto_wrap_policy x train.py", "size_based_wrap or no_wrap; got 'x'."),
        ("--use_fsdp --fsdp_min_num_params 1e8 train.py", "a number of parameters is 0 or more; got '1e8'."),
        ("--use_fsdp --fsdp_state_dict_type LOCAL_STATE_DICT train.py", "a state is sharded_state_dict or full_state"),
        ("--use_deepspeed --strategy fsdp train.py", "--use_deepspeed and --strategy fsdp contradict each other"),
        ("--use_deepspeed --zero_stage 4 train.py", "a stage is 1, 2 or 3; got '4'."),
        ("--use_deepspeed --gradient_clipping no train.py", "a norm is a number above 0; got 'no'."),
        ("--use_megatron_lm train.py", "make the model fit by --strategy fsdp, by -p bf16, by -a with smaller batches"),
        ("--use_fsdp --fsdp_version 2 --use_parallelism_config train.py", "--use_parallelism_config: ranks have one"),
        ("--tpu train.py", "--tpu: TPUs are not driven here; start the program by Accelerate or torch_xla."),
        ("--mpirun_hostfile hosts train.py", "run this command on every machine, with --num_machines, --machine_rank"),
        ("--aws_access_key_id x train.py", "jobs of SageMaker are not started here"),
        ("--mixed_precision fp8 train.py", "-p/--mixed-precision: a precision is auto, no, fp16 or bf16; got 'fp8'."),
        ("--fsdp_version", "--fsdp-version needs a value. nbaccel launch --help lists every flag."),
        ("--nproc_per_node 2 train.py", "there is no flag --nproc_per_node; did you mean -n 2? nbaccel launch --help"),
        ("--nproc-per-node=2 train.py", "there is no flag --nproc-per-node; did you mean -n 2? nbaccel launch --help"),
        ("--num_proceses 2 train.py", "there is no flag --num_proceses; did you mean --num-processes?"),
        ("--dynamo_mode fast train.py", "--dynamo-mode: a mode is default, reduce-overhead or max-autotune; got"),
        ("--cpu --multi_gpu train.py", "--cpu and --multi_gpu contradict each other: leave one of them out."),
        ("-m --no_python train", "-m runs a module of Python, and --no_python what is none: leave one of them out."),
        ("--no_python no-such-program", "there is no program no-such-program that could be run;"),
        ("--num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1 --main_process_port 0 train.py",
         "--main_process_port 0 is any free port, which the other machines cannot know: name one."),
        ("--config_file absent.yaml train.py", "absent.yaml cannot be read: No such file or directory."),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_what_to_use_instead(launched: Any, line: str, sentence: str) -> None:
    command, status, said = launched(line)
    assert (command, status) == ("", 2)
    assert sentence in said[-1]


def written_by_accelerate(path: Path, **choices: Any) -> Path:
    """A configuration file as `accelerate config` writes one."""
    config = pytest.importorskip("accelerate.commands.config.config_args").ClusterConfig(
        **{
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "MULTI_GPU",
            "mixed_precision": "fp16",
            "use_cpu": False,
            "debug": False,
            "num_processes": 2,
            "gpu_ids": "all",
            "downcast_bf16": "no",
            **choices,
        }
    )
    path.parent.mkdir(exist_ok=True)
    config.to_json_file(path) if path.suffix == ".json" else config.to_yaml_file(path)
    return path


DYNAMO = {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "dynamo_use_dynamic": True}


@pytest.mark.parametrize("name", ["mine.yaml", "mine.json"])
@pytest.mark.parametrize("has_yaml", [True, False])
def test_the_file_that_accelerate_config_writes_is_followed_and_flags_beat_it(
    folder: Path, launched: Any, monkeypatch: pytest.MonkeyPatch, name: str, has_yaml: bool
) -> None:
    written_by_accelerate(folder / name, dynamo_config=DYNAMO, main_process_port=29501)
    (folder / "nbaccel.toml").write_text('mixed-precision = "no"\naccumulate = 4\n')
    if not has_yaml:
        monkeypatch.setitem(sys.modules, "yaml", None)
    command, status, said = launched(f"--config_file {name} --num_processes 1 train.py")
    assert status == 0, said
    assert said[0].startswith(f"{name} is followed where no flag says otherwise: multi_gpu True, dynamo_backend INDUCT")
    assert said[1].startswith("--main_process_port has no effect here")
    for part in ("MIXED_PRECISION=fp16 ", "ACCUMULATION_STEPS=4 ", "DYNAMO_BACKEND=inductor ", "--nproc-per-node 1 "):
        assert part in command
    assert "mixed_precision" in (folder / name).read_text(encoding="utf-8")


def test_accelerates_own_place_is_read_unless_the_folder_or_a_flag_says_otherwise(folder: Path, launched: Any) -> None:
    (folder / "home").mkdir()
    place = written_by_accelerate(folder / "home" / "accelerate" / "default_config.yaml")
    command, _, said = launched("train.py")
    assert said[0] == (
        f"{place} is followed where no flag says otherwise: multi_gpu True, num_processes 2, mixed_precision fp16."
    )
    assert "ACCELERATE_MIXED_PRECISION=fp16 " in command
    (folder / "nbaccel.toml").write_text('mixed-precision = "no"\n')
    assert "ACCELERATE_MIXED_PRECISION=no " in launched("train.py")[0]
    command, _, said = launched("--cpu train.py")  # as there: the file is for another device
    assert command.endswith("--nproc-per-node 1 train.py")
    assert not [line for line in said if "is followed" in line]


def test_unknown_keys_and_tables_without_effect_are_named_once(folder: Path, launched: Any) -> None:
    (folder / "c.yaml").write_text(
        "distributed_type: MULTI_GPU\nmixed_precision: no\nfsdp_config:\n  fsdp_version: 2\n"
        "tpu_zone: eu\ncolour: red\nnum_procs: 3\nmachine_rank: 0\ngpu_ids: 0\n"
    )
    command, status, said = launched("--config_file c.yaml train.py")
    assert status == 0, said
    assert "MIXED_PRECISION=no " in command
    assert "CUDA_VISIBLE_DEVICES=0 " in command
    assert said[1:-1] == [
        "c.yaml: Accelerate knows no key colour, num_procs; left out.",
        "c.yaml: --tpu_zone has no effect here: it goes with --tpu.",
        "c.yaml: --fsdp_config has no effect here: it goes with --use_fsdp.",
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: 3",
            "c.yaml: --fsdp-sharding-strategy: 3 leaves the model whole on every rank, which is --strategy ddp.",
        ),
        ("distributed_type: MEGATRON_LM", "A flag beats the file, --multi_gpu for one."),
        ("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 0", "a stage is 1, 2 or 3; got '0'."),
        (
            "distributed_type: MULTI_GPU\nparallelism_config:\n  parallelism_config_tp_size: 2",
            "ranks have one dimension here",
        ),
        ("distributed_type: MULTI_NPU", "c.yaml: distributed_type is MULTI_NPU, and ranks compute on CUDA or the CPU"),
        ("compute_environment: AMAZON_SAGEMAKER", "compute_environment is AMAZON_SAGEMAKER, and ranks are started on"),
        ("mixed_precision: fp8", "c.yaml: -p/--mixed-precision: a precision is auto, no, fp16 or bf16; got 'fp8'."),
        ("num_processes: -1", "c.yaml: num_processes is -1, so that every command says it;"),
        ("num_processes: many", "c.yaml: -n/--num-processes: a number of ranks is 1 or more, or auto; got 'many'."),
        ("mpirun_config:\n  mpirun_hostfile: hosts", "c.yaml: --mpirun_hostfile: ranks are not started by MPI here"),
        ("a: [1", "c.yaml: this is not YAML: "),
        ("- a", "c.yaml: this is no list of settings, KEY: VALUE."),
    ],
)
def test_a_file_that_cannot_be_followed_is_refused_in_a_sentence_that_names_it(
    folder: Path, launched: Any, text: str, sentence: str
) -> None:
    (folder / "c.yaml").write_text(text + "\n")
    command, status, said = launched("--config_file c.yaml train.py")
    assert (command, status) == ("", 2)
    assert sentence in said[-1]


def test_a_flag_that_says_how_the_run_is_spread_leaves_the_files_way_aside(folder: Path, launched: Any) -> None:
    written_by_accelerate(folder / "c.yaml", distributed_type="FSDP", fsdp_config={"fsdp_version": 2})
    assert "NBACCEL_STRATEGY=fsdp " in launched("--config_file c.yaml train.py")[0]
    command, status, said = launched("--config_file c.yaml --multi_gpu train.py")
    assert status == 0, said
    assert "--nproc-per-node 2 " in command
    assert "FSDP" not in command
    assert len(said) == 2, "that the file is followed, and the devices"
    command, status, said = launched("--config_file c.yaml --cpu train.py")
    assert status == 0, said
    assert "CUDA_VISIBLE_DEVICES='' " in command
    assert "FSDP" not in command
    command, _, said = launched("--config_file c.yaml --strategy ddp train.py")
    assert "NBACCEL_STRATEGY=ddp " in command
    assert "FSDP" not in command
    assert said[1] == "--fsdp_version has no effect here: it goes with --use_fsdp."


FSDP1 = {
    "fsdp_version": 1,
    "fsdp_reshard_after_forward": "SHARD_GRAD_OP",
    "fsdp_offload_params": False,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "BertLayer,BertEmbeddings",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_forward_prefetch": False,
    "fsdp_use_orig_params": True,
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_sync_module_states": True,
    "fsdp_activation_checkpointing": False,
}
"""What `accelerate config` asks for, with the first version of FSDP."""


@pytest.mark.parametrize("prefix", ["", "fsdp_"])
@pytest.mark.parametrize("has_yaml", [True, False])
def test_a_file_for_fsdp_chooses_the_strategy_and_each_of_its_variables(
    folder: Path, launched: Any, monkeypatch: pytest.MonkeyPatch, prefix: str, has_yaml: bool
) -> None:
    config = {name.replace("fsdp_", prefix, 1): value for name, value in FSDP1.items()}
    written_by_accelerate(folder / "c.yaml", distributed_type="FSDP", fsdp_config=config)
    if not has_yaml:
        monkeypatch.setitem(sys.modules, "yaml", None)
    command, status, said = launched("--config_file c.yaml --fsdp_offload_params true train.py")
    assert status == 0, said
    assert said[-1].startswith("2 ranks on GPU 0 Tesla T4, GPU 1 Tesla T4, precision fp16, strategy fsdp, ")
    assert len(said) == 2, "that the file is followed, and the devices"
    variables = {word.partition("=")[0]: word.partition("=")[2] for word in command.split() if "FSDP" in word}
    assert variables == {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "1",
        "FSDP_RESHARD_AFTER_FORWARD": "SHARD_GRAD_OP",
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer,BertEmbeddings",
        "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_FORWARD_PREFETCH": "false",
        "FSDP_USE_ORIG_PARAMS": "true",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_SYNC_MODULE_STATES": "true",
        "FSDP_ACTIVATION_CHECKPOINTING": "false",
    }


def test_the_variables_have_the_names_that_accelerates_own_launcher_sets() -> None:
    """Else Accelerate's programs, transformers and our plugin would not read them."""
    utils = pytest.importorskip("accelerate.utils.launch")
    names = set(re.findall(r'"(FSDP_\w+)"', inspect.getsource(utils)))
    parser = _parser()
    words = {"version": "1", "reshard_after_forward": "true", "sharding_strategy": "FULL_SHARD"}
    words |= {"auto_wrap_policy": "NO_WRAP", "min_num_params": "3", "state_dict_type": "FULL_STATE_DICT"}
    line = [f"--fsdp-{name.replace('_', '-')}={words.get(name, 'true')}" for name in _FSDP]
    assert set(fsdp_environ(parser.parse_args(line))) == names


def test_fsdp_by_the_folders_file_gets_the_flags_of_fsdp_too(folder: Path, launched: Any) -> None:
    (folder / "nbaccel.toml").write_text('strategy = "fsdp"\n')
    command, status, said = launched("--fsdp_reshard_after_forward false train.py")
    assert status == 0, said
    assert "NBACCEL_STRATEGY=fsdp " in command
    assert "FSDP_RESHARD_AFTER_FORWARD=false " in command
    assert "ACCELERATE_USE_FSDP" not in command, "which is for Accelerate's own programs, by Accelerate's own flag"


def test_yaml_without_pyyaml_reads_what_accelerate_writes_and_refuses_the_rest(folder: Path) -> None:
    path = written_by_accelerate(
        folder / "c.yaml", dynamo_config=DYNAMO, main_process_ip="10.0.0.1", tpu_env=["a", "b c"], gpu_ids="0,1",
        fsdp_config={"fsdp_offload_params": False, "ratio": 1.5e-3, "name": "it's: a #1", "nothing": None},
    )  # fmt: skip
    text = (
        "# written by hand\n---\n" + path.read_text() + 'quoted: "two words"  # here\nplain: a#b  # there\nempty: {}\n'
    )
    assert read_plain_yaml(text) == yaml.safe_load(text)
    for more in (
        "a: [1, 2]",
        "a: &x 1",
        "a: |\n  b",
        "a:\n  b:\n    c: 1",
        "  - x",
        "a: b: c",
        "a: 'x",
        "a: 1\n  b: 2",
    ):
        with pytest.raises(ValueError, match=r"^line \d is more YAML than is read without PyYAML: pip install pyyaml"):
            read_plain_yaml(more)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_program_of_another_language_is_started_again_and_its_output_is_kept(folder: Path) -> None:
    script = 'echo "rank $RANK threads $OMP_NUM_THREADS"; test $TORCHELASTIC_RESTART_COUNT = 1'
    command = [sys.executable, "-c", "import sys; from nbaccel.cli import main; sys.exit(main())", "launch"]
    flags = (
        "--cpu --num_processes 2 --num_cpu_threads_per_process 3 --max_restarts 1 --tee 1 --log_dir logs --no_python"
    )
    done = subprocess.run(
        [*command, *flags.split(), "sh", "-c", script],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(line.partition("]:")[2] for line in done.stdout.splitlines()) == [
        *["rank 0 threads 3"] * 2,
        *["rank 1 threads 3"] * 2,
    ]
    assert len(list(folder.glob("logs/*/attempt_*/*/stdout.log"))) == 4
