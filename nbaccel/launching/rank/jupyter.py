"""Adapts the notebook's shell, streams and input to a rank. Runs in ranks, before user code.

A forked rank holds the kernel's IPython shell: its display publisher would send on the kernel's sockets, its `input`
would wait for a front end, its old streams would write into the kernel's output. Nothing here imports IPython unless
the kernel had it.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import logging
import re
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, NoReturn

from nbaccel.errors import NoInput
from nbaccel.launching.ipc.import_hooks import when_loaded
from nbaccel.launching.ipc.user_code import _shell, reloader

__all__ = [
    "Publish",
    "adopt_notebook",
    "flush_figures",
    "kernel_ports",
    "reload_modules",
]

Publish = Callable[[dict[str, Any]], None]
"""Sends one rich message: {"kind": "display"|"update"|"clear", "data", "metadata", "display_id", "wait"}.

Or what a kernel's reply to the cell has beside it: {"kind": "payload", "data", "payload"}.
"""


def kernel_ports() -> frozenset[int]:
    """Return the TCP ports of the ipykernel in this process, none outside of one. Called in the kernel."""
    kernelapp = sys.modules.get("ipykernel.kernelapp")
    if kernelapp is None or not kernelapp.IPKernelApp.initialized():
        return frozenset()
    app = kernelapp.IPKernelApp.instance()
    names = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")
    return frozenset(port for name in names if (port := getattr(app, name, 0)))


def adopt_notebook(rank: int, publish: Publish, old_streams: tuple[Any, Any]) -> None:
    """Redirect the notebook's output and input to the rank's.

    Args:
        old_streams: The stdout and stderr of the kernel; code with a reference to them writes to the rank's streams
            from now on.
    """
    _forward_streams(old_streams)
    _refuse_input(rank)
    _plain_progress_bars()
    when_loaded({"ipywidgets.widgets.widget_output": functools.partial(_pass_output_widgets, rank)})
    shell = _shell()
    if shell is not None:
        _forward_display(shell, publish)


def reload_modules() -> None:
    """Reload edited modules as IPython does before a cell, if ``%autoreload`` was on when this rank was forked."""
    if (magics := reloader()) is not None:
        with contextlib.suppress(Exception):  # as IPython's own hook
            magics._reloader.check()


def flush_figures() -> None:
    """Show the matplotlib figures that are open, as the inline backend does at the end of a cell."""
    inline = sys.modules.get("matplotlib_inline.backend_inline")
    pyplot = sys.modules.get("matplotlib.pyplot")
    if inline is not None and pyplot is not None and pyplot.get_fignums():
        inline.flush_figures()


# ipykernel's stream sends each write of a forked process at once: https://github.com/ipython/ipykernel/pull/478.
def _forward_streams(old_streams: tuple[Any, Any]) -> None:
    for old, new in zip(old_streams, (sys.stdout, sys.stderr), strict=True):
        if old is None or old is new:
            continue
        for handler in logging.root.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.stream = new
        # ipykernel's stream takes attributes; a plain file of a script does not, and has no need of it.
        with contextlib.suppress(AttributeError, TypeError):
            old.write, old.flush, old.writelines = new.write, new.flush, new.writelines


def _refuse_input(rank: int) -> None:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NoInput(
            f"rank {rank} asked for keyboard input (input, getpass or a debugger), but nobody can type into a rank. "
            "Ask in a cell of its own before this one, for example to log in, or set a key there: "
            'os.environ["WANDB_API_KEY"] or ["HF_TOKEN"], ["WANDB_MODE"] = "offline". For a debugger, %%accelerate '
            f"--pdb {rank} lets this rank ask, and %%accelerate --start inline -n 1 runs the cell in the kernel."
        )

    import getpass

    builtins.input = refuse
    getpass.getpass = refuse
    sys.breakpointhook = refuse
    sys.stdin = _NoStdin(refuse)


class _NoStdin:
    """Replacement of standard input: every way to read it raises the error."""

    encoding = "utf-8"
    closed = False

    def __init__(self, refuse: Callable[..., NoReturn]) -> None:
        self.read = self.readline = self.readlines = self.__next__ = refuse
        self._refuse = refuse

    def __iter__(self) -> NoReturn:
        self._refuse()

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return 0  # /dev/null

    def close(self) -> None:
        pass


def _plain_progress_bars() -> None:
    """Make tqdm draw text: its widgets talk to a front end over the kernel's sockets, which a rank does not have.

    A text bar can also be shown in a saved notebook: a widget's state is lost and leaves "0%" behind.
    """
    std = sys.modules.get("tqdm.std")
    if std is not None:
        # The lock may have been held by another thread of the kernel at the moment of the fork.
        std.tqdm.set_lock(threading.RLock())
    notebook = sys.modules.get("tqdm.notebook")
    if notebook is None:
        sys.modules["tqdm.notebook"] = _TextBars("tqdm.notebook")
    elif isinstance(notebook.tqdm_notebook, type):
        _make_textual(notebook.tqdm_notebook)


def _pass_output_widgets(rank: int, module: Any) -> None:
    """Let blocks of ``with output:`` do nothing, and say so: the widget would take what the kernel prints meanwhile.

    An error ends the rank, which the widget would only show: https://github.com/jupyter-widgets/ipywidgets/issues/4020.
    """
    has_said = rank != 0

    def enter(output: Any) -> Any:
        nonlocal has_said
        if not has_said:
            has_said = True
            sys.stdout.write(
                "nbaccel: what ranks print stands below the cell, also inside of `with` and an Output widget. To have "
                "it in the widget, run a function in a cell without the magic: "
                "`with output: nbaccel.launch(train, 2)`.\n"
            )
        return output

    def leave(output: Any, *error: Any) -> None:
        """Let an error through."""

    module.Output.__enter__, module.Output.__exit__ = enter, leave


class _TextBars(types.ModuleType):
    """Replacement of `tqdm.notebook`, which `tqdm.auto` chooses in a kernel: the same names, with text bars.

    The bar is a class of this module, so the one that `tqdm.auto` derives from it is of that module: what a cell
    imports goes back by its name, and is the notebook's bar there.
    """

    WARN_NOIPYW = ""
    IProgress = object

    def __getattr__(self, name: str) -> Any:
        from tqdm import std

        if name in ("tqdm", "tqdm_notebook"):
            self.tqdm = self.tqdm_notebook = type("tqdm_notebook", (std.tqdm,), {"__module__": self.__name__})
            return self.tqdm
        if name in ("trange", "tnrange"):
            return std.trange
        raise AttributeError(name)


def _make_textual(bar: Any) -> None:
    """Take away what makes the notebook's bar class a widget; names imported earlier are text bars then, too.

    What it inherits stays as it is. In `tqdm.auto` another class follows this one, whose constructor begins the pass
    over its argument, and so draws the seed of a DataLoader's order as it does in the notebook.
    """
    for name in ("__init__", "__iter__", "update", "close", "clear", "reset", "display", "status_printer"):
        if name in vars(bar):
            delattr(bar, name)
    bar.colour = None


def _forward_display(shell: Any, publish: Publish) -> None:
    def display(
        data: dict[str, Any], metadata: dict[str, Any] | None = None, *args: Any, transient: Any = None, **kwargs: Any
    ) -> None:
        publish(
            {
                "kind": "update" if kwargs.get("update") else "display",
                "data": _jsonable(_without_widget(data)),
                "metadata": metadata or {},
                "display_id": (transient or {}).get("display_id"),
                "wait": False,
            }
        )

    def clear_output(wait: bool = False) -> None:
        publish({"kind": "clear", "data": {}, "metadata": {}, "display_id": None, "wait": wait})

    def write_payload(payload: dict[str, Any], single: bool = True) -> None:
        """Send what `%prun`, `obj?` and `%load` show beside the cell: pages and the next input."""
        if data := _without_colours(payload.get("data") or {}):
            payload = {**payload, "data": data}
        publish({"kind": "payload", "data": _jsonable(data), "payload": payload})

    def ask_exit() -> NoReturn:
        raise SystemExit(0)

    def show_error(kind: type, error: BaseException, lines: list[str]) -> None:
        """Print an error of `get_ipython().run_cell`, which a kernel's shell would send on its sockets."""
        sys.stderr.write(_COLOUR.sub("", "\n".join(lines)) + "\n")

    shell.display_pub.publish = display
    shell.display_pub.clear_output = clear_output
    shell.payload_manager.write_payload = write_payload
    shell.ask_exit = ask_exit
    shell._showtraceback = show_error
    # `exit` and `quit` of IPython ask the kernel to end; in a rank they end the rank.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    shell.user_ns["exit"] = shell.user_ns["quit"] = sys.exit


# Not `shell.colors`: its observers make new colour schemes, and so copy a quarter of a rank's pages.
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


def _without_colours(data: dict[str, Any]) -> dict[str, Any]:
    return {mime: _COLOUR.sub("", part) if isinstance(part, str) else part for mime, part in data.items()}


_WIDGET = "application/vnd.jupyter.widget-view+json"


def _without_widget(data: dict[str, Any]) -> dict[str, Any]:
    """Return the other forms of a widget: no front end knows one that a rank made."""
    return {mime: part for mime, part in data.items() if mime != _WIDGET} if len(data) > 1 else data


def _jsonable(data: dict[str, Any]) -> dict[str, Any]:
    """Encode images, which may be bytes, as text: a message is text."""
    import base64

    return {mime: base64.b64encode(part).decode() if isinstance(part, bytes) else part for mime, part in data.items()}
