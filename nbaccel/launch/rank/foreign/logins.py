"""Names the variable to set if a library in a rank asks the user to log in. Runs in ranks; imports no other library.

No input can be typed into a rank. `input` and `getpass` raise an error (`jupyter.py`); this module handles libraries
that ask in other ways: wandb looks for a terminal, and the Hugging Face hub shows a code and waits minutes for a person
to enter it. If Kaggle's internet is off, wandb detects that, prints it, and then tries for 90 s: here it is an error at
once.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any, NoReturn

from nbaccel.errors import NoInput
from nbaccel.launch.rank.loaded import when_loaded

__all__ = ["refuse_logins"]


def refuse_logins(rank: int) -> None:
    """Make a login that waits for a person raise `NoInput` with the variable to set. Called once per process."""
    when_loaded(
        {
            "wandb.sdk.lib.wbauth": partial(_refuse_wandbs, rank),
            "wandb.sdk.wandb_login": partial(_refuse_without_internet, rank),
            "huggingface_hub._login": partial(_refuse_the_hubs, rank),
        }
    )


def _refuse_wandbs(rank: int, module: Any) -> None:
    finds_key = module.authenticate_session

    @functools.wraps(finds_key)
    def authenticate_session(*args: Any, **kwargs: Any) -> Any:
        try:
            return finds_key(*args, **kwargs)
        except Exception as error:
            if type(error).__name__ != "UsageError":  # of wandb's: it has no key, and cannot ask
                raise
            raise NoInput(
                f"rank {rank} has no key for Weights & Biases, and nobody can type one into a rank. Set "
                'os.environ["WANDB_API_KEY"] or call wandb.login() in a cell before this one; with '
                'os.environ["WANDB_MODE"] = "offline" the run stays on disk, for `wandb sync`.'
            ) from error

    module.authenticate_session = authenticate_session


def _refuse_without_internet(rank: int, module: Any) -> None:
    logs_in, util = module._login, module.wandb.util

    @functools.wraps(logs_in)
    def login(*args: Any, **kwargs: Any) -> Any:
        if util._is_kaggle() and not util._has_internet():
            raise ConnectionError(
                f"rank {rank} cannot reach Weights & Biases: Kaggle's internet is off, see the notebook's settings. "
                'With os.environ["WANDB_MODE"] = "offline" in a cell before this one the run stays on disk, for '
                "`wandb sync`."
            )
        return logs_in(*args, **kwargs)

    module._login = login


def _refuse_the_hubs(rank: int, module: Any) -> None:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NoInput(
            f"rank {rank} was to log in to the Hugging Face hub, and nobody can answer in a rank. Set "
            'os.environ["HF_TOKEN"], or call huggingface_hub.login() in a cell before this one.'
        )

    if hasattr(module, "request_device_code"):  # older ones ask by `getpass`
        module.request_device_code = refuse
