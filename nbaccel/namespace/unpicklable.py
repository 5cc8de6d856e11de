"""Recognise objects that cannot be sent to another process, and say why. Runs in the kernel and in ranks.

Used by `payload` and `pickling`; it packs nothing. Objects that are bound to one process (a file position, a lock's
owner, a thread) are recognised before pickling, because cloudpickle would copy some of them: an open file became its
text. In an object that a cell made, such a part is replaced by an `Absent`.
"""

from __future__ import annotations

import asyncio
import io
import re
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from nbaccel.base.quantised import TrainedTensors, is_quantised_tensor
from nbaccel.base.quantities import with_article
from nbaccel.errors import CannotSend, StayedInRank
from nbaccel.namespace.wrappers import is_lightnings_callback

__all__ = [
    "Absent",
    "CannotJoin",
    "Refused",
    "cannot_be_rebuilt",
    "depth_bounded",
    "describe_refusal",
    "reason",
    "refuse_quantised_weights",
    "refuse_to_send_nothing",
    "refuse_what_knows_the_ranks",
    "refuse_what_lives_here",
    "what_it_is",
]

_LIVES_HERE: dict[type | tuple[type, ...], str] = {
    (io.TextIOWrapper, io.BufferedIOBase, io.FileIO): "an open file",
    (types.GeneratorType, types.AsyncGeneratorType): "a generator",
    types.CoroutineType: "a coroutine",
    (type(threading.Lock()), type(threading.RLock())): "a lock",
    threading.local: "thread-local data",
    threading.Thread: "a thread",
    socket.socket: "a socket",
    subprocess.Popen: "a running program",
    (asyncio.Future, asyncio.AbstractEventLoop): "a task of the event loop",
    types.FrameType: "a frame of a running function",
}
_TYPES = tuple(kind for kinds in _LIVES_HERE for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
_KNOW_THE_RANKS = frozenset({"accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "wandb"})
"""Packages whose objects know in which rank of how many they were made: in the notebook they would still claim it."""

_KNOW_NONE = frozenset({"AttributeDict", "SeedableRandomSampler"})
"""Classes of these packages whose objects are data.

Those of `accelerate.utils` are data too: they describe how something is made.
"""

_CANNOT = " cannot be sent to another process"
_UNPICKLABLE = re.compile(r"cannot pickle '?([\w.]+)'?")


_DEEPEST = 20_000
"""Largest depth of calls while something is packed.

If the user has raised Python's own limit above it, a long chain of objects would overflow the C stack (8 MiB hold more
than 40,000) and crash the process.
"""


@contextmanager
def depth_bounded() -> Iterator[None]:
    """Make too deep a nesting end in a RecursionError, whatever limit the user has set."""
    limit = sys.getrecursionlimit()
    if limit <= _DEEPEST:
        yield
        return
    sys.setrecursionlimit(_DEEPEST)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


class Refused(Exception):
    """Raised if `culprit` cannot be sent to another process; the message is the reason."""

    def __init__(self, message: str, culprit: Any) -> None:
        super().__init__(message)
        self.culprit = culprit


class CannotJoin(Refused):
    """Raised for a sharded tensor whose rows cannot be joined, and for a quantised weight.

    A value without it would be wrong, not incomplete.
    """

    def __init__(self, message: str, culprit: Any = None) -> None:
        super().__init__(message, culprit)


def refuse_what_lives_here(obj: Any) -> None:
    """Raise `Refused` for an object that is useless outside this process."""
    kind = type(obj)  # not `isinstance`, which asks a proxy for the class of its object
    if issubclass(kind, _TYPES) and not issubclass(kind, io.BytesIO):
        words = next(words for kinds, words in _LIVES_HERE.items() if issubclass(kind, kinds))
        raise Refused(f"{words}{_CANNOT}", obj)
    tqdm = sys.modules.get("tqdm.std")
    if tqdm is not None and issubclass(kind, tqdm.tqdm):  # pickles, but cannot be unpickled
        raise Refused(f"a progress bar{_CANNOT}", obj)
    pipes = sys.modules.get("multiprocessing.connection")
    if pipes is not None and issubclass(kind, pipes.Connection):  # pickles as a number, of another file over there
        raise Refused(f"a pipe{_CANNOT}", obj)
    widgets = sys.modules.get("ipywidgets.widgets.widget")
    if widgets is not None and issubclass(kind, widgets.Widget):  # its front end does not know one of another process
        raise Refused(f"a widget{_CANNOT}", obj)


def refuse_what_knows_the_ranks(obj: Any) -> None:
    """Raise `Refused` for an object that would make the notebook one rank of several."""
    kind = type(obj)
    module = type.__dict__["__module__"].__get__(kind)
    if type(module) is not str or module.partition(".")[0] not in _KNOW_THE_RANKS:
        return
    is_data = kind.__name__ in _KNOW_NONE or module.startswith("accelerate.utils.") or is_lightnings_callback(kind)
    if not is_data:
        raise Refused(f"{with_article(kind.__name__)} that knows its rank", obj)


def refuse_quantised_weights(obj: Any, leaves_rank: bool) -> None:
    """Raise `CannotJoin` for a quantised weight that cannot be sent, or must not be.

    Args:
        leaves_rank: It would go to the notebook. Models are sent there without such weights, and an optimizer of them
            would be wrong. On the way to a rank some are sent; but torch makes a plain `Parameter` of bitsandbytes'
            classes.
    """
    torch = sys.modules.get("torch")
    if torch is None or not issubclass(type(obj), torch.Tensor) or not is_quantised_tensor(obj):
        return
    what = f"it holds {with_article(type(obj).__name__)}, a quantised weight"
    if leaves_rank:
        raise CannotJoin(
            f"{what}, which stays in the ranks: make the optimizer of trained parameters alone, and send the model, of "
            "which the trained tensors come",
            obj,
        )
    if type(obj).__reduce_ex__ is torch.nn.Parameter.__reduce_ex__:
        raise CannotJoin(f"{what}, which cannot be sent to another process: load the model in the cell", obj)


def refuse_to_send_nothing(reduced: tuple[Any, ...], obj: Any, is_whole: bool) -> None:
    """Raise `CannotJoin` for a quantised model without trained tensors, if it is the value of a name.

    Args:
        reduced: Its reduction.
    """
    if not is_whole or reduced[0] is not TrainedTensors:
        return
    _, tensors = reduced[1]
    if not any(getattr(tensor, "requires_grad", False) for tensor in tensors.values()):  # buffers alone are no result
        raise CannotJoin(
            f"{with_article(type(obj).__name__)} with quantised weights, of which nothing is trained: save it in the "
            "cell, model.save_pretrained(folder)",
            obj,
        )


def what_it_is(error: Exception, obj: Any) -> str:
    """Describe `obj`, which could not be packed because of `error`, in a few words: "a lock"."""
    if isinstance(error, Refused):
        return str(error).removesuffix(_CANNOT)
    return with_article(type(obj).__name__)


def reason(error: Exception, name: str, names: dict[str, Any]) -> str:
    """Return why the value called `name` cannot be sent, in one sentence.

    Args:
        names: All values by name; if the culprit is one of them, the reason names it.
    """
    if isinstance(error, Refused):
        via = next((other for other, value in names.items() if value is error.culprit and other != name), None)
        return f"it uses {via}: {error}" if via and names.get(name) is not error.culprit else str(error)
    message = _words_of(error)
    if isinstance(error, RecursionError) or "deep recursion" in message:
        return "it is nested too deeply to be sent to another process"
    if found := _UNPICKLABLE.match(message):
        return f"an object of type {found[1]}{_CANNOT}"
    return describe_refusal(error)


def describe_refusal(error: Exception) -> str:
    """Return an error of the user's in one line."""
    message = _words_of(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _words_of(error: Exception) -> str:
    """Return the first line of the text of an error, whose code may fail."""
    try:
        return str(error).strip().partition("\n")[0]
    except Exception:
        return ""


class Absent:
    """Replaces `what` ("a lock") in the value of `name`.

    An object that a cell made may hold a lock, a thread, a file. The object is sent to the notebook anyway, and code
    that uses that part gets an error that says why it is missing. Known to both sides.

    Example:
        >>> Absent("out:trainer", "a lock")
        <a lock, which stayed in its rank>
    """

    __slots__ = ("_name", "_what")

    def __init__(self, name: str, what: str) -> None:
        self._name = name.removeprefix("out:")
        self._what = what

    def __reduce__(self) -> tuple[type[Absent], tuple[str, str]]:
        return Absent, (self._name, self._what)

    def __repr__(self) -> str:
        return f"<{self._what}, which stayed in its rank>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python asks for these by itself
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise StayedInRank(
            f"a part of {self._name} stayed in its rank: {self._what}. Make {self._name} in a cell of the notebook, "
            "above the one that trains it."
        )

    __call__ = __enter__ = __exit__ = __iter__ = __next__ = __len__ = __getitem__ = __contains__ = _refuse


def cannot_be_rebuilt(refused: Mapping[str, str]) -> CannotSend:
    """Return the error of a rank that got names and could not rebuild them."""
    names = {name.removeprefix("in:"): reason for name, reason in refused.items()}
    listed = "".join(f"\n  {name}: {reason}" for name, reason in names.items())
    return CannotSend(
        f"{len(names)} of the names that were sent to the ranks cannot be rebuilt there:{listed}\n"
        "  Make such objects in the cell that uses them, or send the data they were made from.",
        names,
    )
