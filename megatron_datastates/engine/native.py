"""The native module, an error that explains why it does not load, and the translation of its errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron_datastates.errors import EngineError, FailedCallError, NativeModuleError, StorageError

try:
    from megatron_datastates.engine import _native
except ImportError as error:
    raise NativeModuleError(
        "the native module of megatron_datastates is not built, or not for this Python and platform: "
        f"{error}. In a checkout, `make env` builds it; for an installation, `pip install .` does, with this "
        "Python"
    ) from error

close_in_forked_child = _native.close_in_forked_child
Engine = _native.Engine
forget_descriptor = _native.forget_descriptor
Milestone = _native.Milestone
NumberKind = _native.NumberKind
compare_numbers = _native.compare_numbers
summarize_numbers = _native.summarize_numbers
NativeError = _native.NativeError
Output = _native.Output
SaveJob = _native.SaveJob
describe_tensors = _native.describe_tensors
locate_tensors = _native.locate_tensors
measure_storages = _native.measure_storages
Structure = _native.Structure
Reader = _native.Reader
ReadJob = _native.ReadJob
EAGER_FLAG = _native.EAGER_FLAG
DEVICE_FLAG = _native.DEVICE_FLAG
SLICE_SECONDS = 0.1  # waits in native code return this often, so that signals and restarts get through


def error_of(failure: NativeError, text: str = "") -> FailedCallError:
    """Returns the error for users: a StorageError if the failure names a file, else an EngineError.

    Args:
        text: the message, in place of the failure's own.
    """
    kind = StorageError if failure.path else EngineError
    error = kind(
        text or failure.strerror, code=failure.errno or 0, path=failure.path, operation=failure.operation
    )
    error.__cause__ = failure
    return error


@contextlib.contextmanager
def errors_for_users() -> Iterator[None]:
    """Encloses native calls. Raises StorageError or EngineError in place of NativeError."""
    try:
        yield
    except NativeError as failure:
        raise error_of(failure) from failure
