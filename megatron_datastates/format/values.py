"""Small values that several codecs use, and the names of files."""

from __future__ import annotations

import dataclasses
import math
import re

from megatron_datastates.errors import FormatError

FORMAT_VERSION = 2  # that is written
READABLE_VERSIONS = (1, 2)
ALIGNMENT = 4096  # of the header, the tail, the footer and the file's size
BLOCK_BYTES = 1 << 20  # covered by one checksum
SMALL_ALIGNMENT = 64  # of fragments below LARGE_BYTES
LARGE_BYTES = 1 << 20  # fragments from this size on start at ALIGNMENT
MANIFEST_NAME = "datastates.manifest"
MOST_GROUPS = 100  # data files of one rank
OPTIMIZER_MAP_NAME = "datastates_map"  # last part of an object's key, before its shard's number

# Name (torch's, without the prefix) -> (code in the index, bytes per element). Codes are never reused.
DTYPES: dict[str, tuple[int, int]] = {
    "float32": (1, 4),
    "float64": (2, 8),
    "float16": (3, 2),
    "bfloat16": (4, 2),
    "uint8": (5, 1),
    "int8": (6, 1),
    "int16": (7, 2),
    "int32": (8, 4),
    "int64": (9, 8),
    "bool": (10, 1),
    "complex64": (11, 8),
    "complex128": (12, 16),
    "float8_e4m3fn": (13, 1),
    "float8_e5m2": (14, 1),
    "float8_e4m3fnuz": (15, 1),
    "float8_e5m2fnuz": (16, 1),
    "float8_e8m0fnu": (17, 1),
    "uint16": (18, 2),
    "uint32": (19, 4),
    "uint64": (20, 8),
    "complex32": (21, 4),
    "float4_e2m1fn_x2": (22, 1),
}
DTYPE_NAMES = {code: name for name, (code, _) in DTYPES.items()}

_OF_OPTIMIZER = re.compile(r"(?:^|\.)optimizer\.|^optim\.")
_SAVE_ID = r"(?P<run>[0-9a-f]{16})-(?P<ordinal>\d{1,20})"
_DATA_NAME = re.compile(rf"data-\d{{5,9}}(?:\.[1-9]\d?)?-{_SAVE_ID}\.bin", re.ASCII)
_TEMPORARY_NAME = re.compile(rf"\.datastates-[\w.-]+-{_SAVE_ID}\.tmp", re.ASCII)
_INDEX_NAME = re.compile(rf"index-(?P<sha256>[0-9a-f]{{32}})(?:-{_SAVE_ID})?", re.ASCII)
_DCP_NAME = re.compile(rf"dcp-{_SAVE_ID}\.pt", re.ASCII)
_LEFT_BY_ANY = re.compile(r"\.datastates-[\w.-]+\.tmp", re.ASCII)


def is_optimizer_map(key: str) -> bool:
    """Returns whether an object is an optimizer map, which Megatron must not see: it would be unexpected."""
    return key.endswith(f".{OPTIMIZER_MAP_NAME}/shard_0_1")


def is_of_optimizer(key: str) -> bool:
    """Returns whether a tensor or an object is an optimizer's, as Megatron names it, or a program of DCP."""
    return _OF_OPTIMIZER.search(key) is not None


def element_bytes(dtype: str) -> int:
    """Returns the bytes of one element. Raises FormatError for a dtype without a code."""
    if dtype not in DTYPES:
        raise FormatError(f"dtype {dtype} has no code in format {FORMAT_VERSION}")
    return DTYPES[dtype][1]


@dataclasses.dataclass(frozen=True)
class SaveId:
    """One save attempt: a number drawn once per run, and a count that is the same on every rank."""

    run_id: int  # 64 bits
    ordinal: int  # from 1

    def __str__(self) -> str:
        return f"{self.run_id:016x}-{self.ordinal}"

    @classmethod
    def parse(cls, text: str) -> SaveId | None:
        """Returns the save id that `str` has turned into text; None for any other text."""
        match = re.fullmatch(_SAVE_ID, text, re.ASCII)
        found = None if match is None else cls(int(match["run"], 16), int(match["ordinal"]))
        return found if found is not None and str(found) == text and 1 <= found.ordinal < 1 << 64 else None

    def data_file_name(self, rank: int, group: int = 0) -> str:
        """Returns the name of a rank's data file for a group of tensors, which no other save uses."""
        who = f"{rank:05d}.{group}" if group else f"{rank:05d}"
        return f"data-{who}-{self}.bin"

    def index_file_name(self, sha256: str) -> str:
        """Returns the name of this save's index, given its directory's SHA-256; no other save uses it."""
        return f"index-{sha256[:32]}-{self}"

    def dcp_file_name(self) -> str:
        """Returns the name of the file with this save's facts for PyTorch's distributed checkpoints."""
        return f"dcp-{self}.pt"

    def follows(self, name: str) -> bool:
        """Returns whether `name` is the name of a file of an earlier save of the same run."""
        other = save_id_in_name(name)
        return other is not None and other.run_id == self.run_id and other.ordinal < self.ordinal


@dataclasses.dataclass(frozen=True, slots=True)
class Fragment:
    """A rectangular slice of a global tensor, as stored: row-major, no padding."""

    key: str
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]  # in the global tensor, elements
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size as stored."""
        return math.prod(self.shape) * element_bytes(self.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """Contiguous bytes in a data file."""

    file: int  # position in the manifest's list of files
    offset: int
    bytes: int


def decode_name(data: bytes, where: str) -> str:
    """Returns a key as text.

    Raises:
        FormatError: it is not UTF-8. Replacing bytes could make two keys look alike.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise FormatError(f"{where} is damaged: the name {data!r} is not UTF-8") from None


def save_id_in_name(name: str) -> SaveId | None:
    """Returns the save that wrote a file of this name; None if the name has no save id."""
    kinds = (_DATA_NAME, _INDEX_NAME, _DCP_NAME, _TEMPORARY_NAME)
    match = next(filter(None, (kind.fullmatch(name) for kind in kinds)), None)
    if match is None or match["run"] is None:
        return None
    return SaveId(int(match["run"], 16), int(match["ordinal"]))


def is_data_file_name(name: str) -> bool:
    """Returns whether `name` is a data file's: a plain name, so nothing outside the directory."""
    return _DATA_NAME.fullmatch(name) is not None


def is_dcp_file_name(name: str) -> bool:
    """Returns whether `name` is that of a file with facts for PyTorch's distributed checkpoints."""
    return _DCP_NAME.fullmatch(name) is not None


def digest_in_index_name(name: str) -> str | None:
    """Returns the hexadecimal digits of the digest in an index's name; None for any other name."""
    match = _INDEX_NAME.fullmatch(name)
    return match["sha256"] if match else None


def is_own_file_name(name: str) -> bool:
    """Returns whether saves make files of this name: one that no manifest names is a left-over."""
    return is_of_a_checkpoint(name) or _LEFT_BY_ANY.fullmatch(name) is not None


def is_of_a_checkpoint(name: str) -> bool:
    """Returns whether only the directory of a checkpoint has files of this name.

    That of a run may have what a kill has left of its list of jobs.
    """
    return any(kind.fullmatch(name) for kind in (_DATA_NAME, _INDEX_NAME, _DCP_NAME))
