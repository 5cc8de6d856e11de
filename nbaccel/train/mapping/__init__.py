"""Maps: a function over many items in several ranks that do not wait for each other. Runs in ranks and scripts."""
