"""Let the ranks of a raw loop act as one program: one bar, one tracked run, local metrics, no login. Runs in ranks.

A loop that does not know ranks would draw, log and count once per rank. Libraries are patched when they are loaded;
this module imports none of them. Rank 0 alone draws bars (`ProgressBars`) and writes trackers' runs (`OneTrackedRun`),
metrics stay local to their rank (`MetricsOfRanks`), and a library that asks the user to log in raises an error that
names the variable to set (`refuse_logins`).
"""

from __future__ import annotations

import functools
import io
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from nbaccel.base.world import World
from nbaccel.errors import NoInput
from nbaccel.launching.ipc.import_hooks import when_loaded
from nbaccel.launching.ipc.rank_part import RankPart, RankTask
from nbaccel.launching.ipc.spec import TaskWatch
from nbaccel.namespace.event_files import silence

__all__ = [
    "MetricsOfRanks",
    "OneTrackedRun",
    "ProgressBars",
    "refuse_logins",
]

_ARGUMENTS_BEFORE_FILE = 4
"""Number of tqdm's arguments before `file`: iterable, desc, total, leave."""


class ProgressBars(RankPart):
    """Decides whether this rank draws its bars, from task to task. One per process.

    In ranks other than 0 a bar counts as usual, and shows nothing: `n`, `total`, and the results of iterating and
    `update` are unchanged. tqdm, the `Progress` of rich, and fastprogress are patched. A bar that writes to a file of
    the program's own is left alone.

    Args:
        world: That of this rank.
    """

    def __init__(self, world: World) -> None:
        self._is_main = world.is_main_process
        self._is_quiet = False

    def install(self) -> None:
        """Patch the bars of this process, from now on."""
        if not self._is_main:
            when_loaded(
                {
                    "tqdm.std": self._watch_tqdm,
                    "rich.progress": self._watch_rich,
                    "fastprogress.fastprogress": self._watch_fastprogress,
                }
            )

    def begin(self, running: RankTask) -> None:
        """Let a task that knows ranks choose by itself in which ranks it draws."""
        self._is_quiet = not running.task.knows_ranks

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
        for kind in {module.tqdm, notebook}:
            if "__init__" in vars(kind):  # the notebook's class has its own
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


_LONGEST_WAIT_S = 60.0
"""Seconds to wait until rank 0 makes its writer: it may begin a run of wandb before, which other ranks do not."""

_POLL_S = 0.005


class OneTrackedRun(RankPart):
    """Lets this rank's trackers be rank 0's run.

    In other ranks `wandb.init` makes no run (mode "disabled": logged values are dropped), and a `SummaryWriter` of
    TensorBoard writes nothing if rank 0 has one for the same folder. A run of each rank is intended if `wandb.init`
    names a group or shares a run, if the writers' folders differ, and with `--independent`. A run of wandb or MLflow
    that the notebook has begun goes on by rank 0; MLflow by itself would begin another one in each rank. Not covered:
    names such as `from wandb import init` of the notebook, trackers of other libraries.

    Args:
        store_path: A path that is the same in all ranks of the run, in a folder of the run's own.
    """

    def __init__(self, world: World, store_path: str) -> None:
        self._world = world
        self._folders = f"{store_path}.boards"

    def install(self) -> None:
        actions: dict[str, Callable[[Any], None]] = {
            "torch.utils.tensorboard.writer": partial(_write_by_rank_0, self._world, self._folders),
            "mlflow.tracking.fluent": partial(_go_on_with_mlflows_run, self._world),
        }
        if not self._world.is_main_process:
            actions["wandb"] = partial(_disable_wandb, self._world)
            actions["wandb.sdk.wandb_run"] = _mute_wandbs_run
        when_loaded(actions)


def _disable_wandb(world: World, module: Any) -> None:
    makes = module.init
    is_told = world.rank != 1  # one rank says it

    @functools.wraps(makes)
    def init(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_told
        if _is_meant(kwargs):
            return makes(*args, **kwargs)
        if not is_told and kwargs.get("mode", os.environ.get("WANDB_MODE")) != "disabled":
            is_told = True
            warnings.warn(
                f"wandb.init makes one run, by rank 0 of {world.world_size}; what other ranks log goes nowhere. A run "
                "of each rank: wandb.init(group=...), or %%accelerate --independent.",
                stacklevel=2,
            )
        return makes(*args, **{**kwargs, "mode": "disabled"})

    module.init = init


_WRITES_OF_WANDB = ("alert", "finish", "log", "log_artifact", "log_code", "log_model", "save")


def _mute_wandbs_run(module: Any) -> None:
    """Make a run that the notebook has begun write nothing here: rank 0 logs the same rows."""
    for name in _WRITES_OF_WANDB:
        if callable(writes := getattr(module.Run, name, None)):
            setattr(module.Run, name, _unless(_is_of_another_process, writes))


def _is_of_another_process(args: tuple[Any, ...], _: Any) -> bool:
    return getattr(args[0], "_init_pid", None) != os.getpid()


_WRITES_OF_MLFLOW = (
    *("log_artifact", "log_artifacts", "log_batch", "log_dict", "log_figure", "log_image", "log_inputs", "log_metric"),
    *("log_param", "log_table", "log_text", "set_tag", "set_terminated"),
)


def _go_on_with_mlflows_run(world: World, module: Any) -> None:
    """Make the run that the notebook has begun the active one of this rank, and let rank 0 alone write to it."""
    of_thread = getattr(module, "_active_run_stack", None)
    stack, _ = getattr(getattr(of_thread, "thread_local", None), "value", ((), None))
    if not stack or of_thread is None:
        return
    of_thread.set(stack)
    runs = {run.info.run_id for run in stack}

    def is_the_notebooks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return (args[1] if len(args) > 1 else kwargs.get("run_id")) in runs

    for name in _WRITES_OF_MLFLOW if not world.is_main_process else ():
        if callable(writes := getattr(module.MlflowClient, name, None)):
            setattr(module.MlflowClient, name, _unless(is_the_notebooks, writes))


def _unless(is_left_out: Callable[..., bool], writes: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(writes)
    def write(*args: Any, **kwargs: Any) -> Any:
        return None if is_left_out(args, kwargs) else writes(*args, **kwargs)

    return write


def _is_meant(options: dict[str, Any]) -> bool:
    """Return whether `wandb.init` with these options is one of several that belong together."""
    settings = options.get("settings") or {}
    settings = settings if isinstance(settings, dict) else vars(settings)
    groups = (options.get("group"), settings.get("run_group"), os.environ.get("WANDB_RUN_GROUP"))
    modes = (options.get("mode"), settings.get("mode"), os.environ.get("WANDB_MODE"))
    return any(groups) or "shared" in modes


def _write_by_rank_0(world: World, folders: str, module: Any) -> None:
    """Make rank 0 list its writers' folders, and the other ranks read the list.

    Args:
        folders: The list's file.
    """
    kind = module.SummaryWriter
    makes = kind.__init__
    count = 0

    @functools.wraps(makes)
    def make(writer: Any, log_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        line = f"{log_dir if log_dir is None else os.path.abspath(log_dir)}|{kwargs.get('comment', '')}\n"
        if world.is_main_process:
            with suppress(OSError), open(folders, "a") as file:
                file.write(line)
        elif _has_line(folders, line, count):
            silence(writer, str(log_dir or ""))
        makes(writer, log_dir, *args, **kwargs)

    kind.__init__ = make


def _has_line(path: str, line: str, count: int) -> bool:
    """Return whether rank 0 has a writer for that folder. Wait until it has made `count` of them, as this rank has."""
    until = time.monotonic() + _LONGEST_WAIT_S
    while True:
        lines: list[str] = []
        with suppress(OSError), open(path) as file:
            lines = file.readlines()
        if line in lines:
            return True
        if len(lines) >= count or time.monotonic() > until:
            return False
        time.sleep(_POLL_S)  # ended by rank 0's line, or by the limit


def refuse_logins(rank: int) -> None:
    """Make a login that waits for a person raise `NoInput` with the variable to set. Called once per process.

    No input can be typed into a rank. `input` and `getpass` raise an error (`rank/jupyter.py`); this function handles
    libraries that ask in other ways: wandb looks for a terminal, and the Hugging Face hub shows a code and waits
    minutes for a person to enter it. If Kaggle's internet is off, wandb detects that, prints it, and then tries for 90
    seconds: here it is an error at once.
    """
    when_loaded(
        {
            "wandb.sdk.lib.wbauth": partial(_refuse_wandbs, rank),
            "wandb.sdk.wandb_login": partial(_refuse_without_internet, rank),
            "huggingface_hub._login": partial(_refuse_the_hubs, rank),
        }
    )


def _refuse_wandbs(rank: int, module: Any) -> None:
    finds_key = module.authenticate_session

    @functools.wraps(finds_key)
    def authenticate_session(*args: Any, **kwargs: Any) -> Any:
        try:
            return finds_key(*args, **kwargs)
        except Exception as error:
            if type(error).__name__ != "UsageError":  # of wandb's: it has no key, and cannot ask
                raise
            raise NoInput(
                f"rank {rank} has no key for Weights & Biases, and nobody can type one into a rank. Set "
                'os.environ["WANDB_API_KEY"] or call wandb.login() in a cell before this one; with '
                'os.environ["WANDB_MODE"] = "offline" the run stays on disk, for `wandb sync`.'
            ) from error

    module.authenticate_session = authenticate_session


def _refuse_without_internet(rank: int, module: Any) -> None:
    logs_in, util = module._login, module.wandb.util

    @functools.wraps(logs_in)
    def login(*args: Any, **kwargs: Any) -> Any:
        if util._is_kaggle() and not util._has_internet():
            raise ConnectionError(
                f"rank {rank} cannot reach Weights & Biases: Kaggle's internet is off, see the notebook's settings. "
                'With os.environ["WANDB_MODE"] = "offline" in a cell before this one the run stays on disk, for '
                "`wandb sync`."
            )
        return logs_in(*args, **kwargs)

    module._login = login


def _refuse_the_hubs(rank: int, module: Any) -> None:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NoInput(
            f"rank {rank} was to log in to the Hugging Face hub, and nobody can answer in a rank. Set "
            'os.environ["HF_TOKEN"], or call huggingface_hub.login() in a cell before this one.'
        )

    if hasattr(module, "request_device_code"):  # older ones ask by `getpass`
        module.request_device_code = refuse


class MetricsOfRanks(RankPart):
    """Decides whether metrics are added up over the ranks, from task to task. One per process.

    torchmetrics and ignite add up their counts over all ranks as soon as there is a process group. In a loop that does
    not know ranks every rank runs the whole evaluation, so each sample would be counted once per rank. In a program
    that prepares objects, or divides the data itself, these libraries work as usual in ranks.
    """

    def __init__(self) -> None:
        self._watch: TaskWatch | None = None

    def install(self) -> None:
        """Patch the metrics of this process, from now on."""
        when_loaded({"torchmetrics.metric": self._of_torchmetrics, "ignite.distributed.comp_models": self._of_ignite})

    def begin(self, running: RankTask) -> None:
        """Begin a task: code that is not for several ranks has the watch that keeps its training equal."""
        self._watch = None if running.task.knows_ranks else running.equal_watch

    @property
    def are_alone(self) -> bool:
        """Return whether the running loop does not know ranks, and has not prepared anything meanwhile."""
        return self._watch is not None and self._watch.keeps(())

    def _of_torchmetrics(self, module: Any) -> None:
        real = module.Metric.sync

        @functools.wraps(real)
        def sync(metric: Any, *args: Any, **kwargs: Any) -> None:
            if not self.are_alone:
                real(metric, *args, **kwargs)

        module.Metric.sync = sync

    def _of_ignite(self, module: Any) -> None:
        """Patch ignite, whose functions look for a process group until they have found one."""
        kind = module.native._NativeDistModel
        real = kind.create_from_context

        @functools.wraps(real)
        def create_from_context() -> Any:
            return None if self.are_alone else real()

        kind.create_from_context = staticmethod(create_from_context)
