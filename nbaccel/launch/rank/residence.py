"""Tasks of persistent ranks besides cells: begin, take names, return names. Made in the kernel, run in ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from nbaccel.launch.home import Home
from nbaccel.launch.rank.card_numbers import first_card_in
from nbaccel.launch.rank.cell import cannot_be_rebuilt, new_main
from nbaccel.launch.spec import Results, Task
from nbaccel.launch.wire.parcel import Parcel, pack, unpack, unpack_what_can_be_rebuilt
from nbaccel.launch.wire.weight import sizes_of
from nbaccel.launch.wire.wrappers import plain

__all__ = ["Pull", "Push", "Residence"]


class _HomeTask(Task):
    """A task that runs in the namespace of persistent ranks."""

    home: Home

    def __init__(self, home: Home) -> None:
        self.home = home
        self.namespace: dict[str, Any] = home.namespace

    def anchors(self) -> dict[int, str]:
        return self.home.anchors

    def anchored(self, name: str) -> Any:
        return self.home.find(name)


class Residence(_HomeTask):
    """The first task of persistent ranks: it does nothing, and its home is that of all later tasks.

    A fork has every name of the notebook; a rank of the zygote has none, and gets each with the first cell that reads
    it.
    """

    reference = "nbaccel.launch.rank.residence:Residence"

    def __init__(self, home: Home) -> None:
        super().__init__(home)
        home.learn(home.namespace)
        public = {name: value for name, value in home.namespace.items() if not name.startswith("_")}
        self.first_card = first_card_in(public)  # what later cells will say is not known

    def run(self) -> None:
        """Do nothing: the setup is done by now."""

    def results(self, rank: int) -> Results:
        return Results()

    def pack(self) -> Parcel:
        self.home.forget()
        return pack({})

    @classmethod
    def unpack(cls, fd: int, home: Home | None = None) -> Self:
        return cls(Home(new_main()))


class Push(_HomeTask):
    """Gives every rank the notebook's values of `names`, replacing its own values of these names."""

    reference = "nbaccel.launch.rank.residence:Push"

    def __init__(self, home: Home, names: Sequence[str], values: dict[str, Any] | None = None) -> None:
        super().__init__(home)
        self.names = names
        self._values = values or {}

    def run(self) -> None:
        self.namespace.update(self._values)

    def results(self, rank: int) -> Results:
        return Results()

    def pack(self) -> Parcel:
        values = {name: self.namespace[name] for name in self.names}
        return pack(values, anchors=self.home.anchors, namespace=self.namespace)

    def has_arrived(self) -> None:
        """Record, in the kernel, that the ranks have the values; not called if one of them could not be rebuilt."""
        self.home.learn({name: self.namespace[name] for name in self.names})

    @classmethod
    def unpack(cls, fd: int, home: Home | None = None) -> Self:
        assert home is not None
        values, refused = unpack_what_can_be_rebuilt(fd, namespace=home.namespace, anchored=home.find)
        if refused:
            raise cannot_be_rebuilt(refused)
        home.learn(values)
        return cls(home, tuple(values), values)


class Pull(_HomeTask):
    """Sends back the values that one rank has under `names`."""

    reference = "nbaccel.launch.rank.residence:Pull"

    def __init__(self, home: Home, names: Sequence[str], speaker: int = 0) -> None:
        super().__init__(home)
        self.names = names
        self.speaker = speaker

    def run(self) -> None:
        """Do nothing: the values exist already."""

    def results(self, rank: int) -> Results:
        if rank != self.speaker:
            return Results()
        values = {name: plain(self.namespace[name]) for name in self.names if name in self.namespace}
        missing = {name: f"rank {rank} has no such name" for name in self.names if name not in self.namespace}
        return Results(values, missing, facts={"sizes": sizes_of(values)})

    def pack(self) -> Parcel:
        return pack({"names": self.names, "speaker": self.speaker})

    @classmethod
    def unpack(cls, fd: int, home: Home | None = None) -> Self:
        assert home is not None
        values = unpack(fd)
        return cls(home, values["names"], values["speaker"])
