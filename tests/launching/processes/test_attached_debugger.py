"""A debugger that is attached to the notebook reaches no process of a run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nbaccel.launching.processes.attached_debugger import is_attached

DEBUGGED = """
import os, sys, threading, _posixsubprocess, _thread
from types import ModuleType, SimpleNamespace

def never(*args, **kwargs): raise AssertionError("the debugger's")
for module, name in ((os, "fork"), (_posixsubprocess, "fork_exec")):
    setattr(module, "original_" + name, getattr(module, name)); setattr(module, name, never)
threading._original_start_new_thread = threading._start_new_thread; threading._start_new_thread = never
sys.modules["_pydev_bundle.pydev_monkey"] = ModuleType("pydev_monkey")
tracing = sys.modules["_pydevd_bundle.pydevd_tracing"] = ModuleType("pydevd_tracing")
tracing.TracingFunctionHolder = SimpleNamespace(_original_tracing=sys.settrace)
sys.modules["_pydevd_bundle.pydevd_constants"] = SimpleNamespace(get_global_debugger=object)
sys.settrace(lambda *args: None); sys.settrace = never

from nbaccel.launching.processes import attached_debugger
assert attached_debugger.is_attached()
pid = attached_debugger.fork()
if pid == 0:
    code = 1
    try:
        attached_debugger.leave_debugger(attached_debugger.what_it_replaced())
        assert sys.gettrace() is None
        child = os.fork()
        if child == 0: os._exit(0)
        os.waitpid(child, 0)
        threading._start_new_thread(int, ())
        code = 0
    finally:
        os._exit(code)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="threads are started by another function there")
def test_a_forked_rank_has_left_the_debugger() -> None:
    assert not is_attached()
    done = subprocess.run([sys.executable, "-c", DEBUGGED], capture_output=True, text=True, env={**os.environ})
    assert done.stdout == "0\n", done.stderr
