"""`import megatron_datastates as ds`: save, async_save, load and open, in one process without Megatron."""

from __future__ import annotations

import fractions
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.dcp import DataStatesReader, DataStatesWriter
from megatron_datastates.errors import (
    MismatchError,
    MissingKeyError,
    NotACheckpointError,
    OptionError,
    SaveFailedError,
    StorageError,
    UntrustedClassError,
)
from megatron_datastates.pipeline.loading import entries
from megatron_datastates.pipeline.upkeep.verify import verify
from megatron_datastates.providers import StreamSource, TensorSource


def training_state() -> dict[str, Any]:
    """Returns a model, its stepped optimizer and a number, as a program has them."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 12, "note": ["a", {}]}


def zeroed(state: Any) -> Any:
    """Returns the same with zeros for tensors and None for objects."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    return {key: zeroed(value) for key, value in state.items()} if isinstance(state, dict) and state else None


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other) and one.dtype == other.dtype
    elif isinstance(one, dict) and one:
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    else:
        assert one == other


def test_a_training_state_comes_back_in_place(tmp_path: Path) -> None:
    state = training_state()
    report = ds.save(state, tmp_path / "ck", iteration=12)
    assert report["state"] == "published" and report["iteration"] == 12 and report["mode"] == "sync"
    blank = zeroed(state)
    weight = blank["model"]["0.weight"]
    found = ds.load(tmp_path / "ck", into=blank)
    assert_equal(found, state)
    assert found["model"]["0.weight"] is weight


def test_all_of_a_checkpoint_comes_by_name(tmp_path: Path) -> None:
    state = training_state()
    ds.save(state, tmp_path / "ck")
    found = ds.load(tmp_path / "ck")
    assert found["step"] == 12 and found["note"] == ["a", {}]
    assert torch.equal(found["model.0.weight"], state["model"]["0.weight"])
    assert torch.equal(found["optimizer.state.0.exp_avg"], state["optimizer"]["state"][0]["exp_avg"])


class Log:
    """A provider of one stream, which it joins as most programs would."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def entries(self) -> Iterator[StreamSource]:
        yield StreamSource.from_buffers("log", [self.content])

    def restore(self, reader: Any) -> None:
        self.content = b"".join(reader.open_stream("log"))


def test_buffers_of_a_stream_may_be_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "_STREAM_BYTES", 1000)  # so that there are several
    content = bytes(range(256)) * 41
    ds.save({"kept": {"data": Log(content)}}, tmp_path / "ck")
    assert ds.load(tmp_path / "ck") == {"kept.data.log": content}
    assert ds.load(tmp_path / "ck", into={"kept": {}}) == {"kept": {"data": {"log": content}}}
    ds.load(tmp_path / "ck", into={"kept": {"data": (restored := Log(b""))}})
    assert restored.content == content


def test_an_async_save_reads_nothing_of_the_program_after_it_returned(tmp_path: Path) -> None:
    tensor, items = torch.arange(3 << 20, dtype=torch.float32), [1]
    handle = ds.async_save({"tensor": tensor, "items": items}, tmp_path / "ck", copy_limit=20_000_000)
    tensor.zero_()
    items.append(2)
    assert handle.report is None
    while not handle.done():
        pass
    assert handle.report is not None and handle.report["state"] == "published"
    found = ds.load(tmp_path / "ck")
    assert torch.equal(found["tensor"], torch.arange(3 << 20, dtype=torch.float32)) and found["items"] == [1]


def test_a_lazy_save_is_fenced_by_the_step_of_an_optimizer(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(4 << 20))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    handle = ds.async_save({"weight": weight}, tmp_path / "ck", lazy=True, copy_limit=100_000_000)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert handle.wait()["lazy_bytes"] == 16 << 20
    assert torch.equal(ds.load(tmp_path / "ck")["weight"], torch.ones(4 << 20))
    assert torch.equal(weight, torch.zeros(4 << 20))


# In a program of its own: fences, once installed, stay.
STEPS_BESIDE_A_PROVIDER = """
import sys, torch
import megatron_datastates as ds
from megatron_datastates.providers import Mutability, TensorSource

class Weight:
    value = torch.nn.Parameter(torch.ones(4 << 20))
    def entries(self):
        yield TensorSource("value", self.value, Mutability.AT_FENCE)
    def restore(self, reader): pass

optimizer = torch.optim.SGD([Weight.value], lr=1.0)
handle = ds.async_save({"weight": Weight()}, sys.argv[1], copy_limit=100_000_000)
Weight.value.grad = torch.ones_like(Weight.value)
optimizer.step()
assert handle.wait()["lazy_bytes"] == 16 << 20 and not Weight.value.any()
assert ds.load(sys.argv[1])["weight.value"].equal(torch.ones(4 << 20))
"""


def test_the_step_of_an_optimizer_waits_for_what_a_provider_promises(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STEPS_BESIDE_A_PROVIDER, str(tmp_path / "ck")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_change_without_a_fence_fails_a_lazy_save(tmp_path: Path) -> None:
    weight = torch.ones(4 << 20)
    handle = ds.async_save({"weight": weight}, tmp_path / "ck", lazy=True, copy_limit=4_000_000)
    weight.zero_()
    with pytest.raises(SaveFailedError, match="weight"):
        handle.wait()
    with pytest.raises(NotACheckpointError):
        ds.load(tmp_path / "ck")


def test_an_explicit_fence_lets_a_lazily_saved_tensor_change(tmp_path: Path) -> None:
    weight = torch.ones(4 << 20)
    handle = ds.async_save({"weight": weight}, tmp_path / "ck", lazy=True, copy_limit=100_000_000)
    ds.fence()
    weight.zero_()
    handle.wait()
    assert torch.equal(ds.load(tmp_path / "ck")["weight"], torch.ones(4 << 20))


@pytest.mark.parametrize("wanted", [torch.float64, torch.bfloat16], ids=str)
def test_values_are_converted_to_the_dtype_of_the_target(tmp_path: Path, wanted: torch.dtype) -> None:
    saved = torch.randn(3, 700_000)  # more than one temporary
    ds.save({"t": saved}, tmp_path / "ck")
    target = torch.zeros(saved.shape, dtype=wanted)
    ds.load(tmp_path / "ck", into={"t": target})
    assert torch.equal(target, saved.to(wanted))


def test_targets_that_are_not_contiguous_are_filled(tmp_path: Path) -> None:
    saved = torch.randn(40, 30)
    ds.save({"t": saved}, tmp_path / "ck")
    memory = torch.zeros(30, 80)
    ds.load(tmp_path / "ck", into={"t": memory.t()[::2]})
    assert torch.equal(memory.t()[::2], saved) and not memory.t()[1::2].any()


def test_shards_are_filled_with_their_part(tmp_path: Path) -> None:
    whole = torch.randn(6, 8)
    ds.save({"t": whole}, tmp_path / "ck")
    part = torch.zeros(2, 8)
    found = ds.load(tmp_path / "ck", into={"t": ds.Shard(part, (6, 8), (3, 0))})
    assert torch.equal(part, whole[3:5]) and found["t"].tensor is part


def test_looking_inside_reads_only_what_is_asked_for(tmp_path: Path) -> None:
    ds.save(training_state(), tmp_path / "ck")
    checkpoint = ds.open(tmp_path / "ck")
    assert checkpoint.tensors["model.0.weight"].global_shape == (3, 5)
    assert checkpoint.tensors["model.0.weight"].dtype == "float32"
    assert {"step", "note"} <= set(checkpoint.objects)
    assert re.fullmatch(r"<Checkpoint .*/ck: \d+ tensors, \d+ objects, 0 streams>", repr(checkpoint))
    assert checkpoint.costs.bytes_read == 0
    assert checkpoint.read_tensor("model.0.weight", (1, 0), (1, 5)).shape == (1, 5)
    assert checkpoint.costs.bytes_read > 0


@pytest.mark.parametrize(
    ("into", "error", "said"),
    [
        ({"t": torch.zeros(3, 2)}, MismatchError, r"'t' was saved with the shape \(2, 3\) in /.*\(3, 2\)"),
        ({"t": torch.zeros(2, 3, dtype=torch.int32)}, MismatchError, "float32 and cannot become .*int32"),
        ({"u": torch.zeros(2, 3)}, MissingKeyError, "there is no tensor 'u' in /"),
        ({"t": None}, MissingKeyError, "'t'"),
        ({"t": ds.Shard(torch.zeros(1, 3), (2, 3), (2, 0))}, MismatchError, "no slice"),
        ({"t": ds.Shard(np.zeros((2, 3)), (2, 3), (0, 0))}, MismatchError, "'t': its shard has a ndarray"),
        ({("t",): torch.zeros(1)}, MismatchError, "expected str or int"),
        ({"a": {"b": 1}, "a.b": 2}, MismatchError, "both called 'a.b'"),
    ],
    ids=[
        "shape",
        "dtype",
        "missing tensor",
        "tensor wanted as object",
        "outside",
        "array",
        "key",
        "same name",
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, into: Any, error: type[Exception], said: str) -> None:
    ds.save({"t": torch.ones(2, 3)}, tmp_path / "ck")
    with pytest.raises(error, match=said):
        ds.load(tmp_path / "ck", into=into)


class Stateless:
    """A state provider that has stored nothing."""

    def entries(self) -> Iterator[TensorSource]:
        yield from ()

    def restore(self, reader: Any) -> None: ...


@pytest.mark.parametrize(
    "wanted",
    [{"missing": None}, {"opt": {}}, {"own": None}, {"w2": torch.zeros(2)}, {"later": Stateless()}],
)
def test_a_load_that_is_refused_changes_no_tensor(wanted: dict[str, Any], tmp_path: Path) -> None:
    """A program may go on with what it has, as where an older checkpoint lacks what it saves now."""
    ds.save({"w": torch.ones(3), "own": fractions.Fraction(1, 3)}, tmp_path, trust_objects=True)
    target = torch.zeros(3)
    with pytest.raises((MissingKeyError, UntrustedClassError)):
        ds.load(tmp_path, into={"w": target, **wanted})
    assert not target.any()


def test_a_shard_of_no_tensor_is_not_saved(tmp_path: Path) -> None:
    for part in (np.zeros(3), [1, 2]):
        with pytest.raises(SaveFailedError, match=r"'m\.t': its shard has a"):
            ds.save({"m": {"t": ds.Shard(part, (3,), (0,))}}, tmp_path)  # type: ignore[arg-type]


def test_an_empty_mapping_stands_for_all_that_is_stored_below_its_name(tmp_path: Path) -> None:
    part = ds.Shard(torch.zeros(2), (2,), (0,))
    state = {0: {"exp_avg": torch.ones(2), "step": 3}, "07": {"none": {}}, "s": part}
    ds.save({"optimizer": {"state": state, "empty": {}}, "optimizer2": 5}, tmp_path)
    into: Any = {"optimizer": {"state": {}, "empty": {}}, "optimizer2": np.zeros(3)}
    found = ds.load(tmp_path, into=into)
    assert found["optimizer2"] == 5 and found["optimizer"]["empty"] == {}
    loaded = found["optimizer"]["state"]
    assert loaded[0]["exp_avg"].tolist() == [1, 1] and loaded[0]["step"] == 3
    assert loaded["07"] == {"none": {}} and loaded["s"].tolist() == [0, 0] and len(loaded) == 3
    assert into["optimizer"] == {"state": {}, "empty": {}}


def test_an_empty_mapping_of_which_nothing_is_stored_is_missing(tmp_path: Path) -> None:
    ds.save({"a": 1, "b": {"c": 1}, "b.c.d": 2}, tmp_path)
    with pytest.raises(MissingKeyError, match="no object 'x'"):
        ds.load(tmp_path, into={"x": {}})
    with pytest.raises(MismatchError, match=r"there are the values 'c' and 'c\.d'"):
        ds.load(tmp_path, into={"b": {}})


def test_an_empty_mapping_hides_no_values_below_its_name(tmp_path: Path) -> None:
    # As DCP's get_model_state_dict(..., full_state_dict=True) returns them: {} on all ranks but one.
    whole = {"x.model.w": torch.ones(2), "x.model.n": 3, "x": {"model": {}, "none": {}}}
    ds.save(whole, tmp_path)
    found = ds.load(tmp_path, into={"x": {"model": {}, "none": {}}})["x"]
    assert found["model"]["w"].tolist() == [1, 1] and found["model"]["n"] == 3 and found["none"] == {}
    found = ds.load(tmp_path, into={"x": {}})["x"]
    assert found["model"]["w"].tolist() == [1, 1] and found["model"]["n"] == 3 and found["none"] == {}


def test_empty_mappings_may_be_below_one_another(tmp_path: Path) -> None:
    ds.save({"a": {"b": {"c": 1}, "d": torch.ones(1)}, "ab": {"c": 2}}, tmp_path)
    found = ds.load(tmp_path, into={"a": {}, "a.b": {}, "ab": {}})
    assert found["a"]["b"] == found["a.b"] == {"c": 1} and found["ab"] == {"c": 2}
    assert found["a"]["d"].tolist() == [1]


def test_a_nested_target_is_refused_by_name(tmp_path: Path) -> None:
    ds.save({"a": {"w": torch.ones(3)}}, tmp_path)
    with pytest.raises(MismatchError, match=r"tensor 'a\.w': the target is nested"):
        ds.load(tmp_path, into={"a": {"w": torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])}})


def test_a_compiled_function_may_save_and_load(tmp_path: Path) -> None:
    def step(weights: torch.Tensor) -> torch.Tensor:
        weights = weights + 1
        ds.save({"w": weights}, tmp_path / "a")
        handle = ds.async_save({"w": weights * 2}, tmp_path / "b")
        while not handle.done():
            pass
        handle.wait()
        ds.load(tmp_path / "b", into={"w": weights})
        return weights + ds.load(tmp_path / "a")["w"]

    compiled = torch.compile(step, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 6.0))


def test_a_target_that_wraps_another_tensor_is_refused_by_name(tmp_path: Path) -> None:
    ds.save({"w": torch.ones(2)}, tmp_path)
    wrapper = torch._to_functional_tensor(torch.zeros(2))
    with pytest.raises(MismatchError, match="'w': the target wraps another tensor, and has no memory"):
        ds.load(tmp_path, into={"w": wrapper})


@pytest.mark.parametrize("compress", [0, 1])
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_no_load_reads_into_the_memory_that_fake_tensors_lack(compress: int, tmp_path: Path) -> None:
    ds.save({"w": torch.ones(4)}, tmp_path, compress=compress)
    with torch._subclasses.FakeTensorMode():
        target = torch.zeros(4)
        for load in (lambda: ds.load(tmp_path), lambda: ds.load(tmp_path, into={"w": target})):
            with pytest.raises(MismatchError, match="load outside of any FakeTensorMode"):
                load()
    assert torch.equal(ds.load(tmp_path)["w"], torch.ones(4))


def test_a_mapping_that_contains_itself_is_refused_by_name(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.ones(2), "model": {}}
    state["model"]["parent"] = state
    with pytest.raises(SaveFailedError, match="the mapping 'model' contains itself"):
        ds.save(state, tmp_path)
    ds.save({"w": torch.ones(2)}, tmp_path)
    with pytest.raises(MismatchError, match="the mapping 'model' contains itself"):
        ds.load(tmp_path, into=state)


def test_causes_of_a_failed_save_end(tmp_path: Path) -> None:
    with pytest.raises(SaveFailedError) as caught:
        ds.save({"w": torch.ones(3, device="meta")}, tmp_path / "c")
    causes: list[BaseException | None] = [caught.value]
    while causes[-1] is not None:
        assert len(causes) < 10
        causes.append(causes[-1].__cause__)


@pytest.mark.parametrize("at", [0, 3, 6])
def test_the_entry_that_cannot_be_planned_is_found_among_others(at: int, tmp_path: Path) -> None:
    tensors: dict[str, Any] = {f"t{number}": torch.ones(2) for number in range(7)}

    class Provider:
        def entries(self) -> Iterator[TensorSource]:
            for key, tensor in tensors.items():
                yield TensorSource(key, np.ones(2) if key == f"t{at}" else tensor)

        def restore(self, reader: Any) -> None: ...

    with pytest.raises(SaveFailedError, match=rf"tensor 'p\.t{at}' cannot be saved: TypeError"):
        ds.save({"p": Provider()}, tmp_path / "c")


def test_an_ambiguous_state_fails_the_save(tmp_path: Path) -> None:
    with pytest.raises(SaveFailedError, match=r"both called 'a\.b'"):
        ds.save({"a": {"b": 1}, "a.b": 2}, tmp_path / "ck")


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no such option: nonsense"):
        ds.save({}, tmp_path / "ck", nonsense=1)


def test_providers_in_an_option_are_refused_rather_than_left_out(tmp_path: Path) -> None:
    given = {"providers": "package.module:function"}
    for call in (ds.save, ds.async_save):
        with pytest.raises(OptionError, match="pass state providers as values"):
            call({"w": torch.ones(3)}, tmp_path / "ck", **given)
    ds.save({"w": torch.ones(3)}, tmp_path / "ck")
    with pytest.raises(OptionError, match="pass state providers as values"):
        ds.load(tmp_path / "ck", **given)
    for of_dcp in (DataStatesWriter, DataStatesReader):
        with pytest.raises(OptionError, match="pass state providers as values"):
            of_dcp(tmp_path / "ck", **given)


@pytest.mark.parametrize(
    ("call", "option"),
    [
        (ds.save, {"near": "/fast"}),
        (ds.save, {"near_replicas": "1"}),
        (ds.save, {"while_saving": "skip"}),
        (ds.save, {"on_failure": "warn"}),
        (ds.load, {"fallback": "2"}),
        (ds.open, {"fallback": "2"}),
    ],
)
def test_options_that_would_have_no_effect_are_refused(
    tmp_path: Path, call: Callable[..., Any], option: dict[str, str]
) -> None:
    given: list[Any] = [{}, tmp_path / "ck"] if call is ds.save else [tmp_path / "ck"]
    with pytest.raises(OptionError, match=f"{next(iter(option))}='.*for saves and loads through Megatron"):
        call(*given, **option)
    assert not (tmp_path / "ck").exists()
    ds.save({}, tmp_path / "ck", near="", while_saving="wait", fallback=2)
    ds.load(tmp_path / "ck", while_saving="skip", fallback=0)


@pytest.mark.parametrize(
    "option", [{"near": "/fast"}, {"drain_every": 2}, {"while_saving": "skip"}, {"fallback": 3}], ids=list
)
def test_options_without_effect_after_enable_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(option))}=.*for Megatron's training loop with"):
        ds.enable(**option)


def test_importing_the_package_imports_neither_torch_nor_anything_of_ours() -> None:
    code = (
        "import sys, megatron_datastates as ds; before = set(sys.modules); dir(ds); "
        "print(*[m for m in before if m == 'torch' or m.startswith('megatron_datastates.')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == []


def test_help_fits_on_a_screen_and_names_everything() -> None:
    text = ds.__doc__ or ""
    assert len(text.splitlines()) < 24
    assert all(f"ds.{name}" in text for name in ds.__all__ if name != "SaveHandle")


def test_a_directory_of_a_process_that_was_removed_fails_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save fails then, on all ranks: those that had begun it would wait for one that raised alone."""
    ds.save({"w": torch.ones(2)}, tmp_path / "c")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SaveFailedError, match=r"saving to x failed .* No such file or directory"):
        ds.async_save({"w": torch.ones(2)}, "x").wait()
    for read in (ds.load, ds.open):
        with pytest.raises(NotACheckpointError, match="x does not exist"):
            read("x")
    ds.save({"w": torch.zeros(2)}, tmp_path / "c")
    assert torch.equal(ds.load(tmp_path / "c")["w"], torch.zeros(2))


def test_a_save_to_a_url_is_refused() -> None:
    with pytest.raises(OptionError, match="only Megatron's training loop saves to object stores"):
        ds.save({"step": 1}, "s3://bucket/x")


@pytest.mark.parametrize("compress", [0, 1])
def test_the_default_device_does_not_matter(tmp_path: Path, compress: int) -> None:
    state = {
        "w": torch.arange(5.0),
        "optimizer": [{"step": torch.tensor(3.0), "m": torch.ones(2, 2).t()}],
        "sparse": [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()],
    }
    torch.set_default_device("meta")  # for which a GPU may stand
    try:
        ds.save(state, tmp_path / "c", compress=compress)
        assert verify(tmp_path / "c").good
        found = [ds.load(tmp_path / "c"), ds.load(tmp_path / "c", into={**state, "w": state["w"].clone()})]
    finally:
        torch.set_default_device(None)
    for one in found:
        step, moment = one["optimizer"][0].values()
        assert torch.equal(one["w"], state["w"]) and step == 3.0 and torch.equal(moment, torch.ones(2, 2))
        assert all(torch.equal(sparse.to_dense(), torch.eye(3)) for sparse in one["sparse"])


def test_a_checkpoint_that_was_replaced_after_it_was_read_says_so(tmp_path: Path) -> None:
    ds.save({"w": torch.ones(3), "step": 1}, tmp_path)
    checkpoint = ds.open(tmp_path)
    assert checkpoint.read_tensor("w").tolist() == [1, 1, 1]  # has read all that says what is where
    ds.save({"w": torch.zeros(3), "step": 2}, tmp_path)
    for read in (lambda: checkpoint.read_tensor("w"), lambda: checkpoint.read_object("step")):
        with pytest.raises(StorageError, match="was replaced by another save while it was read: load again"):
            read()
