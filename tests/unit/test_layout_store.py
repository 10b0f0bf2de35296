"""What rank 0 keeps of layouts: a save with one that it knows merges and hashes nothing."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from megatron_datastates.errors import FormatError
from megatron_datastates.format.index import Index, index_entry
from megatron_datastates.format.manifest import ProviderEntry
from megatron_datastates.format.values import Fragment
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.publishing import layouts
from megatron_datastates.pipeline.publishing.layouts import LayoutStore, encode_providers
from megatron_datastates.pipeline.saver import Saver
from megatron_datastates.pipeline.saving.records import RankRecord, Records
from tests.support.fragments import fragments_of
from tests.support.waiting import eventually
from tests.unit.by_hand import fragment, index_of
from tests.unit.ranks_in_turn import RanksInTurn
from tests.unit.states import State


def record(rank: int, digest: bytes) -> RankRecord:
    return RankRecord(rank, True, 8192, 4096, 7, digest, 0, *[0.0] * 7)


def received(store: LayoutStore, *ranks: Fragment) -> Records:
    """Records of ranks with one fragment each, whose own indexes the store has got."""
    records = []
    for rank, item in enumerate(ranks):
        own = index_of([(item, 0, 4096)]).encode()
        digest = hashlib.sha256(own).digest()[:16]
        store.add(rank, digest, own)
        records.append(record(rank, digest))
    return Records.of(records)


def halves(size: int) -> tuple[Fragment, Fragment]:
    return fragment("w", [2 * size], [0], [size]), fragment("w", [2 * size], [size], [size])


def test_the_index_of_all_ranks_is_what_the_manifest_says_of_it():
    store = LayoutStore()
    found = store.merged(received(store, *halves(4)))
    assert found.entry == index_entry(found.encoded)
    index = Index.decode(found.encoded, "it", 2)
    assert [(e.file, e.offset, e.bytes) for _, e in fragments_of(index.tensor("w"), "w")] == [
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


# -- forgetting --------------------------------------------------------------------------------------------


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets rank 0 keep few indexes beside those of one save."""
    monkeypatch.setattr(layouts, "_SPARE_BYTES", 0)
    monkeypatch.setattr(layouts, "_SPARE_SAVES", 2)


def test_indexes_of_the_last_epoch_are_kept_until_its_saves_are_over(little: None) -> None:
    store = LayoutStore()
    saves = [received(store, *halves(size)) for size in range(4, 8)]
    store.merged(saves[0])
    digest, listed = encode_providers([ProviderEntry(name="own", kind="Own", notes={})])
    store.add_providers(digest, listed)
    user = Records.of([saves[0][0]._replace(providers_digest=digest)])
    epoch = store.begin_use()
    store.end_use(store.begin_use(), [b"known"])
    assert store.known == {b"known"} and store.should_forget()
    for _ in range(2):  # a second save of that epoch does not end the next one
        store.forget(epoch)
        assert not store.known and not store.should_forget()
    for records in saves:
        store.merged(records)
    assert [one.name for one in store.providers(user)] == ["own"]
    more = [received(store, *halves(size)) for size in range(8, 12)]
    assert not store.should_forget(), "a save under way relies on the last epoch"
    store.end_use(epoch, [b"late"])
    assert not store.known, "all have forgotten what that save used"
    assert store.should_forget()
    store.forget(store.begin_use())
    store.merged(more[1])
    with pytest.raises(KeyError):
        store.merged(Records.of([saves[3][0]]))
    with pytest.raises(KeyError):
        store.providers(user)


def test_a_small_save_does_not_have_a_large_structure_sent_again(little: None) -> None:
    store = LayoutStore()
    large = received(store, *halves(4), *(fragment(f"v{i}", [4], [0], [4]) for i in range(20)))
    assert not store.should_forget(), "nothing was merged yet"
    store.merged(large)
    small = received(store, fragment("w", [4], [0], [4]))
    for _ in range(2):
        store.merged(small)
        assert not store.should_forget()


def test_lists_of_providers_count(little: None) -> None:
    store = LayoutStore()
    store.merged(received(store, *halves(4)))
    for number in range(100):
        entry = ProviderEntry(name="own", kind="Own", notes={"step": str(number)})
        store.add_providers(*encode_providers([entry]))
        store.add_providers(*encode_providers([entry]))
    assert store.should_forget()


def changing(number: int, rank: int) -> State:
    """Returns a state whose structure changes, but for every third number; the second rank's never does."""
    size = 300 if rank or number % 3 == 0 else 300 + number
    tensors = {f"w{rank}.{i}": torch.full((size,), float(number + i)) for i in range(8)}
    return State(tensors, {f"n{rank}": number})


@pytest.mark.parametrize("failing", [None, 7], ids=["", "one fails"])
def test_what_is_known_of_changing_structures_stays_bounded(
    failing: int | None, little: None, tmp_path: Path
) -> None:
    """Saves overlap: some are under way, and rely on what all ranks forget meanwhile."""
    faults = {} if failing is None else {"faults": f"sync:{failing + 1}:EIO"}
    ranks = RanksInTurn(2, own=[{}, faults])
    begun: list[list[Publication]] = []
    most = 0
    for number in range(60):
        begun.append(
            [
                saver.start(tmp_path / str(number), changing(number, at))
                for at, saver in enumerate(ranks.savers)
            ]
        )
        under_way = [saves for saves in begun if saves[0].outcome is Outcome.PENDING]
        for publication in reversed(under_way[0]):
            publication.poll()
        for publication in [one for saves in begun[-4:] for one in saves]:
            eventually(lambda save=publication.save: save.is_durable or save.failure is not None)
        most = max(most, ranks.savers[0].session.layouts._bytes)

    def last_is_over() -> bool:
        for publication in reversed(begun[-1]):
            publication.poll()
        return begun[-1][0].outcome is not Outcome.PENDING

    eventually(last_is_over)
    outcomes = [saves[0].outcome for saves in begun]
    assert outcomes.count(Outcome.FAILED) == (failing is not None)
    assert outcomes.count(Outcome.PUBLISHED) == 60 - (failing is not None)
    epochs = [saver.session.layouts.epoch for saver in ranks.savers]
    assert epochs[0] == epochs[1] >= 3
    one = len(begun[-1][0].save.plan.layout.index)  # type: ignore[union-attr]
    assert most < 20 * one and max(len(saver.session.layouts.known) for saver in ranks.savers) < 20
    for number, outcome in enumerate(outcomes):
        if outcome is Outcome.PUBLISHED:
            checkpoint = Checkpoint.open(tmp_path / str(number))
            for rank in range(2):
                for key, expected in changing(number, rank)._tensors.items():
                    assert torch.equal(checkpoint.read_tensor(key), expected)
    ranks.close()


def test_tensors_that_a_runs_checkpoint_lacks_and_the_one_before_had_are_named(
    tmp_path: Path, saver: Saver, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings(folder: str, *names: str) -> list[str]:
        caplog.clear()
        state = State({name: torch.zeros(3) for name in names})
        assert saver.start(tmp_path / folder, state).wait() is Outcome.PUBLISHED
        return [record.message for record in caplog.records if "lacks tensors" in record.message]

    assert warnings("run/iter_0000001", "a", "b", "c") == []
    (said,) = warnings("run/iter_0000002", "a")
    assert said.endswith("iter_0000002 lacks tensors that the one before it had: 'b', 'c'")
    assert warnings("run/iter_0000003", "a") == []
    assert warnings("run/iter_0000004", "b", "a") == []
    assert warnings("other/iter_0000004", "d") == []
    assert warnings("run/iter_0000005", "a", "b", "d") == []
    assert warnings("run/of my own", "a") == []
