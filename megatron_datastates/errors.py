"""Every error this package raises on purpose: one tree, of which a program may catch any.

What is raised through Megatron's functions is also Megatron's own kind of error (mcore/errors.py). A message
names the object, what was expected and what was found, and what to do about it.
"""

from __future__ import annotations

from typing import Self


def printable(text: str, keep: str = "") -> str:
    """Makes text safe for a terminal: control characters, such as a hostile key has, become escapes.

    Everything that prints or logs what a checkpoint says goes through here.

    Args:
        keep: characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


class DataStatesError(Exception):
    """Base of all errors below. Their texts are printable."""

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n")

    def extended(self, text: str) -> Self:
        """Returns the same error with more text behind its own."""
        error = type(self)(f"{self}{text}")
        error.__dict__.update(self.__dict__)
        return error


class OptionError(DataStatesError, ValueError):
    """An option has a value that makes no sense."""


class NotACheckpointError(DataStatesError):
    """The directory holds no published datastates checkpoint."""


class FormatError(DataStatesError):
    """Bytes of a checkpoint do not have the form that FORMAT.md gives them: damaged or hostile."""


class UnsafeObjectError(FormatError):
    """An object that was read as it was written is not plain data, or no pickle of ours."""


class UntrustedClassError(UnsafeObjectError):
    """An object names a class that is on no list: neither ours nor the user's."""


class UnsupportedFormatError(DataStatesError):
    """The checkpoint was written by a later release, with features that this one does not know."""


class FailedCallError(DataStatesError):
    """A call of the operating system, of a driver or of the native core failed.

    Attributes:
        code: an errno such as errno.ENOSPC; 0 where the system gave none.
        path: of the file that it concerns; empty where there is none.
        operation: what was tried, such as `write`; empty where nothing says.
    """

    def __init__(self, *args: object, code: int = 0, path: str = "", operation: str = "") -> None:
        super().__init__(*args)
        self.code, self.path, self.operation = code, path, operation


class StorageError(FailedCallError):
    """A file is missing, has the wrong size, or cannot be read or written."""


class EngineError(FailedCallError):
    """The machine did not give what a read needs (memory, threads, a device): no fault of any file."""


class CorruptDataError(DataStatesError):
    """A block's checksum differs from the one that was computed when it was written."""


class MissingKeyError(DataStatesError):
    """The checkpoint has no such tensor or object."""


class MismatchError(DataStatesError):
    """A shape or dtype that is asked for does not fit the stored one; in loads of Megatron's, also a key."""


class SaveFailedError(DataStatesError):
    """A save failed; nothing was published. Every rank raises the same text.

    Its `__cause__` is the error of this rank, if this rank has one.
    """


class LoadFailedError(DataStatesError):
    """A load through Megatron failed; where ranks load together, every rank raises the same text.

    Its `__cause__` is the error that says why: CorruptDataError, StorageError and the like.
    """


class RepairRefusedError(DataStatesError):
    """It is not proven that all of a checkpoint is there, or there is nothing to repair."""


class NativeModuleError(DataStatesError, ImportError):
    """The compiled module is missing or does not load."""


class MissingPackageError(DataStatesError, ImportError):
    """An optional package is not installed."""


class HookPointError(DataStatesError):
    """This release of Megatron lacks what we attach to."""
