"""Reads to a device, on the fake driver: what arrives, when, and what happens if the device fails."""

import functools
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_datastates.config import Options
from megatron_datastates.dcp import reading, transfers
from megatron_datastates.engine import _native as native
from megatron_datastates.engine import reader as engine_reader
from megatron_datastates.pipeline.loading import in_place
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.saver import Saver
from megatron_datastates.pipeline.session import SaveSession
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.tensors import TensorProvider
from tests.native.fake_cuda.driver import INVALID_CONTEXT, LAUNCH_FAILURE, UNKNOWN, FakeCuda
from tests.native.harness import (
    ALIGNMENT,
    MIB,
    Request,
    Source,
    finish_read,
    make_reader,
    random_bytes,
    start_read,
)
from tests.support.waiting import PATIENCE_SECONDS, eventually

BLOCKS = 12
DATA = random_bytes(BLOCKS * MIB, 3)
BLOCK_CHECKSUMS = [native.crc32c(DATA[at : at + MIB].tobytes()) for at in range(0, len(DATA), MIB)]
Readers = Callable[..., native.Reader]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    path = tmp_path_factory.mktemp("device_reads") / "data"
    path.write_bytes(DATA.tobytes())
    return str(path), len(DATA), np.array(BLOCK_CHECKSUMS, np.uint32).tobytes()


@pytest.fixture
def readers(cuda: FakeCuda) -> Readers:
    return functools.partial(make_reader, driver=cuda.path)


def whole(target: np.ndarray) -> Request:
    return Request(0, len(DATA), target.ctypes.data, device=True)


def test_bytes_arrive_on_the_device(cuda: FakeCuda, readers: Readers, source: Source) -> None:
    target = np.zeros_like(DATA)
    job = start_read(readers(), [source], [whole(target)], cuda.new_stream())
    assert finish_read(job) == (len(DATA), [], "")
    assert np.array_equal(target, DATA)
    assert any("priority=0" in arguments for arguments in cuda.calls("cuStreamCreateWithPriority"))


def test_slots_are_page_locked_before_the_first_copy(
    cuda: FakeCuda, readers: Readers, source: Source
) -> None:
    reader, target = readers(threads=2), np.zeros_like(DATA)
    finish_read(start_read(reader, [source], [whole(target)], cuda.new_stream()))
    assert cuda.registered_bytes == 4 * MIB
    names = [line.split()[0] for line in cuda.log()]
    assert names.index("cuMemHostRegister") < names.index("cuMemcpyHtoDAsync")


@pytest.mark.parametrize("piece", [1, 4, 700, ALIGNMENT])
def test_strided_pieces_are_one_call_a_block(
    cuda: FakeCuda, readers: Readers, source: Source, piece: int
) -> None:
    step, more = 2 * ALIGNMENT, 13
    rows = len(DATA) // step
    target = np.zeros((rows, piece + more), np.uint8)
    request = Request(0, piece, target.ctypes.data, rows, step, piece + more, device=True)
    assert finish_read(start_read(readers(), [source], [request], cuda.new_stream()))[1:] == ([], "")
    assert np.array_equal(target[:, :piece], DATA.reshape(rows, step)[:, :piece])
    assert not target[:, piece:].any()
    assert len(cuda.calls("cuMemcpy2DAsync")) == BLOCKS
    assert cuda.calls("cuMemcpyHtoDAsync") == []


def test_pieces_closer_than_they_are_long_are_copied_one_by_one(
    cuda: FakeCuda, readers: Readers, source: Source
) -> None:
    target = np.zeros(103, np.uint8)
    request = Request(0, 100, target.ctypes.data, 4, 200, 1, device=True)
    assert finish_read(start_read(readers(), [source], [request], cuda.new_stream()))[2] == ""
    assert np.array_equal(target[3:], DATA[600:700]) and target[0] == DATA[0]
    assert len(cuda.calls("cuMemcpyHtoDAsync")) == 4


def test_host_and_device_are_read_to_in_one_pass(cuda: FakeCuda, readers: Readers, source: Source) -> None:
    near, far = np.zeros(5 * MIB, np.uint8), np.zeros(5 * MIB, np.uint8)
    requests = [
        Request(100, len(near), near.ctypes.data),
        Request(77, len(far), far.ctypes.data, device=True),
    ]
    read, _, error = finish_read(start_read(readers(), [source], requests, cuda.new_stream()))
    assert (read, error) == (6 * MIB, "")
    assert np.array_equal(near, DATA[100:][: len(near)]) and np.array_equal(far, DATA[77:][: len(far)])


def test_copies_run_after_the_work_that_the_trainer_enqueued_before(
    cuda: FakeCuda, readers: Readers, source: Source
) -> None:
    target, stream = np.zeros_like(DATA), cuda.new_stream()
    cuda.launch_fill(stream, target.ctypes.data, 7, target.nbytes, seconds=0.2)
    finish_read(start_read(readers(), [source], [whole(target)], stream))
    assert np.array_equal(target, DATA)


def test_a_slot_is_not_read_into_while_the_device_copies_from_it(
    cuda: FakeCuda, readers: Readers, source: Source
) -> None:
    target, stream, threads = np.zeros_like(DATA), cuda.new_stream(), 2
    cuda.hold_stream(stream)
    job = start_read(readers(threads=threads), [source], [whole(target)], stream)
    copies = 2 * threads
    eventually(lambda: cuda.calls("cuEventSynchronize"), "a slot waits for the device")
    eventually(lambda: len(cuda.calls("cuMemcpyHtoDAsync")) == copies, "all slots are copied")
    time.sleep(0.1)
    assert len(cuda.calls("cuMemcpyHtoDAsync")) == copies
    assert not job.wait(0.0) and not target.any()
    cuda.release_stream(stream)
    assert finish_read(job)[1:] == ([], "")
    assert np.array_equal(target, DATA)


def test_a_read_is_not_over_before_the_device_is(cuda: FakeCuda, readers: Readers, source: Source) -> None:
    target, stream = np.zeros(10, np.uint8), cuda.new_stream()
    cuda.hold_stream(stream)
    job = start_read(readers(), [source], [Request(0, 10, target.ctypes.data, device=True)], stream)
    eventually(lambda: cuda.calls("cuEventSynchronize"), "the copy is waited for")
    assert not job.wait(0.1)
    cuda.release_stream(stream)
    assert finish_read(job)[2] == "" and np.array_equal(target, DATA[:10])


def test_nothing_of_a_bad_block_goes_to_the_device(cuda: FakeCuda, readers: Readers, source: Source) -> None:
    path, size, checksums = source
    target = np.zeros_like(DATA)
    wrong = (path, size, checksums[:8] + bytes(4) + checksums[12:])
    assert finish_read(start_read(readers(), [wrong], [whole(target)], cuda.new_stream()))[1] == [(0, 2)]
    assert not target[2 * MIB : 3 * MIB].any()
    assert np.array_equal(target[3 * MIB :], DATA[3 * MIB :])


@pytest.mark.parametrize(
    ("call", "nth"),
    # Events serve several copies: there may be no fourth one.
    [
        ("cuMemcpyHtoDAsync", 1),
        ("cuMemcpyHtoDAsync", 4),
        ("cuEventSynchronize", 1),
        ("cuEventSynchronize", 2),
        ("cuEventRecord", 2),  # the first is made before the threads start
    ],
)
def test_an_error_of_the_device_ends_the_read(
    cuda: FakeCuda, readers: Readers, source: Source, call: str, nth: int
) -> None:
    reader, target, stream = readers(threads=2), np.zeros_like(DATA), cuda.new_stream()
    finish_read(start_read(reader, [source], [Request(0, 10, target.ctypes.data, device=True)], stream))
    cuda.fail(call, nth=nth)
    job = start_read(reader, [source], [whole(target)], stream)
    error = finish_read(job)[2]
    assert call in error and "an illegal memory access was encountered" in error
    assert finish_read(start_read(reader, [source], [whole(target)], stream))[2] == ""
    assert np.array_equal(target, DATA)


def test_where_no_event_is_recorded_a_read_is_not_over_before_its_copies(
    cuda: FakeCuda, readers: Readers, source: Source
) -> None:
    reader, target, stream = readers(threads=1), np.zeros_like(DATA), cuda.new_stream()
    cuda.hold_stream(stream)
    cuda.hold_call("cuMemcpyHtoDAsync")
    job = start_read(reader, [source], [whole(target)], stream)
    eventually(lambda: cuda.calls("cuMemcpyHtoDAsync"), "the first copy is about to be enqueued")
    cuda.fail("cuEventRecord", nth=1)
    cuda.release_call("cuMemcpyHtoDAsync")
    assert not job.wait(0.3)
    cuda.release_stream(stream)
    assert "cuEventRecord" in finish_read(job)[2]
    assert len(cuda.calls("ran")) == len(cuda.calls("cuMemcpyHtoDAsync"))


def test_after_an_error_slots_are_kept_until_the_device_is_done(
    cuda: FakeCuda, readers: Readers, source: Source
) -> None:
    target, stream = np.zeros_like(DATA), cuda.new_stream()
    cuda.hold_stream(stream)
    cuda.fail("cuMemcpyHtoDAsync", nth=2)
    job = start_read(readers(threads=1), [source], [whole(target)], stream)
    eventually(lambda: cuda.calls("cuEventSynchronize"), "the first copy is waited for")
    assert not job.wait(0.1)
    cuda.release_stream(stream)
    assert "cuMemcpyHtoDAsync" in finish_read(job)[2]
    assert np.array_equal(target[:MIB], DATA[:MIB])


def test_a_read_starts_and_is_abandoned_while_the_driver_hangs_in_page_locking(
    cuda: FakeCuda, readers: Readers, source: Source
) -> None:
    """Its caller handles signals, so that Ctrl-C ends it."""
    reader, target = readers(), np.zeros_like(DATA)
    cuda.hold_call("cuMemHostRegister")
    patience = threading.Timer(PATIENCE_SECONDS, cuda.release_call, ["cuMemHostRegister"])
    patience.start()
    job = start_read(reader, [source], [whole(target)], cuda.new_stream())
    assert patience.is_alive()
    assert not job.wait(0.0)
    job.close()
    del reader, job  # their memory is abandoned
    assert patience.is_alive()
    patience.cancel()
    cuda.release_call("cuMemHostRegister")
    assert not target.any()


@pytest.mark.parametrize("call", ["cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode"])
def test_a_thread_that_cannot_enter_the_context_ends_the_read(
    cuda: FakeCuda, readers: Readers, source: Source, call: str
) -> None:
    target = np.zeros_like(DATA)
    cuda.fail(call, nth=0)
    assert call in finish_read(start_read(readers(), [source], [whole(target)], cuda.new_stream()))[2]
    cuda.let_go()


def test_a_read_whose_threads_cannot_wait_is_not_over_before_its_copies(
    cuda: FakeCuda, readers: Readers, source: Source
) -> None:
    target, stream = np.zeros_like(DATA), cuda.new_stream()
    cuda.hold_stream(stream)
    cuda.fail("cuEventSynchronize", nth=0, code=INVALID_CONTEXT)
    job = start_read(readers(), [source], [whole(target)], stream)
    eventually(lambda: "cuEventSynchronize" in str(job.result()[2]), "the read fails")
    assert not job.wait(0.2)
    cuda.let_go()
    assert "cuEventSynchronize" in finish_read(job)[2]


@pytest.fixture
def target() -> np.ndarray:
    """For tests that name it before the driver: the fake one's copies outlive a context that is lost."""
    return np.zeros_like(DATA)


def test_a_device_that_is_lost_ends_the_read(
    target: np.ndarray, cuda: FakeCuda, readers: Readers, source: Source
) -> None:
    stream = cuda.new_stream()
    cuda.hold_stream(stream)
    job = start_read(readers(threads=2), [source], [whole(target)], stream)
    eventually(lambda: cuda.calls("cuEventSynchronize"), "slots wait for the device")  # one thread, for all
    for call in ("cuMemcpyHtoDAsync", "cuEventRecord", "cuEventSynchronize", "cuEventCreate"):
        cuda.fail(call, nth=0, code=LAUNCH_FAILURE)
    cuda.release_stream(stream)
    assert "unspecified launch failure" in finish_read(job)[2]


def test_a_driver_that_refuses_every_wait_ends_the_read(
    target: np.ndarray, cuda: FakeCuda, readers: Readers, source: Source
) -> None:
    stream = cuda.new_stream()
    cuda.hold_stream(stream)
    cuda.hold_call("cuEventSynchronize")
    job = start_read(readers(threads=2), [source], [whole(target)], stream)
    eventually(lambda: cuda.calls("cuEventSynchronize"), "slots wait for the device")
    for call in ("cuEventRecord", "cuEventSynchronize"):
        cuda.fail(call, nth=0, code=UNKNOWN)
    cuda.release_call("cuEventSynchronize")
    assert "CUDA error 999" in finish_read(job)[2]
    del job
    gc.collect()
    assert cuda.registered_bytes > 0  # its slots are still mapped: the copies may run at any time
    cuda.let_go()
    eventually(lambda: len(cuda.calls("ran")) == len(cuda.calls("cuMemcpyHtoDAsync")), "the copies ran")
    cuda.forget_registered()


def test_memory_that_cannot_be_page_locked_still_serves(
    cuda: FakeCuda, readers: Readers, source: Source
) -> None:
    cuda.fail("cuMemHostRegister")
    target = np.zeros_like(DATA)
    assert finish_read(start_read(readers(), [source], [whole(target)], cuda.new_stream()))[2] == ""
    assert np.array_equal(target, DATA)


def test_a_read_to_a_device_without_a_driver_is_refused(source: Source) -> None:
    target = np.zeros_like(DATA)
    with pytest.raises(OSError, match=r"open the CUDA driver libnothing\.so.*saved or loaded without it"):
        start_read(make_reader(driver="libnothing.so"), [source], [whole(target)])


# -- loads --------------------------------------------------------------------------------------------------


def test_a_state_is_loaded_to_the_device_in_one_pass_and_the_rest_through_the_host(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = {f"w{n}": torch.arange(300_000.0).reshape(600, 500) + n for n in range(4)}
    saver = Saver(Options(staging_memory=8 * MIB, slot_size=MIB), SaveSession())
    saver.start(tmp_path, TensorProvider(stored, Mutability.NOW)).wait()
    saver.close()
    state = {key: torch.zeros_like(tensor) for key, tensor in stored.items()}
    state["w1"] = torch.zeros(600, 900)[:, 100:600]  # strided
    state["w2"] = torch.zeros(600, 500, dtype=torch.float64)  # converted
    on_device = {state[key].data_ptr() for key in ("w0", "w1", "w2")}
    for module in (in_place, transfers):
        monkeypatch.setattr(module, "is_on_device", lambda tensor: tensor.data_ptr() in on_device)
    monkeypatch.setattr(in_place, "is_on_current_device", lambda tensor: tensor.data_ptr() in on_device)
    for key in ("w0", "w1", "w2"):
        storage = state[key].untyped_storage()
        cuda.adopt(storage.data_ptr(), storage.nbytes())
    stream = cuda.new_stream()
    monkeypatch.setattr(engine_reader, "_current_stream", lambda: stream)
    checkpoint = Checkpoint.open(tmp_path, Options(driver=cuda.path))
    reader = reading.CheckpointReader(checkpoint)
    dcp.load(state, storage_reader=reader, planner=dcp.DefaultLoadPlanner())
    for key, tensor in state.items():
        assert torch.equal(tensor, stored[key].to(tensor.dtype)), key
    assert cuda.calls("cuMemcpyHtoDAsync") and cuda.calls("cuMemcpy2DAsync")
