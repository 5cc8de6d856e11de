"""The command `%accelerate export PATH`: read the cells, find what is needed, write the script, check it if asked."""

from __future__ import annotations

import argparse
import os
import random
import secrets
import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError

from nbaccel.base.settings import RunSettings
from nbaccel.errors import LaunchRefused
from nbaccel.features.export.first_steps import compared
from nbaccel.features.export.needed import Needed, needed_cells
from nbaccel.features.export.ran_cell import RanCell, read_cells
from nbaccel.features.export.script_text import MARK, ExportedScript
from nbaccel.launching.plan import choose_precision
from nbaccel.launching.run import Run
from nbaccel.launching.script_plan import ScriptPlan
from nbaccel.namespace.names import knows_ranks
from nbaccel.notebook.session import Session
from nbaccel.options.flags import flags_parser
from nbaccel.options.parsing import asks_for_help, chosen, parse
from nbaccel.options.run_options import RunOptions

__all__ = ["export_script"]

_UNSEEDED = "no cell seeds the random numbers, so they differ from run to run: torch.manual_seed(0) in the first cell."
_DRAWN_SEEDS = 1_000_000
_LEAVE_NO_TRACE = ("check", "speed")
_OF_SCRIPTS = frozenset(
    {
        *("num-processes", "mixed-precision", "accumulate", "devices", "cpu", "seed", "debug", "strategy", "batches"),
        *("independent", "strict", "checkpoint-every", "checkpoint-dir", "keep-checkpoints", "resume"),
    }
)
_OF_RAW_CELLS = frozenset({"checkpoint-every", "checkpoint-dir", "keep-checkpoints", "resume"})
"""Flags that hold above an unmodified loop in a cell, and in a script only for what is prepared."""


def export_script(session: Session, rest: str) -> None:
    """Write the script, and print what it consists of.

    Args:
        session: The notebook's session.
        rest: The words behind `export`.

    Raises:
        UsageError: Nothing was written; the message says why.
    """
    asked = _read(rest)
    cells = read_cells(session.shell, before=len(session.shell.history_manager.input_hist_raw) - 1)
    trained = _trained(cells, asked.cell)
    run = _run_of(session, trained)
    options = _options_of(trained).over(session.configured())
    if options.sweep:
        raise UsageError(f"{trained} ran a sweep, which is many runs: export a cell that ran once.")
    settings, without, ranks = _settings(session, trained, options, run)
    needed = needed_cells(
        cells,
        trained,
        session.shell.user_ns,
        _failed(session),
        has_own_seed=settings.get("seed") is not None,
        leaves_no_trace=[cell.number for cell in cells if cell.flags is not None and not _trains(cell)],
    )
    path = Path(asked.path).expanduser()
    _write(path, str(ExportedScript(needed, path.name, ranks, settings, without)))
    session.say(_said(path, needed, ranks))
    if asked.check:
        said = compared(run, path, ["--cpu"] if options.cpu else [])
        is_seeded = needed.is_seeded or settings.get("seed") is not None
        session.say(said if is_seeded else f"{said}\n{_UNSEEDED}")


def _read(rest: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="%accelerate export", add_help=False, exit_on_error=False)
    parser.add_argument("path", nargs="?", default="")  # a missing one would be printed
    parser.add_argument("--cell", type=int)
    parser.add_argument("--check", action="store_true")
    try:
        asked, unknown = parser.parse_known_args(shlex.split(rest))
    except (argparse.ArgumentError, SystemExit, ValueError):
        asked, unknown = argparse.Namespace(path=""), []
    if unknown or not asked.path.endswith(".py"):
        raise UsageError(
            f"%accelerate export takes the file to write, and maybe --cell 5 or --check: %accelerate export train.py; "
            f"got {rest!r}."
        )
    return asked


def _trained(cells: list[RanCell], number: int | None) -> RanCell:
    """Return the cell to export.

    Raises:
        UsageError: There is none.
    """
    found = [cell for cell in cells if cell.flags is not None and _trains(cell)]
    if number is not None:
        found = [cell for cell in found if cell.number == number]
    if not found:
        which = "no %%accelerate cell has run in this kernel" if number is None else f"cell [{number}] is none that ran"
        raise UsageError(f"{which} with %%accelerate: run the cell that trains, then export it.")
    return found[-1]


def _trains(cell: RanCell) -> bool:
    """Return whether a cell ran in ranks to train; a check or a trial of speed leaves no trace."""
    if asks_for_help(cell.flags or ""):
        return False
    try:
        options = _options_of(cell)
    except UsageError:  # it was refused then, too
        return False
    return not any(getattr(options, name) for name in _LEAVE_NO_TRACE)


def _options_of(cell: RanCell) -> RunOptions:
    return parse(flags_parser(), cell.flags or "")


def _run_of(session: Session, cell: RanCell) -> Run | None:
    """Return the record of a cell's run; None if it has none."""
    runs = session.launcher.ended_runs.all
    title = f"Cell In[{cell.number}]"
    return next((run for run in reversed(runs) if run.facts.title == title and not run.origin.is_earlier), None)


def _failed(session: Session) -> set[int]:
    """Return the numbers of cells that ended with an error; those above `%load_ext` are known since IPython 9."""
    return session.failed_cells.numbers | getattr(session.shell.history_manager, "exceptions", {}).keys()


def _settings(
    session: Session, trained: RanCell, options: RunOptions, run: Run | None
) -> tuple[dict[str, Any], list[str], int]:
    """Return the settings of each rank, the flags that a script has not, and the number of ranks.

    Raises:
        UsageError: This machine cannot say what the flags mean.
    """
    if options.nodes is not None:
        options = replace(options, num_processes=None, devices=None)  # which this machine may not have
    try:
        plan = ScriptPlan.of(replace(options, mixed_precision=None), session.survey())
        precision = choose_precision(options.mixed_precision, plan.devices)[0]
    except LaunchRefused as error:
        raise UsageError(str(error)) from None
    parts = [compile(trained.code, "", "exec", dont_inherit=True)] if not trained.refused else []
    is_raw = not (knows_ranks(parts, session.shell.user_ns) or options.independent or options.strict)
    raw_precision = precision if options.mixed_precision is not None and precision != "no" else None
    seed = options.seed
    if seed is None and not is_raw:
        drawn = None if run is None else run.origin.seed
        seed = random.SystemRandom().randrange(_DRAWN_SEEDS) if drawn is None else drawn
    settings = replace(
        plan.settings,
        mixed_precision=precision,
        raw_precision=raw_precision,
        gradient_accumulation_steps=options.accumulate or 1,
        seed=seed,
        seeds_alike=True if is_raw else None,
    )
    has_not = _OF_RAW_CELLS if is_raw else frozenset()
    flags = chosen(flags_parser(), _options_of(trained))
    without = [f"--{key}" for key in flags if key not in _OF_SCRIPTS or key in has_not]
    if is_raw:  # only what is prepared is saved in a script
        settings = replace(settings, checkpoint_every=None, checkpoint_dir=None, keep=None, resume=None)
    ranks = plan.devices.num_processes if run is None else run.history.world_size
    return _given(settings), without, ranks


def _given(settings: RunSettings) -> dict[str, Any]:
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return {name: value for name, value in values.items() if value is not None}


def _write(path: Path, text: str) -> None:
    """Write the script, whole or not at all.

    Raises:
        UsageError: The file cannot be written, or is another program.
    """
    try:
        if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
            raise UsageError(f"{path} is there, and %accelerate export has not written it: name another file.")
        beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            beside.write_text(text, encoding="utf-8")
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None


def _said(path: Path, needed: Needed, ranks: int) -> str:
    above = ", ".join(str(cell.number) for cell in needed.above) or "none"
    lines = [f"{path}: {needed.trained} and what it needs of cells {above}: nbaccel launch -n {ranks} {path}"]
    if needed.shell_lines:
        lines.append(f"not in the script, run it before where it is needed: {', '.join(needed.shell_lines)}")
    if needed.installs:
        lines.append(f"it needs: {', '.join(needed.installs)}")
    return "\n".join(lines)
