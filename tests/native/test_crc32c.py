"""CRC-32C: the instruction, the tables and the published values agree."""

import ctypes
import os
import random
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_datastates.engine._native import crc32c, crc32c_by_tables, crc32c_combine

CUDA = Path(__file__).parents[2] / "cuda"
# RFC 3720, B.4, and the check value of the catalogue of CRCs.
KNOWN = [
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(reversed(range(32))), 0x113FDB5C),
    (bytes.fromhex("01c00000 00000000 00000000 00000000 14000000 00000400 00000014 00000018"
                   "28000000 00000000 02000000 00000000"), 0xD9963A56),
    (b"123456789", 0xE3069283),
    (b"", 0),
]  # fmt: skip
DATA = random.Random(7).randbytes(4096 + 16)


@pytest.mark.parametrize(("data", "crc"), KNOWN)
def test_published_values_are_met(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc
    assert crc32c_by_tables(data) == crc


def bitwise_reference(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_tables_are_the_polynomial() -> None:
    for length in (1, 2, 7, 8, 9, 63, 300):
        assert crc32c_by_tables(DATA[:length]) == bitwise_reference(DATA[:length])


def test_instruction_and_tables_agree_at_every_length() -> None:
    for length in range(4097):
        assert crc32c(DATA[:length]) == crc32c_by_tables(DATA[:length]), length


@pytest.fixture(scope="module")
def crc_at(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], tuple[int, int]]:
    """Returns both CRCs of memory at an address: Python's own buffers all begin at multiples of 16."""
    folder = tmp_path_factory.mktemp("crc")
    source, library = folder / "at.cc", folder / "libat.so"
    source.write_text(
        '#include "engine/crc32c.h"\n'
        "using namespace datastates;\n"
        'extern "C" unsigned fast(const void* at, size_t n) { return Crc32c(0, at, n); }\n'
        'extern "C" unsigned slow(const void* at, size_t n) { return Crc32cByTables(0, at, n); }\n'
    )
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{CUDA}"]
    sources = [str(source), str(CUDA / "engine" / "crc32c.cc")]
    subprocess.run([*compiler, *flags, "-o", str(library), *sources], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.fast.restype = loaded.slow.restype = ctypes.c_uint

    def both(address: int, size: int) -> tuple[int, int]:
        where = ctypes.c_void_p(address), ctypes.c_size_t(size)
        return loaded.fast(*where), loaded.slow(*where)

    return both


def test_every_offset_in_memory_has_the_same_checksum(crc_at: Callable[[int, int], tuple[int, int]]) -> None:
    memory = ctypes.create_string_buffer(DATA, len(DATA))
    for offset in range(16):
        for length in (*range(40), 1000, 3071, 3072, 3073, 4096):
            found = crc_at(ctypes.addressof(memory) + offset, length)
            assert found == (crc32c(DATA[offset : offset + length]),) * 2, (offset, length)


def test_crc_goes_on_where_it_stopped() -> None:
    whole = crc32c(DATA)
    for cut in range(0, len(DATA), 13):
        assert crc32c(DATA[cut:], crc32c(DATA[:cut])) == whole
        assert crc32c_by_tables(DATA[cut:], crc32c_by_tables(DATA[:cut])) == whole


def test_combined_crc_is_that_of_the_joined_bytes() -> None:
    whole = crc32c(DATA)
    for cut in (0, 1, 8, 31, 1024, 3072, 4095, len(DATA)):
        assert crc32c_combine(crc32c(DATA[:cut]), crc32c(DATA[cut:]), len(DATA) - cut) == whole


@pytest.mark.parametrize("power", [20, 33, 40, 59, 63])
def test_combining_spans_lengths_beyond_memory(power: int) -> None:
    """However so many zeros are cut in two, the CRC is the same."""
    whole, quarter = zeros_crc(1 << power), 1 << (power - 2)
    rest = 3 * quarter
    assert crc32c_combine(zeros_crc(quarter), zeros_crc(rest), rest) == whole
    assert crc32c_combine(zeros_crc(rest), zeros_crc(quarter), quarter) == whole
    assert crc32c_combine(zeros_crc(rest + 1), zeros_crc(quarter - 1), quarter - 1) == whole


def zeros_crc(size: int) -> int:
    """Computes the CRC of so many zero bytes, by the binary digits of the length."""
    crc, piece, bytes_of_piece = 0, crc32c(b"\0"), 1
    while size:
        if size & 1:
            crc = crc32c_combine(crc, piece, bytes_of_piece)
        piece, bytes_of_piece, size = (
            crc32c_combine(piece, piece, bytes_of_piece),
            bytes_of_piece * 2,
            size >> 1,
        )
    return crc


def test_a_million_zeros_are_met_by_combination() -> None:
    assert zeros_crc(1 << 20) == crc32c(bytes(1 << 20)) == crc32c_by_tables(bytes(1 << 20))
