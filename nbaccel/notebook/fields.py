"""The fields of the form: a widget for each setting that is often chosen. Runs in the kernel.

A field translates between its widget and the text after KEY= in `%accelerate config`, which decides whether that text
is right. It uses core ipywidgets only, 7.7.1 or 8: native inputs with labels, usable by keyboard and screen reader.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets

from nbaccel.hardware import Survey
from nbaccel.notebook.choices import Offer, checkpoint_intervals, memory_policies, precisions, process_counts, seeds
from nbaccel.notebook.options import AUTO, Options
from nbaccel.settings import SHRINK

__all__ = ["INDENT", "LABEL_WIDTH", "RANKS", "Field", "make_fields", "number"]

LABEL_WIDTH = "15em"
INDENT = f"calc({LABEL_WIDTH} + 8px)"
"""Left margin of the text below a field: beside the labels."""

RANKS = "num-processes"
"""The key of the number of ranks."""

_ENTRY_WIDTH = "36em"
_NUMBER_WIDTH = "22em"
_LARGEST_NUMBER = 1_000_000

Offers = Callable[[Options, Survey], Sequence[Offer]]


class Field:
    """One setting: its key in `%accelerate config`, its widget, and the widget's content when nothing is chosen."""

    def __init__(self, key: str, widget: Any, default: str = "") -> None:
        self.key = key
        self.widget = widget
        self._default = default
        self._trouble = widgets.HTML(layout=widgets.Layout(display="none"))

    @property
    def widgets(self) -> list[Any]:
        """Return the widgets of the field, from top to bottom."""
        return [self.widget, self._trouble]

    def complain(self, trouble: str) -> None:
        """Show below the field why its value was refused; empty text for nothing."""
        style = f"margin-left: {INDENT}; line-height: 1.4; color: var(--jp-error-color1, #b3261e)"
        self._trouble.value = f'<div role="alert" style="{style}">{html.escape(trouble)}</div>' if trouble else ""
        self._trouble.layout.display = None if trouble else "none"

    @property
    def text(self) -> str:
        """Return the choice, as it is written after KEY=; empty for the default."""
        text = str(self.widget.value).strip()
        return "" if text == self._default else text

    def show(self, text: str | None, options: Options, machine: Survey) -> None:
        """Show a choice that was made elsewhere; None for the default."""
        self.widget.value = self._default if text is None else text


class Number(Field):
    def show(self, text: str | None, options: Options, machine: Survey) -> None:
        self.widget.value = int(self._default if text is None else text)


class Entry(Field):
    """A text that a person types; empty for the default, which the placeholder names.

    offers: the first is the default, the others are proposed during typing.
    """

    def __init__(self, key: str, label: str, offers: Offers) -> None:
        entry = widgets.Combobox(continuous_update=False, **_labelled(label, _ENTRY_WIDTH))  # half a word is no choice
        super().__init__(key, entry)
        self._offers = offers

    def show(self, text: str | None, options: Options, machine: Survey) -> None:
        default, *others = self._offers(options, machine)
        self.widget.placeholder = str(default)
        self.widget.options = tuple(offer.value for offer in others)
        super().show(text, options, machine)


class Choice(Field):
    """One of several values, which depend on the machine and on the other choices.

    Values that the next cell would refuse cannot be chosen; they are listed below in grey, with the reason.
    They are radio buttons, because JupyterLab uses the arrow keys and letters of a drop-down list itself to move to
    another cell; it does not use Tab and Space.
    """

    def __init__(self, key: str, label: str, offers: Offers, default: str) -> None:
        super().__init__(key, widgets.RadioButtons(layout=_layout("auto")), default)
        self._offers = offers
        self._greyed = widgets.HTML()
        beside = "text-align: right; padding-right: 8px; line-height: 20px"  # on a line with the first button
        name = widgets.HTML(f'<div style="{beside}">{label}</div>', layout=_layout(INDENT))
        self._row = widgets.HBox([name, widgets.VBox([self.widget, self._greyed])])

    @property
    def widgets(self) -> list[Any]:
        return [self._row, self._trouble]

    def show(self, text: str | None, options: Options, machine: Survey) -> None:
        value = self._default if text is None else text
        offers = self._offers(options, machine)
        # A refused value that was chosen by a flag or the file stays visible: the form says what follows from it.
        greyed = [offer for offer in offers if offer.is_refused and offer.value != value]
        labels = tuple((str(offer), offer.value) for offer in offers if offer not in greyed)
        if self.widget.options != labels:
            self.widget.options = labels
        self.widget.value = value
        self._greyed.value = "".join(map(_greyed, greyed))
        self._greyed.layout.display = None if greyed else "none"


def make_fields() -> list[Field]:
    """Return a field for each setting that has one, in the order of the form and of the Tab key."""
    return [
        Entry(RANKS, "Ranks", process_counts),
        Choice("mixed-precision", "Precision", precisions, AUTO),
        Number("accumulate", number("Batches per optimizer step", 1), "1"),
        Entry("seed", "Seed", seeds),
        Choice("oom", "Out of memory", memory_policies, SHRINK),
        Entry("checkpoint-every", "Checkpoint every", checkpoint_intervals),
    ]


def number(label: str, value: int) -> Any:
    """Return an entry for a number from 1 on."""
    return widgets.BoundedIntText(value, 1, _LARGEST_NUMBER, **_labelled(label, _NUMBER_WIDTH))


def _labelled(label: str, width: str) -> dict[str, Any]:
    return {"description": label, "style": {"description_width": LABEL_WIDTH}, "layout": _layout(width)}


def _layout(width: str) -> Any:
    return widgets.Layout(width=width, max_width="100%")


def _greyed(offer: Offer) -> str:
    style = "color: var(--jp-ui-font-color2, #616161); line-height: 20px"
    return f'<div style="{style}">{html.escape(str(offer))}</div>'
