"""The form, by its real widgets: what they offer, and what becomes of a choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nbaccel.base.hardware import Gpu, Survey
from nbaccel.features.reports.form import Form
from nbaccel.options.configuration import ConfigFile, Configuration
from nbaccel.options.run_options import RunOptions

TWO_T4 = Survey(gpus=tuple(Gpu(index, f"GPU-{index}", "Tesla T4", 10**10, 0, (7, 5)) for index in range(2)))


@pytest.fixture
def configuration(tmp_path: Path) -> Configuration:
    return Configuration(ConfigFile(tmp_path / "nbaccel.toml"))


@pytest.fixture
def form(configuration: Configuration) -> Form:
    return Form(configuration, lambda: TWO_T4, batch_size=32)


def every(widget: Any) -> list[Any]:
    return [widget, *(inner for child in getattr(widget, "children", ()) for inner in every(child))]


def field(form: Form, label: str) -> Any:
    """The widget with this label, which radio buttons have beside them."""
    for widget in every(form.widget):
        if getattr(widget, "description", "") == label:
            return widget
        if type(widget).__name__ == "HBox" and f">{label}<" in getattr(widget.children[0], "value", ""):
            return widget.children[1].children[0]
    raise AssertionError(f"no widget has the label {label}")


def texts(form: Form) -> str:
    """Everything that the form states."""
    return "\n".join(widget.value for widget in every(form.widget) if type(widget).__name__ == "HTML")


def test_it_shows_what_is_chosen_already(configuration: Configuration) -> None:
    configuration.change(["num-processes=1", "mixed-precision=no", "accumulate=4", "seed=7"])
    form = Form(configuration, lambda: TWO_T4, batch_size=32)
    values = [field(form, label).value for label in ("Ranks", "Precision", "Batches per optimizer step", "Seed")]
    assert values == ["1", "no", 4, "7"]
    assert configuration.options == RunOptions(1, "no", 4, seed=7)


def test_a_choice_holds_at_once(form: Form, configuration: Configuration) -> None:
    field(form, "Ranks").value = "2"
    field(form, "Precision").value = "fp16"
    field(form, "Batches per optimizer step").value = 4
    field(form, "Seed").value = " 7 "
    field(form, "Out of memory").value = "stop"
    assert configuration.options == RunOptions(2, "fp16", 4, seed=7, oom="stop")
    field(form, "Strategy").value = "fsdp"
    assert configuration.options.strategy == "fsdp"
    field(form, "Strategy").value = "auto"
    field(form, "Out of memory").value = "shrink"
    field(form, "Checkpoint every").value = "10min"
    assert configuration.options.checkpoint_every == "10min"
    field(form, "Checkpoint every").value = ""
    field(form, "Ranks").value = ""
    field(form, "Seed").value = ""
    field(form, "Batches per optimizer step").value = 1
    assert configuration.options == RunOptions(mixed_precision="fp16")


def test_it_states_the_formula_the_next_cell_and_the_flags(form: Form) -> None:
    assert "<strong>32 x 2 x 1 = 64</strong>" in texts(form)
    assert "<code>%%accelerate</code>" in texts(form)
    field(form, "Batches per optimizer step").value = 4
    assert "<strong>32 x 2 x 4 = 256</strong>" in texts(form)
    assert "<code>%%accelerate -a 4</code>" in texts(form)
    next_cell = (
        "2 ranks on GPU 0 Tesla T4, GPU 1 Tesla T4; a prepared loop: precision fp16 (Tesla T4 has no bf16 units)"
    )
    assert next_cell in texts(form)
    assert "Precision and batches per step that you choose hold for unmodified loops, too." in texts(form)
    field(form, "Batch size per device").value = 8
    assert "<strong>8 x 2 x 4 = 64</strong>" in texts(form)


def test_what_nobody_chose_is_named_in_the_empty_field(form: Form, configuration: Configuration) -> None:
    assert field(form, "Ranks").placeholder == "auto (2 ranks on GPU 0 Tesla T4, GPU 1 Tesla T4)"
    assert field(form, "Ranks").options == ("1", "2")
    assert field(form, "Seed").placeholder == "drawn for each run"
    configuration.change(["cpu=true"])
    form.follow()
    assert field(form, "Ranks").placeholder == "auto (1 rank on the CPU)"


def test_a_precision_that_the_device_has_not_cannot_be_taken_and_says_why(form: Form) -> None:
    assert [value for label, value in field(form, "Precision").options] == ["auto", "no", "fp16"]
    assert ">bf16 (not here: Tesla T4 has no bf16 units)</div>" in texts(form)


def test_one_that_was_set_elsewhere_is_shown_with_what_becomes_of_it(form: Form, configuration: Configuration) -> None:
    configuration.change(["mixed-precision=bf16"])
    form.follow()
    assert field(form, "Precision").value == "bf16"
    assert "refused as configured (Tesla T4 has no bf16 units and would emulate bf16 slowly" in texts(form)
    field(form, "Precision").value = "auto"
    assert "bf16" not in [value for label, value in field(form, "Precision").options]


def test_what_else_is_chosen_decides_what_is_offered(form: Form, configuration: Configuration) -> None:
    configuration.change(["cpu=true", "num-processes=3"])
    form.follow()
    assert [value for label, value in field(form, "Precision").options] == ["auto", "no", "fp16", "bf16"]
    assert field(form, "Ranks").value == "3"
    assert configuration.options == RunOptions(3, cpu=True)


def test_more_ranks_than_devices_are_taken_and_refused_where_it_is_said(
    form: Form, configuration: Configuration
) -> None:
    field(form, "Ranks").value = "3"
    assert configuration.options == RunOptions(3)
    assert "refused as configured (3 processes were asked for (-n 3), but there are 2 GPUs" in texts(form)
    field(form, "Ranks").value = "some"
    assert "Not taken: -n/--num-processes: a number of ranks is 1 or more, or auto; got" in texts(form)


def test_hundreds_of_ranks_on_a_few_cores_are_not_taken_and_the_field_says_why(configuration: Configuration) -> None:
    form = Form(configuration, lambda: Survey(cpu_count=2), batch_size=32)
    ranks = field(form, "Ranks")
    ranks.value = "500"
    assert configuration.options == RunOptions()
    children = list(form.widget.children)
    below = children[children.index(ranks) + 1]
    assert "Not taken: 500 ranks were asked for (-n 500), and there are 2 cores" in below.value
    assert below.layout.display != "none"
    ranks.value = "32"
    assert configuration.options == RunOptions(32)
    assert "Not taken" not in texts(form)
    assert below.layout.display == "none"


@pytest.mark.parametrize("seed", ["soon", "-1", "4294967295"])
def test_a_wrong_value_is_not_taken_and_says_why(form: Form, configuration: Configuration, seed: str) -> None:
    field(form, "Seed").value = seed
    assert configuration.options == RunOptions()
    assert f"Not taken: --seed: a seed lies in 0..4294867295; got &#x27;{seed}&#x27;" in texts(form)
    field(form, "Seed").value = "3"
    assert configuration.options == RunOptions(seed=3)
    assert "Not taken" not in texts(form)


def test_the_buttons_save_and_reset(form: Form, configuration: Configuration, tmp_path: Path) -> None:
    field(form, "Seed").value = "7"
    field(form, "Save to nbaccel.toml").click()
    assert ConfigFile(tmp_path / "nbaccel.toml").read() == {"seed": 7}
    assert f"saved to {tmp_path / 'nbaccel.toml'}: seed=7" in texts(form)
    field(form, "Back to automatic").click()
    assert configuration.options == RunOptions()
    assert field(form, "Seed").value == ""
    assert ConfigFile(tmp_path / "nbaccel.toml").read() == {"seed": 7}


def test_what_cannot_be_saved_is_said(tmp_path: Path) -> None:
    form = Form(Configuration(ConfigFile(tmp_path / "gone" / "nbaccel.toml")), lambda: TWO_T4, batch_size=32)
    field(form, "Save to nbaccel.toml").click()
    assert "Not taken: " in texts(form)
    assert "cannot be written: No such file or directory." in texts(form)


def test_names_of_the_machine_are_no_html(configuration: Configuration) -> None:
    gpu = Gpu(0, "GPU-0", "<b>T4</b>", 10**10, 0, (7, 5))
    form = Form(configuration, lambda: Survey(gpus=(gpu,)), batch_size=32)
    assert "<b>" not in texts(form)
    assert "&lt;b&gt;T4" in texts(form)
