"""Substitutes for classes of PyTorch whose constructors accept only the devices that PyTorch knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def stand_in(plain: type, make: Callable[..., Any]) -> type:
    """A class that is called as `plain` is, and returns what `make` does; where that is None, a `plain` object.

    Instances of `plain` count as its own, so it can replace `plain` in PyTorch's namespace.
    """
    base: Any = type(plain)

    class Instances(base):  # type: ignore[misc]
        def __instancecheck__(self, instance: object) -> bool:
            return isinstance(instance, plain) if self is replacement else bool(super().__instancecheck__(instance))

        def __subclasscheck__(self, subclass: type) -> bool:
            return issubclass(subclass, plain) if self is replacement else bool(super().__subclasscheck__(subclass))

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs) if cls is replacement else None
        plainly: Any = plain.__new__
        return made if made is not None else plainly(plain if cls is replacement else cls, *args, **kwargs)

    members = {"__new__": new, "__module__": "torch", "__doc__": plain.__doc__}
    replacement = Instances(plain.__name__, (plain,), members)
    return replacement
