"""The file that `accelerate config` writes. Runs in the process of `nbaccel launch`.

Its keys are the names of the flags of `accelerate launch`, some of them in tables. So the file is read as flags with
their values, and only `accelerate_flags` and the parser decide what these mean. YAML is read by PyYAML if that is
installed, as it is with every Hugging Face library, and otherwise by `read_plain_yaml`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["AccelerateConfig", "default_path", "read_plain_yaml"]

_MODES = {
    "NO": "",
    "MULTI_CPU": "",
    "MULTI_GPU": "multi_gpu",
    "DEEPSPEED": "use_deepspeed",
    "FSDP": "use_fsdp",
    "MEGATRON_LM": "use_megatron_lm",
    "TP": "use_parallelism_config",
    "XLA": "tpu",
    "TPU": "tpu",
}
"""The flag that is equivalent to a `distributed_type`; empty if none is needed."""

_OF_MODES = ("deepspeed_config", "fsdp_config", "megatron_lm_config", "fp8_config")
"""Tables that belong to one mode each; of these modes FSDP and DEEPSPEED run here."""

_FLAGS = (
    *("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend"),
    *("mixed_precision", "gpu_ids", "use_cpu", "debug", "same_network", "enable_cpu_affinity", "dynamo_backend"),
    *("gradient_accumulation_steps", "num_cpu_threads_per_process", "main_training_function", "downcast_bf16"),
    *("tpu_use_sudo", "tpu_use_cluster", "tpu_name", "tpu_zone", "tpu_vm", "tpu_env", "commands", "command_file"),
)
"""Keys that are flags."""

_RENAMED = {"use_cpu": "cpu", "tpu_use_cluster": "tpu_cluster"}

_UNCHOSEN: dict[str, Any] = {
    **{"main_training_function": "main", "downcast_bf16": "no", "rdzv_backend": "static", "gpu_ids": "all"},
    **{"num_machines": 1, "machine_rank": 0},
}
"""Values that `accelerate config` writes although nothing was chosen."""


def default_path() -> Path | None:
    """Return the file of `accelerate config` in its default place, if there is one."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(os.environ.get("HF_HOME") or f"{cache}/huggingface").expanduser() / "accelerate"
    paths = (folder / f"default_config.{ending}" for ending in ("yaml", "json"))
    return next((path for path in paths if path.is_file()), None)


@dataclass(frozen=True, slots=True)
class AccelerateConfig:
    """The contents of one file.

    Args:
        flags: Flags of `accelerate launch`, as the file spells them, and their values; none that means "not chosen".
        unknown: Keys that Accelerate does not know.
    """

    flags: Mapping[str, Any] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> AccelerateConfig:
        """Read the file.

        Raises:
            ValueError: One sentence on why the file cannot be used.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
        try:
            values = _parsed(text, is_json=path.suffix == ".json")
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        known = {*_FLAGS, *_OF_MODES, "compute_environment", "distributed_type", "fp16"}
        known |= {"dynamo_config", "mpirun_config", "parallelism_config"}
        unknown = tuple(str(key) for key in values if key not in known)
        try:
            return cls(dict(_flags(values)), unknown)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def _flags(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the flags of the file, with their values.

    Raises:
        ValueError: The file is about runs that are not supported here.
    """
    if (place := values.get("compute_environment") or "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise ValueError(f"compute_environment is {place}, and ranks are started on this machine alone.")
    kind = str(values.get("distributed_type") or "NO").upper()  # a bare NO is false in YAML
    if kind not in _MODES:
        raise ValueError(
            f"distributed_type is {kind}, and ranks compute on CUDA or the CPU here: MULTI_GPU, MULTI_CPU."
        )
    if values.get("num_processes") == -1:
        raise ValueError("num_processes is -1, so that every command says it; say it in this file, or leave it out.")
    if _MODES[kind]:
        yield _MODES[kind], True
    if values.get("parallelism_config"):
        yield "use_parallelism_config", True
    if kind == "NO" and "num_processes" not in values:
        yield "num_processes", 1
    if values.get("mixed_precision") is False:  # a bare no
        yield "mixed_precision", "no"
    elif values.get("fp16") and not values.get("mixed_precision"):  # as the first versions of Accelerate had it
        yield "mixed_precision", "fp16"
    tables = [(values.get("dynamo_config") or {}, "dynamo_"), (values.get("mpirun_config") or {}, "mpirun_")]
    for table, beginning in tables:
        for key, value in table.items():
            if _is_chosen(value):
                yield beginning + key.removeprefix(beginning), value
    sharding = dict(values.get("fsdp_config") or {}) if kind == "FSDP" else {}
    for key, value in sharding.items():
        if value is not None and value != "":  # a false is a choice
            yield f"fsdp_{str(key).removeprefix('fsdp_')}", ",".join(value) if isinstance(value, list) else value
    zero = dict(values.get("deepspeed_config") or {}) if kind == "DEEPSPEED" else {}
    yield from ((str(key), value) for key, value in zero.items() if value is not None and value != "")
    for key in (*_FLAGS, *_OF_MODES):
        value = None if key in ("fsdp_config", "deepspeed_config") and (sharding or zero) else values.get(key)
        if _is_chosen(value) and value != _UNCHOSEN.get(key):
            yield _RENAMED.get(key, key), value


def _is_chosen(value: Any) -> bool:
    return value is not None and value is not False and value not in ("", [], {})


def _parsed(text: str, is_json: bool) -> dict[str, Any]:
    """Parse the text into a table of settings.

    Raises:
        ValueError: One sentence on the mistake.
    """
    try:
        values = json.loads(text) if is_json else _yaml(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"this is not JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ValueError("this is no list of settings, KEY: VALUE.")
    return values


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        return read_plain_yaml(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"this is not YAML: {' '.join(str(error).split())}.") from None


# --- YAML without PyYAML

_QUOTED = re.compile(r"""(?:'(?P<single>(?:[^']|'')*)'|"(?P<double>[^"\\]*)")\s*(?:#.*)?$""")
_PLAIN = re.compile(r"(?P<word>[\w./~$%+-](?:[^#:]|(?<! )#|:(?! |$))*?)?\s*(?:(?:^|(?<=\s))#.*)?$")
_ENTRY = re.compile(r"(?P<key>[A-Za-z_]\w*):(?:\s+(?P<value>.*))?$")
_ITEM = re.compile(r"-(?:\s+(?P<value>.*))?$")
_TRUTH = {**dict.fromkeys(("true", "yes", "on"), True), **dict.fromkeys(("false", "no", "off"), False)}
_EMPTY: dict[str, Any] = {"[]": [], "{}": {}}


def read_plain_yaml(text: str) -> dict[str, Any]:
    """Read the part of YAML that `accelerate config` writes: keys with plain values, and tables and lists of these.

    Raises:
        ValueError: The text contains more than that.

    Example:
        >>> read_plain_yaml("num_processes: 2\\nfsdp_config:\\n  fsdp_version: 2\\ngpu_ids: '0,1'\\nuse_cpu: false")
        {'num_processes': 2, 'fsdp_config': {'fsdp_version': 2}, 'gpu_ids': '0,1', 'use_cpu': False}
    """
    lines = [
        (number, len(line) - len(line.lstrip(" ")), line.strip())
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#") and line.strip() != "---"
    ]
    values: dict[str, Any] = {}
    last = ""  # the key of the next lines, if these are a list or indented
    depth: int | None = None  # indentation of these lines
    for number, indent, line in lines:
        outer = values.get(last)
        item = _ITEM.match(line)
        entry = _ENTRY.match(line)
        if entry and indent == 0:
            last, depth = entry["key"], None
            values[last] = _scalar(entry["value"] or "", number)
            continue
        if not last or depth not in (None, indent):
            raise _too_much(number)
        depth = indent
        if item and (outer is None or isinstance(outer, list)):
            values[last] = [*(outer or []), _scalar(item["value"] or "", number)]
        elif entry and (outer is None or isinstance(outer, dict)):
            values[last] = {**(outer or {}), entry["key"]: _scalar(entry["value"] or "", number)}
        else:
            raise _too_much(number)
    return values


def _scalar(text: str, number: int) -> Any:
    quoted = _QUOTED.match(text)
    if quoted:
        return quoted["single"].replace("''", "'") if quoted["single"] is not None else quoted["double"]
    if text.partition(" #")[0].strip() in _EMPTY:
        return type(_EMPTY[text.partition(" #")[0].strip()])()
    plain = _PLAIN.match(text)
    if not plain:
        raise _too_much(number)
    word = (plain["word"] or "").strip()
    if word.lower() in ("", "~", "null"):
        return None
    if word.lower() in _TRUTH:
        return _TRUTH[word.lower()]
    if re.fullmatch(r"[-+]?(0|[1-9]\d*)", word):
        return int(word)
    return float(word) if re.fullmatch(r"[-+]?\d+\.\d*([eE][-+]\d+)?", word) else word


def _too_much(number: int) -> ValueError:
    return ValueError(f"line {number} is more YAML than is read without PyYAML: pip install pyyaml, or simplify it.")
