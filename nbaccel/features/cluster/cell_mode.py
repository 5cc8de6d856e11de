"""`--nodes`: a cell on several machines. A mode of `%%accelerate`, and `launch(nodes=...)`; runs in the kernel."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError

from nbaccel.base.hardware import Survey
from nbaccel.base.quantities import amount
from nbaccel.base.settings import CHECKPOINT_DIR, STOP
from nbaccel.errors import LaunchRefused
from nbaccel.features.cluster.cluster import Cluster
from nbaccel.features.cluster.nodes import NodeFacts, refuse_unlike, spread, survey_of, wanted_of
from nbaccel.launching.ipc.spec import LaunchSpec, Start, Task
from nbaccel.launching.launcher import LauncherResources
from nbaccel.launching.plan import LaunchPlan
from nbaccel.launching.preflight import ProcessState
from nbaccel.notebook.cell_mode import InRanks
from nbaccel.notebook.cell_plan import AskedCell, CellPlan, task_class
from nbaccel.notebook.session import Session
from nbaccel.options.run_options import AUTO, RunOptions

__all__ = ["NodesMode", "clusters", "launch_on_nodes", "show_nodes"]

_WORTH_SAYING_BYTES = 10_000_000
_NOT_AGAIN = "runs on several machines are not started again by themselves; on one"

_ELSEWHERE = ProcessState(can_fork=True, why_forks_fail="the ranks are on other machines")


class Clusters:
    """The cluster of this process, whose agents stay warm between cells; another one takes its place."""

    def __init__(self) -> None:
        self._nodes: Mapping[str, Any] = {}
        self._cluster: Cluster | None = None

    def of(self, nodes: str, timeout_s: float | None, resources: LauncherResources) -> Cluster:
        """Return the cluster of these nodes.

        Args:
            nodes, timeout_s: See `wanted_of`.
            resources: The launcher's, which end it.
        """
        wanted = wanted_of(nodes, timeout_s)
        if self._cluster is None or wanted != self._nodes:
            self.end()
            self._nodes, self._cluster = wanted, Cluster(wanted, resources.kernel_pidfd)
        if self not in resources.lasting:
            resources.lasting.append(self)
        return self._cluster

    @property
    def is_open(self) -> bool:
        """Return whether nodes are connected."""
        return self._cluster is not None and self._cluster.is_open

    @property
    def present(self) -> Cluster:
        """Return the cluster that is connected."""
        assert self._cluster is not None
        return self._cluster

    def end(self) -> str:
        """End all agents, and return that in words."""
        cluster, self._cluster = self._cluster, None
        if cluster is None:
            return ""
        was_open = cluster.is_open
        cluster.close()
        return f"the agents on {', '.join(self._nodes['hosts'])} have ended" if was_open else ""

    def fds(self) -> list[int]:
        """Return the descriptors that no rank of this machine may hold."""
        return [] if self._cluster is None else self._cluster.fds()


clusters = Clusters()


def plan_on_nodes(plan: LaunchPlan, nodes: list[NodeFacts], cluster: Cluster, is_counted: bool) -> LaunchPlan:
    """Return a plan, made for the `survey_of` the nodes as one machine, as the plan of ranks on them."""
    devices, cluster.placement = spread(plan.devices, nodes, is_counted)
    return replace(plan, devices=devices, start=Start("nodes", "asked for", is_explicit=True), own_devices=False)


def spec_on_nodes(spec: LaunchSpec, cluster: Cluster) -> LaunchSpec:
    """Return the spec of a run on nodes, which is not started again for memory."""
    return replace(spec, fork_server=cluster, oom=STOP, no_restart=_NOT_AGAIN)


class NodesMode:
    """Runs a cell in ranks on several machines, as `InRanks` does on one."""

    def plan(self, session: Session, cell: AskedCell) -> CellPlan:
        """Connect to the nodes if that is not done, and decide the run.

        Raises:
            LaunchRefused: A node cannot be reached, is unlike the notebook, or lacks what was asked for.
        """
        asked = cell.options
        if session.has_ranks:
            raise LaunchRefused("ranks stay in this notebook, on this machine: %accelerate stop ends them.")
        options, source, news = session.read(cell)
        cluster, nodes = connected(options, session.launcher.resources)
        survey = survey_of(session.survey(), nodes)
        task = task_class(options)(
            source, session.shell.user_ns, options.names_back, options.inputs or (), debugged=options.pdb
        )
        plan = LaunchPlan.of_cell(options, task, survey, _ELSEWHERE, None, asked)
        plan = plan_on_nodes(plan, nodes, cluster, options.world_size is not None)
        options.shown_ranks(plan.devices.num_processes)
        session.last_plan = plan
        to_each = f"{amount(plan.bytes_to_copy)} to each node" if plan.bytes_to_copy > _WORTH_SAYING_BYTES else ""
        saves = _shared_folder(options, cluster)
        session.say("\n".join(filter(None, [str(plan), ", ".join(filter(None, [to_each, saves]))])))
        if news:
            session.say(news)
        spec = spec_on_nodes(plan.spec(task, session.setup, wants_results=task.leaves_all or bool(task.out)), cluster)
        return CellPlan(session.launcher, plan, source, task, spec, session.origin(plan, cell.typed))

    def run(self, session: Session, plan: CellPlan) -> Any:
        """Run the cell, see `InRanks.run`."""
        return InRanks().run(session, plan)


def _shared_folder(options: RunOptions, cluster: Cluster) -> str:
    """Return where the run saves, in words; empty if it was not asked to.

    Raises:
        LaunchRefused: A node does not see that folder.
    """
    if options.checkpoint_every is None and options.resume is None:
        return ""
    folder = Path(options.checkpoint_dir or CHECKPOINT_DIR).expanduser().absolute()
    probe = folder / f".nbaccel-seen-{secrets.token_hex(6)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
    except OSError as error:
        raise LaunchRefused(
            f"--checkpoint-dir {folder}: {error.strerror}. Name a folder that can be written."
        ) from None
    try:
        blind = cluster.blind_nodes(str(probe))
    finally:
        probe.unlink(missing_ok=True)
    if blind:
        raise LaunchRefused(
            f"{', '.join(blind)} {'does' if len(blind) == 1 else 'do'} not see {folder}, where the run is to save: "
            "name a folder that all nodes have, --checkpoint-dir /shared/checkpoints."
        )
    return f"checkpoints in {folder} (all nodes see it)"


def show_nodes(session: Session, words: str) -> None:
    """Print what each node has, for `%accelerate nodes`.

    Args:
        session: The notebook's session.
        words: As for `--nodes`; empty for the nodes that are connected.

    Raises:
        UsageError: Nothing is connected and none is named.
        LaunchRefused: A node cannot be reached.
    """
    resources = session.launcher.resources
    if not words and not clusters.is_open:
        raise UsageError("no nodes are connected: %accelerate nodes host1,host2, slurm or ray.")
    cluster = clusters.of(words, None, resources) if words else clusters.present
    nodes = [NodeFacts.of(said) for said in cluster.connect()]
    for node in nodes:
        try:
            refuse_unlike([node])
        except LaunchRefused as error:
            session.say(f"{node}\n  {error}")
        else:
            session.say(str(node))


def connected(options: RunOptions, resources: LauncherResources) -> tuple[Cluster, list[NodeFacts]]:
    """Return the cluster that the options name, connected, and the facts of its nodes.

    Raises:
        LaunchRefused: See `NodesMode.plan`.
    """
    assert options.nodes is not None
    cluster = clusters.of(options.nodes, options.node_timeout, resources)
    nodes = [NodeFacts.of(said) for said in cluster.connect()]
    refuse_unlike(nodes)
    return cluster, nodes


def launch_on_nodes(
    options: RunOptions, task: Task, resources: LauncherResources, setup: str | None, words: Mapping[str, str]
) -> LaunchSpec:
    """Return the spec of a function on nodes, for `launch(nodes=...)`.

    Raises:
        LaunchRefused: See `NodesMode.plan`; or the call says how ranks of this machine start, or their devices.
    """
    for argument, value in (("start_method", options.start), ("devices", options.devices)):
        if value not in (None, AUTO):
            raise LaunchRefused(f"{argument}={value!r} is about ranks of this machine: leave it out, or nodes.")
    if options.oom != STOP:
        raise LaunchRefused("oom='shrink' and nodes: a run on several machines is not started again for memory.")
    cluster, nodes = connected(options, resources)
    plan = LaunchPlan.of(options, task, survey_of(Survey.take(), nodes), _ELSEWHERE)
    plan = plan_on_nodes(plan, nodes, cluster, options.world_size is not None)
    plan = replace(plan, own=options, words=words)
    return spec_on_nodes(plan.spec(task, setup, wants_results=True), cluster)
