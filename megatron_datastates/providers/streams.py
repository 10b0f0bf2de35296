"""Streams: bytes that a program produces piece by piece, without knowing how many they will be."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any

from megatron_datastates.errors import MismatchError
from megatron_datastates.format.tail import Kind
from megatron_datastates.providers.base import CopyBudget, Mutability, Write


@dataclasses.dataclass(frozen=True, slots=True)
class StreamSource:
    """A stream that a callback writes.

    Attributes:
        key: name of the stream, relative to the provider's name.
        writer: called once with a function that appends a buffer to the stream. The buffer may be reused as
            soon as that function has returned. It must have written everything when it returns, so
            it cannot be a generator.
        mutability: how long `writer` writes the same bytes. NOW: it is called before the save returns;
            AT_FENCE: on another thread, and the next fence waits until it returns; NEVER: on another thread.
    """

    key: str
    writer: Callable[[Write], object]
    mutability: Mutability = Mutability.NOW

    kind = Kind.STREAM

    @classmethod
    def from_buffers(
        cls, key: str, buffers: Iterable[Any], mutability: Mutability = Mutability.NOW
    ) -> StreamSource:
        """Returns a stream of the buffers of an iterable. A save fails if an earlier one has consumed it."""
        is_consumed = False

        def writer(write: Write) -> None:
            nonlocal is_consumed
            if is_consumed:
                raise RuntimeError(
                    f"the buffers of stream {key!r} come from an iterator that an earlier save has consumed: "
                    "make a new stream in every call of `entries`"
                )
            is_consumed = iter(buffers) is buffers
            for buffer in buffers:
                write(buffer)

        return cls(key, writer, mutability)

    def snapshot(self, budget: CopyBudget) -> None:
        """Returns None: the size of a copy is unknown."""

    def write(self, write: Write) -> None:
        """Calls the writer.

        Raises what it raises, and MismatchError if it returned what has yet to run, such as a generator.
        """
        returned = self.writer(write)
        if isinstance(returned, Iterator | Awaitable | AsyncIterator):
            raise MismatchError(
                f"the writer of stream {self.key!r} returned a {type(returned).__name__}, which has yet to "
                "run: expected all bytes to be written when it returns. Let it call the function that it is "
                "passed, without yield or async; buffers that a generator yields are for "
                "StreamSource.from_buffers"
            )
