"""DeepSpeedPlugin and its companions: the options of the strategy "deepspeed", with Accelerate's names. Built anywhere.

These are values and placeholders: nothing here trains, and the package ``deepspeed`` is not imported. What the program
leaves open is read from the variables by which `accelerate launch` chooses it.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nbaccel.base.settings import PRECISIONS
from nbaccel.train.distributed.callers import warn_user
from nbaccel.train.step.environment import parse_choice_from_env
from nbaccel.train.step.kwargs_handlers import KwargsHandler

__all__ = ["AUTO", "DeepSpeedPlugin", "DummyOptim", "DummyScheduler", "HfDeepSpeedConfig"]

AUTO = "auto"

_STAGES = (1, 2, 3)
_PLACES = ("none", "cpu", "nvme")
_CLIPPING = "GRADIENT_CLIPPING"
_IDLE = ("transformer_moe_cls_names", "enable_msamp", "msamp_opt_level")
_HALVES = ("fp16", "bf16")
_OFFLOADS = ("offload_optimizer", "offload_param")
_WRITTEN = "the configuration as it was read"
_TABLES = ("zero_optimization", *_HALVES, "optimizer", "optimizer.params", "scheduler", "scheduler.params")


class HfDeepSpeedConfig:
    """A configuration of DeepSpeed, read from a file or a dictionary, with questions about it.

    Args:
        config_file_or_dict: The path of a JSON file, or the dictionary. A dictionary is copied.

    Example:
        >>> config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
        >>> config.is_zero3(), config.get_value("zero_optimization.stage")
        (True, 3)
    """

    def __init__(self, config_file_or_dict: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        if isinstance(config_file_or_dict, Mapping):
            self.config: dict[str, Any] = copy.deepcopy(dict(config_file_or_dict))
        else:
            self.config = _read(Path(config_file_or_dict))

    def find_config_node(self, ds_key_long: str) -> tuple[Any, str]:
        """Return the table in which a key stands, None where there is none, and the last word of the key.

        Args:
            ds_key_long: The words of the key, joined by dots.
        """
        *tables, last = ds_key_long.split(".")
        node: Any = self.config
        for name in tables:
            node = node.get(name) if isinstance(node, Mapping) else None
        return node, last

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a key.

        Args:
            ds_key_long: The words of the key, joined by dots.
            default: The answer where there is no such key.
        """
        node, last = self.find_config_node(ds_key_long)
        return node.get(last, default) if isinstance(node, Mapping) else default

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Delete a key with everything below it.

        Args:
            ds_key_long: The words of the key, joined by dots.
            must_exist: Raise an error where there is no such key.

        Raises:
            ValueError: There is no such key, and there must be.
        """
        node, last = self.find_config_node(ds_key_long)
        if isinstance(node, dict) and last in node:
            del node[last]
        elif must_exist:
            raise ValueError(f"the DeepSpeed configuration has no {ds_key_long}: {self.config}")

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether a key has a value that is true.

        Args:
            ds_key_long: The words of the key, joined by dots.
        """
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether a key has a value that is false; a missing one is neither.

        Args:
            ds_key_long: The words of the key, joined by dots.
        """
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Return whether the stage is 2."""
        return bool(self.get_value("zero_optimization.stage") == 2)

    def is_zero3(self) -> bool:
        """Return whether the stage is 3."""
        return bool(self.get_value("zero_optimization.stage") == 3)

    def is_offload(self) -> bool:
        """Return whether parameters or optimizer states are kept on the host or on a disk."""
        return any(self.get_value(f"zero_optimization.{name}.device") in _PLACES[1:] for name in _OFFLOADS)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"the DeepSpeed configuration {path} cannot be read: {error.strerror}") from error
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the DeepSpeed configuration {path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"the DeepSpeed configuration {path} holds a {type(config).__name__}, and it must be a table")
    return config


@dataclass
class DeepSpeedPlugin(KwargsHandler):
    """Options of ``Accelerator(strategy="deepspeed", deepspeed_plugin=…)``: DeepSpeed's ZeRO, by fields or by a file.

    A value that the program does not give is that of `accelerate launch`, else the default.

    Args:
        hf_ds_config: A configuration of DeepSpeed: a dictionary, the path of a JSON file, or a `HfDeepSpeedConfig`.
            Values of "auto" in it are filled when a model is prepared. The other fields are then for what it leaves
            out or to "auto".
        gradient_accumulation_steps: Batches per optimizer step; by default the Accelerator's.
        gradient_clipping: The largest norm of all gradients, in every step; "auto" is 1.0, as in Accelerate, where the
            program itself does not clip. A program that calls
            ``accelerator.clip_grad_norm_`` needs none.
        zero_stage: The parts that each rank holds: 1 of the optimizer's states, 2 also of the gradients, 3 also of the
            parameters; 2 by default.
        is_train_batch_min: Accepted; the batch size is that of the first loader prepared.
        offload_optimizer_device, offload_param_device: "none", "cpu" or "nvme"; parameters only in stage 3.
        offload_optimizer_nvme_path, offload_param_nvme_path: Folders on a disk, for "nvme".
        zero3_init_flag: Accepted; a model is built whole, on the host, and cut into parts when it is prepared.
        zero3_save_16bit_model: Accepted; what is saved does not depend on it.
        transformer_moe_cls_names, enable_msamp, msamp_opt_level: Accepted, with one warning where they are given.

    Example:
        >>> plugin = DeepSpeedPlugin(zero_stage=3, gradient_clipping=1.0)
        >>> plugin.zero_stage, plugin.deepspeed_config["zero_optimization"]["stage"]
        (3, 3)
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: Any = None
    gradient_clipping: Any = None
    zero_stage: Any = None
    is_train_batch_min: bool = True
    offload_optimizer_device: Any = None
    offload_param_device: Any = None
    offload_optimizer_nvme_path: Any = None
    offload_param_nvme_path: Any = None
    zero3_init_flag: Any = None
    zero3_save_16bit_model: Any = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None
    _given: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _was: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _filled: dict[str, Any] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self._was and not self._take_changes():
            return
        idle = [name for name in _IDLE if getattr(self, name) and not self._was]
        self._given = copy.deepcopy(self._options())
        if idle:
            verb = "have" if len(idle) > 1 else "has"
            warn_user(f"DeepSpeedPlugin: {', '.join(idle)} {verb} no effect here.")
        given = self._open("hf_ds_config", "DEEPSPEED_CONFIG_FILE")
        self.hf_ds_config = given if isinstance(given, HfDeepSpeedConfig) else HfDeepSpeedConfig(given or {})
        config = self.hf_ds_config.config
        zero = config.setdefault("zero_optimization", {})
        _check_tables(self.hf_ds_config)
        self.zero_stage = zero["stage"] = _whole(
            "zero_stage", self._either("zero_stage", "DEEPSPEED_ZERO_STAGE", zero, "stage", 2)
        )
        if self.zero_stage not in _STAGES:
            instead = ": 0 keeps everything on every rank, which is strategy='ddp'" if self.zero_stage == 0 else ""
            raise ValueError(f"zero_stage must be 1, 2 or 3, got {self.zero_stage}{instead}")
        for name in _OFFLOADS:
            self._offload(name, zero)
        is_open = AUTO in (self.gradient_clipping, config.get("gradient_clipping"))
        clipping = self._either("gradient_clipping", _CLIPPING, config, "gradient_clipping", AUTO if is_open else 0.0)
        self.gradient_clipping = config["gradient_clipping"] = clipping if clipping == AUTO else _norm(clipping)
        steps = self._either("gradient_accumulation_steps", "", config, "gradient_accumulation_steps", AUTO)
        self.gradient_accumulation_steps = steps if steps == AUTO else _whole("gradient_accumulation_steps", steps)
        if self.gradient_accumulation_steps == 0:
            raise ValueError("gradient_accumulation_steps must be at least 1, got 0")
        config["gradient_accumulation_steps"] = self.gradient_accumulation_steps
        self.zero3_init_flag = _truth(
            self._open("zero3_init_flag", "DEEPSPEED_ZERO3_INIT"), default=self.zero_stage == 3
        )
        self.zero3_save_16bit_model = _truth(
            self._open("zero3_save_16bit_model", "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"), False
        )
        for half in _HALVES:
            if config.get(half, {}).get("enabled") == AUTO:
                config[half].pop("enabled")
        self._was = {**self._options(), _WRITTEN: copy.deepcopy(config)}

    def _options(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}

    def _take_changes(self) -> bool:
        """Go back to what was given, with what the program has assigned since; return whether it has assigned any."""
        changed = {name: value for name, value in self._options().items() if value != self._was[name]}
        if "hf_ds_config" not in changed and self.hf_ds_config.config != self._was[_WRITTEN]:
            changed["hf_ds_config"] = self.hf_ds_config  # the program has written into it
        vars(self).update({**copy.deepcopy(self._given), **changed} if changed else {})
        return bool(changed)

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The configuration of the last engine; before there is one that of the program, with its "auto"."""
        config: dict[str, Any] = self._filled or self.hf_ds_config.config
        return config

    @deepspeed_config.setter
    def deepspeed_config(self, config: dict[str, Any]) -> None:
        self._filled = config

    def precision_of(self, chosen: str) -> str:
        """Return the precision of a run: that of the configuration, else the one that was chosen.

        Args:
            chosen: "no", "fp16" or "bf16", by the program or the launch.

        Raises:
            ValueError: The configuration has another one.
        """
        asked = [half for half in _HALVES if self.hf_ds_config.is_true(f"{half}.enabled")]
        if chosen in _HALVES and self.hf_ds_config.is_false(f"{chosen}.enabled"):
            raise ValueError(
                f"mixed_precision={chosen!r}, and the DeepSpeed configuration says {chosen}.enabled: false: write "
                '"auto" there, or make them equal'
            )
        if len(asked) > 1:
            raise ValueError("the DeepSpeed configuration enables fp16 and bf16: a run has one precision")
        if asked and chosen not in (*PRECISIONS[:1], asked[0]):
            raise ValueError(
                f"mixed_precision={chosen!r}, and the DeepSpeed configuration enables {asked[0]}: give one of them"
            )
        return asked[0] if asked else chosen

    def _open(self, name: str, variable: str) -> Any:
        value = getattr(self, name)
        if value is not None or not variable:
            return value
        text = parse_choice_from_env(f"ACCELERATE_{variable}", "").strip()
        return None if text.lower() in ("", "none") else text

    def _either(self, name: str, variable: str, table: dict[str, Any], key: str, default: Any) -> Any:
        """Return the value that a field and a configuration's `key` mean together, and enter it there.

        Raises:
            ValueError: They contradict each other.
        """
        given, written = getattr(self, name), table.get(key, AUTO)
        if given not in (None, AUTO) and written not in (AUTO, given):
            raise ValueError(
                f"DeepSpeedPlugin({name}={given!r}), and the DeepSpeed configuration says {key}: {written!r}: give one "
                'of them, or write "auto" there'
            )
        value = written if written != AUTO else given if given not in (None, AUTO) else self._open(name, variable)
        table[key] = default if value in (None, AUTO) else value
        return table[key]

    def _offload(self, name: str, zero: dict[str, Any]) -> None:
        table = zero.get(name) or {}
        written = table.get("device", AUTO)
        given = self._open(f"{name}_device", f"DEEPSPEED_{name.upper()}_DEVICE")
        if given not in (None, AUTO) and written not in (AUTO, given):
            raise ValueError(
                f"DeepSpeedPlugin({name}_device={given!r}), and the DeepSpeed configuration says {name}.device: "
                f"{written!r}: give one of them"
            )
        place = str(written if written != AUTO else given or _PLACES[0]).lower()
        if place not in _PLACES:
            raise ValueError(f"{name}_device must be none, cpu or nvme, got {place!r}")
        path = self._open(f"{name}_nvme_path", f"DEEPSPEED_{name.upper()}_NVME_PATH")
        if place == "nvme" and path is None and table.get("nvme_path", AUTO) in (None, AUTO):
            raise ValueError(f"{name}_device='nvme' needs {name}_nvme_path, a folder on a fast disk")
        if name == "offload_param" and place != _PLACES[0] and self.zero_stage != 3:
            raise ValueError(
                f"offload_param_device={place!r} is for zero_stage=3, which cuts parameters, and the stage is "
                f"{self.zero_stage}"
            )
        setattr(self, f"{name}_device", place)
        setattr(self, f"{name}_nvme_path", path)
        if place == _PLACES[0]:
            zero.pop(name, None)
            return
        zero[name] = {**table, "device": place} | ({"nvme_path": str(path)} if path is not None else {})


class DummyOptim(Optimizer):
    """A placeholder for the optimizer that a DeepSpeed configuration describes; `prepare` puts that one behind it.

    Args:
        params: Parameters, or groups of them, as any optimizer takes them.
        lr: The learning rate, where the configuration has "auto".
        weight_decay: The weight decay, where the configuration has "auto".
        **kwargs: More values for the configuration's "auto", such as betas.

    Example:
        >>> import torch
        >>> DummyOptim(torch.nn.Linear(1, 1).parameters(), lr=0.1).param_groups[0]["lr"]
        0.1
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0.0, **kwargs: Any) -> None:
        self._said: list[set[str]] = []
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **kwargs})
        self.lr, self.weight_decay, self.kwargs = lr, weight_decay, kwargs

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as any optimizer does.

        Args:
            param_group: The group.
        """
        self._said.append({*param_group} - {"params"})
        super().add_param_group(param_group)

    def groups_as_given(self) -> list[dict[str, Any]]:
        """Return the groups with what the program said of each: the configuration says the rest."""
        return [
            {"params": group["params"], **{name: group[name] for name in said}}
            for group, said in zip(self.param_groups, self._said, strict=True)
        ]

    def take(self, optimizer: Optimizer) -> None:
        """Stand for another optimizer, with its groups and states.

        Args:
            optimizer: The one that DeepSpeed has made.
        """
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Refuse a step without an engine.

        Args:
            closure: As torch's optimizers take it.

        Raises:
            RuntimeError: Always: DeepSpeed's engine steps the real optimizer.
        """
        raise RuntimeError(
            'DummyOptim steps nothing by itself: train with Accelerator(strategy="deepspeed") and a configuration that '
            "has an optimizer, after accelerator.prepare(model, optimizer)"
        )


class DummyScheduler(LRScheduler):
    """A placeholder for the learning-rate schedule of a DeepSpeed configuration; the engine moves it in its steps.

    Args:
        optimizer: The optimizer, or `DummyOptim`.
        total_num_steps: Steps of the whole training, where the configuration has "auto".
        warmup_num_steps: Steps of the warm-up, where the configuration has "auto".
        lr_scheduler_callable: Makes the schedule of an optimizer, where the configuration has none.
        **kwargs: Accepted, as Accelerate does.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Optimizer], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # No super().__init__(): it would take a first step of a schedule that does not exist yet.
        self.optimizer = getattr(optimizer, "optimizer", optimizer)
        self.total_num_steps, self.warmup_num_steps = total_num_steps, warmup_num_steps
        self.lr_scheduler_callable, self.kwargs = lr_scheduler_callable, kwargs
        self.last_epoch = 0
        self._schedule: Any = None

    def take(self, schedule: Any) -> None:
        """Stand for the schedule that the engine moves.

        Args:
            schedule: DeepSpeed's schedule.
        """
        self._schedule = schedule

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine has moved the schedule in its step.

        Args:
            *args, **kwargs: As any schedule takes them.
        """

    def get_last_lr(self) -> list[Any]:
        """Return the learning rate of each group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the engine's schedule; empty before there is one."""
        return {} if self._schedule is None else dict(self._schedule.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Args:
            state_dict: The state.
        """
        if self._schedule is not None:
            self._schedule.load_state_dict(state_dict)


def _check_tables(config: HfDeepSpeedConfig) -> None:
    """Refuse what is no table where DeepSpeed wants one.

    Raises:
        ValueError: Names the key.
    """
    for key in (*_TABLES, *(f"zero_optimization.{name}" for name in _OFFLOADS)):
        value = config.get_value(key, {})
        may_be_null = value is None and key.endswith(_OFFLOADS)
        if not (isinstance(value, dict) or may_be_null):
            raise ValueError(
                f"the DeepSpeed configuration says {key}: {json.dumps(value, default=repr)}, and it must be a table"
            )


def _norm(value: Any) -> float:
    try:
        norm = float(value)
    except (TypeError, ValueError):
        norm = -1.0
    if not norm >= 0:
        raise ValueError(f"gradient_clipping must be a norm, 0 for none, got {value!r}")
    return norm


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not str(value).isdecimal():
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    return int(value)


def _truth(value: Any, default: bool) -> bool:
    return default if value is None else str(value).lower() in ("true", "1", "yes", "on")
