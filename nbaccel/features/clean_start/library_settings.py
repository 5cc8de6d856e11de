"""LibrarySettings: what the notebook has set in libraries, for ranks of the zygote. Used in the kernel and in ranks.

A forked rank has it all. One of the zygote is given the levels and handlers of `logging`, options of matplotlib, pandas
and scikit-learn, dialects of `csv`, and limits and locale of the process; those of a package are set when the rank
imports it. A handler that cannot be sent is named in one line.

Not sent, since nothing lists them: codecs and their error handlers, the configuration of torch's compiler, and
variables of other packages that a cell has changed. Random states, warnings, `decimal`, NumPy and torch's switches are
in `captured_state`, patches of torch in `patches`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import pickle
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nbaccel.base.world import World

__all__ = ["LibrarySettings"]

_WhenLoaded = Callable[[Mapping[str, Callable[[Any], None]]], None]

_OF_THE_KERNEL = {"IPython", "asyncio", "debugpy", "ipykernel", "jupyter_client", "nbaccel", "tornado", "torch"}
_OF_THE_KERNEL |= {"traitlets", "zmq", "concurrent", "parso"}
"""Packages whose loggers are those of the kernel, or of torch, which every zygote has loaded."""

_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


@dataclass(frozen=True, slots=True)
class LibrarySettings:
    """Values by module and setting.

    Args:
        process: Settings of the process itself.
        options: Options of packages.
        loggers: By name.
        levels: Names of levels.
        unsent: Handlers that cannot be sent, in words.
    """

    process: Mapping[str, Any]
    options: Mapping[str, Any]
    loggers: Mapping[str, _Logger]
    levels: Mapping[int, str]
    captures_warnings: bool
    disabled_below: int
    unsent: tuple[str, ...]

    @classmethod
    def capture(cls) -> LibrarySettings:
        loggers: dict[str, _Logger] = {}
        unsent: list[str] = []
        left_out = {*_OF_THE_KERNEL, _of_the_application()}
        for name, logger in [("", logging.root), *logging.Logger.manager.loggerDict.items()]:
            if isinstance(logger, logging.Logger) and name.partition(".")[0] not in left_out:
                found = _Logger.of(logger, unsent)
                if found != _Logger():
                    loggers[name] = found
        own: Any = logging
        return cls(
            dict(_values(_PROCESS, lambda name: True)),
            dict(_values(_pickled_options(), lambda name: name in sys.modules)),
            loggers,
            dict(own._levelToName),
            own._warnings_showwarning is not None,
            logging.root.manager.disable,
            tuple(unsent),
        )

    def apply(self, when_loaded: _WhenLoaded) -> None:
        """Set all of it; that of a package when this process has imported the package.

        Args:
            when_loaded: Calls a function with each named module, now or when it is imported.
        """
        for name, value in self.process.items():
            with contextlib.suppress(Exception):
                _PROCESS[name].write(value)
        for level, name in self.levels.items():
            logging.addLevelName(level, name)
        logging.captureWarnings(self.captures_warnings)
        logging.disable(self.disabled_below)
        later: dict[str, list[Callable[[], object]]] = {}
        for name, value in self.options.items():
            later.setdefault(name, []).append(functools.partial(_set_option, name, value))
        for name, logger in self.loggers.items():
            put = functools.partial(logger.put, name)
            package = name.partition(".")[0]
            if logger.is_of_a_package and package not in sys.modules:
                later.setdefault(package, []).append(put)
            else:
                put()
        when_loaded({name: functools.partial(_call, actions) for name, actions in later.items()})
        if self.unsent and World.from_env().is_main_process:
            print(
                f"{', '.join(self.unsent)}: set in the notebook, and not in ranks, which here start from a clean "
                "process, since it cannot be sent there. Add it in this cell, or log after the cell.",
                file=sys.stderr,
            )


@dataclass(frozen=True, slots=True)
class _Logger:
    """Settings of one logger.

    Args:
        handlers: Pickled.
        is_of_a_package: The kernel has imported the package of its name.
    """

    level: int = logging.NOTSET
    propagate: bool = True
    disabled: bool = False
    handlers: tuple[bytes, ...] = ()
    is_of_a_package: bool = False

    @classmethod
    def of(cls, logger: logging.Logger, unsent: list[str]) -> _Logger:
        handlers: list[bytes] = []
        for each in logger.handlers:
            if type(each).__module__.partition(".")[0] in _OF_THE_KERNEL:
                continue
            try:
                handlers.append(_pickled(each))
            except Exception:
                # A package imported under ``%%capture`` has its own handler write there; in the rank it makes another.
                is_its_own = type(each) is logging.StreamHandler and logger.name.partition(".")[0] in sys.modules
                if logger is logging.root or not is_its_own:
                    unsent.append(f"the {type(each).__name__} of logger {logger.name}")
        found = cls(logger.level, bool(logger.propagate), bool(logger.disabled), tuple(handlers))
        is_of_a_package = found != cls() and logger.name.partition(".")[0] in sys.modules
        return cls(found.level, found.propagate, found.disabled, found.handlers, is_of_a_package)

    def put(self, name: str) -> None:
        logger = logging.getLogger(name or None)
        logger.setLevel(self.level)
        logger.propagate, logger.disabled = self.propagate, self.disabled
        there = {_target(each) for each in logger.handlers}
        for pickled in self.handlers:
            with contextlib.suppress(Exception):
                handler = _unpickled(pickled)
                if _target(handler) not in there:  # else the package has just added it
                    logger.addHandler(handler)


def _of_the_application() -> str:
    """Return the name of the logger of the kernel's application."""
    application = getattr(sys.modules.get("traitlets.config.application"), "Application", None)
    return str(getattr(getattr(getattr(application, "_instance", None), "log", None), "name", ""))


def _pickled(handler: logging.Handler) -> bytes:
    """Return `handler` without its lock, and without its file: each rank opens it, and adds to it.

    Raises:
        Exception: It cannot be pickled.
    """
    import cloudpickle

    state = {name: value for name, value in vars(handler).items() if name not in ("lock", "stream", "_builtin_open")}
    for name in [name for name, value in state.items() if callable(value) and hasattr(type(handler), name)]:
        del state[name]  # transformers puts the stream's own `flush` in the place of the method
    stream = getattr(handler, "stream", None)
    if isinstance(handler, logging.FileHandler):
        state["mode"] = "a"
    elif isinstance(handler, logging.StreamHandler):
        name = _name_of(stream)
        if not name:
            raise pickle.PicklingError(f"a stream of its own: {stream!r}")
        state["stream"] = name
    pickled: bytes = cloudpickle.dumps((type(handler), state))
    return pickled


def _unpickled(pickled: bytes) -> logging.Handler:
    kind, state = pickle.loads(pickled)
    handler: logging.Handler = kind.__new__(kind)
    vars(handler).update(state)
    handler.createLock()
    if isinstance(handler, logging.FileHandler):
        handler.stream, handler._builtin_open = None, open  # type: ignore[attr-defined]
    elif isinstance(handler, logging.StreamHandler):
        handler.stream = getattr(sys, state["stream"])
    logging._addHandlerRef(handler)  # type: ignore[attr-defined]  # as its constructor does
    return handler


def _name_of(stream: Any) -> str:
    for name in ("stderr", "stdout"):
        if stream is not None and stream in (getattr(sys, name), getattr(sys, f"__{name}__")):
            return name
    return ""


def _target(handler: logging.Handler) -> tuple[str, str]:
    stream = getattr(handler, "stream", None)
    return type(handler).__qualname__, str(getattr(handler, "baseFilename", "") or _name_of(stream))


def _call(actions: list[Callable[[], object]], _: Any) -> None:
    for action in actions:
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            action()


@dataclass(frozen=True, slots=True)
class _Setting:
    """One setting.

    Args:
        read: Returns its value, which can be pickled; raises if there is none.
    """

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _values(settings: Mapping[str, _Setting], is_here: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    for name, setting in settings.items():
        if is_here(name):
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield name, setting.read()


def _umask() -> int:
    with open("/proc/self/status") as status:
        return int(next(line.split()[1] for line in status if line.startswith("Umask")), 8)


def _set_umask(value: int) -> None:
    import os

    os.umask(value)


def _locale() -> str:
    import locale

    return locale.setlocale(locale.LC_ALL)


def _set_locale(value: str) -> None:
    import locale

    locale.setlocale(locale.LC_ALL, value)


def _limits() -> dict[int, tuple[int, int]]:
    return {limit: resource.getrlimit(limit) for limit in _LIMITS}


def _set_limits(values: Mapping[int, tuple[int, int]]) -> None:
    for limit, value in values.items():
        if resource.getrlimit(limit) != value:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(limit, value)


_PROCESS = {
    "umask": _Setting(_umask, _set_umask),
    "limits": _Setting(_limits, _set_limits),
    "locale": _Setting(_locale, _set_locale),
    "time zone": _Setting(lambda: time.tzname, lambda _: time.tzset()),  # by TZ, which the rank has
    "recursion": _Setting(sys.getrecursionlimit, sys.setrecursionlimit),
    "digits": _Setting(sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    "collections": _Setting(gc.get_threshold, lambda value: gc.set_threshold(*value)),
    "switches": _Setting(sys.getswitchinterval, sys.setswitchinterval),
}
"""Settings of the process."""


def _matplotlib() -> dict[str, Any]:
    matplotlib = sys.modules["matplotlib"]
    values, usual = matplotlib.rcParams, matplotlib.rcParamsDefault
    names = [name for name in values if not name.startswith("backend")]  # a rank has its own
    return {name: values[name] for name in names if values[name] != usual[name]}


def _pandas() -> dict[str, Any]:
    pandas: Any = sys.modules["pandas"]
    known = pandas._config.config._registered_options
    values = {name: pandas.get_option(name) for name in known}
    return {name: value for name, value in values.items() if value != known[name].defval}


def _set_pandas(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        sys.modules["pandas"].set_option(name, value)


def _csv() -> tuple[int, dict[str, dict[str, Any]]]:
    csv = sys.modules["csv"]
    dialects = {name: csv.get_dialect(name) for name in csv.list_dialects()}
    names = ("delimiter", "doublequote", "escapechar", "lineterminator", "quotechar", "quoting", "skipinitialspace")
    found = {name: {key: getattr(each, key) for key in (*names, "strict")} for name, each in dialects.items()}
    return csv.field_size_limit(), found


def _set_csv(value: tuple[int, dict[str, dict[str, Any]]]) -> None:
    csv = sys.modules["csv"]
    csv.field_size_limit(value[0])
    for name, dialect in value[1].items():
        csv.register_dialect(name, **dialect)


_OPTIONS = {
    "matplotlib": _Setting(_matplotlib, lambda value: sys.modules["matplotlib"].rcParams.update(value)),
    "pandas": _Setting(_pandas, _set_pandas),
    "sklearn": _Setting(
        lambda: sys.modules["sklearn"].get_config(), lambda value: sys.modules["sklearn"].set_config(**value)
    ),
    "csv": _Setting(_csv, _set_csv),
    "socket": _Setting(
        lambda: sys.modules["socket"].getdefaulttimeout(),
        lambda value: sys.modules["socket"].setdefaulttimeout(value),
    ),
}
"""Options of packages, by the module that has them."""


def _pickled_options() -> dict[str, _Setting]:
    """Return settings whose values are pickled, each by itself: a formatter of pandas may hold what cannot be sent."""
    import cloudpickle

    return {
        name: _Setting(lambda read=setting.read: cloudpickle.dumps(read()), setting.write)  # type: ignore[misc]
        for name, setting in _OPTIONS.items()
    }


def _set_option(name: str, pickled: bytes) -> None:
    _OPTIONS[name].write(pickle.loads(pickled))
