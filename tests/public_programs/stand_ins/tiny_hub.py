"""Uploads that go nowhere, and `load_metric`, which newer releases of datasets lack."""

import datasets
import evaluate
import huggingface_hub


class Repository:
    def __init__(self, *_, **__):
        pass

    def push_to_hub(self, *_, **__):
        pass


huggingface_hub.Repository = Repository
huggingface_hub.get_full_repo_name = lambda name, **_: f"me/{name}"
huggingface_hub.notebook_login = lambda: None
datasets.load_metric = lambda *_, **__: evaluate.load()
