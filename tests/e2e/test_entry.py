"""The documented entry points work: the demo, and a script like Megatron's that imports nothing of ours."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny import RECIPES, ROOT, Checkpoints


def run(*command: str | Path, timeout_seconds: float) -> str:
    """Runs a program, which must exit with 0, and returns its output."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout_seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def test_entry_script_knows_nothing_of_the_package() -> None:
    for script in (RECIPES / "pretrain_tiny.py", *(RECIPES / "cpu").glob("*.py")):
        assert not re.search(r"import.*datastates", script.read_text()), script


def test_installed_package_alone_adds_the_format_to_a_stock_entry(ckpt_format: str, tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += [str(RECIPES / "cpu/run.py"), str(RECIPES / "pretrain_tiny.py")]
    command += (RECIPES / "tiny.args").read_text().split()
    command += ["--save", str(tmp_path), "--save-interval", "4", "--ckpt-format", ckpt_format]
    printed = run(*command, timeout_seconds=120)
    Checkpoints(tmp_path).assert_format(4, ckpt_format)
    said = f"datastates: checkpoints are saved to {tmp_path} synchronously"
    assert printed.count(said) == (ckpt_format == "datastates")


@pytest.mark.timeout(600)
def test_demo_ends_with_ok(ckpt_format: str, tmp_path: Path) -> None:
    given = [] if ckpt_format == "datastates" else ["--ckpt-format", ckpt_format]
    printed = run(RECIPES / "demo.py", "--keep", tmp_path / "kept", *given, timeout_seconds=560)
    assert printed.splitlines()[-1] == "demo: OK"


@pytest.mark.parametrize("arguments", [["--ckpt-format", "torch"], ["--no-such-option"]])
def test_demo_refuses_unknown_formats_and_options(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, RECIPES / "demo.py", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert arguments[-1] in done.stderr
