"""Constructors of layers that are written once for several dimensions, and classes derived from a user's."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any
from weakref import WeakValueDictionary


def set_constructor(cls: type, base: type, options: dict[str, Any], leading: Collection[str] = ()) -> None:
    """Give a class a constructor with the arguments of ``base``'s and, by keyword, ``options``: name -> default.

    It says them to help() and ``torch.nn.utils.skip_init``. ``leading`` ones may stand before ``device``, too.
    """
    signature = inspect.signature(base.__init__)
    parameters = [*signature.parameters.values()]
    at = [p.name for p in parameters].index("device")
    added = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=value) for n, value in options.items()]
    first = [p.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in added if p.name in leading]
    rest = [p for p in added if p.name not in leading]
    signature = signature.replace(parameters=[*parameters[:at], *first, *parameters[at:], *rest])

    def constructor(*args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{cls.__name__}.__init__() {error}") from None
        super(cls, given.pop("self")).__init__(**given)

    made: Any = functools.wraps(base.__init__)(constructor)
    made.__signature__ = signature
    cls.__init__ = made


def dimensions(layer: type) -> int:
    """Return the number of spatial dimensions that the name of a convolution says; 0 for a linear layer."""
    return int(layer.__name__[-2]) if layer.__name__.endswith("d") else 0


class _NoInitSubclass:
    """The first base of a derived class, so that a user's ``__init_subclass__`` is not called for it."""

    def __init_subclass__(cls) -> None:
        pass


def with_bases(cls: type, bases: tuple[type, ...]) -> type:
    """Return the class over other bases, as for a class that torch made for one parametrized module."""
    body = {k: v for k, v in cls.__dict__.items() if k not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, bases, body)


_derived: WeakValueDictionary[Any, type] = WeakValueDictionary()


def derived_class(maker: Callable[[type], type], cls: type, bases: tuple[type, ...], body: dict[str, Any]) -> type:
    """Return the class that replaces ``cls``, with its name; ``maker`` is the function that makes it from ``cls``."""
    if (known := _derived.get((maker, cls))) is not None:
        return known
    origin, makers = cls.__dict__.get("_convgrad_made_of", (cls, ()))  # ``cls`` may be a derived class itself
    makers = (*makers, maker)

    def reduce(self: Any, protocol: int) -> Any:
        """Pickle the class as its origin and its makers, since no module holds the class itself."""
        make, args, *rest = super(made, self).__reduce_ex__(protocol)
        if args and args[0] is made:
            return (_remake, (makers, make, origin, *args[1:]), *rest)
        return (make, args, *rest)

    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    body = {**body, **named, "__reduce_ex__": reduce, "_convgrad_made_of": (origin, makers)}
    if not any(issubclass(base, _NoInitSubclass) for base in bases):
        bases = (_NoInitSubclass, *bases)
    made = _derived[maker, cls] = types.new_class(cls.__name__, bases, {}, lambda namespace: namespace.update(body))
    return made


def _remake(makers: Iterable[Callable[[type], type]], make: Any, cls: type, *args: Any) -> Any:
    for maker in makers:
        cls = maker(cls)
    return make(cls, *args)
