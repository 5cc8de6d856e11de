"""Tasks of persistent ranks besides cells: begin, take names, return names. Made in the kernel, run in ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from nbaccel.launching.ipc.kernel_state import take_cell_sources
from nbaccel.launching.ipc.shared_namespace import SharedNamespace
from nbaccel.launching.ipc.spec import Results, Task
from nbaccel.launching.ipc.user_code import new_main
from nbaccel.namespace.names import first_card_in
from nbaccel.namespace.nbytes import sizes_of
from nbaccel.namespace.payload import Payload, pack, unpack, unpack_what_can_be_rebuilt
from nbaccel.namespace.unpicklable import cannot_be_rebuilt
from nbaccel.namespace.wrappers import plain

__all__ = [
    "InitTask",
    "Pull",
    "Push",
]


_CELLS = "<cells>"
"""The name under which the texts of new cells go to a rank; no variable can have it."""


class _HomeTask(Task):
    """A task that runs in the namespace of persistent ranks."""

    home: SharedNamespace

    def __init__(self, home: SharedNamespace) -> None:
        self.home = home
        self.namespace: dict[str, Any] = home.namespace

    def by_reference(self) -> dict[int, str]:
        return self.home.by_reference

    def anchored(self, name: str) -> Any:
        return self.home.find(name)


class InitTask(_HomeTask):
    """The first task of persistent ranks: it only makes the namespace in which all later tasks run.

    A fork has every name of the notebook; a rank of the zygote has none, and gets each with the first cell that reads
    it.
    """

    reference = "nbaccel.features.persistent.namespace_tasks:InitTask"

    def __init__(self, home: SharedNamespace) -> None:
        super().__init__(home)
        home.learn(home.namespace)
        home.learn_cells()  # a rank gets the texts of those that have run as it starts
        public = {name: value for name, value in home.namespace.items() if not name.startswith("_")}
        self.first_card = first_card_in(public)  # what later cells will say is not known

    def run(self) -> None:
        """Do nothing: the setup is done by now."""

    def results(self, rank: int) -> Results:
        return Results()

    def pack(self) -> Payload:
        self.home.forget()
        return pack({})

    @classmethod
    def unpack(cls, fd: int, home: SharedNamespace | None = None) -> Self:
        return cls(SharedNamespace(new_main()))


class Push(_HomeTask):
    """Gives every rank the notebook's values of `names`, replacing its own values of these names."""

    reference = "nbaccel.features.persistent.namespace_tasks:Push"

    def __init__(self, home: SharedNamespace, names: Sequence[str], values: dict[str, Any] | None = None) -> None:
        super().__init__(home)
        self.names = names
        self._values = values or {}

    def run(self) -> None:
        self.namespace.update(self._values)

    def results(self, rank: int) -> Results:
        return Results()

    def pack(self) -> Payload:
        values = {name: self.namespace[name] for name in self.names} | {_CELLS: self.home.new_cells()}
        return pack(values, by_reference=self.home.by_reference, namespace=self.namespace)

    def has_arrived(self) -> None:
        """Record, in the kernel, that the ranks have the values; not called if one of them could not be rebuilt."""
        self.home.learn({name: self.namespace[name] for name in self.names})

    @classmethod
    def unpack(cls, fd: int, home: SharedNamespace | None = None) -> Self:
        assert home is not None
        values, refused = unpack_what_can_be_rebuilt(fd, namespace=home.namespace, anchored=home.find)
        if refused:
            raise cannot_be_rebuilt(refused)
        take_cell_sources(values.pop(_CELLS))
        home.learn(values)
        return cls(home, tuple(values), values)


class Pull(_HomeTask):
    """Sends back the values that one rank has under `names`, and from other ranks that take part their rows of them."""

    reference = "nbaccel.features.persistent.namespace_tasks:Pull"

    def __init__(self, home: SharedNamespace, names: Sequence[str], result_rank: int = 0) -> None:
        super().__init__(home)
        self.names = names
        self.result_rank = result_rank

    def run(self) -> None:
        """Do nothing: the values exist already."""

    def results(self, rank: int) -> Results:
        values = {name: plain(self.namespace[name]) for name in self.names if name in self.namespace}
        if rank != self.result_rank:
            return Results(parts=values)
        missing = {name: f"rank {rank} has no such name" for name in self.names if name not in self.namespace}
        return Results(values, missing, facts={"sizes": sizes_of(values)})

    def pack(self) -> Payload:
        return pack({"names": self.names, "result_rank": self.result_rank})

    @classmethod
    def unpack(cls, fd: int, home: SharedNamespace | None = None) -> Self:
        assert home is not None
        values = unpack(fd)
        return cls(home, values["names"], values["result_rank"])
