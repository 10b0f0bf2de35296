"""Saves as requests in Megatron's queue of asynchronous calls, polled without a worker process.

The queue asks our caller whether a call is done. The caller publishes before it says so, because the queue
removes a request before it runs the finalize functions (metadata.json, the tracker file).
"""

from __future__ import annotations

import importlib
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

from megatron_datastates.mcore.errors import MegatronSaveFailedError
from megatron_datastates.mcore.hooks import versions
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.saving.held import trainer_held

logger = logging.getLogger(__name__)
_MOST_HIDDEN = 1  # saves that may have failed after an unfinished one, which an error would end

# Megatron's function that writes metadata.json and waits for all ranks, on the trainer's thread.
_METADATA = "save.<locals>.metadata_finalize_fn"


class SaveHandle:
    """The `async_fn` of our requests: the queue's hook recognizes it; calling it waits for the save.

    A queue without our hook calls it in a forked process, where there is nothing to do.
    """

    def __init__(self, publication: Publication, on_failure: str) -> None:
        self.publication = publication
        self.on_failure = on_failure  # raise or warn
        self._process = os.getpid()

    def __call__(self) -> None:
        if os.getpid() == self._process:
            self.publication.wait()
            raise_if_failed(self.publication)


def raise_if_failed(publication: Publication) -> None:
    """Raises SaveFailedError, the same on every rank (but of an abandoned save), if the save has failed."""
    if publication.outcome is Outcome.FAILED:
        error = MegatronSaveFailedError(publication.error)
        error.is_agreed = not publication.is_abandoned
        raise error from publication.save.cause


def warn_of_failure(publication: Publication) -> None:
    """Logs why a save has failed, after which training continues.

    On rank 0, as the error is the same on all ranks; that of an abandoned save is this rank's alone.
    """
    if publication.collectives.rank == 0 or publication.is_abandoned:
        logger.warning("%s Training continues (--datastates-on-failure warn).", publication.error)


class _OnlyIfPublished(list[Callable[[], None]]):
    """Finalize functions of a request: messages, retention, a tracker. No-ops if the save failed.

    Each is wrapped as it is appended, since Megatron may move them to another request. The first one, on all
    ranks, publishes the save if no poll has: in a queue without our hook.
    """

    def __init__(self, publication: Publication, on_failure: str) -> None:
        super().__init__([self._publish])
        self._publication, self._on_failure = publication, on_failure

    def _publish(self) -> None:
        if self._publication.outcome is Outcome.PENDING and self._publication.wait() is Outcome.FAILED:
            if self._on_failure == "raise":
                raise_if_failed(self._publication)
            warn_of_failure(self._publication)

    def append(self, function: Callable[[], None]) -> None:
        if getattr(function, "__qualname__", "") == _METADATA:
            return  # publishing has written metadata.json, and the ranks have agreed on that

        def run_unless_failed() -> None:
            if self._publication.outcome is not Outcome.FAILED:
                function()

        super().append(run_unless_failed)


def make_request(publication: Publication, async_strategy: str, on_failure: str) -> Any:
    """Returns an AsyncRequest of the library whose queue will poll it."""
    return _request_class(async_strategy)(
        async_fn=SaveHandle(publication, on_failure),
        async_fn_args=(),
        finalize_fns=_OnlyIfPublished(publication, on_failure),
    )


def _request_class(async_strategy: str) -> Any:
    if async_strategy == "nvrx":
        try:
            return importlib.import_module(versions.NVRX_QUEUE).AsyncRequest
        except ImportError:
            pass  # not installed: Megatron's own queue needs Megatron's own request
    return importlib.import_module(versions.QUEUE).AsyncRequest


class DataStatesCaller:
    """The queue's interface to a save, in place of a worker process.

    Args:
        queue: polls its first save only. If the storage of that one hangs, no other is ever polled, so this
            also reports later saves that have failed.
    """

    def __init__(self, handle: SaveHandle, finalize_fns: list[Callable[[], None]], queue: Any) -> None:
        self._publication = handle.publication
        self._on_failure = handle.on_failure
        self._publication.hold_report = True
        self._is_reported = False
        self._queue = weakref.ref(queue)
        # In place, because the queue's frozen copy of the request shares this list.
        finalize_fns[:] = [self._finalizer(list(finalize_fns))]

    def schedule_async_call(self, async_req: Any) -> None:
        """Does nothing: the save has been started already."""

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Returns whether the save has ended. Collective unless `no_dist`, which only looks.

        Raises:
            SaveFailedError: the save failed on any rank; raised on all, once: a program that goes on has its
                queue finalize the saves after this one. Or several saves after it have failed.
        """
        if no_dist:
            outcome = self._publication.outcome
        else:
            outcome = self._publication.wait() if blocking else self._publication.poll()
        if outcome is Outcome.FAILED:
            self._failed()
        elif outcome is Outcome.PENDING and not no_dist:
            self._report_failed_after()
        return outcome is not Outcome.PENDING

    def close(self, abort: bool = False) -> None:
        if abort:
            self._publication.abandon("the queue was aborted")

    def _report_failed_after(self) -> None:
        # All ranks poll all saves, and so do the same here.
        queue = self._queue()
        callers = [call.async_caller for call in queue.async_calls] if queue is not None else []
        ours = [caller for caller in callers if isinstance(caller, DataStatesCaller)]
        failed = [one for one in ours if one._publication.outcome is Outcome.FAILED and not one._is_reported]
        if self._on_failure == "warn" or len(failed) > _MOST_HIDDEN:
            for caller in failed:
                caller._failed()

    def _failed(self) -> None:
        if self._is_reported:
            return
        self._is_reported = True
        if self._on_failure == "raise":
            self._publication.hold_report = False
            self._publication.save.on_trainer_released()
            raise_if_failed(self._publication)
        warn_of_failure(self._publication)

    def _finalizer(self, functions: list[Callable[[], None]]) -> Callable[[], None]:
        def finalize() -> None:
            with trainer_held("finalize", self._publication.save):
                for function in functions:
                    function()
                self._publication.hold_report = False

        return finalize


def wrap_schedule_async_request(original: Callable[..., Any], self: Any, async_request: Any) -> Any:
    """Wraps `AsyncCallsQueue.schedule_async_request`: our requests get our caller."""
    handle = async_request.async_fn
    if not isinstance(handle, SaveHandle):
        return original(self, async_request)
    caller = DataStatesCaller(handle, async_request.finalize_fns, self)
    self._get_async_caller = lambda: caller
    try:
        return original(self, async_request)
    finally:
        del self._get_async_caller


def wrap_close(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps `AsyncCallsQueue.close`: an aborted queue abandons our saves, which Megatron's own would not."""
    if kwargs.get("abort", args[0] if args else False):
        ours = [call for call in self.async_calls if isinstance(call.async_caller, DataStatesCaller)]
        for call in ours:
            call.async_caller.close(abort=True)
            self.async_calls.remove(call)
    return original(self, *args, **kwargs)
