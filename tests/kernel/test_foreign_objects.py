"""Objects of other libraries in ranks of a real kernel: made in an earlier cell, in this one, in a launched function.

Each training ends in one of two ways: it was the training of both ranks (the world, the steps of half the batches,
equal weights), or it is refused before its first step, with the line to move. A pairwise selection runs with the other
tests; the whole product is marked `full`.
"""

from __future__ import annotations

import importlib.util
import re
from itertools import product

import pytest

from kernel.foreign_programs import ACCELERATE, FABRIC, LIGHTNING, SHARED, TRANSFORMERS, in_one_environment
from kernel.harness import Cell, RealKernel, accelerate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

LIBRARIES = ("arguments", "trainer", "subclass", "accelerator", "fabric", "lightning")
PLACES = ("earlier", "cell", "launch", "notebook_launcher")
STARTS = ("fork", "zygote")

REFUSED = {("earlier", "fabric"): "Fabric", ("earlier", "lightning"): "Trainer"}
"""What settles on its processes when it is made."""

NEEDS = {
    "arguments": (TRANSFORMERS, "transformers"),
    "trainer": (TRANSFORMERS, "transformers"),
    "subclass": (TRANSFORMERS, "transformers"),
    "accelerator": (ACCELERATE, "accelerate"),
    "fabric": (FABRIC, "lightning"),
    "lightning": (LIGHTNING, "lightning"),
}

TOGETHER = [2, 8, True, True]
"""64 samples in batches of 4 on 2 ranks; see `foreign_programs.py`."""


def _is_selected(library: str, place: str, start: str) -> bool:
    """Each pair of two of the three once; a zygote's rank imports the library, which takes seconds."""
    at = LIBRARIES.index(library) + PLACES.index(place)
    return STARTS.index(start) == (at % 2 if place != "notebook_launcher" else 0)


CASES = [
    pytest.param(*case, marks=[] if _is_selected(*case) else [pytest.mark.full])
    for case in product(LIBRARIES, PLACES, STARTS)
    if case[1:] != ("notebook_launcher", "zygote")  # which it chooses by itself
]


def bring(kernel: RealKernel, library: str) -> None:
    """Define what uses the library, in the notebook."""
    program, package = NEEDS[library]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make test` installs it")
    kernel.do(SHARED + program, timeout_s=120)


def begun(kernel: RealKernel, library: str, place: str, start: str) -> Cell:
    use, make = f"use_{library}", f"make_{library}()"
    match place:
        case "earlier":
            kernel.do(f"made = {make}")
            code = accelerate(f"seen = {use}(made)", start, flags="--out seen")
        case "cell":
            code = accelerate(f"seen = {use}({make})", start, flags="--out seen")
        case "launch":
            launched = f"nbaccel.launch(lambda: {use}({make}), 2, cpu=True, start_method='{start}')"
            code = f"import nbaccel\nseen = {launched}.value"
        case _:
            code = f"import nbaccel\nseen = nbaccel.notebook_launcher(lambda: {use}({make}), (), 2)"
    return kernel.run(code, timeout_s=120)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("library", "place", "start"), CASES)
@in_one_environment
def test_both_ranks_train_together_or_the_line_to_move_is_said(
    kernel: RealKernel, library: str, place: str, start: str
) -> None:
    bring(kernel, library)
    cell = begun(kernel, library, place, start)
    if (place, library) in REFUSED:
        sentence = cell.failed("NotInRanks").evalue
        assert f"Move the line `made = {REFUSED[place, library]}(...)` into this cell" in sentence
    else:
        cell.succeeded()
        assert kernel.value("seen") == TOGETHER


def test_lightning_uses_the_ranks_whatever_its_strategy_and_devices(kernel: RealKernel) -> None:
    """Also a second time in the same process, and in ranks that stay; inside a batch job, too."""
    bring(kernel, "lightning")
    body = """
        os.environ |= {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "notebook", "SLURM_JOB_ID": "7"}
        settings = [{"strategy": "ddp"}, {"strategy": "auto"}, {"strategy": "ddp_spawn"},
                    {"strategy": "auto", "devices": "auto"}]
        seen = [use_lightning(make_lightning(**each)) for each in settings]
        seen.append(os.environ["WORLD_SIZE"])
    """
    kernel.do(accelerate(body, "fork", flags="--keep --out seen"), timeout_s=120)
    try:
        assert kernel.value("seen") == [TOGETHER] * 4 + ["2"]
        kernel.do(accelerate("seen = use_lightning(make_lightning())", "fork", flags="--keep --out seen"))
        assert kernel.value("seen") == TOGETHER
    finally:
        kernel.do("%accelerate stop")


@in_one_environment
def test_fabric_uses_the_ranks_whatever_its_strategy_and_devices(kernel: RealKernel) -> None:
    bring(kernel, "fabric")
    body = """
        settings = [{"strategy": "ddp"}, {"strategy": "ddp_notebook"}, {"devices": "auto"}]
        seen = [use_fabric(make_fabric(**each)) for each in settings]
    """
    kernel.do(accelerate(body, "fork", flags="--out seen"), timeout_s=120)
    assert kernel.value("seen") == [TOGETHER] * 3


@in_one_environment
@pytest.mark.parametrize(
    ("library", "devices", "error", "sentence"),
    [
        ("lightning", 1, "NotPrepared", "this Trainer uses one device, and the run has 2 ranks"),
        ("lightning", 3, "NestedLaunch", "this Trainer wants 3 processes, and the run has 2 ranks"),
        ("fabric", 1, "NotPrepared", "this Fabric uses one device, and the run has 2 ranks"),
        ("fabric", 3, "NestedLaunch", "this Fabric wants 3 processes, and the run has 2 ranks"),
    ],
)
def test_another_number_of_devices_is_refused_before_the_first_step(
    kernel: RealKernel, library: str, devices: int, error: str, sentence: str
) -> None:
    bring(kernel, library)
    strategy = "strategy='auto'" if devices == 1 else "strategy='ddp'"
    cell = kernel.run(accelerate(f"use_{library}(make_{library}(devices={devices}, {strategy}))", "fork"))
    said = cell.failed(error).evalue
    assert sentence in said
    assert "(devices=2), or leave devices out" in said


@in_one_environment
def test_a_launcher_of_lightnings_inside_a_rank_is_refused(kernel: RealKernel) -> None:
    """One that a strategy brings along, and an environment which says that nobody else starts processes."""
    bring(kernel, "fabric")
    kernel.do("""
        from lightning.fabric.plugins.environments import LightningEnvironment
        from lightning.fabric.strategies import DDPStrategy
        from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher

        class OwnLauncher(DDPStrategy):
            def _configure_launcher(self):
                self._launcher = _MultiProcessingLauncher(self, start_method="fork")

        class Alone(LightningEnvironment):
            creates_processes_externally = False
    """)
    for settings, work in (("strategy=OwnLauncher()", "print"), ("strategy='ddp', plugins=[Alone()]", "")):
        cell = kernel.run(accelerate(f"make_fabric({settings}).launch({work})", "fork"))
        sentence = cell.failed("NestedLaunch").evalue
        assert "ranks do not launch ranks: Lightning's launcher was to start processes here" in sentence


@in_one_environment
def test_a_library_that_asks_accelerate_before_the_arguments_are_asked_trains_together(
    kernel: RealKernel, start: str
) -> None:
    """As trl's trainers do: the state is made without a word about CPUs, and the arguments are of an earlier cell."""
    bring(kernel, "subclass")
    kernel.do("arguments = settings(OwnArguments)")
    body = "seen = [*train(OwnTrainer(Net(), arguments, Numbers())), arguments.length]"
    kernel.do(accelerate(body, start, flags="--out seen"), timeout_s=120)
    assert kernel.value("seen") == [*TOGETHER, 8]


@in_one_environment
def test_a_trainer_that_was_used_in_the_notebook_trains_together_in_the_ranks(kernel: RealKernel) -> None:
    """Its model, optimizer and loaders were prepared there, for one process."""
    bring(kernel, "trainer")
    kernel.do("made = make_trainer(); made.eval_dataset = Numbers(); _ = made.evaluate(); _ = made.train()")
    assert kernel.value("made.state.global_step") == 16
    body = "seen = [*use_trainer(made), made.evaluate()['eval_samples_per_second'] > 0]"
    kernel.do(accelerate(body, "fork", flags="--out seen"), timeout_s=120)
    assert kernel.value("seen") == [*TOGETHER, True]
    # The notebook's is as it was: it trains alone, as one process does.
    kernel.do("made.train()")
    assert kernel.value("[made.args.world_size, made.state.global_step]") == [1, 16]


@in_one_environment
def test_what_was_worked_out_for_one_process_is_refused_with_the_line_to_move(kernel: RealKernel) -> None:
    bring(kernel, "trainer")
    kernel.do("""
        class Batches(TrainingArguments):
            def __post_init__(self):
                super().__post_init__()
                self.everywhere = self.per_device_train_batch_size * self.world_size

        class Reference(Trainer):
            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                self.reference = self.accelerator.prepare_model(Net(), evaluation_mode=True)

        batches = settings(Batches)
        reference = Reference(model=Net(), args=settings(), train_dataset=Numbers())
    """)
    for use, line in (
        ("Trainer(model=Net(), args=batches, train_dataset=Numbers())", "batches = Batches(...)"),
        ("reference.train()", "reference = Reference(...)"),
    ):
        sentence = kernel.run(accelerate(use, "fork")).failed("NotInRanks").evalue
        assert f"Move the line `{line}` into this cell" in sentence


@in_one_environment
def test_what_accelerate_prepared_in_the_notebook_is_refused_and_its_model_can_be_prepared_again(
    kernel: RealKernel,
) -> None:
    bring(kernel, "accelerator")
    kernel.do("""
        accelerator, model = make_accelerator(), Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Numbers(), 4))
    """)
    used = kernel.run(accelerate("accelerator.backward(torch.ones(1, requires_grad=True))", "fork"))
    assert "Move the line `accelerator = Accelerator(...)`" in used.failed("NotInRanks").evalue
    for use, name in (("next(iter(loader))", "loader"), ("optimizer.step()", "optimizer")):
        sentence = kernel.run(accelerate(use, "fork")).failed("NotInRanks").evalue
        assert f"`{name}` was prepared in an earlier cell, for one process" in sentence
        assert "Move the line `accelerator.prepare(...)` into this cell" in sentence
    again = """
        accelerator = make_accelerator()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        seen = loop(accelerator, *accelerator.prepare(model, optimizer, DataLoader(Numbers(), 4)))
    """
    kernel.do(accelerate(again, "fork", flags="--out seen"))
    assert kernel.value("seen") == TOGETHER


@in_one_environment
def test_an_accelerator_of_the_notebook_keeps_its_settings_and_a_state_finds_the_world(
    kernel: RealKernel, start: str
) -> None:
    bring(kernel, "accelerator")
    kernel.do("""
        accelerate.state.AcceleratorState._reset_state(True)  # other tests were here
        accelerate.state.GradientState._reset_state()
        state = accelerate.PartialState(cpu=True)
        made = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3)
    """)
    body = "seen = [state.num_processes, made.mixed_precision, made.gradient_accumulation_steps, made.num_processes]"
    kernel.do(accelerate(body, start, flags="--out seen"), timeout_s=120)
    assert kernel.value("seen") == [2, "bf16", 3, 2]
    assert kernel.value("[made.num_processes, state.num_processes]") == [1, 1]


@in_one_environment
def test_accelerates_logger_speaks_in_ranks_where_the_notebook_has_an_accelerator(kernel: RealKernel) -> None:
    """It wants a state, and the notebook's is forgotten."""
    bring(kernel, "accelerator")
    kernel.do("""
        import logging
        from accelerate.logging import get_logger
        logger, made = get_logger("train", log_level="INFO"), make_accelerator()
        logging.basicConfig(format="%(filename)s %(message)s", force=True)
    """)
    cell = kernel.do(accelerate("logger.info('begins'); logger.info('all', main_process_only=False)", "fork"))
    kernel.do("logging.root.handlers.clear()")
    said = re.findall(r"(\S+) (\[RANK \d\] \w+)", cell.text)
    assert sorted(line for _, line in said) == ["[RANK 0] all", "[RANK 0] begins", "[RANK 1] all"]
    assert {place for place, _ in said} == {f"In[{cell.number}]"}  # the line of the user's


@in_one_environment
def test_arguments_of_the_notebook_keep_their_precision_and_take_that_of_the_cell_where_they_have_none(
    kernel: RealKernel,
) -> None:
    bring(kernel, "arguments")
    kernel.do("plain, half = settings(), settings(bf16=True)")
    for name, flags, precision in (
        ("plain", "", "no"),
        ("plain", "--mixed-precision bf16", "bf16"),
        ("half", "", "bf16"),
    ):
        body = f"seen = Trainer(model=Net(), args={name}, train_dataset=Numbers()).accelerator.mixed_precision"
        kernel.do(accelerate(body, "fork", flags=f"{flags} --out seen"))
        assert kernel.value("seen") == precision


def test_inline_cells_leave_the_notebooks_libraries_as_they_are(kernel: RealKernel) -> None:
    bring(kernel, "lightning")
    kernel.do(accelerate("import lightning.fabric.utilities.imports", "inline", n=1))
    kernel.do("there = sys.modules['lightning.fabric.utilities.imports']")
    assert kernel.value("[hasattr(sys, 'ps1'), there._IS_INTERACTIVE]") == [True, True]
    body = "print(hasattr(sys, 'ps1'), sys.modules['lightning.fabric.connector']._IS_INTERACTIVE)"
    assert kernel.do(accelerate(body, "fork")).printed == "False False\n"
    assert kernel.value("[hasattr(sys, 'ps1'), there._IS_INTERACTIVE]") == [True, True]


def test_bars_of_rich_are_text_in_ranks(kernel: RealKernel) -> None:
    """Lightning draws with it; the widget of a forked rank would speak on the kernel's sockets."""
    bring(kernel, "lightning")
    if importlib.util.find_spec("rich") is None:
        pytest.skip("rich is not installed")
    kernel.do("import rich.console; console = rich.get_console(); there = console.is_jupyter")
    body = """
        seen = [console.is_jupyter, rich.console.Console().is_jupyter]
        trained = use_lightning(make_lightning(enable_progress_bar=True))
    """
    kernel.do(accelerate(body, "fork", flags="--out seen,trained"))
    assert kernel.value("[there, seen, trained]") == [True, [False, False], TOGETHER]
