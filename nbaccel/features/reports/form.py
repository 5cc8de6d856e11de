"""Form of `%accelerate config`: the notebook's choices as widgets. Runs in the kernel, between cells.

A change takes effect at once, for the next cell; the button writes the file. `choices` decides what can be chosen,
`configuration` what is wrong; the form shows the same line for the next cell as the cell will print. A `Field`
translates between its widget and the text after KEY= in `%accelerate config`, which decides whether that text is right.
It uses core ipywidgets only, 7.7.1 or 8: native inputs with labels, usable by keyboard and screen reader.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ipywidgets as widgets
from IPython.core.error import UsageError
from IPython.display import display

from nbaccel.base.hardware import Survey
from nbaccel.base.settings import SHRINK
from nbaccel.errors import LaunchRefused
from nbaccel.features.reports.choices import (
    OF_WHICH,
    Offer,
    checkpoint_intervals,
    effective_batch_size,
    for_which_loops,
    memory_policies,
    overview,
    precisions,
    process_counts,
    seeds,
    strategies,
    world_size,
)
from nbaccel.launching.plan import refuse_a_crowd
from nbaccel.notebook.commands import next_cell
from nbaccel.options.configuration import Configuration
from nbaccel.options.parsing import chosen, command_line, text_of
from nbaccel.options.run_options import AUTO, RunOptions

__all__ = [
    "RANKS",
    "Field",
    "Form",
    "number",
]

CSS_CLASS = "nbaccel-form"
"""CSS class by which a style sheet, or a test, finds the form in the page."""

_CALCULATOR = (
    "<strong>Calculator</strong>: samples per optimizer step. It sets nothing; the batch size is your DataLoader's."
)

_WIDGET_MIME = "application/vnd.jupyter.widget-view+json"


class Form:
    """The form of a notebook, which can be displayed several times; all its displays show the same.

    Args:
        survey: A function that examines the machine, each time the form is displayed.
        batch_size: Initial value of the formula, samples per device and batch.

    Attributes:
        widget: The whole form.
    """

    def __init__(self, configuration: Configuration, survey: Callable[[], Survey], batch_size: int) -> None:
        self._configuration = configuration
        self._survey = survey
        self._machine = survey()
        self._is_following = False
        self._fields = _make_fields()
        self._batch_size = number("Batch size per device", batch_size)
        self._facts = widgets.HTML()
        self._answer = widgets.HTML()
        save = widgets.Button(description="Save to nbaccel.toml", layout=widgets.Layout(width="auto"))
        reset = widgets.Button(description="Back to automatic", layout=widgets.Layout(width="auto"))
        self.widget = widgets.VBox(
            [
                widgets.HTML(
                    f"<strong>The next %%accelerate cells</strong><div>{html.escape(for_which_loops())}</div>"
                ),
                *(widget for field in self._fields for widget in field.widgets),
                widgets.HTML(f'<div style="margin-top: 8px">{_CALCULATOR}</div>'),
                self._batch_size,
                self._facts,
                widgets.HBox([save, reset], layout=widgets.Layout(margin=f"4px 0 0 {_INDENT}")),
                self._answer,
            ]
        )
        self.widget.add_class(CSS_CLASS)
        self.follow()
        for field in self._fields:
            field.widget.observe(self._on_choice(field), "value")
        self._batch_size.observe(lambda change: self._state_facts(), "value")
        save.on_click(lambda button: self._attempt(self._configuration.save))
        reset.on_click(lambda button: self._attempt(self._configuration.reset))

    def show(self) -> None:
        """Display the form; if no widgets are shown, as in a saved notebook, the same as text."""
        self._machine = self._survey()
        self.follow()
        text = overview(self._configuration, self._machine, self._batch_size.value)
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        display({"text/plain": text, _WIDGET_MIME: view}, raw=True)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        """Show the present choices, from any source."""
        configuration = self._configuration
        texts = {key: text_of(value) for key, value in chosen(configuration.parser, configuration.options).items()}
        with self._following():
            for field in self._fields:
                field.show(texts.get(field.key), configuration.options, self._machine)
        self._state_facts()

    @contextmanager
    def _following(self) -> Iterator[None]:
        """Ignore reports of the widgets meanwhile: the form itself changes them."""
        self._is_following = True
        try:
            yield
        finally:
            self._is_following = False

    def _on_choice(self, field: Field) -> Callable[[Any], None]:
        def choose(change: Any) -> None:
            if not self._is_following:
                self._attempt(lambda: self._change(field), field)

        return choose

    def _change(self, field: Field) -> None:
        if field.key == RANKS and field.text.isdecimal():
            refuse_a_crowd(int(field.text), self._machine)
        self._configuration.change([f"{field.key}={field.text}"])

    def _attempt(self, action: Callable[[], str | None], field: Field | None = None) -> None:
        """Run `action`; show its result, or why it failed.

        Args:
            field: The field whose value is concerned, below which the message is shown.
        """
        trouble = answer = ""
        try:
            answer = action() or ""
        except (UsageError, LaunchRefused) as error:
            trouble = f"Not taken: {error}"
        else:
            self.follow()
        if field is not None:
            field.complain(trouble)
        else:
            answer = answer or trouble
            if not trouble:
                for each in self._fields:
                    each.complain("")
        style = f"margin-left: {_INDENT}; line-height: 1.4"
        self._answer.value = f'<div role="status" style="{style}">{html.escape(answer)}</div>'

    def _state_facts(self) -> None:
        """Show the effect of the choices."""
        options, machine = self._configuration.options, self._machine
        formula = effective_batch_size(self._batch_size.value, world_size(options, machine), options.accumulate or 1)
        facts = {
            "Effective batch size": f"<strong>{formula}</strong> {OF_WHICH}",
            "Next cell": html.escape(next_cell(machine, options)),
            "The same by flags": f"<code>{html.escape(command_line(self._configuration.parser, options))}</code>",
        }
        rows = "".join(f'<div style="text-align: right">{name}</div><div>{fact}</div>' for name, fact in facts.items())
        grid = (
            f"display: grid; grid-template-columns: {_LABEL_WIDTH} 1fr; gap: 4px 8px; margin: 4px 0; line-height: 1.4"
        )
        self._facts.value = f'<div style="{grid}">{rows}</div>'


_LABEL_WIDTH = "15em"
_INDENT = f"calc({_LABEL_WIDTH} + 8px)"
"""Left margin of the text below a field: beside the labels."""

RANKS = "num-processes"
"""The key of the number of ranks."""

_ENTRY_WIDTH = "36em"
_NUMBER_WIDTH = "22em"
_LARGEST_NUMBER = 1_000_000

Offers = Callable[[RunOptions, Survey], Sequence[Offer]]


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
        style = f"margin-left: {_INDENT}; line-height: 1.4; color: var(--jp-error-color1, #b3261e)"
        self._trouble.value = f'<div role="alert" style="{style}">{html.escape(trouble)}</div>' if trouble else ""
        self._trouble.layout.display = None if trouble else "none"

    @property
    def text(self) -> str:
        """Return the choice, as it is written after KEY=; empty for the default."""
        text = str(self.widget.value).strip()
        return "" if text == self._default else text

    def show(self, text: str | None, options: RunOptions, machine: Survey) -> None:
        """Show a choice that was made elsewhere; None for the default."""
        self.widget.value = self._default if text is None else text


class Number(Field):
    def show(self, text: str | None, options: RunOptions, machine: Survey) -> None:
        self.widget.value = int(self._default if text is None else text)


class Entry(Field):
    """A text that a person types; empty for the default, which the placeholder names.

    Args:
        offers: The first is the default, the others are proposed during typing.
    """

    def __init__(self, key: str, label: str, offers: Offers) -> None:
        entry = widgets.Combobox(continuous_update=False, **_labelled(label, _ENTRY_WIDTH))  # half a word is no choice
        super().__init__(key, entry)
        self._offers = offers

    def show(self, text: str | None, options: RunOptions, machine: Survey) -> None:
        default, *others = self._offers(options, machine)
        self.widget.placeholder = str(default)
        self.widget.options = tuple(offer.value for offer in others)
        super().show(text, options, machine)


class ChoiceField(Field):
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
        name = widgets.HTML(f'<div style="{beside}">{label}</div>', layout=_layout(_INDENT))
        self._row = widgets.HBox([name, widgets.VBox([self.widget, self._greyed])])

    @property
    def widgets(self) -> list[Any]:
        return [self._row, self._trouble]

    def show(self, text: str | None, options: RunOptions, machine: Survey) -> None:
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


def _make_fields() -> list[Field]:
    """Return a field for each setting that has one, in the order of the form and of the Tab key."""
    return [
        Entry(RANKS, "Ranks", process_counts),
        ChoiceField("mixed-precision", "Precision", precisions, AUTO),
        ChoiceField("strategy", "Strategy", strategies, AUTO),
        Number("accumulate", number("Batches per optimizer step", 1), "1"),
        Entry("seed", "Seed", seeds),
        ChoiceField("oom", "Out of memory", memory_policies, SHRINK),
        Entry("checkpoint-every", "Checkpoint every", checkpoint_intervals),
    ]


def number(label: str, value: int) -> Any:
    """Return an entry for a number from 1 on."""
    return widgets.BoundedIntText(value, 1, _LARGEST_NUMBER, **_labelled(label, _NUMBER_WIDTH))


def _labelled(label: str, width: str) -> dict[str, Any]:
    return {"description": label, "style": {"description_width": _LABEL_WIDTH}, "layout": _layout(width)}


def _layout(width: str) -> Any:
    return widgets.Layout(width=width, max_width="100%")


def _greyed(offer: Offer) -> str:
    style = "color: var(--jp-ui-font-color2, #616161); line-height: 20px"
    return f'<div style="{style}">{html.escape(str(offer))}</div>'
