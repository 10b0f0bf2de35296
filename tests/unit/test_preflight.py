"""datastates preflight: what it tries before a run, and what it finds where that does not work."""

import dataclasses
import errno
import os
import re
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_datastates.errors import HookPointError
from megatron_datastates.mcore.hooks import versions
from megatron_datastates.preflight import run as whole
from megatron_datastates.preflight import software, storage
from megatron_datastates.preflight import trial as trials
from megatron_datastates.preflight.checks import Check, Verdict, failed, merged, noted, ok
from tests.unit.command import json_of, run

SMALL = ("--size", "2MiB", "--saves", "2")


def verdicts(result: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["verdict"] for check in result["checks"]}


def text_of(result: dict[str, Any], name: str) -> str:
    return "; ".join(str(check["text"]) for check in result["checks"] if check["name"] == name)


def test_all_is_good_here_and_nothing_is_left(tmp_path: Path) -> None:
    code, printed, notes = run("preflight", tmp_path / "not" / "there", *SMALL)
    assert code == 0, printed
    assert printed.rstrip().endswith("preflight: OK")
    assert "1 rank on 1 node" in printed and "--rate-per all" in printed
    assert "saving 2 times, then loading" in notes
    assert list(tmp_path.iterdir()) == []


def test_json_has_checks_and_rates(tmp_path: Path) -> None:
    found = json_of("preflight", tmp_path, *SMALL)
    assert found["good"] is True and (found["ranks"], found["nodes"]) == (1, 1)
    assert verdicts(found)["load"] == verdicts(found)["save"] == "ok"
    trial = found["trial"]
    assert trial["bytes"] == 2 << 20 and len(trial["start_ms"]) == len(trial["durable_s"]) == 2
    assert trial["write_rate"] > 0 and trial["load_rate"] > 0 and "fault" not in trial
    assert list(tmp_path.iterdir()) == []


def test_the_bytes_of_each_save_rank_and_tensor_differ() -> None:
    states = [trials.State(rank, 2 << 20, torch.device("cpu")) for rank in (0, 1)]
    seen = set()
    for state in states:
        for save in (0, 1):
            state.fill(save)
            assert state.wrong(save) == [] and state.wrong(save + 1) == list(state.tensors)
            seen |= {tuple(tensor[:100].tolist()) for tensor in state.tensors.values()}
        assert sum(tensor.nbytes for tensor in state.tensors.values()) == 2 << 20
    assert len(seen) == 2 * 2 * len(states[0].tensors)


def test_one_wrong_bit_in_what_was_loaded_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = trials.load

    def load(directory: Path, into: dict[str, torch.Tensor], **options: Any) -> Any:
        found = original(directory, into=into, **options)
        into["rank0.large0"][77] ^= 4
        return found

    monkeypatch.setattr(trials, "load", load)
    found = json_of("preflight", tmp_path, *SMALL, code=1)
    assert verdicts(found)["load"] == "failed" and "first 'rank0.large0'" in text_of(found, "load")
    assert "1 tensor " in text_of(found, "load")
    assert found["trial"]["write_rate"] > 0 and found["trial"]["load_rate"] is None
    assert "loaded at" not in run("preflight", tmp_path, *SMALL)[1]


def test_a_failed_save_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_DATASTATES_FAULTS", "sync:1:EIO")
    found = json_of("preflight", tmp_path, *SMALL, code=1)
    assert found["trial"] is None and "(errno 5)" in text_of(found, "save")
    assert list(tmp_path.iterdir()) == []


def test_the_report_file_of_runs_gets_no_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_DATASTATES_REPORT_FILE", str(tmp_path / "reports.jsonl"))
    assert json_of("preflight", tmp_path / "run", *SMALL)["good"]
    assert list(tmp_path.iterdir()) == []


def test_options_of_the_environment_are_shown_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert software._options() == ok("options", "none are set in the environment")
    monkeypatch.setenv("MEGATRON_DATASTATES_NEAR", "/local/near")
    assert software._options().verdict is Verdict.NOTE
    assert "=/local/near; the near tier is not tried" in software._options().text
    monkeypatch.setenv("MEGATRON_DATASTATES_STAGING_MEMORY", "much")
    found = json_of("preflight", tmp_path, *SMALL, code=1)  # before ranks wait for each other in a save
    assert "STAGING_MEMORY='much'" in text_of(found, "options") and "save" not in verdicts(found)


def test_a_termination_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(trials, "load", lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGTERM))
    assert run("preflight", tmp_path / "run", *SMALL)[0] == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == [] and signal.getsignal(signal.SIGTERM) is before


def test_a_termination_ends_a_save_before_its_files_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its threads may make its directory again."""
    save, close, remove, done = trials.async_save, whole.close_all, whole.shutil.rmtree, []

    def async_save(*args: Any, **kwargs: Any) -> Any:
        save(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(trials, "async_save", async_save)
    monkeypatch.setattr(whole, "close_all", lambda: (done.append("ended"), close()))
    monkeypatch.setattr(
        whole.shutil, "rmtree", lambda *args, **kwargs: (done.append("removed"), remove(*args, **kwargs))
    )
    assert run("preflight", tmp_path / "run", *SMALL)[0] == 128 + signal.SIGTERM
    assert done[0] == "ended" and "removed" in done and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("function", ["State", "load"])
def test_too_little_memory_on_one_rank_is_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def without_memory(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    where = (whole, "State") if function == "State" else (trials, "load")
    monkeypatch.setattr(*where, without_memory)
    found = json_of("preflight", tmp_path, *SMALL, code=1)
    assert "out of memory" in text_of(found, "memory" if function == "State" else "load")


def test_an_error_of_torch_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def try_out(*args: Any) -> None:
        raise torch.OutOfMemoryError("out of memory\nframe 0")

    monkeypatch.setattr(whole, "_try_out", try_out)
    monkeypatch.setenv("RANK", "0")
    code, _, reported = run("preflight", tmp_path / "run", *SMALL)
    assert code == 2 and "rank 0: OutOfMemoryError: out of memory (other ranks may" in reported
    assert "frame" not in reported and list(tmp_path.iterdir()) == []


def test_a_slow_rate_is_one_that_plan_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials.Trial, "write_rate", property(lambda trial: 3e5))
    _, printed, _ = run("preflight", tmp_path, *SMALL)
    (rate,) = re.findall(r"--rate (\S+)", printed)
    assert rate == "300kB/s" and run("plan", "--params", "1B", "--rate", rate)[0] == 0


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that lets calls of the system fail."""

    def refuse(name: str, code: int, flags: int = 0) -> None:
        where = os if hasattr(os, name) else storage
        original = getattr(where, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if flags and not args[1] & flags:
                return original(*args, **kwargs)
            if name == "fsync" and not stat.S_ISDIR(os.fstat(args[0]).st_mode) and code == errno.EINVAL:
                return original(*args, **kwargs)
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(where, name, call)

    yield refuse


@pytest.mark.parametrize(
    ("name", "call", "words"),
    [
        ("direct I/O", ("open", errno.EINVAL, os.O_DIRECT), "page cache"),
        ("reserved space", ("_fallocate", errno.EOPNOTSUPP), "others may take meanwhile"),
        ("reserved space", ("_fallocate", 524), "others may take meanwhile"),  # ENOTSUPP, of Linux
        ("hard links", ("link", errno.EPERM), "written again in every checkpoint"),
        ("hard links", ("link", errno.EACCES), "refused (Permission denied)"),
    ],
)
def test_what_saves_do_without_is_noted(
    refusing: Any, tmp_path: Path, name: str, call: Any, words: str
) -> None:
    refusing(*call)
    checks = {check.name: check for check in storage.calls(tmp_path, 3, "this one")}
    assert {check.verdict for check in checks.values()} == {Verdict.OK, Verdict.NOTE}
    assert checks[name].verdict is Verdict.NOTE and words in checks[name].text


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("sync", ("fsync", errno.EIO)),
        ("direct I/O", ("open", errno.EACCES, os.O_DIRECT)),
        ("reserved space", ("_fallocate", errno.EDQUOT)),
    ],
)
def test_what_saves_need_fails_by_name(refusing: Any, tmp_path: Path, name: str, call: Any) -> None:
    refusing(*call)
    checks = {check.name: check for check in storage.calls(tmp_path, 3, "this one")}
    assert [check.name for check in checks.values() if check.verdict is Verdict.FAILED] == [name]
    assert os.strerror(call[1]) in checks[name].text


def test_a_directory_that_cannot_be_synced_is_good(refusing: Any, tmp_path: Path) -> None:
    """Saves do without that, too."""
    refusing("fsync", errno.EINVAL)
    assert {check.verdict for check in storage.calls(tmp_path, 3, "this one")} == {Verdict.OK}


def test_no_room_is_found_before_anything_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "free_bytes", lambda: 1 << 60)
    found = json_of("preflight", tmp_path, "--size", "1000TB", code=1)
    assert "--size" in text_of(found, "file system") and found["trial"] is None
    assert "save" not in verdicts(found)


def test_no_memory_is_found_first(tmp_path: Path) -> None:
    found = json_of("preflight", tmp_path, "--size", "1000TB", code=1)
    assert verdicts(found)["memory"] == "failed" and "file system" not in verdicts(found)


@pytest.mark.parametrize(
    ("directory", "said"),
    [
        ("file/run", "Not a directory"),
        ("link", "link is a link to what does not exist"),
        ("link/run", "link is a link to what does not exist"),
    ],
)
def test_a_directory_that_cannot_be_made(directory: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    found = json_of("preflight", tmp_path / directory, *SMALL, code=1)
    assert verdicts(found)["directory"] == "failed" and said in text_of(found, "directory")


def test_a_directory_that_may_not_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.stat

    def stat(path: Any, *args: Any, **kwargs: Any) -> Any:
        if "private" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return original(path, *args, **kwargs)

    def mkdir(path: Path, *args: Any, **kwargs: Any) -> None:
        stat(path)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(Path, "mkdir", mkdir)
    found = json_of("preflight", tmp_path / "private" / "run", *SMALL, code=1)
    assert "Permission denied" in text_of(found, "directory")


@pytest.mark.parametrize("size", ["1KiB", "many"])
def test_a_size_that_makes_no_sense_is_refused(tmp_path: Path, size: str) -> None:
    code, _, reported = run("preflight", tmp_path, "--size", size)
    assert code == 2 and f"'--size': {size}: expected" in reported
    assert run("preflight", "msc://profile/run")[0] == 2


def test_files_of_other_ranks_that_are_missing_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_SECONDS", 0.05)
    nodes = ["a", "a", "b", "b"]
    for rank in (0, 1):
        storage.calls(tmp_path, rank, "this one")
    storage.calls(tmp_path, 3, "an older one")
    of_first = storage.visibility(tmp_path, 0, nodes, "this one")
    assert of_first.verdict is Verdict.FAILED and "of 2 ranks, first of rank 2 on node b" in of_first.text
    assert storage.visibility(tmp_path, 3, nodes, "this one").verdict is Verdict.OK
    (tmp_path / "rank-0").unlink()
    assert "of 1 rank, first of rank 0 on node a" in storage.visibility(tmp_path, 3, nodes, "this one").text


def test_a_file_that_cannot_be_read_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error on one rank alone would leave the others waiting for its result."""
    monkeypatch.setattr(storage, "_SECONDS", 0.05)
    storage.calls(tmp_path, 0, "this one")

    def read_text(path: Path) -> str:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(Path, "read_text", read_text)
    assert storage.visibility(tmp_path, 1, ["a", "b"], "this one").verdict is Verdict.FAILED


def test_little_room_is_not_rounded_to_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = type("", (), {"f_bavail": 30, "f_frsize": 4096})
    monkeypatch.setattr(os, "statvfs", lambda path: facts)
    text = storage.file_system(tmp_path, 2 << 20).text
    assert "123 kB free: expected 2.10 MB" in text


@pytest.mark.parametrize(("seconds", "verdict"), [(1.5, Verdict.NOTE), (3.5, Verdict.FAILED)])
def test_files_that_appear_late_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, verdict: Verdict
) -> None:
    """A save waits three seconds for files of other nodes."""
    storage.calls(tmp_path, 0, "this one")
    times = iter([10.0, 10.0 + seconds])
    monkeypatch.setattr(storage.time, "perf_counter", lambda: next(times))
    found = storage.visibility(tmp_path, 0, ["a"], "this one")
    assert found.verdict is verdict and f"after {seconds} s; saves wait 3 s" in found.text


def test_results_of_ranks_are_merged() -> None:
    nodes = ["a", "a", "b"]
    same = [ok("one", "works")]
    assert merged([same, same, same], nodes) == same
    some = [[ok("one", "5 GB")], [ok("one", "4 GB")], [ok("one", "5 GB")]]
    assert merged(some, nodes) == [ok("one", "5 GB (rank 0 on node a)")]
    assert merged(some, nodes, alike=True) == [
        noted("one", "ranks differ: 5 GB (rank 0 on node a); 4 GB (rank 1 on node a)")
    ]
    bad = [[ok("one", "works")], [failed("one", "no")], [failed("one", "no, too"), noted("two", "hm")]]
    assert merged(bad, nodes) == [
        Check("one", Verdict.FAILED, "no (2 of 3 ranks, first rank 1 on node a)"),
        noted("two", "hm"),
    ]


def test_missing_hook_points_and_untested_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software.versions, "installed_version", lambda: "0.31.0+abc")
    megatron = software._megatron()
    assert megatron.verdict is Verdict.NOTE and "0.31.0 is untested" in megatron.text

    def attach() -> None:
        raise HookPointError("megatron-core 0.31.0 has no such.thing")

    monkeypatch.setattr(software, "attach_saving", attach)
    megatron = software._megatron()
    assert megatron.verdict is Verdict.FAILED and "such.thing" in megatron.text


def test_missing_hook_points_of_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's import only warns of them, and looks like one without this package."""
    release = versions.installed()
    gone = versions.Hook(
        "megatron.core.dist_checkpointing.core", "gone", "load.by_format.wrap_maybe_load_config"
    )
    monkeypatch.setattr(
        versions, "installed", lambda: dataclasses.replace(release, loading=(*release.loading, gone))
    )
    megatron = software._megatron()
    assert megatron.verdict is Verdict.FAILED and "dist_checkpointing.core.gone" in megatron.text


def test_megatron_that_cannot_be_imported_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank, perhaps: the others wait for its result."""

    def attach() -> None:
        raise RuntimeError("libcudart.so is missing")

    monkeypatch.setattr(software, "attach_saving", attach)
    megatron = software._megatron()
    assert megatron.verdict is Verdict.FAILED and "RuntimeError: libcudart.so" in megatron.text


def test_torch_that_does_not_activate_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software._activation().verdict is Verdict.OK
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in software._activation().text
    monkeypatch.setattr(software, "entry_points", lambda group: ())
    assert "not installed" in software._activation().text
