"""Completer: asks what Tab offers on the line of a magic, and after `accelerator.` in a cell. Runs in the kernel.

What is offered is a feature, which is loaded at the first Tab; where its folder is not there, nothing is.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import IPython

from nbaccel.errors import FeatureMissing
from nbaccel.features import feature
from nbaccel.notebook.shell_hooks import ACCELERATOR

if TYPE_CHECKING:
    from nbaccel.features.completion.offers import Offers

__all__ = ["MAGICS", "MEMBER", "Completer"]

MAGICS = ("%accelerate", "%%accelerate")
_HOOK = "complete_command"
_PRIORITY = 1000
"""Priority before all of IPython's completers, so that none of them works in vain."""
_HAS_MATCHERS = IPython.version_info >= (8, 6)
"""From this version on a completer may suppress others; before, IPython adds jedi's results to all offers."""
MEMBER = rf"(?:.*[^\w.])?{ACCELERATOR}\.(\w*)\Z"
"""The end of a line that names a member of `accelerator`, perhaps unfinished."""


class Completer:
    """Completes in one shell between `install` and `remove`."""

    def __init__(self, shell: Any, parser: argparse.ArgumentParser) -> None:
        self._shell = shell
        self._parser = parser

    def install(self) -> None:
        if _HAS_MATCHERS:
            # IPython asks a function for its name and version, and a method takes no attribute.
            self._matcher: Callable[..., Any] = lambda context: self._offered(context)
            self._matcher.matcher_api_version = 2  # type: ignore[attr-defined]
            self._matcher.matcher_identifier = "nbaccel"  # type: ignore[attr-defined]
            self._matcher.matcher_priority = _PRIORITY  # type: ignore[attr-defined]
            self._shell.Completer.custom_matchers.append(self._matcher)
            return
        # IPython binds the given function to the shell, which works only with a plain function.
        self._hook: Callable[..., Any] = lambda shell, event: self._completed(event)
        for magic in MAGICS:
            self._shell.set_hook(_HOOK, self._hook, str_key=magic)
        self._member_hook: Callable[..., Any] = lambda shell, event: self._completed_member(event)
        self._shell.set_hook(_HOOK, self._member_hook, re_key=MEMBER)

    def remove(self) -> None:
        if _HAS_MATCHERS:
            self._shell.Completer.custom_matchers.remove(self._matcher)
            return
        # IPython has no opposite of `set_hook`: remove the hooks from its chains.
        hooks = self._shell.strdispatchers[_HOOK]
        for magic in MAGICS:
            chain = hooks.strs[magic].chain
            chain[:] = [link for link in chain if link[1].__func__ is not self._hook]
        for dispatcher in hooks.regexs.values():
            dispatcher.chain[:] = [link for link in dispatcher.chain if link[1].__func__ is not self._member_hook]

    @functools.cached_property
    def _offers(self) -> Offers | None:
        with suppress(FeatureMissing):
            offers: Offers = feature("what Tab offers")(self._shell, self._parser)
            return offers
        return None

    def _offered(self, context: Any) -> dict[str, Any]:
        return {"completions": []} if self._offers is None else self._offers.match(context)

    def _completed(self, event: Any) -> list[str]:
        return [] if self._offers is None else self._offers.complete(event)

    def _completed_member(self, event: Any) -> list[str]:
        return [] if self._offers is None else self._offers.complete_member(event)
