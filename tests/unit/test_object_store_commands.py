"""Commands on a run in an object store: they print what they print of the same run in a directory."""

from __future__ import annotations

import filecmp
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("multistorageclient")
pytest.importorskip("moto")

from megatron_datastates import stores
from megatron_datastates.convert.trackers import copy_tracker
from megatron_datastates.errors import StorageError
from megatron_datastates.format.directory import TRACKER_NAME
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.runs.run_folders import has_folder
from tests.support.object_store import EXPIRED, RUN, UNAVAILABLE, Answer, ObjectStore
from tests.unit.command import run
from tests.unit.hf_models import LLAMA, arguments, state
from tests.unit.hf_models import save as save_model
from tests.unit.test_object_store import FarNodes, save
from tests.unit.test_object_store import store as store

ONE = f"{RUN}/iter_0000001"
GOLDEN = Path(__file__).parents[1] / "golden"
READING = [
    ("show", "{run}/iter_0000001"),
    ("show", "{run}", "*", "--stats"),
    ("args", "{run}/iter_0000002"),
    ("args", "{run}/iter_0000002", "{run}/iter_0000003"),
    ("cat", "{run}/iter_0000001", "weight"),
    ("verify", "--all", "{run}"),
    ("diff", "{run}/iter_0000002", "{run}"),
    ("trend", "{run}"),
]


def put(local: Path, target: str) -> None:
    """Copies a directory to the store."""
    for path in sorted(local.rglob("*"), key=lambda path: path.name == MANIFEST_NAME):
        if path.is_file():
            stores.write(stores.path_of(target) / str(path.relative_to(local)), path.read_bytes())


@pytest.fixture
def local(store: ObjectStore, tmp_path: Path) -> Path:
    """A run of three checkpoints, the first of Megatron 0.18 (with a common.pt); the store has the same."""
    folder = tmp_path / "run"
    shutil.copytree(GOLDEN / "megatron-0.18", folder / "iter_0000001")
    for number in (2, 3):
        stored = arguments(LLAMA, seed=number)
        save_model(folder / f"iter_000000{number}", stored, state(stored))
    (folder / TRACKER_NAME).write_text("3")
    put(folder, RUN)
    return folder


def without_times(text: str) -> str:
    return re.sub(r"[\d.]+ (s|[kMG]?B/s)\b|\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d)?", "-", text)


@pytest.mark.parametrize("command", READING, ids=lambda command: command[0])
def test_a_command_prints_the_same_as_of_a_directory(
    command: tuple[str, ...],
    local: Path,
    store: ObjectStore,
) -> None:
    here = run(*(word.format(run=local) for word in command))
    there = run(*(word.format(run=RUN) for word in command))
    assert there[0] == here[0] in (0, 1), there
    for ours, theirs in zip(here[1:], there[1:], strict=True):
        assert without_times(theirs).split() == without_times(ours.replace(str(local), RUN)).split()


def test_ls_lists_a_run_and_what_the_near_tier_has_of_it(
    store: ObjectStore,
    local: Path,
    tmp_path: Path,
) -> None:
    code, out, err = run("ls", RUN)
    assert (code, err) == (0, "") and out.count("datastates  yes") == 3 and "3 *" in out
    code, out, _ = run("ls", RUN, "--json")
    assert [one["complete"] for one in json.loads(out)] == [True] * 3
    stores.remove(stores.path_of(ONE) / MANIFEST_NAME)
    code, out, _ = run("ls", RUN)
    assert re.search(r"1 +datastates +no", out) and "it has no datastates.manifest" in out

    nodes = FarNodes(tmp_path)
    save(nodes, 4)
    nodes.close()
    assert run("ls", RUN, "--near", "msc://store/near")[0] == 2
    code, out, err = run("ls", RUN, "--near", nodes.roots[0])
    assert code == 0 and "iteration 4: 1 data file" in out, err


def test_torch_dist_in_a_store_is_not_called_damaged(store: ObjectStore) -> None:
    one = stores.path_of(f"{RUN}/iter_0000005")
    stores.write(one / ".metadata", b"of DCP")
    stores.write(one / "metadata.json", b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    code, out, err = run("ls", RUN)
    assert (code, err) == (0, "") and re.search(r"5 +torch_dist +unreadable", out)
    assert "iter_0000005: torch_dist is not read from object stores: copy it to a directory" in out
    assert "torch_dist, which is not read from object stores" in run("show", one)[2]


def test_export_and_convert_read_from_a_store(local: Path, store: ObjectStore, tmp_path: Path) -> None:
    store.fail(" .*/common.pt", EXPIRED)  # this checkpoint has none: stores may refuse to say so
    for name, source in (("here", str(local / "iter_0000002")), ("there", f"{RUN}/iter_0000002")):
        assert run("export", source, tmp_path / name, "--hf")[0] == 0
        code, _, err = run("convert", source, tmp_path / f"{name}-converted" / "iter_0000002")
        assert code == 0, err
    (here,), (there,) = ((tmp_path / name).glob("*.safetensors") for name in ("here", "there"))
    assert filecmp.cmp(here, there, shallow=False)
    assert run("diff", local / "iter_0000002", tmp_path / "there-converted" / "iter_0000002")[0] == 0


@pytest.mark.parametrize("answer", [UNAVAILABLE, EXPIRED], ids=["outage", "credentials expired"])
def test_a_damaged_checkpoint_is_told_from_a_store_that_cannot_be_read(
    answer: Answer,
    local: Path,
    store: ObjectStore,
) -> None:
    name = Checkpoint.open(local / "iter_0000001").manifest.files[0].name
    store.fail(f"GET .*{name}", answer)
    code, out, err = run("verify", ONE)
    assert (code, err) == (2, "") and f"not checked: data file {ONE}/{name} cannot be read: " in out
    assert f"{ONE}: NOT CHECKED COMPLETELY: " in out and "fault" not in out
    assert json.loads(run("verify", ONE, "--json")[1])["good"] is None
    code, out, _ = run("verify", "--all", RUN)
    assert code == 2 and "3 checkpoints: 2 good, 0 faulty, 1 could not be checked" in out
    store.fail("(HEAD|GET) .*/metadata.json", answer)
    assert run("verify", ONE)[0] == 2
    store.heal()
    store.fail(".", answer)
    for command in [*READING, ("verify", ONE)]:
        code, out, err = run(*(word.format(run=RUN) for word in command))
        assert (code, out) == (2, "") and err.count("\n") == 1, command
    store.heal()
    assert run("verify", ONE)[0] == 0
    stores.remove(stores.path_of(ONE) / name)
    store.fail("(HEAD|GET) .*/metadata.json", answer)
    code, out, err = run("verify", ONE)
    assert code == 1 and "there is no such object" in out + err, "damage that is known goes first"


@pytest.mark.parametrize("answer", [UNAVAILABLE, EXPIRED], ids=["outage", "credentials expired"])
def test_a_tracker_that_cannot_be_read_is_not_missing(
    answer: Answer, local: Path, store: ObjectStore, tmp_path: Path
) -> None:
    tracker = f"{RUN}/{TRACKER_NAME}"
    store.fail(f"(HEAD|GET) .*{TRACKER_NAME}", answer)
    for command in (("show", RUN), ("diff", f"{RUN}/iter_0000002", RUN)):
        code, out, err = run(*command)
        assert (code, out) == (2, "") and f"{tracker} cannot be read: " in err, command
    code, out, _ = run("ls", RUN)
    assert code == 0 and out.count("datastates  yes") == 3
    assert f"{tracker} cannot be read: " in out and "random weights" not in out
    code, out, _ = run("convert", "--all", RUN, tmp_path / "converted")
    assert code == 1 and "3 converted" in out and f"{tracker} cannot be read: " in out
    one = f"{RUN}/iter_0000009"
    code, out, _ = run("convert", local / "iter_0000003", one)
    assert code == 0 and f"{tracker} cannot be read: " in out and "--ckpt-step 9" in out
    store.heal()
    assert stores.read_whole(stores.path_of(tracker)) == b"3", "it is not written over"


def test_a_checkpoint_in_a_store_that_does_not_answer_is_not_called_missing(
    local: Path, store: ObjectStore
) -> None:
    run_there = stores.path_of(RUN)
    assert copy_tracker(local, run_there)[1] is False
    store.fail("GET list", EXPIRED)
    with pytest.raises(StorageError, match=f"{RUN} cannot be listed: "):
        copy_tracker(local, run_there)
    with pytest.raises(StorageError, match=f"{RUN} cannot be listed: "):
        has_folder(run_there, "iter_0000002")
    store.heal()
    assert has_folder(run_there, "iter_0000002") and not has_folder(run_there, "iter_0000004")


@pytest.mark.long
def test_a_run_is_converted_into_a_store_and_back(
    local: Path, store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    stock, there = tmp_path / "stock", "msc://store/converted"
    assert run("convert", local, stock, "--all", "--to", "torch_dist")[0] == 0
    for source in (stock, local):
        stores.remove_below(stores.path_of(there))
        store.log.clear()
        code, out, err = run("convert", source, there, "--all", "--verify")
        assert (code, err) == (0, ""), out
        assert (
            f"{there}/iter_0000002: datastates: " in out and f"names iter_0000003: pass --load {there}" in out
        )
        puts = [
            name.rpartition("/")[2] for kind, name in store.log if kind == "PUT" and "/iter_0000002" in name
        ]
        assert puts[-1] == MANIFEST_NAME and puts.count(MANIFEST_NAME) == 1, "it is the last object"
        assert run("verify", "--all", there)[0] == 0
        for number in (1, 2, 3):
            assert run("diff", local / f"iter_000000{number}", f"{there}/iter_000000{number}")[0] == 0
        code, out, _ = run("convert", source, there, "--all")
        assert code == 0 and out.count("skipped: the target exists already") == 3
    code, _, err = run("convert", local / "iter_0000002", f"{there}/iter_0000002")
    assert code == 2 and "exists: choose another target" in err
    assert not list(scratch.iterdir())


@pytest.mark.long
def test_ranks_convert_into_a_store_together(local: Path, store: ObjectStore) -> None:
    root = Path(__file__).parents[2]
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += [str(root / "tools" / "convert.py"), str(local / "iter_0000001"), f"{RUN}/iter_0000007"]
    ran = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0 and f"{RUN}/iter_0000007: datastates: " in ran.stdout, ran.stderr
    assert run("diff", local / "iter_0000001", f"{RUN}/iter_0000007")[0] == 0
    assert run("verify", f"{RUN}/iter_0000007")[0] == 0


def test_a_conversion_into_a_store_that_fails_makes_no_checkpoint(local: Path, store: ObjectStore) -> None:
    one = f"{RUN}/iter_0000009"
    code, _, err = run("convert", ONE, one, "--to", "torch_dist")
    assert code == 2 and "expected a directory of a file system for torch_dist" in err
    assert "or choose --to datastates" in err
    store.fail("PUT .*iter_0000009/index", UNAVAILABLE)
    code, _, err = run("convert", local / "iter_0000002", one)
    assert code == 2 and "Service unavailable" in err
    assert run("verify", one)[0] == 2, "no manifest"
    store.heal()
    assert run("convert", local / "iter_0000002", one)[0] == 0, "what was left harms nothing"
    assert run("verify", one)[0] == 0
    store.fail("HEAD .*iter_0000009", EXPIRED)
    code, _, err = run("convert", local / "iter_0000003", one)
    assert code == 2 and "the object store refuses it" in err, "nothing is replaced on a guess"


def test_what_is_not_there_is_said_in_one_line(store: ObjectStore) -> None:
    for command in (
        ("ls", RUN),
        ("show", ONE),
        ("verify", ONE),
        ("cat", ONE, "w"),
        ("prune", RUN, "--keep-last", "1"),
        ("show", "msc://no/run"),
    ):
        code, out, err = run(*command)
        assert (code, out) == (2, "") and err.count("\n") == 1, (command, out, err)
