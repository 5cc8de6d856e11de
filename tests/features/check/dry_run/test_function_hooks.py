"""Functions that are replaced for a while are put back as they were, unless something else has wrapped them."""

from __future__ import annotations

from nbaccel.features.check.dry_run.function_hooks import FunctionHooks


class Base:
    def name(self) -> str:
        return "base"

    @staticmethod
    def kind() -> str:
        return "static"


class Derived(Base):
    """Inherits all."""


def test_ours_gets_the_real_function_and_all_is_put_back() -> None:
    before, replaced = dict(vars(Base)), FunctionHooks()
    replaced.wrap(Base, "name", lambda real, *args: f"ours of {real(*args)}")
    replaced.wrap(Base, "name", lambda real, *args: f"again {real(*args)}")
    replaced.wrap(Base, "kind", lambda real, *args: "ours")
    assert Base().name() == "again ours of base"
    replaced.undo()
    replaced.undo()
    assert dict(vars(Base)) == before


def test_what_was_inherited_is_inherited_again() -> None:
    replaced = FunctionHooks()
    replaced.wrap(Derived, "name", lambda real, *args: f"derived {real(*args)}")
    assert (Derived().name(), Base().name()) == ("derived base", "base")
    replaced.undo()
    assert "name" not in vars(Derived)


def test_what_was_wrapped_meanwhile_stays() -> None:
    class Library:
        def call(self) -> str:
            return "library"

    replaced = FunctionHooks()
    replaced.wrap(Library, "call", lambda real, *args: real(*args))
    ours = Library.call
    Library.call = theirs = lambda self: f"theirs of {ours(self)}"  # type: ignore[method-assign]
    replaced.undo()
    assert Library.call is theirs
    assert Library().call() == "theirs of library"
