"""The scripts that make environments, run with a stand-in for Python: what a failure leaves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "tools" / "env"
# Answers for its version and that of pip; whatever else pip is to do fails.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  -V) echo "Python VERSION" ;;
  "-m pip --version") ;;
  *) exit 1 ;;
esac
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with the scripts, and an environment of Python 3.11."""
    shutil.copytree(SCRIPTS, tmp_path / "tools" / "env")
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").write_text(PYTHON.replace("VERSION", "3.11.7"))
    (folder / "python").chmod(0o755)
    (folder / "pip").write_text(f"#!{folder}/python")
    return tmp_path


def call(tree: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [tree / "tools" / "env" / script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_release_that_could_not_be_installed_is_not_complete(tree: Path) -> None:
    for _ in range(2):
        done = call(tree, "versions.sh", "0.18.2")
        assert done.returncode == 1 and not done.stdout
    assert not (tree / ".venv" / "versions" / "0.18.2" / "complete").exists()


def test_an_environment_of_a_python_that_is_not_supported_is_named_and_stays(tree: Path) -> None:
    for _ in range(2):
        done = call(tree, "bootstrap.sh")
        assert done.returncode == 1 and ".venv has Python 3.11.7, expected 3.12, 3.13 or 3.14" in done.stderr
    assert sorted(one.name for one in (tree / ".venv").iterdir()) == ["bin"]
