"""Saves on a real device (tests/native has a fake driver): bytes, order, fences, no device memory."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from megatron_datastates.config import Options
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.engine.staging import StagingEngine
from megatron_datastates.mcore.fences import wrap_gather
from tests.gpu.device_save import DeviceSave, Tensors

MIB = 1 << 20
BEFORE, AFTER = 7, 9
CYCLES_PER_SECOND = 1.5e9  # of torch.cuda._sleep, roughly


def busy(seconds: float) -> None:
    """Keeps the current stream busy."""
    torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))


def layers(count: int = 8, size: int = 32 * MIB) -> Tensors:
    return {f"layer{i}": torch.full((size,), BEFORE, dtype=torch.uint8, device="cuda") for i in range(count)}


def overwrite(tensors: Tensors) -> None:
    for tensor in tensors.values():
        tensor.fill_(AFTER)


def assert_all(stored: Tensors, value: int) -> None:
    assert {key: (int(t.min()), int(t.max())) for key, t in stored.items()} == dict.fromkeys(
        stored, (value, value)
    )


@pytest.fixture
def warm(engine: StagingEngine, tmp_path: Path) -> StagingEngine:
    """An engine whose stream exists and whose memory is page-locked."""
    save = DeviceSave(engine, tmp_path / "warm", layers())
    save.fence()
    save.finish()
    return engine


def every_kind() -> Tensors:
    """Returns tensors of many types and layouts, with random bits."""
    generator = torch.Generator("cuda").manual_seed(1)
    raw = torch.randint(0, 256, (5 * MIB,), dtype=torch.uint8, device="cuda", generator=generator)
    matrix = torch.randn(1500, 1024, device="cuda", generator=generator)
    return {
        "bytes": raw[: 3 * MIB + 17],
        "bfloat16": raw[:MIB].view(torch.bfloat16),
        "float8": raw[: MIB - 3].view(torch.float8_e4m3fn),
        "matrix": matrix,
        "slice": matrix[100:900, 256:768],  # a strided span with rows of 2 KiB
        "narrow slice": matrix.to(torch.bfloat16)[:, 7:8],
        "transposed": matrix.t(),
        "permuted": matrix.reshape(30, 50, 1024).permute(1, 0, 2),
        "expanded": matrix[:, :1].expand(1500, 3),
        "windows": matrix[0].unfold(0, 100, 30),  # rows overlap
        "every third row": matrix[5::3],
        "cube": matrix.view(15, 100, 1024)[2:9, 10:60, 512:].bfloat16()[:, ::2],
        "scalar": matrix[0, 0],
        "nothing": matrix[:0],
        **{f"tiny{i}": matrix[i, i : 2 * i + 1] for i in range(300)},
    }


def test_every_bit_arrives(engine: StagingEngine, tmp_path: Path) -> None:
    save_every_kind(engine, tmp_path)


def test_every_bit_of_copies_that_are_cut_arrives(tmp_path: Path) -> None:
    """To 4,000 bytes: some rows are longer, and of others one copy has several."""
    options = Options(staging_memory=128 * MIB, most_in_flight=4000)
    engine = StagingEngine(options)
    try:
        save_every_kind(engine, tmp_path)
    finally:
        FENCE.forget()
        engine.close()


def save_every_kind(engine: StagingEngine, folder: Path) -> None:
    tensors = every_kind()
    save = DeviceSave(engine, folder, tensors, eager=frozenset({"matrix", "tiny7"}))
    save.fence()
    save.finish()
    for key, found in save.stored().items():
        wanted = tensors[key].contiguous().cpu()
        assert torch.equal(found.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8)), key


def test_a_small_pool_is_enough(small_engine: StagingEngine, tmp_path: Path) -> None:
    save = DeviceSave(small_engine, tmp_path, tensors := layers())
    save.fence()
    overwrite(tensors)
    save.finish()
    assert_all(save.stored(), BEFORE)


@pytest.mark.parametrize("side", [False, True])
def test_copies_come_after_the_kernel_that_writes_their_source(
    warm: StagingEngine, tmp_path: Path, side: bool
) -> None:
    tensors = {"layer": torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        busy(0.2)
        tensors["layer"].fill_(BEFORE)
        save = DeviceSave(warm, tmp_path, tensors)
        save.fence()
        overwrite(tensors)
    save.finish()
    assert_all(save.stored(), BEFORE)
    torch.cuda.synchronize()
    assert_all(tensors, AFTER)


def test_start_and_fence_do_not_wait_for_the_device(warm: StagingEngine, tmp_path: Path) -> None:
    """As long as no more than Options.most_in_flight is to be copied: the host waits for what is beyond."""
    tensors = layers(count=7, size=MIB)
    torch.cuda.synchronize()
    busy(1.0)
    begin = time.perf_counter()
    save = DeviceSave(warm, tmp_path, tensors)
    save.fence()
    overwrite(tensors)
    assert time.perf_counter() - begin < 0.25
    assert not torch.cuda.current_stream().query()  # the device is still busy
    save.finish()
    assert_all(save.stored(), BEFORE)


def test_a_small_copy_of_the_trainers_does_not_wait_until_all_is_copied(
    warm: StagingEngine, tmp_path: Path
) -> None:
    """The device goes on copying for a stream as long as that has more: see most_in_flight in config.py."""
    tensors, one = layers(count=24), torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    save = DeviceSave(warm, tmp_path, tensors)
    save.save.advance()  # copies begin
    while save.bytes_staged == 0:
        pass
    assert one.item() == 1
    assert save.bytes_staged < 24 * 32 * MIB  # copies are still running
    save.fence()
    save.finish()
    assert_all(save.stored(), BEFORE)


@pytest.mark.parametrize("made_on_side_stream", [False, True])
def test_memory_of_eager_tensors_is_free_when_the_save_has_begun(
    warm: StagingEngine, tmp_path: Path, made_on_side_stream: bool
) -> None:
    """Its next user on any stream overwrites it at once. Lazy tensors are still to be copied meanwhile."""
    kept, side = layers(), torch.cuda.Stream()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.cuda.stream(side if made_on_side_stream else torch.cuda.current_stream()):
        fresh = {f"fresh{i}": tensor for i, tensor in enumerate(layers().values())}
    torch.cuda.synchronize()
    save = DeviceSave(warm, tmp_path, kept | fresh, eager=frozenset(fresh))
    fresh.clear()
    assert torch.cuda.memory_allocated() == before or made_on_side_stream
    with torch.cuda.stream(side if made_on_side_stream else torch.cuda.current_stream()):
        overwrite(layers(16))
    save.fence()
    save.finish()
    assert_all(save.stored(), BEFORE)


def test_eager_tensors_may_be_overwritten_without_a_fence(warm: StagingEngine, tmp_path: Path) -> None:
    save = DeviceSave(warm, tmp_path, tensors := layers(), eager=frozenset(layers()))
    overwrite(tensors)
    save.finish()
    assert_all(save.stored(), BEFORE)


@pytest.mark.parametrize("paranoid", [False, True], ids=["samples", "paranoid"])
def test_overwriting_without_a_fence_fails_the_save(tmp_path: Path, paranoid: bool) -> None:
    """The copy limit makes nearly all of the 64 MiB be copied after they were overwritten."""
    engine = StagingEngine(
        Options(
            staging_memory=128 * MIB,
            slot_size=MIB,
            copy_limit=(64 if paranoid else 32) * MIB,
            tripwire=not paranoid,
            paranoid=paranoid,
        )
    )
    try:
        save = DeviceSave(engine, tmp_path, tensors := layers(count=2))
        overwrite(tensors)
        with pytest.raises(AssertionError, match=r"tensors? .*'layer[01]'.* changed too early"):
            save.finish()
        assert not save.save.is_durable
    finally:
        FENCE.forget()
        engine.close()


def test_samples_of_many_tensors_do_not_wait_for_the_device(warm: StagingEngine, tmp_path: Path) -> None:
    """Only some are sampled: sampling all would fill the driver's queue and block on the device."""
    memory = torch.zeros(5000, 128, dtype=torch.uint8, device="cuda")
    tensors = {str(i): row[:100] for i, row in enumerate(memory)}
    torch.cuda.synchronize()
    busy(2.0)
    save = DeviceSave(warm, tmp_path, tensors)
    assert not torch.cuda.current_stream().query()  # the device is still busy
    save.fence()
    save.finish()


def test_several_saves_are_in_flight(engine: StagingEngine, tmp_path: Path) -> None:
    """Each holds the tensors as they were when it began; the pool has room for all of them."""
    tensors, saves = layers(count=4), []
    for value in range(6):
        for tensor in tensors.values():
            tensor.fill_(value)
        saves.append(DeviceSave(engine, tmp_path / str(value), tensors))
        saves[-1].fence()
    overwrite(tensors)
    for value, save in enumerate(saves):
        save.finish()
        assert_all(save.stored(), value)


def test_tensors_without_other_references_are_kept_until_copied(
    slow_engine: StagingEngine, tmp_path: Path
) -> None:
    save = DeviceSave(slow_engine, tmp_path, layers(count=2))
    others = [torch.full((32 * MIB,), AFTER, dtype=torch.uint8, device="cuda") for _ in range(8)]
    save.fence()
    save.finish()
    assert_all(save.stored(), BEFORE)
    assert all(int(other.min()) == AFTER for other in others)


def test_fork_in_mid_save_harms_nothing(slow_engine: StagingEngine, tmp_path: Path) -> None:
    """Such a child is a data loading worker. It does not inherit page-locked memory."""
    save = DeviceSave(slow_engine, tmp_path, tensors := layers(count=2))
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert save.save.times()["staging"] == 0  # copies are still running
    save.fence()
    overwrite(tensors)
    save.finish()
    assert_all(save.stored(), BEFORE)


def test_a_device_that_is_full_can_be_saved(warm: StagingEngine, tmp_path: Path) -> None:
    tensors = layers()
    torch.cuda.empty_cache()
    hog = torch.empty(torch.cuda.mem_get_info()[0] - 128 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info()[0] <= 128 * MIB  # less than what is saved
    save = DeviceSave(warm, tmp_path, tensors)
    save.fence()
    overwrite(tensors)
    save.finish()
    del hog
    torch.cuda.empty_cache()
    assert_all(save.stored(), BEFORE)


@pytest.mark.parametrize("allocator", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_tensors_of_other_allocators_are_saved(allocator: str, tmp_path: Path) -> None:
    """One tensor may then lie in several pieces of device memory that were mapped one after another."""
    script = Path(__file__).with_name("allocator_save.py")
    command = [sys.executable, str(script), str(tmp_path)]
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": allocator}
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=100, cwd=script.parents[2], env=environment
    )
    assert (ran.returncode, ran.stdout) == (0, "as it was\n"), ran.stdout + ran.stderr


def test_a_thread_that_has_used_no_device_yet_can_save_and_fence(warm: StagingEngine, tmp_path: Path) -> None:
    saves, tensors = [], layers(count=2)
    torch.cuda.synchronize()

    def start() -> None:
        saves.append(DeviceSave(warm, tmp_path, tensors))
        saves[0].fence()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    overwrite(tensors)
    saves[0].finish()
    assert_all(saves[0].stored(), BEFORE)


def test_failing_device_fails_only_the_save(tmp_path: Path) -> None:
    """Runs in a separate process, whose CUDA context is lost for good."""
    script = Path(__file__).with_name("broken_device.py")
    command = [sys.executable, str(script), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=script.parents[2])
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "CUDA error" in ran.stdout  # what the save failed with
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_no_device_memory_is_allocated(warm: StagingEngine, tmp_path: Path) -> None:
    tensors = layers()
    tensors["transposed"] = tensors["layer0"].view(torch.float32).reshape(-1, 4096).t()
    tensors["columns"] = tensors["layer1"].reshape(-1, 4096)[:, :100]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    for number in range(3):
        save = DeviceSave(warm, tmp_path / str(number), tensors)
        save.fence()
        save.finish()
    assert torch.cuda.max_memory_allocated() == held
    # Of the whole device, so also memory that torch does not know of; the driver takes pages of 2 MiB.
    assert free - torch.cuda.mem_get_info()[0] <= 2 * MIB


def test_a_graph_can_be_captured_while_copies_run(slow_engine: StagingEngine, tmp_path: Path) -> None:
    tensors, x = layers(count=2), torch.ones(1000, device="cuda")
    save = DeviceSave(slow_engine, tmp_path, tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        y = x
        for _ in range(200):
            y = y + 1
    assert save.save.times()["staging"] == 0  # copies are still running, as during the whole capture
    save.fence()
    save.finish()
    graph.replay()
    assert float(y[0]) == 201
    assert_all(save.stored(), BEFORE)


def test_what_a_graph_records_is_not_fenced(slow_engine: StagingEngine, tmp_path: Path) -> None:
    tensors, x = layers(count=2), torch.ones(1000, device="cuda")
    save = DeviceSave(slow_engine, tmp_path, tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = wrap_gather(lambda: x + 1)
    assert save.save.times()["staging"] == 0  # copies are still running
    save.fence()
    save.finish()
    graph.replay()
    assert float(y[0]) == 2
    assert_all(save.stored(), BEFORE)


def test_a_graph_that_overwrites_is_replayed_after_the_fence(warm: StagingEngine, tmp_path: Path) -> None:
    tensors, graph = layers(count=2), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        overwrite(tensors)
    assert_all(tensors, BEFORE)  # a capture runs nothing
    busy(0.2)
    save = DeviceSave(warm, tmp_path, tensors)
    save.fence()
    graph.replay()
    save.finish()
    assert_all(save.stored(), BEFORE)
    torch.cuda.synchronize()
    assert_all(tensors, AFTER)


def test_saves_may_be_dropped_by_any_thread(warm: StagingEngine, tmp_path: Path) -> None:
    """Many saves, since only many would exhaust what a leak of events takes."""
    tensors = {"layer": torch.zeros(MIB, dtype=torch.uint8, device="cuda")}
    saves = []
    for number in range(100):
        saves.append(DeviceSave(warm, tmp_path / str(number), tensors))
        saves[-1].fence()
        saves[-1].finish()
    thread = threading.Thread(target=saves.clear)
    thread.start()
    thread.join()
    assert torch.zeros(1, device="cuda").item() == 0
