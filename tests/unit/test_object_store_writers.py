"""Commands that write into an object store: two of them at once, and failures in the middle."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import BinaryIO

import pytest

pytest.importorskip("multistorageclient")
pytest.importorskip("moto")

from megatron_datastates import stores
from megatron_datastates.convert import job, uploads
from megatron_datastates.convert import run as conversions
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.sinks.target import publish_on_exit
from megatron_datastates.convert.weights_only import UnfinishedError, drop_optimizer, plan_drop
from megatron_datastates.errors import DataStatesError, StorageError
from megatron_datastates.format.directory import INTEGRITY_NAME
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.values import MANIFEST_NAME, is_data_file_name
from megatron_datastates.pipeline.upkeep.left_overs import remove_left_overs
from megatron_datastates.pipeline.upkeep.retention import RetentionRules, plan_prune
from megatron_datastates.pipeline.upkeep.verify import verify
from tests.support.object_store import EXPIRED, ObjectStore
from tests.unit.command import run
from tests.unit.converting import contents
from tests.unit.hf_models import LLAMA, arguments, state
from tests.unit.hf_models import save as save_model
from tests.unit.test_object_store import store as store
from tests.unit.test_object_store_writing import POINTS, ROOT, THERE
from tests.unit.test_object_store_writing import scratch as scratch
from tests.unit.test_object_store_writing import trained as trained
from tests.unit.test_weights_only import weights

TARGET = stores.path_of("msc://store/made by two")
NAMES = ("a.safetensors", "b.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json")


def make(folder: Path, content: str) -> None:
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_text(f"{content} {name}")


def there() -> dict[str, str]:
    return {one.name: stores.read_whole(TARGET / one.name).decode() for one in stores.all_below(TARGET)}


def expected(content: str) -> dict[str, str]:
    return {name: f"{content} {name}" for name in NAMES}


@pytest.mark.long
def test_what_was_made_meanwhile_is_not_written_over(store: ObjectStore, scratch: Path) -> None:
    with pytest.raises(StorageError, match="exists"), publish_on_exit(TARGET) as first:
        make(first, "first")
        with publish_on_exit(TARGET) as second:
            make(second, "second")
    assert there() == expected("second")
    with pytest.raises(StorageError, match="exists"), publish_on_exit(TARGET / "file") as one:
        one.write_text("first")
        stores.write(TARGET / "file", b"second")
    assert there()["file"] == "second"
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("number", [0, 1, 4])
def test_of_two_calls_that_upload_at_once_only_one_goes_on(
    number: int, store: ObjectStore, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploaded, upload, checked = [], stores.upload, stores.size_of_object

    def nobody_there(path: Path) -> int:
        if path == TARGET:  # each had asked before the other began
            raise FileNotFoundError
        return checked(path)

    def upload_and_be_overtaken(path: Path, source: BinaryIO) -> None:
        uploaded.append(path)
        if len(uploaded) == number + 1:
            with monkeypatch.context() as patched:
                patched.setattr("megatron_datastates.convert.sinks.target.refuse_target", lambda *_, **__: 0)
                with pytest.raises(StorageError, match="another call"), publish_on_exit(TARGET) as second:
                    make(second, "second")
        upload(path, source)

    monkeypatch.setattr(stores, "size_of_object", nobody_there)
    monkeypatch.setattr(stores, "upload", upload_and_be_overtaken)
    with publish_on_exit(TARGET) as first:
        make(first, "first")
    assert len(uploaded) == len(NAMES)
    assert there() == expected("first"), "no mixture, and no claim"


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(NAMES)))
def test_a_failed_upload_leaves_nothing(number: int, store: ObjectStore, scratch: Path) -> None:
    name = [*sorted(NAMES[:2]), *sorted(NAMES[2:], key=lambda name: (name == "config.json", name))][number]
    store.fail(f"PUT .*/{name}", EXPIRED)
    with pytest.raises(PermissionError), publish_on_exit(TARGET) as folder:
        make(folder, "only")
    puts = [path.rpartition("/")[2] for kind, path in store.log if kind == "PUT"]
    assert puts[number + 1] == name and puts[0].startswith(".datastates-claim-")
    assert there() == {}
    store.heal()
    with publish_on_exit(TARGET) as folder:
        make(folder, "only")
    assert there() == expected("only")
    assert not list(scratch.iterdir())


@pytest.mark.long
def test_a_checkpoint_that_was_made_meanwhile_stays(
    store: ObjectStore, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in (1, 2):
        stored = arguments(LLAMA, seed=seed)
        save_model(tmp_path / str(seed) / "iter_0000001", stored, state(stored))
    target, upload = "msc://store/converted/iter_0000001", uploads.upload_files

    def upload_and_be_overtaken(*args: object) -> None:
        monkeypatch.setattr(job, "upload_files", upload)
        assert run("convert", tmp_path / "2" / "iter_0000001", target)[0] == 0
        upload(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(job, "upload_files", upload_and_be_overtaken)
    code, out, err = run("convert", tmp_path / "1" / "iter_0000001", target)
    assert (code, out) == (2, "") and f"{target} exists: choose another target" in err
    assert verify(target).faults == [] and run("diff", tmp_path / "2" / "iter_0000001", target)[0] == 0
    names = {one.name for one in stores.all_below(stores.path_of(target))}
    manifest = Manifest.decode(stores.read_whole(stores.path_of(target) / MANIFEST_NAME), "")
    assert set(filter(is_data_file_name, names)) == {file.name for file in manifest.files}
    assert not list(scratch.iterdir())


def test_of_two_conversions_at_once_one_at_most_goes_on(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in (1, 2):
        stored = arguments(LLAMA, seed=seed)
        save_model(tmp_path / str(seed) / "iter_0000001", stored, state(stored))
    target, others = "msc://store/converted/iter_0000001", list[str]()

    class Overtaken(uploads.DirectoryPublisher):
        def publish(self) -> bool:
            monkeypatch.undo()
            code, _, err = run("convert", tmp_path / "2" / "iter_0000001", target)
            others.append(err)
            assert code == 2
            return super().publish()

    monkeypatch.setattr(uploads, "DirectoryPublisher", Overtaken)
    assert run("convert", tmp_path / "1" / "iter_0000001", target)[0] == 0
    assert f"{target} exists, with .datastates-claim-" in others[0]
    assert run("diff", tmp_path / "1" / "iter_0000001", target)[0] == 0
    assert not [one.name for one in stores.all_below(stores.path_of(target)) if "claim" in one.name]


@pytest.mark.long
def test_a_conversion_writes_into_nothing_else(store: ObjectStore, tmp_path: Path) -> None:
    stored = arguments(LLAMA, seed=1)
    save_model(tmp_path / "iter_0000001", stored, state(stored))
    stores.write(stores.path_of("msc://store/model/config.json"), b"{}")
    code, _, err = run("convert", tmp_path / "iter_0000001", "msc://store/model")
    assert code == 2 and "msc://store/model exists, with config.json: choose another target" in err
    assert store.requests["PUT"] == 1


@pytest.mark.long
def test_a_bucket_that_does_not_exist_is_named_before_anything_is_made(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = arguments(LLAMA, seed=1)
    save_model(tmp_path / "iter_0000001", stored, state(stored))
    monkeypatch.setattr(conversions, "convert", lambda *_, **__: pytest.fail("it was converted first"))
    configured = json.loads(Path(os.environ["MSC_CONFIG"]).read_text())
    other = json.loads(json.dumps(configured["profiles"]["store"]))
    other["storage_provider"]["options"]["base_path"] = "nobucket"
    (tmp_path / "msc.json").write_text(json.dumps({"profiles": {"nobucket": other}}))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    code, _, err = run("convert", tmp_path / "iter_0000001", "msc://nobucket/run/iter_0000001")
    assert code == 2 and "iter_0000001: NoSuchBucket: " in err


@pytest.mark.long
@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "later"])
def test_a_manifest_that_arrives_after_all_finds_its_index(
    is_late: bool, store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = arguments(LLAMA, seed=1)
    save_model(tmp_path / "run" / "iter_0000001", stored, state(stored))
    target, write, late = "msc://store/converted/iter_0000001", stores.write, []

    def write_and_time_out(path: Path, data: bytes) -> None:
        if path.name == MANIFEST_NAME:
            late.append((path, data))
            if not is_late:
                write(path, data)
            store.fail(f"(HEAD|GET) .*/{MANIFEST_NAME}", EXPIRED)
            raise OSError(5, "timed out", str(path))
        write(path, data)

    monkeypatch.setattr(stores, "write", write_and_time_out)
    code, _, err = run("convert", tmp_path / "run" / "iter_0000001", target)
    assert code == 2 and "timed out" in err
    store.heal()
    if is_late:
        write(*late[0])
    assert verify(target).faults == [] and run("diff", tmp_path / "run" / "iter_0000001", target)[0] == 0


# -- prune --drop-optimizer -----------------------------------------------------------------------------


def drop(faults: str = "") -> None:
    plan = plan_drop(stores.path_of(THERE))
    assert plan is not None
    drop_optimizer(plan, faults=faults)


def sums() -> tuple[dict[str, str], dict[str, str]]:
    """Returns the stored SHA-256 sums, and those of what is there."""
    place = stores.path_of(THERE)
    every = {one.name: stores.read_whole(place / one.name) for one in stores.all_below(place)}
    stored = json.loads(every.pop(INTEGRITY_NAME))["files"] if INTEGRITY_NAME in every else {}
    return stored, {name: hashlib.sha256(data).hexdigest() for name, data in every.items()}


@pytest.mark.long
@pytest.mark.parametrize("point", [*POINTS, "renew sums"])
def test_megatrons_sums_hold_wherever_it_ends(point: str, trained: Path) -> None:
    before = sums()[1]
    encoded = json.dumps({"algorithm": "sha256", "files": before}).encode()
    stores.write(stores.path_of(THERE) / INTEGRITY_NAME, encoded)
    with pytest.raises((DataStatesError, OSError), match="injected"):
        drop(f"{point}:1:EIO")
    stored, found = sums()
    assert stored and {name: found.get(name) for name in stored} == stored
    if point in POINTS[:3]:
        assert stored == before, "nothing was changed"


@pytest.mark.long
@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "later"])
def test_a_manifest_that_arrives_after_its_request_has_failed_finds_its_files(
    is_late: bool, trained: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, late = stores.write, []

    def write_and_time_out(path: Path, data: bytes) -> None:
        if path.name == MANIFEST_NAME:
            late.append((path, data))
            if not is_late:
                write(path, data)
            raise OSError(5, "timed out", str(path))
        write(path, data)

    expected = weights(trained / "iter_0000001")
    monkeypatch.setattr(stores, "write", write_and_time_out)
    with pytest.raises(UnfinishedError, match="perhaps without its optimizer's state"):
        drop()
    monkeypatch.undo()
    assert verify(THERE).faults == []
    if is_late:
        write(*late[0])
    assert verify(THERE).faults == []
    assert contents(open_source(stores.path_of(THERE))) == expected
    rules = RetentionRules(keep_last=2, min_age_seconds=0)
    remove_left_overs(plan_prune(ROOT, rules).left_overs, 0)
    assert contents(open_source(stores.path_of(THERE))) == expected


@pytest.mark.long
@pytest.mark.parametrize("kind", ["POST /checkpoints$", "PUT .*/datastates.manifest"])
def test_what_was_changed_is_not_reported_as_unchanged(kind: str, trained: Path, store: ObjectStore) -> None:
    store.fail(kind, EXPIRED)
    code, out, err = run("prune", ROOT, "--keep-last", "1", "--drop-optimizer", "--yes")
    assert code == 1 and "1 failed" in out
    assert "perhaps without its optimizer's state already, but whole: " in err and "not changed" not in err


@pytest.mark.long
def test_what_was_not_changed_is_reported_so(trained: Path, store: ObjectStore) -> None:
    store.fail("PUT .*/data-", EXPIRED)
    code, out, err = run("prune", ROOT, "--keep-last", "1", "--drop-optimizer", "--yes")
    assert code == 1 and "1 failed" in out and f"{THERE}: not changed: " in err
