"""Let Lightning's `Trainer` and `Fabric` train in the existing ranks. Runs in ranks; imports no Lightning.

In a notebook Lightning counts devices, and starts processes, as in an interactive program. A rank is not interactive:
devices that are left to Lightning are as many as there are ranks, the processes count as started by torchrun, and a
strategy that starts its own processes ("ddp_notebook", "ddp_fork", "ddp_spawn") uses the ranks instead. A number of
devices that differs from that of the ranks is refused, and so are a `Trainer` and a `Fabric` that were made in the
notebook. `SetUpAnew` serves integrations of other libraries too.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from types import CodeType
from typing import Any, NoReturn

from nbaccel.base.world import World
from nbaccel.errors import NestedLaunch, NotInRanks, NotPrepared
from nbaccel.launching.ipc.import_hooks import Assignment, Change, Prepare, Replacement
from nbaccel.launching.libraries import LibraryRank

__all__ = [
    "SetUpAnew",
    "name_of",
    "names_in",
    "of_lightning",
    "of_lightnings_utilities",
    "refuse",
    "text_of_rich",
]


def of_lightning(here: LibraryRank, library: str) -> Iterator[tuple[str, Prepare]]:
    """Make Lightning use the ranks: the whole of it, or the `library` that has its trainer or its fabric alone."""
    world = here.world
    fabrics = {"lightning": ["lightning.fabric"], "lightning_fabric": ["lightning_fabric"]}.get(library, [])
    trainers = {"lightning": ["lightning.pytorch"], "pytorch_lightning": ["pytorch_lightning"]}.get(library, [])
    for package in fabrics:
        yield f"{package}.utilities.imports", _not_interactive
        yield f"{package}.connector", partial(_count_ranks, world, "_Connector")
        yield f"{package}.plugins.environments.torchelastic", _detect_ranks
        yield f"{package}.plugins.environments.lightning", _keep_environment
        yield f"{package}.fabric", partial(_check_fabrics, world)
    for package in trainers:
        connector = f"{package}.trainer.connectors.accelerator_connector"
        yield connector, partial(_count_ranks, world, "_AcceleratorConnector")
        yield f"{package}.callbacks.progress.rich_progress", _not_interactive
        yield f"{package}.trainer.trainer", partial(_check_trainers, world)
    for package in (*fabrics, *trainers):
        yield f"{package}.strategies.ddp", _use_ranks
        yield f"{package}.strategies.launchers.multiprocessing", partial(_refuse_launcher, world)
        yield f"{package}.strategies.launchers.subprocess_script", partial(_refuse_scripts, world)


def of_lightnings_utilities(here: LibraryRank, library: str) -> Iterator[tuple[str, Prepare]]:
    """Let what Lightning does "only on rank 0" be done there."""
    yield "lightning_utilities.core.rank_zero", partial(_set_rank, here.world)


def text_of_rich(here: LibraryRank, library: str) -> Iterator[tuple[str, Prepare]]:
    """Make rich, which draws Lightning's bars, write text."""
    yield "rich.console", _write_text


def _set_rank(world: World, module: Any) -> list[Change]:
    """Set the rank of `rank_zero_only`, which the notebook may have set to 0; "only on rank 0" depends on it."""
    return [Assignment(module.rank_zero_only, "rank", world.rank)]


def _write_text(module: Any) -> list[Change]:
    """Make rich, which draws Lightning's bars, write text: its widgets would use the kernel's sockets."""
    return [Assignment(module, "_is_jupyter", lambda: False), _console_writes_text]


def _console_writes_text() -> None:
    console = getattr(sys.modules.get("rich"), "_console", None)
    if console is not None:
        console.is_jupyter = False


def _not_interactive(module: Any) -> list[Change]:
    return [Assignment(module, "_IS_INTERACTIVE", False)] if hasattr(module, "_IS_INTERACTIVE") else []


def _count_ranks(world: World, name: str, module: Any) -> list[Change]:
    """Make devices that are left to Lightning the ranks; by default it counts 1 on CPUs, and GPUs elsewhere."""

    def counting(lightnings: Callable[..., None]) -> Callable[..., None]:
        def _set_devices_flag_if_auto_passed(connector: Any) -> None:
            if connector._devices_flag == "auto" and connector._num_nodes_flag == 1:
                connector._devices_flag = world.world_size
            lightnings(connector)

        return _set_devices_flag_if_auto_passed

    replaced = Replacement([getattr(module, name)], "_set_devices_flag_if_auto_passed", counting)
    return [*_not_interactive(module), replaced]


def _detect_ranks(module: Any) -> list[Change]:
    """Detect torchrun's variables, which the ranks have, even if the notebook runs in a job of SLURM or MPI."""
    return [Assignment(module.TorchElasticEnvironment, "detect", staticmethod(lambda: True))]


def _keep_environment(module: Any) -> list[Change]:
    """Keep WORLD_SIZE, which Lightning removes at the end of a training: the next training would be alone."""
    return [Assignment(module.LightningEnvironment, "teardown", lambda environment: None)]


def _use_ranks(module: Any) -> list[Change]:
    def using(lightnings: Callable[..., None]) -> Callable[..., None]:
        def _configure_launcher(strategy: Any) -> None:
            strategy._start_method = "popen"  # which starts nothing if the processes exist
            lightnings(strategy)

        return _configure_launcher

    return [Replacement([module.DDPStrategy], "_configure_launcher", using)]


def _refuse_launcher(world: World, module: Any) -> list[Change]:
    def launch(launcher: Any, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_processes(world)

    return [*_not_interactive(module), Assignment(module._MultiProcessingLauncher, "launch", launch)]


def _refuse_scripts(world: World, module: Any) -> list[Change]:
    def _call_children_scripts(launcher: Any) -> NoReturn:
        _refuse_processes(world)

    return [Assignment(module._SubprocessScriptLauncher, "_call_children_scripts", _call_children_scripts)]


def _refuse_processes(world: World) -> NoReturn:
    raise NestedLaunch(
        f"this is {world.place} of a run already, and ranks do not launch ranks: Lightning's "
        "launcher was to start processes here. Leave out `strategy` and `plugins`, or write strategy='ddp', and "
        f"devices={world.world_size}: the ranks are used then."
    )


def _check_trainers(world: World, module: Any) -> list[Change]:
    trains = {name: name == "fit" for name in ("fit", "validate", "test", "predict")}
    return _checked(world, module.Trainer, "_accelerator_connector", trains)


def _check_fabrics(world: World, module: Any) -> list[Change]:
    trains = {name: name != "launch" for name in ("launch", "setup", "setup_module", "setup_optimizers")}
    return _checked(world, module.Fabric, "_strategy", trains)


def _checked(world: World, kind: type, attribute: str, trains: Mapping[str, bool]) -> list[Change]:
    """Refuse objects that chose devices and a launcher in the notebook, and those with a wrong number of devices.

    If the rank is the only one, the notebook's choice is right.

    Args:
        attribute: Holds that choice.
        trains: Whether a method trains, by its name.
    """
    anew = SetUpAnew((attribute,), partial(refuse, why="settled there on one process, or on a launcher of its own"))
    meet = anew.meet if world.is_distributed else _nothing
    checked = [Replacement([kind], name, partial(_counted, world, meet, trains=its)) for name, its in trains.items()]
    return [*(anew.watch(kind) if world.is_distributed else ()), *checked]


def _nothing(owner: object) -> None:
    """Accept it."""


def _counted(
    world: World, meet: Callable[[object], None], method: Callable[..., Any], trains: bool
) -> Callable[..., Any]:
    """Return `method`, refused if the devices are not as many as the ranks.

    With one device each rank may evaluate alone.
    """

    @functools.wraps(method)
    def called(owner: Any, *args: Any, **kwargs: Any) -> Any:
        meet(owner)
        strategy = owner.strategy
        devices = getattr(strategy, "num_processes", 1) * getattr(strategy, "num_nodes", 1)
        if devices != world.world_size and (devices > 1 or trains):
            _refuse_count(world, type(owner).__name__, devices)
        return method(owner, *args, **kwargs)

    return called


def _refuse_count(world: World, name: str, devices: int) -> NoReturn:
    instead = f"Write {name}(devices={world.world_size}), or leave devices out."
    if devices == 1:
        raise NotPrepared(
            f"this {name} uses one device, and the run has {world.world_size} ranks: each would train a model of its "
            f"own on all the data. {instead}"
        )
    raise NestedLaunch(
        f"this {name} wants {devices} processes, and the run has {world.world_size} "
        f"{'ranks' if world.world_size > 1 else 'rank'}; ranks do not launch ranks. {instead}"
    )


class SetUpAnew:
    """Watches attributes of a class, through which its objects are seen before they are used.

    A library asks once how many processes there are, and stores the answer in its objects. Those that a rank inherited,
    or that were sent to it, say "one". They are set up again, or refused, at their first use. They are distinguished by
    identity from the objects that this process makes: nothing is written into them, and pickles, copies and
    dictionaries of them are unchanged.

    Args:
        attributes: Names in the dictionary of an object; an object that has none of them yet is being made here.
        renew: Called once with each object that came from the notebook, before the attribute is read or set. It may
            read and set the attributes itself. If it raises, it is called again at the next use.
    """

    def __init__(self, attributes: Sequence[str], renew: Callable[[Any], None]) -> None:
        self._attributes = attributes
        self._renew = renew
        self._own: dict[int, weakref.ref[Any]] = {}  # by id: not every class has a hash

    def watch(self, kind: type) -> list[Change]:
        """Return what watches the objects of `kind`, and of its subclasses."""
        watched = {name: _Watched(self, name, vars(kind).get(name)) for name in self._attributes}
        return [Assignment(kind, name, each) for name, each in watched.items()]

    def add(self, value: object) -> None:
        """Record that this process made `value`, or has set it up."""
        key = id(value)
        self._own[key] = weakref.ref(value, lambda _: self._own.pop(key, None))

    def __contains__(self, value: object) -> bool:
        return id(value) in self._own

    def meet(self, value: object) -> None:
        """Set `value` up again if it came from the notebook."""
        if value in self:
            return
        came = any(name in vars(value) for name in self._attributes)
        self.add(value)
        if came:
            try:
                self._renew(value)
            except BaseException:
                del self._own[id(value)]
                raise


class _Watched:
    """One attribute.

    Args:
        default: That of the class, used if it is a cached property.
    """

    def __init__(self, anew: SetUpAnew, name: str, default: Any) -> None:
        self._anew = anew
        self._name = name
        self._default = default

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is None:
            return self if self._default is None else self._default
        self._anew.meet(owner)
        values = vars(owner)
        if self._name not in values:
            if not isinstance(self._default, cached_property):
                raise AttributeError(f"{type(owner).__name__!r} object has no attribute {self._name!r}")
            values[self._name] = self._default.func(owner)
        return values[self._name]

    def __set__(self, owner: Any, value: Any) -> None:
        self._anew.meet(owner)
        vars(owner)[self._name] = value

    def __delete__(self, owner: Any) -> None:
        try:
            del vars(owner)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None


def refuse(value: object, why: str) -> NoReturn:
    """Raise `NotInRanks` for an object of the notebook, with the line to move.

    Args:
        why: A clause that says what cannot be set up anew.
    """
    kind = type(value).__name__
    line = f"{name_of(value) or kind.lower()} = {kind}(...)"
    raise NotInRanks(
        f"this {kind} was made in an earlier cell, outside of the ranks, and {why}. Move the line `{line}` into this "
        "cell, or into the function that the ranks run."
    )


def name_of(value: object) -> str | None:
    """Return the notebook's name for `value`; None if it has none."""
    names = (name for name, held in list(vars(sys.modules["__main__"]).items()) if held is value)
    return next((name for name in names if not name.startswith("_")), None)


def names_in(code: CodeType) -> set[str]:
    """Return names of attributes and globals in a function's code, and in the functions inside it."""
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(names_in, nested))
