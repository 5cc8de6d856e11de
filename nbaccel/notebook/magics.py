"""The magics: `%%accelerate` runs a cell in ranks, `%accelerate` asks and configures. Runs in the kernel.

`register` is `%load_ext nbaccel`, `unregister` undoes it. Registering takes some milliseconds, opens no socket and
prints nothing: the session, and everything that it needs, is imported when the kernel is idle, or with the first magic
that is used (or at once if there may be a GPU, for which the zygote is to be ready). Neither keeps state in a module:
the shell holds the magics, and they hold the session.
"""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.getipython import get_ipython
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import magic_arguments

from nbaccel.base.gpu_driver import cuda_environ, has_gpu_driver
from nbaccel.base.notices import briefly, is_users
from nbaccel.errors import NbaccelError
from nbaccel.notebook.completion import Completer
from nbaccel.notebook.idle_loading import IdleLoading
from nbaccel.notebook.shell_hooks import AcceleratorHelp, CudaWatch, FailedCells, comments_below_magic
from nbaccel.options.flags import flags, unabbreviated
from nbaccel.options.parsing import asks_for_help, joined, parse

if TYPE_CHECKING:  # they import the whole package `launch`
    from nbaccel.notebook.commands import Commands
    from nbaccel.notebook.session import Session

__all__ = ["AccelerateMagics", "follow_kept_runs", "panel", "register", "unregister"]

# With it is_available() does not break forks:
# https://docs.pytorch.org/docs/stable/generated/torch.cuda.is_available.html
_CUDA_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With this variable `torch.cuda.is_available()` asks NVML, and the notebook can still be forked afterwards."""


@magics_class
class AccelerateMagics(Magics):
    """The magics of one shell, and the other changes of the extension to it.

    Args:
        session: None to make one.
        may_have_gpus: Returns whether to look for GPUs when the extension is loaded.
    """

    def __init__(
        self, shell: Any, session: Session | None = None, may_have_gpus: Callable[[], bool] = has_gpu_driver
    ) -> None:
        super().__init__(shell=shell)
        self._shell = shell
        self._session = session
        self._may_have_gpus = may_have_gpus
        self._parser = type(self).accelerate.parser
        self._completer = Completer(shell, self._parser)
        self._help = AcceleratorHelp(shell)
        self._cuda = CudaWatch() if session is None else session.cuda
        self._failed = FailedCells() if session is None else session.failed_cells
        idle = IdleLoading()
        self._around_cells = (  # objects that can be unregistered
            ("pre_run_cell", idle.before_cell),
            *(("post_run_cell", each.after_cell) for each in (self._cuda, self._failed, idle)),
        )
        self._has_set_cuda_check = False

    @property
    def session(self) -> Session:
        """Return the session, made at its first use."""
        if self._session is None:
            from nbaccel.notebook.session import Session

            self._session = Session(self._shell, cuda=self._cuda, failed_cells=self._failed)
        return self._session

    @cached_property
    def _commands(self) -> Commands:
        from nbaccel.notebook.commands import commands_of

        return commands_of(self.session, self._parser)

    @magic_arguments()  # type: ignore[no-untyped-call, untyped-decorator]
    @flags
    @line_cell_magic
    def accelerate(self, line: str, cell: str | None = None) -> Any:
        """Run the cell in ranks, on every device of the machine.

        Without a cell, with one percent sign:
          %accelerate                   what the next cell would run on, and how the last run went
          %accelerate config            what the notebook has chosen, as a form where there can be one
          %accelerate config KEY=VALUE  choose flags (long ones without dashes) for all cells; --save for others too
          %accelerate doctor            what this machine offers
          %accelerate memory            who holds how much of it
          %accelerate estimate MODEL    what training it would take, by strategy
          %accelerate why               what the ranks of a run that failed or was interrupted were doing, side by side
          %accelerate status            how the run in the background (--bg) goes, and what %accelerate alone says
          %accelerate wait              wait for that run, and bring back what it left
          %accelerate attach            show its panel in this cell too, and wait; an interrupt ends the waiting
          %accelerate runs              list this notebook's runs; with numbers, compare these: %accelerate runs 3 5
          %accelerate nodes WHERE       what the machines of --nodes have; without WHERE, those that are connected
          %accelerate export train.py   write the last cell in ranks, with the cells that it needs, as a script; --check
          %accelerate last              show panel and picture of the last run again, after the page was reloaded
          %accelerate stop              finish its step, the second time end it now; without one, end ranks that stay,
                                        and the agents on other machines
          %accelerate start FLAGS       start ranks that stay: cells run in them, and names last from cell to cell
          %accelerate push NAMES        send them variables of the notebook
          %accelerate pull NAMES        bring variables back from rank 0, or with --rank 1 from another
          %accelerate restart           end them, and start others with the same flags
        """
        if asks_for_help(line):
            print(inspect.cleandoc(type(self).accelerate.__doc__ or "").removeprefix("::").strip("\n"))
            if cell is not None:
                print("\nThe cell was not run.")
            return None
        try:
            if cell is None:
                return self._commands.run(joined(line))
            from nbaccel.notebook.cell_mode import run_cell

            return run_cell(self.session, parse(self._parser, line), cell, line)
        except NbaccelError as error:
            raise briefly(error) from error.__cause__
        except KeyboardInterrupt as interrupt:
            frames = traceback.extract_tb(interrupt.__traceback__)
            if str(interrupt) or any(is_users(frame.filename) for frame in frames):
                raise
            raise briefly(KeyboardInterrupt("interrupted while no code of the cell ran.")) from None
        except Exception as error:
            error.__traceback__ = _without_our_frames(error.__traceback__)
            if isinstance(error, SyntaxError) and str(error.filename).startswith("Cell In["):
                _show_as_of_a_cell(self._shell, error)
            raise

    unabbreviated(accelerate.parser)

    @line_magic("%accelerate")  # type: ignore[arg-type]
    def misplaced(self, line: str) -> None:
        """Refuse a `%%accelerate` below code, which IPython takes for a line magic whose name begins with `%`."""
        raise UsageError(
            "%%accelerate has to be the first line of its cell, below comments at most: the lines above it ran in "
            "the notebook, no rank was started, and nothing below it ran."
        )

    # --- the extension -----------------------------------------------------------------------------------------

    def install(self) -> None:
        shell = self._shell
        self._has_set_cuda_check = _CUDA_CHECK not in dict(cuda_environ())
        os.environ.setdefault(_CUDA_CHECK, "1")
        shell.register_magics(self)
        self._completer.install()
        self._help.install()
        shell.input_transformers_cleanup.append(comments_below_magic)
        for event, handler in self._around_cells:
            shell.events.register(event, handler)
        if self._may_have_gpus() and self.session.survey().gpus:
            self.session.start_zygote()

    def remove(self) -> None:
        """Undo `install`.

        Persistent ranks end; the zygote belongs to the process, and a launch from a function may use it.
        """
        if self._session is not None:
            self._session.close()
        shell = self._shell
        for event, handler in self._around_cells:
            shell.events.unregister(event, handler)
        shell.input_transformers_cleanup.remove(comments_below_magic)
        self._completer.remove()
        self._help.remove()
        manager = shell.magics_manager
        del manager.registry[type(self).__name__]
        for kind in ("line", "cell"):
            del manager.magics[kind]["accelerate"]
        del manager.magics["line"]["%accelerate"]
        if self._has_set_cuda_check:
            os.environ.pop(_CUDA_CHECK, None)


def register(shell: Any) -> None:
    """Give `shell` the magics; a second call changes nothing."""
    if _registered(shell) is None:
        AccelerateMagics(shell).install()


def panel() -> None:
    """Show the form of `%accelerate config` in this notebook; load the extension if that was not done yet.

    Raises:
        RuntimeError: There is no notebook.

    Example:
        >>> import nbaccel
        >>> nbaccel.panel()  # doctest: +SKIP
    """
    shell = get_ipython()
    if shell is None:
        raise RuntimeError(
            "nbaccel.panel() shows a form in a notebook, and this program runs outside IPython; "
            "`nbaccel config KEY=VALUE` sets the same for a folder."
        )
    register(shell)
    shell.run_line_magic("accelerate", "config")


def follow_kept_runs() -> None:
    """Read the runs that this notebook keeps in a file, if it has chosen one and that was not done yet."""
    shell = get_ipython()
    magics = None if shell is None else _registered(shell)
    if magics is not None:
        with suppress(UsageError, NbaccelError):  # the next cell, and %accelerate runs, say what is wrong
            magics.session.remembered()


def unregister(shell: Any) -> None:
    """Restore `shell` to its state before `register`."""
    magics = _registered(shell)
    if magics is not None:
        magics.remove()


def _registered(shell: Any) -> AccelerateMagics | None:
    magics: AccelerateMagics | None = shell.magics_manager.registry.get(AccelerateMagics.__name__)
    return magics


def _show_as_of_a_cell(shell: Any, error: SyntaxError) -> None:
    """Make IPython show `error` as in a cell without a magic: no call led to it.

    IPython does not use `_render_traceback_` for a SyntaxError, and shows its own frames if compiled code has raised
    one.
    """
    show = shell.showsyntaxerror

    def once(filename: str | None = None, running_compiled_code: bool = False) -> None:
        del shell.showsyntaxerror
        show(filename, running_compiled_code and sys.exc_info()[1] is not error)

    shell.showsyntaxerror = once


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the user's first line on; the magic's own frames explain nothing to its reader."""
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("nbaccel."):
        trace = trace.tb_next
    return trace
