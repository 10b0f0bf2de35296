"""What permissions hide is not called damaged, or of no known format: it cannot be read, and that is said."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.capabilities import bound_by_permissions
from tests.unit.command import run
from tests.unit.trained import save_run_of

DENIED = "cannot be read: Permission denied"
INDEX = {"datastates": "datastates.manifest", "torch_dist": ".metadata"}
FORMATS = ("datastates", "torch_dist")


@pytest.fixture(params=FORMATS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The second of two checkpoints of a run, whose permissions may change."""
    path = save_run_of(tmp_path / "run", request.param) / "iter_0000010"
    run("ls", tmp_path / "run")  # what is imported by a command is imported with all rights
    with bound_by_permissions():
        yield path
    path.chmod(0o755)


@pytest.mark.parametrize("mode", [0o444, 0o111, 0o000])
def test_a_directory_that_cannot_be_read_is_said(checkpoint: Path, mode: int) -> None:
    checkpoint.chmod(mode)
    for command in ("verify", "show", "args"):
        code, printed, said = run(command, checkpoint)
        assert code == 2 and not printed, said
        assert "ermission denied" in said or "not readable" in said, (command, said)
    code, printed, said = run("verify", "--all", checkpoint.parent)
    assert code == 2 and "2 checkpoints: 1 good, 0 faulty, 1 could not be checked" in printed
    assert f"{checkpoint}: cannot be checked: " in said and DENIED in said


def test_a_file_that_cannot_be_read_is_said(checkpoint: Path) -> None:
    data = next(path for path in checkpoint.iterdir() if path.suffix in (".bin", ".distcp"))
    index = checkpoint / next(name for name in INDEX.values() if (checkpoint / name).exists())
    for file in (data, index, checkpoint / "metadata.json"):
        file.chmod(0)
        code, printed, said = run("verify", checkpoint)
        assert code == 2 and not printed
        assert said == f"datastates: {file} {DENIED}\n"
        file.chmod(0o644)
    assert run("verify", checkpoint)[0] == 0


def test_a_hidden_checkpoint_ends_neither_ls_nor_prune(checkpoint: Path) -> None:
    checkpoint.chmod(0o444)
    code, printed, _ = run("ls", checkpoint.parent)
    assert code == 0 and "unreadable" in printed and "Permission denied" in printed
    code, printed, _ = run("prune", checkpoint.parent, "--keep-last", "1")
    assert code == 0 and f"keep  {checkpoint}" in printed


def test_hidden_non_persistent_checkpoints_of_a_run_are_said(checkpoint: Path) -> None:
    """A resume may load one of them."""
    root, hidden = checkpoint.parent, checkpoint.parent / "non_persistent"
    hidden.mkdir()
    hidden.chmod(0)
    text = f"the non-persistent checkpoints: {hidden}/latest_checkpointed_iteration.txt {DENIED}"
    assert run("ls", root)[1].splitlines()[-1] == f"not listed: {text}"
    code, _, said = run("verify", root)
    assert code == 0 and f"datastates: not checked: {text}" in said
    hidden.chmod(0o755)
    assert "non-persistent" not in run("ls", root)[1] + run("verify", root)[2]
    hidden.rmdir()
    hidden.touch()
    assert run("ls", root)[0] == run("verify", root)[0] == 0


@pytest.mark.parametrize("call", ["lstat", "stat"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_checkpoint_on_a_broken_disk_does_not_end_ls(
    format: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = save_run_of(tmp_path / "run", format)
    broken, look_at = root / "iter_0000010", getattr(os, call)

    def fail(path: os.PathLike[str], **how: bool) -> os.stat_result:
        if str(path).startswith(str(broken)):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return look_at(path, **how)

    monkeypatch.setattr(os, call, fail)
    code, printed, _ = run("ls", root, "--json")
    states = {one["iteration"]: one["state"] for one in json.loads(printed)}
    assert code == 0 and states.pop(10) == "unreadable" and set(states.values()) == {"complete"}
    assert "Input/output error" in run("ls", root)[1]


def test_a_hidden_checkpoint_with_a_name_of_its_own_stays_in_ls(checkpoint: Path) -> None:
    step = checkpoint.rename(checkpoint.parent.parent / "step_7")
    step.chmod(0)
    code, printed, _ = run("ls", step.parent)
    step.chmod(0o755)
    step.rename(checkpoint)
    assert code == 0 and printed.splitlines()[1].split()[:3] == ["step_7", "unknown", "unreadable"]
    assert printed.splitlines()[2] == f"step_7: {step}: Permission denied"
