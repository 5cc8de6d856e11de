"""The strategy "deepspeed": DeepSpeed's ZeRO drives the training of one model. Runs in ranks.

It hooks in as a `Strategy`, by its name in the table of features, with options of its own. The package ``deepspeed`` is
imported when a model is prepared with this strategy, and never before. Imports `train` and `base`.
"""
