"""Ranks that stay, as a notebook has them: each wrong use is one sentence, and what is said of them is true."""

from __future__ import annotations

import os
import re
import select
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nbaccel.base.hardware import Gpu, Survey
from nbaccel.features.persistent.persistent_session import PersistentSession
from nbaccel.launching import api
from nbaccel.launching.tasks.cell_code import CellSource
from nbaccel.options.run_options import RunOptions

START = "%accelerate start -n 2 --cpu"


@pytest.fixture
def staying(notebook: Any) -> Iterator[Any]:
    """A notebook with two ranks that stay, forked and without a process group."""
    notebook.session.stay._setup = None
    assert notebook.run(START).error is None
    yield notebook
    notebook.session.close()


def said(ran: Any) -> str:
    """The one sentence of an error, without times of day."""
    assert ran.error is not None
    return re.sub(r"\d\d:\d\d:\d\d", "NOW", str(ran.error))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("%accelerate stop", "nothing runs in the background, and no ranks stay."),
        ("%accelerate push x", "no ranks stay: %accelerate start makes some, and so does --keep in a cell."),
        ("%accelerate pull x", "no ranks stay: %accelerate start makes some, and so does --keep in a cell."),
        ("%accelerate restart", "no ranks stay, and none did: %accelerate start makes some."),
        (
            "%%accelerate --only 1\nx",
            "--only 1 names ranks that stay, and none do: %accelerate start, or leave it out.",
        ),
        (
            "%accelerate start --out x",
            "--out belongs to a cell, not to the start: write it behind %%accelerate.",
        ),
        (
            "%accelerate start -t 3",
            "--timeout belongs to a cell, not to the start: write it behind %%accelerate.",
        ),
        (
            "%accelerate start -n 1 --start inline",
            "ranks that stay are processes of their own, and here one would run in the notebook (asked for), where "
            "names stay anyway: leave %accelerate start out.",
        ),
        ("%accelerate start -n zero", "-n/--num-processes: a number of ranks is 1 or more, or auto; got 'zero'."),
    ],
)
def test_without_ranks_each_wrong_use_is_one_sentence(planned: Any, line: str, sentence: str) -> None:
    planned.names["x"] = 1
    assert said(planned.run(line)) == sentence


def test_with_ranks_each_wrong_use_is_one_sentence(staying: Any) -> None:
    staying.names["value"] = 1
    for line, sentence in {
        "%accelerate start -n 3": "there are 2 ranks that stay since NOW already, with other flags; %accelerate stop "
        "ends them.",
        "%%accelerate -n 3\n1": "-n 3 belongs to the start of the ranks, and those that stay were started with -n 2: "
        "leave it out, or begin anew with %accelerate stop and %accelerate start -n 3.",
        "%%accelerate --debug\n1": "--debug belongs to the start of the ranks, and those that stay were started with "
        "another choice: leave it out, or begin anew with %accelerate stop and %accelerate start --debug.",
        "%%accelerate --strategy fsdp\n1": "--strategy fsdp belongs to the start of the ranks, and those that stay "
        "were started with --strategy ddp: leave it out, or begin anew with %accelerate stop and %accelerate start "
        "--strategy fsdp.",
        "%%accelerate --only 2\n1": "--only 2: 2 ranks stay, 0-1; name some of these.",
        "%%accelerate --only all\n1": "--only: all ranks take part in a cell without it; name some, such as 0,2-3.",
        "%%accelerate --ranks 5\n1": "--ranks 5 chooses whose output is shown, and this run has 2 ranks, 0-1: "
        "name some of these, or all. For 5 ranks write -n 5.",
        "%accelerate push": "%accelerate push needs names of variables: no name was given; write names with commas "
        "between them, such as model,history.",
        "%accelerate push valu": "%accelerate push valu: the notebook has no variable of that name (did you mean "
        "value?); nothing was sent.",
        "%accelerate pull 1": "%accelerate pull needs names of variables: '1' is not the name of a variable; write "
        "names with commas between them, such as model,history.",
        "%accelerate pull nothing": "not brought back from rank 0: nothing (rank 0 has no such name).",
        "%accelerate pull value --rank x": "--rank is the number of one rank: %accelerate pull NAMES --rank 1; got "
        "'x'.",
        "%accelerate pull value --rank 2": "rank 2 has nothing to bring back: 2 ranks stay.",
        "%accelerate stop it": "%accelerate stop takes nothing behind it; got 'it'.",
    }.items():
        assert said(staying.run(line)) == sentence, line


def test_the_same_start_again_is_no_error(staying: Any) -> None:
    pids = staying.session.stay.persistent.pids
    ran = staying.run(START)
    assert re.sub(r"[\d:]{8}", "NOW", ran.stdout) == "there are 2 ranks that stay since NOW already\n"
    assert staying.session.stay.persistent.pids == pids


def test_flags_that_repeat_the_start_are_no_error(staying: Any) -> None:
    seed = staying.session.stay.persistent.spec.settings.seed
    assert (
        staying.run(f"%%accelerate -n 2 --cpu -p no -a 1 --start fork --seed {seed} --strategy ddp --keep\n7").value
        == 7
    )
    assert staying.run("%%accelerate -n auto -p auto\n8").value == 8


def test_a_cell_that_keeps_its_ranks_is_their_first_and_runs_in_them_again(notebook: Any) -> None:
    notebook.session.stay._setup = None
    try:
        ran = notebook.run("%%accelerate --keep -n 2 --cpu\ntimes = globals().get('times', 0) + 1\ntimes")
        assert ran.value == 1
        assert "their memory is held until %accelerate stop" in ran.stdout
        assert notebook.run("%%accelerate --keep -n 2 --cpu\ntimes = globals().get('times', 0) + 1\ntimes").value == 2
        assert notebook.run("%%accelerate\ntimes").value == 2
    finally:
        notebook.session.close()
    assert "times" not in notebook.names


def test_a_function_that_was_defined_anew_is_pointed_out_until_it_is_pushed(staying: Any) -> None:
    staying.run("def f(): return 1")
    assert staying.run("%%accelerate\nf()").value == 1
    staying.run("def f(): return 2")
    ran = staying.run("%%accelerate\nf()")
    assert ran.value == 1
    assert ran.stdout.startswith(
        "f was defined anew since the ranks got it, and they have the old one: %accelerate push f\n"
    )
    staying.run("%accelerate push f")
    ran = staying.run("%%accelerate\nf()")
    assert ran.value == 2
    assert "defined anew" not in ran.stdout


def test_a_name_that_only_the_notebook_has_is_explained(staying: Any) -> None:
    staying.names["lock"] = threading.Lock()
    ran = staying.run("%%accelerate\nlock")
    assert isinstance(ran.error, NameError)
    assert "The notebook has `lock`, the ranks do not: %accelerate push lock sends it, or says why not." in ran.stdout
    assert "the ranks live on, with what they have" in ran.stdout
    assert "lock: a lock cannot be sent to another process" in said(staying.run("%accelerate push lock"))


def test_a_model_is_pulled_into_the_object_that_the_notebook_has(staying: Any) -> None:
    staying.run("import torch\nmodel = torch.nn.Linear(2, 1)")
    model = staying.names["model"]
    staying.run("%%accelerate\nwith torch.no_grad(): model.weight.fill_(3)")
    ran = staying.run("%accelerate pull model")
    assert ran.stdout.startswith("brought back: model (updated in place, ")
    assert staying.names["model"] is model
    assert float(model.weight.detach().sum()) == 6


def test_status_and_memory_say_who_stays_since_when_and_what_is_held(staying: Any) -> None:
    status = re.sub(r"\d\d:\d\d:\d\d", "NOW", staying.run("%accelerate").stdout)
    assert re.fullmatch(
        r"next cell: in ranks that stay since NOW: 2 ranks on the CPU, and until %accelerate stop they hold: "
        r"rank 0 [\d.]+ [kMG]B on the host, rank 1 [\d.]+ [kMG]B on the host; no run yet\n",
        status,
    )
    assert "they hold: rank 0 " in staying.run("%accelerate memory").stdout


def test_the_panel_says_that_memory_is_held(staying: Any) -> None:
    source = CellSource("1\n", "Cell In[9]")
    _, plan, _ = staying.session.stay.place(RunOptions(), RunOptions(), source)
    assert plan.facts("Cell In[9]").setting.endswith(", memory is held until %accelerate stop")


def test_memory_that_ranks_hold_on_a_device_is_said(staying: Any) -> None:
    pids = staying.session.stay.persistent.pids
    gpu = Gpu(0, "GPU-a", "Tesla T4", 16 * 10**9, processes=((pids[1], 2 * 10**9), (1, 10**9)))
    staying.session.survey = lambda: Survey(gpus=(gpu,))
    held = staying.session.stay.held()
    assert "cuda" not in held[0]
    assert held[1].endswith(", 2.0 GB on cuda:0")


def test_a_dead_rank_is_said_by_every_command_and_what_the_other_has_can_be_had(staying: Any) -> None:
    staying.run("%%accelerate\nkept = 4")
    pidfd = os.pidfd_open(staying.session.stay.persistent.pids[1])
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    assert select.select([pidfd], [], [], 30)[0]
    os.close(pidfd)
    sentence = (
        "rank 1 of 2 was killed by SIGKILL while it had nothing to do; so no further cell runs in them: %accelerate "
        "pull NAMES still brings variables of rank 0 back, %accelerate restart begins anew"
    )
    assert said(staying.run("%%accelerate\nkept")) == f"{sentence}."
    assert sentence in staying.run("%accelerate").stdout
    assert staying.run("%accelerate pull kept --rank 1").error is not None
    assert staying.run("%accelerate pull kept").error is None
    assert staying.names["kept"] == 4
    assert staying.run("%accelerate restart").error is None
    assert staying.run("%%accelerate\nglobals().get('kept')").value == 4  # the notebook has it by now


def test_memory_that_runs_out_says_that_ranks_that_stay_are_not_started_again(staying: Any) -> None:
    ran = staying.run("%%accelerate\nimport torch\nraise torch.OutOfMemoryError('CUDA out of memory')")
    assert "not started again: nothing of ours can be cut" in ran.stdout


def test_ranks_of_another_launch_have_no_ranks_that_stay(staying: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork holds copies of all that leads to them."""
    monkeypatch.setattr(api, "default_launcher", lambda: staying.session.launcher)
    stay = staying.session.stay
    assert stay.is_on
    assert api.launch(lambda: stay.is_on, 1, start_method="fork").value is False
    assert staying.run("%%accelerate\n6").value == 6


def test_unloading_the_extension_ends_the_ranks(staying: Any) -> None:
    pids = list(staying.session.stay.persistent.pids.values())
    staying.session.close()
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []
    assert staying.run("%%accelerate -n 1 --cpu\n5").value == 5


TWO_T4 = Survey(tuple(Gpu(number, f"GPU-{number}", "Tesla T4", 16 * 10**9) for number in range(2)), 4)


@pytest.mark.parametrize(("device", "sees"), [(None, "GPU-0,GPU-1"), ("cuda:0", "GPU-1")])
def test_ranks_that_stay_see_their_own_card_alone_where_the_notebook_names_the_first(
    notebook: Any, device: str | None, sees: str
) -> None:
    notebook.session.stay._setup = None
    notebook.session.survey = lambda: TWO_T4
    if device is not None:
        notebook.names["device"] = device
    try:
        assert notebook.run("%accelerate start -p no").error is None
        seen = notebook.run("%%accelerate --only 1\nimport os\nos.environ['CUDA_VISIBLE_DEVICES']")
        assert seen.value == sees
        says = notebook.run("%%accelerate\nx = 'cuda:0'")
        line = '"cuda:0" is rank 0\'s GPU, and the ranks that stay see all of them: in the others write device = '
        assert (line in says.stdout) is (device is None)
    finally:
        notebook.session.close()


def test_what_the_next_cell_does_before_all_else_is_said_after_one_that_was_cut_short() -> None:
    lines: list[str] = []
    stay: Any = PersistentSession({}, *[lambda: None] * 3, None, lines.append)  # type: ignore[arg-type]
    news = "the next cell connects them anew, and trains on from what rank 1 has"
    stay._persistent = SimpleNamespace(is_open=True, alive=[0, 1], trouble="", news=news)
    stay.after(ValueError())
    stay._persistent.news = ""
    stay.after(ValueError())
    assert lines == [f"the ranks live on, with what they have; {news}", "the ranks live on, with what they have"]


def test_models_in_values_of_ranks_that_stay_are_dressed_there_and_not_here(notebook: Any) -> None:
    notebook.run("import torch")
    made = "kept = [accelerator.prepare(torch.nn.Linear(2, 1))]"
    cell = notebook.run(f"%%accelerate -n 2 -p bf16 --keep --out kept\n{made}\n")
    after = notebook.run("%%accelerate\nprint(type(accelerator.unwrap_model(kept[0]).forward).__name__)\n")
    notebook.run("%accelerate stop")
    assert cell.error is None
    assert "forward" not in vars(notebook.names["kept"][0])
    assert "_AutocastForward\n" in after.stdout
