"""Computes the time of a whole run from the records of a dry run. Runs in the kernel, and runs no code of a user.

Imports `base`.
"""

from __future__ import annotations
