"""FullyShardedDataParallelPlugin: the options of the strategy "fsdp", with Accelerate's names. Built anywhere.

It is a value: nothing here shards, and torch.distributed.fsdp, which takes half a second to import, is imported for a
precision policy alone. torch's FSDP2 is what runs. Options of FSDP1 are translated where FSDP2 has the same, and are
otherwise accepted with one warning that names them. What the program leaves open is read from the variables by which
`accelerate launch` and transformers choose it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch.nn import Module

from nbaccel.train.distributed.callers import warn_user
from nbaccel.train.step.environment import parse_choice_from_env
from nbaccel.train.step.kwargs_handlers import KwargsHandler

__all__ = [
    "FullyShardedDataParallelPlugin",
    "disable_fsdp_ram_efficient_loading",
    "enable_fsdp_ram_efficient_loading",
]

_WRAPS = ("transformer_based_wrap", "size_based_wrap", "no_wrap")
_AUTO_WRAP = "auto"
_STATE_DICTS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")

_ENUMERATED_STATE_DICTS = {"1": "FULL_STATE_DICT", "2": "LOCAL_STATE_DICT", "3": "SHARDED_STATE_DICT"}
"""The numbers of torch's `StateDictType`."""

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""FSDP1's `ShardingStrategy`, whose numbers begin with 1."""

_RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}

_YES, _NO = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

_LEAST_PARAMETERS = 100_000_000
"""Size of a group of "size_based_wrap" that nobody chose: that of torch's own policy and of `accelerate launch`."""

_SILENT = {
    "backward_prefetch": ("BACKWARD_PRE", "1"),
    "forward_prefetch": _NO,
    "use_orig_params": _YES,
    "sync_module_states": _YES,
}
"""Options of FSDP1 that variables of the environment set, and the values that need no word: it is as if they held."""

_FSDP1_ONLY = (
    *("backward_prefetch", "state_dict_config", "optim_state_dict_config", "use_orig_params", "param_init_fn"),
    *("sync_module_states", "forward_prefetch"),
)
"""Options without effect, whatever their value is; those with a default of None."""


@dataclass(slots=True)
class FullyShardedDataParallelPlugin(KwargsHandler):
    """Options of ``Accelerator(strategy="fsdp", fsdp_plugin=…)``: parameters, gradients and optimizer states in shards.

    Options that are FSDP1's, or have no counterpart, are accepted; one warning names those that were given. Fields may
    be assigned until an Accelerator is made with the plugin.

    Args:
        fsdp_version: Accepted; FSDP2 runs in any case.
        sharding_strategy: FSDP1's word for `reshard_after_forward`, a name, a number or torch's `ShardingStrategy`:
            FULL_SHARD is True, SHARD_GRAD_OP is False.
        reshard_after_forward: True frees gathered parameters after the forward and gathers them again for the backward.
            False keeps them until then: faster, and with more memory.
        backward_prefetch, forward_prefetch, limit_all_gathers: FSDP1's; accepted, without effect.
        mixed_precision_policy: torch's `MixedPrecisionPolicy`, a dictionary of its fields, or "bf16", "fp16" or "fp32"
            for all of them. None follows from the Accelerator's ``mixed_precision``.
        auto_wrap_policy: The modules that are gathered together. "transformer_based_wrap": those of the classes in
            `transformer_cls_names_to_wrap`. "size_based_wrap": those with `min_num_params` parameters. "no_wrap": the
            model as one. Or a function of a module. "auto", the default, takes the classes that are named, else the
            model's own, else the members of its lists.
        cpu_offload: The shards are in host memory while nothing computes with them.
        ignored_modules: Modules that stay whole on every rank, or a regular expression for all of their names.
        state_dict_type: "SHARDED_STATE_DICT" or "FULL_STATE_DICT", for programs that read it. What is saved does not
            depend on it.
        state_dict_config, optim_state_dict_config, activation_checkpointing_offload: Accepted, without effect.
        use_orig_params, param_init_fn, sync_module_states: FSDP1's; accepted, without effect.
        activation_checkpointing: Compute the activations of these modules again in the backward, instead of keeping
            them.
        cpu_ram_efficient_loading: transformers loads weights on rank 0 alone, and the others get them when the model is
            prepared. It does so in runs of ``--use_fsdp``, and after `enable_fsdp_ram_efficient_loading`.
        transformer_cls_names_to_wrap: The classes for "transformer_based_wrap"; by default the model's
            ``_no_split_modules``.
        min_num_params: The number of parameters for "size_based_wrap"; by default 100 million.

    Example:
        >>> plugin = FullyShardedDataParallelPlugin("2", "SHARD_GRAD_OP", transformer_cls_names_to_wrap="Block")
        >>> plugin.reshard_after_forward, plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap
        (False, 'transformer_based_wrap', ['Block'])
    """

    # Typed as any: what a program gives has more forms than what is read afterwards, which the docstring describes.
    fsdp_version: Any = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Iterable[Module] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: Any = None
    activation_checkpointing_offload: Any = None
    cpu_ram_efficient_loading: Any = None
    transformer_cls_names_to_wrap: Any = None
    min_num_params: Any = None
    _is_read: bool = field(default=False, init=False, repr=False, compare=False)  # the environment, and warned of

    def __post_init__(self) -> None:
        idle = list(self._without_effect())
        version = self._version()
        self.reshard_after_forward = self._reshards()
        self.sharding_strategy = None  # said by `reshard_after_forward` from here on
        self._choose_groups()
        self.mixed_precision_policy, without_effect = _precision(self.mixed_precision_policy)
        idle += without_effect
        self.cpu_offload = _offloads(self._open("cpu_offload", "OFFLOAD_PARAMS"))
        self.ignored_modules = _ignored(self._open("ignored_modules"))
        self.set_state_dict_type()
        if self.cpu_ram_efficient_loading is not None and not self._is_read:  # transformers asks the environment
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(self.cpu_ram_efficient_loading)
        for name in ("activation_checkpointing", "activation_checkpointing_offload", "cpu_ram_efficient_loading"):
            setattr(self, name, _truth(name, self._open(name), default=False))
        if self.activation_checkpointing_offload:
            idle.append("activation_checkpointing_offload")
        self.fsdp_version, self._is_read = 2, True
        self._forget_what_is_idle()
        if idle or version == 1:
            warn_user(_warning(idle, version))

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set `state_dict_type`, also after an Accelerator was made with this plugin.

        Args:
            state_dict_type: "SHARDED_STATE_DICT", "FULL_STATE_DICT" or torch's `StateDictType`. None changes nothing.
        """
        chosen = self._open("state_dict_type") if state_dict_type is None else state_dict_type
        if chosen is None:
            chosen = _STATE_DICTS[0]
        named = str(getattr(chosen, "name", chosen)).upper()
        named = _ENUMERATED_STATE_DICTS.get(named, named)
        if named not in _STATE_DICTS:
            instead = "; FSDP2 has no local ones" if named == "LOCAL_STATE_DICT" else ""
            raise ValueError(f"state_dict_type must be {_either(_STATE_DICTS)}, got {chosen!r}{instead}")
        self.state_dict_type = named

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Set the precision policy unless the program gave one.

        Args:
            mixed_precision: "bf16", "fp16" or "fp32", or one of these types of torch.
            buffer_autocast: Accepted, without effect.
            override: Replace also a policy that the program gave.
        """
        if self.mixed_precision_policy is None or override:
            names = {dtype: name for name, dtype in _DTYPES.items()}
            self.mixed_precision_policy = _precision(names.get(mixed_precision, mixed_precision))[0]

    # -- what the program gave, or else the environment

    def _open(self, name: str, variable: str = "") -> Any:
        """Return the program's choice of the field `name`, else that of the environment, else None."""
        value = getattr(self, name)
        return _variable(variable or name.upper()) if value is None else value

    def _version(self) -> int:
        text = str(version) if (version := self._open("fsdp_version", "VERSION")) is not None else "2"
        if text not in ("1", "2"):
            raise ValueError(f"fsdp_version must be 1 or 2, and 2 is what runs; got {version!r}")
        return int(text)

    def _reshards(self) -> bool:
        """Return whether gathered parameters are freed after a forward.

        The program's choice counts before that of the environment, in which `accelerate launch` sets both variables:
        for version 1 that of the sharding strategy counts, as there.
        """
        given = {"reshard_after_forward": self.reshard_after_forward, "sharding_strategy": self.sharding_strategy}
        is_second = self._is_read  # the other one is ours then, and this one was assigned since
        if all(value is None for value in given.values()):
            given = {name: _variable(name.upper()) for name in given}
            is_second = _variable("VERSION") == "1"
        if is_second:
            given = dict(reversed(given.items()))
        name, value = next(((name, value) for name, value in given.items() if value is not None), ("", True))
        return value if isinstance(value, bool) else _reshards(name, value)

    def _choose_groups(self) -> None:
        policy = self._open("auto_wrap_policy")
        names = _class_names(self._open("transformer_cls_names_to_wrap", "TRANSFORMER_CLS_TO_WRAP"))
        least = _count(self.min_num_params)
        if getattr(policy, "__name__", "") == "transformer_auto_wrap_policy":  # torch's, without its argument
            policy = "transformer_based_wrap"
        if policy in (None, _AUTO_WRAP):  # an option that goes with one policy alone asks for it
            policy = "transformer_based_wrap" if names else "size_based_wrap" if least else _AUTO_WRAP
        if isinstance(policy, str):
            if policy.lower() not in (_AUTO_WRAP, *_WRAPS):
                raise ValueError(
                    f"auto_wrap_policy must be {_either((_AUTO_WRAP, *_WRAPS))}, or a function of a module that says "
                    f"whether its parameters are gathered together, got {policy!r}"
                )
            policy = policy.lower()
        elif not callable(policy):
            raise TypeError(
                f"auto_wrap_policy must be {_either((_AUTO_WRAP, *_WRAPS))}, or a function of a module, got {policy!r}"
            )
        self.auto_wrap_policy, self.transformer_cls_names_to_wrap = policy, names
        if policy == "size_based_wrap":
            least = least or _count(_variable("MIN_NUM_PARAMS")) or _LEAST_PARAMETERS
        self.min_num_params = least

    # -- options of FSDP1

    def _without_effect(self) -> Iterable[str]:
        """Yield the options that were given and have no effect: the program's, and those of the environment."""
        for name in _FSDP1_ONLY:
            if getattr(self, name) is not None:
                yield name
            elif name in _SILENT and not self._is_read:
                value = _variable(name.upper())
                if value is not None and value.lower() not in map(str.lower, _SILENT[name]):
                    yield f"FSDP_{name.upper()}={value}"
        if not self.limit_all_gathers:
            yield "limit_all_gathers"

    def _forget_what_is_idle(self) -> None:
        """Return options without effect to their defaults, so that the warning comes once."""
        defaults = {each.name: each.default for each in fields(self)}
        for name in (*_FSDP1_ONLY, "limit_all_gathers", "activation_checkpointing_offload"):
            setattr(self, name, defaults[name])


def enable_fsdp_ram_efficient_loading() -> None:
    """Let transformers load weights on rank 0 alone, in programs whose models are sharded."""
    os.environ.setdefault("ACCELERATE_USE_FSDP", "True")
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Let transformers load weights on every rank."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "False"


def _variable(name: str) -> str | None:
    """Return the choice of Accelerate's launcher, ``FSDP_NAME``; None where it made none."""
    text = parse_choice_from_env(f"FSDP_{name}", "").strip()
    return None if text.lower() in ("", "none") else text


def _warning(idle: list[str], version: int) -> str:
    parts = []
    if idle:
        verb = "have" if len(idle) > 1 else "has"
        parts.append(f"{', '.join(idle)} {verb} no effect: FSDP2 has no such option, or does it in any case.")
    if version == 1:
        parts.append("fsdp_version=1 was asked for, and FSDP2 is what runs.")
    return f"FullyShardedDataParallelPlugin: {' '.join(parts)}"


# -- the forms that a choice may have


def _either(choices: Iterable[str]) -> str:
    *others, last = map(repr, choices)
    return f"{', '.join(others)} or {last}"


def _truth(name: str, value: Any, default: bool) -> bool:
    if value is None:
        return default
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in (*_YES, *_NO):
        return value.lower() in _YES
    raise ValueError(f"{name} must be True or False, got {value!r}")


def _reshards(name: str, value: Any) -> bool:
    """Return what a name or a number of FSDP1's sharding strategies means, or a word for true or false.

    Raises:
        ValueError: FSDP2 has nothing of the kind; the message says what has.
    """
    said = str(getattr(value, "name", value)).upper().removeprefix("_")  # torch's last member has an underscore
    is_word = name == "reshard_after_forward" and isinstance(value, str)
    if is_word and said.lower() in (*_YES, *_NO):
        return said.lower() in _YES
    strategy = _STRATEGIES[int(said) - 1] if said.isdecimal() and 0 < int(said) <= len(_STRATEGIES) else said
    if strategy in _RESHARDS:
        return _RESHARDS[strategy]
    if strategy == "NO_SHARD":
        raise ValueError(f'{name}={value!r} leaves the model whole on every rank: use Accelerator(strategy="ddp")')
    if strategy in _STRATEGIES:
        raise ValueError(
            f"{name}={value!r} shards inside of each machine and replicates between machines, which is not here: "
            "use 'FULL_SHARD' or 'SHARD_GRAD_OP', which shard over all ranks"
        )
    words = "True or False, or " if name == "reshard_after_forward" else ""
    raise ValueError(f"{name} must be {words}{_either(_RESHARDS)}, got {value!r}")


def _precision(policy: Any) -> tuple[Any, list[str]]:
    """Return `policy` as torch's `MixedPrecisionPolicy`, and the names of what it has beyond that; None stays.

    Raises:
        ValueError, TypeError: It is no policy; the message says which there are.
    """
    if policy is None:
        return None, []
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if isinstance(policy, MixedPrecisionPolicy):
        return policy, []
    if isinstance(policy, str):
        if policy not in _DTYPES:
            instead = "; 8-bit training is not here" if policy == "fp8" else ""
            raise ValueError(f"mixed_precision_policy must be {_either(_DTYPES)}, got {policy!r}{instead}")
        dtype = _DTYPES[policy]
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype), []
    known = [each.name for each in fields(MixedPrecisionPolicy)]
    if not isinstance(policy, Mapping):
        if type(policy).__name__ != "MixedPrecision":  # FSDP1's
            raise TypeError(
                "mixed_precision_policy must be a MixedPrecisionPolicy of torch.distributed.fsdp, a dictionary of its "
                f"fields, or {_either(_DTYPES)}, got {policy!r}"
            )
        policy = {name: getattr(policy, name) for name in ("param_dtype", "reduce_dtype", "buffer_dtype")}
    chosen = {name: value for name, value in policy.items() if name != "buffer_dtype"}
    if unknown := [str(name) for name in chosen if name not in known]:
        raise ValueError(f"mixed_precision_policy has no field {unknown[0]!r}: its fields are {', '.join(known)}")
    for name, value in chosen.items():
        kind = bool if name == "cast_forward_inputs" else torch.dtype
        if not (isinstance(value, kind) or (value is None and kind is torch.dtype)):
            raise TypeError(f"mixed_precision_policy: {name} must be a {_named(kind)}, got {value!r}")
    has_more = policy.get("buffer_dtype") is not None
    return MixedPrecisionPolicy(**chosen), ["mixed_precision_policy's buffer_dtype"] if has_more else []


def _named(kind: type) -> str:
    return "torch.dtype" if kind is torch.dtype else kind.__name__


def _offloads(value: Any) -> bool:
    """Return whether shards are kept in the host's memory; by the names of torch's classes, without importing them."""
    match type(value).__name__:
        case "CPUOffload":
            return bool(value.offload_params)
        case "CPUOffloadPolicy" | "OffloadPolicy" as name:
            return name == "CPUOffloadPolicy"
    return _truth("cpu_offload", value, default=False)


def _ignored(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    modules = tuple(value) if isinstance(value, Iterable) and not isinstance(value, Module) else (value,)
    if wrong := [each for each in modules if not isinstance(each, Module)]:
        raise TypeError(f"ignored_modules must be modules, or a regular expression for their names, got {wrong[0]!r}")
    return modules


def _class_names(value: Any) -> list[str] | None:
    if value is None:
        return None
    several = value.split(",") if isinstance(value, str) else value if isinstance(value, Iterable) else [value]
    names = [each.__name__ if isinstance(each, type) else each for each in several]
    if wrong := [each for each in names if not isinstance(each, str)]:
        raise TypeError(f"transformer_cls_names_to_wrap must be names of classes, got {wrong[0]!r}")
    return [name.strip() for name in names if name.strip()] or None


def _count(value: Any) -> int:
    """Return a number of parameters; 0 where none was given."""
    if value is None:
        return 0
    if isinstance(value, bool) or not str(value).isdecimal():
        raise ValueError(f"min_num_params must be a whole number from 0 on, got {value!r}")
    return int(value)
