"""`batches_by_length`: batches of inputs of about equal lengths, for inference. It hooks in as that name.

Runs in any process. Imports nothing of nbaccel.
"""
