"""Environment: sets or clears variables for the length of a block or a test, and reads numbers. Runs anywhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

__all__ = ["clear_environment", "get_int_from_env", "patch_environment", "purge_accelerate_environment"]


_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set environment variables, with upper-case names, inside this block.

    Args:
        **kwargs: The value of each variable; it is converted to a text.

    Example:
        >>> with patch_environment(my_variable=3):
        ...     os.environ["MY_VARIABLE"]
        '3'
    """
    before = os.environ.copy()
    names = {name.upper(): str(value) for name, value in kwargs.items()}
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if name in names})


@contextmanager
def clear_environment() -> Iterator[None]:
    """Remove all environment variables, inside this block. What the block sets is removed at its end.

    Example:
        >>> with clear_environment():
        ...     len(os.environ)
        0
    """
    before = os.environ.copy()
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the number in the first of these variables that is set and not negative, else `default`.

    Args:
        env_keys: Names of variables, the first to be read first.
        default: The number where none of them has one.

    Returns:
        That number.

    Example:
        >>> with patch_environment(second=3):
        ...     get_int_from_env(["FIRST", "SECOND"], 1)
        3
    """
    numbers = (int(os.environ.get(key, "-1")) for key in env_keys)
    return next((number for number in numbers if number >= 0), default)


def purge_accelerate_environment(func_or_cls: _Decorated) -> _Decorated:
    """Decorate tests so that variables that begin with ``ACCELERATE_`` have their old values afterwards.

    Args:
        func_or_cls: A function; or a class, whose tests and those of its later subclasses are decorated.

    Returns:
        A function around the one that was given; the same class.

    Example:
        >>> @purge_accelerate_environment
        ... def test_a_variable():
        ...     os.environ["ACCELERATE_MINE"] = "1"
        >>> test_a_variable()
        >>> "ACCELERATE_MINE" in os.environ
        False
    """
    if isinstance(func_or_cls, type):
        cls: Any = func_or_cls

        def purge_subclass(subclass: type, /, **kwargs: Any) -> None:
            super(cls, subclass).__init_subclass__(**kwargs)
            _purge_tests(subclass)

        _purge_tests(cls)
        cls.__init_subclass__ = classmethod(purge_subclass)
        return func_or_cls

    @wraps(func_or_cls)
    def purged(*args: Any, **kwargs: Any) -> Any:
        before = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
        try:
            return func_or_cls(*args, **kwargs)
        finally:
            for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
                del os.environ[name]
            os.environ.update(before)

    return purged  # type: ignore[return-value]


def _purge_tests(cls: type) -> None:
    for name, value in list(vars(cls).items()):
        if callable(value) and name.startswith("test"):
            setattr(cls, name, purge_accelerate_environment(value))
