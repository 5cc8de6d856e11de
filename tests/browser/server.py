"""A Jupyter server in a process of its own, on a free loopback port and behind a token. Runs in the tests.

It serves JupyterLab and Notebook 7 alike, offers one kernel per environment of the tests, and keeps notebooks,
settings, connection files and its log in one folder that the test gives it. Nothing of the user's own Jupyter is read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat

from environments import ENVIRONMENTS, KAGGLE, REPOSITORY, Environment

__all__ = ["JupyterServer"]

_START_TIMEOUT_S = 40.0
_END_TIMEOUT_S = 10.0

_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    # Off by default would mean a question on the screen, over the cell that a test wants to press.
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    # Every cell stays in the page, also one that is scrolled out of sight.
    "notebook-extension/tracker": {"windowingMode": "none"},
}


class JupyterServer:
    """A running server; `close` ends it and its kernels.

    folder: for everything it writes; it must be new and empty.
    """

    def __init__(self, folder: Path) -> None:
        self.notebooks = folder / "notebooks"
        self._log = folder / "server.log"
        self._runtime = folder / "runtime"
        self._settings = folder / "settings"
        self.notebooks.mkdir()
        _offer_kernels(folder / "data" / "kernels")
        self.configure(_SETTINGS)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command(), env=self._environ(folder), cwd=self.notebooks, stdout=log, stderr=log
            )
        try:
            self._info = self._wait_until_it_listens()
        except BaseException:
            self.close()
            raise

    def _command(self) -> list[str]:
        arguments = {
            "ip": "127.0.0.1",
            "port": 0,
            "open_browser": False,
            "allow_root": True,  # tests run in containers
            "root_dir": str(self.notebooks),
        }
        traits = [f"--ServerApp.{name}={value}" for name, value in arguments.items()]
        return [sys.executable, "-m", "jupyterlab", *traits]

    def _environ(self, folder: Path) -> dict[str, str]:
        return {
            **os.environ,
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTER_DATA_DIR": str(folder / "data"),
            "JUPYTER_RUNTIME_DIR": str(self._runtime),
            "JUPYTERLAB_SETTINGS_DIR": str(self._settings),
            "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
            "IPYTHONDIR": str(folder / "ipython"),
            "PYTHONPATH": str(REPOSITORY),
        }

    def _wait_until_it_listens(self) -> dict[str, Any]:
        """The file in which the server says its port and token."""
        path = self._runtime / f"jpserver-{self._process.pid}.json"
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                return dict(json.loads(path.read_text()))
            except (OSError, ValueError):  # not there yet, or half written
                time.sleep(0.05)
        raise RuntimeError(f"the Jupyter server did not start:\n{self._log.read_text()[-2000:]}")

    # --- what tests ask ------------------------------------------------------------------------------------------

    @property
    def token(self) -> str:
        return str(self._info["token"])

    def url(self, path: str) -> str:
        return f"{self._info['url']}{path}"

    def configure(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """Set what JupyterLab's settings editor would: plugin to values; pages opened from now on follow."""
        for plugin, values in settings.items():
            path = self._settings / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))

    def write(self, name: str, cells: list[str], environment: Environment) -> Path:
        """A notebook of code cells, in a folder of that name, whose kernel runs in `environment`."""
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(code) for code in cells],
            metadata={"kernelspec": {"name": environment.name, "display_name": environment.name, "language": "python"}},
        )
        path = self.notebooks / name / "notebook.ipynb"
        path.parent.mkdir()
        nbformat.write(notebook, path)
        return path.relative_to(self.notebooks)

    def wait_for_kernel(self, notebook: Path, timeout_s: float) -> None:
        """Return when a page that shows `notebook` is connected to its kernel, and the kernel has answered."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for session in self._ask("GET", "sessions"):
                kernel = session["kernel"]
                is_ready = kernel["connections"] and kernel["execution_state"] == "idle"
                if session["path"] == notebook.as_posix() and is_ready:
                    return
            time.sleep(0.05)  # the server tells nobody
        raise TimeoutError(f"{notebook} had no idle kernel in {timeout_s:g} s:\n{self._log.read_text()[-2000:]}")

    def interrupt_kernels(self) -> None:
        """Interrupt what every kernel does, as the front end's stop button would."""
        for kernel in self._ask("GET", "kernels"):
            self._ask("POST", f"kernels/{kernel['id']}/interrupt")

    def end_kernels(self) -> None:
        """Shut down every kernel, as closing all notebooks with their kernels would."""
        for session in self._ask("GET", "sessions"):
            self._ask("DELETE", f"sessions/{session['id']}")
        for kernel in self._ask("GET", "kernels"):
            self._ask("DELETE", f"kernels/{kernel['id']}")

    def _ask(self, method: str, path: str) -> Any:
        request = urllib.request.Request(
            self.url(f"api/{path}"), method=method, headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=_END_TIMEOUT_S) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()  # it ends its kernels and asks nothing
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _offer_kernels(folder: Path) -> None:
    for environment in (*ENVIRONMENTS, KAGGLE):
        spec = {
            "argv": environment.kernel_argv,
            "display_name": environment.name,
            "language": "python",
            "env": environment.changes,
        }
        path = folder / environment.name / "kernel.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(spec))
