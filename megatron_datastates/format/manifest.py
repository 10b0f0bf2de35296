"""The manifest: the one file whose presence makes a directory a checkpoint.

One line of ASCII (`datastates-manifest <format> <bytes of JSON> <crc32 of JSON>`), then JSON: people can read
it, and no program accepts a damaged one.
"""

from __future__ import annotations

import builtins
import hashlib
import re
import zlib
from typing import NoReturn, TypeVar

import msgspec

from megatron_datastates.errors import FormatError
from megatron_datastates.format.features import check_readable
from megatron_datastates.format.values import FORMAT_VERSION, MOST_GROUPS, SaveId, digest_in_index_name

REPAIRED = "repaired"  # `writer["manifest"]` of a manifest that was not made by a save
DROPPED = "dropped"  # `writer["optimizer"]` of one whose optimizer state was removed
_MOST_BYTES = 1 << 62  # of a data file, as in stored_entries.py
_LINE = re.compile(rb"datastates-manifest (\d{1,9}) (\d{1,12}) ([0-9a-f]{8})\n")


class FileEntry(msgspec.Struct, frozen=True):
    """One data file."""

    name: str
    rank: int
    bytes: int
    footer_offset: int
    footer_crc: int
    save_id: str = ""  # of the save that wrote it, if that is not the manifest's
    group: int = 0  # which of the rank's data files it is
    content_sha256: str = ""  # of its data, if other checkpoints may share the file


class IndexEntry(msgspec.Struct, frozen=True):
    """The index: the file that says where every tensor lies."""

    name: str
    bytes: int
    directory_bytes: int
    sha256: str  # of its directory, which has the SHA-256 of each section


class OtherFile(msgspec.Struct, frozen=True):
    """A file that another program wrote and that belongs to the checkpoint."""

    name: str
    bytes: int
    sha256: str

    @classmethod
    def of(cls, name: str, data: builtins.bytes) -> OtherFile:
        return cls(name, len(data), hashlib.sha256(data).hexdigest())


class ProviderEntry(msgspec.Struct, frozen=True):
    """A state provider, and how it transformed its state; for people, and for its restore half."""

    name: str  # its keys are this, or begin with it and a dot
    kind: str
    notes: dict[str, str] = {}


class Ancestor(msgspec.Struct, frozen=True):
    """A checkpoint that a job resumed from."""

    iteration: int
    save_id: str = ""  # of the save that published it; empty if it is of another format


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a checkpoint, and the save that published it."""

    run_id: str  # 16 hexadecimal digits
    ordinal: int
    world_size: int
    created: str  # UTC, ISO 8601
    index: IndexEntry
    files: list[FileEntry]
    iteration: int | None = None
    # What the job resumed from, and the jobs before it, oldest first; absent if that is not known.
    ancestors: tuple[Ancestor, ...] | msgspec.UnsetType = msgspec.UNSET
    # SHA-256 of the index of DCP (`.metadata`) in whose place the checkpoint is; absent if there was none.
    replaced: str | msgspec.UnsetType = msgspec.UNSET
    # Save id of the checkpoint from which a later program has made this one in its place; absent if none has.
    rewritten: str | msgspec.UnsetType = msgspec.UNSET
    parallel: dict[str, int] = {}  # sizes of the parallel groups, by Megatron's names
    others: list[OtherFile] = []
    providers: list[ProviderEntry] = []
    writer: dict[str, str] = {}  # releases of the libraries involved
    format_version: int = FORMAT_VERSION
    incompatible: int = 0
    compatible: int = 0

    @property
    def save_id(self) -> SaveId:
        """The save that published the checkpoint."""
        return SaveId(int(self.run_id, 16), self.ordinal)

    @property
    def original_save_id(self) -> SaveId:
        """The save of the training, also if the checkpoint was rewritten since."""
        found = None if self.rewritten is msgspec.UNSET else SaveId.parse(self.rewritten)
        return self.save_id if found is None else found

    def file_save_id(self, file: FileEntry) -> SaveId:
        """The save that wrote one of its data files. ValueError: the entry has no valid save id."""
        found = SaveId.parse(file.save_id) if file.save_id else self.save_id
        if found is None:
            raise ValueError(f"{file.save_id!r} is not a save id")
        return found

    def provider_of(self, key: str) -> ProviderEntry | None:
        """The provider of a key: that with the longest name which is the key, or precedes a dot in it."""
        names = {provider.name: provider for provider in self.providers}
        while key not in names and key:
            key = key.rpartition(".")[0]
        return names.get(key)

    @property
    def is_repaired(self) -> bool:
        """Whether `datastates repair` has made it, which does not know all that a save does."""
        return self.writer.get("manifest") == REPAIRED

    @property
    def is_without_optimizer(self) -> bool:
        """Whether the optimizer's state was removed after the save."""
        return self.writer.get("optimizer") == DROPPED

    @property
    def names(self) -> set[str]:
        """The names of all files that belong to the checkpoint, but for the manifest itself."""
        return {self.index.name, *(file.name for file in self.files), *(other.name for other in self.others)}

    @property
    def continued(self) -> set[int]:
        """The ids of the runs that the save's run resumes from, as far as they are known."""
        ancestors = () if self.ancestors is msgspec.UNSET else self.ancestors
        saves = (SaveId.parse(ancestor.save_id) for ancestor in ancestors)
        return {save.run_id for save in saves if save is not None}

    @property
    def data_bytes(self) -> int:
        """The size of all data files together."""
        return sum(file.bytes for file in self.files)

    def encode(self) -> bytes:
        body = msgspec.json.format(msgspec.json.encode(self), indent=1)
        return b"datastates-manifest %d %d %08x\n" % (self.format_version, len(body), zlib.crc32(body)) + body

    @classmethod
    def decode(cls, data: bytes, name: str, *, is_own: bool = False) -> Manifest:
        """Returns the manifest in `data`, all bytes of the file `name`.

        Args:
            is_own: another rank has just made it: what damage or malice may do to one is not looked for.

        Raises:
            FormatError: the file is damaged, or is not a manifest.
            UnsupportedFormatError: a later release wrote it.
        """
        version, manifest = _decoded(_DECODER, data, name)
        check_readable(name, manifest.format_version, manifest.incompatible)
        if manifest.format_version != version:
            manifest = msgspec.structs.replace(manifest, format_version=version)
        if not is_own:
            _check(manifest, name)
        return manifest

    @staticmethod
    def decode_save_id(data: bytes, name: str) -> SaveId:
        """Returns the save that published a manifest. Raises as `decode`, but does not look at its files."""
        _, found = _decoded(_IDENTITY_DECODER, data, name)
        save_id = SaveId.parse(f"{found.run_id}-{found.ordinal}")
        if save_id is None:
            raise FormatError(f"{name} is not a valid manifest: its run id and ordinal are not a save id")
        return save_id


class _Identity(msgspec.Struct):
    """The part of a manifest that says which save published it."""

    run_id: str
    ordinal: int


# Made at import: msgspec inspects a type at its first use, which is not thread-safe.
_DECODER = msgspec.json.Decoder(Manifest)
_IDENTITY_DECODER = msgspec.json.Decoder(_Identity)
_Found = TypeVar("_Found")
_MAY_HELP = "`datastates repair` rebuilds it if the other files are undamaged"


def _decoded(decoder: msgspec.json.Decoder[_Found], data: bytes, name: str) -> tuple[int, _Found]:
    """Returns the version of the format, and what is decoded of the JSON. Raises as Manifest.decode."""
    line = _LINE.match(data)
    if line is None:
        raise FormatError(f"{name} does not begin as a datastates manifest does: {_MAY_HELP}")
    body = data[line.end() :]
    if int(line[2]) != len(body) or int(line[3], 16) != zlib.crc32(body):
        raise FormatError(f"{name} is damaged: its length or checksum differs: {_MAY_HELP}")
    version = int(line[1])
    check_readable(name, version, 0)  # before decoding fields that may have another meaning
    try:
        return version, decoder.decode(body)
    # Before msgspec 0.21, its errors were no ValueErrors; invalid UTF-8 and absurd nesting raise others.
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise FormatError(f"{name} is not a valid manifest: {error}") from None


def _check(manifest: Manifest, name: str) -> None:
    """Raises FormatError for what would lead a reader out of the directory or into absurd allocations."""

    def refuse(why: str) -> NoReturn:
        raise FormatError(f"{name} is not a valid manifest: {why}")

    if re.fullmatch(r"[0-9a-f]{16}", manifest.run_id) is None or not 1 <= manifest.ordinal < 1 << 64:
        refuse(f"run id {manifest.run_id!r} and ordinal {manifest.ordinal} are not a save id")
    index = manifest.index
    if digest_in_index_name(index.name) != index.sha256[:32]:
        refuse(f"index name {index.name!r} is not index-{index.sha256[:32]}, alone or with a save id")
    if not 0 < index.directory_bytes <= index.bytes:
        refuse(
            f"the entry of {index.name} has {index.directory_bytes} of {index.bytes} bytes for its directory"
        )
    names = [file.name for file in manifest.files]
    if len(set(names)) != len(names):
        refuse("a data file is named twice")
    order = [(file.rank, file.group) for file in manifest.files]
    if order != sorted(order):  # the index counts files by their place in this list
        refuse("its data files are not in the order of ranks and groups")
    if len(set(order)) != len(order):
        refuse("a rank has two data files of one group")
    for file in manifest.files:
        if not 0 <= file.footer_offset < file.bytes < _MOST_BYTES or not 0 <= file.rank < manifest.world_size:
            refuse(
                f"the entry of {file.name} has rank {file.rank} of {manifest.world_size}, and a footer at "
                f"byte {file.footer_offset} of {file.bytes}"
            )
        try:
            expected = manifest.file_save_id(file).data_file_name(file.rank, file.group)
        except ValueError as error:
            refuse(f"the entry of {file.name!r}: {error}")
        if file.name != expected or not 0 <= file.group < MOST_GROUPS:
            refuse(f"data file name {file.name!r} is not {expected!r}, the name for its rank, group and save")
        if file.content_sha256 and re.fullmatch("[0-9a-f]{64}", file.content_sha256) is None:
            refuse(f"the entry of {file.name} has the SHA-256 {file.content_sha256!r}")
    for ancestor in () if manifest.ancestors is msgspec.UNSET else manifest.ancestors:
        if ancestor.save_id and SaveId.parse(ancestor.save_id) is None:
            refuse(f"{ancestor.save_id!r}, of an ancestor, is not a save id")
    if manifest.rewritten is not msgspec.UNSET and SaveId.parse(manifest.rewritten) is None:
        refuse(f"{manifest.rewritten!r}, which was rewritten, is not a save id")
    providers = [provider.name for provider in manifest.providers]
    if len(set(providers)) != len(providers):
        refuse("a provider is named twice")
    for other in manifest.others:
        if "/" in other.name or "\0" in other.name or other.name in ("", ".", ".."):
            refuse(f"file name {other.name!r} is not a plain name")
