"""FORMAT.md agrees with the code: tables of fields, codes, constants and names."""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

import megatron_datastates.format as package
from megatron_datastates.engine._native import crc32c
from megatron_datastates.format import (
    codecs,
    footer,
    header,
    index,
    manifest,
    optimizer_map,
    stored_entries,
    tables,
    tail,
    values,
)
from megatron_datastates.format.features import COMPATIBLE_CHECKSUMS, KNOWN_INCOMPATIBLE

TEXT = (Path(package.__file__).parent / "FORMAT.md").read_text()


def rows_under(heading: str) -> list[list[str]]:
    """Returns the cells of the first table after a heading, without its two head lines."""
    section = re.split(r"\n#+ ", TEXT.split(f"# {heading}\n", 1)[1])[0]
    table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert table is not None, heading
    lines = table[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def fields_of(packing: struct.Struct | np.dtype) -> list[tuple[int, int, str]]:
    """Returns (offset, size, kind) of every field as the code packs it."""
    if isinstance(packing, np.dtype):
        layout = [(packing.fields[name][1], packing.fields[name][0]) for name in packing.names]
        return [(offset, kind.itemsize, kind.char) for offset, kind in layout]
    found, at = [], 0
    for count, kind in re.findall(r"(\d*)([a-zA-Z])", packing.format):
        size = struct.calcsize(f"<{count}{kind}")
        found.append((at, size, kind))
        at += size
    return found


KINDS = {
    "s": "bytes",
    "V": "bytes",
    "B": "u8",
    "H": "u16",
    "I": "u32",
    "Q": "u64",
    "L": "u64",
}  # numpy calls u64 L
PACKINGS = {
    "Header": header._FIELDS,
    "Footer": footer._FIELDS,
    "Entry of the tail": tail._ENTRY,
    "Trailer": footer._TRAILER,
    "Index header": tables._HEADER,
    "Key table": tables.KEY,
    "Object table": tables._OBJECT,
}


@pytest.mark.parametrize("heading", PACKINGS)
def test_tables_of_fields_agree_with_what_the_code_packs(heading):
    documented = [(int(offset), int(size), kind) for offset, size, kind, _ in rows_under(heading)]
    assert documented == [(offset, size, KINDS[kind]) for offset, size, kind in fields_of(PACKINGS[heading])]


@pytest.mark.parametrize(
    ("heading", "magic"),
    [
        ("Header", header._MAGIC),
        ("Footer", footer._MAGIC),
        ("Trailer", footer._TRAILER_MAGIC),
        ("Index header", tables._MAGIC),
    ],
)
def test_magics_are_what_the_code_writes(heading, magic):
    written = re.search(r"magic `(.*)`", rows_under(heading)[0][3])[1]
    assert written.encode().decode("unicode_escape").encode("latin-1") == magic


def test_dtype_codes_are_what_the_code_uses():
    documented = {name: (int(code), int(size)) for code, name, size in rows_under("Dtype codes")}
    assert documented == values.DTYPES


def test_constants_agree_with_the_code():
    for name, value, _ in rows_under("Format 2"):
        module = codecs if name == "`FRAME_BYTES`" else values
        assert getattr(module, name.strip("`")) == int(value)
    assert header.HEADER_BYTES == 4096
    assert footer.TRAILER_BYTES == 36
    assert footer.BLOCK_BYTES == 1 << 20
    assert TEXT.startswith(f"# Format {values.FORMAT_VERSION}\n")


def test_codecs_and_kinds_are_those_of_the_code():
    documented = {int(code): (name, uses == "yes") for code, name, uses in rows_under("Codecs")}
    assert documented == {code: (name, code == codecs.PLANES) for code, name in codecs.CODECS.items()}
    assert [kind.value for kind in tail.Kind] == [1, 2, 3]
    assert "kind: 1 object, 2 stream, 3 encoded fragment" in TEXT
    assert tables.ENCODED == 1 << 0
    assert "flags: bit 0 encoded" in TEXT


def test_checksums_are_those_of_the_code():
    assert f"`{crc32c(b'123456789'):08x}`" in TEXT
    assert f"`{zlib.crc32(b'123456789'):08x}`" in TEXT


def test_fields_of_the_manifest_agree_with_the_code():
    documented = [row[0].strip("`") for row in rows_under("Manifest")]
    assert documented == list(manifest.Manifest.__struct_fields__)
    kinds = (manifest.IndexEntry, manifest.FileEntry, manifest.OtherFile, manifest.ProviderEntry)
    for struct_type in kinds:
        pattern = rf"^\| `{struct_type.__name__}` \| `(\w+)` \|"
        assert re.findall(pattern, TEXT, re.MULTILINE) == list(struct_type.__struct_fields__)


def test_defaults_of_the_manifest_agree_with_the_code():
    defaults = {field.name: field for field in msgspec.structs.fields(manifest.Manifest)}
    for name, _, default, _ in rows_under("Manifest"):
        field = defaults[name.strip("`")]
        assert field.required == (default == "")
        if default == "absent":
            assert field.default is msgspec.UNSET
        elif default:
            value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
            assert msgspec.json.encode(value).decode() == default


def test_fields_of_the_optimizer_map_agree_with_the_code():
    documented = [tuple(cell.strip("`") for cell in row[:2]) for row in rows_under("Optimizer map")]
    kinds = (
        optimizer_map.OptimizerMap,
        optimizer_map.Bucket,
        optimizer_map.Parameter,
        optimizer_map.ParameterShard,
    )
    assert documented == [(kind.__name__, field) for kind in kinds for field in kind.__struct_fields__]
    assert f"of the map: {optimizer_map.MAP_FORMAT_VERSION} |" in TEXT
    assert f"`.{values.OPTIMIZER_MAP_NAME}/shard_0_1`" in TEXT
    assert values.is_optimizer_map(f"x.{values.OPTIMIZER_MAP_NAME}/shard_0_1")
    assert not values.is_optimizer_map("x.optimizer/shard_0_1")


def test_feature_bits_agree_with_the_code():
    rows = rows_under("Versions and features")
    known = {kind: sum(1 << int(bit) for k, bit, _ in rows if k == kind and bit != "none")
             for kind in ("incompatible", "compatible")}  # fmt: skip
    assert known == {"incompatible": KNOWN_INCOMPATIBLE, "compatible": COMPATIBLE_CHECKSUMS}


def test_names_in_the_directory_have_the_documented_forms():
    names = [row[0].strip("`") for row in rows_under("Directory")]
    save = values.SaveId(0x123, 45)
    assert names[0] == values.MANIFEST_NAME
    assert re.fullmatch("index-[0-9a-f]{32}", index.index_entry(index.build_index([], {}).encode()).name)
    examples = {
        "data-K-R-N.bin": "data-00007-0000000000000123-45.bin",
        "data-K.G-R-N.bin": "data-00007.9-0000000000000123-45.bin",
    }
    assert save.data_file_name(7) == examples[names[2]]
    assert save.data_file_name(7, 9) == examples[names[3]]
    assert save.dcp_file_name() == "dcp-0000000000000123-45.pt" and names[4] == "dcp-R-N.pt"


def test_limits_agree_with_the_code():
    assert f"at most {tables._MAX_DIMENSIONS}" in TEXT
    assert f"more than {tables._MAX_EXPANSION} bytes for one" in TEXT
    assert f"multiple of {tables._ALIGNMENT}" in TEXT
    assert stored_entries._MAX_BYTES == 2**62
    assert "2^62" in TEXT
