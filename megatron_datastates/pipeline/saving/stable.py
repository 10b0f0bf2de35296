"""The file of tensors that are not expected to change: written once, and hard-linked until they do.

Protocol of one save, if an earlier checkpoint of the run has a file of the same layout:
  1. The finishing thread links that file into the directory (links.py). No manifest names the link yet.
  2. Meanwhile a *digest pass* copies the tensors into slots, as any save would, takes the SHA-256 of each
     block, and writes nothing.
  3. The trainer's thread compares the digests, at a poll or at the fence. If they are those of the linked
     file, it is part of the new checkpoint. If not, or if there is no link, the tensors are written to a file
     of their own, and writing begins before the fence releases the trainer: nothing may change in between,
     and the save fails if the digests of what was written are others again.
  4. The finishing thread syncs the directory, or seals the new file. In the second case, the link goes with
     what publishing removes: the files of earlier saves that the manifest does not name.
Without such an earlier file, the tensors are written at once, and their digests are taken on the way.

That a provider expects no change decides only which file a tensor goes to. What is unchanged is decided by
digests alone.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from megatron_datastates.engine.native import Output
from megatron_datastates.engine.staging import FileSave
from megatron_datastates.errors import CHANGED_TOO_EARLY, DataStatesError
from megatron_datastates.flag import Flag
from megatron_datastates.format.values import SaveId
from megatron_datastates.pipeline.saving.links import Link, LinkableFile, identity_of
from megatron_datastates.pipeline.saving.records import STABLE_GROUP, DurableFile

_WAIT_SECONDS = 0.1

# Begins a job that writes the file, takes its digests, or both.
Begin = Callable[[Output], FileSave]


class StableFile:
    """The second data file of one rank's save; see the module. It has the methods of a FileSave.

    Args:
        save_id: of this save.
        begin: called on the trainer's thread, once or twice. It holds what the job reads.
        owners: the storages that a job reads.
        link: to a file of the same layout in an earlier checkpoint, if there is one.
    """

    def __init__(self, save_id: SaveId, begin: Begin, owners: Sequence[object], link: Link | None) -> None:
        self._save_id, self._link = save_id, link
        self._begin: Begin | None = begin  # until no source is needed any more
        self._owners = owners
        self.link_error: OSError | None = None  # why the earlier file could not be linked
        self._link_tried = Flag()
        self._settled = Flag()  # whether the file is linked or written is decided
        # One thread decides that, once, and no job begins once the save is cancelled; see tail._EntryWrite.
        self._lock, self._is_deciding = threading.RLock(), False
        self._cancelled = ""
        self._process = os.getpid()  # a forked child waits for nothing, and takes no lock
        self._error: Exception | None = None
        self._started_at = time.perf_counter()
        self._begun_at = 0.0  # seconds after the start
        self._jobs: list[FileSave] = []  # all that were begun
        self._writing: FileSave | None = None
        self._digesting: FileSave | None = None
        self._is_linked = False
        self.linkable: LinkableFile | None = None  # once durable

    # -- the trainer's thread ---------------------------------------------------------------------------

    def start(self) -> None:
        """Begins the digest pass, or writing. Raises what begins a FileSave raises."""
        assert self._begin is not None
        if self._link is None:
            self._link_tried.set()
            self._write()
            self._settled.set()
        else:
            self._digesting = self._begun(Output.DIGESTS)
            self._digesting.close_input()

    def settle(self, seconds: float) -> bool:
        """Decides whether the file is linked or written; if it is written, begins that.

        Returns False if `seconds` do not suffice for the decision. Never raises: see `failure`.
        """
        if self._settled.is_set() or os.getpid() != self._process:
            return True
        try:
            if not self._await_digests(seconds):
                return False
        except Exception as error:
            self._error = error
        # Another thread may ask what the save still reads: multiprocessing's, which shares tensors.
        with self._lock:
            if not self._settled.is_set():
                if self._is_deciding:  # this is a signal handler that interrupts the decision
                    return False
                self._is_deciding = True
                try:
                    if self._error is None:
                        self._decide()
                except Exception as error:
                    self._error = error
                finally:
                    self._is_deciding = False
                self._settled.set()
        return True

    def _await_digests(self, seconds: float) -> bool:
        """Waits for what a decision needs; returns False after `seconds`."""
        deadline = time.monotonic() + seconds
        if not self._link_tried.wait(max(seconds, 0.0)):
            return False
        assert self._digesting is not None
        left = max(deadline - time.monotonic(), 0.0)
        return self.link_error is not None or self._digesting.wait_hashed(left)

    def _decide(self) -> None:
        assert self._digesting is not None and self._link is not None
        if self.link_error is not None:
            self._digesting.cancel("the earlier file could not be linked")
        elif self._digesting.failure is None:
            digest = hashlib.sha256(self._digesting.block_digests()).digest()
            self._is_linked = digest == self._link.file.content_sha256
        if not self._is_linked and (self.link_error is not None or self._digesting.failure is None):
            self._write()

    def _write(self) -> None:
        with self._lock:
            if self._cancelled or self._begin is None:
                return
            self._begun_at = time.perf_counter() - self._started_at
            self._writing = self._begun(Output.FILE_AND_DIGESTS)
            self._writing.close_input()

    def _begun(self, output: Output) -> FileSave:
        assert self._begin is not None
        # Begun and noted without a step between: at an interrupt there, nobody would end the job, nor hold
        # what it reads.
        self._jobs.extend(map(self._begin, (output,)))
        return self._jobs[-1]

    def fence(self, seconds: float) -> bool:
        """Waits until the trainer may change every source; returns False after `seconds`.

        Unlike other copies from a device, a digest pass has to be over: only then is it known whether the
        sources are needed again.
        """
        deadline = time.monotonic() + seconds
        self.allow_lazy_copies(hurries=True)
        if not self.settle(seconds):
            return False
        return self._writing is None or self._writing.fence(max(deadline - time.monotonic(), 0.0))

    def await_copies(self, seconds: float) -> None:
        """Returns when no source is read any more, as FileSave.await_copies."""
        deadline = time.monotonic() + seconds
        self.allow_lazy_copies(hurries=True)
        if not self.settle(seconds):
            self.cancel(f"not everything was read within {seconds:g} s")
            self._settled.set()
        for job in self._jobs:
            job.await_copies(max(deadline - time.monotonic(), 0.0))

    def allow_lazy_copies(self, seconds: float = 0.0, *, hurries: bool = False) -> None:
        for job in self._jobs:
            job.allow_lazy_copies(seconds, hurries=hurries)

    def sources_copied(self) -> bool:
        """Returns whether no source is needed any more, and drops them then. Decides, if that is due."""
        if not self.settle(0.0):
            return False
        copied = [job.sources_copied() for job in self._jobs]  # each drops its own
        if all(copied):
            self._begin, self._owners = None, ()
        return all(copied)

    def reads(self, storage: int) -> bool:
        return not self.sources_copied() and storage in {getattr(one, "_cdata", None) for one in self._owners}

    @property
    def has_changed(self) -> bool | None:
        """Whether the tensors have changed since the earlier file; None if they were not compared."""
        return None if self._link is None or self.link_error is not None else not self._is_linked

    def stream_waited(self) -> float:
        return sum(job.stream_waited() for job in self._jobs)

    # -- the finishing thread ---------------------------------------------------------------------------

    def make_link(self) -> None:
        """Links the earlier file, if there is one. If that fails, `link_error` has the error."""
        if self._link is None:
            return
        try:
            self._link.make()
        except OSError as error:
            self.link_error = error.with_traceback(None)  # whose frames refer to this object
        finally:
            self._link_tried.set()

    def complete(self, seal: Callable[..., DurableFile]) -> None:
        """Makes the file durable, under its name in the directory. Raises the failure.

        Args:
            seal: makes a written file durable: RankSave._seal.
        """
        while not self._settled.wait(_WAIT_SECONDS):
            self._raise_failure()
        self._raise_failure()
        if self._is_linked:
            assert self._link is not None
            self._link.sync()
            self.linkable = self._link.file
            return
        assert self._writing is not None
        durable = seal(self._writing, self._writing.layout.tensor_end, group=STABLE_GROUP)
        written = self._writing.block_digests()
        compared = self._digesting if self.link_error is None else None
        # Samples of the second job, which began later, would not find it.
        if compared is not None and compared.block_digests() != written:
            raise DataStatesError(
                f"a tensor that is not trained {CHANGED_TOO_EARLY} after it was compared with an earlier "
                "checkpoint's, and before it was written. Code that changes it must call "
                "`megatron_datastates.fence()` first"
            )
        content = hashlib.sha256(written).digest()
        path = self._writing.path
        self.linkable = LinkableFile(path, self._save_id, durable, content, identity_of(path))

    def remove(self) -> None:
        """Waits until nothing of a failed save is in flight, then removes what it has made."""
        for job in self._jobs:
            job.remove()
        if self._link is not None:
            self._link.remove()

    # -- any thread -------------------------------------------------------------------------------------

    def cancel(self, reason: str) -> None:
        if os.getpid() != self._process:
            return
        with self._lock:
            self._cancelled = self._cancelled or reason
        self._link_tried.set()  # the thread that would link may be gone
        for job in self._jobs:
            job.cancel(reason)

    @property
    def failure(self) -> Exception | None:
        """The first error, if any."""
        if self._error is not None:
            return self._error
        job = self._writing or (self._digesting if self.link_error is None else None)
        if job is not None and job.failure is not None:
            return job.failure
        return DataStatesError(self._cancelled) if self._cancelled else None

    def _raise_failure(self) -> None:
        if (error := self.failure) is not None:
            raise error

    def status(self) -> dict[str, float]:
        """Returns times and waits as FileSave.status, counted from the start, and bytes if it is written."""
        times: dict[str, float] = {}
        for job, begun_at in ((self._digesting, 0.0), (self._writing, self._begun_at)):
            for name, value in (job.status() if job is not None else {}).items():
                if name.endswith("_at") and isinstance(value, float) and value >= 0:
                    times[name] = value + begun_at
                elif name.startswith("waited_for_") and isinstance(value, float):
                    times[name] = times.get(name, 0.0) + value
                elif name in ("bytes_staged", "bytes_written") and job is self._writing:
                    times[name] = value
        if self._is_linked:
            times.pop("written_at", None)  # nothing was written
        return times


def stable_fields(file: LinkableFile, layout_digest: bytes, layout_bytes: int) -> dict[str, Any]:
    """Returns what the other ranks have to know of the file: fields of a RankRecord."""
    durable = file.durable
    return {
        "stable_file_bytes": durable.bytes,
        "stable_footer_offset": durable.footer_offset,
        "stable_footer_crc": durable.footer_crc,
        "stable_layout_digest": layout_digest,
        "stable_layout_bytes": layout_bytes,
        "stable_ordinal": file.save_id.ordinal,
        "stable_content_sha256": file.content_sha256,
    }
