"""Models of earlier cells: found wherever a cell's values lead, recognised, and refused with the lines to move."""

from __future__ import annotations

import functools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nbaccel.base.hardware import Survey
from nbaccel.base.quantised import is_quantised
from nbaccel.errors import LaunchRefused
from nbaccel.launching import api, earlier_models
from nbaccel.launching.earlier_models import EarlierModel, models_in, places_of
from nbaccel.launching.made_in_cells import refuse_what_stays_here
from nbaccel.launching.plan import LaunchPlan
from nbaccel.launching.preflight import ProcessState, choose_start
from nbaccel.launching.tasks.function_task import FunctionTask
from nbaccel.namespace.nbytes import bytes_by_sharing, met_in, sizes_on_devices
from nbaccel.options.run_options import RunOptions

GB = 10**9


class Params4bit(nn.Parameter):
    """Stands for bitsandbytes' class, which is recognised by its name."""


class Packed(Tensor):
    """Stands for a class of torchao: a tensor that consists of packed numbers and a scale."""

    packed: Tensor

    @staticmethod
    def __new__(cls, packed: Tensor) -> Packed:
        made: Packed = Tensor._make_wrapper_subclass(cls, packed.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.packed = packed
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["packed"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].packed)
        plain = [each.packed.float() if isinstance(each, cls) else each for each in args]
        return func(*plain, **(kwargs or {}))


def in_4_bit() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].weight = Params4bit(torch.zeros(4, 4), requires_grad=False)
    return model


def spread() -> Any:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model.hf_device_map = {"0": 0, "1": 1}
    return model


@pytest.fixture
def on_cards(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts all that is measured on cards: so many bytes by device."""

    def pretend(**sizes: int) -> None:
        devices = {device.replace("_", ":"): nbytes for device, nbytes in sizes.items()}
        monkeypatch.setattr(
            earlier_models,
            "sizes_on_devices",
            lambda values: {device: Counter(dict.fromkeys(values, nbytes)) for device, nbytes in devices.items()},
        )

    return pretend


# --- finding ----------------------------------------------------------------------------------------------------------


class Trainer:
    """An object of a library that holds a model and more."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
        self.callbacks = [SimpleNamespace(model=model)]


def closing_over(model: nn.Module) -> Any:
    def step(x: Tensor) -> Any:
        return model(x)

    return step


def with_default(model: nn.Module) -> Any:
    def step(x: Tensor, model: nn.Module = model) -> Any:
        return model(x)

    return step


def in_a_class(model: nn.Module) -> Any:
    return type("Settings", (), {"__module__": "__main__", "model": model})


@pytest.mark.parametrize(
    "holder",
    [
        Trainer,
        closing_over,
        with_default,
        in_a_class,
        lambda model: in_a_class(model)(),
        lambda model: [model],
        lambda model: {"a": ({"b": model},)},
        lambda model: functools.partial(model.forward, 1),
        lambda model: model.forward,
        lambda model: nn.DataParallel(model),
        lambda model: SimpleNamespace(model=model),
    ],
)
def test_a_model_is_found_wherever_a_value_leads_to_it(holder: Any) -> None:
    model = in_4_bit()
    (found,) = models_in({"held": holder(model)}, {"net": model})
    assert (found.name, found.is_quantised, found.kind) == ("held", True, "Sequential")
    assert found.own_name in ("net", "held")
    (unnamed,) = models_in({"held": holder(model)}, {})
    assert unnamed.stays_here


def test_one_model_of_two_names_is_one_and_its_own_name_is_said_first() -> None:
    model = in_4_bit()
    (found,) = models_in({"a_trainer": Trainer(model), "net": model, "same": model}, {})
    assert (found.name, found.own_name) == ("net", "net")
    whole = nn.Sequential(model)
    (found,) = models_in({"part": model, "whole": whole}, {})
    assert found.name == "whole", "the one that holds the other"


def test_plain_models_on_the_host_other_values_and_what_cannot_be_read_are_passed_over() -> None:
    class Sly(nn.Module):
        @property
        def hf_quantizer(self) -> Any:
            raise RuntimeError("on purpose")

    hollow = nn.Linear.__new__(nn.Linear)
    lazy = nn.LazyLinear(2)
    values = {"plain": nn.Linear(2, 2), "sly": Sly(), "hollow": hollow, "lazy": lazy, "data": [1, "x", torch.ones(2)]}
    assert models_in(values) == ()
    assert models_in({"class": in_a_class(nn.Linear(2, 2)), "of torch": nn.Linear}) == ()


def test_classes_of_libraries_are_not_read_for_what_they_hold() -> None:
    held = type("Registry", (), {"__module__": "some.library", "model": in_4_bit()})
    assert met_in({"held": held}, nn.Module) == {}


# --- recognising ------------------------------------------------------------------------------------------------------


def marked(**marks: Any) -> Any:
    model: Any = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    for name, value in marks.items():
        setattr(model[0], name, value)  # below a wrapper such as peft's
    return model


@pytest.mark.parametrize(
    ("marks", "is_so"),
    [
        ({"is_quantized": True}, True),
        ({"is_loaded_in_4bit": True}, True),
        ({"is_loaded_in_8bit": True}, True),
        ({"hf_quantizer": object()}, True),
        ({"is_quantized": False, "hf_quantizer": None, "is_loaded_in_8bit": False}, False),
    ],
)
def test_quantised_models_of_transformers_are_recognised_by_their_marks(
    on_cards: Any, marks: dict[str, Any], is_so: bool
) -> None:
    assert is_quantised(marked(**marks)) is is_so
    assert models_in({"model": marked(**marks)}) == (), "on the host it can be sent as it is"
    on_cards(cuda_0=GB)
    (found,) = models_in({"model": marked(**marks)})
    assert found.is_quantised is is_so


def test_tensors_of_torchaos_kind_are_recognised_and_weighed_by_what_they_consist_of(on_cards: Any) -> None:
    model = nn.Linear(1000, 1000, bias=False)
    model.weight = nn.Parameter(Packed(torch.zeros(1000, 1000, dtype=torch.int8)), requires_grad=False)
    assert is_quantised(model)
    assert bytes_by_sharing(model.weight)[0] == 1_000_000
    assert models_in({"model": model}) == ()
    on_cards(cuda_0=GB)
    assert models_in({"model": model})[0].is_quantised
    assert not is_quantised(nn.Linear(2, 2))


def test_a_parameter_that_loses_its_class_on_the_way_cannot_be_sent_wherever_it_is() -> None:
    (found,) = models_in({"model": in_4_bit()})
    assert (found.is_quantised, found.stays_here, str(found)) == (True, True, "was loaded quantised")


@pytest.mark.parametrize(
    ("placed", "places"),
    [
        ({"": 0}, ()),
        ({"": "cuda:1"}, ()),
        ({"a": 0, "b": 1}, ("cuda:0", "cuda:1")),
        ({"a": "cuda", "b": "cpu"}, ("cuda:0", "cpu")),
        ({"a": torch.device("cuda", 1), "b": "disk"}, ("cuda:1", "disk")),
        ({"": "cpu"}, ()),
        ({"a": "cpu", "b": "disk"}, ()),
        ({"a": "meta"}, ()),
    ],
)
def test_a_map_that_has_several_places_and_a_device_among_them_is_a_model_that_is_spread(
    placed: dict[str, Any], places: tuple[str, ...]
) -> None:
    assert places_of(marked(hf_device_map=placed)) == places


@pytest.mark.parametrize(
    "mark", [{"_hf_hook": SimpleNamespace(execution_device=0)}, {"_hf_hook": SimpleNamespace(hooks=())}]
)
def test_hooks_that_bring_weights_to_a_device_make_a_model_one_that_is_spread(mark: dict[str, Any]) -> None:
    assert places_of(marked(**mark)) == (), "on the host alone"
    assert places_of(marked(**mark), {"cuda:0": 1}) == ("cuda:0", "the host")
    assert places_of(marked(_hf_hook=SimpleNamespace()), {"cuda:0": 1}) == (), "a hook that moves nothing"


def test_a_model_of_two_devices_is_spread_without_any_map(on_cards: Any) -> None:
    on_cards(cuda_0=GB, cuda_1=2 * GB, meta=GB)
    (found,) = models_in({"model": nn.Linear(2, 2)})
    assert str(found) == "is spread over cuda:0 and cuda:1 (3.0 GB)"


# --- refusing ---------------------------------------------------------------------------------------------------------


def refused(model: EarlierModel, *cells: str, **how: Any) -> str:
    with pytest.raises(LaunchRefused) as caught:
        refuse_what_stays_here([model], 2, ["", *cells], **how)
    return str(caught.value)


def test_the_refusal_has_the_two_lines_that_move_the_loading_into_the_cell() -> None:
    model = EarlierModel("model", "model", "LlamaForCausalLM", True, {"cuda:0": 5 * GB}, (), is_quantised=True)
    loading = 'import torch\nmodel = AutoModelForCausalLM.from_pretrained(name, device_map="auto", torch_dtype=half)'
    assert refused(model, loading, "model.train()") == (
        "model was loaded quantised and lies on cuda:0 (5.0 GB): its weights cannot be sent to ranks. Each rank has to "
        "load it onto its own device. Move line 2 of Cell In[1], `model = AutoModelForCausalLM.from_pretrained(name, "
        'device_map="auto", torch_dtype=half)` into this cell:\n'
        "  accelerator = Accelerator()\n"
        "  model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=half, device_map={'': accelerator.device})\n"
        "Nothing was copied or started. One process takes it as it is: -n 1, and no --start."
    )


def test_what_was_made_of_the_loaded_model_is_named_too() -> None:
    model = EarlierModel("trainer", "model", "PeftModel", True, {}, ("cuda:0", "cuda:1"))
    told = refused(
        model,
        "model = Llama.from_pretrained(\n    name,\n    device_map='auto',\n)",
        "model = get_peft_model(model, config)",
        "trainer = SFTTrainer(model)",
        where="the function",
        one="num_processes=1",
    )
    assert told.startswith("model in trainer is spread over cuda:0 and cuda:1: 2 ranks need it whole, each on one")
    assert "into the function, and after it line 1 of Cell In[2], `model = get_peft_model(model, config)`, " in told
    assert "line 1 of Cell In[3], `trainer = SFTTrainer(model)`:\n  accelerator" in told
    assert "  model = Llama.from_pretrained(name, device_map={'': accelerator.device})\n" in told
    assert told.endswith("num_processes=1, and no --start.")


def test_a_model_whose_loading_the_notebook_does_not_show_is_loaded_by_its_own_class() -> None:
    told = refused(EarlierModel("trainer", "", "Qwen3", True, {}, (), is_quantised=True))
    assert told.startswith("the Qwen3 in trainer was loaded quantised: ")
    assert "\n  model = Qwen3.from_pretrained(..., device_map={'': accelerator.device})\n" in told
    told = refused(EarlierModel("net", "net", "Net", False, {"cuda:0": GB}, (), is_quantised=True))
    assert "Make net in this cell, onto accelerator.device:\n  accelerator = Accelerator()\n  net = ...\n" in told
    told = refused(EarlierModel("net", "net", "Net", False, {"cuda:0": GB}, (), is_quantised=True), "net = quantise(x)")
    assert "Move line 1 of Cell In[1], `net = quantise(x)` into this cell, onto accelerator.device:\n" in told


def test_a_long_line_is_shortened_and_a_pipeline_with_a_map_is_a_loading() -> None:
    model = EarlierModel("pipe", "", "Net", False, {}, ("cuda:0", "cuda:1"))
    told = refused(model, f"pipe = pipeline('text-generation', model={'x' * 200!r}, device_map='auto')")
    assert "\n  pipe = pipeline(..., device_map={'': accelerator.device})\n" in told


def test_models_that_can_be_sent_are_not_refused() -> None:
    refuse_what_stays_here([EarlierModel("model", "model", "Net", False, {"cuda:0": GB})], 2, [])


# --- planning ---------------------------------------------------------------------------------------------------------


def planned(value: Any, start: str = "auto", ranks: int = 2, why: str | None = "CUDA is initialised") -> LaunchPlan:
    options = RunOptions(num_processes=ranks, cpu=True, start=start)
    return LaunchPlan.of(options, FunctionTask(id, (value,)), Survey(cpu_count=4), ProcessState(True, why))


def test_a_plan_names_what_ranks_of_each_start_would_lack() -> None:
    assert [model.name for model in planned(in_4_bit()).left_out] == ["args"]
    assert [model.name for model in planned(spread()).left_out] == ["args"]
    assert planned(in_4_bit(), start="inline", ranks=1).left_out == []
    assert planned(in_4_bit(), why=None).left_out == [], "ranks that are copies of the notebook have it"
    assert planned(nn.Linear(2, 2)).left_out == []


def test_one_rank_takes_what_cannot_be_sent_in_the_notebooks_own_process() -> None:
    plan = planned(in_4_bit(), ranks=1)
    assert (plan.start.method, plan.start.reason) == ("inline", "args was loaded quantised, and cannot be sent")
    asked = choose_start("zygote", world_size=1, platform_can_fork=True, why_forks_fail="x", stays_here="model y")
    assert asked.method == "zygote", "which is refused later, by name"


def test_launch_refuses_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(api, "default_launcher", lambda: pytest.fail("something was started"))
        with pytest.raises(LaunchRefused, match=r"the Sequential in args was loaded quantised: .* in the function"):
            api.launch(print, 2, (in_4_bit(),), cpu=True, start_method="zygote")
    run = api.launch(lambda model: type(model[0].weight).__name__, 1, (in_4_bit(),), start_method="inline")
    assert run.value == "Params4bit"


def test_memory_is_shared_and_other_objects_are_built_in_each_rank() -> None:
    shared, own = bytes_by_sharing({"weight": torch.zeros(1000, 1000), "text": b"x" * 1_000_000})
    assert shared == 4_000_000
    assert 1_000_000 <= own < 1_100_000
    assert sizes_on_devices({"x": Packed(torch.zeros(3, device="meta"))})["meta"]["x"] == 0


@pytest.mark.slow
@pytest.mark.full
def test_adapters_on_a_plain_model_can_be_sent_and_on_a_quantised_one_cannot(on_cards: Any) -> None:
    peft = pytest.importorskip("peft")
    on_cards(cuda_0=GB)
    adapted = [
        peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["1"]))
        for model in (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), in_4_bit())
    ]
    (plain,) = models_in({"model": adapted[0]})
    assert (plain.kind, plain.stays_here, str(plain)) == ("PeftModel", False, "lies on cuda:0 (1.0 GB)")
    (quantised,) = models_in({"trainer": Trainer(adapted[1])}, {"model": adapted[1]})
    assert (quantised.own_name, quantised.is_quantised) == ("model", True)
