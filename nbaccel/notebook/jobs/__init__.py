"""Many jobs from one call: a function over many items (`map_items`). Runs in the kernel, in a notebook or a script."""
