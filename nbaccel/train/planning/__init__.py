"""Planning: the largest batch that fits, found before the training by a handful of trial steps. Runs in ranks."""
