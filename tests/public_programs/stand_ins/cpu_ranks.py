"""Ranks of Accelerate's PartialState know each other on CPUs, as with nbaccel; without `cpu` each would be alone."""

import functools

from accelerate import PartialState

_begin = PartialState.__init__


@functools.wraps(_begin)
def _begin_on_cpu(self, cpu=False, **options):
    _begin(self, cpu=True, **options)


PartialState.__init__ = _begin_on_cpu
