"""Changes a stored object that has instances of classes which are not installed here, such as Megatron's.

Each such class is replaced by a stand-in that records how its instances are made, and is written again under
the name of the class. None of them is imported, and none of their code runs.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import types
from collections.abc import Callable
from typing import Any

import torch

from megatron_datastates.providers.objects import deserialize_for_display


def changed_object(data: bytes, key: str, change: Callable[[Any], Any]) -> bytes:
    """Returns the bytes of an object after `change`, which may replace plain values in it.

    Args:
        data: as torch.save wrote them.
        key: the object's key, for messages.

    Raises:
        UnsafeObjectError: the object does what no stand-in can do.
    """
    value = change(deserialize_for_display(data, key, _stand_in))
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=_PICKLE)
    return buffer.getvalue()


class _Foreign:
    """An instance of a class that is not imported."""

    global_name = ""
    _arguments: tuple[Any, ...]
    _state: Any = None
    _called = False

    def __new__(cls, *arguments: Any) -> _Foreign:
        made = super().__new__(cls)
        made._arguments = arguments
        return made

    def __init__(self, *arguments: Any) -> None:
        self._called = True  # and not only made by __new__

    def __setstate__(self, state: Any) -> None:
        self._state = state

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        kind = type(self)
        if self._called:
            return kind, self._arguments, self._state
        return copyreg.__newobj__, (kind, *self._arguments), self._state  # type: ignore[attr-defined]


def _stand_in(name: str) -> type:
    return type(name.rpartition(".")[2], (_Foreign,), {"global_name": name})


_Python: Any = pickle._Pickler


class _Pickler(_Python):  # type: ignore[misc]
    """Writes stand-ins under the names of their classes. The C pickler would import these."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if isinstance(obj, type) and issubclass(obj, _Foreign):
            module, _, own = obj.global_name.rpartition(".")
            self.write(pickle.GLOBAL + f"{module}\n{own}\n".encode())
            self.memoize(obj)
            return
        super().save_global(obj, name)


_PICKLE = types.SimpleNamespace(__name__="pickle", Pickler=_Pickler)  # what torch.save takes for a module
