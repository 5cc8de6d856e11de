"""The extension in a shell: what registering changes there, and that unregistering takes it back."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from IPython.core.error import UsageError

import nbaccel
from nbaccel.base.hardware import Gpu, Survey
from nbaccel.errors import LaunchRefused
from nbaccel.notebook.cell_mode import run_cell
from nbaccel.notebook.magics import AccelerateMagics, register, unregister
from nbaccel.notebook.session import LastRun, Session
from nbaccel.notebook.shell_hooks import FailedCells
from nbaccel.options.run_options import RunOptions

CUDA_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


def traces(shell: Any) -> tuple[Any, ...]:
    """Everything in a shell that the extension may change."""
    hooks = shell.strdispatchers["complete_command"].strs
    return (
        sorted(shell.magics_manager.registry),
        "accelerate" in shell.magics_manager.magics["line"],
        "accelerate" in shell.magics_manager.magics["cell"],
        "%accelerate" in shell.magics_manager.magics["line"],
        list(shell.input_transformers_cleanup),
        [len(callbacks) for callbacks in shell.events.callbacks.values()],
        {key: len(chain.chain) for key, chain in hooks.items() if chain.chain},
        list(getattr(shell.Completer, "custom_matchers", [])),
        [len(chain.chain) for chain in shell.strdispatchers["complete_command"].regexs.values() if chain.chain],
        vars(shell).get("_object_find"),
        os.environ.get(CUDA_CHECK),
    )


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def no_cuda_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CUDA_CHECK, raising=False)


@pytest.mark.parametrize("line", ["%accelerate help", "%accelerate --help", "%%accelerate -n 2 --help\n1 / 0"])
def test_help_is_the_table_of_commands_and_flags(shell: Any, capsys: pytest.CaptureFixture[str], line: str) -> None:
    register(shell)
    assert shell.run_cell(line).success
    said = capsys.readouterr().out
    assert said.startswith("  %accelerate [-n N]")
    assert "\n  %accelerate doctor            what this machine offers\n" in said
    assert "\n  -n N, --num-processes N    ranks to start;" in said
    assert said.endswith("The cell was not run.\n") == line.startswith("%%")
    unregister(shell)


def test_loading_twice_doubles_nothing_and_keeps_the_configuration(shell: Any) -> None:
    register(shell)
    once = traces(shell)
    shell.run_cell("%accelerate config seed=3")
    register(shell)
    assert traces(shell) == once
    assert shell.magics_manager.registry["AccelerateMagics"].session.configuration.options.seed == 3
    unregister(shell)


def test_unloading_leaves_the_shell_as_it_was(shell: Any) -> None:
    before = traces(shell)
    register(shell)
    assert traces(shell) != before
    unregister(shell)
    assert traces(shell) == before
    unregister(shell)


def test_loading_as_an_extension_prints_nothing(shell: Any, capsys: Any) -> None:
    shell.run_cell("%load_ext nbaccel")
    shell.run_cell("%reload_ext nbaccel")
    assert capsys.readouterr() == ("", "")
    assert traces(shell)[1:4] == (True, True, True)
    unregister(shell)


def test_loading_as_an_extension_imports_nothing_of_what_a_launch_needs() -> None:
    code = """
    import sys
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.core.magic_arguments import magic_arguments
    shell = InteractiveShell.instance()
    before = set(sys.modules)
    shell.run_line_magic("load_ext", "nbaccel")
    loaded = set(sys.modules) - before
    print(sorted(name for name in loaded if name.startswith("nbaccel.launching") or name in WAITS))
    print(len(loaded))
    shell.run_line_magic("accelerate", "")
    """
    waits = {"torch", "ipywidgets", "matplotlib", "psutil", "pynvml", "cloudpickle", "nbaccel.notebook.session"}
    line = [sys.executable, "-c", f"WAITS = {waits}\n{textwrap.dedent(code)}"]
    told = subprocess.run(line, capture_output=True, text=True, check=True).stdout.splitlines()
    assert told[0] == "[]"
    assert int(told[1]) <= 27  # each is a fraction of a millisecond of the 20 that `%load_ext` may take
    assert told[2].startswith("next cell: ")  # everything comes with the first magic


def test_availability_of_cuda_is_asked_of_nvml_unless_the_user_says_otherwise(
    shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(shell)
    assert os.environ[CUDA_CHECK] == "1"
    unregister(shell)
    monkeypatch.setenv(CUDA_CHECK, "0")
    register(shell)
    unregister(shell)
    assert os.environ[CUDA_CHECK] == "0"


@pytest.mark.parametrize(("gpus", "started"), [((), 0), ((Gpu(0, "GPU-a", "Tesla T4", 1),), 1)])
def test_the_zygote_is_started_early_only_where_there_is_a_gpu(shell: Any, gpus: Any, started: int) -> None:
    class Session:
        cuda = type("Watch", (), {"after_cell": staticmethod(lambda result: None)})
        failed_cells = FailedCells()
        zygotes = 0

        def survey(self) -> Survey:
            return Survey(gpus=gpus)

        def start_zygote(self) -> None:
            self.zygotes += 1

        def close(self) -> None:
            """Nothing runs."""

    session = Session()
    magics = AccelerateMagics(shell, session, may_have_gpus=lambda: True)  # type: ignore[arg-type]
    magics.install()
    magics.remove()
    assert session.zygotes == started


def test_status_says_what_the_next_cell_would_run_on_and_how_the_last_went(planned: Any) -> None:
    assert planned.run("%accelerate").stdout == (
        "next cell: 1 rank on the CPU; a prepared loop: precision no (a CPU gains nothing from half precision), "
        "accumulate 1; an unmodified one computes and steps as it is written; no run yet\n"
    )
    planned.session.last_run = LastRun("Cell In[5]", "stopped", 12.34)
    assert planned.run("%accelerate").stdout.endswith("; last run: Cell In[5] stopped after 12.3 s\n")
    planned.run("%accelerate config devices=3")
    assert "refused as configured (--devices 3: there is no GPU '3'" in planned.run("%accelerate").stdout


def test_a_list_of_settings_may_have_blanks(planned: Any) -> None:
    assert planned.run("%accelerate config out=model, history seed=3").stdout == "out=model,history seed=3\n"


def test_a_panel_needs_a_notebook() -> None:
    with pytest.raises(RuntimeError, match=r"nbaccel\.panel\(\) shows a form in a notebook, and this program runs out"):
        nbaccel.panel()


def test_what_is_saved_is_where_the_next_notebook_begins(planned: Any, recorder: Any) -> None:
    saved = planned.run("%accelerate config accumulate=4 --save").stdout
    assert saved == f"saved to {Path('nbaccel.toml').absolute()}: accumulate=4\n"
    next_session = Session(planned.shell, recorder, survey=planned.session.survey)
    with pytest.raises(LaunchRefused, match="recorded"):
        run_cell(next_session, RunOptions(seed=1), "1")
    said = planned.capsys.readouterr().out.splitlines()
    assert said[0] == "nbaccel.toml: accumulate=4"
    assert said[1] == "1 rank on CPU, seed 1; accumulate 4"
    with pytest.raises(LaunchRefused, match="recorded"):
        run_cell(next_session, RunOptions(accumulate=2), "1")
    (line,) = planned.capsys.readouterr().out.splitlines()
    assert "accumulate 2" in line


def test_a_file_that_cannot_be_followed_stops_the_cell_in_one_sentence(planned: Any, recorder: Any) -> None:
    Path("nbaccel.toml").write_text("acumulate = 4")
    ran = planned.run("%%accelerate\n1")
    assert ran.stderr.startswith(
        "UsageError: nbaccel.toml: there is no setting 'acumulate' (did you mean accumulate=…?)"
    )
    assert recorder.specs == []


def test_saving_or_not_is_the_last_that_can_go_wrong(planned: Any) -> None:
    ran = planned.run("%accelerate config accumulate=0 --save")
    assert "batches per optimizer step are 1 or more; got '0'" in ran.stderr
    assert not Path("nbaccel.toml").exists()


def test_another_command_is_one_sentence(planned: Any) -> None:
    ran = planned.run("%accelerate -n 2")
    assert isinstance(ran.error, UsageError)
    assert ran.stderr == (
        "UsageError: %accelerate -n is no command: there is %accelerate alone, or with config, doctor, memory, "
        "estimate, why, status, runs, export, nodes, wait, attach, last, stop, start, push, pull or restart. Flags "
        "belong to a cell that begins with %%accelerate, two percent signs, and runs in ranks.\n"
    )


def test_a_misspelt_command_is_answered_with_the_one_that_was_meant(planned: Any) -> None:
    ran = planned.run("%accelerate wy")
    assert ran.stderr == "UsageError: %accelerate wy is no command; did you mean %accelerate why?\n"


def test_a_cell_magic_below_code_is_one_sentence_and_runs_nothing(planned: Any, recorder: Any) -> None:
    ran = planned.run("above = 1\n%%accelerate -n 2\nbelow = 2")
    assert ran.stderr == (
        "UsageError: %%accelerate has to be the first line of its cell, below comments at most: the lines above it "
        "ran in the notebook, no rank was started, and nothing below it ran.\n"
    )
    assert recorder.specs == []
    assert "above" in planned.names
    assert "below" not in planned.names


def test_help_shows_the_flags(planned: Any) -> None:
    assert "--mixed-precision P  auto, no, fp16 or bf16; default auto" in planned.run("%accelerate?").stdout
