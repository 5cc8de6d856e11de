"""SlurmStep: the step of Slurm that `srun` has started this process in, by its environment. Runs anywhere."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from nbaccel.base.values import frozen

__all__ = ["SlurmStep"]


@frozen
class SlurmStep:
    """The step of Slurm that `srun` has started this process in.

    Args:
        job: Number of the job.
        nodes, node: Number of machines, and the number of this one, 0-based.
        first_host: The name of node 0.
        tasks: Number of processes on each machine, as Slurm writes it: "1(x2)".
    """

    job: int
    nodes: int
    node: int
    first_host: str
    tasks: str

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> SlurmStep | None:
        """Return the step that the environment describes; None for a process that `srun` has not started.

        Args:
            environ: The variables; by default those of this process.

        Example:
            >>> step = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_NODES": "3", "SLURM_NODEID": "2"}
            >>> SlurmStep.from_env({**step, "SLURM_STEP_NODELIST": "gpu[08-09,11]"}).first_host
            'gpu08'
        """
        env = os.environ if environ is None else environ
        try:
            names = "SLURM_JOB_ID", "SLURM_STEP_NUM_NODES", "SLURM_NODEID"
            job, nodes, node = (int(env[name]) for name in names)
            hosts = env["SLURM_STEP_NODELIST"]
        except (KeyError, ValueError):
            return None
        found = re.match(r"([^,\[]+)(?:\[(\d+))?", hosts)
        first = "" if found is None else found[1] + (found[2] or "")
        return cls(job, nodes, node, first, env.get("SLURM_STEP_TASKS_PER_NODE", "1"))
