"""Turns the bytes that ranks write into the output that a person sees. Runs in the kernel.

Knows nothing of processes; imports nothing of the project.
"""

from __future__ import annotations
