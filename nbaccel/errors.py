"""The errors of nbaccel, drawn as a tree; raised in the kernel and in ranks alike.

    NbaccelError
    ├── LaunchRefused            nothing was started; the notebook is as it was
    │   ├── CannotFork           the kernel's state would break forked ranks
    │   ├── CannotSend           a name of the notebook cannot be sent to the ranks
    │   ├── NoSuchDevice         more processes or other devices were asked for than there are
    │   └── NestedLaunch         a rank tried to launch ranks
    ├── FeatureMissing           a folder of nbaccel/features is not there, and what it has was asked for
    ├── RanksFailed              ranks were started and one of them failed; knows rank and world_size
    │   └── RankDied             the process ended without a report: a signal or an exit code
    ├── CheckFailed              --check --strict found something that will go wrong; knows what
    ├── ResultsMissing           the run is over, but a name of --out did not come back
    ├── NoInput                  code in a rank asked for keyboard input
    ├── NotInRanks               code in a rank waits for what runs in the notebook alone: a thread, a loader's worker
    ├── StayedInRank             a part of an object that a cell left could not leave its rank, and is asked for
    ├── NotPrepared              several ranks, and a model that would train separately in each
    ├── FlagWithoutEffect        a flag without which work is lost has no effect above this loop; nothing was trained
    ├── FlagConflict             a flag asks for what this loop does by itself, or makes impossible; nothing was trained
    ├── CannotCut                a loop does what it may only do with whole batches, and its batches come in parts
    ├── PeerFailed               another rank failed in a block that this one was waiting for
    ├── CollectiveMismatch       ranks called different collectives, or with different shapes
    ├── CannotContinue           a file of answers belongs to other items, or to another function
    ├── CannotResume             the program cannot continue from the checkpoint
    ├── CannotSave               a checkpoint could not be written; the older one is as it was
    ├── CheckpointCorrupt        a checkpoint is damaged or unfinished; knows the file
    ├── NoBatchSizeFits          find_executable_batch_size tried every size down to 1; knows which
    ├── CannotSplit              a batch cannot be cut into micro-batches without guessing
    ├── StepCorrupted            an optimizer ran out of memory half-way through its update
    └── UntrustedPickle          a checkpoint holds a pickle, which could run code; trust=True loads it

A message says what happened, where (rank, cell, step), the numbers with units, and the next move.
"""

from __future__ import annotations

__all__ = [
    "CannotContinue",
    "CannotCut",
    "CannotFork",
    "CannotResume",
    "CannotSave",
    "CannotSend",
    "CannotSplit",
    "CheckFailed",
    "CheckpointCorrupt",
    "CollectiveMismatch",
    "FeatureMissing",
    "FlagConflict",
    "FlagWithoutEffect",
    "LaunchRefused",
    "NbaccelError",
    "NestedLaunch",
    "NoBatchSizeFits",
    "NoInput",
    "NoSuchDevice",
    "NotInRanks",
    "NotPrepared",
    "PeerFailed",
    "RankDied",
    "RanksFailed",
    "ResultsMissing",
    "RunStopped",
    "StayedInRank",
    "StepCorrupted",
    "UntrustedPickle",
]


class NbaccelError(Exception):
    """Base of every error that nbaccel itself raises.

    Example:
        >>> try:
        ...     raise CannotSave("no space", path="checkpoints/step_100")
        ... except NbaccelError as error:  # whatever nbaccel raises, and nothing that the program raises
        ...     type(error).__name__
        'CannotSave'
    """


class LaunchRefused(NbaccelError):
    """No rank was started; the message says why and what to do.

    Example:
        >>> import nbaccel
        >>> try:
        ...     nbaccel.launch(print, 2, devices="97,98")
        ... except LaunchRefused as refused:  # nothing has run
        ...     type(refused).__name__
        'NoSuchDevice'
    """


class CannotFork(LaunchRefused):
    """Forked ranks could not work, and ``start_method="fork"`` was asked for.

    Example:
        >>> import nbaccel
        >>> model = model.cuda()  # doctest: +SKIP
        >>> nbaccel.launch(train, 2, start_method="fork")  # doctest: +SKIP
        Traceback (most recent call last):
        CannotFork: ...
    """


class CannotSend(LaunchRefused):
    """Names that the ranks need cannot be pickled.

    Args:
        names: The reason for each name, such as ``{"log_file": "TextIOWrapper cannot be pickled"}``.

    Example:
        >>> error = CannotSend("...", names={"log_file": "TextIOWrapper cannot be pickled"})
        >>> list(error.names)
        ['log_file']
    """

    def __init__(self, message: str, names: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.names = dict(names or {})


class NoSuchDevice(LaunchRefused):
    """More processes than devices, or a device that this machine does not have.

    Example:
        >>> import nbaccel
        >>> nbaccel.launch(print, 2, devices="97,98")  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        NoSuchDevice: ...
    """


class NestedLaunch(LaunchRefused):
    """A rank tried to start ranks of its own.

    Example:
        >>> import nbaccel
        >>> nbaccel.launch(nbaccel.launch, 2, print, 2)  # doctest: +SKIP
        Traceback (most recent call last):
        NestedLaunch: ...
    """


class FeatureMissing(NbaccelError, ImportError):
    """This installation lacks a feature that was asked for. The message names the feature and who asked.

    Example:
        >>> issubclass(FeatureMissing, ImportError)
        True
    """


class RanksFailed(NbaccelError):
    """A rank failed after the start.

    Args:
        rank: The first rank that failed, by the clock of the kernel.
        world_size: The number of ranks of the run.

    Example:
        >>> error = RanksFailed("rank 1 of 2 failed", rank=1, world_size=2)
        >>> error.rank, error.world_size
        (1, 2)
    """

    def __init__(self, message: str, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(message)
        self.rank = rank
        self.world_size = world_size


class RankDied(RanksFailed):
    """The process of a rank ended without reporting anything.

    Args:
        rank: The rank.
        world_size: The number of ranks of the run.
        exit_code: As ``subprocess`` counts: negative for a signal (-9 is SIGKILL).

    Example:
        >>> error = RankDied("rank 1 of 2 was killed", rank=1, world_size=2, exit_code=-9)
        >>> error.exit_code  # the signal SIGKILL
        -9
    """

    def __init__(self, message: str, rank: int = 0, world_size: int = 1, exit_code: int = 0) -> None:
        super().__init__(message, rank, world_size)
        self.exit_code = exit_code


class CheckFailed(NbaccelError):
    """A cell with ``--check --strict`` would fail: its report has red lines.

    Example:
        In a cell::

            %%accelerate --check --strict
            torch.save(model.state_dict(), "/no/such/folder/model.pt")
    """


class ResultsMissing(NbaccelError):
    """A name of ``--out`` did not exist at the end of the cell, or could not be sent.

    Args:
        names: The reason for each missing name.

    Example:
        >>> error = ResultsMissing("...", names={"history": "it did not exist at the end of the cell"})
        >>> list(error.names)
        ['history']
    """

    def __init__(self, message: str, names: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.names = dict(names or {})


class NoInput(NbaccelError):
    """``input``, ``getpass`` or a debugger was called in a rank, where nobody can type.

    Example:
        >>> import nbaccel
        >>> nbaccel.launch(input, 2)  # doctest: +SKIP
        Traceback (most recent call last):
        NoInput: ...
    """


class NotInRanks(NbaccelError, RuntimeError):
    """Code in a rank waits for a thread or a loader's worker that runs only in the notebook.

    Example:
        >>> issubclass(NotInRanks, RuntimeError)
        True
    """


class StayedInRank(NbaccelError, AttributeError):
    """An object that a cell left lacks this part, which could not leave its rank: a lock, a thread, a file.

    Example:
        >>> issubclass(StayedInRank, AttributeError)  # so that `hasattr` is False
        True
    """


class NotPrepared(NbaccelError):
    """More than one rank trains a model whose gradients nothing averages: each rank would train its own model.

    Attributes:
        is_of_parts: The error may come from batches that are split between the ranks; whole batches on every rank may
            avoid it.
        is_of_states: It does, after steps that were trained on parts: each rank has made a state of its own of these,
            or the loss has changed.

    Example:
        In a cell, of a loop that prepares nothing::

            %%accelerate -n 2 --strict
            loss.backward()
            optimizer.step()
    """

    is_of_parts = False
    is_of_states = False


class FlagWithoutEffect(NbaccelError):
    """A flag that keeps work from being lost has no effect above the loop; raised before its first optimizer step.

    Example:
        In a cell, whose Trainer saves by itself::

            %%accelerate -n 2 --resume
            Trainer(model, arguments).train()
    """


class FlagConflict(NbaccelError):
    """A flag asks for what the loop does by itself, or makes impossible; raised before its first optimizer step.

    Example:
        In a cell that scales its loss by itself::

            %%accelerate -n 2 -p fp16
            torch.cuda.amp.GradScaler().scale(loss).backward()
    """


class CannotCut(NbaccelError):
    """Memory ran out, so batches come in parts, and the loop does something that needs whole batches.

    Example:
        In a cell, whose batches no longer fit as a whole::

            %%accelerate -n 2
            loss.backward(retain_graph=True)
            penalty(model).backward()
    """


class PeerFailed(NbaccelError):
    """Another rank failed while this one waited for it. The cause is the error of that rank.

    Example:
        >>> from nbaccel import Accelerator
        >>> accelerator = Accelerator()
        >>> try:
        ...     with accelerator.main_process_first():
        ...         data = list(range(3))  # a download
        ... except PeerFailed as error:  # rank 0 has failed in its block
        ...     print(error)
    """


class CollectiveMismatch(NbaccelError):
    """Ranks called one collective with different operations, dtypes or shapes, or one of them will never call it.

    Example:
        >>> accelerator.gather(torch.ones(2 + accelerator.process_index))  # doctest: +SKIP
        Traceback (most recent call last):
        CollectiveMismatch: ...
    """


class CannotContinue(NbaccelError, ValueError):
    """A map cannot continue in the file that `out` names: its answers belong to something else.

    Example:
        >>> import nbaccel
        >>> nbaccel.map(caption, images, out="answers.jsonl")  # doctest: +SKIP
        >>> nbaccel.map(translate, texts, out="answers.jsonl")  # doctest: +SKIP
        Traceback (most recent call last):
        CannotContinue: ...
    """


class CannotResume(NbaccelError):
    """The program prepares other objects than the checkpoint holds, or starts its epochs anew.

    Example:
        >>> accelerator.load_state("checkpoints/of_another_program")  # doctest: +SKIP
        Traceback (most recent call last):
        CannotResume: ...
    """


class CannotSave(NbaccelError):
    """A checkpoint could not be written. An older one of that name is unchanged.

    Args:
        path: The checkpoint that was to be written.
        needed_bytes: Its size, as far as it was known.
        free_bytes: The free space of the disk.

    Example:
        >>> error = CannotSave("no space", path="checkpoints/step_100", needed_bytes=600, free_bytes=100)
        >>> error.needed_bytes - error.free_bytes
        500
    """

    def __init__(self, message: str, path: str = "", needed_bytes: int = 0, free_bytes: int = 0) -> None:
        super().__init__(message)
        self.path = path
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class CheckpointCorrupt(NbaccelError):
    """A checkpoint is damaged, or was not written to its end.

    Args:
        file: The damaged file.
        expected: Its size or checksum as it was written, as a text.
        got: Its size or checksum as it was found, as a text.

    Example:
        >>> error = CheckpointCorrupt("...", file="model.safetensors", expected="600 bytes", got="512 bytes")
        >>> error.file
        'model.safetensors'
    """

    def __init__(self, message: str, file: str = "", expected: str = "", got: str = "") -> None:
        super().__init__(message)
        self.file = file
        self.expected = expected
        self.got = got


class CannotSplit(NbaccelError):
    """A batch, or a model, cannot be split into micro-batches; the message names the obstacle.

    Example:
        >>> accelerator.forward_backward(loss_fn, batch={"text": object()})  # doctest: +SKIP
        Traceback (most recent call last):
        CannotSplit: ...
    """


class NoBatchSizeFits(NbaccelError, RuntimeError):
    """Memory ran out at every batch size that was tried, on at least one rank. All ranks raise it.

    It is a ``RuntimeError``, as Accelerate raises there, and no out-of-memory error: a smaller batch does not help.

    Args:
        tried: The sizes, the largest first.

    Example:
        >>> error = NoBatchSizeFits("...", tried=(4, 2, 1))
        >>> error.tried
        (4, 2, 1)
    """

    def __init__(self, message: str, tried: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.tried = tuple(tried)


class StepCorrupted(NbaccelError):
    """An optimizer ran out of memory after it had updated some parameters or their state.

    Neither the old nor the new weights exist any more. Continue from a checkpoint.

    Example:
        >>> try:
        ...     raise StepCorrupted("AdamW ran out of memory after it had updated 3 of 7 parameters")
        ... except StepCorrupted as error:
        ...     print("continue from a checkpoint:", error)
        continue from a checkpoint: AdamW ran out of memory after it had updated 3 of 7 parameters
    """


class UntrustedPickle(NbaccelError):
    """A file can be read only by running code of a pickle, and it was not marked as trusted.

    Example:
        >>> accelerator.load_state("checkpoints/step_100", trust=True)  # of your own  # doctest: +SKIP
    """


class RunStopped(KeyboardInterrupt):
    """Raised in a rank at a step boundary after the user asked the run to stop, or at a time limit.

    It is a ``KeyboardInterrupt``, so ``except KeyboardInterrupt`` and ``finally`` in the user's loop work as in one
    process. Every rank gets it before the same step. In a map, whose ranks do not wait for each other, each rank gets
    it before its next call.

    Example:
        >>> try:
        ...     raise RunStopped("step 120")
        ... except KeyboardInterrupt:  # as in a loop of one process
        ...     print("saved what there is")
        saved what there is
    """
