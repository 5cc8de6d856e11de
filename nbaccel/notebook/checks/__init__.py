"""Checks of a cell before it runs for hours, and faster settings that were measured. Runs in the kernel."""

from __future__ import annotations
