"""Strided sources: rows at equal distances arrive one after the other, on a device by one call a span.

Chunks are small, so that their borders fall anywhere: between spans, between rows, inside a row.
"""

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_datastates.config import Options
from megatron_datastates.engine import _native as native
from megatron_datastates.engine import staging
from megatron_datastates.engine._native import Milestone
from megatron_datastates.engine.staging import StagingEngine
from megatron_datastates.format.header import HEADER_BYTES
from megatron_datastates.pipeline.saving.plans import locate, plan_state
from megatron_datastates.providers.base import Mutability, Tensors
from tests.native.fake_cuda.driver import FakeCuda
from tests.native.fake_cuda.provider import label_as_device
from tests.native.harness import ALIGNMENT, Copy, Engines, Save, random_bytes, save_whole
from tests.native.sampling import device_samples, host_samples
from tests.native.tearing import SEED, SLOT, change, engine_stream_is_done, held, torn_at
from tests.native.tearing import engine as engine
from tests.unit.states import bits

KINDS = pytest.mark.parametrize("device", [False, True], ids=["host", "device"])


def rows(
    count: int, size: int, step: int, offset: int = 0, *, device: bool = False, seed: int = 0, **more: bool
) -> Copy:
    memory = random_bytes(max(count - 1, 0) * step + size, seed)
    view = np.lib.stride_tricks.as_strided(memory, (count, size), (step, 1))
    return Copy(view, offset, device=device, **more)


@KINDS
@pytest.mark.parametrize("slot_bytes", [ALIGNMENT, 16 * ALIGNMENT])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 16, 100, 4096, 5000])
def test_pieces_are_stored_one_after_the_other(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, size: int, slot_bytes: int, device: bool
) -> None:
    count = 12_345 // size + 3
    copies = [rows(count, size, step, 3 + 30_000 * i, device=device) for i, step in enumerate((size + 3, 0))]
    copies.append(rows(count, size, size // 2, 63_000, device=device))  # rows overlap in memory
    engine = device_engines(slot_bytes=slot_bytes, most_slots=2)
    save_whole(engine, tmp_path / "data", copies, stream=cuda.new_stream())


def copies_made(cuda: FakeCuda) -> list[str]:
    """Returns the copies from the device that were asked for, in order: bytes, or rows x bytes."""
    names = ("cuMemcpyDtoHAsync", "cuMemcpy2DAsync")
    return [line.split()[2] for line in cuda.log() if line.split()[0] in names]


@pytest.mark.parametrize(
    ("copy", "made"),
    [
        (rows(40, 100, 130), ["40x100"]),
        (rows(40, 100, 100), ["4000"]),  # contiguous after all
        (rows(1, 100, 130), ["100"]),
        (rows(100, 100, 130), ["40x100", "96", "4", "40x100", "92", "8", "18x100"]),
        (
            rows(100, 100, 130, 4096 - 50),
            ["50", "50", "40x100", "46", "54", "40x100", "42", "58", "17x100"],
        ),
        (rows(3, 5000, 6000), ["4096", "904", "3192", "1808", "2288", "2712"]),
        (rows(3, 4096, 5000), ["4096"] * 3),
        (rows(4, 10, 0), ["10"] * 4),  # the driver takes no rows that overlap
        (rows(4, 10, 9), ["10"] * 4),
        (rows(4, 10, 10, 5), ["40"]),
    ],
)
def test_a_chunks_part_of_a_span_is_one_call_and_what_its_borders_cut(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, copy: Copy, made: list[str]
) -> None:
    engine = device_engines(slot_bytes=ALIGNMENT, copy_threads=1, tripwire=False)
    on_device = Copy(copy.source, copy.offset, device=True)
    save_whole(engine, tmp_path / "data", [on_device], stream=cuda.new_stream())
    assert sorted(copies_made(cuda)) == sorted(made)


@KINDS
@pytest.mark.parametrize("step", [-7, (1 << 31) - 1, 1 << 31])
def test_steps_that_the_driver_does_not_take_are_single_copies(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, step: int, device: bool
) -> None:
    memory = np.zeros(2 * abs(step) + 100, np.uint8)  # of which few pages are ever touched
    first = 2 * abs(step) if step < 0 else 0
    view = np.lib.stride_tricks.as_strided(memory[first:], (3, 5), (step, 1))
    view[...] = random_bytes(15).reshape(3, 5)
    engine = device_engines(tripwire=False)
    save_whole(engine, tmp_path / "data", [Copy(view, 0, device=device)], stream=cuda.new_stream())
    if device:
        assert copies_made(cuda) == (["3x5"] if 0 < step < 1 << 31 else ["5"] * 3)


@KINDS
def test_spans_that_only_seem_to_touch_are_not_merged(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, device: bool
) -> None:
    """Their first byte and their size fit the neighbour's; their rows lie elsewhere."""
    memory = random_bytes(400)
    spread = np.lib.stride_tricks.as_strided(memory, (5, 8), (16, 1))
    copies = [
        Copy(spread, 0, device=device),
        Copy(memory[40:80], 40, device=device),
        Copy(np.lib.stride_tricks.as_strided(memory[80:], (5, 8), (16, 1)), 80, device=device),
        Copy(np.lib.stride_tricks.as_strided(memory[120:], (5, 8), (16, 1)), 120, device=device),
    ]
    save_whole(device_engines(), tmp_path / "data", copies, stream=cuda.new_stream())


def test_contiguous_spans_are_merged_however_they_are_described(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    memory = random_bytes(300)
    rows = np.lib.stride_tricks.as_strided(memory[100:], (10, 10), (10, 1))
    copies = [
        Copy(part, at, device=True) for part, at in [(memory[:100], 0), (rows, 100), (memory[200:], 200)]
    ]
    save_whole(device_engines(tripwire=False), tmp_path / "data", copies, stream=cuda.new_stream())
    assert copies_made(cuda) == ["300"]


@pytest.mark.parametrize(("size", "row"), [(10, 0), (10, 3), (10, 11)])
def test_spans_that_are_no_whole_number_of_pieces_are_refused(
    engines: Engines, tmp_path: Path, size: int, row: int
) -> None:
    with pytest.raises(OSError, match=f"plan copies: span of {size} bytes .* whole number of rows of {row}"):
        engines().start(
            path=str(tmp_path / "data"), reserve_bytes=0, end=ALIGNMENT, sources=np.zeros(1, np.uint64),
            bytes=np.array([size], np.uint64), offsets=np.zeros(1, np.uint64),
            row_bytes=np.array([row], np.uint64), row_steps=np.zeros(1, np.uint64),
            storages=np.zeros(1, np.uint64), flags=np.zeros(1, np.uint8), stream=0, lazy_seconds=0.0,
        )  # fmt: skip


@pytest.mark.parametrize("nth", [1, 2, 5])
@pytest.mark.parametrize("call", ["cuMemcpy2DAsync", "cuMemcpyDtoHAsync"])
def test_a_failing_copy_of_pieces_fails_the_save(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, call: str, nth: int
) -> None:
    """With one slot, it waits for the copies that were enqueued before, and then uses the slot again."""
    engine, stream = device_engines(slot_bytes=ALIGNMENT, most_slots=1, tripwire=False), cuda.new_stream()
    copies = [rows(3000, 10, 13, device=True), rows(100, 10, 0, 30_000, device=True)]
    cuda.delay_copies(seconds=0.01)
    cuda.fail(call, nth)
    failed = Save(engine, tmp_path / "failed", copies, stream=stream)
    save_whole(engine, tmp_path / "next", [Copy(random_bytes(ALIGNMENT, 5), 0)])
    assert call in failed.failure()


def test_a_piece_that_was_enqueued_before_another_failed_is_waited_for(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    """It is the first copy into this slot, and both are of one span."""
    engine, trainer = device_engines(most_slots=1, tripwire=False), cuda.new_stream()
    cuda.hold_stream(trainer)
    cuda.fail("cuMemcpyDtoHAsync", nth=2)
    save = Save(engine, tmp_path / "data", [rows(3, 10, 0, device=True)], stream=trainer)
    assert save.reaches(Milestone.WRITTEN)
    assert "cuMemcpyDtoHAsync" in save.error
    assert not save.reaches(Milestone.RELEASED, 0.1)
    cuda.release_stream(trainer)
    save.failure()


def test_strided_copies_neither_allocate_on_the_device_nor_wait_for_all_of_it(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    copies = [rows(1000, 4, 64, device=True), rows(9, 100, 0, 5000, device=True)]
    for paranoid in (False, True):
        engine = device_engines(slot_bytes=ALIGNMENT, paranoid=paranoid)
        save_whole(engine, tmp_path / str(paranoid), copies, stream=cuda.new_stream())
    for line in cuda.log():
        assert "MemAlloc" not in line and "MemPool" not in line, line
        assert "CtxSynchronize" not in line and "StreamSynchronize" not in line, line


# -- samples ----------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("byte", ["first", "last", "next"])
@pytest.mark.parametrize(("size", "count"), [(2, 100), (100, 50), (1000, 200), (48, 10_000)])
def test_change_in_a_sampled_piece_fails_the_save(
    cuda: FakeCuda, engine: native.Engine, tmp_path: Path, size: int, count: int, byte: str, device: bool
) -> None:
    """A sample is of one row, and of one chunk of it in host memory."""
    copy = rows(count, size, size + 10, device=device)
    places = device_samples([copy], SEED + 1) if device else host_samples(copy, SLOT, SEED + 1)
    place = places[len(places) // 2]
    assert len(place) == min(64, size) and place.start // size == (place.stop - 1) // size
    changed = {"first": place.start, "last": place.stop - 1, "next": place.stop}[byte]
    with held(cuda, engine, tmp_path):
        save = Save(engine, tmp_path / "data", [copy], stream=cuda.new_stream())
        cuda.synchronize(engine_stream_is_done(cuda, save))
        change(Copy(copy.source[changed // size], 0), changed % size, 1)
    if byte == "next":
        save.finish()
    else:
        assert torn_at(save) == place.start


@KINDS
def test_change_between_the_pieces_is_none(
    cuda: FakeCuda, engine: native.Engine, tmp_path: Path, device: bool
) -> None:
    memory = random_bytes(20 * SLOT)
    copy = Copy(np.lib.stride_tricks.as_strided(memory, (5 * SLOT // 2, 2), (8, 1)), 64, device=device)
    with held(cuda, engine, tmp_path):
        save = Save(engine, tmp_path / "data", [copy], stream=cuda.new_stream())
        cuda.synchronize(engine_stream_is_done(cuda, save))
        memory.reshape(-1, 8)[:, 2:] ^= 1
    save.finish()
    save.assert_stored()


# -- any strides at all -----------------------------------------------------------------------------------

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128)


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """Draws views of any strides: transposed, expanded, cut, overlapping, of one element or none."""
    lengths = draw(st.lists(st.integers(0, 9) | st.sampled_from([1, 40]), max_size=4))
    strides, inner = [0] * len(lengths), 1
    for d in reversed(range(len(lengths))):
        strides[d] = draw(st.sampled_from([inner, inner, 2 * inner, inner + 3]) | st.integers(0, 50))
        inner *= max(lengths[d], 1)
    last = sum(max(n - 1, 0) * step for n, step in zip(lengths, strides, strict=True))
    start, dtype = draw(st.integers(0, 3)), draw(st.sampled_from(DTYPES))
    memory = torch.from_numpy(random_bytes((start + last + 1) * dtype.itemsize, draw(st.integers(0, 99))))
    return memory.view(dtype).as_strided(lengths, strides, start)


@pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
@KINDS
@given(tensors=st.lists(st.tuples(views(), st.booleans()), max_size=6))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_strided_tensor_is_stored_as_its_elements_in_row_major_order(
    cuda: FakeCuda, tmp_path_factory: pytest.TempPathFactory, tensors: list, device: bool
) -> None:
    state = Tensors()
    for i, (tensor, is_eager) in enumerate(tensors):
        state.add(str(i), tensor, Mutability.NOW if is_eager else Mutability.AT_FENCE)
    options = Options(staging_memory=2 * ALIGNMENT, slot_size=ALIGNMENT, direct_io=False, driver=cuda.path)
    path = tmp_path_factory.mktemp("views") / "data"
    stream = cuda.new_stream()
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(StagingEngine(options)) as engine:
        patch.setattr(staging, "_current_stream", lambda device: stream)
        if device:
            label_as_device(patch)
        plan, memory = plan_state(state, []), locate(state)
        layout = plan.layout
        header = b"h" * HEADER_BYTES
        save = engine.begin(path, header, layout, plan.first.copies, memory.addresses, memory.owners, 0)
        assert save.fence(120)
        save.tail.close()
        while not save.wait_written():
            pass
        stored = path.read_bytes()
        save.cancel("it has been read")
        while not save.sources_copied():
            pass
        del save
    for place, offset in zip(layout.order, layout.offsets.tolist(), strict=True):
        tensor = tensors[place][0]
        wanted = bits(torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor))
        assert stored[offset : offset + len(wanted)] == wanted
    assert stored[:HEADER_BYTES] == b"h" * HEADER_BYTES
