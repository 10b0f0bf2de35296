"""State providers of a user: what they yield is saved and restored, and their errors fail saves by name."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.config import KIB, MIB
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.errors import (
    MismatchError,
    MissingKeyError,
    OptionError,
    ProviderError,
    SaveFailedError,
)
from megatron_datastates.format.tail import Kind
from megatron_datastates.mcore.providers import registered
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.saving.tail import Tail, _Pending
from megatron_datastates.providers.base import (
    Entry,
    Mutability,
    StateProvider,
    StateReader,
    Tensors,
    TensorSource,
)
from megatron_datastates.providers.collect import collect, kind_of, named
from megatron_datastates.providers.objects import ObjectSource
from megatron_datastates.providers.streams import StreamSource
from megatron_datastates.providers.transforms import Cast, Compressed
from tests.unit.states import new_saver

NOW, AT_FENCE, NEVER = Mutability


class Counter:
    """A provider as a user writes one: a table, its position, and nothing else."""

    name = "counter"

    def __init__(self) -> None:
        self.table = torch.zeros(6, dtype=torch.int64)
        self.position = {"step": 0, "seen": [1, 2]}

    def entries(self) -> Iterator[Entry]:
        yield TensorSource("table", self.table)
        yield ObjectSource("position", self.position)

    def restore(self, reader: StateReader) -> None:
        assert dict(reader.tensors) == {"table": (6,)} and list(reader.objects) == ["position"]
        reader.read_into({"table": self.table})
        self.position = reader.read_object("position")


def test_a_provider_sees_nothing_of_one_whose_name_begins_with_its_own(tmp_path: Path) -> None:
    """`Counter.restore` refuses keys that are not its own."""
    saved = {"data": Counter(), "data2": Counter(), "data2.x": Counter()}
    for number, one in enumerate(saved.values()):
        one.position["step"] = number
    ds.save({**saved}, tmp_path / "c")
    found = {"data": Counter(), "data2.x": Counter()}
    ds.load(tmp_path / "c", into={**found})
    assert [one.position["step"] for one in found.values()] == [0, 2]


def test_a_dot_at_the_end_of_a_name_belongs_to_it(tmp_path: Path) -> None:
    saved, found = Counter(), Counter()
    saved.position["step"] = 1
    ds.save({"c": Compressed({"a.": saved})}, tmp_path)
    ds.load(tmp_path, into={"c": Compressed({"a.": found})})
    assert found.position == saved.position


@pytest.mark.parametrize("wrap", [dict, Compressed], ids=["plain", "in a transformation"])
def test_a_provider_without_a_name_is_refused(tmp_path: Path, wrap: Any) -> None:
    with pytest.raises(SaveFailedError, match=r"has a Counter under the key '': .*rename the key"):
        ds.save(wrap({"": Counter(), "w": torch.ones(3)}), tmp_path)


@pytest.mark.parametrize("beside", [{"data.w": torch.ones(3)}, {"data.o": 1}], ids=["tensor", "object"])
def test_a_provider_whose_name_begins_a_key_of_the_state_fails_every_save(
    tmp_path: Path, beside: dict[str, Any]
) -> None:
    (key,) = beside
    ds.save({"data2": Counter(), **beside}, tmp_path)
    for _ in range(2):  # the second save finds the plan of the first
        with pytest.raises(
            SaveFailedError, match=rf"provider 'data' \(Counter\) has the name that '{key}' begins"
        ):
            ds.save({"data": Counter(), **beside}, tmp_path)
    ds.save({"data.w.x": Counter(), **beside}, tmp_path)


class Table(dict[str, int]):
    """A provider that is a mapping, too."""

    def entries(self) -> Iterator[Entry]:
        yield ObjectSource("items", dict(self))

    def restore(self, reader: StateReader) -> None:
        self.update(reader.read_object("items"))


@pytest.mark.parametrize("wrap", [dict, Compressed], ids=["plain", "in a transformation"])
def test_a_provider_that_is_a_mapping_is_a_provider(tmp_path: Path, wrap: Any) -> None:
    ds.save({"p": wrap({"t": Table(a=1)})}, tmp_path)
    assert ds.load(tmp_path) == {"p.t.items": {"a": 1}}
    found = Table(b=2)
    assert ds.load(tmp_path, into={"p": wrap({"t": found})})["p"]
    assert found == {"a": 1, "b": 2}


class Yields:
    """A provider of one entry."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry

    def entries(self) -> Iterator[Entry]:
        yield self.entry

    def restore(self, reader: StateReader) -> None:
        """Does nothing."""


@pytest.mark.parametrize("compress", [0, 1])
@pytest.mark.parametrize("mutability", ["NOW", 1, None])
@pytest.mark.parametrize(
    ("kind", "value"),
    [(TensorSource, torch.ones(3)), (ObjectSource, [1]), (StreamSource, lambda write: None)],
    ids=["tensor", "object", "stream"],
)
def test_what_is_no_mutability_fails_the_save(
    tmp_path: Path, kind: Any, value: Any, mutability: Any, compress: int
) -> None:
    with pytest.raises(
        SaveFailedError, match=f"mutability of 'p.x' is {mutability!r}: expected Mutability.NOW"
    ):
        ds.save({"p": Yields(kind("x", value, mutability))}, tmp_path, compress=compress)


@pytest.mark.parametrize("transform", [Compressed, lambda *a, **k: Cast(*a, torch.bfloat16, **k)])
def test_transformations_refuse_what_is_no_mutability(transform: Any) -> None:
    with pytest.raises(OptionError, match="mutability of a mapping's tensors is 'NOW'"):
        transform({"x": torch.ones(3)}, mutability="NOW")


def test_the_outermost_mapping_may_be_a_provider_of_a_save_only(tmp_path: Path) -> None:
    ds.save(Table(a=1), tmp_path)
    assert ds.load(tmp_path) == {"items": {"a": 1}}
    with pytest.raises(MismatchError, match=r"expected nested mappings, .* found a Table"):
        ds.load(tmp_path, into=Table(a=0))


def test_a_users_provider_is_saved_and_restored_under_its_name(tmp_path: Path) -> None:
    saved = Counter()
    saved.table.copy_(torch.arange(6))
    saved.position["step"] = 7
    ds.save({"model": {"w": torch.ones(3)}, "data": {"train": saved}}, tmp_path / "c")
    checkpoint = ds.open(tmp_path / "c")
    assert set(checkpoint.tensors) == {"model.w", "data.train.table"}
    assert set(checkpoint.index.objects) == {"data.train.position"}
    restored, weights = Counter(), torch.zeros(3)
    found = ds.load(tmp_path / "c", into={"model": {"w": weights}, "data": {"train": restored}})
    assert found["data"]["train"] is restored and weights.tolist() == [1.0] * 3
    assert restored.table.tolist() == [0, 1, 2, 3, 4, 5]
    assert restored.position == {"step": 7, "seen": [1, 2]}


def test_a_provider_that_the_checkpoint_has_nothing_of_fails_the_load(tmp_path: Path) -> None:
    ds.save({"w": torch.ones(3)}, tmp_path / "c")
    with pytest.raises(MissingKeyError, match="no state of the provider 'data'"):
        ds.load(tmp_path / "c", into={"data": Counter()})


class Failing(Counter):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def entries(self) -> Iterator[Any]:
        yield from super().entries()
        if self.where == "entries":
            raise RuntimeError("no state today")
        if self.where == "kind":
            yield "text"
        if self.where == "writing":
            yield ObjectSource("bad", threading.Lock())
        if self.where == "writing later":
            yield ObjectSource("bad", threading.Lock(), NEVER)

    def restore(self, reader: StateReader) -> None:
        raise RuntimeError("not this one")


@pytest.mark.parametrize(
    ("where", "cause"),
    [
        ("entries", "RuntimeError: no state today"),
        ("kind", "it yielded a str: expected Tensors"),
        ("writing", "TypeError: cannot pickle"),
        ("writing later", "TypeError: cannot pickle"),
    ],
)
def test_an_error_of_a_provider_fails_the_save_with_its_name(tmp_path: Path, where: str, cause: str) -> None:
    with pytest.raises(
        SaveFailedError, match=rf"state provider 'data' \(Failing\) failed in the save: .*{cause}"
    ):
        ds.save({"data": Failing(where), "w": torch.ones(2)}, tmp_path / "c")
    assert not list(tmp_path.rglob("*manifest*"))
    ds.save({"w": torch.ones(2)}, tmp_path / "c")


def test_an_error_in_restore_names_the_provider(tmp_path: Path) -> None:
    ds.save({"data": Failing("nowhere")}, tmp_path / "c")
    with pytest.raises(
        ProviderError, match=r"'data' \(Failing\) failed in the load: RuntimeError: not this one"
    ):
        ds.load(tmp_path / "c", into={"data": Failing("nowhere")})


def test_providers_in_lists_have_names_and_no_two_the_same() -> None:
    assert named([Counter()]).keys() == {"counter"}
    assert named({"other": Counter()}).keys() == {"other"}
    with pytest.raises(ProviderError, match="two state providers are called 'counter'"):
        named([Counter(), Counter()])
    with pytest.raises(ProviderError, match="has no name"):
        named({"": Counter()})
    with pytest.raises(ProviderError, match="is not a state provider"):
        named({"data": {"w": 1}})  # type: ignore[dict-item]
    with pytest.raises(ProviderError, match="found the text 'module:function'"):
        named("module:function")  # type: ignore[arg-type]


def test_a_provider_is_described_with_what_it_wraps() -> None:
    class Wrapped(Counter):
        def __init__(self, inner: StateProvider) -> None:
            super().__init__()
            self.inner = inner

    assert kind_of(Wrapped(Wrapped(Counter()))) == "Wrapped(Wrapped(Counter))"


# -- the tail ---------------------------------------------------------------------------------------------


def large(number: int) -> dict[str, Any]:
    return {"number": number, "array": np.full(300 * KIB, number % 251, np.uint8), "text": "x" * number}


class Large:
    """A number of objects, each larger than a slot."""

    def __init__(self, count: int, mutability: Mutability) -> None:
        self.objects = {str(number): large(number) for number in range(count)}
        self.mutability = mutability

    def entries(self) -> Iterator[Entry]:
        tensors = Tensors()
        for number in range(8):
            tensors.add(f"t{number}", torch.full((1 << 18,), float(number)), AT_FENCE)
        yield tensors
        for key, value in self.objects.items():
            yield ObjectSource(key, value, self.mutability)

    def restore(self, reader: StateReader) -> None:
        raise NotImplementedError


@pytest.fixture
def one_slot(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Returns options for a pool of one slot, which users cannot choose."""
    monkeypatch.setattr("megatron_datastates.engine.staging.most_slots", lambda *_: 1)
    return {"slot_size": 64 * KIB, "write_threads": 1}


@pytest.mark.parametrize("mutability", list(Mutability), ids=lambda m: m.name)
def test_hundreds_of_large_objects_pass_through_one_slot(
    tmp_path: Path, one_slot: dict[str, Any], mutability: Mutability
) -> None:
    saver = new_saver(**one_slot)
    state = Large(200, mutability)
    publication = saver.start(tmp_path / "c", state)
    if mutability is NOW:
        for value in state.objects.values():
            value["array"][:] = 255
    FENCE.wait("the test")
    if mutability is AT_FENCE:
        for value in state.objects.values():
            value["array"][:] = 255
    assert publication.wait() is Outcome.PUBLISHED, publication.error
    saver.close()
    checkpoint = ds.open(tmp_path / "c")
    for number in range(200):
        found, wanted = checkpoint.read_object(str(number)), large(number)
        assert (found["array"] == wanted["array"]).all() and found["text"] == wanted["text"]
    for number in range(8):
        assert (checkpoint.read_tensor(f"t{number}") == number).all()


def test_a_second_save_begins_while_the_objects_of_the_first_wait_for_one_slot(
    tmp_path: Path, one_slot: dict[str, Any]
) -> None:
    saver = new_saver(**one_slot, faults="write:3:stall=300")
    first = saver.start(tmp_path / "a", Large(50, NEVER))
    second = saver.start(tmp_path / "b", Large(50, NEVER))
    assert first.wait() is Outcome.PUBLISHED and second.wait() is Outcome.PUBLISHED
    saver.close()
    for name in "ab":
        assert (ds.open(tmp_path / name).read_object("49")["array"] == 49).all()


def test_a_failed_write_ends_the_serializing_of_what_is_left(
    tmp_path: Path, one_slot: dict[str, Any]
) -> None:
    saver = new_saver(**one_slot, faults="write:40:ENOSPC")
    publication = saver.start(tmp_path / "c", Large(200, NEVER))
    assert publication.wait() is Outcome.FAILED and "No space left" in (publication.error or "")
    publication.join()
    assert not list(tmp_path.rglob("data-*"))
    written = sum(costs.bytes for costs in publication.save.tail.costs.values())
    assert written < 100 * 300 * KIB, "objects were serialized for a save that had failed"
    saver.close()


def test_a_fence_waits_for_an_object_that_may_change_after_it(tmp_path: Path) -> None:
    begun, may_end = threading.Event(), threading.Event()
    value = {"w": torch.ones(MIB)}

    class Slow(ObjectSource):
        def write(self, write: Any) -> bytes:
            begun.set()
            assert may_end.wait(20)
            return super().write(write)

    class Provider(Counter):
        def entries(self) -> Iterator[Entry]:
            yield Slow("value", value, AT_FENCE)

    saver = new_saver()
    publication = saver.start(tmp_path / "c", Provider())
    assert begun.wait(20)
    ended = []
    timer = threading.Timer(0.2, lambda: (ended.append(True), may_end.set()))
    timer.start()
    FENCE.wait("the test")
    assert ended
    value["w"].zero_()
    assert publication.wait() is Outcome.PUBLISHED, publication.error
    saver.close()
    assert (ds.open(tmp_path / "c").read_object("value")["w"] == 1).all()


@pytest.mark.parametrize(("mutability", "waits"), [(NOW, False), (AT_FENCE, True), (NEVER, False)])
def test_a_fence_waits_only_for_objects_that_may_change_at_it(mutability: Mutability, waits: bool) -> None:
    class Two:
        def entries(self) -> Iterator[Entry]:
            yield ObjectSource("a", {"step": 1}, mutability)
            yield ObjectSource("b", {"step": 2}, NEVER)

        def restore(self, reader: StateReader) -> None: ...

    tail = Tail(trust_objects=False)
    tail.secure(collect({"": Two()}))
    assert tail.wait_read(0.0) != waits


class _Entry:
    """A stream that notes until when its bytes have to be in slots; its memory is the program's."""

    def __init__(self, key: str, mutability: Mutability, writer: Any) -> None:
        self.key, self.mutability, self.kind = key, mutability, Kind.STREAM
        self.writer, self.deadlines = writer, list[float | None]()

    def snapshot(self, budget: Any) -> None:
        return None

    def write(self, write: Any) -> None:
        self.deadlines.append(self.writer.deadline)
        write(b"bytes")


def test_the_deadline_is_for_what_may_change_at_once_and_nothing_written_is_held() -> None:
    writer = SimpleNamespace(deadline=None, position=0, begin_entry=lambda: 0, write=len)
    entries = [_Entry("now", NOW, writer), _Entry("later", NEVER, writer)]
    deadlines, held = [one.deadlines for one in entries], [weakref.ref(one) for one in entries]
    provider = SimpleNamespace(entries=lambda: iter(entries), restore=None)
    tail = Tail(trust_objects=False)
    tail.secure(collect({"": provider}))
    entries.clear()
    tail.write_now(writer, 7.0)
    assert [one() is None for one in held] == [True, False]
    tail.write_later(writer)
    assert [one() is None for one in held] == [True, True]
    assert deadlines == [[7.0], [None]]


def test_providers_of_two_functions_that_have_one_name_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one of them would be saved."""
    (tmp_path / "two_of_one_name.py").write_text(
        "from megatron_datastates.providers.named import NamedState\n"
        "def first(): return {'a': NamedState({}), 'b': NamedState({})}\n"
        "def second(): return {'b': NamedState({})}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert registered("two_of_one_name:first").keys() >= {"a", "b"}
    with pytest.raises(ProviderError, match=r"named 'b', one of them of --datastates-providers .*:second:"):
        registered("two_of_one_name:first,two_of_one_name:second")


def test_many_objects_take_time_that_grows_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list from whose beginning each was removed took 12 s for 300,000, beside their writing."""
    monkeypatch.setattr(Tail, "_write", lambda tail, writer, pending: None)

    def seconds(count: int) -> float:
        tail = Tail(trust_objects=False)
        source = SimpleNamespace(mutability=Mutability.NEVER)
        tail._later = [_Pending(str(n), source, n) for n in range(count)]
        begin = time.thread_time()
        tail.write_later(SimpleNamespace())
        return time.thread_time() - begin

    assert seconds(200_000) < 30 * min(seconds(20_000) for _ in range(3))
