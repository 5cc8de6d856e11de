"""Micro-batches: one batch of the loader in several forward passes, and out of memory as an event. Runs in ranks.

`StepEngine` leads a step, the other files are its parts: which samples, what they weigh, whose gradients, what has
fitted so far. None of them knows the Accelerator.
"""
