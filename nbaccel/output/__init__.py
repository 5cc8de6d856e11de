"""Turns the bytes that ranks write into the output that a person sees.

Runs in the kernel; knows nothing of processes.
"""

from __future__ import annotations
