"""Many jobs from one call: a function over many items, or over many configurations. Runs in the kernel."""
