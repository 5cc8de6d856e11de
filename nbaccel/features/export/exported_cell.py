"""ExportedCell: makes a script run as the notebook's cell ran. Scripts of `%accelerate export` import it; in ranks.

In the notebook the cells above ran in the kernel, alone, and the cell in ranks that had all which the kernel had. So a
rank of the script runs what stands above as if it were alone: the variables of ranks are put aside. One rank of each
machine does so before the others, since cells download and unpack. Then it becomes a rank with the setup of cells: a
loop that prepares nothing is trained on all ranks, and seeds are set where the cell began.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from nbaccel.base.settings import RunSettings
from nbaccel.base.world import World
from nbaccel.features.export.first_steps import FIRST_STEPS, LossFile
from nbaccel.launching.ipc.rank_part import RankTask
from nbaccel.launching.ipc.spec import TaskWatch
from nbaccel.launching.libraries import ONE_PROGRAM, OtherLibraries
from nbaccel.launching.libraries.one_file import OneFile
from nbaccel.launching.tasks.function_task import FunctionTask
from nbaccel.train.distributed.partial_state import PartialState, forget_worlds
from nbaccel.train.raw_loop.rank_streams import use_own_device
from nbaccel.train.setup import setup_rank

__all__ = ["ExportedCell"]

_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_LONGEST_WAIT = timedelta(days=7)
"""For the cells above in another rank, which may load anything. If that rank dies, torch's agent ends this one."""


class ExportedCell:
    """The cell of one script.

    Args:
        settings: What the cell's flags chose, as keywords of `RunSettings`. The variables of the launch win.
    """

    def __init__(self, **settings: Any) -> None:
        for name, value in RunSettings(**settings).environ().items():
            os.environ.setdefault(name, value)
        self._world = World.from_env()
        self._libraries = OtherLibraries(self._world)
        self._watch: TaskWatch | None = None
        self._losses: LossFile | None = None
        self._folder: Path | None = None
        self._store = self._meeting_place()
        if self._world.is_distributed:
            use_own_device(self._world)
        if self._store is not None and self._world.local_rank > 0:
            self._store.wait([self._node_key], _LONGEST_WAIT)
        self._aside = {name: os.environ.pop(name) for name in _OF_RANKS if name in os.environ}

    def begin(self, namespace: dict[str, Any], binds_accelerator: bool = True) -> None:
        """Become a rank. Collective where there are several.

        Args:
            namespace: The globals of the script.
            binds_accelerator: The cell gets a name `accelerator`, unless a cell above has made one.
        """
        os.environ.update(self._aside)
        if self._world.is_distributed:
            forget_worlds()
            self._libraries.install()
        if self._store is not None and self._world.local_rank == 0:
            self._store.set(self._node_key, "done")
        self._store = None
        settings = RunSettings.from_env()
        watch = setup_rank(namespace, binds_accelerator)
        self._watch = watch
        if self._world.is_distributed and not settings.independent:
            self._act_as_one(watch, knows_ranks=not settings.seeds_alike)
        if watch is not None:
            watch.begin(namespace)
        if (where := os.environ.get(FIRST_STEPS)) is not None:
            self._losses = LossFile.begin(where, self._world)

    def end(self) -> None:
        """End the cell: all ranks of a loop that prepares nothing have the same weights then. Collective."""
        if self._watch is not None:
            self._watch.end()
        if self._losses is not None:
            self._losses.end()
        if self._folder is not None:
            PartialState().collectives.barrier()
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _node_key(self) -> str:
        return f"nbaccel/cells above/{(self._world.rank - self._world.local_rank)}"

    def _meeting_place(self) -> TCPStore | None:
        """Return the store of torch's agent; None if there is a single rank here, or no agent."""
        if self._world.local_world_size < 2 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return None
        return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)

    def _act_as_one(self, watch: TaskWatch | None, knows_ranks: bool) -> None:
        """Let the ranks of this machine write one file, draw one bar and count a metric once, as ranks of a cell do."""
        name = PartialState().collectives.broadcast_objects([f"nbaccel-{secrets.token_hex(8)}"])[0]
        self._folder = Path(tempfile.gettempdir(), name)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        place, world = str(self._folder / "store"), self._world
        here = World(world.local_rank, world.local_world_size, world.local_rank, world.local_world_size)
        task = FunctionTask(print, (), {})
        task.knows_ranks = knows_ranks
        self._libraries.rank.store_path = place
        self._libraries.meet(ONE_PROGRAM)
        self._libraries.begin(RankTask(task, watch))
        OneFile(here, place).install()
