"""State providers that do what they should not: the save fails by name, and nothing hangs or is left."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.errors import MismatchError, MissingKeyError, SaveFailedError
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.saving import tail
from megatron_datastates.providers import (
    Cast,
    Compressed,
    Mutability,
    ObjectSource,
    Place,
    StreamSource,
    Tensors,
    TensorSource,
)
from tests.support.bytecodes import interrupted
from tests.support.waiting import eventually
from tests.unit.states import Yields, new_saver

WEIGHT = torch.arange(5, dtype=torch.float32)
LATER = [Mutability.AT_FENCE, Mutability.NEVER]
by_name: Any = {"ids": lambda mutability: mutability.name}


@pytest.mark.parametrize("notes", [{"version": 3}, {3: "version"}, {"version": object()}])
def test_notes_that_are_no_text_fail_the_save_by_name(tmp_path: Path, notes: dict[Any, Any]) -> None:
    """They would be encoded in a poll, on this rank alone."""
    provider = Yields(TensorSource("t", WEIGHT))
    provider.notes = notes  # type: ignore[attr-defined]
    with pytest.raises(SaveFailedError, match=r"'p' .* failed in the save: its notes have .* expected text"):
        ds.save({"p": provider}, tmp_path / "c")
    ds.save({"p": Yields(TensorSource("t", WEIGHT))}, tmp_path / "c")


@pytest.mark.parametrize("notes", [{"path": "\udc80"}, {"\udc80": "path"}])
def test_notes_that_utf_8_does_not_have_fail_the_save_by_name(tmp_path: Path, notes: dict[str, str]) -> None:
    provider = Yields(TensorSource("t", WEIGHT))
    provider.notes = notes  # type: ignore[attr-defined]
    with pytest.raises(SaveFailedError, match=r"'p' .* its name or notes have '\\udc80', .* UTF-8"):
        ds.save({"p": provider}, tmp_path / "c")


def test_notes_and_names_may_be_of_classes_derived_from_str(tmp_path: Path) -> None:
    """The JSON encoder takes none, and would raise in a poll, on this rank alone."""
    provider = Yields(TensorSource("t", WEIGHT))
    provider.notes = {np.str_("unit"): np.str_("metre")}  # type: ignore[attr-defined]
    saver = new_saver()
    publication = saver.start(tmp_path / "c", lambda: {np.str_("p"): provider})
    assert publication.wait() is Outcome.PUBLISHED
    saver.close()
    (entry,) = ds.open(tmp_path / "c").manifest.providers
    assert (entry.name, entry.notes) == ("p", {"unit": "metre"})


def test_a_provider_that_stores_nothing_has_a_name_in_utf_8(tmp_path: Path) -> None:
    """Else no key shows that the manifest could not have the name."""
    with pytest.raises(SaveFailedError, match=r"its name or notes have '\\udc80', .* UTF-8"):
        ds.save({"weight": WEIGHT, "\udc80": Yields()}, tmp_path / "c")


# -- writers ----------------------------------------------------------------------------------------------


def _generator(write: Callable[[Any], int]) -> Iterator[int]:
    yield write(b"bytes")


async def _coroutine(write: Callable[[Any], int]) -> None:
    write(b"bytes")


@pytest.mark.filterwarnings("ignore:coroutine")  # that it was never awaited
@pytest.mark.parametrize("writer", [_generator, _coroutine, lambda write: map(write, [b"bytes"])])
@pytest.mark.parametrize("mutability", list(Mutability), **by_name)
def test_a_writer_that_returns_before_it_runs_fails_the_save(
    tmp_path: Path, writer: Callable[[Any], object], mutability: Mutability
) -> None:
    """Its stream would be stored empty."""
    expected = r"'p' .* the writer of stream 's' returned a \w+, which has yet to run: .*from_buffers"
    with pytest.raises(SaveFailedError, match=expected):
        ds.save({"p": Yields(StreamSource("s", writer, mutability))}, tmp_path / "c")


@pytest.mark.parametrize("compress", [0, 1])
@pytest.mark.parametrize("mutability", list(Mutability), **by_name)
def test_bytes_written_after_their_entry_was_over_fail_the_save(
    tmp_path: Path, mutability: Mutability, compress: int
) -> None:
    kept: list[Any] = []

    def first(write: Any) -> None:
        write(b"first")
        kept.append(write)

    def second(write: Any) -> None:
        write(b"second")
        with pytest.raises(Exception, match=r"bytes of 'p\.first' came after its writer had returned"):
            kept[0](b" of the first")

    entries = StreamSource("first", first, mutability), StreamSource("second", second, mutability)
    with pytest.raises(SaveFailedError, match=r"bytes of 'p\.first' came after its writer had returned"):
        ds.save({"p": Yields(*entries)}, tmp_path, compress=compress)
    eventually(lambda: not list(tmp_path.iterdir()), "the thread that has failed removes its file")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
@pytest.mark.parametrize("mutability", LATER, **by_name)
def test_whatever_a_writer_raises_on_another_thread_fails_the_save(
    tmp_path: Path, mutability: Mutability, error: BaseException
) -> None:
    with pytest.raises(SaveFailedError, match=type(error).__name__):
        ds.save({"p": Yields(StreamSource("s", _raising(error), mutability))}, tmp_path)
    eventually(lambda: not list(tmp_path.iterdir()), "the thread that has failed removes its file")


class NoText(BaseException):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


@pytest.mark.parametrize("mutability", LATER, **by_name)
def test_an_error_without_a_text_on_another_thread_leaves_no_file(
    tmp_path: Path, mutability: Mutability
) -> None:
    with pytest.raises(SaveFailedError, match="rank 0: NoText"):
        ds.save({"p": Yields(StreamSource("s", _raising(NoText()), mutability))}, tmp_path)
    eventually(lambda: not list(tmp_path.iterdir()), "the thread that has failed removes its file")


def test_an_interrupted_save_leaves_no_file_and_delays_no_fence(tmp_path: Path) -> None:
    interrupted = StreamSource("now", _raising(KeyboardInterrupt()))
    later = StreamSource("later", lambda write: write(b"x"), Mutability.AT_FENCE)
    with pytest.raises(KeyboardInterrupt):
        ds.save({"p": Yields(interrupted, later), "w": WEIGHT}, tmp_path)
    assert not list(tmp_path.iterdir())
    FENCE.clear("the test")  # with the default deadline, or the test would time out
    ds.save({"w": WEIGHT}, tmp_path)
    assert torch.equal(ds.load(tmp_path)["w"], WEIGHT)


class Raises:
    """Raises where its entries are asked for."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def entries(self) -> Iterator[Any]:
        raise self._error
        yield

    def restore(self, reader: Any) -> None:
        raise NotImplementedError


def test_an_entry_that_is_interrupted_anywhere_can_be_ended() -> None:
    """A lock that stays held would make the trainer wait forever."""
    ended: list[int] = []

    def write_and_end() -> None:
        for number in itertools.count(1):
            entry = tail._EntryWrite(len, "key", [])
            was_interrupted = interrupted(functools.partial(entry, b"bytes"), tail.__file__, number)
            entry.end()
            ended.append(number)
            if not was_interrupted:
                break

    thread = threading.Thread(target=write_and_end, daemon=True)
    thread.start()
    thread.join(60.0)
    assert not thread.is_alive(), f"interrupted before bytecode {len(ended) + 1}"
    assert len(ended) > 10


class RankShouldRestart(BaseException):
    """As nvidia-resiliency-ext raises it in the trainer, wherever that is."""


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), RankShouldRestart()], ids=repr)
def test_a_save_that_is_interrupted_while_it_is_planned_stops_no_later_one(
    tmp_path: Path, error: BaseException
) -> None:
    with pytest.raises(type(error)):
        ds.async_save({"p": Raises(error), "w": WEIGHT}, tmp_path / "a")
    ds.save({"w": WEIGHT}, tmp_path / "b")
    assert torch.equal(ds.load(tmp_path / "b")["w"], WEIGHT)
    assert not (tmp_path / "a").exists()


def test_an_error_that_is_no_exception_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    """As torch's CheckpointException and pyo3's panics are."""

    class PanicException(BaseException):
        pass

    with pytest.raises(SaveFailedError, match="PanicException: of a provider"):
        ds.save({"p": Raises(PanicException("of a provider"))}, tmp_path)


def _raising(error: BaseException) -> Callable[[Any], None]:
    def writer(write: Any) -> None:
        write(b"half")
        raise error

    return writer


BLOCKED = """
import sys, threading
import megatron_datastates as ds
from megatron_datastates.pipeline import saver
from megatron_datastates.providers import Mutability, StreamSource

class Blocked:
    def entries(self):
        yield StreamSource("s", lambda write: threading.Event().wait(), Mutability.NEVER)
    def restore(self, reader): ...

saver._CLOSING_SECONDS = saver._LAST_JOIN_SECONDS = 0.1
ds.async_save({"p": Blocked()}, sys.argv[1])
"""


def test_a_stream_that_waits_for_ever_does_not_keep_the_program_from_ending(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(tmp_path / "c")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "a state provider still writes an object or a stream" in ended.stderr


def test_buffers_that_an_earlier_save_has_consumed_fail_the_save(tmp_path: Path) -> None:
    provider = Yields(StreamSource.from_buffers("s", iter([b"once"])))
    ds.save({"p": provider}, tmp_path / "1")
    with pytest.raises(SaveFailedError, match="stream 's' come from an iterator that an earlier save"):
        ds.save({"p": provider}, tmp_path / "2")
    again = Yields(StreamSource.from_buffers("s", [b"again"]))
    for _ in range(2):
        ds.save({"p": again}, tmp_path / "1")
        assert ds.load(tmp_path / "1") == {"p.s": b"again"}


# -- names ------------------------------------------------------------------------------------------------


def test_a_load_of_everything_refuses_two_kinds_of_one_name(tmp_path: Path) -> None:
    provider = Yields(ObjectSource("x", 1), StreamSource("x", lambda write: write(b"bytes")))
    ds.save({"p": provider}, tmp_path)
    with pytest.raises(MismatchError, match=r"several kinds .* under the name 'p\.x'"):
        ds.load(tmp_path)
    checkpoint = ds.open(tmp_path)
    assert checkpoint.read_object("p.x") == 1
    assert b"".join(map(bytes, checkpoint.open_stream("p.x"))) == b"bytes"


@pytest.mark.parametrize("empty", [Yields, lambda: Compressed({})], ids=["provider", "compressed"])
def test_a_provider_that_had_nothing_to_store_is_restored(tmp_path: Path, empty: Callable[[], Any]) -> None:
    ds.save({"p": empty(), "w": WEIGHT}, tmp_path)
    restored = empty()
    ds.load(tmp_path, into={"p": restored, "w": torch.zeros(5)})
    assert getattr(restored, "was_restored", True)
    with pytest.raises(MissingKeyError, match="no state of the provider 'q'"):
        ds.load(tmp_path, into={"q": empty()})


# -- entries that torch or Python refuses: the error names them ----------------------------------------------


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(5000):
        value = [value]
    return value


NOT_PLANNED: dict[str, tuple[Any, str]] = {
    "nested": (torch.nested.nested_tensor([WEIGHT, WEIGHT[1:]]), r"tensor 'p\.e' cannot be .*: RuntimeError"),
    "uninitialized": (torch.nn.UninitializedParameter(), r"tensor 'p\.e' cannot be saved: ValueError"),
    "array": (np.ones(3), r"tensor 'p\.e' cannot be saved: TypeError"),
    "object": (deep(), r"object 'p\.e' was not saved, .* pickled: RecursionError"),
    "uint4": ([torch.empty(4, dtype=torch.uint4)], r"object 'p\.e' was not saved, .*: NotImplementedError"),
}


@pytest.mark.parametrize("kind", NOT_PLANNED)
def test_an_entry_that_cannot_be_saved_is_named(tmp_path: Path, kind: str) -> None:
    value, said = NOT_PLANNED[kind]
    made: Any = ObjectSource("e", value) if isinstance(value, list) else TensorSource("e", value)
    with pytest.raises(SaveFailedError, match=rf"provider 'p' \(Yields\) failed in the save: {said}"):
        ds.save({"w": WEIGHT, "p": Yields(TensorSource("w", WEIGHT), made)}, tmp_path)
    with pytest.raises(SaveFailedError, match=r"provider 'p' \(Compressed.* failed in .* '(p\.)?e'"):
        ds.save({"w": WEIGHT, "p": Compressed(Yields(TensorSource("w", WEIGHT), made))}, tmp_path)


@pytest.mark.parametrize("dtype", [torch.uint4, torch.bits8, torch.qint8], ids=str)
def test_a_dtype_without_a_code_is_refused_by_name_before_it_is_compressed(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    one = torch.empty(4, dtype=torch.bits8 if dtype is torch.bits8 else torch.uint8)
    tensor = torch.quantize_per_tensor(WEIGHT, 0.1, 0, dtype) if dtype is torch.qint8 else one.view(dtype)
    with pytest.raises(SaveFailedError, match=rf"'w' has dtype {str(dtype)[6:]}, which cannot be saved"):
        ds.save({"p": Compressed({"w": tensor})}, tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        lambda key: TensorSource(key, WEIGHT),
        lambda key: ObjectSource(key, 1),
        lambda key: StreamSource(key, lambda write: None),
        lambda key: Tensors([key], [WEIGHT], [Mutability.NOW], [None], [False]),
    ],
    ids=["tensor", "object", "stream", "tensors"],
)
def test_keys_that_are_no_text_are_named(tmp_path: Path, source: Callable[[Any], Any]) -> None:
    with pytest.raises(SaveFailedError, match=r"provider 'p' .*: it yielded an entry under the key 3 of"):
        ds.save({"p": Yields(source(3))}, tmp_path)
    with pytest.raises(SaveFailedError, match=r"key 3 of type int: exp|a key is 3 of type int: exp"):
        ds.save(Yields(source(3)), tmp_path)
    with pytest.raises(SaveFailedError, match=r"provider 'p' .*: the key 'p.\\ud800' has characters"):
        ds.save({"p": Yields(source("\ud800"))}, tmp_path)


def transformed(wrap: str, entry: Any) -> Any:
    """Returns a provider that yields the entry, as it is or in a transformation."""
    inner = Yields(entry)
    return {"": inner, "compressed": Compressed(inner), "cast": Cast(inner, torch.float16)}[wrap]


@pytest.mark.parametrize("wrap", ["", "compressed", "cast"])
@pytest.mark.parametrize("which", range(5))
def test_tensors_with_a_list_too_short_fail_the_save(tmp_path: Path, wrap: str, which: int) -> None:
    lists: list[list[Any]] = [["a", "b"], [WEIGHT, WEIGHT], [Mutability.NOW] * 2, [None] * 2, [False] * 2]
    del lists[which][0]
    said = r"provider 'p' .* failed in the save: its Tensors have [12] keys, and \w+ for [12]: expected one"
    with pytest.raises(SaveFailedError, match=said):
        ds.save({"p": transformed(wrap, Tensors(*lists))}, tmp_path)


@pytest.mark.parametrize("wrap", ["", "compressed", "cast"])
def test_tensors_of_which_none_is_called_stable_are_saved(tmp_path: Path, wrap: str) -> None:
    keys = ["a", "b"]
    ds.save({"p": transformed(wrap, Tensors(keys, [WEIGHT] * 2, [Mutability.NOW] * 2, [None] * 2))}, tmp_path)
    found = ds.load(tmp_path)
    assert all(torch.equal(found[f"p.{key}"].to(WEIGHT.dtype), WEIGHT) for key in keys)


class Refills:
    """Yields one tensor under every key, filled anew for each."""

    def entries(self) -> Iterator[TensorSource]:
        tensor = torch.empty(3)
        for number in range(3):
            yield TensorSource(f"k{number}", tensor.fill_(number))

    def restore(self, reader: object) -> None: ...


def test_a_tensor_that_is_filled_anew_after_it_was_yielded_fails_the_save(tmp_path: Path) -> None:
    for provider in (Refills(), Compressed(Refills()), Cast(Refills(), torch.bfloat16)):
        with pytest.raises(SaveFailedError, match=r"'p' .*: tensor 'k0' was changed by `entries`"):
            ds.save({"p": provider}, tmp_path)
    with torch.inference_mode():
        counted = torch.ones(3)  # which torch counts no changes of
    ds.save({"p": Yields(TensorSource("t", counted), TensorSource("tied", counted))}, tmp_path)


class RefillsOnce(Refills):
    """Yields one tensor, filled anew by every call of `entries`."""

    def __init__(self) -> None:
        self._tensor = torch.zeros(3)

    def entries(self) -> Iterator[TensorSource]:
        yield TensorSource("k", self._tensor.add_(1))


def test_a_tensor_that_another_call_of_entries_fills_anew_fails_the_save(tmp_path: Path) -> None:
    shared = RefillsOnce()
    for state in ({"p": shared, "q": shared}, {"p": Compressed(shared), "q": Cast(shared, torch.bfloat16)}):
        with pytest.raises(SaveFailedError, match=r"'p' .*: tensor 'k' was changed by `entries`"):
            ds.save(state, tmp_path)
    ds.save({"p": shared, "q": RefillsOnce()}, tmp_path)
    assert torch.equal(ds.load(tmp_path)["p.k"], torch.full((3,), 5.0))


# -- transformations in trees ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state",
    [
        lambda: Compressed({"o": Cast({"w": WEIGHT}, torch.bfloat16)}),
        lambda: Cast({"o": Compressed({"w": WEIGHT})}, torch.bfloat16),
        lambda: Compressed({"o": {"w": WEIGHT.bfloat16()}, "i": Compressed({"n": {"k": WEIGHT}})}),
    ],
    ids=["compressed-cast", "cast-compressed", "compressed-compressed"],
)
def test_transformations_nest_through_trees(tmp_path: Path, state: Callable[[], Any]) -> None:
    ds.save({"m": state()}, tmp_path)
    found = ds.load(tmp_path)["m.o.w"]
    assert torch.equal(found.float(), WEIGHT)
    assert found.dtype.itemsize == 2


# -- encoded tensors ---------------------------------------------------------------------------------------

TRANSFORMED = [Compressed, lambda inner: Cast(inner, torch.bfloat16)]


@pytest.mark.parametrize("transform", TRANSFORMED, ids=["compressed", "cast"])
def test_an_encoded_tensor_of_another_size_than_its_place_fails_the_save(
    tmp_path: Path, transform: Callable[[Any], Any]
) -> None:
    source = TensorSource("w", WEIGHT, Mutability.NOW, Place((10,), (0,), (10,)))
    with pytest.raises(SaveFailedError, match=r"tensor 'w' has shape \(5,\): expected .* shape \(10,\)"):
        ds.save({"p": transform(Yields(source))}, tmp_path)


@pytest.mark.parametrize("transform", TRANSFORMED, ids=["compressed", "cast"])
def test_an_encoded_tensor_without_memory_fails_the_save(
    tmp_path: Path, transform: Callable[[Any], Any]
) -> None:
    offloaded = torch.ones(100)
    offloaded.untyped_storage().resize_(0)
    with pytest.raises(SaveFailedError, match="tensor 'w' has no memory of its own: it was offloaded"):
        ds.save({"p": transform({"w": offloaded})}, tmp_path)
    shrunk = torch.ones(100)
    second_half = shrunk[50:]
    shrunk.untyped_storage().resize_(399)
    for tensor in (shrunk, second_half):
        with pytest.raises(SaveFailedError, match="tensor 'w' ends beyond its storage of 399 bytes"):
            ds.save({"p": transform({"w": tensor})}, tmp_path)


@pytest.mark.parametrize("transform", TRANSFORMED, ids=["compressed", "cast"])
def test_a_parameter_may_be_given_other_memory_before_it_is_encoded(
    tmp_path: Path, transform: Callable[..., Any]
) -> None:
    parameter, begun = torch.nn.Parameter(WEIGHT.clone()), threading.Event()
    slow = StreamSource("s", lambda write: begun.wait(), Mutability.AT_FENCE)
    weight = transform(Yields(TensorSource("w", parameter, Mutability.AT_FENCE)))
    handle = ds.async_save({"a": Yields(slow), "p": weight}, tmp_path, lazy=True)
    parameter.data = torch.zeros(5)
    begun.set()
    ds.fence()
    handle.wait()
    assert torch.equal(ds.load(tmp_path)["p.w"].float(), WEIGHT)
