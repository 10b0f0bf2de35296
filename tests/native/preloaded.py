"""Programs in which a small library of a test's own stands before functions of the system (LD_PRELOAD)."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def build_library(source: Path, folder: Path, *flags: str) -> Path:
    """Compiles a library from one file into a folder; returns its path."""
    library = folder / f"lib{source.stem}.so"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    always = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC"]
    subprocess.run([*compiler, *always, "-o", str(library), str(source), *flags, "-ldl"], check=True)
    return library


def run_preloaded(library: Path, *arguments: object, seconds: float) -> str:
    """Runs Python with the library preloaded, which must succeed; returns what it prints."""
    ended = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=_ROOT,
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
