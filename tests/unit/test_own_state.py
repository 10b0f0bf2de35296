"""The recipe with a data loader and a provider of its own resumes exactly."""

import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "own_state.py"


def history(folder: Path, steps: int) -> list[str]:
    command = [sys.executable, str(RECIPE), "--save", str(folder), "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


@pytest.mark.long
def test_a_resume_in_the_middle_of_an_epoch_sees_the_same_samples_and_losses(tmp_path: Path) -> None:
    whole = history(tmp_path / "whole", 10)  # an epoch has 7 steps
    assert history(tmp_path / "parts", 4) == whole[:4]
    assert history(tmp_path / "parts", 10) == whole and len(whole) == 10
