"""Commands that may follow `%accelerate`, one object for each. Run in the kernel.

`Commands` finds the command of a line; the other functions give each command the session, read its arguments, and print
its answer. The work is done elsewhere: by `Session`, its persistent ranks (`stay`) and its run in the background. The
answers of `status` and `doctor` read, and change nothing.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from nbaccel.base.hardware import Survey
from nbaccel.base.world import World, is_notebook_kernel
from nbaccel.errors import LaunchRefused
from nbaccel.features import feature
from nbaccel.launching.ipc.user_code import cell_name
from nbaccel.launching.plan import choose_precision, devices_of, refuse_a_crowd
from nbaccel.notebook.session import LastRun, Session
from nbaccel.options.parsing import SAVE
from nbaccel.options.run_options import AUTO, RunOptions
from nbaccel.output.screens import JupyterScreen

if TYPE_CHECKING:
    from nbaccel.features.reports.form import Form

__all__ = [
    "Command",
    "Commands",
    "ConfigCommand",
    "bare",
    "commands_of",
    "next_cell",
]


@dataclass(frozen=True, slots=True)
class Command:
    """One word after `%accelerate`.

    Args:
        run: The function that gets the rest of the line.
    """

    name: str
    run: Callable[[str], Any]


def bare(name: str, act: Callable[[], Any]) -> Command:
    """Return a command that takes no further words."""

    def run(rest: str) -> Any:
        if rest:
            raise UsageError(f"%accelerate {name} takes nothing behind it; got {rest!r}.")
        return act()

    return Command(name, run)


class Commands:
    """The commands of one notebook.

    Example:
        >>> commands = Commands([bare("hello", lambda: print("hi"))], lambda: print("nothing said"))
        >>> commands.run("hello"); commands.run("")
        hi
        nothing said
    """

    def __init__(self, commands: Iterable[Command], otherwise: Callable[[], Any]) -> None:
        self._commands = {command.name: command for command in commands}
        self._otherwise = otherwise

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._commands)

    def run(self, line: str) -> Any:
        """Run the line after `%accelerate`; return its result.

        Raises:
            UsageError: It begins with no command, or its command cannot be carried out.
        """
        word, _, rest = line.strip().partition(" ")
        if not word:
            return self._otherwise()
        if word in self._commands:
            return self._commands[word].run(rest.strip())
        alike = difflib.get_close_matches(word, self.names, n=1)
        if alike:
            raise UsageError(f"%accelerate {word} is no command; did you mean %accelerate {alike[0]}?")
        raise UsageError(
            f"%accelerate {word} is no command: there is %accelerate alone, or with {_either(self.names)}. "
            "Flags belong to a cell that begins with %%accelerate, two percent signs, and runs in ranks."
        )


def _either(words: Sequence[str]) -> str:
    """Join words by commas and a final "or".

    Example:
        >>> _either(["config", "doctor", "memory"])
        'config, doctor or memory'
    """
    return f"{', '.join(words[:-1])} or {words[-1]}"


def commands_of(session: Session, parser: argparse.ArgumentParser) -> Commands:
    """Return the commands of the notebook of `session`; `parser` reads the flags after some of them."""

    def started_as() -> str:
        """Return the facts that the short first line of a cell leaves out."""
        return "" if session.last_plan is None else f"the latest ranks were started as: {session.last_plan.explained}"

    def stay() -> str:
        return session.stay.status() if session.has_ranks else ""

    def status() -> None:
        line = _status_line(session.survey(), session.configured(), session.last_run, stay())
        beside = session.background.status if session.left_run is not None else ""
        session.say("\n".join(filter(None, [line, beside, started_as()])))

    def doctor() -> None:
        session.say(
            feature("%accelerate doctor")(session.survey(), session.configured().checkpoint_dir, session.cuda.cell_of)
        )

    def memory() -> None:
        are_gone = not (session.has_ranks or (session.left_run is not None and not session.left_run.is_over))
        held = feature("%accelerate memory")(
            session.survey(), session.launcher.helpers, session.rank_memory, session.shell.user_ns, are_gone=are_gone
        )
        session.say("\n".join(filter(None, [held, stay()])))

    def why() -> None:
        session.say(feature("%accelerate why")(session.launcher.post_mortem, cell_name))

    def estimate(rest: str) -> None:
        session.say(
            feature("%accelerate estimate")(rest, session.shell.user_ns, session.survey(), session.configured())
        )

    def runs(rest: str) -> Any:
        try:
            return feature("%accelerate runs")(session.remembered(), rest)
        except KeyError as error:
            raise UsageError(f"%accelerate runs {rest}: {error.args[0]}.") from None

    def of_ranks_that_stay(name: str, rest: str) -> None:
        feature("ranks that stay: commands")(session, parser, name, rest)

    configure = ConfigCommand(session)
    return Commands(
        [
            Command("config", lambda rest: configure.run(rest.split())),
            bare("doctor", doctor),
            bare("memory", memory),
            Command("estimate", estimate),
            bare("why", why),
            bare("status", status),
            Command("runs", runs),
            Command("export", lambda rest: feature("%accelerate export")(session, rest)),
            Command("nodes", lambda rest: feature("%accelerate nodes")(session, rest)),
            *_background_commands(session),
            *(Command(name, partial(of_ranks_that_stay, name)) for name in ("start", "push", "pull", "restart")),
        ],
        otherwise=status,
    )


def _background_commands(session: Session) -> list[Command]:
    """Return `wait`, `attach`, `stop` and `last` of one notebook, on a run in the background or on the last run."""

    def attach() -> Any:
        if session.left_run is None and session.launcher.last_run is not None:
            return session.say("no run goes on in the background: %accelerate last shows the one before")
        return session.background.attach()

    def stop() -> None:
        if session.left_run is not None and session.background.stop():
            return
        if ended := session.launcher.resources.end_lasting():
            session.say("\n".join(ended))
        elif not session.has_ranks:
            raise UsageError("nothing runs in the background, and no ranks stay.")
        if session.has_ranks:
            session.stay.stop()

    def last() -> None:
        """Show panel and picture of the last run in the cell that runs now, and print how it ended."""
        current, run = session.left_run, session.launcher.last_run
        if current is not None and not current.is_over:
            session.say(f"{current}: %accelerate attach shows it")
        if run is None:
            return session.say("this kernel has not run anything in ranks yet")
        if session.views.drawn() is not None:
            screen = JupyterScreen(session.shell)
            if run.history.has_curves:
                screen.publish({"kind": "display", "data": {"text/plain": run.text, "text/html": run.panel}})
            data, metadata = run.shown()
            screen.publish({"kind": "display", "data": data, "metadata": metadata})
        session.say(f"{run.facts.title}: {run.in_a_line()}")

    return [
        bare("wait", lambda: session.background.wait()),
        bare("attach", attach),
        bare("last", last),
        bare("stop", stop),
    ]


class ConfigCommand:
    """The command `config` of one notebook: shows its choices, changes them, saves them.

    Without arguments it shows a form if there is a front end and ipywidgets, otherwise the same as text.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._form: Form | None = None

    def run(self, words: Sequence[str]) -> None:
        """Carry out KEY=VALUE …, `--save`, or both; without words show the present choices.

        Raises:
            UsageError: One of them is wrong, and nothing was changed; the file cannot be read or written; or this
                is a rank.
        """
        if World.from_env().launch_id:
            raise UsageError(
                "choices are the notebook's, and what a rank chooses ends with it: use %accelerate config, or "
                "nbaccel.panel(), in a cell of its own, without %%accelerate."
            )
        if not words:
            return self._show()
        configuration = self._session.configuration
        configuration.change(word for word in words if word != SAVE)
        self._session.say(configuration.save() if SAVE in words else str(configuration))
        if self._form is not None:
            self._form.follow()

    def _show(self) -> None:
        """Display the form, or print the same as text."""
        session = self._session
        session.configured()  # prints the choices of the file, or raises if it is wrong
        batch_size = feature("the batch size of the notebook's loaders")(session.shell.user_ns)
        missing = ""
        if is_notebook_kernel():
            try:
                return self._formed(batch_size).show()
            except ModuleNotFoundError as error:
                missing = f"\n({error.name} is not installed: with it, this is a form)"
        table = feature("the table of %accelerate config")(session.configuration, session.survey(), batch_size)
        session.say(table + missing)

    def _formed(self, batch_size: int) -> Form:
        if self._form is None:
            self._form = feature("the form of %accelerate config")(
                self._session.configuration, self._session.survey, batch_size
            )
        return self._form


def _status_line(survey: Survey, config: RunOptions, last_run: LastRun | None, stay: str = "") -> str:
    """Return the devices and settings of a cell without flags, and how the last run went.

    Args:
        stay: The persistent ranks in words; empty without any.

    Example:
        >>> line = _status_line(Survey(), RunOptions(mixed_precision="bf16", accumulate=4), None)
        >>> print(*line.split("; "), sep="\\n")
        next cell: 1 rank on the CPU
        a prepared loop: precision bf16, accumulate 4
        an unmodified one: precision bf16, accumulate 4
        no run yet
    """
    return f"next cell: {stay or next_cell(survey, config)}; {f'last run: {last_run}' if last_run else 'no run yet'}"


_AS_WRITTEN = "an unmodified one computes and steps as it is written"


def next_cell(survey: Survey, config: RunOptions) -> str:
    """Return the devices and settings of a cell without flags, or why it would be refused."""
    try:
        devices = devices_of(config, survey)
        refuse_a_crowd(devices.num_processes, survey)
        precision, reason = choose_precision(config.mixed_precision, devices)
    except LaunchRefused as error:
        return f"refused as configured ({error})"
    why = f" ({reason})" if reason else ""
    strategy = "" if config.strategy in (None, AUTO) else f", strategy {config.strategy}"
    prepared = f"precision {precision}{why}, accumulate {config.accumulate or 1}{strategy}"
    chosen = [f"precision {precision}"] if config.mixed_precision is not None and precision != "no" else []
    chosen += [f"accumulate {config.accumulate}"] if (config.accumulate or 1) > 1 else []
    unmodified = f"an unmodified one: {', '.join(chosen)}" if chosen else _AS_WRITTEN
    return f"{devices}; a prepared loop: {prepared}; {unmodified}"
