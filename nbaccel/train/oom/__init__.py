"""What happens when memory runs out: free it, cut batches, or run again smaller. Runs in ranks.

Imports the rest of `train` and `base`.
"""
