"""Several state providers as one state: their entries, under keys that begin with the providers' names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple, cast

from megatron_datastates.errors import DataStatesError, MismatchError, ProviderError
from megatron_datastates.providers.base import EmptyObjects, StateProvider, TailSource, Tensors, TensorSource
from megatron_datastates.providers.objects import ObjectSource, empty_sources


@dataclasses.dataclass(frozen=True, slots=True)
class ProviderEntries:
    """Which entries of a state are one provider's."""

    name: str  # "" for the state of the program or of Megatron itself
    kind: str  # for people
    notes: Mapping[str, str]  # for people
    first_tensor: int
    end_tensor: int
    first_tail: int
    end_tail: int

    def failed(self, error: Exception) -> Exception:
        """Returns the error with the provider's name, if it has one."""
        return _failure(self.name, self.kind, "save", error)


class Empty(NamedTuple):
    """Consecutive entries of the tail that are objects without a value."""

    first: int
    keys: tuple[str, ...]

    @property
    def end(self) -> int:
        return self.first + len(self.keys)


@dataclasses.dataclass(slots=True)
class Collected:
    """The state of all providers of one save: tensors, what goes to the tail, and which is whose."""

    tensors: Tensors = dataclasses.field(default_factory=Tensors)
    tail: list[TailSource] = dataclasses.field(default_factory=list)
    tail_keys: list[str] = dataclasses.field(default_factory=list)
    # Runs of objects without a value, in their order; `tail` has them, too.
    empty: list[Empty] = dataclasses.field(default_factory=list)
    by_provider: list[ProviderEntries] = dataclasses.field(default_factory=list)

    def others(self) -> Iterator[int]:
        """Yields the numbers of the tail's entries that are not `empty`."""
        ends = [0, *(empty.end for empty in self.empty)]
        begins = [*(empty.first for empty in self.empty), len(self.tail)]
        return chain.from_iterable(map(range, ends, begins))


class _Yielded(NamedTuple):
    """A tensor that one of the providers has yielded, the number of the provider, and its version then."""

    number: int
    source: TensorSource
    version: int | None


class _Renamed:
    """A source of the tail under another key."""

    def __init__(self, source: TailSource, key: str) -> None:
        self._source, self.key = source, key

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def renamed(source: TailSource, key: str) -> TailSource:
    """Returns the source under another key, relative to another provider."""
    own = getattr(source, "renamed", None)  # encoded tensors stay what they are, for transformations around
    return cast(TailSource, own(key) if own is not None else _Renamed(source, key))


def collect(providers: Mapping[str, StateProvider]) -> Collected:
    """Returns the entries of all providers, as they are now.

    Raises:
        ProviderError: one of the providers raised an exception, or yielded something else than entries.
    """
    state = Collected()
    yielded: list[_Yielded] = []
    for name, provider in providers.items():
        tensors, tail, kind = len(state.tensors), len(state.tail), kind_of(provider)
        try:
            _add(state, f"{name}." if name else "", provider, yielded)
            notes = _checked_notes(name, provider)
        except Exception as error:
            raise _failure(name, kind, "save", error) from error
        ends = (tensors, len(state.tensors), tail, len(state.tail))
        state.by_provider.append(ProviderEntries(str(name), kind, notes, *ends))  # as in `_checked_notes`
    for number, source, version in yielded:  # nothing was copied: each would be stored as it is now
        if _version_of(source.tensor) != version:
            raise state.by_provider[number].failed(
                MismatchError(
                    f"tensor {source.key!r} was changed by `entries`, of this or another state provider, "
                    "after it was yielded: expected a tensor with memory of its own for each source"
                )
            )
    return state


def check_names(state: Collected) -> None:
    """Checks that no key of the state itself is under the name of a provider: no load could distinguish them.

    Megatron does not find keys that are under a provider's name (mcore/load/reader.py).

    Raises:
        ProviderError: one is.
    """
    named = {f"{provider.name}.": provider for provider in state.by_provider if provider.name}
    own = next((provider for provider in state.by_provider if not provider.name), None)
    if not named or own is None:
        return
    prefixes = tuple(named)
    tensors = state.tensors.keys[own.first_tensor : own.end_tensor]
    for key in chain(tensors, state.tail_keys[own.first_tail : own.end_tail]):
        if key.startswith(prefixes):
            provider = next(provider for prefix, provider in named.items() if key.startswith(prefix))
            raise ProviderError(
                f"the state provider {provider.name!r} ({provider.kind}) has the name that {key!r} begins "
                "with, a key of the rest of the state: expected a name that no other key begins with; rename "
                "the provider"
            )


def _add(state: Collected, prefix: str, provider: StateProvider, yielded: list[_Yielded]) -> None:
    entry: Any = None
    number = len(state.by_provider)
    try:
        for entry in provider.entries():
            if type(entry) is ObjectSource:  # first: a model may have several for each layer
                state.tail.append(entry)
                state.tail_keys.append(prefix + entry.key)
            elif isinstance(entry, Tensors):
                state.tensors.extend(entry, prefix)
            elif isinstance(entry, EmptyObjects):
                if not entry.keys:
                    continue
                keys = tuple([prefix + key for key in entry.keys]) if prefix else entry.keys
                state.empty.append(Empty(len(state.tail), keys))
                state.tail.extend(empty_sources(entry))
                state.tail_keys.extend(keys)
            elif isinstance(entry, TensorSource):
                state.tensors.add(prefix + entry.key, *entry[1:])
                yielded.append(_Yielded(number, entry, _version_of(entry.tensor)))
            elif hasattr(entry, "snapshot") and hasattr(entry, "write"):
                state.tail.append(entry)
                state.tail_keys.append(prefix + entry.key)
                source = getattr(entry, "source", None)
                if isinstance(source, TensorSource):  # of a tensor that is encoded
                    yielded.append(_Yielded(number, source, _version_of(source.tensor)))
            else:
                raise TypeError(
                    f"it yielded a {type(entry).__qualname__}: expected Tensors, a TensorSource, an "
                    "ObjectSource or a StreamSource"
                )
    except TypeError:
        _check_keys(entry)
        raise


def _version_of(tensor: Any) -> int | None:
    """Returns how often torch has changed a tensor's values; None for those that count no changes."""
    try:
        return int(tensor._version)
    except (AttributeError, RuntimeError):  # of inference mode
        return None


def _check_keys(entry: Any) -> None:
    """Raises MismatchError if a key of an entry is no text."""
    keys = entry.keys if isinstance(entry, Tensors | EmptyObjects) else [getattr(entry, "key", "")]
    for key in keys:
        if not isinstance(key, str):
            raise MismatchError(
                f"it yielded an entry under the key {key!r} of type {type(key).__name__}: expected str"
            )


def kind_of(provider: object) -> str:
    """Returns a description of a provider for people: its class, with what it wraps."""
    inner = getattr(provider, "inner", None)
    name = type(provider).__name__
    return f"{name}({kind_of(inner)})" if inner is not None and isinstance(inner, StateProvider) else name


def notes_of(provider: object) -> dict[str, str]:
    """Returns what people who look at the checkpoint should know of a provider's state: its `notes`."""
    return dict(getattr(provider, "notes", {}))


def _checked_notes(name: str, provider: object) -> dict[str, str]:
    """Returns a provider's notes.

    Raises:
        MismatchError: they, or its name, are not text that UTF-8 has: no manifest could have them.
    """
    found = notes_of(provider)
    for key, value in found.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise MismatchError(f"its notes have {key!r}: {value!r}: expected text for text")
    # Of numpy's str_ and other subclasses, msgspec makes no JSON: a poll of this rank alone would raise.
    notes = {str(key): str(value) for key, value in found.items()}
    for text in chain([name], *notes.items()):
        try:
            text.encode()
        except UnicodeEncodeError:  # such as of a path from os.fsdecode
            raise MismatchError(
                f"its name or notes have {text!r}, with characters that UTF-8 does not have: change that"
            ) from None
    return notes


def restore_failed(name: str, provider: StateProvider, error: Exception) -> Exception:
    """Returns the error of a provider's `restore`, with the provider's name."""
    return _failure(name, kind_of(provider), "load", error)


def _failure(name: str, kind: str, action: str, error: Exception) -> Exception:
    if not name or isinstance(error, ProviderError):
        return error
    text = str(error) if isinstance(error, DataStatesError) else f"{type(error).__name__}: {error}"
    return ProviderError(f"the state provider {name!r} ({kind}) failed in the {action}: {text}")


def named(providers: Mapping[str, StateProvider] | Iterable[StateProvider]) -> dict[str, StateProvider]:
    """Returns providers by name; those of a list have an attribute `name`.

    Raises:
        ProviderError: one has no name, has the name of another, or is no state provider.
    """
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(providers, Mapping):
        pairs = providers.items()
    else:
        if isinstance(providers, str):
            raise ProviderError(
                f"expected state providers, found the text {providers!r}: pass the objects themselves; only "
                "--datastates-providers and MEGATRON_DATASTATES_PROVIDERS name functions that return them"
            )
        pairs = [(getattr(provider, "name", None), provider) for provider in providers]
    found: dict[str, StateProvider] = {}
    for name, provider in pairs:
        if not isinstance(provider, StateProvider):
            raise ProviderError(
                f"{provider!r} is not a state provider: expected an object with `entries` and `restore` "
                "(megatron_datastates.providers.StateProvider)"
            )
        if not isinstance(name, str) or not name:
            raise ProviderError(
                f"a {kind_of(provider)} has no name: expected a non-empty text, as its attribute `name` or "
                "as the key of a mapping"
            )
        if name in found:
            raise ProviderError(f"two state providers are called {name!r}: rename one of them")
        found[name] = provider
    return found
