"""LaunchPlan: the settings of a run, decided before it starts, and the line about them. Runs in the kernel.

`LaunchPlan.of` gathers what every launch has to know: devices, start method and CPU threads, which `preflight` decides.
For a cell `LaunchPlan.of_cell` decides also what its flags left open: precision, seed. That of `nbaccel launch`, whose
ranks torch elastic starts, is in `script_plan`. Nothing is touched or changed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from nbaccel.base.hardware import Survey, best_precision
from nbaccel.base.quantities import amount
from nbaccel.base.settings import SHRINK, STOP, RunSettings
from nbaccel.display.summary import RunFacts
from nbaccel.errors import LaunchRefused
from nbaccel.launching.earlier_models import EarlierModel, models_in
from nbaccel.launching.ipc.spec import Devices, LaunchSpec, RunEnd, Start, Task
from nbaccel.launching.preflight import ProcessState, choose_devices, choose_start, threads_per_rank
from nbaccel.launching.processes.attached_debugger import is_attached
from nbaccel.namespace.nbytes import bytes_by_sharing, sizes_on_devices
from nbaccel.namespace.thread_pools import threads_a_fork_lacks
from nbaccel.namespace.wrappers import modules_in
from nbaccel.options.given_flags import GivenFlag, given_flags
from nbaccel.options.run_options import AUTO, RunOptions

__all__ = [
    "LaunchPlan",
    "choose_precision",
    "devices_of",
    "draws_as_here",
    "refuse_a_crowd",
    "settings_of",
]

_WORTH_SAYING_BYTES = 1_000_000_000
_DRAWN_SEEDS = 1_000_000
_BF16_SINCE = (8, 0)
_RANKS_PER_CORE = 16
"""Largest number of ranks per core; each is a process of some 200 MB, and hundreds of them stop the machine."""
_FIRST_LINE = 80
"""Characters of the line before a run: the width that a notebook shows beside an open side bar without a line break."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """One planned run.

    Args:
        precision_reason: Why the precision was chosen; empty if it was not decided here.
        bytes_to_copy: Bytes that are sent to ranks that are no copy of the kernel.
        bytes_of_each: Bytes that each rank builds anew, since only memory of tensors and arrays is shared.
        bytes_on_device: Bytes that are on devices now.
        models: Models that earlier cells have put on devices, if the ranks need them.
        stays: Whether the ranks exist already, and stay.
        own_devices: Whether each rank sees only its own GPUs.
        first_card: See `Task`.
        own, words: What was written for this run alone, and its words, see `given_flags`; None for a run that trains
            nothing by flags.
    """

    options: RunOptions
    devices: Devices
    start: Start
    settings: RunSettings
    threads: int
    precision_reason: str = ""
    bytes_to_copy: int = 0
    bytes_of_each: int = 0
    bytes_on_device: int = 0
    models: tuple[EarlierModel, ...] = ()
    stays: bool = False
    own_devices: bool = False
    first_card: str = ""
    own: RunOptions | None = None
    words: Mapping[str, str] | None = None

    @classmethod
    def of(
        cls, options: RunOptions, task: Task, survey: Survey, here: ProcessState, since: str | None = None
    ) -> LaunchPlan:
        """Decide the run of `options` on this machine, in this process; the precision is the one of `options`.

        Args:
            since: The cell from which on forks fail, if they do and it is known.

        Raises:
            LaunchRefused: The machine or the process cannot do what was asked; the message says what is possible.
        """
        devices = devices_of(options, survey)
        values = task.values_to_send()
        if not here.why_forks_fail and options.start != "zygote":
            values = modules_in(values)  # of copies of this process nothing is asked but whether they can train
        models = models_in(values, task.namespace)
        sizes = sizes_on_devices(values) if values and here.why_forks_fail else {}
        on_device = sum(sum(counted.values()) for device, counted in sizes.items() if device != "meta")
        start = choose_start(
            options.start or AUTO,
            world_size=devices.num_processes,
            platform_can_fork=here.can_fork,
            why_forks_fail=here.why_forks_fail,
            since=since,
            lacks=threads_a_fork_lacks(task.values_to_send) if options.start in (None, AUTO, "fork") else None,
            # Models that are moved to the host leave memory for the copies.
            bytes_on_device=0 if options.free_kernel or task.namespace is None else on_device,
            stays_here=next((f"{model.name} {model}" for model in models if model.stays_here), ""),
        )
        devices = devices.started_by(start)
        if devices.gpus_per_rank > 1 < devices.num_processes and not devices.can_be_told_apart:
            raise LaunchRefused(
                f"{devices.gpus_per_rank} GPUs for each rank need names by which it can be shown its own alone, and "
                "these GPUs have none: name as many as there are ranks, or start one rank (-n 1)."
            )
        shared, of_each = bytes_by_sharing(values) if start.method == "zygote" else (0, 0)
        # In this process a device that NVML does not know (MPS) may be used.
        cpu = True if not devices.gpus and start.method != "inline" else None
        return cls(
            options=options,
            devices=devices,
            start=start,
            settings=settings_of(options, options.mixed_precision).over(RunSettings(cpu=cpu)),
            threads=threads_per_rank(survey.cpu_count, devices.num_processes, here.threads),
            bytes_to_copy=shared + of_each,
            bytes_of_each=of_each,
            bytes_on_device=on_device,
            models=models,
            # A program of one process may say "cuda:0" somewhere, and one for several ranks counts cards by rank.
            own_devices=devices.can_be_told_apart
            and (not task.knows_ranks or bool(task.first_card) or devices.gpus_per_rank > 1),
            first_card=task.first_card if devices.can_be_told_apart else "",
        )

    @classmethod
    def of_cell(
        cls,
        options: RunOptions,
        task: Task,
        survey: Survey,
        here: ProcessState,
        since: str | None,
        own: RunOptions | None = None,
    ) -> LaunchPlan:
        """Decide the run of a cell, see `of`, and what its flags left open.

        Args:
            own: What the cell's own line says; None for nothing.

        Raises:
            LaunchRefused: The machine or the notebook cannot do what was asked; the message says what is possible.
        """
        refuse_a_crowd(devices_of(options, survey).num_processes, survey)
        plan = cls.of(replace(options, mixed_precision=None), task, survey, here, since)
        if plan.start.method == "inline" and (limit := options.limit) is not None:
            raise LaunchRefused(
                f"{limit.flag} can stop ranks only, and this cell would run in the notebook's own process "
                f"({plan.start.reason}): leave {limit.flag} out."
            )
        precision, reason = choose_precision(options.mixed_precision, plan.devices)
        automatic = _automatic(draws_seed=not draws_as_here(options, task), is_raw=_is_raw(options, task))
        raw = _raw_precision(options, precision)
        settings = replace(plan.settings, mixed_precision=precision, raw_precision=raw).over(automatic)
        return replace(plan, options=options, settings=settings, precision_reason=reason, own=own or RunOptions())

    def spec(self, task: Task, setup: str | None, wants_results: bool = False) -> LaunchSpec:
        """Return the spec of the run.

        Args:
            wants_results: Whether a failing run waits for the results of the task.
        """
        task.flags = self.flags
        return LaunchSpec(
            task=task,
            devices=self.devices,
            start=self.start,
            settings=self.settings,
            setup=setup,
            threads=self.threads,
            end=RunEnd(
                timeout_s=None if self.options.limit is None else self.options.limit.seconds,
                hang_timeout_s=self.options.hang_timeout,
                wants_results=wants_results,
                stays=self.stays,
            ),
            oom=STOP if self.options.pdb is not None else self.options.oom or SHRINK,  # no restart under a debugger
            own_devices=self.own_devices,
        )

    @property
    def flags(self) -> tuple[GivenFlag, ...]:
        """Return the flags whose effect depends on how the program trains."""
        if self.own is None:
            return ()
        return given_flags(self.options, self.own, self.settings.mixed_precision or "no", self.words)

    def facts(self, title: str) -> RunFacts:
        """Return the texts of the panel beside its numbers."""
        parts = [
            str(self.devices),
            self._random_numbers,
            "memory is held until %accelerate stop" if self.stays else "",
        ]
        plots = self.options.plot or ()
        of_prepared = ", ".join(filter(None, [self._of_each_loop, self._of_prepared()]))
        setting = ", ".join(filter(None, parts))
        return RunFacts(title, setting, self.devices.names(), plots, of_prepared, self._of_each_loop)

    def __str__(self) -> str:
        """Return the text printed before the run: one short line, and a line for each unusual fact."""
        return "\n".join([self._first_line(), *self._what_is_unusual()])

    def _first_line(self) -> str:
        """Return the main facts in at most 80 characters, without those that are as usual; `explained` has all of them.

        How the program trains is not known yet: settings that only what is prepared has are named as such.
        """
        rest = f", {self.start.method}" if self.start.is_explicit and self.start.method != "nodes" else ""
        rest += "" if (seed := self._seed) is None else f", {seed}"
        if self._of_each_loop:
            rest += f"; {self._of_each_loop}"
        # A program that seems to prepare nothing is told nothing of a precision that nobody chose.
        if prepared := self._of_prepared(with_precision=not (self.settings.seeds_alike and self.precision_reason)):
            rest += f"; prepared: {prepared}"
        return self.devices.in_short(_FIRST_LINE - len(rest)) + rest

    @property
    def _of_each_loop(self) -> str:
        """Return the settings that an unmodified loop has as well as a prepared one, in words."""
        accumulate = self.settings.gradient_accumulation_steps or 1
        parts = self.settings.raw_precision, f"accumulate {accumulate}" if accumulate > 1 else ""
        return ", ".join(filter(None, parts))

    def _of_prepared(self, with_precision: bool = True) -> str:
        """Return the settings that only what is prepared has, in words; empty for those of every loop."""
        precision = (self.settings.raw_precision is None and self.settings.mixed_precision) or "no"
        parts = [precision if with_precision and precision != "no" else "", self._strategy]
        return ", ".join(filter(None, parts))

    def _what_is_unusual(self) -> Iterator[str]:
        if self.devices.why_no_gpu:
            yield f"NOT on a GPU: {self.devices.why_no_gpu}"
        if self.start.method != "inline" and is_attached():
            yield "a debugger is attached to the notebook, and stops no rank at a breakpoint: --pdb debugs one"
        if self.start.method != "fork" and not self.start.is_explicit:
            yield f"{self.start.method}, not fork: {self.start.reason}"
        share = self.devices.gpus_per_rank
        if share > 1 < self.devices.num_processes:
            yield f"each rank sees its own {share} GPUs alone, as cuda:0 to cuda:{share - 1}, and computes on cuda:0"
        elif self.first_card and self.own_devices and self.devices.num_processes > 1:
            yield f"each rank sees its own GPU alone, as cuda:0, because the cell says {self.first_card}"
        if self.bytes_to_copy > _WORTH_SAYING_BYTES:
            yield f"{amount(self.bytes_to_copy)} to copy to the ranks first"

    @property
    def explained(self) -> str:
        """Return all decisions with their reasons, for users who ask."""
        whose = "" if self.settings.raw_precision else "what is prepared: "
        why = f" ({self.precision_reason})" if self.precision_reason else ""
        return ", ".join(
            [
                f"{self.devices}{self._whose_cards}",
                f"{self.start.method} ({self.start.reason})",
                self._random_numbers,
                f"{whose}precision {self.settings.mixed_precision}{why}",
                f"accumulate {self.settings.gradient_accumulation_steps}",
                *([f"strategy {self._strategy}"] if self._strategy else []),
            ]
        )

    @property
    def _whose_cards(self) -> str:
        """Return what "cuda:0" means in the ranks, if that matters."""
        if not self.own_devices or self.devices.num_processes == 1:
            return ""
        if self.devices.gpus_per_rank > 1:
            return f" (each its own as cuda:0 to cuda:{self.devices.gpus_per_rank - 1})"
        return f" (each its own as cuda:0{f': {self.first_card}' if self.first_card else ''})"

    @property
    def left_out(self) -> list[EarlierModel]:
        """Return the models that the ranks need and cannot get; ranks that are copies of this process lack none.

        A copy of this process has a model that is spread over devices, too, but several ranks cannot train it.
        """
        if self.start.method == "inline":
            return []
        is_copy, several = self.start.method == "fork", self.devices.num_processes > 1
        return [model for model in self.models if model.stays_here and (not is_copy or (several and model.cards))]

    @property
    def strategy(self) -> str:
        """Return the strategy of an `Accelerator()` in the ranks that chooses none itself."""
        automatic = "ddp" if self.devices.num_processes > 1 else "single"
        return self._strategy or automatic

    @property
    def _strategy(self) -> str:
        """Return the strategy that was chosen; empty if it follows from the number of ranks."""
        return "" if self.settings.strategy in (None, AUTO) else str(self.settings.strategy)

    @property
    def _random_numbers(self) -> str:
        return self._seed or "random numbers as in the notebook"

    @property
    def _seed(self) -> str | None:
        """Return the seed of the ranks in words; None if they go on with the notebook's random numbers."""
        seed = self.settings.seed
        return None if seed is None else f"seed {seed}" if self.options.seed is not None else f"new seed {seed}"


def devices_of(options: RunOptions, survey: Survey) -> Devices:
    """Return the number of ranks, and their devices, see `choose_devices`."""
    return choose_devices(options.world_size, options.devices, bool(options.cpu), survey)


def refuse_a_crowd(num_processes: int, survey: Survey) -> None:
    """Refuse a number of ranks that can only be a mistake.

    Raises:
        LaunchRefused: So many ranks share so few cores that the number can only be a mistake.

    Example:
        >>> refuse_a_crowd(32, Survey(cpu_count=2))
    """
    cores, most = survey.cpu_count, survey.cpu_count * _RANKS_PER_CORE
    if num_processes > max(most, len(survey.gpus)):
        raise LaunchRefused(
            f"{num_processes} ranks were asked for (-n {num_processes}), and there {_cores(cores)}: ranks beyond that "
            f"only wait for each other. Use -n {cores}, or up to {most} to try something out; "
            f"nbaccel.launch(function, {num_processes}) starts as many as it is told."
        )


def _cores(cores: int) -> str:
    return "is 1 core" if cores == 1 else f"are {cores} cores"


def choose_precision(asked: str | None, devices: Devices) -> tuple[str, str]:
    """Return the precision of `Accelerator()` in a cell, and the reason if it was not chosen.

    Args:
        asked: The precision that was asked for; None for the best one.
        devices: Those of the run.

    Raises:
        LaunchRefused: Bf16 on a GPU that only emulates it.
    """
    gpu = devices.weakest_gpu
    if asked is None or asked == AUTO:
        return best_precision(gpu)
    if asked == "bf16" and gpu is not None and (0, 0) < gpu.compute_capability < _BF16_SINCE:
        best, _ = best_precision(gpu)
        raise LaunchRefused(
            f"{gpu.name} has no bf16 units and would emulate bf16 slowly: use -p {best}, or leave -p out."
        )
    return asked, ""


def settings_of(options: RunOptions, precision: str | None) -> RunSettings:
    """Return the settings that `options` choose for every rank.

    Args:
        precision: The precision for the devices; None if it was not chosen.
    """
    return RunSettings(
        mixed_precision=precision,
        raw_precision=_raw_precision(options, precision),
        gradient_accumulation_steps=options.accumulate,
        seed=options.seed,
        cpu=options.cpu,
        debug=options.debug,
        independent=options.independent,
        strict=options.strict,
        batches=options.batches,
        checkpoint_every=options.checkpoint_every,
        checkpoint_dir=options.checkpoint_dir,
        keep=options.keep_checkpoints,
        resume=options.resume,
        strategy=options.strategy,
    )


def _raw_precision(options: RunOptions, precision: str | None) -> str | None:
    """Return the precision that a loop which prepares nothing computes in; None for that in which it is written.

    Args:
        precision: What "auto" means here. What nobody chose holds for what is prepared alone.
    """
    return None if options.mixed_precision is None or precision == "no" else precision


def draws_as_here(options: RunOptions, task: Task) -> bool:
    """Return whether all ranks continue the notebook's random numbers, as the task would without ranks.

    It is False if ranks have to differ: with `--independent`, and with `--strict`, which refuses equal work.
    """
    return options.seed is None and _is_raw(options, task)


def _is_raw(options: RunOptions, task: Task) -> bool:
    """Return whether the task is a program of one process, which is trained on all ranks as it is."""
    return not (task.knows_ranks or options.independent or options.strict)


def _automatic(draws_seed: bool, is_raw: bool) -> RunSettings:
    """Return the settings of a cell that were not chosen.

    The seed comes from the system's own generator: drawing it must not change the notebook's.
    """
    return RunSettings(
        gradient_accumulation_steps=1,
        seed=random.SystemRandom().randrange(_DRAWN_SEEDS) if draws_seed else None,
        seeds_alike=True if is_raw else None,
    )
