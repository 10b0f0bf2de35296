"""Objects without a value, which are one entry of a state, are stored as each of them would be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.format.tail import Kind
from megatron_datastates.pipeline.saving import tail
from megatron_datastates.pipeline.saving.plans import tail_items
from megatron_datastates.pipeline.upkeep.verify import verify
from megatron_datastates.providers.base import EmptyObjects, Entry, StateProvider, StateReader
from megatron_datastates.providers.collect import collect
from megatron_datastates.providers.objects import ObjectSource
from megatron_datastates.providers.transforms import Compressed
from tests.unit.states import SMALL


class Entries:
    """A provider of these entries."""

    def __init__(self, *entries: Entry) -> None:
        self._entries = entries
        self.restored: dict[str, Any] = {}

    def entries(self) -> Iterator[Entry]:
        yield from self._entries

    def restore(self, reader: StateReader) -> None:
        self.restored = {key: reader.read_object(key) for key in reader.objects}


def empty(*numbers: int) -> EmptyObjects:
    return EmptyObjects(tuple(f"{number}._extra_state" for number in numbers))


def restored(provider: Entries, state: Mapping[str, StateProvider], directory: Path) -> dict[str, Any]:
    ds.save(dict(state), directory, **SMALL)
    ds.load(directory, into=dict(state))
    return provider.restored


MIXED = (ObjectSource("a", {"x": 1}), empty(0, 1, 2), ObjectSource("b", [2]), empty(3), empty(), empty(4))
VALUES = {"a": {"x": 1}, "b": [2], **{f"{number}._extra_state": [None] for number in range(5)}}


@pytest.mark.parametrize("most", [1, 2, 1000])
def test_they_come_back_among_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(tail, "_MOST_EMPTY", most)
    provider = Entries(*MIXED)
    assert restored(provider, {"one": provider, "other": Entries(empty(7))}, tmp_path / "0") == VALUES
    assert verify(tmp_path / "0").good


def test_transformations_encode_them_one_by_one(tmp_path: Path) -> None:
    provider = Entries(*MIXED)
    assert restored(provider, {"one": Compressed(provider)}, tmp_path / "0") == VALUES


def test_trees_of_providers_keep_their_keys(tmp_path: Path) -> None:
    provider = Entries(*MIXED)
    assert restored(provider, {"outer": {"inner": provider, "w": torch.ones(2)}}, tmp_path / "0") == VALUES


def test_a_layout_knows_them_as_objects() -> None:
    state = collect({"": Entries(*MIXED), "own": Entries(empty(8, 9))})
    keys = ["a", *map("{}._extra_state".format, range(3)), "b", "3._extra_state", "4._extra_state"]
    keys += ["own.8._extra_state", "own.9._extra_state"]
    assert [(item.kind, item.key) for item in tail_items(state)] == [(Kind.OBJECT, key) for key in keys]
    assert state.tail_keys == keys and list(state.others()) == [0, 4]
    assert [(part.first_tail, part.end_tail) for part in state.by_provider] == [(0, 7), (7, 9)]


def test_none_of_them_are_no_entry(tmp_path: Path) -> None:
    provider = Entries(ObjectSource("a", 1), EmptyObjects(()))
    assert restored(provider, {"one": provider, "w": Entries(EmptyObjects(()))}, tmp_path / "0") == {"a": 1}


def test_a_report_counts_them(tmp_path: Path) -> None:
    handle = ds.async_save({"one": Entries(*MIXED)}, tmp_path / "0", **SMALL)
    handle.wait()
    assert handle.report["providers"]["one"]["objects"] == len(VALUES)
