"""Commands that write into an object store: export, import, repair, and prune --drop-optimizer."""

from __future__ import annotations

import filecmp
import gc
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("multistorageclient")
pytest.importorskip("moto")

import torch

from megatron_datastates import stores
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.weights_only import drop_optimizer, plan_drop
from megatron_datastates.errors import DataStatesError, StorageError
from megatron_datastates.format.directory import INTEGRITY_NAME, TRACKER_NAME
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.pipeline.upkeep.repair import repair
from megatron_datastates.pipeline.upkeep.retention import RetentionRules, plan_prune
from megatron_datastates.pipeline.upkeep.verify import verify
from tests.support.object_store import EXPIRED, RUN, UNAVAILABLE, ObjectStore, make_older
from tests.unit.command import run
from tests.unit.converting import contents
from tests.unit.hf_models import LLAMA, arguments, state
from tests.unit.hf_models import save as save_model
from tests.unit.ranks_in_turn import RanksInTurn
from tests.unit.states import State, new_saver
from tests.unit.test_object_store import store as store
from tests.unit.test_object_store_commands import put
from tests.unit.test_weights_only import objects_of, tensors_of, weights

ROOT = stores.path_of(RUN)
THERE = f"{RUN}/iter_0000001"
GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("megatron-*"))


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory for temporary files, in which every test leaves nothing.

    The garbage collector, which would remove what a command forgot, is off.
    """
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    gc.disable()
    yield folder
    gc.enable()


@pytest.fixture
def model(tmp_path: Path, store: ObjectStore) -> Path:
    """A checkpoint of a model; the store has the same."""
    stored = arguments(LLAMA, seed=1)
    save_model(tmp_path / "run" / "iter_0000001", stored, state(stored))
    put(tmp_path / "run" / "iter_0000001", THERE)
    return tmp_path / "run" / "iter_0000001"


def fetched(source: str, target: Path) -> Path:
    """Copies what the store has to a directory."""
    for one in stores.all_below(stores.path_of(source)):
        (target / one.name).parent.mkdir(parents=True, exist_ok=True)
        (target / one.name).write_bytes(stores.read_whole(stores.path_of(source) / one.name))
    return target


def names() -> set[str]:
    return {one.name for one in stores.all_below(stores.path_of(THERE))}


def require_equal(one: Path, other: Path) -> None:
    files = sorted(str(path.relative_to(one)) for path in one.rglob("*") if path.is_file())
    assert files == sorted(str(path.relative_to(other)) for path in other.rglob("*") if path.is_file())
    assert filecmp.cmpfiles(one, other, files, shallow=False) == (files, [], [])


@pytest.mark.parametrize("words", [("--hf",), ("--max-shard-size", "20kB")], ids=["hf", "safetensors"])
def test_what_is_exported_there_is_what_is_exported_here(
    words: tuple[str, ...], model: Path, store: ObjectStore, scratch: Path, tmp_path: Path
) -> None:
    there = "msc://store/exported/model"
    assert run("export", model, tmp_path / "here", *words)[0] == 0
    store.log.clear()
    code, out, err = run("export", THERE, there, *words)
    assert code == 0 and out.startswith(f"{there}: ") and str(scratch) not in out + err
    puts = [name.rpartition("/")[2] for kind, name in store.log if kind == "PUT"]
    assert puts and puts == sorted(puts, key=lambda name: name.endswith(".json")), "indexes come last"
    require_equal(tmp_path / "here", fetched(there, tmp_path / "there"))
    assert not list(scratch.iterdir())
    code, out, err = run("export", THERE, there, *words)
    assert (code, out) == (2, "") and f"{there} exists: choose another target" in err


def test_an_export_that_fails_is_said_in_one_line(model: Path, store: ObjectStore, scratch: Path) -> None:
    code, out, err = run("export", THERE, f"{THERE}/inside")
    assert code == 2 and "lies inside the checkpoint" in err
    store.fail("PUT .*exported", UNAVAILABLE)
    code, out, err = run("export", THERE, "msc://store/exported")
    assert (code, out) == (2, "") and err.count("\n") == 1 and str(scratch) not in err
    store.heal()
    store.fail("HEAD .*exported", EXPIRED)
    code, _, err = run("export", THERE, "msc://store/exported")
    assert code == 2 and "the object store refuses it" in err, "nothing is replaced on a guess"
    assert not list(scratch.iterdir())


def test_a_model_is_imported_as_a_run_in_a_store(
    model: Path, store: ObjectStore, scratch: Path, tmp_path: Path
) -> None:
    assert run("export", model, tmp_path / "hf", "--hf")[0] == 0
    code, out, err = run("import", tmp_path / "hf", "msc://store/new")
    assert code == 0 and "--load msc://store/new " in out, err
    assert stores.read_whole(stores.path_of("msc://store/new") / TRACKER_NAME) == b"release"
    assert run("verify", "msc://store/new")[0] == 0
    assert run("import", tmp_path / "hf", tmp_path / "new")[0] == 0
    assert run("diff", tmp_path / "new", "msc://store/new")[0] == 0
    code, _, err = run("import", tmp_path / "hf", "msc://store/new")
    assert code == 2 and f"msc://store/new has a {TRACKER_NAME}" in err
    store.fail(f"(HEAD|GET) .*{TRACKER_NAME}", EXPIRED)
    code, _, err = run("import", tmp_path / "hf", "msc://store/new")
    assert code == 2 and f"{TRACKER_NAME} cannot be read" in err
    code, _, err = run("import", "msc://store/hf", tmp_path / "other")
    assert code == 2 and "is in an object store: expected a path in a file system" in err
    assert not list(scratch.iterdir())


# -- repair ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.name)
def test_a_lost_manifest_is_rebuilt_as_in_a_directory(
    golden: Path, store: ObjectStore, tmp_path: Path
) -> None:
    here = Path(shutil.copytree(golden, tmp_path / "iter_0000001"))
    (here / MANIFEST_NAME).unlink()
    put(here, THERE)
    assert run("verify", THERE)[0] == 2, "no manifest"
    expected = repair(here)
    code, out, err = run("repair", THERE)
    assert (code, err) == (0, "") and f"{THERE}: repaired: save {expected.manifest.save_id}" in out
    assert verify(THERE).faults == [] and run("diff", golden, THERE)[0] == 0
    code, _, err = run("repair", THERE)
    assert code == 2 and "its manifest is undamaged" in err


@pytest.mark.parametrize("lost", ["data", "index", "common.pt"])
def test_without_proof_no_manifest_is_made(lost: str, store: ObjectStore, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(GOLDEN[0].parent / "megatron-0.18", folder)
    (folder / MANIFEST_NAME).unlink()
    put(folder, THERE)
    gone = max(name for name in names() if name.startswith(lost))
    stores.remove(stores.path_of(THERE) / gone)
    before = names()
    code, out, err = run("repair", THERE)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert names() == before


@pytest.mark.parametrize("what", ["data-", "index-", "metadata.json", "common.pt", MANIFEST_NAME])
def test_a_store_that_does_not_answer_proves_nothing(what: str, store: ObjectStore, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(GOLDEN[0].parent / "megatron-0.18", folder)
    encoded = (folder / MANIFEST_NAME).read_bytes()
    (folder / MANIFEST_NAME).write_bytes(encoded[:-3] if what == MANIFEST_NAME else b"")
    put(folder, THERE)
    store.fail(f"(HEAD|GET|PUT) .*/{what}", EXPIRED)
    code, out, err = run("repair", THERE)
    assert (code, out) == (2, "") and err.count("\n") == 1, err
    store.heal()
    assert stores.read_whole(stores.path_of(THERE) / MANIFEST_NAME) in (b"", encoded[:-3])
    assert run("repair", THERE)[0] == 0


# -- prune --drop-optimizer -----------------------------------------------------------------------------


@pytest.fixture
def trained(store: ObjectStore, tmp_path: Path) -> Path:
    """A run of two checkpoints by two ranks, one of which has no weights; the store has the same."""
    for number in (1, 2):
        folder = tmp_path / "run" / f"iter_000000{number}"
        ranks = RanksInTurn(2)
        extra = {"optimizer.state.more": torch.full((300_000,), 7.0)}
        ranks.save(folder, [State(tensors_of(number), objects_of(number)), State(extra)])
        ranks.close()
        (folder / "metadata.json").write_text('{"sharded_backend": "datastates"}')
        put(folder, f"{RUN}/{folder.name}")
    stores.write(ROOT / TRACKER_NAME, b"2")
    make_older("run", 7200)
    return tmp_path / "run"


def test_weights_stay_bit_for_bit(trained: Path, store: ObjectStore, scratch: Path) -> None:
    before = weights(trained / "iter_0000001")
    code, out, err = run("prune", RUN, "--keep-last", "1", "--drop-optimizer")
    assert code == 0 and "would drop the optimizer of" in out and "Nothing was changed" in out, err
    old = names()
    store.log.clear()
    code, out, err = run("prune", RUN, "--keep-last", "1", "--drop-optimizer", "--yes")
    assert code == 0 and f"dropped the optimizer of  {THERE}" in out and "kept" not in err, err
    puts = [name.rpartition("/")[2] for kind, name in store.log if kind == "PUT"]
    assert puts[-1] == MANIFEST_NAME and puts.count(MANIFEST_NAME) == 1
    assert contents(open_source(stores.path_of(THERE))) == before
    assert verify(THERE).faults == []
    assert len([name for name in names() if name.startswith("data-")]) == 1 and not (names() & old) - {
        MANIFEST_NAME,
        "metadata.json",
    }
    assert verify(f"{RUN}/iter_0000002").faults == []
    assert plan_drop(stores.path_of(THERE)) is None and not list(scratch.iterdir())
    code, out, _ = run("prune", RUN, "--keep-last", "1", "--drop-optimizer", "--min-age", "0")
    assert code == 0 and "it has no optimizer state" in out


POINTS = (
    "write weights",
    "write index",
    "publish weights",
    "write manifest",
    "durable manifest",
    "remove replaced",
)


@pytest.mark.parametrize("point", POINTS)
def test_a_failure_leaves_a_whole_checkpoint(point: str, trained: Path, scratch: Path) -> None:
    whole, before = contents(open_source(trained / "iter_0000001")), weights(trained / "iter_0000001")
    plan = plan_drop(stores.path_of(THERE))
    assert plan is not None
    with pytest.raises((DataStatesError, OSError), match="injected"):
        drop_optimizer(plan, faults=f"{point}:1:EIO")
    assert verify(THERE).faults == []
    is_new = POINTS.index(point) >= POINTS.index("durable manifest")
    assert contents(open_source(stores.path_of(THERE))) == (before if is_new else whole)
    left = plan_prune(ROOT, RetentionRules(keep_last=2, min_age_seconds=0)).left_overs
    # A manifest that was sent may yet arrive.
    assert bool(left) == (point in ("write manifest", "remove replaced"))
    assert not list(scratch.iterdir())


def test_what_an_outage_leaves_the_next_prune_removes(
    trained: Path, store: ObjectStore, scratch: Path
) -> None:
    store.fail(f"PUT .*{MANIFEST_NAME}", EXPIRED)
    store.fail("POST /checkpoints$", EXPIRED)  # requests that remove objects
    code, _, err = run("prune", RUN, "--keep-last", "1", "--drop-optimizer", "--yes")
    assert code == 1 and f"{THERE}: perhaps without its optimizer's state already" in err
    store.heal()
    assert verify(THERE).faults == []
    more = len(names())
    assert run("prune", RUN, "--keep-last", "2", "--yes", "--min-age", "0")[0] == 0
    assert len(names()) < more and verify(THERE).faults == []


def test_a_save_that_is_published_meanwhile_is_not_replaced(
    trained: Path, store: ObjectStore, tmp_path: Path
) -> None:
    plan = plan_drop(stores.path_of(THERE))
    assert plan is not None
    saver = new_saver()
    saver.start(tmp_path / "newer", State({"a": torch.arange(9)})).wait()
    saver.close()
    put(tmp_path / "newer", THERE)
    with pytest.raises(StorageError, match="a save has published into it meanwhile"):
        drop_optimizer(plan)
    assert verify(THERE).faults == []
    assert set(open_source(stores.path_of(THERE)).tensors) == {"a"}
    assert not [name for name in names() if str(plan.save_id) in name], "nothing of the call is left"


def test_megatrons_sums_are_renewed(trained: Path, store: ObjectStore) -> None:
    import hashlib

    def sums() -> dict[str, str]:
        every = {name: stores.read_whole(stores.path_of(THERE) / name) for name in names()}
        return {
            name: hashlib.sha256(data).hexdigest() for name, data in every.items() if name != INTEGRITY_NAME
        }

    stores.write(
        stores.path_of(THERE) / INTEGRITY_NAME,
        json.dumps({"algorithm": "sha256", "files": sums()}).encode(),
    )
    plan = plan_drop(stores.path_of(THERE))
    assert plan is not None
    drop_optimizer(plan)
    stored = json.loads(stores.read_whole(stores.path_of(THERE) / INTEGRITY_NAME))["files"]
    assert stored == sums() and verify(THERE).faults == []
