"""Real kernels for the tests of this folder: one per environment for all of them, fresh ones where a test needs one.

Starting a kernel, its torch and its zygote takes seconds; an environment's tests run together, so that it is done once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from environments import ENVIRONMENTS, Environment
from kernel.harness import RealKernel

STARTS = ("fork", "zygote")

Kernels = Callable[..., RealKernel]


@pytest.fixture(scope="session", params=ENVIRONMENTS, ids=lambda environment: environment.name)
def environment(request: pytest.FixtureRequest) -> Environment:
    """Each environment in turn; all tests run in one before they run in the other."""
    if not request.param.exists:
        pytest.skip(f"{request.param.python} is not there; `make test` builds it")
    return request.param


class SharedKernel:
    """A kernel with torch and nbaccel loaded, whose reaper and zygote run already; a fresh one after a failed test."""

    def __init__(self, environment: Environment, folders: pytest.TempPathFactory) -> None:
        self._environment = environment
        self._folders = folders
        self.kernel = self._start()

    def _start(self) -> RealKernel:
        kernel = RealKernel(self._environment, self._folders.mktemp("kernel"))
        try:
            kernel.do("import torch\n%load_ext nbaccel")
            for start in STARTS:
                kernel.do(f"import nbaccel; nbaccel.launch(int, 1, start_method={start!r})")
            kernel.do("_at_first = frozenset(globals())")
        except BaseException:
            kernel.close()
            raise
        return kernel

    def replace(self) -> None:
        self.close()
        self.kernel = self._start()

    def close(self) -> None:
        self.kernel.close()


@pytest.fixture(scope="session")
def shared_kernel(
    request: pytest.FixtureRequest, environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedKernel]:
    """The kernel that the tests of an environment share."""
    shared = SharedKernel(environment, tmp_path_factory)
    request.config.stash.setdefault(_SHARED, set()).add(shared)
    yield shared
    request.config.stash[_SHARED].discard(shared)
    shared.close()


_SHARED = pytest.StashKey[set[SharedKernel]]()
_SPOILT = pytest.StashKey[bool]()
"""Whether a test of this process has failed since its shared kernels were started."""


@pytest.hookimpl(tryfirst=True)  # before fixtures look at which processes are there
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start the shared kernel anew after a failure: what a test left in it half-way is no concern of the next one."""
    if item.config.stash.get(_SPOILT, False):
        item.config.stash[_SPOILT] = False
        for shared in item.config.stash.get(_SHARED, set()):
            shared.replace()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.config.stash[_SPOILT] = True
    return report


_FORGET = """
for _name in globals().keys() - _at_first:
    if not _name.startswith("_"):
        del globals()[_name]
"""


@pytest.fixture
def kernel(request: pytest.FixtureRequest, shared_kernel: SharedKernel) -> Iterator[RealKernel]:
    """The shared kernel, in its own folder and without names of other tests; one that leaves a process in it fails."""
    kernel = shared_kernel.kernel
    before = kernel.family()
    yield kernel
    if request.config.stash.get(_SPOILT, False):
        return
    kernel.settle()
    if kernel.is_alive:
        kernel.do(f"%cd -q {kernel.folder}\n{_FORGET}")
    assert kernel.is_alive, "the kernel died"
    assert kernel.extra(before) == {}, "a run left processes in the kernel"


@pytest.fixture
def patient(request: pytest.FixtureRequest, kernel: RealKernel) -> Iterator[None]:
    """The kernel waits for a front end's widgets as long as it takes: it is a test, on a machine that may be busy."""
    kernel.do("from nbaccel.notebook import stop_control as _steered; _patience_s = _steered._PATIENCE_S")
    kernel.do("_steered._PATIENCE_S = 60")
    yield
    if not request.config.stash.get(_SPOILT, False):
        kernel.settle()
        kernel.do("_steered._PATIENCE_S = _patience_s")


@pytest.fixture(params=STARTS)
def start(request: pytest.FixtureRequest) -> str:
    """Each way to start ranks."""
    return str(request.param)


@pytest.fixture
def new_kernel(environment: Environment, tmp_path: Path) -> Iterator[Kernels]:
    """Makes kernels of the test's own, for tests that kill, restart or look at a fresh one; they get `environ`."""
    kernels: list[RealKernel] = []

    def make(**environ: str) -> RealKernel:
        kernels.append(RealKernel(environment, tmp_path, **environ))
        return kernels[-1]

    yield make
    for kernel in reversed(kernels):
        kernel.close()
