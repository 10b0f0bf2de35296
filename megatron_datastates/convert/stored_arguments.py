"""The training arguments that Megatron stores in every checkpoint, read without torch and without Megatron.

They are in the common state: an object, or before Megatron 0.19 the file `common.pt`. Where Megatron saves
through PyTorch's DCP, as with Megatron-FSDP, they are an object of their own. The pickle is executed with
inert classes in place of all that it names, so nothing of a checkpoint runs, and no package is needed.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_datastates.convert.sources.pickles import (
    Function,
    OrderedDictionary,
    load_pickle,
    same_items,
)
from megatron_datastates.errors import FormatError, MissingKeyError, StorageError, UnsafeObjectError
from megatron_datastates.files import OBJECT_BYTES, read_regular
from megatron_datastates.format.directory import ARGUMENTS_KEY, COMMON_FILE, COMMON_STATE_KEY
from megatron_datastates.providers.members import PICKLE, find_members

if TYPE_CHECKING:
    from megatron_datastates.convert.sources.source import Source


class _Items:
    """Substitute for a set, whose items were stored in any order; makes no copy of them."""

    def __init__(self, items: Any = ()) -> None:
        self.items = same_items(items)

    def __setstate__(self, state: Any) -> None:
        raise UnsafeObjectError("it would change a set")


_SETS = ("set", "frozenset")
_PLAIN = {
    ("collections", "OrderedDict"): OrderedDictionary,
    # Of Python 2 is the name in pickles of protocol 2, which torch.save makes.
    **{(module, name): Function(_Items) for module in ("builtins", "__builtin__") for name in _SETS},
}
_MOST_DEEP = 8  # of lists in lists; Megatron's arguments are flat
_MOST_CLASSES = 10_000
_MOST_BITS = 4096  # of a number: Python converts no very long ones to text
_MOST_CHARACTERS = 16 << 20  # of all arguments as text, where every other value counts as one
# Sizes of parallel groups, by the names that our manifest has for them.
_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "data": "data_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
}


class _Inert:
    """Substitute for an object of any class: it keeps what it was made of, and has no code."""

    name = ""  # of the class, with its module
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _InertUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        # Classes of its own for each unpickler: a pickle cannot change what another one gets.
        self._found: dict[tuple[str, str], Any] = dict(_PLAIN)

    def find_class(self, module: str, name: str) -> Any:
        found = self._found.get((module, name))
        if found is None:
            if len(self._found) > _MOST_CLASSES:  # each takes some 2 KiB, and six bytes of a pickle
                raise UnsafeObjectError(f"it names more than {_MOST_CLASSES} classes")
            members = {"name": f"{module}.{name}", "__setstate__": _Inert.__setstate__}
            found = self._found[module, name] = type(name, (_Inert,), members)
        return found

    def persistent_load(self, pid: Any) -> Any:
        return _Inert(pid)  # the bytes of a tensor


def training_arguments(source: Source) -> dict[str, Any]:
    """Returns the arguments by name: numbers, texts, None, and lists of these (of sets, sorted ones).

    All else is there as text.

    Raises:
        MissingKeyError: the checkpoint has no arguments.
        DataStatesError: what holds them cannot be read.
    """
    if COMMON_STATE_KEY in source.objects:
        data = source.read_object(COMMON_STATE_KEY)
    elif ARGUMENTS_KEY in source.objects and COMMON_FILE not in source.other_files:
        return arguments_in(
            source.read_object(ARGUMENTS_KEY), f"the object {ARGUMENTS_KEY!r} of {source.directory}"
        )
    else:
        data = _common_file(source)
    return arguments_in(data, f"the common state of {source.directory}")


def arguments_in(data: bytes, where: str) -> dict[str, Any]:
    """Returns the arguments in a common state, or those that were saved alone.

    Args:
        data: what torch.save wrote.
        where: what that is, for the message.

    Raises:
        As training_arguments.
    """
    found = _stored(data, where)
    found = found.get("args") if isinstance(found, dict) else found
    values = found.state if isinstance(found, _Inert) else None
    if not isinstance(values, dict):
        raise MissingKeyError(f"{where} has no training arguments: Megatron did not write it")
    names = sorted(name for name in values if isinstance(name, str))
    plain = _Plain(where)
    return {name: plain.value(values[name]) for name in names}


def parallel_sizes(arguments: Mapping[str, Any]) -> dict[str, int]:
    """Returns the sizes of the parallel groups of a run, as far as its arguments have them."""
    found = {name: arguments.get(argument) for name, argument in _SIZES.items()}
    return {name: size for name, size in found.items() if isinstance(size, int)}


def _stored(data: bytes, where: str) -> Any:
    try:
        member = find_members(io.BytesIO(data))[PICKLE]
        content = data[member.offset : member.offset + member.size]
        member.check(content, PICKLE)
    except FormatError as error:
        raise FormatError(f"{where} is damaged: {error}") from error
    found = load_pickle(_InertUnpickler, content, io.BytesIO(content), where)
    return found[0] if isinstance(found, list) and len(found) == 1 else found  # as Megatron's objects are


def _common_file(source: Source) -> bytes:
    if source.checkpoint is not None:
        if any(other.name == COMMON_FILE for other in source.checkpoint.manifest.others):
            return source.checkpoint.read_other(COMMON_FILE)
    elif (source.directory / COMMON_FILE).exists():
        try:
            return read_regular(source.directory / COMMON_FILE, OBJECT_BYTES)
        except OSError as error:
            raise StorageError(
                f"{source.directory / COMMON_FILE} cannot be read: {error.strerror}"
            ) from error
    raise MissingKeyError(
        f"{source.directory} has no training arguments, as Megatron stores in a common state or in an object "
        f"{ARGUMENTS_KEY!r}: another program wrote it, or its arguments were not saved"
    )


class _Plain:
    """Makes plain values of the arguments.

    A list that holds one list ten times, which holds one ten times, and so on, has 10^n values in n lists, so
    all values are counted each as often as it is referred to.
    """

    def __init__(self, where: str) -> None:
        self._where, self._left = where, _MOST_CHARACTERS

    def value(self, value: Any, depth: int = 0) -> Any:
        self._count(len(value) if isinstance(value, str | bytes) else 1)
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            return f"a number of {value.bit_length()} bits"
        if value is None or isinstance(value, str | int | float):
            return value
        if isinstance(value, list | tuple) and depth < _MOST_DEEP:
            return [self.value(one, depth + 1) for one in value]
        if isinstance(value, set | frozenset | _Items) and depth < _MOST_DEEP:
            items = value.items if isinstance(value, _Items) else value
            return sorted((self.value(one, depth + 1) for one in items), key=repr)
        if isinstance(value, dict) and depth < _MOST_DEEP:
            pairs = [[self.value(key, depth + 1), self.value(one, depth + 1)] for key, one in value.items()]
            found = {str(key): one for key, one in pairs}
            return found if len(found) == len(pairs) else pairs  # 1 and "1" are the same as text
        return self._text(value, depth)

    def _text(self, value: Any, depth: int) -> str:
        """Returns `torch.bfloat16` for a dtype, `AttnBackend(5)` for a member of an enumeration.

        Of other instances, too, it has all that was stored: `args` compares texts.
        """
        if isinstance(value, type) and issubclass(value, _Inert):
            return value.name
        if isinstance(value, _Inert) and depth < _MOST_DEEP:
            own = type(value).__name__
            texts = [str(self.value(one, depth + 1)) for one in value.arguments]
            if value.state is not None:
                state = self.value(value.state, depth + 1)
                named = isinstance(state, dict)
                texts += [f"{name}={one}" for name, one in state.items()] if named else [str(state)]
            if own.endswith("Path"):
                return "/".join(texts).replace("//", "/")
            return f"{own}({', '.join(texts)})"
        return f"a {type(value).__name__}"

    def _count(self, characters: int) -> None:
        self._left -= characters + 1
        if self._left < 0:
            raise FormatError(
                f"{self._where} has training arguments of more than {_MOST_CHARACTERS} characters: Megatron "
                "did not write it"
            )
