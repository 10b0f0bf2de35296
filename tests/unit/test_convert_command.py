"""`datastates convert`: runs, exit codes, interrupts, torchrun."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.progress import Progress

import megatron_datastates as ds
from megatron_datastates.cli.convert import _Bars
from megatron_datastates.cli.shared import progress_bar
from megatron_datastates.convert import trackers
from megatron_datastates.convert.job import no_progress
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.planning import plan_conversion
from megatron_datastates.convert.run import CONVERTING, VERIFYING, ConversionRequest, convert_run
from megatron_datastates.convert.team import Team
from megatron_datastates.engine.atomic_files import replace_file
from megatron_datastates.errors import OptionError, StorageError
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.upkeep.verify import verify
from tests.support.programs import Programs
from tests.support.waiting import eventually
from tests.unit.command import run
from tests.unit.converting import LEAST, contents, convert_to, save_with_dcp
from tests.unit.trained import save_trained

TRACKER = "latest_checkpointed_iteration.txt"


def all_of(source: Path, target: Path, to: str = "") -> list[str]:
    request = ConversionRequest(to, limits=LEAST)
    found = convert_run(source, target, request, Team(), lambda plan, stage: no_progress)
    return [one.failed or one.skipped for one in found.results]


def test_a_run_is_converted_and_goes_on_from_where_it_was(tmp_path: Path) -> None:
    source, target = tmp_path / "run", tmp_path / "made"
    for step in (2, 10):
        save_with_dcp(source / f"iter_{step:07d}", {"a": torch.full((3,), float(step))})
    (source / "iter_0000011").mkdir()  # unfinished
    (source / "latest_checkpointed_iteration.txt").write_text("10")
    first = all_of(source, target)
    assert first[:2] == ["", ""] and "holds no checkpoint of a known format" in first[2]
    assert (target / "latest_checkpointed_iteration.txt").read_text() == "10"
    kept = ds.open(target / "iter_0000002").manifest
    save_with_dcp(source / "iter_0000011", {"a": torch.ones(3)})
    assert all_of(source, target) == ["the target exists already", "the target exists already", ""]
    assert ds.open(target / "iter_0000002").manifest == kept
    assert open_source(target / "iter_0000010").read_tensor("a").tolist() == [10.0] * 3


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, "10"), (b"2", "10"), (b"10", "10"), (b"12", "12"), (b"release", "release")],
)
def test_a_tracker_is_never_set_back(before: bytes | None, after: str, tmp_path: Path) -> None:
    source, target = tmp_path / "run", tmp_path / "made"
    save_with_dcp(source / "iter_0000010", {"a": torch.ones(3)})
    (source / TRACKER).write_text("10\n")
    target.mkdir()
    if before is not None:
        (target / TRACKER).write_bytes(before)
    all_of(source, target)
    assert (target / TRACKER).read_text() == after


@pytest.mark.parametrize("text", [b"\xff", b"1" * 5000, b"1" * 300, "\u0663".encode(), b"", b"release"])
def test_a_tracker_that_names_no_iteration_is_left_out(text: bytes, tmp_path: Path) -> None:
    save_with_dcp(tmp_path / "run" / "iter_0000010", {"a": torch.ones(3)})
    (tmp_path / "run" / TRACKER).write_bytes(text)
    assert all_of(tmp_path / "run", tmp_path / "made") == [""]
    assert os.listdir(tmp_path / "made") == ["iter_0000010"]


def test_a_run_of_several_formats_is_converted_to_the_requested_one(tmp_path: Path) -> None:
    source, target = tmp_path / "run", tmp_path / "made"
    save_with_dcp(source / "iter_0000001", {"a": torch.ones(3)})
    convert_to(source / "iter_0000001", source / "iter_0000002")
    with pytest.raises(
        OptionError, match="formats datastates and torch_dist: choose one for the target with --to"
    ):
        all_of(source, target)
    assert not target.exists()
    assert all_of(source, target, "datastates") == ["", ""]
    assert [open_source(target / f"iter_000000{n}").format for n in (1, 2)] == ["datastates"] * 2
    assert all_of(source, target, "datastates") == ["the target exists already"] * 2
    with pytest.raises(StorageError, match="iter_0000001 exists in format datastates, expected torch_dist"):
        all_of(source, target, "torch_dist")
    with pytest.raises(StorageError, match="is the source itself"):
        all_of(source, source / ".." / "run", "datastates")


def test_a_target_named_as_an_iteration_is_what_megatron_resumes_from(tmp_path: Path) -> None:
    for step in (2, 10):
        save_with_dcp(tmp_path / "run" / f"iter_{step:07d}", {"a": torch.full((3,), float(step))})
    code, out, err = run("convert", tmp_path / "run" / "iter_0000010", tmp_path / "made" / "iter_0000010")
    assert (code, err) == (0, "") and out.splitlines()[1] == (
        f"{tmp_path}/made/{TRACKER} names iter_0000010: pass --load {tmp_path}/made"
    )
    assert (tmp_path / "made" / TRACKER).read_text() == "10"
    code, out, _ = run("convert", tmp_path / "run" / "iter_0000002", tmp_path / "made" / "iter_0000002")
    assert code == 0 and f"still names iter_0000010: pass --load {tmp_path}/made --ckpt-step 2" in out
    assert (tmp_path / "made" / TRACKER).read_text() == "10"


def test_a_path_that_a_shell_would_split_is_quoted_in_what_is_to_be_passed(tmp_path: Path) -> None:
    save_with_dcp(tmp_path / "run" / "iter_0000010", {"a": torch.ones(3)})
    _, by_name, _ = run("convert", tmp_path / "run" / "iter_0000010", tmp_path / "made it" / "iter_0000010")
    _, every, _ = run("convert", tmp_path / "run", tmp_path / "made it", "--all")
    assert f"pass --load '{tmp_path}/made it'\n" in by_name
    assert f"pass --load '{tmp_path}/made it' --ckpt-step N\n" in every


def test_for_a_target_of_another_name_the_command_says_what_to_pass(tmp_path: Path) -> None:
    save_with_dcp(tmp_path / "run" / "iter_0000010", {"a": torch.ones(3)})
    code, out, _ = run("convert", tmp_path / "run" / "iter_0000010", tmp_path / "made")
    assert code == 0 and out.splitlines()[1] == (
        "For Megatron, which loads no directory of this name, move it to RUN/iter_0000010, and pass "
        "--load RUN --ckpt-step 10"
    )
    assert sorted(os.listdir(tmp_path)) == ["made", "run"]


def test_of_a_run_the_tracked_checkpoint_is_converted_into_a_run(tmp_path: Path) -> None:
    for step in (2, 10):
        save_with_dcp(tmp_path / "run" / f"iter_{step:07d}", {"a": torch.ones(3)})
    (tmp_path / "run" / TRACKER).write_text("2")
    code, _, err = run("convert", tmp_path / "run", tmp_path / "made")
    assert code == 0 and "iter_0000002, which the tracker of the run names" in err
    assert sorted(os.listdir(tmp_path / "made")) == ["iter_0000002", TRACKER]
    assert run("convert", tmp_path / "run", tmp_path / "made", "--iteration", "10")[0] == 0
    assert (tmp_path / "made" / TRACKER).read_text() == "10"


def test_an_iteration_of_the_legacy_format_counts_as_not_converted(tmp_path: Path) -> None:
    """It may well be complete: a run that was converted without it would seem to be converted."""
    save_with_dcp(tmp_path / "run/iter_0000002", {"a": torch.ones(3)})
    legacy = tmp_path / "run/iter_0000001/mp_rank_00/model_optim_rng.pt"
    legacy.parent.mkdir(parents=True)
    legacy.write_bytes(b"pickled")
    code, out, err = run("convert", tmp_path / "run", tmp_path / "made", "--all")
    assert code == 1 and "1 converted, 0 skipped, 1 failed" in out
    assert "iter_0000001: not converted" in err and "legacy format" in err


def test_the_environment_lets_objects_of_any_class_be_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_with_dcp(tmp_path / "theirs", {"a": torch.ones(3), "half": Fraction(1, 2)})
    code, _, err = run("convert", tmp_path / "theirs", tmp_path / "made")
    assert code == 2 and "Fraction, which is not trusted" in err and not (tmp_path / "made").exists()
    monkeypatch.setenv("MEGATRON_DATASTATES_TRUST_OBJECTS", "on")
    assert run("convert", tmp_path / "theirs", tmp_path / "made")[0] == 0
    before, after = open_source(tmp_path / "theirs"), open_source(tmp_path / "made")
    assert after.read_object("half") == before.read_object("half")


def test_what_is_damaged_does_not_keep_others_from_being_converted(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save_with_dcp(tmp_path / "run" / f"iter_{step:07d}", {"a": torch.arange(50000.0)})
    (tmp_path / "run" / "iter_0000005").mkdir()  # unfinished
    (tmp_path / "run" / "iter_0000001" / ".metadata").write_bytes(b"nonsense")
    (tmp_path / "run" / "iter_0000002" / "__0_0.distcp").write_bytes(b"")
    data = tmp_path / "run" / "iter_0000003" / "__0_0.distcp"
    data.write_bytes(bytes(data.stat().st_size))  # found only when it is read
    (tmp_path / "run" / TRACKER).write_text("3")
    code, out, err = run("convert", tmp_path / "run", tmp_path / "made", "--all")
    assert code == 1
    assert [line.split(": ")[:2] for line in err.splitlines()] == [
        [f"{tmp_path}/run/iter_000000{n}", "not converted"] for n in (1, 2, 3)
    ]
    assert f"{tmp_path}/made/iter_0000004: datastates: 1 tensor and 0 objects in 1 file, 200 kB" in out
    assert "5 checkpoints: 1 converted, 1 skipped, 3 failed" in out
    assert f"{TRACKER} names iter_0000003, which was not converted: choose another" in out
    assert os.listdir(tmp_path / "made") == ["iter_0000004"]


def test_what_an_earlier_call_has_converted_is_tracked_although_its_source_is_lost(tmp_path: Path) -> None:
    for step in (1, 2):
        save_with_dcp(tmp_path / "run" / f"iter_{step:07d}", {"a": torch.ones(3)})
    (tmp_path / "run" / TRACKER).write_text("2")
    assert run("convert", tmp_path / "run", tmp_path / "made", "--all")[0] == 0
    (tmp_path / "run" / "iter_0000002" / ".metadata").write_bytes(b"nonsense")
    code, out, err = run("convert", tmp_path / "run", tmp_path / "made", "--all")
    assert code == 1 and "iter_0000002: not converted: " in err
    assert f"{TRACKER} names iter_0000002: pass --load" in out


def test_an_interrupt_leaves_no_temporary_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace_file(tmp_path / TRACKER, b"10")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("there", ["nothing", "a save that was killed", "a file"])
def test_what_is_in_the_way_of_one_checkpoint_does_not_keep_others_from_being_converted(
    there: str, tmp_path: Path
) -> None:
    for step in (1, 2):
        save_with_dcp(tmp_path / "run" / f"iter_{step:07d}", {"a": torch.ones(3)})
    (tmp_path / "run" / TRACKER).write_text("2")
    in_the_way = tmp_path / "made" / "iter_0000002"
    in_the_way.parent.mkdir()
    if there == "a file":
        in_the_way.write_bytes(b"")
    else:
        in_the_way.mkdir()
    if there == "a save that was killed":
        (in_the_way / "data-00000-0000000000000001-1.bin").write_bytes(b"half")
    code, out, err = run("convert", tmp_path / "run", tmp_path / "made", "--all")
    assert code == 1 and "2 checkpoints: 1 converted, 0 skipped, 1 failed" in out
    assert "iter_0000002: not converted: the target exists, and cannot be read as a checkpoint: " in err
    assert "names iter_0000002, which was not converted: choose another" in out
    assert sorted(os.listdir(tmp_path / "made")) == ["iter_0000001", "iter_0000002"]


@pytest.mark.parametrize(("text", "expected"), [(None, 0), ("garbage", 1), ("", 1)])
def test_of_a_run_with_a_damaged_tracker_not_all_is_converted(
    text: str | None, expected: int, tmp_path: Path
) -> None:
    save_with_dcp(tmp_path / "run" / "iter_0000002", {"a": torch.ones(3)})
    if text is not None:
        (tmp_path / "run" / TRACKER).write_text(text)
    code, out, _ = run("convert", "--all", tmp_path / "run", tmp_path / "made")
    assert code == expected and f"has no {TRACKER} that names a checkpoint: pass --load" in out


def test_a_tracker_that_names_nothing_is_left_as_it_is(tmp_path: Path) -> None:
    save_with_dcp(tmp_path / "run" / "iter_0000002", {"a": torch.ones(3)})
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / TRACKER).write_text("garbage")
    code, out, _ = run("convert", tmp_path / "run" / "iter_0000002", tmp_path / "made" / "iter_0000002")
    assert code == 0 and f"{TRACKER} names no checkpoint, and was left as it is: pass --load" in out


def test_a_release_beside_a_tracker_that_stays_is_loaded_by_no_step(tmp_path: Path) -> None:
    save_with_dcp(tmp_path / "run" / "release", {"a": torch.ones(3)})
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / TRACKER).write_text("10")
    code, out, _ = run("convert", tmp_path / "run" / "release", tmp_path / "made" / "release")
    assert code == 0 and "--ckpt-step" not in out
    assert "still names iter_0000010: Megatron loads release only where the tracker says release" in out


def test_two_conversions_that_write_one_tracker_at_once_both_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker, rename, texts = tmp_path / TRACKER, os.replace, [b"2"]

    def rename_late(path: Path, target: Path) -> None:
        if texts:
            replace_file(tracker, texts.pop())
        rename(path, target)

    monkeypatch.setattr(os, "replace", rename_late)
    replace_file(tracker, b"10")
    assert tracker.read_bytes() == b"10" and os.listdir(tmp_path) == [TRACKER]


def test_of_two_conversions_at_once_the_tracker_names_the_later_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, write = tmp_path / "made", trackers.replace_file
    for step in (2, 10):
        (made / f"iter_{step:07d}").mkdir(parents=True)
    later = threading.Thread(target=trackers.how_to_load, args=(tmp_path, made / "iter_0000010"))

    def write_late(tracker: Path, text: bytes) -> None:
        if text == b"2":
            later.start()
            later.join(0.5)  # it has decided by then, if nothing holds it
        write(tracker, text)

    monkeypatch.setattr(trackers, "replace_file", write_late)
    trackers.how_to_load(tmp_path, made / "iter_0000002")
    later.join()
    assert (made / TRACKER).read_text() == "10"


@pytest.mark.parametrize("every", [False, True])
def test_what_was_converted_is_printed_although_the_tracker_cannot_be_written(
    every: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tracker: Path, text: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tracker))

    save_with_dcp(tmp_path / "run" / "iter_0000002", {"a": torch.ones(3)})
    (tmp_path / "run" / TRACKER).write_text("2")
    monkeypatch.setattr(trackers, "replace_file", full)
    arguments = (tmp_path / "run", tmp_path / "made", *["--all"] * every)
    code, out, err = run("convert", *arguments, "--json")
    found = json.loads(out)
    assert (found[0] if every else found)["target"] == str(tmp_path / "made" / "iter_0000002")
    assert code == 1 and f"{TRACKER}: No space left on device: choose a checkpoint with --load" in err
    shutil.rmtree(tmp_path / "made")
    code, out, err = run("convert", *arguments)
    assert code == 1 and "1 tensor" in out and f"{TRACKER}: No space left on device: " in out + err


@pytest.mark.parametrize("option", [[], ["--all"]])
@pytest.mark.parametrize("leads_to", ["loop", "nowhere"])
def test_a_target_below_a_link_that_leads_to_no_directory_is_one_error(
    leads_to: str, option: list[str], tmp_path: Path
) -> None:
    save_with_dcp(tmp_path / "run" / "iter_0000002", {"a": torch.ones(3)})
    (tmp_path / "loop").symlink_to(leads_to)
    source = tmp_path / "run" if option else tmp_path / "run" / "iter_0000002"
    code, _, err = run("convert", *option, source, tmp_path / "loop" / "iter_0000002")
    assert code in (1, 2) and "loop is not a writable directory: choose another target" in err


def test_a_tracker_that_names_a_missing_iteration_is_said(tmp_path: Path) -> None:
    save_with_dcp(tmp_path / "run" / "iter_0000010", {"a": torch.ones(3)})
    (tmp_path / "run" / TRACKER).write_text("12")
    code, out, _ = run("convert", tmp_path / "run", tmp_path / "made", "--all")
    assert code == 1 and "1 checkpoint: 1 converted" in out
    assert "names iter_0000012, which is missing" in out
    code, _, err = run("convert", tmp_path / "run", tmp_path / "made", "--all", "--json")
    assert code == 1 and "names iter_0000012, which is missing" in err
    (tmp_path / "run" / TRACKER).unlink()
    assert run("convert", tmp_path / "run", tmp_path / "made", "--all")[0] == 0


def test_a_converted_manifest_has_the_sizes_that_the_arguments_say(tmp_path: Path) -> None:
    save_trained(tmp_path / "iter_0000005", "torch_dist")
    assert run("convert", tmp_path / "iter_0000005", tmp_path / "ours" / "iter_0000005")[0] == 0
    manifest = Checkpoint.open(tmp_path / "ours" / "iter_0000005").manifest
    assert manifest.parallel == {"tensor": 2, "pipeline": 1}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bar_counts_all_ranks(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Progress] = []

    def noted_bar(stage: str) -> Progress:
        shown.append(progress_bar(stage))
        return shown[-1]

    monkeypatch.setattr("megatron_datastates.cli.convert.progress_bar", noted_bar)
    monkeypatch.setattr("megatron_datastates.cli.convert._REFRESHED_EVERY_SECONDS", 0.01)
    save_with_dcp(tmp_path / "a", {"a": torch.ones(1000), "b": torch.ones(500)})
    plan = plan_conversion(open_source(tmp_path / "a"), tmp_path / "b", ranks=2)
    store = dist.HashStore() if ranks > 1 else None
    teams = [Team(store) for _ in range(ranks)]
    for rank, team in enumerate(teams):
        team.rank = rank
    bars = [_Bars(team) for team in teams]
    for count, stage in enumerate((CONVERTING, VERIFYING), 1):
        starts = [each.start(plan, stage) for each in bars]
        assert len(shown) == count  # rank 0 alone shows one
        (task,) = shown[-1].tasks
        assert (task.total, task.completed) == (6000, 0)
        for rank, progress in enumerate(starts):
            progress(100 * (rank + 1))
        eventually(lambda task=task: task.completed == (300 if ranks > 1 else 100))
    for each in bars:
        each.close()


def test_a_bar_whose_start_is_interrupted_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def start(self: Progress) -> None:
        calls.append("start")
        raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "start", start)
    monkeypatch.setattr(Progress, "stop", lambda self: calls.append("stop"))
    save_with_dcp(tmp_path / "a", {"a": torch.ones(1000)})
    plan = plan_conversion(open_source(tmp_path / "a"), tmp_path / "b")
    with pytest.raises(KeyboardInterrupt), contextlib.closing(_Bars(Team())) as bars:
        bars.start(plan, CONVERTING)
    assert calls == ["start", "stop"]


def test_a_conversion_that_fails_leaves_no_parents_and_names_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_with_dcp(tmp_path / "run" / "iter_0000010", {"a": torch.ones(3)})

    def full(directory: Path, *more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(directory / "x"))

    monkeypatch.setattr(
        "megatron_datastates.convert.job._copy_others", lambda plan, *more: full(plan.work_directory)
    )
    code, _, err = run(
        "convert", tmp_path / "run" / "iter_0000010", tmp_path / "deep" / "er" / "iter_0000010"
    )
    assert code == 2 and err == f"datastates: {tmp_path}/deep/er/iter_0000010/x: No space left on device\n"
    assert os.listdir(tmp_path) == ["run"]


WITHOUT_MEGATRON = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which workers of pytest-xdist ignore
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "megatron":
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
from megatron_datastates.cli.main import main
main()
"""


def test_the_command_needs_no_megatron(by_dcp: Path, tmp_path: Path) -> None:
    given = [str(by_dcp), str(tmp_path / "made"), "--verify", "--json", "--ranks", "2", "--memory", "128MiB"]
    command = [sys.executable, "-c", WITHOUT_MEGATRON, "convert", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert '"files": 2' in done.stdout
    assert contents(open_source(tmp_path / "made")) == contents(open_source(by_dcp))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["{tmp}", "{tmp}/made"], "holds no checkpoint of a known format"),
        (["{tmp}/none", "{tmp}/made"], "does not exist"),
        (["{source}", "{tmp}"], "exists: choose another target"),
        (["{source}", "{tmp}/made", "--to", "zarr"], "'zarr' is not one of 'datastates', 'torch_dist'"),
        (["{source}", "{tmp}/made", "--memory", "lots"], "'--memory': lots: expected a size"),
        (["{source}", "{tmp}/made", "--memory", "1MiB"], "1MiB: expected at least 66MiB"),
        (["{tmp}", "{tmp}/made", "--all"], "has no directory iter_*"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(
    given: list[str], reason: str, by_dcp: Path, tmp_path: Path, programs: Programs
) -> None:
    words = (text.format(tmp=tmp_path, source=by_dcp) for text in given)
    done = programs.run(["-c", WITHOUT_MEGATRON, "convert", *words])
    assert done.returncode == 2, done.stderr
    assert reason in done.stderr and done.stderr.count("\n") == 1
    assert not os.listdir(tmp_path)


def test_the_command_can_be_interrupted(by_dcp: Path, tmp_path: Path) -> None:
    """While it writes: at 1 KB a second it would take hours."""
    environment = {**os.environ, "MEGATRON_DATASTATES_WRITE_LIMIT": "1KB"}
    everything = [sys.executable, "-c", WITHOUT_MEGATRON, "convert", str(by_dcp), str(tmp_path / "made")]
    running = subprocess.Popen(everything, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        while not list(tmp_path.glob(".made.converting/data-*")):
            assert running.poll() is None
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate()
    finally:
        running.kill()
    assert running.returncode == 130
    assert said.strip() == "datastates: interrupted"
    assert not os.listdir(tmp_path)


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
SCRIPT = Path(__file__).parents[2] / "tools" / "convert.py"


def torchrun(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1"}
    everything = [*TORCHRUN, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(everything, capture_output=True, text=True, check=False, env=environment)


def test_ranks_of_torchrun_share_the_files(by_dcp: Path, tmp_path: Path) -> None:
    done = torchrun(by_dcp.parent, tmp_path / "made", "--all", "--verify", "--ranks", "3", "--json")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    assert result["files"] == 3 and result["skipped"] == ""
    made = open_source(tmp_path / "made" / by_dcp.name)
    assert contents(made) == contents(open_source(by_dcp))
    assert verify(made.directory).good


@pytest.mark.long
def test_what_fails_on_one_rank_of_torchrun_fails_on_all(by_dcp: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(by_dcp, damaged)
    large = max(damaged.glob("*.distcp"), key=lambda path: path.stat().st_size)  # one rank reads it
    large.write_bytes(bytes(large.stat().st_size))
    before = os.listdir(tmp_path)
    done = torchrun(damaged, tmp_path / "made", "--ranks", "2")
    assert done.returncode != 0
    assert "exitcode  : 1" in done.stderr
    assert f"datastates: {large}" in done.stderr
    assert os.listdir(tmp_path) == before


@pytest.mark.parametrize("data", [["of", "mine"], {"w": 3}], ids=["a list", "no paths"])
def test_planner_data_of_another_program_are_said_to_be_left_out(data: object, tmp_path: Path):
    save_with_dcp(tmp_path / "theirs", {"w": torch.ones(3)})
    path = tmp_path / "theirs" / ".metadata"
    code, printed, _ = run("convert", tmp_path / "theirs", tmp_path / "plain")
    assert code == 0 and "left out" not in printed
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = data
    path.write_bytes(pickle.dumps(metadata))
    code, printed, _ = run("convert", tmp_path / "theirs", tmp_path / "ours")
    assert code == 0 and f"note: {tmp_path}/theirs: the planner data in .metadata are left out" in printed
    code, printed, _ = run("convert", tmp_path / "theirs", tmp_path / "again", "--json")
    assert "keep the source" in json.loads(printed)["note"]
