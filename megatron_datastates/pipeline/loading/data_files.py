"""The data files of an open checkpoint: their footers, and reads of their bytes, checked.

Belongs here: where each file is read from (a near tier, or else the checkpoint's directory) and what happens
if it cannot be read there. Does not belong here: which bytes are wanted (slices.py, entries.py).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Collection, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_datastates.config import Options
from megatron_datastates.engine.reader import Reader, read_footer
from megatron_datastates.errors import CorruptDataError, FormatError, MismatchError, StorageError
from megatron_datastates.files import is_object
from megatron_datastates.format.footer import Footer
from megatron_datastates.format.index import Index
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.pipeline.loading.decoding import read_framed
from megatron_datastates.pipeline.loading.read_costs import ReadCosts
from megatron_datastates.pipeline.near.places import near_folder, near_root
from megatron_datastates.pipeline.runs.damage import describe_blocks, what_rank_wrote
from megatron_datastates.pipeline.runs.opening import check_identity, refuse_replaced
from megatron_datastates.plan.frames import FramedBox
from megatron_datastates.plan.reads import BoxReads, ScheduledRead, apart_from_direct, gather_spans
from megatron_datastates.threads import ThreadPool

logger = logging.getLogger(__name__)
_FOOTER_THREADS = 8  # a footer is small, and a network file system answers late


class DataFiles:
    """The data files of a checkpoint. Each is opened when something in it is asked for.

    Raises (all methods that read): StorageError for a missing, truncated or unreadable file,
    CorruptDataError for a block whose checksum differs, FormatError for a damaged footer.
    """

    def __init__(self, directory: Path, manifest: Manifest, index: Index, options: Options) -> None:
        self.directory = directory
        self.manifest = manifest
        self.index = index
        self.costs = ReadCosts()
        self._options = options
        self._footers: dict[int, Footer] = {}
        self._near = near_folder(near_root(options.near), directory) if options.near else None
        self._in_near: set[int] = set()  # data files that are read from the near tier

    def file_path(self, file: int) -> Path:
        """Returns where a data file is read: in the near tier, if it is there and complete (see `footer`)."""
        folder = self._near if self._near is not None and file in self._in_near else self.directory
        return folder / self.manifest.files[file].name

    def footer(self, file: int) -> Footer:
        """Returns the footer of a data file, and checks that it belongs to this save."""
        if file not in self._footers and self._near is not None:
            self._look_near(self._near, file)
        if file not in self._footers:
            entry = self.manifest.files[file]
            try:
                footer = read_footer(self.file_path(file), entry.bytes)
            except (StorageError, FormatError) as error:
                refuse_replaced(self.directory, self.manifest, error)
                raise error.extended(f". {what_rank_wrote(self.manifest, self.index, file)}") from error
            check_identity(self.manifest, entry, footer, self.file_path(file))
            self._footers[file] = footer
        return self._footers[file]

    def _look_near(self, folder: Path, file: int) -> None:
        entry = self.manifest.files[file]
        path = folder / entry.name
        try:
            if not path.is_file():
                return
            footer = read_footer(path, entry.bytes)
            check_identity(self.manifest, entry, footer, path)
        except (OSError, StorageError, FormatError) as error:
            logger.warning("%s; reading it from %s", error, self.directory)
            return
        self._in_near.add(file)  # first: another thread that finds the footer reads from here, too
        self._footers[file] = footer

    def _leave_near(self, files: Collection[int], error: Exception) -> None:
        """Reads these files from the checkpoint's directory from now on."""
        if not self._in_near.isdisjoint(files):  # else another thread has met the same
            logger.warning("%s; reading from %s instead", error, self.directory)
        self._in_near.difference_update(files)

    def has_footer(self, file: int) -> bool:
        """Returns whether the footer of a data file has been read."""
        return file in self._footers

    @functools.cached_property
    def data_ends(self) -> npt.NDArray[np.uint64]:
        """Where the data of each file end, and its footer begins."""
        return np.array([file.footer_offset for file in self.manifest.files], np.uint64)

    def require(self, files: Iterable[int]) -> None:
        """Reads the footers of these data files: a missing or truncated file raises here."""
        unknown = sorted(set(files) - self._footers.keys())
        if len(unknown) > 1:
            with ThreadPool(_FOOTER_THREADS, "reads footers") as pool:
                pool.map(self.footer, unknown)
        for file in unknown:
            self.footer(file)

    def read(self, scheduled: Iterable[ScheduledRead], reader: Reader | None = None) -> None:
        """Executes reads in one pass over the files; a missing file raises before any data moves.

        Args:
            reader: with memory from an earlier read of the same load.

        Raises:
            MismatchError: what torch allocated for them is no memory.
        """
        items = list(scheduled)
        if any(not item.address and item.bytes for item in items):  # native code would write to address 0
            raise MismatchError(
                f"{self.directory} was not read: there is no memory to read it into, as torch makes only "
                "fake tensors: load outside of any FakeTensorMode"
            )
        plain = [item for item in items if isinstance(item.reads, BoxReads)]
        framed = [item for item in items if isinstance(item.reads, FramedBox)]
        if framed:
            self.require({item.reads.file for item in items})
        self._read_plain(plain, reader)
        if framed:
            own = reader or self.new_reader()
            read_framed(self, framed, lambda reads: self._read_plain(reads, own), self._options.read_threads)
        self.costs.bytes += sum(item.bytes for item in items)

    def _read_plain(self, items: list[ScheduledRead], reader: Reader | None) -> None:
        """Reads bytes as they are stored."""
        boxes = [item.reads for item in items if isinstance(item.reads, BoxReads)]
        if not boxes:
            return
        spans = gather_spans(boxes, [i.address for i in items], [i.on_device for i in items])
        with self.costs.timing("opening"):
            self.require({box.file for box in boxes})
        # Without direct I/O all reads go through the page cache, and objects in stores never do: there is
        # one way only, and a second source for the same file would gain nothing.
        may_differ = self._options.direct_io and not is_object(self.directory)
        asked = np.array([may_differ and item.through_cache for item in items], np.bool_)
        cached = np.repeat(asked, [len(box.offsets) for box in boxes])
        ways = spans.files * np.uint64(2) + apart_from_direct(spans, cached)
        sources_read, places = np.unique(ways, return_inverse=True)
        files = sources_read // np.uint64(2)
        through_cache = set(np.flatnonzero(sources_read % np.uint64(2)).tolist())
        footers = [self.footer(file) for file in files.tolist()]
        near = self._in_near.intersection(files.tolist())  # read from there, even if another thread leaves it
        sources = [
            (self.file_path(file), footer) for file, footer in zip(files.tolist(), footers, strict=True)
        ]
        spans = dataclasses.replace(spans, files=places.astype(np.uint64))
        try:
            with self.costs.timing("reading"):
                outcome = (reader or self.new_reader()).read(sources, spans, through_cache=through_cache)
        except StorageError as error:
            if not near:
                refuse_replaced(self.directory, self.manifest, error)
                raise
            self._leave_near(near, error)
            return self._read_plain(items, reader)
        self.costs.bytes_read += outcome.bytes_read
        if outcome.bad_blocks:
            bad = sorted({(int(files[n]), block) for n, block in outcome.bad_blocks})
            corrupt = CorruptDataError(describe_blocks(self, bad))
            near.intersection_update(file for file, _ in bad)
            if not near:
                raise corrupt
            self._leave_near(near, corrupt)
            self._read_plain(items, reader)
        return None

    def new_reader(self) -> Reader:
        """Returns a reader for several reads of one load."""
        return Reader(self._options)
