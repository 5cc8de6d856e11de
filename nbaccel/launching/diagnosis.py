"""The one error of a failed run, the next step for it, and its record for `%accelerate why`. Runs in the kernel.

`FirstFailure` of the supervisor picks the rank; here its error is worded. The first rank that fails by the kernel's
clock is the cause, a lost connection is a consequence. Advice is added to errors whose own text does not name the next
step in the terms of a notebook. A `PostMortem` is text alone: it needs no process of the run, and keeps no tensor.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nbaccel.base.failures import Failure
from nbaccel.base.hardware import Survey
from nbaccel.base.quantities import number_spans
from nbaccel.errors import RankDied, RanksFailed
from nbaccel.launching.attempts import KillsElsewhere, LaunchAttempt, OomKillWatch
from nbaccel.launching.ipc.dead_loader_workers import WorkerEnd
from nbaccel.launching.ipc.reports import ErrorLink, RankReport, StackSnapshot, signal_name
from nbaccel.launching.ipc.spec import Task
from nbaccel.launching.ipc.user_code import cell_name as name_of_cell
from nbaccel.launching.kernel_holdings import KernelHolding
from nbaccel.launching.oom_restart import GiveUp, OomRestartPolicy, PartsRestartPolicy, Restart, wait_for_memory
from nbaccel.launching.processes.rank_results import RankResults
from nbaccel.launching.rank_failure import Naming, RankFailure
from nbaccel.namespace.payload import unpack_what_can_be_rebuilt

__all__ = [
    "FailedRun",
    "PostMortem",
    "advice",
    "diagnose",
    "list_of_ranks",
]


class FailedRun:
    """Answer to the failure of a run: another attempt, or its error. Made at its first failure, which loads this.

    Args:
        holdings: Returns the memory that the notebook itself holds on devices.
    """

    def __init__(self, holdings: Callable[[], Sequence[KernelHolding]]) -> None:
        self._smaller, self._whole = OomRestartPolicy(holdings), PartsRestartPolicy()
        self._report = ""

    def again(self, attempt: LaunchAttempt) -> Restart | None:
        """Return how the run starts again after `attempt`; None if it is over.

        The results of an attempt whose error will not be shown are released, and the memory of its ranks waited for.
        What the next one needs beyond this one, such as what cuts batches, is loaded.
        """
        decision = self._smaller.after(attempt)
        if isinstance(decision, GiveUp) and not decision.report:
            decision = self._whole.after(attempt) or decision
        if isinstance(decision, GiveUp):
            self._report = decision.report
            return None
        if attempt is not self._whole.failed:
            attempt.ended.close()
            wait_for_memory(attempt.spec.devices.gpus, attempt.ended, lambda: Survey.take().gpus)
        decision.spec.load_for_ranks()
        return decision

    def end(self, last: LaunchAttempt) -> tuple[LaunchAttempt, BaseException | None]:
        """Return the attempt that tells how the run ended, and its error; None if the last one ended well."""
        told, hint = self._whole.the_one_to_tell(last)
        is_clean = told.spec.start.method != "fork"
        return told, diagnose(told.ended, is_clean, told.host, name_of_cell, hint or self._report)


def diagnose(
    ended: RankResults,
    started_clean: bool,
    host: OomKillWatch | KillsElsewhere,
    cell_name: Naming,
    memory_report: str = "",
) -> BaseException | None:
    """Return the error of the run, or None if no rank failed.

    Args:
        started_clean: The ranks came from the zygote and know only the names that were sent to them.
        memory_report: The text to add if memory was the cause.
    """
    task, rank = ended.task, ended.ended_by
    if rank is None:
        return None
    if ended.hang is not None:
        text = str(ended.hang)
        if not ended.hang.is_certain:
            text += "\nThe run was ended by its hang timeout. Every rank must come to the same calls."
        return RanksFailed(text, rank, len(ended.reports))
    report = ended.reports[rank]
    peers = _peers(ended, rank)
    on = ended.node_of(rank) and f" on {ended.node_of(rank)}"
    world_size = len(ended.reports)
    if report is None and (lost := next((each for each in ended.lost[rank : rank + 1] if each), "")):
        there = [each for each, why in enumerate(ended.lost) if why == lost]
        return RankDied(
            f"{lost}, where {list_of_ranks(there)} of {world_size} ran{peers and '; ' + peers}. {_what_is_left(ended)}",
            rank,
            world_size,
            ended.exit_codes[rank],
        )
    if report is None:
        return RankDied(
            f"rank {rank} of {world_size}{on} {_death(ended.exit_codes[rank], host)}{peers and '; ' + peers}. "
            f"{ended.why_not_again or f'{_what_is_left(ended)} {memory_report}'}".rstrip(),
            rank,
            world_size,
            ended.exit_codes[rank],
        )
    if report.status == "exited":
        code = "" if report.exit_code is None else repr(report.exit_code)
        return RanksFailed(
            f"rank {rank} of {world_size} called sys.exit({code}) or exit(), which ends "
            f"{'the cell and not the ranks' if ended.stays else 'the ranks and not the notebook'}"
            f"{peers and '; ' + peers}. To end a cell early, leave the loop or raise an error of your own.",
            rank,
            world_size,
        )
    error = _travelled(report, task)
    hint = (_missing_name(report, task) if started_clean else "") or memory_report
    hint = hint or advice(report.links, host, is_fork=not started_clean)
    alike = ended.failed_alike
    failure = RankFailure(rank, world_size, report.links, error, peers, alike, ended.node_of(rank))
    return failure.exception(cell_name, hint)


def _what_is_left(ended: RankResults) -> str:
    if ended.stays:
        return "Its variables are gone, those of ranks that live are not."
    return "Variables in the ranks are gone; the next launch starts fresh ones."


def _travelled(report: RankReport, task: Task) -> BaseException | None:
    """Return the user's exception object, if it could be pickled and can be unpickled here."""
    try:
        values, _ = unpack_what_can_be_rebuilt(
            report.payload_fd, namespace=task.namespace, anchored=task.anchored, placed=task.placed
        )
        error = values.get("error")
        str(error)  # its text is needed to show it, and must not raise a second error then
    except Exception:  # a user's class may do anything when it is rebuilt; the report in text is enough
        return None
    return error if isinstance(error, BaseException) else None


def _missing_name(report: RankReport, task: Task) -> str:
    """Return a hint for a NameError: a pickled exception loses its `name`, but its text has it."""
    last = report.links[-1]
    found = re.search(r"name '(\w+)' is not defined", last.headline[-1] if last.headline else "")
    if last.type_name != "NameError" or found is None or found[1] not in (task.namespace or {}):
        return ""
    if task.home is not None:
        return (
            f"The notebook has `{found[1]}`, the ranks do not: %accelerate push {found[1]} sends it, or says why not."
        )
    return (
        f"The notebook has `{found[1]}`, but the cell does not mention it, so it was not sent to the ranks, which "
        f"here start from a clean process. Send it with --in {found[1]}"
    )


def _death(exit_code: int, host: OomKillWatch | KillsElsewhere) -> str:
    if exit_code >= 0:
        return (
            f"ended with exit code {exit_code} before its work was done (os._exit, or a library that ends the process)"
        )
    name = signal_name(-exit_code)
    text = f"was killed by {name} (signal {-exit_code})"
    if name != "SIGKILL":
        return text
    return f"{text}: {host.explain_kill()}"


def _peers(ended: RankResults, cause: int) -> str:
    """Return one clause on the other ranks: which failed too, which had to be stopped; empty if all failed alike."""
    if ended.failed_alike:
        return ""
    same = ended.alike(cause)
    gone = {rank for rank, why in enumerate(ended.lost) if why}
    stopped = [
        rank for rank in _others(ended, cause) if rank not in {*same, *gone} and not _is_done(ended.reports[rank])
    ]
    parts = []
    if same:
        parts.append(f"the same on {list_of_ranks(same)}")
    if stopped:
        parts.append(f"{list_of_ranks(stopped)} had to be stopped")
    return "; ".join(parts)


def _others(ended: RankResults, cause: int) -> Sequence[int]:
    return [rank for rank in range(len(ended.reports)) if rank != cause]


def _is_done(report: RankReport | None) -> bool:
    return report is not None and report.status == "ok"


def list_of_ranks(ranks: Sequence[int]) -> str:
    """Format ranks: "rank 1", "ranks 1-3", "ranks 0, 2"."""
    return f"rank{'s' * (len(ranks) != 1)} {number_spans(ranks)}"


_LITTLE_SHARED_MEMORY = (
    "/dev/shm is full, and DataLoader workers pass batches through it: use num_workers=0, smaller batches or a lower "
    "prefetch_factor, or start the container with --shm-size."
)
_FEW_FILES = (
    "This process may open no more files, and DataLoader workers pass each tensor as one: call "
    "torch.multiprocessing.set_sharing_strategy('file_system') in the cell, or use num_workers=0."
)

# https://github.com/NVIDIA/nccl/issues/525: NCCL_SHM_DISABLE=1 works, and so does a larger /dev/shm.
_FULL_FOR_NCCL = (
    "/dev/shm is full, and NCCL passes through it what GPUs without a direct way exchange: start the container with "
    "--shm-size=1g, or set os.environ['NCCL_SHM_DISABLE'] = '1' in a cell before, which is slower."
)
_ONE_GPU_FOR_TWO = (
    "Two ranks use one GPU, and NCCL wants one for each: put the model on accelerator.device, or on the device that is "
    "current when the rank begins, instead of a number, or use fewer ranks (-n)."
)
_NO_CODE = (
    "torch, or the extension that the traceback names, was built without code for this GPU; %accelerate doctor says "
    "for which torch was. Install a build that has it (of torch: one for CUDA 12.6, cu126, for GPUs older than the T4, "
    "one for a newer CUDA for the latest), or use --cpu."
)
_BUSY = (
    "The GPU takes one process at a time (exclusive mode) and another one holds it, or it takes none: `nvidia-smi` "
    "shows who, and the mode. It may be this notebook, if it has used CUDA: restart its kernel. An administrator lets "
    "several in by `nvidia-smi -c DEFAULT`."
)
_WORKER_ON_DEVICE = (
    "A worker of a DataLoader used CUDA, which no fork of a process that uses it can: let the data set return tensors "
    "of the CPU and move batches in the loop, or give the DataLoader multiprocessing_context='spawn'."
)
_BROKEN_FORK = (
    "The rank is a fork of the notebook, which has used CUDA, or a backward of autograd, in a way that no fork "
    "survives: restart the kernel, and ranks can be forked again, or let them start from a clean process by --start "
    "zygote (in launch: start_method='zygote')."
)
_SILENT_DRIVER = (
    "The driver of the GPU does not let this process in: `nvidia-smi` in a terminal says why. After an update of the "
    "driver the machine has to be restarted; --cpu runs without a GPU meanwhile."
)

_WRAPPED_MODEL = (
    r"The model was prepared, so it is wrapped for training in several ranks; what your class adds to a model is under "
    r"the wrapper: accelerator.unwrap_model(model).\1"
)

_OTHER_CARD = (
    "Each rank computes on a GPU of its own, and a number such as 'cuda:0' names the same GPU in all ranks. "
    "In its place write device = 'cuda', or device = accelerator.device."
)
_NO_SUCH_CARD = (
    "There is no GPU of that number: a cell that names no rank, or that says 'cuda:0', has each rank see its own GPU "
    "alone, as cuda:0. Leave the number out: device = 'cuda'."
)
_SHARDED = (
    "The parameters are sharded (strategy fsdp): outside of the model's forward each is a DTensor with this rank's "
    "rows, which does not compute with plain tensors. .full_tensor(), called on every rank, is the whole one, and "
    "accelerator.get_state_dict(model) has all of them. A penalty on weights cannot be added to the loss: use the "
    "optimizer's weight_decay, or add its gradient to parameter.grad. A copy of the model that averages its weights "
    "has to be prepared too. --strategy ddp keeps parameters whole."
)
_WHOLE_MATRICES = (
    "torch does not compute this with a parameter of which each rank has rows (strategy fsdp). Initialise, prune and "
    "parametrize (weight_norm, spectral_norm) before prepare; .full_tensor(), called on every rank, is the whole "
    "parameter. AdamW, SGD, Adagrad and RMSprop train shards; Adafactor, Muon and LBFGS compute with whole matrices: "
    "use --strategy ddp."
)
_REPLACED_PARAMETER = (
    "A parameter of a sharded model (strategy fsdp) was replaced by another one, which its forward does not gather: "
    "write the values into the parameter, by load_state_dict without assign=True or by parameter.data = …, or replace "
    "it before prepare."
)
_SHARDED_MODEL = (
    "The model is sharded (strategy fsdp), and cannot be copied or pickled, nor cast by .half(), .bfloat16() or "
    ".double() after prepare: cast it before. A copy of its state dict keeps the best weights, "
    "accelerator.get_state_dict(model), called on every rank, fills a second model, "
    "accelerator.save_model(model, folder) writes it, and --out model brings it into the notebook."
)
_HALF_OF_A_STATE = (
    "The optimizer has a part of the state of a parameter only: a step of it has run out of memory while it made that "
    "state, in the notebook's own process if not in an earlier run. The rest cannot be made up: run the cell again "
    "that makes the optimizer, or give it a state from a checkpoint."
)
_FREED_WEIGHTS = (
    "A backward needs weights that FSDP had freed after the forward, as a second derivative does (create_graph=True, a "
    "gradient penalty), which FSDP2 does not support: use --strategy ddp."
)
_SPARSE_GRADIENTS = (
    "FSDP cannot cut sparse gradients into rows: leave out sparse=True of nn.Embedding, or use --strategy ddp."
)

_DATABASE_OF_THE_NOTEBOOK = (
    "A connection of SQLite works in the process that has opened it alone, and this one belongs to the notebook: open "
    "the database in this cell, with sqlite3.connect()."
)

_TABLE = (
    (re.compile(r"(creating|attaching to) shared memory segment /dev/shm/nccl-|failed to extend /dev/shm/nccl-"),
     _FULL_FOR_NCCL),
    (re.compile(r"Duplicate GPU detected"), _ONE_GPU_FOR_TWO),
    (re.compile(r"no kernel image is available"), _NO_CODE),
    (re.compile(r"CUDA-capable device\(s\) is/are busy or unavailable"), _BUSY),
    (re.compile(r"in DataLoader worker process .*(Cannot re-initialize CUDA|CUDA error: initialization error)", re.S),
     _WORKER_ON_DEVICE),
    (re.compile(r"unable to (allocate|open|resize|mmap) .*shared memory|<(/torch_|filename).*No space left"),
     _LITTLE_SHARED_MEMORY),
    (re.compile(r"DataLoader worker .* killed by signal: Bus error"), _LITTLE_SHARED_MEMORY),
    (re.compile(r"Too many open files|received \d+ items of ancdata"), _FEW_FILES),
    (re.compile(r"^AttributeError: '(?:Replica|DistributedDataParallel)' object has no attribute '(\w+)'", re.M),
     _WRAPPED_MODEL),
    (re.compile(r"same device.*\bcuda:(\d+)\b.*\bcuda:(?!\1\b)\d|"
                r"device_ids\[0\].* found one of them on device: cuda|got device_ids .*module parameters .*cuda", re.S),
     _OTHER_CARD),
    (re.compile(r"CUDA error: invalid device ordinal"), _NO_SUCH_CARD),
    (re.compile(r"unevenly sharded|along the sharded dimension|require placement changes|as_strided not supported with|"
                r"not have a sharding strategy|Sharding propagation failed"), _WHOLE_MATRICES),
    (re.compile(r"\bDTensor\b|not supported for tensor subclasses"), _SHARDED),
    (re.compile(r"has no attribute '_local_tensor'"), _REPLACED_PARAMETER),
    (re.compile(r"FSDP does not support deepcopy|pickle.*\bFSDP\w+|Couldn't swap \w+"), _SHARDED_MODEL),
    (re.compile(r"^KeyError: '(exp_avg|exp_avg_sq|exp_inf|square_avg|grad_avg|acc_delta|momentum_buffer)'$", re.M),
     _HALF_OF_A_STATE),
    (re.compile(r"setStorage: .* out of bounds for storage of size 0"), _FREED_WEIGHTS),
    (re.compile(r"fsdp::chunk_cat.*Sparse"), _SPARSE_GRADIENTS),
    (re.compile(r"SQLite objects created in a thread can only be used in that same thread"), _DATABASE_OF_THE_NOTEBOOK),
)  # fmt: skip
"""Patterns of error texts, each with its advice.

The texts are those of torch (StorageSharing.cpp, MapAllocator.cpp, dataloader.py), CUDA, NCCL and the system.
"""

_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGBUS, signal.SIGTRAP, signal.SIGSYS}


def advice(links: Sequence[ErrorLink], host: OomKillWatch | KillsElsewhere, *, is_fork: bool = True) -> str:
    """Return one line of advice on an error, the last of `links`; empty if the error's own text is enough.

    Args:
        is_fork: The rank was a copy of the notebook's process.

    Example:
        >>> host = OomKillWatch()
        >>> advice([ErrorLink("OSError", ["OSError: [Errno 24] Too many open files"], [])], host)[:37]
        'This process may open no more files, '
        >>> replica = ErrorLink("AttributeError", ["AttributeError: 'Replica' object has no attribute 'generate'"], [])
        >>> advice([replica], host)[-40:]
        'accelerator.unwrap_model(model).generate'
        >>> advice([ErrorLink("ValueError", ["ValueError: expected 10 classes, got 11"], [])], host)
        ''
    """
    if not links:
        return ""
    last = links[-1]
    text = "\n".join(last.headline)
    known = next((found.expand(line) for pattern, line in _TABLE if (found := pattern.search(text))), "")
    if not known and last.kind is Failure.BROKEN_FORK:
        return _BROKEN_FORK if is_fork else _SILENT_DRIVER
    return known or ("" if last.worker is None else _dead_worker(last.worker, host))


def _dead_worker(end: WorkerEnd, host: OomKillWatch | KillsElsewhere) -> str:
    """Say how a worker of a DataLoader ended, and what to do about it."""
    who = "A DataLoader worker of this rank" + (f" (process {end.pid})" if end.pid else "")
    if end.unknown_name and (end.exit_code is None or end.exit_code > 0):
        return (
            f"The workers of this DataLoader are started by {end.start_method}, so they cannot know "
            f"{end.unknown_name}, which is defined in the notebook. In ranks workers are forked, and know it, unless "
            "multiprocessing_context or set_start_method says otherwise: leave that out, or move "
            f"{end.unknown_name} into a module and import it."
        )
    if end.exit_code is None:
        return (
            f"{who} ended while it handed over a batch; how is not known. What it printed stands in the output. "
            "num_workers=0 reads the data in the rank itself."
        )
    if end.exit_code >= 0:
        return (
            f"{who} ended with exit code {end.exit_code}: by an error of its own, whose traceback it printed into the "
            "output, or by sys.exit or os._exit in code of the data set. num_workers=0 reads the data in the rank "
            "itself and shows where."
        )
    name = signal_name(-end.exit_code)
    if -end.exit_code == signal.SIGKILL:
        return (
            f"{who} was killed by {name}: {host.explain_kill()}. Each worker has a copy of what the data set holds: "
            "fewer of them (num_workers) need less memory."
        )
    if -end.exit_code == signal.SIGBUS:  # what a write to a full /dev/shm comes to in some versions of torch
        return f"{who} crashed with {name}. Most likely {_LITTLE_SHARED_MEMORY}"
    if -end.exit_code in _CRASHES:
        return (
            f"{who} crashed with {name}, in compiled code that reads the data. num_workers=0 shows whether it crashes "
            "in the rank itself too; a library that starts threads may not survive the fork of a worker."
        )
    return f"{who} was ended by {name}, which code of the data set or another process sent. Memory is not the cause."


_WIDTH = 240


@dataclass(frozen=True, slots=True)
class PostMortem:
    """The record of a run that ended badly.

    Args:
        title, end, headline: "Cell In[5]" or "train(2)", "failed", the error in one line.
        first: The rank that failed first, if one did.
        fates: The end of each rank, in words.
        snapshots: By rank, of those that left one.
        is_everyones: All of several ranks failed with the same error.
    """

    title: str
    end: str
    headline: str
    first: int | None
    fates: tuple[str, ...]
    snapshots: Mapping[int, StackSnapshot]
    is_everyones: bool = False

    @classmethod
    def of(cls, title: str, end: str, error: BaseException | None, ended: RankResults) -> PostMortem | None:
        """Return the record of a run; None without an error."""
        if error is None:
            return None
        return cls(
            title,
            end,
            _headline_of_error(error),
            ended.ended_by,
            tuple(map(_fate, ended.reports, ended.exit_codes, ended.killed_by_us)),
            {rank: report.snapshot for rank, report in enumerate(ended.reports) if report is not None},
            ended.failed_alike,
        )

    @classmethod
    def of_this_process(cls, title: str, error: BaseException, snapshot: StackSnapshot) -> PostMortem:
        """Return the record of a run in the kernel's own process, whose stack `snapshot` shows."""
        is_stopped = isinstance(error, KeyboardInterrupt)
        return cls(
            title,
            "stopped" if is_stopped else "failed",
            _headline_of_error(error),
            None if is_stopped else 0,
            ("was interrupted" if is_stopped else f"raised {type(error).__name__}",),
            {0: StackSnapshot.from_json(snapshot.to_json())},
        )


def _headline_of_error(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}{text and ': '}{text}"[:_WIDTH]


def _fate(report: RankReport | None, exit_code: int, was_killed: bool) -> str:
    if report is None and was_killed:
        return "did not hear the interrupt in time and was killed; it left no snapshot"
    if report is None:
        how = f"was killed by {signal_name(-exit_code)}" if exit_code < 0 else f"ended with exit code {exit_code}"
        return f"{how}; it left no snapshot"
    if report.status == "ok":
        return "had finished"
    if report.status == "stopped":
        return "was interrupted"
    if report.is_consequence:
        return "lost its peer"
    return "exited" if report.status == "exited" else f"raised {report.links[-1].type_name}"
