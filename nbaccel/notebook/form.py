"""The form of `%accelerate config`: the notebook's choices as widgets. Runs in the kernel, between cells.

A change takes effect at once, for the next cell; the button writes the file. `choices` decides what can be chosen,
`configuration` what is wrong; the form shows the same line for the next cell as the cell will print.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ipywidgets as widgets
from IPython.core.error import UsageError
from IPython.display import display

from nbaccel.errors import LaunchRefused
from nbaccel.hardware import Survey
from nbaccel.notebook.choices import effective_batch_size, overview, world_size
from nbaccel.notebook.configuration import Configuration
from nbaccel.notebook.fields import INDENT, LABEL_WIDTH, RANKS, Field, make_fields, number
from nbaccel.notebook.parsing import chosen, command_line, text_of
from nbaccel.notebook.plan import refuse_a_crowd
from nbaccel.notebook.status import next_cell

__all__ = ["Form"]

CSS_CLASS = "nbaccel-form"
"""CSS class by which a style sheet, or a test, finds the form in the page."""

_CALCULATOR = (
    "<strong>Calculator</strong>: samples per optimizer step. It sets nothing; the batch size is your DataLoader's."
)

_WIDGET_MIME = "application/vnd.jupyter.widget-view+json"


class Form:
    """The form of a notebook, which can be displayed several times; all its displays show the same.

    widget: the whole form.
    survey: examines the machine, each time the form is displayed.
    batch_size: initial value of the formula, samples per device and batch.
    """

    def __init__(self, configuration: Configuration, survey: Callable[[], Survey], batch_size: int) -> None:
        self._configuration = configuration
        self._survey = survey
        self._machine = survey()
        self._is_following = False
        self._fields = make_fields()
        self._batch_size = number("Batch size per device", batch_size)
        self._facts = widgets.HTML()
        self._answer = widgets.HTML()
        save = widgets.Button(description="Save to nbaccel.toml", layout=widgets.Layout(width="auto"))
        reset = widgets.Button(description="Back to automatic", layout=widgets.Layout(width="auto"))
        self.widget = widgets.VBox(
            [
                widgets.HTML("<strong>The next %%accelerate cells</strong>"),
                *(widget for field in self._fields for widget in field.widgets),
                widgets.HTML(f'<div style="margin-top: 8px">{_CALCULATOR}</div>'),
                self._batch_size,
                self._facts,
                widgets.HBox([save, reset], layout=widgets.Layout(margin=f"4px 0 0 {INDENT}")),
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

        field: the field whose value is concerned, below which the message is shown.
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
        style = f"margin-left: {INDENT}; line-height: 1.4"
        self._answer.value = f'<div role="status" style="{style}">{html.escape(answer)}</div>'

    def _state_facts(self) -> None:
        """Show the effect of the choices."""
        options, machine = self._configuration.options, self._machine
        formula = effective_batch_size(self._batch_size.value, world_size(options, machine), options.accumulate or 1)
        facts = {
            "Effective batch size": f"<strong>{formula}</strong> (your DataLoader's batch size x ranks x batches)",
            "Next cell": html.escape(next_cell(machine, options)),
            "The same by flags": f"<code>{html.escape(command_line(self._configuration.parser, options))}</code>",
        }
        rows = "".join(f'<div style="text-align: right">{name}</div><div>{fact}</div>' for name, fact in facts.items())
        grid = f"display: grid; grid-template-columns: {LABEL_WIDTH} 1fr; gap: 4px 8px; margin: 4px 0; line-height: 1.4"
        self._facts.value = f'<div style="{grid}">{rows}</div>'
