"""Start of ranks that stay: their setup and their first task, as any run; then they wait. Runs in the kernel."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from nbaccel.features.persistent.persistent_workers import PersistentWorkers
from nbaccel.launching.attempts import OomKillWatch
from nbaccel.launching.diagnosis import diagnose
from nbaccel.launching.ipc.spec import LaunchSpec
from nbaccel.launching.ipc.user_code import cell_name
from nbaccel.launching.launcher import Launcher, instead_of_fork, load_once, refuse_nested_launch
from nbaccel.launching.processes.supervisor import BadFork, RunObservers, open_log
from nbaccel.output.router import Screen

__all__ = ["start_persistent"]


def start_persistent(launcher: Launcher, spec: LaunchSpec, screen: Screen) -> PersistentWorkers:
    """Start persistent ranks, and run their setup and the task of `spec`, which has a home.

    Args:
        launcher: That of this process, whose later runs go on beside these ranks.
        screen: Shows their output.

    Raises:
        NestedLaunch, CannotFork: Nothing was started.
        The error of a rank that failed; KeyboardInterrupt: no rank is left.
    """
    refuse_nested_launch()
    with launcher.turn():
        load_once(spec.named_objects, spec.settings, spec.world_size)
        try:
            persistent = _settle(launcher, spec, RunObservers(screen))
        except BadFork as found:
            spec = replace(spec, start=instead_of_fork(spec.start, str(found)))
            persistent = _settle(launcher, spec, RunObservers(screen))
    launcher.keep(persistent)
    return persistent


def _settle(launcher: Launcher, spec: LaunchSpec, watching: RunObservers) -> PersistentWorkers:
    home = spec.task.home
    assert home is not None
    host, worker_group = OomKillWatch(), launcher.worker_group(spec, watching)
    try:
        with (
            open_log(launcher.resources.new_log()) as log,
            closing(watching.watch(worker_group, spec.task, spec.end, log)) as ended,
        ):
            if ended.is_interrupted:
                raise ended.raised or KeyboardInterrupt
            failed, is_clean = ended.first_failed is not None, spec.start.method != "fork"
            if failed and (error := diagnose(ended, is_clean, host, cell_name)) is not None:
                raise error
            return PersistentWorkers(
                spec, worker_group, home, ended, turn=launcher.turn, new_log=launcher.resources.new_log
            )
    except BaseException:
        worker_group.close()
        raise
