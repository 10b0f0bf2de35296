"""An unpickler for stored objects that accepts only what is on an allow list.

It is as strict as torch.load with weights_only=True, knows more plain types, and limits memory. An opcode by
itself makes some hundred bytes, or as many as follow it in the pickle. What a call copies may be in the memo
and be copied again and again, so all calls together may copy only in proportion to the stored object's bytes.
What classes that the user trusts do in their own code is not limited.

It knows the opcodes that torch.save writes (protocol 2). A name is looked up in plain.py, in rebuilding.py
and among the user's own safe globals (torch.serialization.add_safe_globals); nothing is imported here
(objects.py may import Megatron-Core first).

A *dry run* makes placeholders instead of tensors, long bytes and instances of the user's classes: it finds
whether a load would accept the pickle, runs no code of users and takes little memory.
"""

from __future__ import annotations

import _compat_pickle
import codecs
import collections
import enum
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch

from megatron_datastates.errors import UnsafeObjectError, UntrustedClassError
from megatron_datastates.providers import plain, rebuilding
from megatron_datastates.providers.megatron_classes import unregistered_classes
from megatron_datastates.providers.optimizer_classes import OPTIMIZERS, optimizer_class
from megatron_datastates.providers.plain import (
    BytesPlaceholder,
    Placeholder,
    TextPlaceholder,
    check_key,
    require,
)
from megatron_datastates.providers.rebuilding import ClassPlaceholder, StorageKind

TRUST_ALL = "all objects (--datastates-trust-objects on; of ds.save and ds.load: trust_objects=True)"
_LONG_TEXT_BYTES = 64 << 10
_PART_BYTES = 1 << 20
# Calls of an object of n bytes may copy _FREE_BYTES + _MOST_COPIES * n bytes. Most that are saved copy n,
# those of sets of small numbers 30 * n as charged here.
_FREE_BYTES, _MOST_COPIES = 1 << 20, 128
_ITEM_BYTES = 64  # of a set, a dictionary or a list, roughly
_FEW = 16  # items of a tuple that are looked at
_CALLS = plain.CALLS | rebuilding.CALLS
# Ids are unique, since these values live forever.
_OURS = {id(value) for value in (*plain.VALUES.values(), *rebuilding.VALUES.values())}
_LISTS = (list, collections.deque)
_DICTIONARIES = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
_DTENSOR = "torch.distributed.tensor.DTensor"  # torch trusts it, once it is imported
_NEVER = {"sys", "os", "posix", "nt"}  # never trusted, as in torch, even if the user adds them

Storages = Callable[[StorageKind, str, int], Any]  # (kind, name, elements) -> storage


def trusted_globals() -> dict[str, Any]:
    """Returns what the user and Megatron-Core trust, by name, without what the allow list has itself."""
    found = unregistered_classes()
    for entry in torch.serialization.get_safe_globals():
        value, name = entry if isinstance(entry, tuple) else (entry, None)
        if id(value) not in _OURS:
            found[name or f"{value.__module__}.{value.__qualname__}"] = value
    return found


def _copied_bytes(value: Any, depth: int = 2) -> int:
    """Returns roughly the bytes of a copy of `value`, without copies of what its items refer to.

    Looks into short tuples, which hold the arguments of numpy and torch.
    """
    if isinstance(value, str | bytes | bytearray | BytesPlaceholder):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 8
    if not isinstance(value, tuple | list | dict):
        return 0
    inner = value if depth and isinstance(value, tuple) and len(value) <= _FEW else ()
    return _ITEM_BYTES * len(value) + sum(_copied_bytes(item, depth - 1) for item in inner)


class FilledError(UnsafeObjectError):
    """An object is filled like a list or a dict and is of another class, which no trust in it helps."""


class PartOfTensorError(UnsafeObjectError):
    """An object contains a DTensor: its pickle has this rank's part alone, whatever is trusted."""

    def __init__(self) -> None:
        super().__init__(
            f"it contains a {_DTENSOR}, whose pickle has one rank's part alone: pass that as a "
            "ds.Shard and a value of the state itself, outside of lists and objects, or save by DCP"
        )


def _require_kind(target: Any, kinds: tuple[type[Any], ...], what: str) -> None:
    if type(target) not in kinds:
        raise FilledError(
            f"it fills an instance of another class like a {what}, as pickles of subclasses of {what} do. "
            f"Such classes are not accepted, even if they are trusted: store {what}(...) of it instead, or "
            f"trust {TRUST_ALL}"
        )


_PythonUnpickler: Any = pickle._Unpickler  # the one in C does not let calls be checked


def _is_latin(text: str) -> bool:
    """Returns whether the codec latin-1 has all of these characters, as of an array's bytes in a pickle."""
    try:
        text.encode("latin-1")  # forty times as fast as max(text)
    except UnicodeEncodeError:
        return False
    return True


class Unpickler(_PythonUnpickler):  # type: ignore[misc]
    """Executes one pickle and accepts only what is on the allow list, as the module describes.

    `load` returns the object, or placeholders in a dry run. It raises UnsafeObjectError for what is refused,
    and may raise anything else for damaged bytes.

    Args:
        file: the stored object, or its pickle alone, at which it stands.
        storages: returns the storage of a tensor; in a dry run, a StoragePlaceholder.
        dry_run: make placeholders.
        trusted: what the user trusts, by module and name; by default trusted_globals().
        stand_in: makes a stand-in, which is called like the class, for a class that is not trusted, by its
            name; by default such a class is refused.
    """

    def __init__(
        self,
        file: io.BytesIO,
        storages: Storages,
        *,
        dry_run: bool = False,
        trusted: dict[str, Any] | None = None,
        stand_in: Callable[[str], Any] | None = None,
    ) -> None:
        super().__init__(file)
        self.dry_run = dry_run
        self._storages, self._stand_in = storages, stand_in
        trusted = trusted_globals() if trusted is None else trusted
        self._trusted: dict[str, Any] = (
            {name: ClassPlaceholder() for name in trusted} if dry_run else dict(trusted)
        )
        self._trusted_ids = {id(value) for value in self._trusted.values()}
        self._unfinished: dict[int, Any] = {}
        self._left_bytes = _FREE_BYTES + _MOST_COPIES * len(file.getvalue())

    # -- for guards: see PickleContext ----------------------------------------------------------------

    def mark_unfinished(self, made: Any) -> Any:
        self._unfinished[id(made)] = made
        return made

    def mark_finished(self, made: Any) -> bool:
        return self._unfinished.pop(id(made), None) is not None

    def is_trusted(self, kind: Any) -> bool:
        return id(kind) in self._trusted_ids

    def charge(self, copied_bytes: int) -> None:
        self._left_bytes -= copied_bytes
        if self._left_bytes < 0:
            raise UnsafeObjectError(f"its calls would copy more than {_MOST_COPIES} times the bytes it has")

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        guard = _CALLS.get(id(function))
        if guard is not None:
            self.charge(sum(8 + _copied_bytes(argument) for argument in arguments))
            return guard(self, *arguments)
        if not self.is_trusted(function):
            raise UnsafeObjectError(f"it calls {function!r}, which is not on the allow list")
        return function(*arguments)

    # -- names ----------------------------------------------------------------------------------------

    def find_class(self, module: str, name: str) -> Any:
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        full = f"{module}.{name}"
        if self.dry_run and full == _DTENSOR:
            raise PartOfTensorError
        for known in (plain.VALUES, rebuilding.VALUES, {} if module in _NEVER else self._trusted):
            if full in known:
                return known[full]
        if self._stand_in is None:
            if full in OPTIMIZERS:
                return optimizer_class(full)
            raise UntrustedClassError(full)
        made = self._trusted[full] = self._stand_in(full)
        self._trusted_ids.add(id(made))
        return made

    def persistent_load(self, pid: Any) -> Any:
        require(type(pid) is tuple and len(pid) == 5, "a storage")
        word, kind, name, _, count = pid
        require(word == "storage" and isinstance(kind, StorageKind) and type(count) is int, "a storage")
        require(type(name) is str and 0 <= count < 1 << 62, "a storage")
        return self._storages(kind, name, count)

    # -- opcodes --------------------------------------------------------------------------------------

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        require(type(arguments) is tuple, "something")
        self.stack[-1] = self.call(self.stack[-1], arguments)

    def _new_object(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        require(type(arguments) is tuple, "something")
        if self.is_trusted(kind):
            self.append(kind(*arguments) if self.dry_run else kind.__new__(kind, *arguments))
            return
        known = isinstance(kind, type) and kind in plain.CREATED_EMPTY and arguments == ()
        if not known:
            raise UnsafeObjectError(f"it makes an instance of {kind!r}, which is not on the allow list")
        self.append(kind.__new__(kind))

    def _build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        setter = plain.state_setter(made)
        if setter is not None:
            self.charge(_copied_bytes(state))
            setter(self, made, state)
            return
        if not isinstance(made, Placeholder) and id(type(made)) not in self._trusted_ids:
            raise UnsafeObjectError(f"it sets the state of a {type(made).__name__}, which is not accepted")
        require(not isinstance(made, ClassPlaceholder), "a class")
        # A member of an enumeration is the whole program's: its pickle has a value and no state.
        require(not isinstance(made, enum.Enum), "a member of an enumeration")
        # load_build would call such an attribute, which came from the pickle, without any guard.
        require("__setstate__" not in getattr(made, "__dict__", ()), f"a {type(made).__name__}")
        parts = state if type(state) is tuple and len(state) == 2 else (state,)
        self.charge(sum(_copied_bytes(part) for part in parts if type(part) is dict))
        if not isinstance(made, Placeholder):
            self.append(state)
            super().load_build()

    def _append(self) -> None:
        self._extend([self.stack.pop()])

    def _appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        _require_kind(target, _LISTS, "list")
        target.extend(items)

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def _set_items(self) -> None:
        self._update(self.pop_mark())

    def _update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        _require_kind(target, _DICTIONARIES, "dict")
        require(len(items) % 2 == 0, "a dict")
        for at in range(0, len(items), 2):
            check_key(self, items[at])
            target[items[at]] = items[at + 1]

    def _text(self) -> None:
        size = int.from_bytes(self.read(4), "little")
        if not self.dry_run or size <= _LONG_TEXT_BYTES:
            self.append(str(self._exactly(size), "utf-8", "surrogatepass"))
            return
        decoder = codecs.getincrementaldecoder("utf-8")("surrogatepass")
        characters, is_latin = 0, True
        for begin in range(0, size, _PART_BYTES):
            count = min(_PART_BYTES, size - begin)
            part = decoder.decode(self._exactly(count), begin + count == size)
            characters += len(part)
            is_latin = is_latin and _is_latin(part)
        self.append(TextPlaceholder(characters, is_latin))

    def _exactly(self, size: int) -> bytes:
        data: bytes = self.read(size)
        if len(data) != size:
            raise EOFError(f"expected {size} more bytes, found {len(data)}")
        return data

    def _number(self) -> None:
        self._long(self.read(1)[0])

    def _long_number(self) -> None:
        self._long(int.from_bytes(self.read(4), "little"))

    def _long(self, size: int) -> None:
        self.append(pickle.decode_long(self._exactly(size)))

    def _unknown(self) -> None:
        raise UnsafeObjectError("it has an opcode that torch.save never writes")

    dispatch = dict.fromkeys(range(256), _unknown) | {
        code[0]: _PythonUnpickler.dispatch[code[0]]
        for code in (
            *(pickle.PROTO, pickle.STOP, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
            *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.EMPTY_TUPLE, pickle.EMPTY_LIST),
            *(pickle.EMPTY_DICT, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.MARK),
            *(pickle.POP, pickle.POP_MARK, pickle.BINGET, pickle.LONG_BINGET, pickle.BINPUT),
            *(pickle.LONG_BINPUT, pickle.GLOBAL, pickle.BINPERSID),
        )
    }
    dispatch |= {
        pickle.REDUCE[0]: _reduce,
        pickle.NEWOBJ[0]: _new_object,
        pickle.BUILD[0]: _build,
        pickle.APPEND[0]: _append,
        pickle.APPENDS[0]: _appends,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
        pickle.BINUNICODE[0]: _text,
        pickle.LONG1[0]: _number,
        pickle.LONG4[0]: _long_number,
    }
