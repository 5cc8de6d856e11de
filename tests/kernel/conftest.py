"""Real kernels for the tests of this folder: one per environment for all of them, fresh ones where a test needs one.

Starting a kernel, its torch and its zygote takes seconds; an environment's tests run together, so that it is done once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


@pytest.fixture(scope="session")
def shared_kernel(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealKernel]:
    """A kernel with torch and nbaccel loaded, whose guardian and zygote run already."""
    kernel = RealKernel(environment, tmp_path_factory.mktemp("kernel"))
    try:
        kernel.do("import torch\n%load_ext nbaccel")
        for start in STARTS:
            kernel.do(f"import nbaccel; nbaccel.launch(int, 1, start_method={start!r})")
        kernel.do("_at_first = frozenset(globals())")
        yield kernel
    finally:
        kernel.close()


_FORGET = """
for _name in globals().keys() - _at_first:
    if not _name.startswith("_"):
        del globals()[_name]
"""


@pytest.fixture
def kernel(shared_kernel: RealKernel) -> Iterator[RealKernel]:
    """The shared kernel, in its own folder and without names of other tests; one that leaves a process in it fails."""
    before = shared_kernel.family()
    yield shared_kernel
    shared_kernel.settle()
    if shared_kernel.is_alive:
        shared_kernel.do(f"%cd -q {shared_kernel.folder}\n{_FORGET}")
    assert shared_kernel.is_alive, "the kernel died"
    assert shared_kernel.extra(before) == {}, "a run left processes in the kernel"


@pytest.fixture
def patient(kernel: RealKernel) -> Iterator[None]:
    """The kernel waits for a front end's widgets as long as it takes: it is a test, on a machine that may be busy."""
    kernel.do("from nbaccel.notebook import stop_control as _steered; _patience_s = _steered._PATIENCE_S")
    kernel.do("_steered._PATIENCE_S = 60")
    yield
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
