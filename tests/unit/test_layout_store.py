"""What rank 0 keeps of layouts: a save with one that it knows merges and hashes nothing."""

from __future__ import annotations

import hashlib

import pytest

from megatron_datastates.errors import FormatError
from megatron_datastates.format.index import Index, index_entry
from megatron_datastates.format.values import Fragment
from megatron_datastates.pipeline import layouts
from megatron_datastates.pipeline.layouts import LayoutStore
from megatron_datastates.pipeline.records import RankRecord
from tests.unit.by_hand import fragment, index_of


def record(rank: int, digest: bytes) -> RankRecord:
    return RankRecord(rank, True, 8192, 4096, 7, digest, 0, *[0.0] * 7)


def received(store: LayoutStore, *ranks: Fragment) -> list[RankRecord]:
    """Records of ranks with one fragment each, whose own indexes the store has got."""
    records = []
    for rank, item in enumerate(ranks):
        own = index_of([(item, 0, 4096)]).encode()
        digest = hashlib.sha256(own).digest()[:16]
        store.add(rank, digest, own)
        records.append(record(rank, digest))
    return records


def halves(size: int) -> tuple[Fragment, Fragment]:
    return fragment("w", [2 * size], [0], [size]), fragment("w", [2 * size], [size], [size])


def test_the_index_of_all_ranks_is_what_the_manifest_says_of_it():
    store = LayoutStore()
    found = store.merged(received(store, *halves(4)))
    assert found.entry == index_entry(found.encoded)
    index = Index.decode(found.encoded, "it", 2)
    assert [(e.file, e.offset, e.bytes) for _, e in index.tensor("w").fragments("w")] == [
        (0, 4096, 4), (1, 4096, 4)
    ]  # fmt: skip


def test_layouts_that_alternate_are_merged_once(monkeypatch):
    store = LayoutStore()
    saves = [received(store, *halves(size)) for size in (4, 5)]
    first = [store.merged(records) for records in saves]
    monkeypatch.setattr(layouts, "merge_indexes", None)
    monkeypatch.setattr(layouts, "index_entry", None)
    for _ in range(3):
        assert [store.merged(records) for records in saves] == first


def test_only_the_layouts_used_last_are_kept():
    store = LayoutStore()
    saves = [received(store, *halves(size)) for size in range(4, 9)]
    names = [[store.merged(records).entry.name for records in saves] for _ in range(2)]
    assert names[0] == names[1]
    assert len(store._merged) == layouts._KEPT_INDEXES


def test_the_same_layouts_on_other_ranks_are_another_checkpoint():
    store = LayoutStore()
    one, two = halves(4)
    names = {store.merged(received(store, *ranks)).entry.name for ranks in ((one, two), (two, one))}
    assert len(names) == 2


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ((fragment("w", [9], [0], [4]), fragment("w", [9], [4], [4])), "'w' has holes: 8 elements"),
        ((fragment("w", [8], [0], [5]), fragment("w", [8], [4], [4])), r"both hold the element at \(4,\)"),
        ((fragment("w", [8], [0], [4]), fragment("w", [9], [4], [4])), "'w' disagree: .* file 0, .* file 1"),
        ((fragment("w", [8], [0], [4]), Fragment("w", "int8", (8,), (4,), (4,))), "'w' disagree.*int8"),
        ((fragment("w", [8], [0], [8]), fragment("v", [8], [4], [5])), "'v' does not fit"),
    ],
)  # fmt: skip
def test_ranks_that_do_not_make_a_whole_state_are_refused_every_time(ranks, why):
    store = LayoutStore()
    records = received(store, *ranks)
    for _ in range(2):
        with pytest.raises(FormatError, match=why):
            store.merged(records)
