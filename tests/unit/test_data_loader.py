"""The positions of data loaders as part of a checkpoint, without Megatron's loop."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import megatron_datastates as ds
from megatron_datastates.errors import (
    FormatError,
    MismatchError,
    ProviderError,
    SaveFailedError,
    UntrustedClassError,
)
from megatron_datastates.mcore import dataloader
from megatron_datastates.mcore import providers as mcore_providers
from megatron_datastates.mcore.dataloader import LoopDataLoader
from megatron_datastates.mcore.load import state
from megatron_datastates.mcore.training import load as loads
from megatron_datastates.mcore.training import loop as training_loop
from megatron_datastates.pipeline.loading.restoring import PrefixReader
from megatron_datastates.providers import DataLoaderState
from megatron_datastates.providers.energon import to_energon, to_plain


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> int:
        return index


class Stream(torch.utils.data.IterableDataset[int]):
    """Each worker's own numbers, with a position of its own that cannot be found by skipping."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        while self.next < 20:
            self.next += 1
            yield 100 * (worker.id if worker else 0) + self.next

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def new_loader(kind: str, workers: int) -> StatefulDataLoader[int]:
    if kind == "stream":
        return StatefulDataLoader(Stream(), batch_size=2, num_workers=workers)
    generator = torch.Generator().manual_seed(3)
    return StatefulDataLoader(Numbers(), batch_size=2, shuffle=True, num_workers=workers, generator=generator)


def take(loader: Any, batches: int) -> list[list[int]]:
    """Returns the next batches, in as many epochs as it takes, from the start of an iteration."""
    found: list[list[int]] = []
    while len(found) < batches:
        for batch in loader:
            found.append(batch.tolist())
            if len(found) == batches:
                break
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["shuffled", "stream"])
@pytest.mark.parametrize("taken", [0, 3, 6])
def test_the_next_batch_after_a_resume_is_the_one_that_the_saved_run_took_next(
    kind: str, workers: int, taken: int, tmp_path: Path
) -> None:
    saved, resumed = new_loader(kind, workers), new_loader(kind, workers)
    batches = iter(saved)
    for _ in range(taken):
        next(batches)
    ds.save({"w": torch.ones(2), "data": DataLoaderState(saved)}, tmp_path / "c")
    rest = [batch.tolist() for batch in batches]

    weights = torch.zeros(2)
    ds.load(tmp_path / "c", into={"w": weights, "data": DataLoaderState(resumed)})

    assert [batch.tolist() for batch in resumed] == rest
    assert weights.tolist() == [1.0, 1.0]
    if kind == "shuffled" and workers:  # without workers, torchdata 0.11 restores this epoch's order only
        assert take(resumed, 4) == take(saved, 4), "the next epoch differs"
    assert ds.open(tmp_path / "c").index.objects.keys() == {"data.rank-0-of-1"}


def test_a_position_is_the_one_at_the_time_of_the_save(tmp_path: Path) -> None:
    loader = new_loader("shuffled", 0)
    batches = iter(loader)
    next(batches)
    handle = ds.async_save({"data": DataLoaderState(loader)}, tmp_path / "c")
    rest = [batch.tolist() for batch in batches]
    handle.wait()
    resumed = new_loader("shuffled", 0)
    ds.load(tmp_path / "c", into={"data": DataLoaderState(resumed)})
    assert [batch.tolist() for batch in resumed] == rest


class Plain:
    """A loader of the program's own."""

    def __init__(self, position: Any = None) -> None:
        self.position = position

    def state_dict(self) -> Any:
        return self.position

    def load_state_dict(self, state: Any) -> None:
        self.position = state


def save_of(ranks: int, directory: Path) -> None:
    positions = {
        f"rank {rank}": DataLoaderState(Plain({"at": rank}), rank=rank, ranks=ranks) for rank in range(ranks)
    }
    # As ranks of one save: all of them under one name.
    ds.save({"data": _Together(list(positions.values()))}, directory)


class _Together:
    def __init__(self, parts: list[DataLoaderState]) -> None:
        self.parts = parts

    def entries(self) -> Any:
        for part in self.parts:
            yield from part.entries()

    def restore(self, reader: Any) -> None:
        raise NotImplementedError


def test_each_rank_restores_its_own_position(tmp_path: Path) -> None:
    save_of(3, tmp_path / "c")
    for rank in range(3):
        loader = Plain()
        ds.load(tmp_path / "c", into={"data": DataLoaderState(loader, rank=rank, ranks=3, stores=rank == 0)})
        assert loader.position == {"at": rank}


def test_only_ranks_that_store_write_a_position(tmp_path: Path) -> None:
    save_of(1, tmp_path / "c")
    ds.save({"w": 1, "data": DataLoaderState(Plain(), stores=False)}, tmp_path / "d")
    assert ds.open(tmp_path / "d").index.objects.keys() == {"w"}


def test_another_number_of_ranks_fails_the_load_or_starts_from_the_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_of(3, tmp_path / "c")
    loader = Plain("untouched")
    with pytest.raises(
        ProviderError, match=r"'data'.*positions of 3 data-parallel ranks.*run has 2"
    ) as found:
        ds.load(tmp_path / "c", into={"data": DataLoaderState(loader, rank=1, ranks=2)})
    assert isinstance(found.value.__cause__, MismatchError) and loader.position == "untouched"
    ds.load(tmp_path / "c", into={"data": DataLoaderState(loader, rank=1, ranks=2, strict=False)})
    assert "starts from the beginning of its data" in caplog.text and loader.position == "untouched"


def test_a_loader_without_a_position_is_refused() -> None:
    with pytest.raises(TypeError, match="a list cannot return and set its position: expected state_dict"):
        DataLoaderState([1, 2])


# -- attach_dataloader, in a program with a loop of its own ------------------------------------------------


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> LoopDataLoader:
    monkeypatch.setattr(mcore_providers, "_registered", {})
    monkeypatch.setattr(mcore_providers, "_of_loop", {})
    return LoopDataLoader()


@pytest.mark.parametrize("attached", ["before the load", "after the load"])
def test_an_attached_loader_is_restored_whenever_it_is_attached(
    attached: str, loop: LoopDataLoader, tmp_path: Path
) -> None:
    save_of(1, tmp_path / "c")
    loader, reader = Plain(), PrefixReader(ds.open(tmp_path / "c"), "data")
    if attached == "before the load":
        assert not loop.attach(loader, strict=True, restore=True)
        loop.restore(reader)
    else:
        loop.restore(reader)
        assert loop.attach(loader, strict=True, restore=True)
    assert loader.position == {"at": 0}
    assert mcore_providers.registered()["dataloader"] is loop
    assert [entry.value for entry in loop.entries()] == [{"at": 0}]


def test_a_second_loader_is_refused(loop: LoopDataLoader) -> None:
    loop.attach(Plain(), strict=True, restore=True)
    with pytest.raises(ProviderError, match="a data loader is attached already"):
        loop.attach(Plain(), strict=True, restore=True)


@pytest.mark.parametrize("first", ["the loop's", "another"])
def test_another_provider_of_the_loops_name_is_refused(first: str, loop: LoopDataLoader) -> None:
    """One of the two would be saved, and the other's position be lost."""
    steps = [
        lambda: loop.attach(Plain(), strict=True, restore=True),
        lambda: mcore_providers.register([DataLoaderState(Plain())]),
    ]
    for step in steps if first == "the loop's" else reversed(steps):
        step()
    with pytest.raises(ProviderError, match=r"are named 'dataloader'.* for the training"):
        mcore_providers.registered()


def test_where_saves_will_include_a_loader_another_of_its_name_is_refused_at_once(
    loop: LoopDataLoader,
) -> None:
    """Not in the first save, which is when Megatron passes the iterator on."""
    mcore_providers.register([DataLoaderState(Plain())])
    assert "dataloader" in mcore_providers.registered()
    with pytest.raises(ProviderError, match=r"are named 'dataloader'.* for the training"):
        mcore_providers.registered(expects_loader=True)


@pytest.fixture
def load_checkpoint(loop: LoopDataLoader, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Megatron's `load_checkpoint` where it finds no checkpoint, as our wrapper calls it."""
    monkeypatch.setattr(dataloader, "LOOP", loop)
    monkeypatch.setattr(loads, "note_load", lambda *facts: None)

    def call(load_arg: str = "load", *, finetune: bool = False) -> Any:
        arguments = types.SimpleNamespace(finetune=finetune)
        monkeypatch.setattr("megatron.training.checkpointing.get_args", lambda: arguments)
        return loads.wrap_load_checkpoint(lambda load_arg="load": (0, 0), load_arg=load_arg)

    return call


@pytest.mark.parametrize("finetune", [False, True])
def test_a_run_that_restarts_before_its_first_checkpoint_attaches_its_loader_again(
    finetune: bool, loop: LoopDataLoader, load_checkpoint: Callable[..., Any]
) -> None:
    for attempt in ("first", "second"):
        load_checkpoint(finetune=finetune)
        assert not loop.attach(Plain(attempt), strict=True, restore=True)
    assert [entry.value for entry in loop.entries()] == ["second"]
    with pytest.raises(ProviderError, match="a data loader is attached already"):
        loop.attach(Plain(), strict=True, restore=True)


@pytest.mark.parametrize(("name", "is_resume"), [("iter_0000003", True), ("release", False)])
def test_a_release_is_no_run_to_resume(
    name: str, is_resume: bool, loop: LoopDataLoader, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Megatron takes its weights alone, and begins with iteration 0."""
    noted: list[Any] = []
    monkeypatch.setattr(dataloader, "LOOP", loop)
    monkeypatch.setattr(loads, "note_load", lambda *facts: noted.append(facts))
    arguments = types.SimpleNamespace(finetune=False)
    monkeypatch.setattr("megatron.training.checkpointing.get_args", lambda: arguments)

    def original() -> tuple[int, int]:
        state.current().directory = str(tmp_path / name)
        assert state.current().restores_providers() == is_resume
        return 0, 0

    loads.wrap_load_checkpoint(original)
    assert bool(noted) == is_resume, "what follows a release has no ancestor"


def test_a_loader_that_was_attached_before_the_load_stays_attached(
    loop: LoopDataLoader, load_checkpoint: Callable[..., Any]
) -> None:
    loop.attach(Plain("here"), strict=True, restore=True)
    load_checkpoint()
    assert [entry.value for entry in loop.entries()] == ["here"]


def test_a_load_that_a_running_loop_makes_is_followed_by_no_other_loader(
    loop: LoopDataLoader, load_checkpoint: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's RL loop loads its own weights again, after those of the reference model."""
    loop.attach(Plain("here"), strict=True, restore=True)
    monkeypatch.setattr(training_loop, "_loops", 1)
    load_checkpoint()
    loop.drop_replaced()  # as that load does before it restores
    assert [entry.value for entry in loop.entries()] == ["here"]


def test_a_load_outside_of_the_loop_restores_the_loader_that_is_attached(
    loop: LoopDataLoader, load_checkpoint: Callable[..., Any], tmp_path: Path
) -> None:
    save_of(1, tmp_path / "c")
    loader = Plain()
    loop.attach(loader, strict=True, restore=True)
    load_checkpoint()
    loop.restore(PrefixReader(ds.open(tmp_path / "c"), "data"))
    assert loader.position == {"at": 0}
    assert [entry.value for entry in loop.entries()] == [{"at": 0}], "later checkpoints have its position"


def test_a_load_forgets_the_position_of_an_earlier_one(
    loop: LoopDataLoader, load_checkpoint: Callable[..., Any], tmp_path: Path
) -> None:
    save_of(1, tmp_path / "c")
    loop.restore(PrefixReader(ds.open(tmp_path / "c"), "data"))
    load_checkpoint("pretrained_checkpoint")
    assert loop.awaits_loader, "another model's weights say nothing of this run's data"
    load_checkpoint()
    loader = Plain("untouched")
    assert not loop.attach(loader, strict=True, restore=True)
    assert loader.position == "untouched"


@pytest.mark.parametrize(
    ("iterator", "is_refused"),
    [(None, False), ([None, None], False), (iter("ab"), True), ([None, iter("ab")], True)],
)
def test_only_a_rank_with_data_has_a_loader_to_restore(
    iterator: Any, is_refused: bool, loop: LoopDataLoader, tmp_path: Path
) -> None:
    """With virtual pipeline stages, Megatron has a list of iterators, which are None where nobody reads."""
    save_of(1, tmp_path / "c")
    loop.require_restored(iterator)
    loop.restore(PrefixReader(ds.open(tmp_path / "c"), "data"))
    with pytest.raises(ProviderError, match="on 1 of 1 ranks") if is_refused else contextlib.nullcontext():
        loop.require_restored(iterator)


def test_a_position_that_is_loaded_after_a_restart_is_for_the_next_loader(
    loop: LoopDataLoader, load_checkpoint: Callable[..., Any], tmp_path: Path
) -> None:
    save_of(1, tmp_path / "c")
    before, after = Plain("of the attempt before"), Plain()
    loop.attach(before, strict=True, restore=True)
    load_checkpoint()
    loop.drop_replaced()
    loop.restore(PrefixReader(ds.open(tmp_path / "c"), "data"))
    assert loop.attach(after, strict=True, restore=True)
    assert (before.position, after.position) == ("of the attempt before", {"at": 0})


# -- Energon ----------------------------------------------------------------------------------------------


@pytest.fixture
def energon(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module with classes of the two kinds that Energon's states are made of, for where it is absent."""
    module = types.ModuleType("megatron.energon.made_for_a_test")

    @dataclasses.dataclass(slots=True, kw_only=True)
    class WorkerState:
        position: int
        inner: Any

    class Flexible(dict[str, Any]):
        pass

    for kind in (WorkerState, Flexible):
        kind.__module__, kind.__qualname__ = module.__name__, kind.__name__
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


class Energons:
    """A loader with Energon's methods."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def save_state_rank(self) -> Any:
        return self.state

    def restore_state_rank(self, state: Any) -> None:
        self.state = state

    def save_state(self, dst_rank: int) -> Any:
        raise AssertionError("Energon's deprecated method, which gathers from all ranks")

    state_dict = load_state_dict = save_state


def test_energons_states_are_restored_with_their_classes_from_plain_data(
    energon: Any, tmp_path: Path
) -> None:
    inner = energon.Flexible(rng=b"bytes", buffer=[(1, "a"), (2, "b")])
    last = energon.WorkerState(position=5, inner={"by name": energon.WorkerState(position=6, inner=None)})
    states = [energon.WorkerState(position=4, inner=inner), last]
    ds.save({"data": DataLoaderState(Energons(states))}, tmp_path / "c")
    loader = Energons()
    ds.load(tmp_path / "c", into={"data": DataLoaderState(loader)})
    assert loader.state == states
    assert [type(state) for state in loader.state] == [energon.WorkerState] * 2
    assert type(loader.state[0].inner) is energon.Flexible


def test_only_states_of_energon_are_made(energon: Any) -> None:
    state = energon.WorkerState(position=4, inner=None)
    plain = to_plain(state)
    assert to_energon(plain) == state
    for name in ("os:system", "subprocess:Popen", "megatron.energon.absent:State", "builtins:dict"):
        with pytest.raises(UntrustedClassError, match=name):
            to_energon({**plain, "__energon__": name})
    energon.Loader = type("Loader", (), {"__module__": energon.__name__})
    with pytest.raises(UntrustedClassError, match="Loader"):
        to_energon({**plain, "__energon__": f"{energon.__name__}:Loader"})


def test_no_method_of_energons_classes_is_called(energon: Any) -> None:
    called = []
    for kind, method in ((energon.WorkerState, "__post_init__"), (energon.Flexible, "__init__")):
        setattr(kind, method, lambda self, *args, **kwargs: called.append(self))
    energon.WorkerState.__init__ = energon.Flexible.__init__
    plain = {"__energon__": f"{energon.__name__}:WorkerState", "fields": {"position": 4, "inner": None}}
    assert to_energon(plain).position == 4
    assert to_energon({"__energon__": f"{energon.__name__}:Flexible", "items": {"a": 1}}) == {"a": 1}
    assert not called


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "a WorkerState without its values"),
        ({"fields": [4]}, "a WorkerState without its values"),
        ({"fields": {"position": 4}}, "no 'inner' for WorkerState"),
        ({"fields": {"position": 4, "inner": 0, "later": 1}}, r"\['later'\], which WorkerState lacks"),
    ],
)
def test_a_state_that_does_not_fit_its_class_is_refused(
    energon: Any, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(FormatError, match=said):
        to_energon({"__energon__": f"{energon.__name__}:WorkerState", **fields})


def test_a_member_that_is_new_in_a_class_of_energons_has_its_default(energon: Any) -> None:
    @dataclasses.dataclass
    class Later:
        position: int
        more: list[int] = dataclasses.field(default_factory=list)
        limit: int = 7

    Later.__module__, Later.__qualname__, energon.Later = energon.__name__, "Later", Later
    plain = {"__energon__": f"{energon.__name__}:Later", "fields": {"position": 4}}
    assert to_energon(plain) == Later(4, [], 7)


def test_classes_of_others_are_refused_at_the_save(tmp_path: Path) -> None:
    with pytest.raises(SaveFailedError, match=r"object 'data\.rank-0-of-1' was not saved.*Plain"):
        ds.save({"data": DataLoaderState(Plain(Plain()))}, tmp_path / "c")


@pytest.mark.parametrize("workers", [0, 2])
def test_energons_own_loader_resumes_with_the_next_sample(workers: int, tmp_path: Path) -> None:
    pytest.importorskip("megatron.energon")
    from tests.support.energon_data import new_loader as new_energon_loader

    saved, resumed = new_energon_loader(workers), new_energon_loader(workers)
    samples = iter(saved)
    for _ in range(7):
        next(samples)
    ds.save({"data": DataLoaderState(saved)}, tmp_path / "c")
    rest = [next(samples) for _ in range(9)]
    ds.load(tmp_path / "c", into={"data": DataLoaderState(resumed)})
    samples = iter(resumed)
    assert [next(samples) for _ in range(9)] == rest
