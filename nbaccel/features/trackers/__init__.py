"""Trackers: listeners on rank 0 that store a run's numbers in files or send them to a service.

It hooks in by the names that programs hand to `log_with`, and as what opens and closes them (`tracker_hub`); trackers
of other packages are entry points of the group `nbaccel_trackers`. Runs in ranks. Imports `train`, `base` and, when it
is opened, the library that it writes to.
"""
