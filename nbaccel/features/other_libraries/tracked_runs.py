"""Let the trackers of all ranks be one run, and no rank wait for a log-in. Runs in ranks; imports no library.

In ranks other than 0 `wandb.init` makes no run (mode "disabled": logged values are dropped), and a `SummaryWriter` of
TensorBoard writes nothing if rank 0 has one for the same folder. A run of each rank is intended if `wandb.init` names
a group or shares a run, if the writers' folders differ, and with `--independent`. A run of wandb or MLflow that the
notebook has begun goes on by rank 0; MLflow by itself would begin another one in each rank. Not covered: names such as
`from wandb import init` of the notebook, trackers of other libraries.

No input can be typed into a rank. `input` and `getpass` raise an error (`rank/jupyter.py`); here are libraries that ask
in other ways: wandb looks for a terminal, and the Hugging Face hub shows a code and waits minutes for a person to enter
it. If Kaggle's internet is off, wandb detects that, prints it, and then tries for 90 seconds: here it is an error at
once. Each error names the variable to set.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from nbaccel.base.world import World
from nbaccel.errors import NoInput
from nbaccel.launching.ipc.import_hooks import Assignment, Change, Prepare, Replacement
from nbaccel.launching.libraries import LibraryRank
from nbaccel.namespace.event_files import silence

__all__ = [
    "log_ins_of_the_hub",
    "log_ins_of_wandb",
    "one_run_of_mlflow",
    "one_run_of_tensorboard",
    "one_run_of_wandb",
]

_LONGEST_WAIT_S = 60.0
"""Seconds to wait until rank 0 makes its writer: it may begin a run of wandb before, which other ranks do not."""

_POLL_S = 0.005


def one_run_of_tensorboard(here: LibraryRank, library: str) -> Iterator[tuple[str, Prepare]]:
    """Let this rank's writers be rank 0's where they have the same folder."""
    yield "torch.utils.tensorboard.writer", partial(_write_by_rank_0, here)


def one_run_of_mlflow(here: LibraryRank, library: str) -> Iterator[tuple[str, Prepare]]:
    """Let a run that the notebook has begun go on by rank 0."""
    yield "mlflow.tracking.fluent", partial(_go_on_with_mlflows_run, here.world)


def one_run_of_wandb(here: LibraryRank, library: str) -> Iterator[tuple[str, Prepare]]:
    """Let this rank's run be rank 0's."""
    if not here.world.is_main_process:
        yield "wandb", partial(_disable_wandb, here.world)
        yield "wandb.sdk.wandb_run", _mute_wandbs_run


def _disable_wandb(world: World, module: Any) -> list[Change]:
    is_told = world.rank != 1  # one rank says it

    def disabled(makes: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(makes)
        def init(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_told
            if _is_meant(kwargs):
                return makes(*args, **kwargs)
            if not is_told and kwargs.get("mode", os.environ.get("WANDB_MODE")) != "disabled":
                is_told = True
                warnings.warn(
                    f"wandb.init makes one run, by rank 0 of {world.world_size}; what other ranks log goes nowhere. A "
                    "run of each rank: wandb.init(group=...), or %%accelerate --independent.",
                    stacklevel=2,
                )
            return makes(*args, **{**kwargs, "mode": "disabled"})

        return init

    return [Replacement([module], "init", disabled)]


_WRITES_OF_WANDB = ("alert", "finish", "log", "log_artifact", "log_code", "log_model", "save")


def _mute_wandbs_run(module: Any) -> list[Change]:
    """Make a run that the notebook has begun write nothing here: rank 0 logs the same rows."""
    return _left_out(module.Run, _WRITES_OF_WANDB, _is_of_another_process)


def _is_of_another_process(args: tuple[Any, ...], _: Any) -> bool:
    return getattr(args[0], "_init_pid", None) != os.getpid()


_WRITES_OF_MLFLOW = (
    *("log_artifact", "log_artifacts", "log_batch", "log_dict", "log_figure", "log_image", "log_inputs", "log_metric"),
    *("log_param", "log_table", "log_text", "set_tag", "set_terminated"),
)


def _go_on_with_mlflows_run(world: World, module: Any) -> list[Change]:
    """Make the run that the notebook has begun the active one of this rank, and let rank 0 alone write to it."""
    runs: set[str] = set()

    def go_on() -> None:
        of_thread = getattr(module, "_active_run_stack", None)
        stack, _ = getattr(getattr(of_thread, "thread_local", None), "value", ((), None))
        if stack and of_thread is not None:
            of_thread.set(stack)
            runs.update(run.info.run_id for run in stack)

    def is_the_notebooks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return (args[1] if len(args) > 1 else kwargs.get("run_id")) in runs

    others = () if world.is_main_process else _WRITES_OF_MLFLOW
    return [go_on, *_left_out(module.MlflowClient, others, is_the_notebooks)]


def _left_out(kind: Any, names: Sequence[str], is_left_out: Callable[..., bool]) -> list[Change]:
    """Leave out calls of those methods that there are.

    Args:
        is_left_out: Called with their arguments.
    """

    def unless(writes: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(writes)
        def write(*args: Any, **kwargs: Any) -> Any:
            return None if is_left_out(args, kwargs) else writes(*args, **kwargs)

        return write

    return [Replacement([kind], name, unless) for name in names if callable(getattr(kind, name, None))]


def _is_meant(options: dict[str, Any]) -> bool:
    """Return whether `wandb.init` with these options is one of several that belong together."""
    settings = options.get("settings") or {}
    settings = settings if isinstance(settings, dict) else vars(settings)
    groups = (options.get("group"), settings.get("run_group"), os.environ.get("WANDB_RUN_GROUP"))
    modes = (options.get("mode"), settings.get("mode"), os.environ.get("WANDB_MODE"))
    return any(groups) or "shared" in modes


def _write_by_rank_0(here: LibraryRank, module: Any) -> list[Change]:
    """Make rank 0 list its writers' folders in a file, and the other ranks read the list."""
    count = 0

    def listed(makes: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(makes)
        def make(writer: Any, log_dir: Any = None, *args: Any, **kwargs: Any) -> None:
            nonlocal count
            count += 1
            folders = f"{here.store_path}.boards"
            line = f"{log_dir if log_dir is None else os.path.abspath(log_dir)}|{kwargs.get('comment', '')}\n"
            if here.world.is_main_process:
                with suppress(OSError), open(folders, "a") as file:
                    file.write(line)
            elif _has_line(folders, line, count):
                silence(writer, str(log_dir or ""))
            makes(writer, log_dir, *args, **kwargs)

        return make

    return [Replacement([module.SummaryWriter], "__init__", listed)]


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


def log_ins_of_wandb(here: LibraryRank, library: str) -> Iterator[tuple[str, Prepare]]:
    """Make a log-in that waits for a person raise `NoInput` with the variable to set."""
    yield "wandb.sdk.lib.wbauth", partial(_refuse_wandbs, here.world.rank)
    yield "wandb.sdk.wandb_login", partial(_refuse_without_internet, here.world.rank)


def log_ins_of_the_hub(here: LibraryRank, library: str) -> Iterator[tuple[str, Prepare]]:
    """Make a log-in that waits for a person raise `NoInput` with the variable to set."""
    yield "huggingface_hub._login", partial(_refuse_the_hubs, here.world.rank)


def _refuse_wandbs(rank: int, module: Any) -> list[Change]:
    def refusing(finds_key: Callable[..., Any]) -> Callable[..., Any]:
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

        return authenticate_session

    return [Replacement([module], "authenticate_session", refusing)]


def _refuse_without_internet(rank: int, module: Any) -> list[Change]:
    util = module.wandb.util

    def refusing(logs_in: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(logs_in)
        def login(*args: Any, **kwargs: Any) -> Any:
            if util._is_kaggle() and not util._has_internet():
                raise ConnectionError(
                    f"rank {rank} cannot reach Weights & Biases: Kaggle's internet is off, see the notebook's "
                    'settings. With os.environ["WANDB_MODE"] = "offline" in a cell before this one the run stays on '
                    "disk, for `wandb sync`."
                )
            return logs_in(*args, **kwargs)

        return login

    return [Replacement([module], "_login", refusing)]


def _refuse_the_hubs(rank: int, module: Any) -> list[Change]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NoInput(
            f"rank {rank} was to log in to the Hugging Face hub, and nobody can answer in a rank. Set "
            'os.environ["HF_TOKEN"], or call huggingface_hub.login() in a cell before this one.'
        )

    asks = hasattr(module, "request_device_code")  # older ones ask by `getpass`
    return [Assignment(module, "request_device_code", refuse)] if asks else []
