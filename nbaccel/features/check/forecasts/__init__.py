"""The time of a whole run, from the records of a dry run. Used in the kernel; runs no code of a user."""

from __future__ import annotations
