"""States of Megatron-Energon's data loaders as plain data, and back.

Energon's states are dataclasses and dictionaries of its own classes. Plain data needs no class on the allow
list, so a checkpoint still cannot run code: on the way back, only such classes of Energon's are made, from
modules that the program has imported, and none of their methods is called (nor does unpickling call them).
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from megatron_datastates.errors import FormatError, UntrustedClassError

_PACKAGE = "megatron.energon"
_ADVICE = "use the release of Energon that it was saved with"
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
        FormatError: it does not fit its class.
    """
    kind = type(plain)
    if kind in (list, tuple):
        return kind(map(to_energon, plain))
    if kind is not dict:
        return plain
    if _MARK not in plain:
        return {key: to_energon(value) for key, value in plain.items()}
    made = _class(plain[_MARK])
    members = plain.get("items" if issubclass(made, dict) else "fields")
    if not isinstance(members, dict):
        raise FormatError(f"the data loader's state is damaged: a {made.__qualname__} without its values")
    values = {key: to_energon(value) for key, value in members.items()}
    if issubclass(made, dict):
        state = dict.__new__(made)
        dict.update(state, values)
        return state
    return _dataclass_of(made, values)


def _dataclass_of(made: type, values: dict[str, Any]) -> Any:
    state: Any = object.__new__(made)
    for field in dataclasses.fields(made):
        if field.name in values:
            value = values.pop(field.name)
        elif field.default is not dataclasses.MISSING:
            value = field.default
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        else:
            raise FormatError(
                f"the state of the data loader has no {field.name!r} for {made.__qualname__}: {_ADVICE}"
            )
        object.__setattr__(state, field.name, value)
    if values:
        raise FormatError(
            f"the state of the data loader has {sorted(map(str, values))}, which {made.__qualname__} lacks: "
            f"{_ADVICE}"
        )
    return state


def _is_energons(kind: type) -> bool:
    known = kind.__module__ == _PACKAGE or kind.__module__.startswith(_PACKAGE + ".")
    return known and (dataclasses.is_dataclass(kind) or issubclass(kind, dict))


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(name: Any) -> type:
    module, _, qualified = str(name).partition(":")
    found = getattr(sys.modules.get(module), qualified, None)
    if not isinstance(found, type) or not _is_energons(found) or _name(found) != name:
        raise UntrustedClassError(
            f"the state of the data loader names {name!r}: expected a state class of {_PACKAGE}, whose "
            f"modules the program imports when it makes its loader; {_ADVICE}"
        )
    return found
