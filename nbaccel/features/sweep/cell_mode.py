"""`--sweep`: one run of a cell for each combination of values. A mode of `%%accelerate`; runs in the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nbaccel.base.quantities import plural
from nbaccel.errors import LaunchRefused
from nbaccel.features.sweep.finished_runs import FinishedRuns
from nbaccel.features.sweep.slots import choose_slots
from nbaccel.features.sweep.sweep import FOLDER, configurations, line_on_copies, own_bytes, refuse_a_full_host
from nbaccel.features.sweep.sweep_cell import SweptCell, lists_of, values_to_sweep
from nbaccel.features.sweep.sweep_runs import counted
from nbaccel.features.sweep.sweeping import Sweeping
from nbaccel.launching.gpu_trouble import holder_name
from nbaccel.launching.plan import LaunchPlan
from nbaccel.launching.preflight import ProcessState
from nbaccel.launching.tasks.cell_task import CellTask
from nbaccel.notebook.cell_plan import AskedCell
from nbaccel.notebook.cell_run import how_a_cell_ended, interrupts_in_one_line
from nbaccel.notebook.session import LastRun, Session
from nbaccel.options.run_options import RunOptions

__all__ = ["SweepMode"]


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """A sweep that may begin.

    Args:
        notes: Lines to show first.
    """

    options: RunOptions
    work: SweptCell
    sweeping: Sweeping
    notes: Sequence[str]


class SweepMode:
    """Runs a cell once for each combination of the values of `--sweep`; the notebook gets lists."""

    def plan(self, session: Session, cell: AskedCell) -> SweepPlan:
        """Decide on slots and plans of a sweep; refuse what cannot work, and print the notes before it."""
        options, source, _ = session.read(cell)
        if session.has_ranks:
            raise LaunchRefused("ranks stay in this notebook, and a sweep needs its own: %accelerate stop ends them.")
        configs = configurations(values_to_sweep(options.sweep or (), session.shell.user_ns))
        first_seed = configs[0].get("seed", options.seed or 0)
        options = replace(options, seed=first_seed)
        survey = session.survey()
        ranks = cell.options.world_size
        chosen = choose_slots(
            options.slots,
            options.gpus_per_run or ranks or 1,
            options.devices,
            bool(options.cpu),
            survey,
            ranks=ranks,
            most=len(configs),
            name_of=holder_name,
        )
        work = SweptCell(source, session.shell.user_ns, options, configs, session.setup, how_a_cell_ended)
        here, task = ProcessState.now(), work.task(configs[0])
        assert isinstance(task, CellTask)
        since = session.cuda.cell_of(here.why_forks_fail)
        each = replace(options, num_processes=chosen.slots[0].devices.num_processes)
        plans = [
            LaunchPlan.of_cell(replace(each, devices=slot.asked), task, survey, here, since, cell.options)
            for slot in chosen.slots
        ]
        first = plans[0]
        if first.start.method == "inline":
            raise LaunchRefused(f"a sweep needs processes of its own, and here none can start: {first.start.reason}.")
        work.plan = first
        needed = session.needed(task, source)
        carried = session.copied_models(first, needed, survey)
        refuse_a_full_host(first, len(plans), survey)
        copies = line_on_copies(first, len(plans), task, survey, own_bytes())
        session.last_plan = first
        seeds = "seeds as swept" if "seed" in configs[0] else f"seed {first_seed}"
        how = str(first).replace(f"seed {first_seed}", seeds, 1)
        session.say(f"{plural(len(configs), 'run')}, {len(plans)} at a time, each: {how}")
        for line in session.what_is_short(first, source, needed, carried, survey):
            session.say(line)
        sweeping = Sweeping(
            work, configs, chosen.slots, plans, survey, FinishedRuns(FOLDER), options.checkpoint_dir, options.plot or ()
        )
        sweeping.origin = replace(session.origin(first, cell.typed), seed=options.seed)
        return SweepPlan(options, work, sweeping, [*work.notes(), *chosen.notes, *filter(None, [copies])])

    def run(self, session: Session, plan: SweepPlan) -> None:
        """Do all runs, and give the notebook what they have left.

        Raises:
            KeyboardInterrupt: It was interrupted; the lists have what there is.
        """
        sweeping, work = plan.sweeping, plan.work
        is_plain = bool(plan.options.plain)
        steered = session.views.steered(session.shell, is_plain=is_plain)
        with steered as (frames, beside), interrupts_in_one_line():
            try:
                sweeping.run(
                    session.launcher,
                    session.shell,
                    notes=plan.notes,
                    is_plain=is_plain,
                    frames=frames,
                    beside=beside,
                )
            finally:
                if (runs := sweeping.runs) is not None:
                    session.shell.user_ns.update(lists_of(runs, sweeping.left, plan.options.names_back or ()))
                    session.last_run = LastRun(work.name, counted(runs), sweeping.seconds)
                    for line in work.lines(runs, sweeping.left):
                        session.say(line)
