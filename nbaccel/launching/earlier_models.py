"""Models that earlier cells have made: where they are, and whether ranks can get them. Runs in the kernel.

Many notebooks load a model in one cell, onto a GPU or over all of them, and train it in another. A plain model can be
sent to ranks: its memory goes to the host once, and all ranks share that copy. One that is quantised or spread over
GPUs cannot; it is refused before anything is copied, with the lines that move its loading into the cell.

Packages that quantise or dispatch models are recognised by what they leave in a model, and are not imported. No model
is kept here: a plan outlives the notebook's names.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nbaccel.base.quantised import cannot_be_sent, is_quantised
from nbaccel.base.quantities import amount, listed, plural
from nbaccel.errors import LaunchRefused
from nbaccel.namespace.nbytes import met_in, sizes_on_devices
from nbaccel.namespace.wrappers import plain

__all__ = [
    "EarlierModel",
    "MadeAt",
    "models_in",
    "parsed",
    "places_of",
    "refuse_what_stays_here",
    "where_made",
]

_NO_CARD = frozenset({"cpu", "disk", "meta"})

_LOADER = "from_pretrained"
_MAP = "device_map"
_OWN_DEVICE = ast.parse("{'': accelerator.device}", mode="eval").body
_LONGEST_LINE = 160
_ACCELERATOR = "accelerator = Accelerator()"

_PYTHON_HERE = ("%%time", "%%capture", "%%prun")
"""Cell magics whose cells bind names of the notebook."""


@dataclass(frozen=True, slots=True)
class MadeAt:
    """The place where the notebook made a name: the cell's number, the line in it (from 1) and its text."""

    cell: int
    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line} of Cell In[{self.cell}], `{self.text}`"


@dataclass(frozen=True, slots=True)
class EarlierModel:
    """A model that values of the notebook lead to, and that is on a device, quantised, or spread.

    Args:
        name: The variable that leads to it.
        own_name: A variable that is the model itself; empty if there is none.
        kind: Its class.
        is_loaded: The class has `from_pretrained`.
        on_devices: Its bytes by device that is not the host.
        cards: The devices over which it is spread, or between which and the host it moves; empty for a model in one
            place.
        is_quantised: Its weights cannot be sent.
    """

    name: str
    own_name: str
    kind: str
    is_loaded: bool = False
    on_devices: Mapping[str, int] | None = None
    cards: tuple[str, ...] = ()
    is_quantised: bool = False

    @property
    def nbytes(self) -> int:
        """Return its bytes on devices."""
        return sum((self.on_devices or {}).values())

    @property
    def where(self) -> str:
        """Return its devices in words."""
        return " and ".join(self.on_devices or {})

    @property
    def stays_here(self) -> bool:
        """Return whether no other process can get it."""
        return self.is_quantised or bool(self.cards)

    def __str__(self) -> str:
        """Return how the notebook has it, in words that follow its name."""
        size = f" ({amount(self.nbytes)})" if self.nbytes else ""
        if self.is_quantised:
            return f"was loaded quantised{f' and lies on {self.where}' if self.where else ''}{size}"
        return f"is spread over {' and '.join(self.cards)}{size}" if self.cards else f"lies on {self.where}{size}"


def models_in(values: Mapping[str, Any], variables: Mapping[str, Any] | None = None) -> tuple[EarlierModel, ...]:
    """Return the models of `values` that are on devices, quantised or spread; each once, and none inside of another.

    They are found in containers, in attributes of objects such as a Trainer, in closures and defaults of functions, and
    in attributes of classes of the notebook.

    Args:
        variables: The notebook's, among which a model that was found in another object may have a name of its own.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return ()
    module = torch.nn.Module
    values = {name: plain(value) for name, value in values.items()}
    models_first = sorted(values, key=lambda name: not issubclass(type(values[name]), module))
    met = met_in({name: values[name] for name in models_first}, module)
    inside = {id(part) for models in met.values() for model in models for part in _children(model)}
    names = {id(value): name for name, value in reversed({**(variables or {}), **values}.items()) if name[:1] != "_"}
    found = []
    for name, models in met.items():
        for model in models:
            if id(model) not in inside and (one := _weighed(name, names.get(id(model), ""), model)) is not None:
                found.append(one)
    return tuple(found)


def _weighed(name: str, own_name: str, model: Any) -> EarlierModel | None:
    """Return the facts about a model; None if it is a plain one on the host, or cannot be read."""
    with suppress(Exception):  # a module whose __init__ was not called has no parameters to ask for
        sizes = sizes_on_devices({name: model})
        on_devices = {device: counted[name] for device, counted in sizes.items() if device != "meta"}
        quantised = cannot_be_sent(model) or (bool(on_devices) and is_quantised(model))
        cards = places_of(model, on_devices)
        if on_devices or quantised or cards:
            kind = type(model)
            is_loaded = callable(getattr(kind, _LOADER, None))
            return EarlierModel(name, own_name, kind.__name__, is_loaded, on_devices, cards, quantised)
    return None


# --- recognising ----------------------------------------------------------------------------------------------------


def places_of(model: Any, on_devices: Mapping[str, int] | None = None) -> tuple[str, ...]:
    """Return the places of a module that is spread over devices, or that moves between one and the host or the disk.

    It is empty for a module in one place, and for one whose parts wait on the host and on the disk alone: each process
    may have such a model.

    Args:
        on_devices: Its bytes by device, if the caller knows them.
    """
    parts = list(_parts(model))
    maps = (marks["hf_device_map"] for marks in map(vars, parts) if isinstance(marks.get("hf_device_map"), dict))
    mapped = dict.fromkeys(_device_name(place) for places in maps for place in places.values())
    if on_devices is None:
        on_devices = Counter(str(tensor.device) for tensor in _tensors(model) if tensor.device.type not in _NO_CARD)
    places = list(dict.fromkeys([*mapped, *on_devices]))
    if all(place in _NO_CARD for place in places):
        return ()
    if len(places) == 1 and any(map(_brings_weights, map(vars, parts))):
        places.append("the host")
    return tuple(places) if len(places) > 1 else ()


def _brings_weights(marks: Mapping[str, Any]) -> bool:
    """Return whether a module is dispatched, by its attributes: by a hook of Accelerate's kind that has a device."""
    hook = marks.get("_hf_hook")
    return "_nbaccel_dispatch" in marks or hasattr(hook, "execution_device") or hasattr(hook, "hooks")


def _device_name(place: Any) -> str:
    """Return torch's name of a place in a device map, where numbers are GPUs.

    Example:
        >>> _device_name(1), _device_name("cuda"), _device_name("disk")
        ('cuda:1', 'cuda:0', 'disk')
    """
    text = str(place)
    return f"cuda:{text}" if text.isdecimal() else "cuda:0" if text == "cuda" else text


def _parts(model: Any) -> Iterator[Any]:
    yield from sys.modules["torch"].nn.Module.modules(model)


def _children(model: Any) -> list[Any]:
    try:
        return [part for part in vars(model)["_modules"].values() if part is not None]
    except (KeyError, TypeError, AttributeError):  # a module whose __init__ was not called
        return []


def _tensors(model: Any) -> Iterator[Any]:
    module = sys.modules["torch"].nn.Module
    yield from module.parameters(model)
    yield from module.buffers(model)


# --- refusing -------------------------------------------------------------------------------------------------------


def refuse_what_stays_here(
    models: Sequence[EarlierModel], ranks: int, history: Sequence[str], where: str = "this cell", one: str = "-n 1"
) -> None:
    """Refuse a run whose ranks would need a model that cannot leave this process.

    Args:
        history: The notebook's cells, as typed; a cell's number is its index.
        where: What the ranks run, in words.
        one: How to ask for one process.

    Raises:
        LaunchRefused: With the lines that load the model in the ranks.
    """
    model = next((model for model in models if model.stays_here), None)
    if model is None:
        return
    if model.is_quantised:
        why = "its weights cannot be sent to ranks. Each rank has to load it onto its own device"
    else:
        why = f"{plural(ranks, 'rank')} {'needs' if ranks == 1 else 'need'} it whole, each on one device"
    owner = model.own_name or f"the {model.kind}"
    owner = owner if owner == model.name else f"{owner} in {model.name}"
    raise LaunchRefused(
        f"{owner} {model}: {why}. {_remedy(model, history, where)}\n"
        f"Nothing was copied or started. One process takes it as it is: {one}, and no --start."
    )


def _remedy(model: EarlierModel, history: Sequence[str], where: str) -> str:
    """Return the sentence that says what to move, and the lines as they have to be there."""
    name = model.own_name or model.name
    loading = _loading(name, history)
    last = where_made(name, history)
    later = [last] if loading is not None and last is not None and last != loading[0] else []
    if name != model.name and (holder := where_made(model.name, history)) is not None:
        later.append(holder)
    behind = f", and after it {listed([str(place) for place in later])}" if later else ""
    if loading is not None:
        return f"Move {loading[0]} into {where}{behind}:\n  {_ACCELERATOR}\n  {loading[1]}"
    if model.is_loaded:
        new = f"{model.own_name or 'model'} = {model.kind}.{_LOADER}(..., {_MAP}={ast.unparse(_OWN_DEVICE)})"
        return f"Load it in {where}{behind}:\n  {_ACCELERATOR}\n  {new}"
    if last is not None:
        return f"Move {last} into {where}{behind}, onto accelerator.device:\n  {_ACCELERATOR}\n  {last.text}"
    return f"Make {name} in {where}, onto accelerator.device:\n  {_ACCELERATOR}\n  {name} = ..."


def where_made(name: str, history: Sequence[str]) -> MadeAt | None:
    """Return the last assignment to `name` in the notebook's cells; None if the text shows none.

    Example:
        >>> where_made("model", ["", "import torch", "x = 1\\nmodel = torch.nn.Linear(2, 1).cuda()"])
        MadeAt(cell=2, line=2, text='model = torch.nn.Linear(2, 1).cuda()')
    """
    return next((place for place, _ in _assignments(name, history)), None)


def _loading(name: str, history: Sequence[str]) -> tuple[MadeAt, str] | None:
    """Return the last assignment to `name` that loads a model, and the same one onto the rank's own device."""
    for place, node in _assignments(name, history):
        calls = (part for part in ast.walk(node.value) if isinstance(part, ast.Call))
        call = next((call for call in calls if _loads(call)), None)
        if call is None:
            continue
        call.keywords = [*(word for word in call.keywords if word.arg != _MAP), ast.keyword(_MAP, _OWN_DEVICE)]
        if len(line := ast.unparse(node)) > _LONGEST_LINE:
            call.args, call.keywords = [ast.Constant(...)], call.keywords[-1:]
            line = ast.unparse(node)
        return place, line
    return None


def _loads(call: ast.Call) -> bool:
    is_loader = isinstance(call.func, ast.Attribute) and call.func.attr == _LOADER
    return is_loader or any(word.arg == _MAP for word in call.keywords)


def _assignments(name: str, history: Sequence[str]) -> Iterator[tuple[MadeAt, ast.Assign]]:
    """Yield the assignments to `name` in the notebook's cells, the last one first."""
    for number in range(len(history) - 1, 0, -1):
        tree = parsed(history[number])
        if tree is None:
            continue
        lines = history[number].splitlines()
        nodes = [node for node in _of_the_notebook(tree) if isinstance(node, ast.Assign) and _binds(node, name)]
        for node in reversed(nodes):
            yield MadeAt(number, node.lineno, lines[node.lineno - 1].strip()), node


def _of_the_notebook(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a cell in their order, without those in functions and classes, which bind other names."""
    for part in ast.iter_child_nodes(node):
        yield part
        if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _of_the_notebook(part)


def parsed(text: str) -> ast.Module | None:
    """Return the tree of a cell as typed, without its magics; None if it is not Python."""
    if text.lstrip().startswith("%%") and not text.lstrip().startswith(_PYTHON_HERE):
        return None
    lines = ["" if line.lstrip().startswith(("%", "!")) else line for line in text.splitlines()]
    try:
        return ast.parse("\n".join(lines))
    except (SyntaxError, ValueError):  # shell commands inside of blocks, or a mistake
        return None


def _binds(node: ast.Assign, name: str) -> bool:
    leaves = [leaf for target in node.targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)]
    return any(leaf.id == name and isinstance(leaf.ctx, ast.Store) for leaf in leaves)  # not `name.attribute = ...`
