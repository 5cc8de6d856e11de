"""Let rank 0 alone draw the bars of a loop that does not know ranks. Runs in ranks; imports no library.

In ranks other than 0 a bar counts as usual, and shows nothing, while a task runs that does not choose by itself which
ranks draw: `n`, `total`, and the results of iterating and `update` are unchanged. tqdm, the `Progress` of rich, and
fastprogress are patched. A bar that writes to a file of the program's own is left alone.
"""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from nbaccel.launching.ipc.import_hooks import Assignment, Change, Prepare, Replacement
from nbaccel.launching.libraries import LibraryRank

__all__ = ["bars"]

_ARGUMENTS_BEFORE_FILE = 4
"""Number of tqdm's arguments before `file`: iterable, desc, total, leave."""


def bars(here: LibraryRank, library: str) -> Iterator[tuple[str, Prepare]]:
    """Let rank 0 alone draw bars of `library`."""
    if not here.world.is_main_process:
        these = _ProgressBars(here)
        yield {
            "tqdm": ("tqdm.std", these.watch_tqdm),
            "rich": ("rich.progress", these.watch_rich),
            "fastprogress": ("fastprogress.fastprogress", these.watch_fastprogress),
        }[library]


class _ProgressBars:
    """Bars of a rank that draws none while a task runs that does not know ranks."""

    def __init__(self, here: LibraryRank) -> None:
        self._here = here

    @property
    def _is_quiet(self) -> bool:
        return not self._here.knows_ranks

    def watch_tqdm(self, module: Any) -> list[Change]:
        """Patch tqdm, whose own `disable` would leave `n` at 0."""

        def no_file(makes: Callable[..., None]) -> Callable[..., None]:
            @functools.wraps(makes)
            def make(bar: Any, *args: Any, **kwargs: Any) -> None:
                if self._is_quiet and len(args) <= _ARGUMENTS_BEFORE_FILE and _is_screen(kwargs.get("file")):
                    kwargs["file"] = _Nowhere()
                makes(bar, *args, **kwargs)

            return make

        notebook = getattr(sys.modules.get("tqdm.notebook"), "tqdm_notebook", module.tqdm)
        own = [kind for kind in {module.tqdm, notebook} if "__init__" in vars(kind)]  # the notebook's class has its own
        return [Replacement([kind], "__init__", no_file) for kind in own]

    def watch_rich(self, module: Any) -> list[Change]:
        def quiet(makes: Callable[..., None]) -> Callable[..., None]:
            @functools.wraps(makes)
            def make(progress: Any, *args: Any, **kwargs: Any) -> None:
                makes(progress, *args, **kwargs)
                progress.disable = progress.disable or self._is_quiet  # tasks go on

            return make

        return [Replacement([module.Progress], "__init__", quiet)]

    def watch_fastprogress(self, module: Any) -> list[Change]:
        """Patch fastprogress: bars of a console print, those of a notebook have their own output, `out`."""

        def begin(bar: Any) -> None:
            bar.out, bar.progress, bar.is_active = _NoOutput(), "", True
            module.ProgressBar.on_iter_begin(bar)

        def begin_master(bar: Any) -> None:
            bar.out = _NoOutput()

        bars, master, prints = module.NBProgressBar, module.NBMasterBar, self._unless_quiet(print)
        return [
            *(Assignment(module, name, prints) for name in ("print", "WRITER_FN")),
            Replacement([bars], "on_iter_begin", partial(self._unless_quiet, instead=begin)),
            Replacement([master], "on_iter_begin", partial(self._unless_quiet, instead=begin_master)),
            *(Replacement([master], name, self._unless_quiet) for name in ("show_imgs", "update_graph")),
        ]

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
