"""Lets rank 0 alone draw the progress bars of a raw loop. Runs in ranks; imports no library of bars.

In other ranks a bar counts as usual, and shows nothing: `n`, `total`, and the results of iterating and `update` are
unchanged. It patches tqdm, the `Progress` of rich and fastprogress. A bar that writes to a file of the program's own is
left alone.
"""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable
from typing import Any

from nbaccel.launch.rank.loaded import when_loaded
from nbaccel.world import World

__all__ = ["OneBar"]

_ARGUMENTS_BEFORE_FILE = 4
"""Number of tqdm's arguments before `file`: iterable, desc, total, leave."""


class OneBar:
    """Decides whether this rank draws its bars, from task to task. One per process.

    world: that of this rank.
    """

    def __init__(self, world: World) -> None:
        self._is_main = world.is_main_process
        self._is_quiet = False

    def watch(self) -> None:
        """Patch the bars of this process, from now on. Before it, `begin` has no effect."""
        if not self._is_main:
            when_loaded(
                {
                    "tqdm.std": self._watch_tqdm,
                    "rich.progress": self._watch_rich,
                    "fastprogress.fastprogress": self._watch_fastprogress,
                }
            )

    def begin(self, knows_ranks: bool) -> None:
        """Begin a task.  knows_ranks: it chooses by itself in which ranks it draws."""
        self._is_quiet = not knows_ranks

    def _watch_tqdm(self, module: Any) -> None:
        """Patch tqdm, whose own `disable` would leave `n` at 0."""

        def no_file(makes: Callable[..., None]) -> Callable[..., None]:
            @functools.wraps(makes)
            def make(bar: Any, *args: Any, **kwargs: Any) -> None:
                if self._is_quiet and len(args) <= _ARGUMENTS_BEFORE_FILE and _is_screen(kwargs.get("file")):
                    kwargs["file"] = _Nowhere()
                makes(bar, *args, **kwargs)

            return make

        notebook = getattr(sys.modules.get("tqdm.notebook"), "tqdm_notebook", module.tqdm)
        for kind in {module.tqdm, notebook}:  # the notebook's class has its own constructor
            kind.__init__ = no_file(kind.__init__)

    def _watch_rich(self, module: Any) -> None:
        makes = module.Progress.__init__

        @functools.wraps(makes)
        def make(progress: Any, *args: Any, **kwargs: Any) -> None:
            makes(progress, *args, **kwargs)
            progress.disable = progress.disable or self._is_quiet  # tasks go on

        module.Progress.__init__ = make

    def _watch_fastprogress(self, module: Any) -> None:
        """Patch fastprogress: bars of a console print, those of a notebook have their own output, `out`."""
        module.print = module.WRITER_FN = self._unless_quiet(print)

        def begin(bar: Any) -> None:
            bar.out, bar.progress, bar.is_active = _NoOutput(), "", True
            module.ProgressBar.on_iter_begin(bar)

        def begin_master(bar: Any) -> None:
            bar.out = _NoOutput()

        bars, master = module.NBProgressBar, module.NBMasterBar
        bars.on_iter_begin = self._unless_quiet(bars.on_iter_begin, begin)
        master.on_iter_begin = self._unless_quiet(master.on_iter_begin, begin_master)
        for name in ("show_imgs", "update_graph"):
            setattr(master, name, self._unless_quiet(getattr(master, name)))

    def _unless_quiet(
        self, function: Callable[..., Any], instead: Callable[..., None] = lambda *args, **kwargs: None
    ) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (instead if self._is_quiet else function)(*args, **kwargs)

        return call


def _is_screen(file: Any) -> bool:
    return any(file is each for each in (None, sys.stdout, sys.stderr))


class _Nowhere(io.TextIOBase):
    """A file that discards what is written to it."""

    def write(self, text: Any) -> int:
        return len(text)


class _NoOutput:
    """Replacement of the handle of a display."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Show nothing."""
