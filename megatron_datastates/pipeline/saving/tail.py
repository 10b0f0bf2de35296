"""The tail of one rank's data file: objects, streams and encoded tensors, from their providers to the slots.

Of what may change as soon as the save returns, small objects are copied; the rest is written to the tail
before the save returns, so that nothing is ever held twice in host memory. Everything else is written by the
finishing thread, what may change at the next fence first. Its place in the file is not planned: the footer
says where it went.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pickle
import threading
import time
from typing import Any, NamedTuple

from megatron_datastates.engine.tail import TailWriter
from megatron_datastates.errors import (
    DataStatesError,
    ProviderError,
    UnsafeObjectError,
    is_lack_of_memory,
    raise_from,
)
from megatron_datastates.files import OBJECT_BYTES
from megatron_datastates.flag import Flag
from megatron_datastates.format.manifest import ProviderEntry
from megatron_datastates.format.tail import Kind, TailEntry
from megatron_datastates.format.values import SMALL_ALIGNMENT
from megatron_datastates.pipeline.saving.frames import Encoders, FrameWriter
from megatron_datastates.plan.layout import align_up
from megatron_datastates.providers.base import (
    CopyBudget,
    Encoding,
    Mutability,
    TailSource,
    Write,
    bad_mutability,
)
from megatron_datastates.providers.collect import Collected, Empty, ProviderEntries
from megatron_datastates.providers.objects import ObjectSource, check_pickle, nothing

_GIL_SECONDS = 0.0005  # for which small objects are written without releasing it on purpose
# What torch.save raises, and what `__reduce__` of a class may, beside a plain RuntimeError.
_UNPICKLABLE = (
    *(pickle.PicklingError, TypeError, AttributeError, ValueError, LookupError),
    *(RecursionError, NotImplementedError),
)
_MOST_EMPTY = 1000  # objects written at once
_SNAPSHOT_BYTES = 16 << 20  # of host memory, for copies of objects in one save


class _Pending(NamedTuple):
    key: str
    source: TailSource
    number: int  # among the entries of the tail, as planned

    @property
    def is_fenced(self) -> bool:
        return self.source.mutability is Mutability.AT_FENCE


@dataclasses.dataclass
class TailCosts:
    """What one provider's part of the tail has cost."""

    entries: dict[int, int] = dataclasses.field(default_factory=dict)  # numbers, by Kind
    bytes: int = 0  # as stored
    logical_bytes: int = 0  # before they were encoded
    seconds: float = 0.0  # of writing, waits for slots included

    def add(self, entry: TailEntry, seconds: float) -> None:
        """Counts an entry that was written."""
        self.entries[entry.kind] = self.entries.get(entry.kind, 0) + 1
        self.bytes += entry.stored_bytes
        self.logical_bytes += entry.bytes
        self.seconds += seconds


class Tail:
    """The tail of one save, on its way to the file.

    Args:
        trust_objects: whether to store objects that a load would refuse.
    """

    def __init__(self, trust_objects: bool) -> None:
        self._trust_objects = trust_objects
        self.by_provider: list[ProviderEntries] = []
        self._now: list[_Pending] = []
        self._later: list[_Pending | Empty] = []  # the last one first: each goes once it is written
        self._written: dict[int, TailEntry] = {}
        self._late: list[ProviderError] = []  # of writes after their entry was over
        self._encoders = Encoders()
        self._read = Flag()  # nothing that may change at the fence is left to be written
        self._process = os.getpid()
        self.costs: dict[str, TailCosts] = {}  # by provider
        self.writing = ""  # the entry whose source was called and has not returned; for people

    def secure(self, state: Collected) -> None:
        """Copies small objects that may change as soon as the save returns. Called by the trainer's thread.

        Raises:
            ProviderError: a source of a named provider raised an exception; of others, that exception.
            OptionError: a source has a mutability that is no Mutability.
        """
        self.by_provider = state.by_provider  # not `state`: its tensors are the trainer's
        budget = CopyBudget(_SNAPSHOT_BYTES)
        others: list[_Pending] = []
        for number in state.others():
            key, source = state.tail_keys[number], state.tail[number]
            if source.mutability is Mutability.NOW:
                snapshot = self._snapshot(key, source, number, budget)
                (self._now if snapshot is None else others).append(_Pending(key, snapshot or source, number))
            else:
                is_fenced = source.mutability is Mutability.AT_FENCE
                if not is_fenced and source.mutability is not Mutability.NEVER:
                    raise bad_mutability(repr(key), source.mutability)
                (self._later if is_fenced else others).append(_Pending(key, source, number))
        if not self._later:
            self._read.set()
        self._later += state.empty
        self._later += others
        self._later.reverse()

    def write_now(self, writer: TailWriter, deadline: float) -> None:
        """Writes what may change at once and was not copied. Called by the trainer's thread.

        Args:
            deadline: of time.monotonic; the save fails if a slot comes later.

        Raises:
            ProviderError, UnsafeObjectError, FailedCallError: as `write_later`.
        """
        writer.deadline = deadline
        for pending in self._now:
            self._write(writer, pending)
        self._now.clear()
        writer.deadline = None

    def write_later(self, writer: TailWriter) -> None:
        """Writes the rest. Called by the finishing thread.

        Raises:
            ProviderError: a source of a named provider raised an exception (of others, that exception), or
                bytes of an entry came after its writer had returned.
            UnsafeObjectError: a load would refuse an object.
            FailedCallError: the save has failed.
        """
        try:
            self._write_later(writer)
        except BaseException:
            self._later.clear()  # a save that has failed holds nothing of the trainer's
            raise

    def _write_later(self, writer: TailWriter) -> None:
        released = time.perf_counter()
        while self._later:
            first = self._later[-1]
            if isinstance(first, Empty) or not first.is_fenced:
                self._read.set()
            if isinstance(first, Empty):
                self._write_empty(writer, first)
            else:
                self._write(writer, first)
            del first, self._later[-1]  # an object that nobody changes may be large
            # The trainer may wait for the GIL, and nobody for this thread. Without a sleep it would get it
            # only after 5 ms; a sleep after each small object would take as long as the object.
            if time.perf_counter() - released > _GIL_SECONDS:
                time.sleep(0)
                released = time.perf_counter()
        self._read.set()
        if self._late:
            raise self._late[0]

    def wait_read(self, seconds: float) -> bool:
        """Returns whether, within that time, all that may change at the fence was written or given up.

        At once in a forked child: the thread that writes is its parent's, and so is what it reads.
        """
        return os.getpid() != self._process or self._read.wait(max(seconds, 0.0))

    def reads(self, storage: int) -> bool:
        """Returns whether a storage (an UntypedStorage's `_cdata`) may still be read before the next fence.

        Objects and streams may read any.
        """
        if self.wait_read(0.0):
            return False
        fenced = [one for one in list(self._later) if isinstance(one, _Pending) and one.is_fenced]
        return any(getattr(one.source, "storage", storage) == storage for one in fenced)

    def drop_sources(self) -> None:
        """Releases what will not be written, because the save has failed."""
        self._now.clear()
        self._later.clear()

    def close(self) -> None:
        """Ends the threads that encode, and every wait for the tail."""
        self._read.set()
        self._encoders.close()

    def entries(self) -> list[TailEntry]:
        """Returns the footer's entries, in the order of the state."""
        return [self._written[number] for number in range(len(self._written))]

    def providers(self) -> list[ProviderEntry]:
        """Returns the manifest's list of state providers: those that have a name or notes."""
        return [
            ProviderEntry(name=provider.name, kind=provider.kind, notes=dict(provider.notes))
            for provider in self.by_provider
            if provider.name or provider.notes
        ]

    def _provider_of(self, number: int) -> ProviderEntries:
        return next(
            provider for provider in self.by_provider if provider.first_tail <= number < provider.end_tail
        )

    def _snapshot(self, key: str, source: TailSource, number: int, budget: CopyBudget) -> TailSource | None:
        try:
            return source.snapshot(budget)
        except Exception as error:
            raise_from(self._provider_of(number).failed(_with_key(error, key, source)), error)

    def _write(self, writer: TailWriter, pending: _Pending) -> None:
        before, provider = time.perf_counter(), self._provider_of(pending.number)
        self.writing = repr(pending.key) + (f" of state provider {provider.name!r}" if provider.name else "")
        try:
            written, pickled = self._pass_on(writer, pending)
        except Exception as error:
            raise_from(provider.failed(_with_key(error, pending.key, pending.source)), error)
        finally:
            self.writing = ""
        if pickled is not None:
            named = pending.source.named if type(pending.source) is ObjectSource else None
            check_pickle(pickled, pending.key, named=named, trust=self._trust_objects)
        self._written[pending.number] = written
        self.costs.setdefault(provider.name, TailCosts()).add(written, time.perf_counter() - before)

    def _write_empty(self, writer: TailWriter, empty: Empty) -> None:
        """Writes objects without a value, many at once: one by one they would take the GIL for 10 ms."""
        data, provider = nothing(), self._provider_of(empty.first)
        step = align_up(len(data), SMALL_ALIGNMENT)
        costs = self.costs.setdefault(provider.name, TailCosts())
        for first in range(0, len(empty.keys), _MOST_EMPTY):
            time.sleep(0)  # releases the GIL
            before, keys = time.perf_counter(), empty.keys[first : first + _MOST_EMPTY]
            begin = writer.begin_entry()
            writer.write((data + bytes(step - len(data))) * (len(keys) - 1) + data)
            entries = [
                TailEntry(Kind.OBJECT, key, begin + at * step, len(data), len(data))
                for at, key in enumerate(keys)
            ]
            self._written.update(enumerate(entries, empty.first + first))
            seconds = time.perf_counter() - before
            for entry in entries:
                costs.add(entry, seconds / len(entries))

    def _pass_on(self, writer: TailWriter, pending: _Pending) -> tuple[TailEntry, bytes | None]:
        """Writes an entry; returns where it is, and the pickle to be checked if it is an object."""
        source, begin = pending.source, writer.begin_entry()
        encoding: Encoding | None = getattr(source, "encoding", None)
        name = "" if source.kind is Kind.FRAGMENT else pending.key
        if encoding is not None:
            frames = FrameWriter(writer.write, encoding, self._encoders)
            pickled = self._written_by(source, pending.key, frames.write)
            facts = (encoding.codec, encoding.item_bytes, tuple(frames.close()), frames.digest())
            if source.kind is Kind.OBJECT and frames.bytes > OBJECT_BYTES:
                raise _too_large(pending.key, frames.bytes)
            stored = writer.position - begin
            return TailEntry(source.kind, name, begin, stored, frames.bytes, *facts), pickled
        if source.kind is Kind.FRAGMENT:
            return _pass_on_hashed(writer, source, begin), None
        pickled = self._written_by(source, pending.key, writer.write)
        size = writer.position - begin
        return TailEntry(source.kind, name, begin, size, size), pickled

    def _written_by(self, source: TailSource, key: str, write: Write) -> bytes | None:
        """Calls `source.write`; returns what it returns."""
        entry_write = _EntryWrite(write, key, self._late)
        try:
            return source.write(entry_write)
        finally:
            entry_write.end()


def _with_key(error: Exception, key: str, source: TailSource) -> Exception:
    """Returns the error of writing an entry, with the key of an object that no pickle can hold."""
    source = getattr(source, "source", source)  # that is encoded
    if type(source) is not ObjectSource or not _is_unpicklable(error):
        return error
    return UnsafeObjectError(
        f"object {key!r} was not saved, as it cannot be pickled: {type(error).__name__}: {error}. "
        "Store plain data instead, such as its state_dict()"
    )


def _is_unpicklable(error: Exception) -> bool:
    # Errors of a device, and lack of its memory, are classes derived from RuntimeError.
    known = isinstance(error, _UNPICKLABLE) or type(error) is RuntimeError
    return known and not isinstance(error, DataStatesError) and not is_lack_of_memory(error)


def _too_large(key: str, size: int) -> DataStatesError:
    return DataStatesError(
        f"object {key!r} was not saved: it has {size} bytes, expected at most {OBJECT_BYTES} of an object "
        "that is compressed. Save without compression, or store its tensors under names of their own"
    )


class _EntryWrite:
    """The function that a source writes one entry with; it refuses calls once the entry is over. Thread-safe.

    A program may keep the function, or call it from a thread that its writer did not wait for: those bytes
    would become part of another entry.

    Args:
        late: to which an error is added for every call that comes too late.
    """

    def __init__(self, write: Write, key: str, late: list[ProviderError]) -> None:
        self._write: Write | None = write
        self._key, self._late = key, late
        self._lock = threading.RLock()  # an interrupt may leave it held: then `end` does not wait forever

    def __call__(self, data: Any) -> int:
        with self._lock:
            if self._write is not None:
                return self._write(data)
        error = ProviderError(
            f"bytes of {self._key!r} came after its writer had returned: expected all of them before that. "
            "Let the writer wait for threads that write for it, and keep the function no longer than that"
        )
        self._late.append(error)
        raise error

    def end(self) -> None:
        """Ends the entry."""
        with self._lock:
            self._write = None


def _pass_on_hashed(writer: TailWriter, source: TailSource, begin: int) -> TailEntry:
    """Writes a tensor that was transformed, but has no codec whose frames would be checked."""
    digest = hashlib.sha256()

    def write(data: Any) -> int:
        digest.update(data)
        return writer.write(data)

    source.write(write)
    size = writer.position - begin
    return TailEntry(source.kind, "", begin, size, size, sha256=digest.digest())
