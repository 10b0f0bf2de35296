"""The errors that this package raises: one tree, any of which a program may catch.

What Megatron's functions raise is also Megatron's own kind of error (mcore/errors.py). A message names the
object, what was expected, what was found, and what to do.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import NoReturn, Self

CHANGED_TOO_EARLY = "changed too early:"  # in the error of a tensor that was changed before it was copied
_MOST_SIMILAR = 2  # keys in a message
_MOST_COMPARED = 5000  # keys; of so many, the comparison takes less than a second


def printable(text: str, keep: str = "") -> str:
    """Makes text safe for a terminal: control characters, such as a hostile key may contain, become escapes.

    All text from a checkpoint passes through here before it is printed or logged.

    Args:
        keep: characters that are left alone.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def plot_text(text: str) -> str:
    """Makes text safe for matplotlib, too, to which dollar signs are the ends of formulas."""
    return printable(text, keep="\n").replace("$", r"\$")


def describe_error(error: Exception) -> str:
    """Returns an error's text in one line."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"  # without the number
    return " ".join(str(error).split("\n"))


def is_lack_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that host memory lacks: Python's, or torch's, which has no type."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in str(error)
    )


def raise_from(error: Exception, cause: Exception) -> NoReturn:
    """Raises an error with this cause, unless it is that itself."""
    if error is cause:
        raise error
    raise error from cause


def some_of(texts: Sequence[str], most: int) -> str:
    """Returns the first texts, separated by commas, and how many more there are: `a, b and 3 more`."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def similar_keys(key: str, keys: Iterable[str]) -> str:
    """Returns keys that are like one that is not there, as the end of a message; empty if there are none."""
    names, tail = list(keys), key.rsplit(".", 2)[-2:]
    close = [name for name in names if name.rsplit(".", 2)[-2:] == tail][:_MOST_SIMILAR]
    if not close and len(names) <= _MOST_COMPARED:
        close = difflib.get_close_matches(key, names, _MOST_SIMILAR, 0.75)
    return f" (it has {' and '.join(map(repr, close))})" if close else ""


def is_interrupt(error: BaseException) -> bool:
    """Returns whether something ends what runs here, so that its caller must see it.

    KeyboardInterrupt, SystemExit, and what other threads raise in this one, such as the `RankShouldRestart`
    of nvidia-resiliency-ext. The errors of torch's DCP and of Rust are no Exceptions, either, but errors.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    return not isinstance(error, Exception) and names.isdisjoint(("CheckpointException", "PanicException"))


def forget_frames(error: BaseException) -> None:
    """Removes the tracebacks of an error and of all that led to it: their frames keep tensors alive.

    Notes say as text where causes were raised. What callers of the catcher are handling is theirs, and stays.
    Call it from a function that the catcher of the error calls.
    """
    handling: set[FrameType | None] = set()
    frame = sys._getframe(2).f_back
    while frame is not None:
        handling.add(frame)
        frame = frame.f_back
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if (raised := one.__traceback__) is not None and one is not error:
            if raised.tb_frame in handling:
                continue
            one.add_note("\n".join(["Raised at, last call last:", *map(_place, traceback.walk_tb(raised))]))
        del raised
        one.with_traceback(None)
        left += [one.__cause__, one.__context__]
        left += one.exceptions if isinstance(one, BaseExceptionGroup) else ()


def _place(call: tuple[FrameType, int]) -> str:
    code = call[0].f_code
    return f'  File "{code.co_filename}", line {call[1]}, in {code.co_name}'


class DataStatesError(Exception):
    """Base class of all errors below. Its text is safe to print."""

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n")

    def extended(self, text: str) -> Self:
        """Returns the same error with more text after its own."""
        error = type(self)(f"{self}{text}")
        error.__dict__.update(self.__dict__)
        return error


class OptionError(DataStatesError, ValueError):
    """An option does not exist, or has an invalid value."""


class RanksDifferError(DataStatesError):
    """Ranks run different releases of this package, or differ in options. Every rank raises the same text."""


class NotACheckpointError(DataStatesError):
    """The directory holds no published datastates checkpoint."""


class FormatError(DataStatesError):
    """A file of a checkpoint does not follow FORMAT.md: it is damaged or hostile."""


class UnsafeObjectError(FormatError):
    """A stored object is intact, but not plain data, or not a pickle that this package writes."""


class UntrustedClassError(UnsafeObjectError):
    """An object names a class that neither this package nor the user trusts."""


class UnsupportedFormatError(DataStatesError):
    """The checkpoint was written by a later release and needs features that this release lacks."""


class FailedCallError(DataStatesError):
    """A call of the operating system, of a driver or of the native core failed.

    Attributes:
        code: an errno such as errno.ENOSPC; 0 where the system returned none.
        path: of the file that it concerns; empty where there is none.
        operation: what was tried, such as `write`; empty where nothing says.
    """

    def __init__(self, *args: object, code: int = 0, path: str = "", operation: str = "") -> None:
        super().__init__(*args)
        self.code, self.path, self.operation = code, path, operation

    @classmethod
    def of(cls, error: OSError, path: object, text: str, operation: str = "") -> Self:
        """Returns the error of a call on a file, with the code of the system's."""
        return cls(text, code=error.errno or 0, path=str(path), operation=operation)


class StorageError(FailedCallError):
    """A file is missing, has the wrong size, or cannot be read or written."""


class EngineError(FailedCallError):
    """Memory, a thread or a device was lacking or failed, in a save or a load. No file is damaged."""


class CorruptDataError(DataStatesError):
    """A block's checksum differs from the one that was computed when it was written."""


class MissingKeyError(DataStatesError):
    """The checkpoint has no such tensor or object."""


class MismatchError(DataStatesError):
    """A requested shape or dtype does not match the stored one; in Megatron's loads, also a key."""


class SaveFailedError(DataStatesError):
    """A save failed and published nothing. Every rank raises the same text.

    Its `__cause__` is the error of this rank, if this rank has one.
    """


class LoadFailedError(DataStatesError):
    """A load through Megatron failed. Where ranks load together, every rank raises the same text.

    Its `__cause__` is the error that says why: CorruptDataError, StorageError and the like.
    """


class ProviderError(DataStatesError):
    """A state provider raised an exception, or is not one. Its `__cause__` is that exception."""


class RepairRefusedError(DataStatesError):
    """The checkpoint cannot be proven complete, or needs no repair."""


class NativeModuleError(DataStatesError, ImportError):
    """The compiled module is missing or does not load."""


class MissingPackageError(DataStatesError, ImportError):
    """An optional package is not installed."""


@contextlib.contextmanager
def optional_package(need: str, extra: str) -> Iterator[None]:
    """Raises MissingPackageError in place of an ImportError in the block.

    Args:
        need: says what needs which package.
        extra: of this package; installs that one.
    """
    try:
        yield
    except ImportError as error:
        raise MissingPackageError(f"{need} ({error}): pip install 'megatron-datastates[{extra}]'") from error


class HookPointError(DataStatesError):
    """The installed release of Megatron lacks a function that this package attaches to."""


def is_damage(error: Exception) -> bool:
    """Returns whether an error says that the bytes of a checkpoint are damaged."""
    return isinstance(error, FormatError | CorruptDataError) and not isinstance(error, UntrustedClassError)
