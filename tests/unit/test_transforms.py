"""Transformations and streams: stored in other bytes, or without a known size, and read back exactly."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_datastates as ds
from megatron_datastates.config import KIB, MIB
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.errors import CHANGED_TOO_EARLY, OptionError, SaveFailedError
from megatron_datastates.format.codecs import PLANES
from megatron_datastates.format.tail import Kind
from megatron_datastates.pipeline.loading import entries
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.saving import tail
from megatron_datastates.pipeline.upkeep.verify import verify
from megatron_datastates.providers import Cast, Compressed, Entry, Mutability, StateReader, StreamSource
from megatron_datastates.providers.named import NamedState, Shard, Tree
from megatron_datastates.providers.samples import SAMPLE_BYTES, Samples
from megatron_datastates.providers.transforms import _parts
from tests.unit.states import KNOWN_DTYPES, bits, new_saver, random_tensor

NOW, AT_FENCE, NEVER = Mutability


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# -- streams ----------------------------------------------------------------------------------------------


class Lines:
    """A provider of one stream, whose buffer is used again for every line."""

    def __init__(self, lines: list[bytes], mutability: Mutability = NOW) -> None:
        self.lines, self.mutability = lines, mutability

    def entries(self) -> Iterator[Entry]:
        yield StreamSource("lines", self._write, self.mutability)

    def _write(self, write: Any) -> None:
        buffer = bytearray(max(map(len, self.lines), default=0))
        for line in self.lines:
            buffer[: len(line)] = line
            assert write(memoryview(buffer)[: len(line)]) == len(line)

    def restore(self, reader: StateReader) -> None:
        assert list(reader.streams) == ["lines"]
        self.lines = [b"".join(map(bytes, reader.open_stream("lines")))]


@pytest.mark.parametrize("mutability", list(Mutability), ids=lambda m: m.name)
@pytest.mark.parametrize("wrap", [lambda p: p, Compressed], ids=["plain", "compressed"])
def test_a_stream_is_restored_byte_by_byte(tmp_path: Path, mutability: Mutability, wrap: Any) -> None:
    lines = [bytes([n % 251]) * (n * 997 % (300 * KIB)) for n in range(40)]
    handle = ds.async_save({"log": wrap(Lines(lines, mutability)), "w": noise(100)}, tmp_path / "c")
    FENCE.wait("the test")
    handle.wait()
    found = Lines([])
    ds.load(tmp_path / "c", into={"log": wrap(found)})
    assert found.lines[0] == ds.load(tmp_path / "c")["log.lines"] == b"".join(lines)
    assert not verify(tmp_path / "c").faults


@pytest.mark.parametrize("buffers", [[], [b""], [b"", b"x", np.arange(3, dtype=np.uint16)]], ids=len)
def test_a_stream_of_buffers_may_be_empty(tmp_path: Path, buffers: list[Any]) -> None:
    class Buffers(Lines):
        def entries(self) -> Iterator[Entry]:
            yield StreamSource.from_buffers("lines", iter(buffers))

    ds.save({"log": Buffers([])}, tmp_path / "c")
    found = Lines([])
    ds.load(tmp_path / "c", into={"log": found})
    assert found.lines[0] == b"".join(map(bytes, buffers))


# -- compressed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutability", [NOW, AT_FENCE], ids=lambda m: m.name)
def test_compressed_state_is_restored_bit_by_bit(tmp_path: Path, mutability: Mutability) -> None:
    state = {name: random_tensor(getattr(torch, name), (37, 11)) for name in KNOWN_DTYPES}
    state |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5), "large": noise(3 * MIB // 4 + 5)}
    state |= {"strided": noise(600, 700).t(), "rows": noise(9, 1 << 17)[:, ::3], "zeros": torch.zeros(MIB)}
    saver = new_saver()
    wrapped = Compressed({**state, "step": 3, "nested": {"rng": torch.arange(9)}}, mutability=mutability)
    wanted = {key: bits(tensor) for key, tensor in state.items()}
    publication = saver.start(tmp_path / "c", lambda: {"all": wrapped})
    FENCE.wait("the test")
    state["large"].zero_()
    assert publication.wait() is Outcome.PUBLISHED, publication.error
    saver.close()
    checkpoint = ds.open(tmp_path / "c")
    for key, data in wanted.items():
        assert bits(checkpoint.read_tensor(f"all.{key}")) == data, key
    assert checkpoint.read_object("all.step") == 3
    footer = checkpoint.footer(0)
    assert {entry.codec for entry in footer.fragments} == {PLANES}
    zeros = next(e for e in footer.fragments if e.bytes == 4 * MIB)
    assert zeros.stored_bytes < 4 * KIB, "zeros were not compressed"
    assert all(entry.sha256 != bytes(32) for entry in footer.entries)
    large = np.frombuffer(wanted["large"], np.uint8).tobytes()
    assert hashlib.sha256(large).digest() in {entry.sha256 for entry in footer.fragments}


@pytest.mark.parametrize(
    "wrap", [Compressed, lambda state: Cast(state, torch.float16)], ids=["compressed", "cast"]
)
def test_a_tensor_of_one_element_may_have_any_stride(tmp_path: Path, wrap: Any) -> None:
    state = {"column": torch.arange(6.0).reshape(2, 3)[1:, ::3], "expanded": torch.tensor(2.0).expand(1)}
    state["none"] = torch.empty(3, 1).expand(3, 4)[:, :0]
    ds.save({"all": wrap(state)}, tmp_path / "c")
    found = ds.load(tmp_path / "c")
    assert [found[f"all.{key}"].tolist() for key in state] == [[[3.0]], [2.0], [[], [], []]]


def test_what_was_compressed_may_be_resized(tmp_path: Path) -> None:
    tensor = noise(MIB)
    ds.save({"w": tensor}, tmp_path / "c", compress=1)
    tensor.untyped_storage().resize_(0)  # as programs do that offload
    assert ds.load(tmp_path / "c")["w"].shape == (MIB,)


@given(
    shape=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    order=st.randoms(use_true_random=False),
    step=st.integers(1, 3),
    most=st.integers(1, 40),
)
def test_parts_of_a_tensor_have_its_elements_in_order(
    shape: tuple[int, ...], order: Any, step: int, most: int
) -> None:
    axes = list(range(len(shape)))
    order.shuffle(axes)
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).permute(axes)
    tensor = tensor[::step] if tensor.dim() else tensor
    parts = list(_parts(tensor, most))
    assert all(0 < part.numel() <= most or tensor.numel() == 0 for part in parts)
    assert torch.cat([part.reshape(-1) for part in parts]).equal(tensor.reshape(-1))


@pytest.mark.parametrize("excess", [0, 1])
def test_a_compressed_object_is_saved_only_if_a_load_accepts_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, excess: int
) -> None:
    state = {"optimizers": [{"moments": noise(MIB)}]}
    ds.save(state, tmp_path / "first", compress=1)
    (entry,) = ds.open(tmp_path / "first").footer(0).entries
    for module in (tail, entries):
        monkeypatch.setattr(module, "OBJECT_BYTES", entry.bytes - excess)
    if not excess:
        ds.save(state, tmp_path / "c", compress=1)
        assert ds.load(tmp_path / "c")["optimizers"][0]["moments"].equal(state["optimizers"][0]["moments"])
        return
    with pytest.raises(SaveFailedError, match=f"it has {entry.bytes} bytes, expected at most"):
        ds.save(state, tmp_path / "c", compress=1)
    ds.save(state, tmp_path / "c")  # of others, no few bytes can claim to be many


def test_a_slice_and_another_sharding_of_compressed_tensors_are_exact(tmp_path: Path) -> None:
    whole = noise(1024, 1024)
    ds.save({"model": Compressed({"w": whole})}, tmp_path / "c")
    checkpoint = ds.open(tmp_path / "c")
    assert checkpoint.read_tensor("model.w", (5, 1000), (3, 24)).equal(whole[5:8, 1000:])
    part = torch.zeros(512, 100)
    ds.load(tmp_path / "c", into={"model": {"w": Shard(part, (1024, 1024), (512, 7))}})
    assert part.equal(whole[512:, 7:107])
    half = torch.zeros(1024, 1024, dtype=torch.bfloat16)
    ds.load(tmp_path / "c", into={"model": {"w": half}})
    assert half.equal(whole.bfloat16())


def test_reading_a_slice_reads_only_the_frames_that_it_needs(tmp_path: Path) -> None:
    ds.save({"w": Compressed({"x": noise(64, MIB)})}, tmp_path / "c")
    checkpoint = ds.open(tmp_path / "c")
    checkpoint.read_tensor("w.x", (40, 0), (1, 10))
    assert checkpoint.costs.bytes_read < 8 * MIB


def test_a_level_that_zstd_does_not_have_is_refused() -> None:
    with pytest.raises(OptionError, match="zstd has no level 30: expected 1"):
        Compressed({}, level=30)
    with pytest.raises(OptionError, match=r"zstd has no level 1\.5: expected 1"):
        Compressed({}, level=cast(int, 1.5))


# -- cast -------------------------------------------------------------------------------------------------


def test_a_cast_stores_the_rounded_values_of_matching_tensors_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"exp_avg": noise(300, 5), "param": noise(300, 5), "step": torch.arange(3), "n": 4}
    ds.save(
        {"optimizer": Compressed(Cast(state, torch.bfloat16, "*exp_avg*")), "w": noise(4)}, tmp_path / "c"
    )
    checkpoint = ds.open(tmp_path / "c")
    assert checkpoint.read_tensor("optimizer.exp_avg").dtype == torch.bfloat16
    assert checkpoint.read_tensor("optimizer.param").equal(state["param"])
    found = {
        "exp_avg": torch.zeros(300, 5),
        "param": torch.zeros(300, 5),
        "step": torch.zeros(3, dtype=torch.int64),
    }
    into = Cast({**found, "n": 0}, torch.bfloat16, "*exp_avg*")
    ds.load(tmp_path / "c", into={"optimizer": into})
    assert found["exp_avg"].equal(state["exp_avg"].bfloat16().float())
    assert found["param"].equal(state["param"]) and found["step"].equal(state["step"])
    assert "exp_avg* to bfloat16: what was rounded off is lost" in caplog.text


@pytest.mark.parametrize(
    "dtype", [torch.int8, "bfloat16", torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, None], ids=str
)
def test_only_floating_point_dtypes_can_be_cast_to(dtype: Any) -> None:
    with pytest.raises(
        OptionError, match=r"cannot be cast to .*: expected a floating-point dtype with a sign"
    ):
        Cast({}, dtype)


def test_only_patterns_choose_what_is_cast() -> None:
    pattern: Any = ["*exp_avg*"]
    with pytest.raises(OptionError, match=r"chosen by \(\['\*exp_avg\*'\],\): expected patterns"):
        Cast({}, torch.bfloat16, pattern)


SMALLER = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz]


@pytest.mark.parametrize("dtype", SMALLER, ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.float64], ids=str)
def test_a_number_that_a_cast_has_no_room_for_fails_the_save(
    tmp_path: Path, stored: torch.dtype, dtype: torch.dtype
) -> None:
    state = torch.zeros(1 << 19, dtype=stored)
    state[-2:] = torch.tensor([torch.nan, torch.finfo(dtype).max])
    if not torch.tensor(torch.inf).to(dtype).float().isfinite():  # some releases of torch make it the largest
        state[-3] = torch.inf
    ds.save({"c": Cast({"w": state}, dtype)}, tmp_path / "c")
    found = ds.load(tmp_path / "c")["c.w"]
    assert found.view(torch.uint8).equal(state.to(dtype).view(torch.uint8))
    state[7] = -torch.finfo(torch.float32).max
    with pytest.raises(SaveFailedError, match=r"'w' cannot be cast .* it has -3.40282e\+38, expected"):
        ds.save({"c": Cast({"w": state}, dtype)}, tmp_path / "d")


@pytest.mark.parametrize("number", [464.0, 464.5, torch.inf])
def test_what_torch_rounds_to_the_largest_number_has_room(tmp_path: Path, number: float) -> None:
    state = torch.tensor([1.0, number])
    cast = {"c": Cast({"w": state}, torch.float8_e4m3fn)}
    becomes = state.to(torch.float8_e4m3fn).float()[1]
    if number > 464 and (number < torch.inf or becomes.isfinite()):
        with pytest.raises(SaveFailedError, match=rf"it has {number:g}, expected numbers from -448 to 448"):
            ds.save(cast, tmp_path / "c")
    else:
        ds.save(cast, tmp_path / "c")
        assert torch.equal(ds.load(tmp_path / "c")["c.w"].float()[1].isfinite(), becomes.isfinite())


def test_a_tensor_cast_without_compression_has_its_digest_and_no_frames(tmp_path: Path) -> None:
    ds.save({"a": Cast({"w": noise(1000)}, torch.float16)}, tmp_path / "c")
    (entry,) = ds.open(tmp_path / "c").footer(0).entries
    assert (entry.kind, entry.bytes, entry.stored_bytes, entry.frame_sizes) == (Kind.FRAGMENT, 2000, 2000, ())
    assert entry.sha256 == hashlib.sha256(bits(noise(1000).half())).digest()


def test_a_tree_inside_a_transformation_keeps_the_names_of_its_providers(tmp_path: Path) -> None:
    inner = {"w": noise(3), "log": {"train": Lines([b"abc"])}, "more": NamedState({"x": noise(4)})}
    ds.save({"all": Compressed(inner)}, tmp_path / "c")
    checkpoint = ds.open(tmp_path / "c")
    assert set(checkpoint.tensors) == {"all.w", "all.more.x"}
    assert set(checkpoint.index.streams) == {"all.log.train.lines"}
    again = {"w": torch.zeros(3), "log": {"train": Lines([])}, "more": NamedState({"x": torch.zeros(4)})}
    ds.load(tmp_path / "c", into={"all": Compressed(again)})
    assert again["w"].equal(inner["w"]) and again["log"]["train"].lines == [b"abc"]


@settings(max_examples=15, deadline=None)
@given(data=st.lists(st.binary(max_size=3000), max_size=6), slots=st.integers(1, 3))
def test_random_streams_survive_small_slots(
    tmp_path_factory: pytest.TempPathFactory, data: list[bytes], slots: int
) -> None:
    path = tmp_path_factory.mktemp("stream") / "c"
    saver = new_saver(staging_memory=(1 + slots) * 4 * KIB, slot_size=4 * KIB)
    providers = {"a": Lines(data), "b": Compressed(Lines(data[::-1])), "c": Lines(data[1:], NEVER)}
    assert saver.start(path, lambda: providers).wait() is Outcome.PUBLISHED
    saver.close()
    checkpoint = ds.open(path)
    for name, wanted in (("a", data), ("b", data[::-1]), ("c", data[1:])):
        assert b"".join(map(bytes, checkpoint.open_stream(f"{name}.lines"))) == b"".join(wanted)


# -- changes that come too early --------------------------------------------------------------------------


def save_and_change_early(folder: Path, provider: Any, change: Any, **options: Any) -> Any:
    """Saves what stays unchanged until the fence, and changes it before anything of it is read."""
    gate, saver = threading.Event(), new_saver(**options)
    first = StreamSource("gate", lambda write: gate.wait(30) and write(b"open"), AT_FENCE)
    publication = saver.start(folder, lambda: {"first": Yields(first), "state": provider})
    change()
    gate.set()
    publication.wait()
    saver.close()
    return publication


class Yields:
    def __init__(self, *entries: Entry) -> None:
        self._entries = entries

    def entries(self) -> Iterator[Entry]:
        yield from self._entries

    def restore(self, reader: StateReader) -> None:
        raise NotImplementedError


TRANSFORMED = {
    "compressed": Compressed,
    "cast": lambda inner: Cast(inner, torch.bfloat16),
    "both, in a tree": lambda inner: Tree({"inner": Compressed(Cast(inner, torch.bfloat16))}, AT_FENCE),
}


@pytest.mark.parametrize("wrap", TRANSFORMED.values(), ids=TRANSFORMED)
@pytest.mark.parametrize("shape", [(), (5,), (700, 1001)])
def test_a_transformed_tensor_that_changes_before_the_fence_fails_the_save(
    tmp_path: Path, wrap: Any, shape: tuple[int, ...]
) -> None:
    tensor = noise(*shape)
    provider = wrap(NamedState({"w": tensor}, AT_FENCE))
    publication = save_and_change_early(tmp_path / "c", provider, lambda: tensor.add_(1))
    assert publication.outcome is Outcome.FAILED
    assert f"w' {CHANGED_TOO_EARLY}" in publication.error and "'state'" in publication.error
    assert not (tmp_path / "c" / "datastates.manifest").exists()


def test_without_the_tripwire_an_early_change_of_a_transformed_tensor_is_stored(tmp_path: Path) -> None:
    """Shows that the tensors above are read after the change."""
    tensor = noise(700, 1001)
    provider = Compressed(NamedState({"w": tensor}, AT_FENCE))
    publication = save_and_change_early(tmp_path / "c", provider, lambda: tensor.add_(1), tripwire=False)
    assert publication.outcome is Outcome.PUBLISHED, publication.error
    assert torch.equal(ds.open(tmp_path / "c").read_tensor("state.w"), noise(700, 1001) + 1)


def test_a_tensor_that_is_given_other_memory_has_not_changed(tmp_path: Path) -> None:
    tensor = torch.nn.Parameter(noise(700, 1001))

    def change() -> None:
        tensor.data = torch.zeros(700, 1001)

    publication = save_and_change_early(
        tmp_path / "c", Compressed(NamedState({"w": tensor}, AT_FENCE)), change
    )
    assert publication.outcome is Outcome.PUBLISHED, publication.error
    assert torch.equal(ds.open(tmp_path / "c").read_tensor("state.w"), noise(700, 1001))


def test_samples_leave_the_random_generators_of_the_program_alone() -> None:
    before = random.getstate()
    Samples(torch.zeros(10_000), 1000)
    assert random.getstate() == before


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000, 1001, 1063, 3000])
def test_every_part_has_a_sample_within_the_tensor(size: int) -> None:
    memory = torch.arange(size + SAMPLE_BYTES, dtype=torch.int64).to(torch.uint8)
    tensor = memory[:size]
    for part, begin in enumerate(range(0, size, 1000)):
        for _ in range(20):
            samples = Samples(tensor, 1000)
            memory[size:] += 1
            assert all(samples.are_same(n) for n in range(-(-size // 1000)))
            tensor[begin : begin + 1000] += 1
            assert not samples.are_same(part)
