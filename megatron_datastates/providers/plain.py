"""The allow list: which names a stored object may use, and with which arguments they may be called.

Belongs here: types of the standard library and of numpy that run no code and take no more memory than their
pickle does. Does not belong here: tensors (rebuilding.py), executing pickles (unpickling.py).

A name in VALUES yields the object itself, since types are data, too (`defaultdict(list)`). Only what is in
CALLS is ever called: by its *guard*, a function that checks the arguments and makes the call. No name in a
pickle is imported.
"""

from __future__ import annotations

import argparse
import array
import collections
import datetime
import decimal
import io
import pathlib
import re
import sys
import types
import uuid
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Protocol, cast

import numpy as np

from megatron_datastates.errors import UnsafeObjectError

_MAX_KEY_NODES, _MAX_KEY_DEPTH = 10_000, 100  # hashing a tuple hashes all that it holds, however nested
_KEY_NODE_BYTES = 64  # that hashing one item of a key counts for
_MAX_UNUSED_ITEM_BYTES = 1 << 20  # numpy allocates one element even for an empty array
_DTYPE_TEXT = re.compile(r"(?:[biufc]\d{1,2}|[mM]8|[SUV]\d{1,10})")
_UNITS = {"generic", *"YMWDhms", "ms", "us", "ns", "ps", "fs", "as"}


class Placeholder:
    """Stands for a tensor, or for an instance of a trusted class, in a dry run.

    Args:
        arguments: those of the class, which a named tuple would hold.
    """

    def __init__(self, arguments: tuple[Any, ...] = ()) -> None:
        self.arguments = arguments


class BytesPlaceholder:
    """Stands for long bytes in a dry run."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


class TextPlaceholder(BytesPlaceholder):
    """Stands for long text in a dry run. `size` counts characters."""

    def __init__(self, size: int, is_latin: bool) -> None:
        super().__init__(size)
        self.is_latin = is_latin


class PickleContext(Protocol):
    """What guards may ask of the unpickler that executes a pickle."""

    dry_run: bool

    def mark_unfinished(self, made: Any) -> Any:
        """Marks `made`, whose state has to be set once and before it is used, and returns it."""

    def mark_finished(self, made: Any) -> bool:
        """Forbids to set the state of `made` from now on. Returns whether it was allowed until now."""

    def is_trusted(self, kind: Any) -> bool:
        """Returns whether the user trusts this class."""

    def charge(self, copied_bytes: int) -> None:
        """Counts what a call copies. Raises UnsafeObjectError if all calls together copy too much."""

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Calls what may be called. Raises UnsafeObjectError."""


def refuse(text: str) -> NoReturn:
    """Raises UnsafeObjectError with this text."""
    raise UnsafeObjectError(text)


def require(condition: object, what: str) -> None:
    """Raises UnsafeObjectError unless `condition` holds; `what` is what the pickle makes."""
    if not condition:
        raise UnsafeObjectError(f"it makes {what} with arguments that are not accepted")


def check_key(context: PickleContext, key: Any) -> None:
    """Raises UnsafeObjectError if a key of a dictionary or set, or all keys, would take too long to hash."""
    _charge_hashes(context, [key])
    level = _tuples([key])
    if not level:
        return
    nodes = 0
    for _ in range(_MAX_KEY_DEPTH):
        inner = [item for one in level for item in _tuples(one)]
        width = sum(map(len, level))
        nodes += width
        if nodes > _MAX_KEY_NODES:
            break
        context.charge(_KEY_NODE_BYTES * width)
        for one in level:
            _charge_hashes(context, one)
        if not inner:
            return
        level = inner
    refuse(
        f"it has a key of nested tuples: expected at most {_MAX_KEY_NODES} items and a depth of "
        f"{_MAX_KEY_DEPTH}"
    )


def _charge_hashes(context: PickleContext, items: Iterable[Any]) -> None:
    """Charges for long numbers, whose hash is computed at every use; that of text and bytes is kept."""
    for item in items:
        if type(item) is int:
            context.charge(item.bit_length() // 8)
        elif type(item) is decimal.Decimal:
            context.charge(sys.getsizeof(item))


def _tuples(items: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Returns the tuples among items, and what placeholders stand for if that may be a named tuple."""
    found = [item.arguments if type(item) is Placeholder else item for item in items]
    return [item for item in found if isinstance(item, tuple)]


# -- containers and scalars -----------------------------------------------------------------------------


def _encode(context: PickleContext, text: Any = None, encoding: Any = None) -> Any:
    """Makes bytes, which pickles of protocol 2 hold as text."""
    require(encoding in ("latin1", "latin-1"), "bytes")
    if type(text) is TextPlaceholder:
        require(text.is_latin, "bytes")
        return BytesPlaceholder(text.size)
    require(type(text) is str, "bytes")
    return text.encode("latin1")


def _byte_array(context: PickleContext, data: Any = b"", encoding: Any = None) -> Any:
    if encoding is not None:
        data = _encode(context, data, encoding)
    require(type(data) in (bytes, BytesPlaceholder), "a bytearray")
    return bytearray() if type(data) is BytesPlaceholder else bytearray(data)


def _guard_list(kind: type[Any]) -> Callable[..., Any]:
    def make(context: PickleContext, items: Any = ()) -> Any:
        require(type(items) in (list, tuple), f"a {kind.__name__}")
        for item in items:
            check_key(context, item)
        return kind(items)

    return make


def _ordered(context: PickleContext, items: Any = ()) -> Any:
    require(type(items) in (list, tuple) and all(type(i) in (list, tuple) for i in items), "an OrderedDict")
    for item in items:
        check_key(context, item[0] if item else None)
    return collections.OrderedDict(items)


def _default_dict(context: PickleContext, factory: Any = None) -> Any:
    require(factory is None or callable(factory), "a defaultdict")
    return collections.defaultdict(factory)


def _deque(context: PickleContext, items: Any = (), longest: Any = None) -> Any:
    require(items == () and (longest is None or type(longest) is int), "a deque")
    return collections.deque(maxlen=longest)


def _guard_types(kind: type[Any], *allowed: type) -> Callable[..., Any]:
    def make(context: PickleContext, *arguments: Any) -> Any:
        require(all(type(argument) in allowed for argument in arguments), f"a {kind.__name__}")
        return kind(*arguments)

    return make


def _type_of(context: PickleContext, value: Any = 0) -> Any:
    require(value is None or value is ... or value is NotImplemented, "a type")
    return type(value)


def _array_array(context: PickleContext, code: Any = None, items: Any = None) -> Any:
    require(type(code) is str and type(items) in (list, str), "an array.array")
    return array.array(code, items)


def _set_attributes(context: PickleContext, made: Any, state: Any) -> None:
    named = type(state) is dict and all(type(key) is str for key in state)
    require(named, f"a {type(made).__name__}")
    vars(made).update(state)


def _set_uuid(context: PickleContext, made: uuid.UUID, state: Any) -> None:
    number = state.get("int") if type(state) is dict else None
    require(type(number) is int and 0 <= number < 1 << 128, "a UUID")
    require(set(state) <= {"int", "is_safe"} and type(state.get("is_safe", 0)) is int, "a UUID")
    made.__setstate__(state)  # type: ignore[attr-defined]


def _set_buffer(context: PickleContext, made: Any, state: Any) -> None:
    require(type(state) is tuple and len(state) == 3, "a BytesIO")
    data, position, attributes = state  # looking at the `__dict__` of one makes its attributes {} from None
    require(attributes is None or (type(attributes) is dict and not attributes), "a BytesIO")
    require(type(data) in (bytes, BytesPlaceholder) and type(position) is int, "a BytesIO")
    require(0 <= position < 1 << 62, "a BytesIO")
    if type(data) is bytes:
        made.__setstate__(state)


# -- numpy ----------------------------------------------------------------------------------------------


def _reconstruct(context: PickleContext, kind: Any = None, shape: Any = None, code: Any = None) -> Any:
    """Makes an empty array, whose state is set afterwards: numpy pickles arrays in these two steps."""
    require(kind is np.ndarray and shape == (0,) and code == b"b", "an array")
    return context.mark_unfinished(np.empty(0, np.int8))


def _dtype(context: PickleContext, text: Any = None, align: Any = False, copy: Any = True) -> Any:
    require(type(text) is str and type(align) is type(copy) is bool, "a dtype")
    if _DTYPE_TEXT.fullmatch(text) is None:
        refuse(f"it holds an array or a scalar of dtype {text!r}: expected numbers, times, text or bytes")
    return context.mark_unfinished(np.dtype(text, copy=True))


def _set_dtype(context: PickleContext, made: Any, state: Any) -> None:
    require(context.mark_finished(made), "a dtype")
    require(type(state) is tuple and len(state) in (8, 9) and state[0] in (3, 4), "a dtype")
    _, order, part, names, fields, size, _, flags, *more = state
    if made.kind in "mM":
        found = _time_dtype(made, *more)
    elif part is not None:
        require(type(part) is tuple and len(part) == 2 and _is_shape(part[1]), "a dtype")
        found = np.dtype((_finished_dtype(context, part[0]), part[1]))
    elif names is not None:
        found = _structured(context, names, fields, size, flags)
    else:
        found = np.dtype(made.str)
    if made.kind not in "mM":
        require(not more or more[0] in (None, {}), "a dtype with metadata")
    if order in ("<", ">") and names is None and part is None:
        found = found.newbyteorder(order)
    require(not found.hasobject and found.itemsize == made.itemsize, "a dtype")
    # The state that numpy itself makes for this dtype: numpy does not check the one in the pickle.
    made.__setstate__(found.__reduce__()[2])


def _time_dtype(made: np.dtype[Any], details: Any = None) -> np.dtype[Any]:
    require(type(details) is tuple and len(details) == 2 and details[0] in (None, {}), "a dtype of times")
    require(type(details[1]) is tuple and len(details[1]) == 4, "a dtype of times")
    unit, count, divisor, _ = details[1]
    unit = unit.decode("ascii") if type(unit) is bytes else unit
    require(
        unit in _UNITS and type(count) is int and 0 < count < 1 << 31 and divisor == 1, "a dtype of times"
    )
    return np.dtype(f"{made.kind}8" if unit == "generic" else f"{made.kind}8[{count}{unit}]")


def _structured(context: PickleContext, names: Any, fields: Any, size: Any, flags: Any) -> np.dtype[Any]:
    require(type(names) is tuple and type(fields) is dict and type(size) is type(flags) is int, "a dtype")
    columns = [fields.get(name) for name in names]
    require(all(type(c) is tuple and len(c) in (2, 3) and type(c[1]) is int for c in columns), "a dtype")
    described: dict[str, Any] = {
        "names": list(names),
        "formats": [_finished_dtype(context, column[0]) for column in columns],
        "offsets": [column[1] for column in columns],
        "itemsize": size,
    }
    if any(len(column) == 3 for column in columns):
        described["titles"] = [column[2] if len(column) == 3 else None for column in columns]
    structured: Any = np.dtype
    return cast(np.dtype[Any], structured(described, align=bool(flags & 0x80)))


def _finished_dtype(context: PickleContext, dtype: Any) -> np.dtype[Any]:
    """Returns `dtype`, which can no longer be changed: what is made of it relies on that."""
    require(isinstance(dtype, np.dtype) and not dtype.hasobject, "an array of a dtype")
    context.mark_finished(dtype)
    return dtype  # type: ignore[no-any-return]


def _is_shape(shape: Any) -> bool:
    return type(shape) is tuple and all(type(length) is int and 0 <= length < 1 << 62 for length in shape)


def _set_array(context: PickleContext, made: np.ndarray, state: Any) -> None:
    require(context.mark_finished(made) and type(state) is tuple and len(state) == 5, "an array")
    version, shape, dtype, is_fortran, data = state
    require(version == 1 and _is_shape(shape) and len(shape) <= 64 and type(is_fortran) is bool, "an array")
    item, count = _finished_dtype(context, dtype).itemsize, 1
    for length in shape:
        count *= length
    require(
        type(data) in (bytes, BytesPlaceholder) and len(data) == count * item and count < 1 << 62, "an array"
    )
    require(count or item <= _MAX_UNUSED_ITEM_BYTES, "an array")
    if type(data) is bytes:
        made.__setstate__(state)


def _scalar(context: PickleContext, dtype: Any = None, data: Any = None) -> Any:
    item = _finished_dtype(context, dtype).itemsize
    require(
        type(data) in (bytes, BytesPlaceholder) and len(data) == item and dtype.subdtype is None, "a scalar"
    )
    if type(data) is BytesPlaceholder or not item:
        return np.zeros((), dtype)[()] if not item else np.zeros((), "V0")[()]
    return np.frombuffer(data, dtype, 1).copy()[0]


# -- the list -------------------------------------------------------------------------------------------

_TYPES: list[type] = [
    *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, slice),
    *(object, type, collections.OrderedDict, collections.Counter, collections.defaultdict, collections.deque),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, uuid.UUID, argparse.Namespace, types.SimpleNamespace, array.array),
    *(np.ndarray, np.dtype),
]
_PATHS = [pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.PurePath, pathlib.Path]


def _values() -> dict[str, Any]:
    found: dict[str, Any] = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in _TYPES}
    found |= {"_io.BytesIO": io.BytesIO, "io.BytesIO": io.BytesIO}
    found |= {"builtins.Ellipsis": ..., "builtins.NotImplemented": NotImplemented}
    found["_codecs.encode"] = _encode
    for module in ("pathlib", "pathlib._local"):  # the second is where only Python 3.13 has them
        found |= {f"{module}.{kind.__name__}": kind for kind in _PATHS}
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):  # numpy 1 and 2
        found |= {f"{module}._reconstruct": _reconstruct, f"{module}.scalar": _scalar}
    plain: set[type] = {kind for kind in np.sctypeDict.values() if kind is not np.object_}
    for kind in plain:
        found[f"numpy.{kind.__name__}"] = kind
    return found | {"numpy.bool": np.bool_, "numpy.bool_": np.bool_}


VALUES: dict[str, Any] = _values()  # module.name -> object
_GUARDED: list[tuple[Any, Callable[..., Any]]] = [
    (_encode, _encode),
    (_reconstruct, _reconstruct),
    (_scalar, _scalar),
    (np.dtype, _dtype),
    (bytes, _guard_types(bytes)),
    (bytearray, _byte_array),
    (set, _guard_list(set)),
    (frozenset, _guard_list(frozenset)),
    (complex, _guard_types(complex, int, float)),
    (range, _guard_types(range, int)),
    (slice, _guard_types(slice, type(None), bool, int, float, str)),
    (type, _type_of),
    (collections.OrderedDict, _ordered),
    (collections.Counter, _guard_types(collections.Counter, type(None), dict)),
    (collections.defaultdict, _default_dict),
    (collections.deque, _deque),
    (datetime.date, _guard_types(datetime.date, bytes)),
    (datetime.datetime, _guard_types(datetime.datetime, bytes, datetime.timezone)),
    (datetime.time, _guard_types(datetime.time, bytes, datetime.timezone)),
    (datetime.timedelta, _guard_types(datetime.timedelta, int)),
    (datetime.timezone, _guard_types(datetime.timezone, datetime.timedelta, str)),
    (decimal.Decimal, _guard_types(decimal.Decimal, str)),
    (types.SimpleNamespace, _guard_types(types.SimpleNamespace)),
    (array.array, _array_array),
    *((kind, _guard_types(kind, str)) for kind in _PATHS),
]
CALLS = {id(called): guard for called, guard in _GUARDED}
# Types of which a pickle makes an empty instance and then sets the state.
CREATED_EMPTY: frozenset[type] = frozenset({argparse.Namespace, uuid.UUID, io.BytesIO, types.SimpleNamespace})
STATE_SETTERS: dict[type, Callable[[PickleContext, Any, Any], None]] = {
    argparse.Namespace: _set_attributes,
    types.SimpleNamespace: _set_attributes,
    collections.OrderedDict: _set_attributes,
    uuid.UUID: _set_uuid,
    io.BytesIO: _set_buffer,
    np.ndarray: _set_array,
}


def state_setter(made: Any) -> Callable[[PickleContext, Any, Any], None] | None:
    """Returns the function that sets the state of `made`; None if a pickle may not set it."""
    return _set_dtype if isinstance(made, np.dtype) else STATE_SETTERS.get(type(made))
