"""Codecs, and the frames that a box of an encoded fragment needs."""

from __future__ import annotations

import itertools
import sys
import threading
from concurrent.futures import Future

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from megatron_datastates import flag
from megatron_datastates import threads as our_threads
from megatron_datastates.errors import CorruptDataError, MissingPackageError
from megatron_datastates.format import codecs
from megatron_datastates.format.codecs import FRAME_BYTES, PLANES, ZSTD, decode_frame, encode_frame
from megatron_datastates.pipeline.saving import frames as saving_frames
from megatron_datastates.pipeline.saving.frames import Encoders, FrameWriter, threads
from megatron_datastates.plan import frames
from megatron_datastates.plan.boxes import contiguous_strides
from megatron_datastates.plan.frames import FramedBox, cut_into_windows
from megatron_datastates.providers.base import Encoding
from megatron_datastates.threads import BackgroundThread
from tests.support.bytecodes import interrupted

COMPRESSIBLE = bytes(range(200)) * 40


@given(
    st.binary(min_size=1, max_size=3000),
    st.sampled_from([ZSTD, PLANES]),
    st.integers(1, 40),
    st.integers(1, 300),
)
def test_frames_decode_to_what_was_encoded(data, codec, item_bytes, times):
    data = (data * times)[:FRAME_BYTES]
    stored = encode_frame(codec, data, item_bytes)
    assert len(stored) <= len(data)
    assert decode_frame(codec, stored, len(data), item_bytes, "it") == data


def test_byte_planes_are_those_of_the_document():
    """Two items of three bytes, and a byte after the last."""
    items = b"abcABC" * 300 + b"z"
    stored = encode_frame(PLANES, items, 3)
    planes = b"".join(bytes([low, high]) * 300 for low, high in zip(b"abc", b"ABC", strict=True)) + b"z"
    assert zstandard.ZstdDecompressor().decompress(stored) == planes


def test_a_frame_that_encoding_does_not_shorten_is_stored_as_it_is():
    data = np.random.default_rng(1).bytes(5000)
    for codec in (ZSTD, PLANES):
        assert encode_frame(codec, data, 4) == data
        assert decode_frame(codec, data, len(data), 4, "it") == data


@pytest.mark.parametrize("codec", [ZSTD, PLANES])
def test_a_frame_that_encoding_leaves_as_long_is_stored_as_it_is(codec):
    """A reader takes a stored frame of as many bytes for the bytes themselves."""
    noise = np.random.default_rng(1).bytes(500)
    all_data = [noise + bytes(zeros) for zeros in range(64)]
    as_long = [data for data in all_data if len(compressed(data, level=1)) == len(data)]
    assert as_long, "there is such data"
    for data in as_long:
        assert encode_frame(codec, data, 1) == data


def compressed(data: bytes, checksum: bool = True, size: bool = True, level: int = 3) -> bytes:
    packer = zstandard.ZstdCompressor(level=level, write_checksum=checksum, write_content_size=size)
    return packer.compress(data)


GOOD = compressed(COMPRESSIBLE)
LIES = {
    "truncated": GOOD[:-1],
    "truncated to its header": GOOD[:10],
    "one byte": b"\x28",
    "no zstd": b"\0" * 30,
    "bytes after it": GOOD + b"\0",
    "another frame after it": GOOD + compressed(b"more"),
    "an empty frame before it": compressed(b"") + GOOD,
    "a skippable frame before it": b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + GOOD,
    "without checksum": compressed(COMPRESSIBLE, checksum=False),
    "without content size": compressed(COMPRESSIBLE, size=False),
    "fewer bytes": compressed(COMPRESSIBLE[:-1]),
    "more bytes": compressed(COMPRESSIBLE + b"x"),
    "more bytes, not encoded": COMPRESSIBLE + b"x",
    "a flipped bit of the checksum": GOOD[:-1] + bytes([GOOD[-1] ^ 1]),
    "a flipped bit": GOOD[:40] + bytes([GOOD[40] ^ 64]) + GOOD[41:],
    # Frame header: one segment, 8 bytes of content size, checksum. It claims 2^62 bytes.
    "an absurd content size": b"\x28\xb5\x2f\xfd\xe4" + (2**62).to_bytes(8, "little") + GOOD[7:],
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize("codec", [ZSTD, PLANES])
def test_a_frame_that_does_not_decode_to_its_bytes_is_refused(lie, codec):
    assert decode_frame(ZSTD, GOOD, len(COMPRESSIBLE), 1, "it") == COMPRESSIBLE
    with pytest.raises(CorruptDataError, match="it is damaged"):
        decode_frame(codec, lie, len(COMPRESSIBLE), 4, "it")


@given(st.binary(max_size=300))
def test_random_frames_raise_nothing_but_our_error(data):
    with pytest.raises(CorruptDataError):
        decode_frame(ZSTD, data, 5000, 1, "it")


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    codecs.require_zstandard.cache_clear()
    with pytest.raises(MissingPackageError, match=r"pip install 'megatron-datastates\[compress\]'"):
        decode_frame(ZSTD, GOOD, len(COMPRESSIBLE), 1, "it")
    codecs.require_zstandard.cache_clear()


# -- windows ----------------------------------------------------------------------------------------------


def elements(box: FramedBox) -> list[tuple[int, int]]:
    """Returns the place of each element in the entry and in the destination (bytes)."""
    found = []
    for at in itertools.product(*map(range, box.lengths)):
        source = box.first + sum(n * s for n, s in zip(at, box.strides, strict=True))
        target = box.target + box.item_bytes * sum(n * s for n, s in zip(at, box.target_strides, strict=True))
        found.append((source, target))
    return found


@st.composite
def boxes(draw):
    whole = draw(st.lists(st.integers(1, 9), max_size=4))
    start = [draw(st.integers(0, n - 1)) for n in whole]
    lengths = tuple(draw(st.integers(0, n - at)) for n, at in zip(whole, start, strict=True))
    strides = contiguous_strides(whole)
    first = sum(a * s for a, s in zip(start, strides, strict=True))
    item = draw(st.sampled_from([1, 2, 8]))
    return FramedBox(0, 0, 10**6, item, first, lengths, strides, 40, contiguous_strides(lengths))


@given(boxes(), st.integers(1, 400))
def test_windows_tile_a_box_and_span_only_frames_that_they_need(box, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "FRAME_BYTES", 32)
        windows = list(cut_into_windows(box, most))
    assert sorted(place for window in windows for place in elements(window)) == sorted(elements(box))
    for window in windows:
        begin, end = window.span
        assert end - begin <= max(most, window.item_bytes)
        needed = {at * window.item_bytes // 32 for at, _ in elements(window)}
        assert needed == set(range(begin // 32, (end - 1) // 32 + 1))


def test_windows_of_whole_rows_end_where_frames_end():
    mib = 1 << 20
    box = FramedBox(0, 0, 64 * mib, 4, 100 << 10, (60 * 256, 1024), (1024, 1), 0, (1024, 1))
    ends = [window.span[1] for window in cut_into_windows(box, 8 * mib)]
    assert len(ends) == 8
    assert all(end % FRAME_BYTES == 0 for end in ends[:-1])


class LazyPool:
    """Encodes a frame when its result is asked for; counts those that nobody has asked for."""

    def __init__(self) -> None:
        self.waiting = self.most = 0

    def submit(self, function, *arguments):
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        future = Future()

        def result():
            self.waiting -= 1
            return function(*arguments)

        future.result = result
        return future


def test_few_frames_wait_to_be_written():
    pool, written = LazyPool(), []
    writer = FrameWriter(written.append, Encoding(ZSTD, 1, 1), pool)
    for _ in range(40):
        writer.write(bytes(FRAME_BYTES // 2))
    assert pool.most == 2 * threads() and len(written) == 20 - pool.waiting
    assert writer.close() == [len(frame) for frame in written] and len(written) == 20


def test_an_interrupt_leaves_no_encoding_thread_behind():
    """The trainer's thread encodes what may change at once."""
    files = {saving_frames.__file__, flag.__file__, our_threads.__file__, threading.__file__}
    number = 1
    while True:
        encoders = Encoders()

        def encode(encoders: Encoders = encoders) -> None:
            writer = FrameWriter(len, Encoding(ZSTD, 1, 1), encoders)
            writer.write(bytes(3 * FRAME_BYTES + 1))
            writer.close()

        was_interrupted = interrupted(encode, files, number)
        closing = BackgroundThread(encoders.close)
        closing.start()
        assert closing.join(30.0), f"interrupted before bytecode {number}"
        if not was_interrupted:
            break
        number += 3
    assert number > 100


def test_what_closed_encoders_were_given_is_encoded_and_errors_are_passed_on():
    encoders = Encoders()
    early = encoders.submit(lambda: b"early")
    encoders.close()
    encoders.close()
    late = encoders.submit(lambda: b"late")
    assert (early.result(), late.result()) == (b"early", b"late")
    for each in (Encoders(), encoders):
        with pytest.raises(ZeroDivisionError):
            each.submit(lambda: bytes(1 // 0)).result()
        each.close()


def test_where_no_thread_can_be_started_the_caller_encodes(monkeypatch):
    def fail(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(BackgroundThread, "start", fail)
    assert Encoders().submit(lambda: b"it").result() == b"it"


def test_where_the_threads_have_died_the_caller_encodes(monkeypatch):
    monkeypatch.setattr(BackgroundThread, "_run", id)  # takes the arguments, and returns
    encoders = Encoders()
    assert encoders.submit(lambda: b"it").result() == b"it"
    encoders.close()
