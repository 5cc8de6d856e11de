"""Ranks on several machines: `--nodes`, `launch(nodes=...)`. Runs in the kernel, in a relay beside it, and on nodes.

To the kernel a rank on another machine is a process of its own machine, the rank's stand-in, which holds the rank's
ends. A relay, one process for all nodes, takes from these ends what the kernel says, and gives it to the agents, one on
each node, and back. So the supervisor, its policies, the panel and the router do not know where a rank is.

It hooks in as a mode of a cell (`cell_mode`), as a command, by a name that `launch` asks for, and by a row of the
doctor's report (`ways`). May import every folder of the core.

Reasons: docs/design/cluster.md
"""
