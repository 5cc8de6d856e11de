"""Trackers and logins in ranks of a real kernel: one run, by rank 0, and no rank waits for somebody to type a key.

Nothing here has a key or asks the net: wandb keeps its run on disk.
"""

from __future__ import annotations

import importlib.util

import pytest

from kernel.foreign_programs import LIGHTNING, SHARED, TRANSFORMERS, in_one_environment
from kernel.harness import RealKernel, accelerate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def needs(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; `make test` installs it")


NO_KEY = """
    import os
    for name in ("WANDB_API_KEY", "WANDB_MODE", "HF_TOKEN"):
        os.environ.pop(name, None)
    os.environ["HF_HOME"] = os.environ["WANDB_CONFIG_DIR"] = os.environ["NETRC"] = "nowhere"
"""


@pytest.mark.sample(3)
@in_one_environment
@pytest.mark.parametrize(
    ("package", "asks", "variable"),
    [
        ("wandb", "import wandb; wandb.login()", 'os.environ["WANDB_API_KEY"]'),
        ("wandb", "import wandb; wandb.init(project='x')", 'os.environ["WANDB_MODE"] = "offline"'),
        ("huggingface_hub", "import huggingface_hub; huggingface_hub.login()", 'os.environ["HF_TOKEN"]'),
        ("huggingface_hub", "import huggingface_hub; huggingface_hub.interpreter_login()", 'os.environ["HF_TOKEN"]'),
        ("getpass", "import getpass; getpass.getpass('key')", 'os.environ["WANDB_API_KEY"]'),
        ("builtins", "input('key')", 'os.environ["WANDB_API_KEY"]'),
    ],
)
def test_a_prompt_in_a_rank_is_an_error_with_the_variable_to_set(
    kernel: RealKernel, package: str, asks: str, variable: str
) -> None:
    needs(package)
    kernel.do(NO_KEY)
    assert variable in kernel.run(accelerate(asks, "fork")).failed("NoInput").evalue


@pytest.mark.full
@in_one_environment
def test_trainers_write_one_run_by_rank_0(kernel: RealKernel) -> None:
    """A Trainer of an earlier cell, whose callbacks were told there that theirs is the main process."""
    needs("transformers", "wandb", "tensorboard")
    kernel.do("import os, tempfile; os.chdir(tempfile.mkdtemp(dir='.'))")
    kernel.do(SHARED + TRANSFORMERS, timeout_s=120)
    kernel.do("""
        os.environ["WANDB_MODE"], os.environ["WANDB_SILENT"] = "offline", "true"
        arguments = settings()
        arguments.report_to, arguments.logging_dir = ["wandb", "tensorboard"], "board"
        os.environ["TENSORBOARD_LOGGING_DIR"] = "board"
        arguments.logging_strategy, arguments.logging_steps = "steps", 2
        made = Trainer(model=Net(), args=arguments, train_dataset=Numbers())
    """)
    kernel.do(accelerate("seen = train(made)", "fork", flags="--out seen"), timeout_s=120)
    assert kernel.value("seen") == [2, 8, True, True]
    kernel.do("import glob")
    assert kernel.value("len(glob.glob('**/offline-run-*', recursive=True))") == 1
    assert kernel.value("len(glob.glob('**/events.out.tfevents*', recursive=True))") == 1
    kernel.do("del os.environ['WANDB_MODE'], os.environ['WANDB_SILENT'], os.environ['TENSORBOARD_LOGGING_DIR']")


@in_one_environment
def test_a_logger_of_lightnings_writes_by_rank_0_alone(kernel: RealKernel) -> None:
    """Also before a trainer has told it its rank: the logger is of an earlier cell, and is used by itself."""
    needs("lightning", "tensorboard")
    kernel.do("import os, tempfile; os.chdir(tempfile.mkdtemp(dir='.'))")
    kernel.do(SHARED + LIGHTNING, timeout_s=120)
    kernel.do("from lightning.pytorch.loggers import CSVLogger\nlogger = CSVLogger('rows')")
    body = """
        logger.log_metrics({"loss": 1.0}, step=0)
        logger.save()
        seen = use_lightning(make_lightning(logger=logger))
    """
    kernel.do(accelerate(body, "fork", flags="--out seen"), timeout_s=120)
    assert kernel.value("seen") == [2, 8, True, True]
    kernel.do("import glob")
    assert kernel.value("len(glob.glob('rows/**/metrics.csv', recursive=True))") == 1


RAW = """
    import time, wandb
    from torch.utils.tensorboard import SummaryWriter
    run = wandb.init(project="raw", mode="offline", config={"lr": 0.1}, settings=wandb.Settings(silent=True))
    time.sleep(0 if run.disabled else 2.5)  # rank 0 comes to its writer later, as where wandb's service takes its time
    writer = SummaryWriter("board")
    writer.add_scalar("loss", 1.0, 0)
    writer.add_scalars("both", {"one": 1.0, "other": 2.0}, 0)
    writer.add_hparams({"lr": 0.1}, {"accuracy": 1.0})
    wandb.log({"loss": 1.0})
    writer.close()
    wandb.finish()
    print("lr", run.config["lr"])
"""


@pytest.mark.sample(1)
@in_one_environment
def test_trackers_of_a_raw_cell_write_one_run_by_rank_0(kernel: RealKernel, start: str) -> None:
    needs("wandb", "tensorboard")
    kernel.do("import glob, os, tempfile; os.chdir(tempfile.mkdtemp(dir='.'))")
    cell = kernel.do(accelerate(RAW, start), timeout_s=120)
    assert "lr 0.1" in cell.stdout
    assert cell.text.count("wandb.init makes one run, by rank 0 of 2; what other ranks log goes nowhere.") == 1
    assert kernel.value("len(glob.glob('**/offline-run-*', recursive=True))") == 1
    assert kernel.value("len(glob.glob('**/events.out.tfevents*', recursive=True))") == 4  # as in one process


@pytest.mark.full
@in_one_environment
def test_runs_of_each_rank_that_are_meant_are_written(kernel: RealKernel) -> None:
    """A group of runs, a folder for each rank; and all of them with `--independent`."""
    needs("wandb", "tensorboard")
    apart = RAW.replace('project="raw"', 'project="raw", group="ranks"').replace(
        '"board"', '"board" + str(accelerator.process_index)'
    )
    for body, flags in ((apart, ""), (RAW, "--independent")):
        kernel.do("import glob, os, tempfile; os.chdir(tempfile.mkdtemp(dir='.'))")
        cell = kernel.do(accelerate(body, "fork", flags=flags), timeout_s=120)
        assert "makes one run" not in cell.text
        assert kernel.value("len(glob.glob('**/offline-run-*', recursive=True))") == 2
        assert kernel.value("len(glob.glob('**/events.out.tfevents*', recursive=True))") == 8


@pytest.mark.full
@in_one_environment
def test_a_run_that_the_notebook_has_begun_goes_on_by_rank_0(kernel: RealKernel) -> None:
    """wandb was logged to by each rank; MLflow, which forgets its active run in a fork, began another one in each."""
    needs("wandb", "mlflow")
    kernel.do("""
        import os, tempfile
        os.chdir(tempfile.mkdtemp(dir="."))
        os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
        os.environ["MLFLOW_TRACKING_URI"] = "file:./mlruns"
        import mlflow, wandb
        run, other = wandb.init(project="x"), mlflow.start_run()
    """, timeout_s=120)  # fmt: skip
    cell = "for step in range(5):\n    run.log({'loss': step})\n    mlflow.log_metric('loss', step, step=step)"
    kernel.do(accelerate(cell, "fork"), timeout_s=120)
    kernel.do("values = mlflow.MlflowClient().get_metric_history(other.info.run_id, 'loss')")
    assert kernel.value("[each.value for each in values]") == [0, 1, 2, 3, 4]
    kernel.do("run.log({'after': 1})")
    assert kernel.value("run.step") == 6
    assert kernel.value(
        "[each.info.run_id == other.info.run_id for each in mlflow.search_runs(output_format='list')]"
    ) == [True]
    kernel.do("run.finish(); wandb.teardown(); mlflow.end_run()", timeout_s=120)
