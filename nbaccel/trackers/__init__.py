"""The trackers: listeners on rank 0 that keep a run's numbers in files or send them to a service.

Each is an entry point of the group `nbaccel_trackers` (pyproject.toml), so that `train` finds them by name
without knowing this room. They know the seam, `nbaccel.tracking`, and the library they write to; no process group.
"""
