"""States of Megatron-Energon's data loaders as plain data, and back.

Energon's states are dataclasses and dictionaries of its own classes. Plain data needs no class on the allow
list, so a checkpoint still cannot run code: on the way back, only classes that Energon itself defines as
states are made, and the program must have imported the module that defines them.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from megatron_datastates.errors import UntrustedClassError

_PACKAGE = "megatron.energon"
_MARK = "__energon__"  # the key of the class in a dictionary that stands for an instance of it


def to_plain(state: Any) -> Any:
    """Returns a state with dictionaries instead of instances of Energon's classes."""
    kind = type(state)
    if kind is dict:
        return {key: to_plain(value) for key, value in state.items()}
    if kind in (list, tuple):
        return kind(map(to_plain, state))
    if not _is_energons(kind):
        return state
    if isinstance(state, dict):
        return {_MARK: _name(kind), "items": {key: to_plain(value) for key, value in state.items()}}
    fields = {field.name: to_plain(getattr(state, field.name)) for field in dataclasses.fields(state)}
    return {_MARK: _name(kind), "fields": fields}


def to_energon(plain: Any) -> Any:
    """Returns the state that `to_plain` was called with, equal in every value and class.

    Raises:
        UntrustedClassError: it names a class that is not a state of Energon's, or is not imported.
    """
    kind = type(plain)
    if kind in (list, tuple):
        return kind(map(to_energon, plain))
    if kind is not dict:
        return plain
    if _MARK not in plain:
        return {key: to_energon(value) for key, value in plain.items()}
    made = _class(plain[_MARK])
    if issubclass(made, dict):
        return made(to_energon(plain["items"]))
    return made(**{name: to_energon(value) for name, value in plain["fields"].items()})


def _is_energons(kind: type) -> bool:
    known = kind.__module__ == _PACKAGE or kind.__module__.startswith(_PACKAGE + ".")
    return known and (dataclasses.is_dataclass(kind) or issubclass(kind, dict))


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(name: str) -> type:
    module, _, qualified = name.partition(":")
    found = getattr(sys.modules.get(module), qualified, None)
    if not isinstance(found, type) or not _is_energons(found) or _name(found) != name:
        raise UntrustedClassError(
            f"the state of the data loader names {name!r}: expected a state class of {_PACKAGE}, whose "
            "modules the program imports when it makes its loader; use the release that it was saved with"
        )
    return found
