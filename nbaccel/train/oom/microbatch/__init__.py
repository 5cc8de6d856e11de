"""Micro-batches: one batch of the loader in several forward passes, with recovery from out-of-memory. Runs in ranks.

`StepEngine` runs a step; the other modules are its parts: samples, their weights, gradients, and sizes that have
fitted so far. None of them knows the Accelerator.
"""

from __future__ import annotations
