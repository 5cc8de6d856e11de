"""What holds for every test: it leaves nothing behind. And the environments that notebook tests run in."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from jupyter_core.utils import ensure_event_loop

import rounding
from environments import ENVIRONMENTS, REPOSITORY, Environment
from leftovers import MARK, Descriptors, Handlers, Processes
from selection import in_order, scope, select
from suite import LARGE_PAGES, SLEEPING, TIMED

# Programs that we start carry this variable, and so does everything that they start.
os.environ[MARK] = str(os.getpid())

# Programs that we start run beside others.
os.environ.update(SLEEPING)

# This process has its large pages; programs that we start shall have what users have.
if os.environ.get(LARGE_PAGES[0]) == LARGE_PAGES[1]:
    del os.environ[LARGE_PAGES[0]]

# Importing and collecting the tests makes a million objects and no garbage, see `pytest_collection_finish`.
gc.disable()

# Python 3.14 would start the workers of this process's loaders by a server, which stays behind, and lets each of them
# import torch anew. Kernels, zygotes and programs that tests start have Python's own default.
multiprocessing.set_start_method("fork")

with suppress(ModuleNotFoundError):  # as on a machine that has a GPU, whose packages are not ours
    from hypothesis import settings

    settings.register_profile("tests", deadline=None)  # a busy machine is no failure of an example
    settings.load_profile("tests")

pytest_plugins = ["fixtures.kernels", "fixtures.launchers", "fixtures.objects", "fixtures.shells"]
"""Kernels, a launcher and notebooks without a kernel, for the tests of their folders and of features."""

_NOT_BY_TESTS = frozenset(
    {
        "PYTEST_CURRENT_TEST",  # pytest, around each phase
        "TORCHINDUCTOR_CACHE_DIR",  # importing torch._inductor
        "PYTORCH_NVML_BASED_CUDA_CHECK",  # importing lightning, or loading our extension
        "KMP_DUPLICATE_LIB_OK",  # importing sklearn
        "KMP_INIT_AT_FORK",
        "_RJEM_MALLOC_CONF",  # importing polars
    }
)
"""Variables that appear on first use of a library, whichever test comes first."""

_CACHES = frozenset({".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", "__pycache__"})


if rounding.is_asked_for():
    _PROGRAMS = tempfile.TemporaryDirectory(prefix="nbaccel-rounding-")
    rounding.round_by_rows_in_programs(Path(_PROGRAMS.name))
    rounding.when_torch_is_imported()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to `make test-all` what `selection` says, and begin with what takes long."""
    select(items)
    items[:] = in_order(items)
    if (when := os.environ.get(TIMED)) is not None:
        of_this_pass = [item for item in items if (item.get_closest_marker("timed") is None) is (when == "later")]
        config.hook.pytest_deselected(items=list(set(items) - set(of_this_pass)))
        items[:] = of_this_pass


def pytest_collection_finish() -> None:
    """Leave what is there now out of collections of garbage, here and in forked ranks.

    Thousands of tests with their modules are half a million objects. A test that collects garbage would look at all of
    them each time, and a forked rank that does would copy the pages on which they lie.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def leaves_old_objects_alone() -> None:
    """Collections of garbage leave alone what earlier files have made, as they do with what there was at first.

    Libraries that tests import, reports and caches grow to millions of objects: `free_memory`, which collects and
    looks at what is left, took five seconds in the thousandth test, and takes a fortieth of a second in the first.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a worker process of a parallel run whole files, which share fixtures, or whole folders."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    return Scheduling(config, log)


@pytest.fixture(scope="session", params=ENVIRONMENTS, ids=lambda environment: environment.name)
def environment(request: pytest.FixtureRequest) -> Environment:
    """Each environment in turn, the newest first; all tests run in one before they run in the next."""
    if not request.param.exists:
        pytest.skip(f"{request.param.python} is not there; `make test` builds it")
    return request.param


@pytest.fixture(scope="session", autouse=True)
def event_loop_of_the_process() -> None:
    """Clients of kernels make it when they first need one, and keep it: no test is charged for that."""
    ensure_event_loop()


@pytest.fixture(scope="session", autouse=True)
def profile_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Kernels run no start-up files of whoever runs the tests, and read no history that another Python has written."""
    os.environ["IPYTHONDIR"] = str(tmp_path_factory.mktemp("ipython"))


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that left a process, a thread, a variable, a process group, an open descriptor or a handler of a
    signal behind, or a file in the repository."""
    # IPython adds it, and up to version 7 it has a package `tests` there, which would hide ours from zygotes.
    sys.path[:] = [path for path in sys.path if not path.endswith(os.path.join("IPython", "extensions"))]
    processes = Processes.now()
    threads = set(threading.enumerate())
    environ = _environ()
    files = _files()
    descriptors, handlers = Descriptors.now(), Handlers.now()
    yield
    _forget_accelerates_state()
    complaints = [
        *(f"process {process}" for process in processes.end_new_ones(patience_s=2)),
        *(f"thread {thread.name}" for thread in _new_threads(threads, patience_s=1)),
        *(f"environment variable {name}" for name in _restore_environ(environ)),
        *(f"file {name} in the repository's root" for name in sorted(_files() - files)),
        *_process_groups(),
        *descriptors.left(),
        *(f"handler of {name}" for name in handlers.changed()),
    ]
    if complaints:
        pytest.fail("left behind: " + "; ".join(complaints), pytrace=False)


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _NOT_BY_TESTS}


def _restore_environ(before: dict[str, str]) -> list[str]:
    """Names that a test added, changed or removed; they are put back for the next one."""
    after = _environ()
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return changed


def _new_threads(before: set[threading.Thread], patience_s: float) -> list[threading.Thread]:
    """Non-daemon threads that a test started and that do not end by themselves."""
    new = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    for thread in new:
        thread.join(patience_s)
    return [thread for thread in new if thread.is_alive()]


def _process_groups() -> list[str]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    distributed.destroy_process_group()
    return ["an initialised process group"]


def _forget_accelerates_state() -> None:
    """Accelerate keeps who it is in its classes: a test that used it here would decide for every rank forked later."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def _files() -> set[str]:
    return {name for name in os.listdir(REPOSITORY) if name not in _CACHES and not name.startswith(".coverage")}
