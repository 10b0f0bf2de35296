"""Prune in an object store: whole checkpoints go, manifest first; abandoned uploads are aborted."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

pytest.importorskip("multistorageclient")
pytest.importorskip("moto")

import torch

import megatron_datastates as ds
from megatron_datastates import stores
from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import StorageError
from megatron_datastates.format.directory import REMOVAL_NAME, TRACKER_NAME
from megatron_datastates.format.values import MANIFEST_NAME, SaveId
from megatron_datastates.pipeline.runs.runs import find_iterations
from megatron_datastates.pipeline.upkeep import left_overs
from megatron_datastates.pipeline.upkeep import prune as pruning
from megatron_datastates.pipeline.upkeep.left_overs import remove_left_overs
from megatron_datastates.pipeline.upkeep.prune import prune
from megatron_datastates.pipeline.upkeep.prune_objects import ObjectRemoval
from megatron_datastates.pipeline.upkeep.retention import TRACKED_NEXT, RetentionRules, plan_prune
from megatron_datastates.pipeline.upkeep.verify import verify
from tests.support.object_store import (
    EXPIRED,
    RUN,
    UNAVAILABLE,
    ObjectStore,
    begin_upload,
    make_older,
    unfinished,
)
from tests.unit.command import run
from tests.unit.states import SMALL
from tests.unit.test_object_store import store  # noqa: F401

ROOT = stores.path_of(RUN)
LAST = RetentionRules(keep_last=1)
OF_ANOTHER_SAVE = SaveId(1, 1).data_file_name(0)


def place(number: int) -> Path:
    return ROOT / f"iter_{number:07d}"


def put(number: int, local: Path) -> None:
    """Copies a checkpoint to the store, as its two hours' age and the order of a drain have it."""
    folder = local / f"iter_{number:07d}"
    if not folder.exists():
        ds.save({"a": torch.arange(number), "o": number}, folder, **SMALL)
        (folder / "metadata.json").write_text('{"sharded_backend": "datastates"}')
    for path in sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST_NAME):
        stores.write(place(number) / path.name, path.read_bytes())
    make_older(f"run/{folder.name}/", 7200)


@pytest.fixture
def far(store: ObjectStore, tmp_path: Path) -> ObjectStore:  # noqa: F811
    for number in (100, 200, 300):
        put(number, tmp_path)
    stores.write(ROOT / TRACKER_NAME, b"300")
    return store


def names() -> set[str]:
    return {one.name.partition("/")[0] for one in stores.all_below(ROOT)} - {TRACKER_NAME}


def reasons(rules: RetentionRules = LAST) -> dict[int, str]:
    return {one.number: why for one, why in plan_prune(ROOT, rules).kept}


def test_rules_are_those_of_directories(far: ObjectStore) -> None:
    assert [one.number for one in plan_prune(ROOT, RetentionRules(keep_every=200)).removed] == [100]
    stores.write(ROOT / TRACKER_NAME, b"100")
    assert reasons() == {100: "the tracker names it", 300: "the newest complete one"}
    stores.write(place(50) / ".metadata", b"torch_dist")
    assert reasons()[50] == "its format is torch_dist"
    (data,) = (name for name in stores.names_below(place(200)) if name.startswith("data-"))
    stores.write(place(200) / data, b"short")
    assert reasons()[200] == "damaged: see datastates verify"


def test_the_command_lists_and_then_removes(far: ObjectStore) -> None:
    stores.write(place(100) / "modelopt/state", b"in a folder of its own")
    code, out, err = run("prune", RUN, "--keep-last", "1")
    assert (code, err) == (0, "") and f"would remove  {place(100)}" in out and "Nothing was removed" in out
    assert names() == {"iter_0000100", "iter_0000200", "iter_0000300"}
    code, out, err = run("prune", RUN, "--keep-last", "1", "--yes")
    assert code == 0 and "removed all 2 checkpoints" in out, err
    assert names() == {"iter_0000300"}
    assert verify(place(300)).faults == []


POINTS = [
    ("remove manifest", 1),
    ("remove file", 1),
    *(
        pytest.param(point, nth, marks=pytest.mark.long)
        for point, nth in (("write removal", 1), ("remove file", 2), ("remove directory", 1))
    ),
]


@pytest.mark.parametrize(("point", "nth"), POINTS)
def test_what_an_interrupted_call_leaves_the_next_one_removes(
    point: str, nth: int, far: ObjectStore, tmp_path: Path
) -> None:
    with pytest.raises(StorageError, match="injected"):
        prune(ROOT, LAST, faults=f"{point}:{nth}:EIO")
    is_whole = point in ("write removal", "remove manifest")
    assert [one.complete for one in find_iterations(ROOT)] == [is_whole, True, True]
    for number in (100, 200, 300) if is_whole else (200, 300):
        assert verify(place(number), quick=True).faults == []
    assert [one.number for one in prune(ROOT, LAST)] == [100, 200]
    assert names() == {"iter_0000300"}


@pytest.mark.long
def test_a_call_that_is_killed_leaves_nothing_that_no_later_one_knows_as_ours(far: ObjectStore) -> None:
    """Of a save that was not published, names alone show whose it is: what others wrote goes first."""
    for name in stores.names_below(place(100)):
        if not name.startswith("data-"):
            stores.remove(place(100) / name)
    stores.write(place(100) / "modelopt/state", b"in a folder of its own")
    make_older("run/", 7200)
    stores.write(ROOT / TRACKER_NAME, b"300")
    with pytest.raises(StorageError, match="injected"):
        prune(ROOT, LAST, faults="remove file:2:EIO")
    assert [one.number for one in prune(ROOT, LAST)] == [100, 200]
    assert names() == {"iter_0000300"}


@pytest.mark.long
def test_what_an_interrupted_call_has_noted_is_removed_though_no_listing_shows_it(
    far: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StorageError, match="injected"):
        prune(ROOT, LAST, faults="remove file:2:EIO")
    (one, *_) = plan_prune(ROOT, LAST).removed
    with monkeypatch.context() as patch:
        patch.setattr(stores, "all_below", lambda path: [])
        assert ObjectRemoval(one).run(3600.0) is None
    assert names() == {"iter_0000200", "iter_0000300"}


def test_a_store_that_does_not_answer_is_no_reason_to_remove(far: ObjectStore) -> None:
    for request in (f"(GET|HEAD) .*iter_0000100/{MANIFEST_NAME}", f"(GET|HEAD) .*{TRACKER_NAME}", "GET list"):
        far.fail(request, UNAVAILABLE)
        with pytest.raises(StorageError, match=r"SlowDown|cannot be read|cannot be listed"):
            prune(ROOT, LAST)
        far.heal()
        assert names() == {"iter_0000100", "iter_0000200", "iter_0000300"}
        assert all(one.complete for one in find_iterations(ROOT))


@pytest.mark.long
def test_a_checkpoint_of_torch_dist_over_ours_is_not_removed_on_a_guess(far: ObjectStore) -> None:
    (one, *_) = plan_prune(ROOT, LAST).removed
    stores.write(place(100) / "metadata.json", b'{"sharded_backend": "torch_dist"}')
    stores.write(place(100) / ".metadata", b"later than our manifest")
    make_older("run/", 7200)
    assert reasons()[100] == "its format is torch_dist"
    assert ObjectRemoval(one).run(3600.0) == "its format is torch_dist now"
    for request in ("GET .*iter_0000100/metadata.json", "HEAD .*iter_0000100/.metadata"):
        far.fail(request, UNAVAILABLE)
    with pytest.raises(StorageError, match=f"^{place(100)}/metadata.json cannot be read: .* 503"):
        prune(ROOT, LAST)
    far.heal()
    assert {".metadata", MANIFEST_NAME} < set(stores.names_below(place(100)))


def test_refusals_name_the_object_and_advise_nothing(far: ObjectStore) -> None:
    far.fail(f"HEAD .*iter_0000200/{MANIFEST_NAME}", EXPIRED)
    with pytest.raises(StorageError, match=f"^{place(200)}/{MANIFEST_NAME} cannot be read: the object store"):
        plan_prune(ROOT, LAST)
    far.heal()
    far.fail(f"HEAD .*{TRACKER_NAME}", EXPIRED)
    with pytest.raises(StorageError, match=r"tracker .* cannot be read: the object store refuses") as refused:
        plan_prune(ROOT, LAST)
    assert "remove" not in str(refused.value)


def test_objects_that_a_listing_does_not_show_are_removed(
    far: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one, *_) = plan_prune(ROOT, LAST).removed
    with monkeypatch.context() as patch:
        patch.setattr(stores, "all_below", lambda path: [])
        assert ObjectRemoval(one).run(3600.0) is None
    assert names() == {"iter_0000200", "iter_0000300"}


@pytest.mark.long
def test_a_checkpoint_that_is_published_anew_meanwhile_stays(far: ObjectStore, tmp_path: Path) -> None:
    (one, *_) = plan_prune(ROOT, LAST).removed
    removal = ObjectRemoval(one)
    replacement = tmp_path / "new" / "iter_0000100"
    put(100, replacement.parent)
    assert removal.run(3600.0) == "a save has published into it meanwhile"
    assert verify(place(100)).faults == [] and REMOVAL_NAME not in stores.names_below(place(100))
    stores.write(ROOT / TRACKER_NAME, b"100")
    assert ObjectRemoval(one).run(3600.0) == "the tracker names it"


def test_what_was_published_anew_since_the_plan_may_be_tracked_next(
    far: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_prune(ROOT, LAST)
    assert [one.number for one in plan.removed] == [100, 200]
    for name, age in ((TRACKER_NAME, 9000), ("iter_0000100/", 9500)):
        make_older(f"run/{name}", age)
    put(200, tmp_path / "new")  # two hours ago
    monkeypatch.setattr(pruning, "plan_prune", lambda *_: plan)
    rules, kept = RetentionRules(keep_last=1, min_age_seconds=8000.0), list[str]()
    assert [one.number for one in prune(ROOT, rules, stays=lambda one, why: kept.append(why))] == [100]
    assert kept == [TRACKED_NEXT] and verify(place(200)).faults == []


def test_what_a_save_may_be_writing_stays(far: ObjectStore) -> None:
    stores.write(place(100) / OF_ANOTHER_SAVE, b"young")
    begin_upload(f"run/iter_0000200/{OF_ANOTHER_SAVE}")
    why = reasons()
    assert why[100].startswith(f"a save into it may be under way: {OF_ANOTHER_SAVE}, which no manifest names")
    assert f"{OF_ANOTHER_SAVE}, which is being uploaded, is " in why[200]
    assert prune(ROOT, LAST) == []
    make_older("run/", 7200)
    assert [one.number for one in prune(ROOT, LAST)] == [100, 200]
    assert names() == {"iter_0000300"}


def test_what_a_save_has_begun_to_write_since_the_plan_stays(far: ObjectStore) -> None:
    first, second = plan_prune(ROOT, LAST).removed
    stores.write(place(100) / OF_ANOTHER_SAVE, b"young")
    begin_upload(f"run/iter_0000200/{OF_ANOTHER_SAVE}")
    for one in (first, second):
        assert f"a save into it may be under way: {OF_ANOTHER_SAVE}" in (ObjectRemoval(one).run(3600.0) or "")
        assert one.path.joinpath(MANIFEST_NAME).is_file()


def test_a_checkpoint_published_anew_during_its_removal_stays(far: ObjectStore, tmp_path: Path) -> None:
    class Publishing(Faults):
        def point(self, point: str) -> None:
            if point == "remove file" and not (tmp_path / "new").exists():
                put(100, tmp_path / "new")

    (one, *_) = plan_prune(ROOT, LAST).removed
    assert ObjectRemoval(one, Publishing("")).run(3600.0) is None
    assert verify(place(100)).faults == []


def test_left_overs_and_abandoned_uploads_are_removed(far: ObjectStore) -> None:
    left = place(300) / OF_ANOTHER_SAVE
    stores.write(left, b"of a killed save")
    begin_upload(f"run/iter_0000300/{SaveId(1, 2).data_file_name(1)}")
    begin_upload(f"run/iter_0000400/{OF_ANOTHER_SAVE}")  # nothing else is there
    begin_upload("run/iter_0000300/somebody-elses")
    begin_upload(f"run2/iter_0000300/{OF_ANOTHER_SAVE}")  # of another run
    code, out, _ = run("prune", RUN, "--keep-last", "3", "--yes", "--json")
    assert json.loads(out)["left_overs"] == [] and len(unfinished()) == 4, "they are young"

    make_older("run", 7200)
    code, out, err = run("prune", RUN, "--keep-last", "3")
    assert code == 0 and f"would remove  {left}" in out and "an upload that has not ended; 2 h old" in out, (
        err
    )
    assert f"would abort  {place(400) / OF_ANOTHER_SAVE}  5.24 MB" in out
    code, out, err = run("prune", RUN, "--keep-last", "3", "--yes")
    assert code == 0 and "and all 3 left-over files" in out, err
    assert unfinished() == ["run/iter_0000300/somebody-elses", f"run2/iter_0000300/{OF_ANOTHER_SAVE}"]
    assert not left.is_file() and verify(place(300)).faults == []


@pytest.mark.long
def test_a_file_stays_while_another_one_of_its_save_is_uploaded(far: ObjectStore) -> None:
    left = place(300) / OF_ANOTHER_SAVE
    stores.write(left, b"of one node")
    make_older("run", 7200)
    plan = plan_prune(ROOT, RetentionRules(keep_last=3))
    begin_upload(f"run/iter_0000300/{SaveId(1, 1).data_file_name(1)}")  # by another node
    assert plan_prune(ROOT, RetentionRules(keep_last=3)).left_overs == []
    assert [file.path for file in plan.left_overs] == [left] and remove_left_overs(plan.left_overs) == []
    manifest = left_overs.content_of(place(300) / MANIFEST_NAME)
    assert not left_overs._may_go(left, manifest, 3600.0) and left.is_file()


@pytest.mark.long
def test_uploads_of_a_run_that_is_the_root_of_a_profile_are_found(
    far: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = json.loads((tmp_path / "msc.json").read_text())
    at_run = copy.deepcopy(settings["profiles"]["store"])
    at_run["storage_provider"]["options"]["base_path"] += "/run"
    settings["profiles"]["at-run"] = at_run
    (tmp_path / "more.json").write_text(json.dumps(settings))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "more.json"))
    begin_upload(f"run/iter_0000400/{OF_ANOTHER_SAVE}")
    make_older("run", 7200)
    root = stores.path_of("msc://at-run/")
    plan = plan_prune(root, RetentionRules(keep_last=3))
    assert [file.path for file in plan.left_overs] == [root / "iter_0000400" / OF_ANOTHER_SAVE]
    assert len(remove_left_overs(plan.left_overs)) == 1 and unfinished() == []


@pytest.mark.long
def test_an_upload_that_goes_on_is_not_aborted(far: ObjectStore) -> None:
    begin_upload(f"run/iter_0000400/{OF_ANOTHER_SAVE}")
    make_older("run", 7200)
    plan = plan_prune(ROOT, RetentionRules(keep_last=3))
    assert len(plan.left_overs) == 1
    make_older("run", 0)  # a part has come
    assert remove_left_overs(plan.left_overs) == [] and len(unfinished()) == 1
