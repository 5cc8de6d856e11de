"""Answers: all commands that may follow `%accelerate` in one notebook. Runs in the kernel.

The work of each command is done elsewhere; here the commands get the session, and their answers are printed.
"""

from __future__ import annotations

import argparse

from nbaccel.launch.rank.jupyter import cell_name
from nbaccel.notebook.background_commands import background_commands
from nbaccel.notebook.commands import Command, Commands, bare
from nbaccel.notebook.config_command import ConfigCommand
from nbaccel.notebook.memory import Processes, held_by_names, memory_report
from nbaccel.notebook.session import Session
from nbaccel.notebook.status import doctor_report, status_line
from nbaccel.notebook.stay_commands import stay_commands
from nbaccel.notebook.why import why_report

__all__ = ["commands_of"]


def commands_of(session: Session, parser: argparse.ArgumentParser) -> Commands:
    """Return the commands of the notebook of `session`; `parser` reads the flags after some of them."""

    def started_as() -> str:
        """Return the facts that the short first line of a cell leaves out."""
        return "" if session.last_plan is None else f"the latest ranks were started as: {session.last_plan.explained}"

    def status() -> None:
        line = status_line(session.survey(), session.configured(), session.last_run, session.stay.status())
        session.say("\n".join(filter(None, [line, session.background.status, started_as()])))

    def doctor() -> None:
        session.say(doctor_report(session.survey(), session.configured(), session.cuda.cell_of))

    def memory() -> None:
        processes = Processes.now(session.launcher.helpers)
        are_gone = not (session.stay.is_on or session.background.is_running)
        held = memory_report(session.survey(), processes, session.rank_memory, held_by_names(), are_gone=are_gone)
        session.say("\n".join(filter(None, [held, session.stay.status()])))

    def why() -> None:
        session.say(why_report(session.launcher.post_mortem, cell_name))

    configure = ConfigCommand(session)
    return Commands(
        [
            Command("config", lambda rest: configure.run(rest.split())),
            bare("doctor", doctor),
            bare("memory", memory),
            bare("why", why),
            bare("status", status),
            *background_commands(session),
            *stay_commands(session, parser),
        ],
        otherwise=status,
    )
