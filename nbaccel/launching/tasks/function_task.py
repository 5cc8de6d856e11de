"""FunctionTask: a function that every rank calls. Kernel and ranks run it.

`launch`, maps and sweeps are such tasks; a cell is none.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from nbaccel.launching.ipc.spec import Results, Task, load_named
from nbaccel.namespace.names import codes_of, names_read, says_first_card, with_their_own
from nbaccel.namespace.payload import Payload, pack, unpack
from nbaccel.options.given_flags import GivenFlag

if TYPE_CHECKING:
    from nbaccel.launching.ipc.shared_namespace import SharedNamespace

__all__ = ["FunctionTask"]


class FunctionTask(Task):
    """Calls a function in every rank and sends its value back.

    Args:
        caller: "module:function" that calls it in the rank, as ``caller(function, args, kwargs)``; empty for a plain
            call.
    """

    reference = "nbaccel.launching.tasks.function_task:FunctionTask"

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        debugged: int | None = None,
        caller: str = "",
        flags: tuple[GivenFlag, ...] = (),
    ) -> None:
        self.function = function
        self.flags = flags
        self.caller = caller
        self.debugged = debugged
        self.args = args
        self.kwargs = kwargs or {}
        self.value: Any = None

    @functools.cached_property
    def first_card(self) -> str:  # type: ignore[override]  # found out where it is asked first
        return says_first_card(list(codes_of(self.function)), vars(sys.modules["__main__"]))

    def run(self) -> None:
        if self.caller:
            self.value = load_named(self.caller)(self.function, self.args, self.kwargs)
        else:
            self.value = self.function(*self.args, **self.kwargs)

    def named_objects(self) -> Sequence[str]:
        return [self.caller] if self.caller else []

    def results(self, rank: int) -> Results:
        return Results(values={"value": self.value})

    def values_to_send(self) -> dict[str, Any]:
        main = vars(sys.modules["__main__"])
        names = with_their_own(names_read(list(codes_of(self.function))), main)
        read = {name: main[name] for name in sorted(names) if name in main}
        return read | {"function": self.function, "args": self.args, "kwargs": self.kwargs}

    def pack(self) -> Payload:
        names = ("function", "args", "kwargs", "debugged", "caller", "flags")
        return pack({name: getattr(self, name) for name in names})

    @classmethod
    def unpack(cls, fd: int, home: SharedNamespace | None = None) -> Self:
        values = unpack(fd)
        return cls(**values)

    def by_reference(self) -> dict[int, str]:
        """Return the classes of `__main__`: otherwise a class of the script would come back as a copy of itself."""
        import __main__

        return {
            id(value): name
            for name, value in vars(__main__).items()
            if issubclass(type(value), type) and value.__module__ == "__main__"
        }

    def anchored(self, name: str) -> Any:
        import __main__

        return getattr(__main__, name)
