"""An open checkpoint: what is in it, and reading it into host memory, checked."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import math
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_datastates.config import Options
from megatron_datastates.engine.reader import (
    Reader,
    read_footer,
    read_small,
)
from megatron_datastates.errors import (
    CorruptDataError,
    FormatError,
    MismatchError,
    MissingKeyError,
    StorageError,
)
from megatron_datastates.files import OBJECT_BYTES, is_object, path_of
from megatron_datastates.format.footer import Footer
from megatron_datastates.format.index import Index, TensorEntry
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.tail import TailEntry
from megatron_datastates.pipeline.loading.decoding import read_framed, resolve
from megatron_datastates.pipeline.loading.entries import ObjectReads, plan_object, read_stream
from megatron_datastates.pipeline.loading.read_costs import ReadCosts
from megatron_datastates.pipeline.near.places import near_folder, near_root
from megatron_datastates.pipeline.runs.damage import describe_blocks, what_rank_wrote
from megatron_datastates.pipeline.runs.opening import (
    check_identity,
    is_another,
    open_index,
    read_manifest,
    refuse_replaced,
)
from megatron_datastates.pipeline.runs.runs import require_counts
from megatron_datastates.plan.boxes import checked_slice, first_overlap
from megatron_datastates.plan.frames import FramedBox
from megatron_datastates.plan.reads import (
    BoxReads,
    ScheduledRead,
    apart_from_direct,
    gather_spans,
    plan_slice,
)
from megatron_datastates.threads import ThreadPool

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
_FOOTER_THREADS = 8  # a footer is small, and a network file system answers late


class Checkpoint:
    """A published checkpoint. Data files are opened when something in them is asked for.

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
        self.rounded: dict[str, str] = {}  # "float32 as bfloat16", by the key of a tensor that was loaded so

    @classmethod
    def open(
        cls, directory: str | os.PathLike[str], options: Options | None = None, *, reuse: bool = True
    ) -> Checkpoint:
        """Reads the manifest and the index's directory, nothing else.

        Args:
            reuse: what another open checkpoint has read of an index with the same bytes is not read again.

        Raises:
            NotACheckpointError: there is no manifest, or DCP has saved a checkpoint in its place.
            FormatError, UnsupportedFormatError, StorageError: it, or the index, cannot be used.
        """
        begin = time.perf_counter()
        path = path_of(directory)
        manifest = read_manifest(path)
        require_counts(path)
        while True:
            try:
                index = open_index(path / manifest.index.name, manifest, reuse)
                checkpoint = cls(path, manifest, index, options or Options.from_environment())
                checkpoint.costs.opening = time.perf_counter() - begin
                return checkpoint
            except (StorageError, FormatError):
                # A save into this directory, or a removal of keys, may have replaced both meanwhile.
                before, manifest = manifest, read_manifest(path)
                if not is_another(manifest, before):
                    raise

    def __repr__(self) -> str:
        counts = f"{len(self.tensors)} tensors, {len(self.objects)} objects, {len(self.streams)} streams"
        return f"<Checkpoint {self.directory}: {counts}>"

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

    # -- what there is ----------------------------------------------------------------------------------

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Global tensors by key: `dtype`, `global_shape`, and where their fragments lie."""
        return self.index.tensors

    @property
    def objects(self) -> list[str]:
        """Keys of the objects."""
        return list(self.index.objects)

    @property
    def streams(self) -> list[str]:
        """Keys of the streams."""
        return list(self.index.streams)

    # -- reading ----------------------------------------------------------------------------------------

    def require(self, files: Iterable[int]) -> None:
        """Reads the footers of these data files: a missing or truncated file raises here."""
        unknown = sorted(set(files) - self._footers.keys())
        if len(unknown) > 1:
            with ThreadPool(min(_FOOTER_THREADS, len(unknown))) as pool:
                list(pool.map(self.footer, unknown))
        for file in unknown:
            self.footer(file)

    def read(self, scheduled: Iterable[ScheduledRead], reader: Reader | None = None) -> None:
        """Executes reads in one pass over the files; a missing file raises before any data moves.

        Args:
            reader: with memory from an earlier read of the same load.
        """
        items = list(scheduled)
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

    def read_tensor(
        self, key: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Returns a slice of a global tensor (all of it by default), in host memory, in its stored dtype.

        Raises:
            MissingKeyError: no such tensor.
            MismatchError: the slice leaves the tensor.
            FormatError: the checkpoint holds only a part of it.
        """
        return self.read_tensors([(key, offset, shape)])[0]

    def read_tensors(
        self,
        slices: Iterable[tuple[str, Sequence[int] | None, Sequence[int] | None]],
        reader: Reader | None = None,
    ) -> list[torch.Tensor]:
        """Reads slices, each (key, offset, shape), in one pass: a block that they share is read once.

        Args:
            reader: with memory from earlier reads.
        """
        targets, scheduled = [], []
        with self.costs.timing("planning"):
            for key, offset, shape in slices:
                target, reads = self._plan_tensor(key, offset, shape)
                targets.append(target)
                scheduled += reads
        self.read(scheduled, reader)
        return targets

    def is_same_dtype(self, key: str, stored: torch.dtype, wanted: torch.dtype) -> bool:
        """Returns whether a tensor is loaded with its stored dtype; notes those that may be rounded.

        Raises:
            MismatchError: stored values cannot become the dtype that is wanted: floats no integers, for one.
        """
        import torch

        if stored == wanted:
            return True
        is_bool = wanted is torch.bool and not (stored.is_floating_point or stored.is_complex)
        if not (is_bool or torch.can_cast(stored, wanted)):
            raise MismatchError(f"tensor {key!r} was saved as {stored} and cannot become {wanted}")
        is_exact = stored is torch.bool or not (wanted.is_floating_point or wanted.is_complex)
        if wanted.itemsize <= stored.itemsize and not is_exact:
            self.rounded[key] = f"{stored} as {wanted}".replace("torch.", "")
        return False

    def _plan_tensor(
        self, key: str, offset: Sequence[int] | None, shape: Sequence[int] | None
    ) -> tuple[torch.Tensor, list[ScheduledRead]]:
        import torch

        entry = self.index.tensor(key)
        offset, shape = checked_slice(key, entry.global_shape, offset, shape)
        reads = self._whole_reads(key, entry, offset, shape)
        target = torch.empty(shape, dtype=torch_dtype(entry.dtype, key), device="cpu")
        return target, [ScheduledRead(part, target.data_ptr()) for part in reads]

    def plan_into(
        self,
        key: str,
        offset: Sequence[int],
        shape: Sequence[int],
        target: torch.Tensor,
        through_cache: bool,
    ) -> list[ScheduledRead]:
        """Plans to read a slice into a contiguous target of its shape and of the stored dtype."""
        entry = self.index.tensor(key)
        offset, shape = checked_slice(key, entry.global_shape, offset, shape)
        reads = self._whole_reads(key, entry, offset, shape)
        return [ScheduledRead(part, target.data_ptr(), target.is_cuda, through_cache) for part in reads]

    def _whole_reads(
        self, key: str, entry: TensorEntry, offset: Sequence[int], shape: Sequence[int]
    ) -> list[BoxReads | FramedBox]:
        reads, covered, touched = plan_slice(entry, offset, shape)
        wanted = math.prod(shape)  # looked at before memory is asked for: a hostile index has any shape
        if covered < wanted:
            raise FormatError(f"tensor {key!r} has holes: {covered} of {wanted} elements are stored")
        self._check_extents(key, entry, reads, touched)
        overlap = first_overlap(entry.offsets[touched], entry.shapes[touched])
        if overlap is not None:  # then the count above proves nothing
            raise FormatError(f"tensor {key!r}: two fragments both hold the element at {overlap}")
        return reads

    @functools.cached_property
    def _data_ends(self) -> npt.NDArray[np.uint64]:
        return np.array([file.footer_offset for file in self.manifest.files], np.uint64)

    def _check_extents(
        self,
        key: str,
        entry: TensorEntry,
        reads: Sequence[BoxReads | FramedBox],
        touched: npt.NDArray[np.intp],
    ) -> None:
        """Raises FormatError for fragments outside the data, and for entries that are not theirs."""
        for part in reads:
            if isinstance(part, FramedBox):
                resolve(self, part)
        if entry.encoded:
            return
        begins, files = entry.file_offsets[touched], entry.files[touched]
        ends, data_ends = begins + entry.file_bytes[touched], self._data_ends[files]
        beyond = ends > data_ends  # both parts of `ends` are below 2**62: see format/index.py
        if beyond.any():
            at = int(beyond.argmax())
            place = f"bytes [{begins[at]}, {ends[at]}) of {self.file_path(int(files[at]))}"
            raise FormatError(
                f"{self.manifest.index.name} is damaged: it places {key!r} at {place}, which has "
                f"{data_ends[at]} bytes of data: load an older checkpoint"
            )

    def read_objects(self, keys: Iterable[str]) -> dict[str, Any]:
        """Returns objects, unpickled with an allow list of names (providers/objects.py).

        Raises:
            MissingKeyError: no such object.
            FormatError: an object is not accepted, or is not where the index says.
        """
        objects = self.plan_objects(keys)
        self.read(objects.scheduled)
        return objects.values()

    def read_object_bytes(self, key: str) -> bytes:
        """Returns an object as it is stored: the bytes that torch.save wrote."""
        objects = self.plan_objects([key])
        self.read(objects.scheduled)
        return objects.stored(key)

    def open_stream(self, key: str) -> Iterator[memoryview]:
        """Yields the bytes of a stream in buffers of at most 16 MiB, checked.

        Raises:
            MissingKeyError: no such stream.
            CorruptDataError: a checksum differs; the SHA-256 of the whole stream is compared at its end.
        """
        file, entry = self.stream_entry(key)
        reader = self.new_reader()
        return read_stream(lambda reads: self.read(reads, reader), file, entry)

    def plan_objects(self, keys: Iterable[str]) -> ObjectReads:
        """Plans the reads of `read_objects`. Raises as it does, but for objects that are not plain data."""
        files = {key: self._object_file(key) for key in keys}
        self.require(files.values())
        buffers, scheduled, entries = {}, [], {}
        for key, file in files.items():
            _, entries[key] = self.object_entry(key)
            buffers[key], read = plan_object(file, entries[key])
            scheduled.append(read)
        return ObjectReads(buffers, scheduled, entries, self._options.trust_objects)

    def read_other(self, name: str) -> bytes:
        """Returns the bytes of a file that others wrote and that belongs to the checkpoint.

        Raises:
            MissingKeyError: the manifest names no such file.
            CorruptDataError: it is not the file that was there when the checkpoint was published.
        """
        entries = [entry for entry in self.manifest.others if entry.name == name]
        if not entries:
            raise MissingKeyError(f"there is no file {name!r} in the checkpoint {self.directory}")
        data = read_small(self.directory / name, OBJECT_BYTES)
        if len(data) != entries[0].bytes or hashlib.sha256(data).hexdigest() != entries[0].sha256:
            raise CorruptDataError(
                f"{self.directory / name} is not the file that was saved: its SHA-256 differs"
            )
        return data

    def read_object(self, key: str) -> Any:
        """Returns one object. Raises as `read_objects`."""
        return self.read_objects([key])[key]

    def read_other_object(self, name: str) -> Any:
        """Returns the object in a whole file of torch.save's. Raises as `read_other` and `read_objects`."""
        return self.decode_object(name, self.read_other(name))

    def decode_object(self, key: str, stored: bytes) -> Any:
        """Returns the object that torch.save wrote as these bytes. FormatError: it is not accepted."""
        from megatron_datastates.providers.objects import deserialize

        return deserialize(stored, key, trust=self._options.trust_objects)

    def object_entry(self, key: str) -> tuple[int, TailEntry]:
        """Returns an object's data file and its entry in the footer. Raises as `read_objects`."""
        file = self._object_file(key)
        return file, self._entry(file, self.footer(file).objects, key, "object")

    def _object_file(self, key: str) -> int:
        if key not in self.index.objects:
            raise self.index.missing("object", key, str(self.directory))
        return self.index.objects[key]

    def stream_entry(self, key: str) -> tuple[int, TailEntry]:
        """Returns a stream's data file and its entry in the footer. Raises as `open_stream`."""
        if key not in self.index.streams:
            raise self.index.missing("stream", key, str(self.directory))
        file = self.index.streams[key]
        return file, self._entry(file, self.footer(file).streams, key, "stream")

    def _entry(self, file: int, entries: Mapping[str, TailEntry], key: str, what: str) -> TailEntry:
        if key not in entries:
            raise FormatError(f"{self.file_path(file)} does not hold {what} {key!r}, as the index says")
        return entries[key]


def torch_dtype(name: str, key: str) -> torch.dtype:
    """Returns `torch.bfloat16` for `bfloat16`.

    Args:
        key: of the tensor, for the message.

    Raises:
        FormatError: this torch has no such dtype.
    """
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"tensor {key!r} has dtype {name}, which torch {torch.__version__} does not have")
    return dtype
