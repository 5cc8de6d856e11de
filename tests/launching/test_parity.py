"""Fork and zygote are one language: a program cannot tell which of the two its ranks came by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from environments import ENVIRONMENTS, Environment
from kernel.harness import RealKernel, accelerate

PREPARES = """
import csv, decimal, gc, locale, logging, os, random, resource, socket, sys, warnings
import matplotlib
import numpy as np
import torch
%load_ext nbaccel

os.makedirs("elsewhere/lib", exist_ok=True)
with open("elsewhere/lib/only_here.py", "w") as file:
    file.write("WORD = 'found'")
os.chdir("elsewhere")
sys.path.insert(0, os.path.abspath("lib"))
os.environ["PARITY"] = "set in the kernel"
os.environ.pop("HOME", None)
warnings.filterwarnings("error", message="parity.*")
warnings.filterwarnings("ignore", category=FutureWarning)
decimal.getcontext().prec = 40
np.seterr(divide="raise"); np.set_printoptions(precision=3)
random.seed(3); random.random()
np.random.seed(4); np.random.rand()
torch.manual_seed(5); torch.rand(1)
torch.set_default_dtype(torch.float64)
torch.set_float32_matmul_precision("high")
torch.use_deterministic_algorithms(True, warn_only=True)
torch.backends.cudnn.benchmark = True
os.umask(0o027); sys.setrecursionlimit(4321); locale.setlocale(locale.LC_ALL, "C.UTF-8")
gc.set_threshold(5000, 11, 12)
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
socket.setdefaulttimeout(2.5)  # of the program's own connections
csv.register_dialect("bars", delimiter="|"); matplotlib.rcParams["lines.linewidth"] = 7.0
logging.basicConfig(level=logging.INFO); logging.addLevelName(15, "FINE"); logging.disable(5)
logging.getLogger("matplotlib.axes").setLevel("ERROR")
log = logging.getLogger("of_the_notebook"); log.setLevel("DEBUG"); log.propagate = False
log.addHandler(logging.FileHandler("notebook.log"))
log.handlers[0].setFormatter(logging.Formatter("said: %(message)s"))

class Base:
    def who(self):
        return type(self).__name__

def looks():
    import only_here
    caught = []
    for category, message in ((UserWarning, "parity matters"), (FutureWarning, "ignored")):
        try:
            warnings.warn(message, category)
        except UserWarning as warning:
            caught.append(str(warning))
    shell = get_ipython()
    return {
        "random": [random.random() for _ in range(3)],
        "numpy": np.random.rand(3).tolist(),
        "torch": torch.rand(3).tolist(),
        "torch_seed": torch.initial_seed(),
        "arithmetic": [str(decimal.Decimal(1) / 7), np.geterr(), repr(np.float64(1) / np.arange(1, 4))],
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": [torch.are_deterministic_algorithms_enabled(),
                          torch.is_deterministic_algorithms_warn_only_enabled()],
        "cudnn": torch.backends.cudnn.benchmark,
        "threads": [torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]],
        "warnings": caught,
        "filters": [(kind, category.__name__) for kind, _, category, _, _ in warnings.filters],
        "cwd": os.getcwd(),
        "path": sys.path,
        "only_here": only_here.WORD,
        **{f"${name}": value for name, value in os.environ.items() if name not in NEW_IN_EVERY_RUN},
        "shell": shell is not None,
        "echo": shell.getoutput("echo from a shell"),
        "name": __name__,
        "class": [Base().who(), Base.__module__],
        "stdin": [sys.stdin.isatty(), os.read(0, 1).hex()],
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP)],
        "mask": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "leader": os.getsid(0) == os.getpid(),
        "modules": [name in sys.modules for name in ("torch._dynamo", "torch.nn.parallel")],
        "python": [sys.executable, sys.prefix, sys.flags.ignore_environment],
        "recursion": sys.getrecursionlimit(),
        "umask": os.umask(0o27),
        "locale": locale.setlocale(locale.LC_ALL),
        "collections": gc.get_threshold(),
        "limit": resource.getrlimit(resource.RLIMIT_CORE),
        "connections": socket.getdefaulttimeout(),
        "dialects": [sorted(csv.list_dialects()), csv.get_dialect("bars").delimiter],
        "plots": matplotlib.rcParams["lines.linewidth"],
        "logging": [logging.root.level, logging.getLevelName(15), logging.root.manager.disable,
                    logging.getLogger("matplotlib.axes").level, log.level, log.propagate,
                    [type(handler).__name__ for handler in logging.root.handlers],
                    [(type(each).__name__, each.baseFilename, each.formatter._fmt) for each in log.handlers]],
    }

import signal
NEW_IN_EVERY_RUN = {"MASTER_PORT", "NBACCEL_LAUNCH_ID", "NBACCEL_RUN_FOLDER"}
"""

ASKS_A_CELL = """
facts = looks()
facts["cell"] = [__name__, get_ipython().user_ns is globals(), sys.modules["__main__"].__dict__ is globals()]
print("printed", facts["echo"])
display({"shown": facts["name"]})
!echo by the shell
%time facts["timed"] = 1
1 + 1
"""


@pytest.fixture(scope="module", params=ENVIRONMENTS, ids=lambda environment: environment.name)
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealKernel]:
    """A kernel whose surroundings are unlike those that a fresh process finds."""
    environment: Environment = request.param
    if not environment.exists:
        pytest.skip(f"{environment.python} is not there; `make test` builds it")
    kernel = RealKernel(environment, tmp_path_factory.mktemp("parity"))
    try:
        kernel.do(PREPARES)
        for start in ("fork", "zygote"):  # their helpers are there before the first test
            kernel.do(f"import nbaccel; nbaccel.launch(int, 1, start_method={start!r})")
        yield kernel
    finally:
        kernel.close()


def assert_alike(fork: dict[str, Any], zygote: dict[str, Any]) -> None:
    names = sorted(fork.keys() | zygote.keys())
    different = {name: (fork.get(name), zygote.get(name)) for name in names if fork.get(name) != zygote.get(name)}
    assert different == {}


@pytest.mark.sample(1)
def test_a_cell_finds_the_same_under_both_starts(kernel: RealKernel) -> None:
    cells, facts = {}, {}
    for start in ("fork", "zygote"):
        cells[start] = kernel.do(accelerate(ASKS_A_CELL, start, n=1, flags="--out facts --seed 11"))
        facts[start] = kernel.value("facts")
    assert_alike(facts["fork"], facts["zygote"])
    assert facts["fork"]["only_here"] == "found"
    assert len(facts["fork"]["arithmetic"][0]) == 42
    assert facts["fork"]["arithmetic"][1]["divide"] == "raise"
    assert facts["fork"]["warnings"] == ["parity matters"]
    assert facts["fork"]["logging"][:6] == [20, "FINE", 5, 40, 10, False]
    assert (facts["fork"]["plots"], facts["fork"]["connections"], facts["fork"]["umask"]) == (7.0, 2.5, 0o27)
    shown = {start: [cell.displays, cell.result] for start, cell in cells.items()}
    assert shown["fork"] == shown["zygote"]
    assert words(cells["fork"].printed) == words(cells["zygote"].printed)


def words(printed: str) -> list[str]:
    """Without what a clock printed."""
    return [line for line in printed.splitlines() if "time" not in line.lower() and "CPU times" not in line]


@pytest.mark.sample(1)
def test_a_function_finds_the_same_under_both_starts(kernel: RealKernel) -> None:
    found = [kernel.value(f"nbaccel.launch(looks, 2, start_method={start!r}).values") for start in ("fork", "zygote")]
    for fork, zygote in zip(*found, strict=True):
        assert_alike(fork, zygote)


def test_handlers_of_the_notebook_write_from_ranks_and_one_that_cannot_be_sent_is_named(kernel: RealKernel) -> None:
    kernel.do(
        """
class Kept(logging.Handler):
    def __init__(self, held):
        super().__init__()
        self.held = held

    def emit(self, record):
        pass

log.addHandler(Kept((each for each in ())))
as_libraries_make_it = logging.StreamHandler()
as_libraries_make_it.flush = sys.stderr.flush
logging.getLogger("of_a_library").addHandler(as_libraries_make_it)
open("notebook.log", "w").close()
"""
    )
    try:
        for count, start in enumerate(("fork", "zygote"), 1):
            cell = kernel.do(accelerate("log.info('a step')\nlogging.info('from the root')", start, n=1))
            assert ("the Kept of logger of_the_notebook: set in the notebook, and not in ranks" in cell.stderr) == (
                start == "zygote"
            )
            assert "of_a_library" not in cell.stderr
            assert "from the root" in cell.stderr
            assert kernel.value("open('notebook.log').read()") == "said: a step\n" * count
    finally:
        kernel.do("del log.handlers[1:], logging.getLogger('of_a_library').handlers[:]")


@pytest.mark.sample(1)
def test_a_launched_function_goes_on_with_the_kernels_random_numbers(kernel: RealKernel) -> None:
    """As in Accelerate: without a seed every rank continues the streams of the kernel, which keeps its own place."""
    draws = "[random.random(), float(np.random.rand()), float(torch.rand(1))]"
    kernel.do(f"def draw(): return {draws}\nstates = random.getstate(), np.random.get_state(), torch.get_rng_state()")
    ranks = [kernel.value(f"nbaccel.launch(draw, 1, start_method={start!r}).value") for start in ("fork", "zygote")]
    assert ranks == [kernel.value("draw()")] * 2


FLAGS = """
def reads():
    return {
        "precisions": [getattr(owner, "fp32_precision", None) for owner in (
            torch.backends, torch.backends.cudnn, getattr(torch.backends.cudnn, "conv", None),
            torch.backends.cuda.matmul)],
        "dtype": str(torch.get_default_dtype()),
        "device": torch.empty(0).device.type,
        "grad": torch.is_grad_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "cudnn": [torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic],
        "printed": repr(torch.full((), 1 / 3, device="cpu")),
    }
"""

SETS_FLAGS = """
torch.set_default_device("meta")
torch.set_grad_enabled(False)
torch.autograd.set_detect_anomaly(True)
torch.backends.cuda.enable_flash_sdp(False)
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
torch.backends.cudnn.enabled = False
torch.backends.cudnn.deterministic = True
torch.set_printoptions(precision=2)
"""

PUTS_FLAGS_BACK = """
torch.set_default_device(None)
torch.set_grad_enabled(True)
torch.autograd.set_detect_anomaly(False)
torch.backends.cuda.enable_flash_sdp(True)
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
torch.backends.cudnn.enabled = True
torch.backends.cudnn.deterministic = False
torch.set_printoptions(profile="default")
"""


def test_torchs_switches_stand_alike_under_both_starts_and_as_in_the_notebook(kernel: RealKernel) -> None:
    """Also a fork loses the device by default and whether gradients are on: it is made by another thread."""
    kernel.do(FLAGS)
    before = kernel.value("reads()")
    try:
        kernel.do(SETS_FLAGS + "sent = torch.zeros(2, device='cpu')")
        here = kernel.value("reads()")
        assert (here["device"], here["grad"], here["printed"]) == ("meta", False, "tensor(0.33)")
        for start in ("fork", "zygote"):
            assert kernel.value(f"nbaccel.launch(reads, 2, start_method={start!r}).values") == [here, here]
            kernel.do(accelerate("found, sent = reads(), sent + 1", start, n=1, flags="--out found,sent"))
            assert kernel.value("found") == here
        assert kernel.value("[sent.tolist(), sent.device.type]") == [[2.0, 2.0], "cpu"]
    finally:
        kernel.do(PUTS_FLAGS_BACK)
    assert kernel.value("reads()") == before


@pytest.mark.parametrize(
    "sets",
    [
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.fp32_precision = 'tf32'",
        "torch.backends.cudnn.fp32_precision = 'ieee'",
        "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    ],
)
def test_ranks_start_alike_after_either_of_torchs_interfaces_to_tf32(kernel: RealKernel, sets: str) -> None:
    """Where both have been used, torch refuses to answer by the older one."""
    kernel.do(FLAGS)
    if kernel.value("not hasattr(torch.backends.cudnn, 'conv')"):
        pytest.skip("torch 2.9 brought precisions by operation")
    try:
        kernel.do(f"torch.set_float32_matmul_precision('highest')\n{sets}")
        here = kernel.value("reads()")
        for start in ("fork", "zygote"):
            assert kernel.value(f"nbaccel.launch(reads, 1, start_method={start!r}).value") == here
    finally:
        kernel.do(
            "for part in (torch.backends, torch.backends.cudnn, torch.backends.cuda.matmul):\n"
            "    part.fp32_precision = 'none'\n"
            "torch.backends.cudnn.allow_tf32 = True\n"
            "torch.set_float32_matmul_precision('high')"
        )
