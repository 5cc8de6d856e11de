"""What a person can choose here, what speaks against it, and what it comes to."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest

from nbaccel.base.hardware import Gpu, Survey
from nbaccel.features.reports.choices import batch_size_of, overview, precisions, process_counts, strategies, world_size
from nbaccel.options.configuration import ConfigFile, Configuration
from nbaccel.options.run_options import RunOptions


def machine(name: str, capability: tuple[int, int], count: int = 1) -> Survey:
    return Survey(
        gpus=tuple(Gpu(index, f"GPU-{index}", name, 10**10, 0, capability) for index in range(count)), cpu_count=4
    )


TWO_T4 = machine("Tesla T4", (7, 5), 2)
CPU = Survey(cpu_count=4)


@pytest.mark.parametrize(
    ("survey", "expected"),
    [
        (
            TWO_T4,
            ["auto (fp16: Tesla T4 has no bf16 units)", "no", "fp16", "bf16 (not here: Tesla T4 has no bf16 units)"],
        ),
        (machine("A100", (8, 0)), ["auto (bf16: A100 has bf16 units)", "no", "fp16", "bf16"]),
        (
            machine("P100", (6, 0)),
            [
                "auto (no: P100 has no tensor cores)",
                "no",
                "fp16 (P100 has no tensor cores)",
                "bf16 (not here: P100 has no tensor cores)",
            ],
        ),
        (
            CPU,
            [
                "auto (no: a CPU gains nothing from half precision)",
                "no",
                "fp16 (a CPU gains nothing from half precision)",
                "bf16 (a CPU gains nothing from half precision)",
            ],
        ),
    ],
)
def test_every_precision_is_offered_with_what_speaks_against_it(survey: Survey, expected: list[str]) -> None:
    assert [str(offer) for offer in precisions(RunOptions(), survey)] == expected


def test_the_precisions_are_those_of_the_devices_that_are_chosen() -> None:
    mixed = Survey(gpus=(*machine("A100", (8, 0)).gpus, Gpu(1, "GPU-1", "Tesla T4", 10**10, 0, (7, 5))))
    assert str(precisions(RunOptions(devices="0"), mixed)[0]) == "auto (bf16: A100 has bf16 units)"
    assert str(precisions(RunOptions(), mixed)[0]) == "auto (fp16: Tesla T4 has no bf16 units)"
    assert str(precisions(RunOptions(cpu=True), mixed)[0]).startswith("auto (no: a CPU")


@pytest.mark.parametrize(
    ("options", "survey", "expected"),
    [
        (RunOptions(), TWO_T4, ["auto (2 ranks on GPU 0 Tesla T4, GPU 1 Tesla T4)", "1", "2"]),
        (RunOptions(num_processes=1), TWO_T4, ["auto (2 ranks on GPU 0 Tesla T4, GPU 1 Tesla T4)", "1", "2"]),
        (RunOptions(), CPU, ["auto (1 rank on the CPU)", "1", "2", "3", "4"]),
        (RunOptions(num_processes=6), CPU, ["auto (1 rank on the CPU)", "1", "2", "3", "4", "6"]),
        (RunOptions(devices="1"), TWO_T4, ["auto (1 rank on GPU 1 Tesla T4)", "1"]),
    ],
)
def test_as_many_ranks_are_offered_as_there_are_devices(
    options: RunOptions, survey: Survey, expected: list[str]
) -> None:
    assert [str(offer) for offer in process_counts(options, survey)] == expected


@pytest.mark.parametrize(
    ("options", "survey", "expected"),
    [
        (RunOptions(), TWO_T4,
         ["auto (ddp)", "ddp (every rank holds the whole model)", "fsdp (every rank holds a part of the model)"]),
        (RunOptions(strategy="fsdp"), CPU,
         ["auto (one rank holds the model)", "ddp (every rank holds the whole model)",
          "fsdp (one rank has nothing to shard over)"]),
        (RunOptions(strategy="single"), TWO_T4,
         ["auto (ddp)", "ddp (every rank holds the whole model)", "fsdp (every rank holds a part of the model)",
          "single"]),
    ],
)  # fmt: skip
def test_strategies_are_offered_also_one_that_was_chosen_elsewhere(
    options: RunOptions, survey: Survey, expected: list[str]
) -> None:
    assert [str(offer) for offer in strategies(options, survey)] == expected


def test_what_would_be_refused_still_has_a_world_size() -> None:
    assert world_size(RunOptions(), TWO_T4) == 2
    assert world_size(RunOptions(num_processes=5), TWO_T4) == 5
    assert world_size(RunOptions(devices="7"), TWO_T4) == 2


def test_the_batch_size_is_that_of_the_notebooks_loaders_if_they_agree() -> None:
    from torch.utils.data import DataLoader

    data = list(range(10))
    four, two = DataLoader(data, batch_size=4), DataLoader(data, batch_size=2)  # type: ignore[arg-type]
    assert batch_size_of({"loader": four, "n": 3}) == 4
    assert batch_size_of({"train": four, "again": four, "test": two}) == 32
    assert batch_size_of({"loader": DataLoader(data, batch_size=None)}) == 32  # type: ignore[arg-type]
    assert batch_size_of({}) == 32
    assert batch_size_of({"loader": four, "a proxy that has lost its object": weakref.proxy(set())}) == 4


def test_the_overview_says_what_the_form_shows(tmp_path: Path) -> None:
    configuration = Configuration(ConfigFile(tmp_path / "nbaccel.toml"))
    configuration.change(["accumulate=4", "out=model", "mixed-precision=fp16"])
    assert overview(configuration, TWO_T4, 32).splitlines() == [
        "what the next %%accelerate cells use; %accelerate config KEY=VALUE … changes it, --save keeps it",
        "  num-processes    auto (2 ranks on GPU 0 Tesla T4, GPU 1 Tesla T4)",
        "  mixed-precision  fp16; bf16 (not here: Tesla T4 has no bf16 units)",
        "  strategy         auto (ddp)",
        "  accumulate       4 batches per optimizer step",
        "  seed             drawn for each run",
        "  oom              shrink (start again with smaller batches)",
        "  out              model",
        "effective batch size: 32 x 2 x 4 = 256 (a prepared loop: your DataLoader's batch size x ranks x batches; an "
        "unmodified one: your DataLoader's batch size x batches)",
        "Precision and batches per step that you choose hold for unmodified loops, too. What is automatic, and "
        "strategy, holds for what is prepared.",
        "the same by flags: %%accelerate -p fp16 -a 4 -o model",
    ]
    configuration.change(["accumulate=", "seed=3"])
    assert "  accumulate       1 batch per optimizer step\n  seed             3\n" in overview(configuration, CPU, 8)


def test_configuration_is_shown(planned: Any) -> None:
    assert planned.run("%accelerate config seed=3").stdout == "seed=3\n"
    shown = planned.run("%accelerate config").stdout
    assert shown.startswith("what the next %%accelerate cells use; %accelerate config KEY=VALUE")
    assert "  seed             3\n" in shown
    assert planned.run("%accelerate config seed=").stdout == "nothing is set\n"


def test_a_panel_is_the_same_outside_a_kernel_and_loads_the_extension(planned: Any) -> None:
    assert planned.run("import nbaccel; nbaccel.panel()").stdout == planned.run("%accelerate config").stdout
