"""Many jobs from one call: a function or a cell over many configurations (`sweep`). Runs in the kernel."""
