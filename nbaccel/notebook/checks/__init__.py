"""Checks of a cell before it runs for hours: a dry run, its report, and faster settings that were measured."""

from __future__ import annotations
