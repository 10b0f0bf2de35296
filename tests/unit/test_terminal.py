"""Every command in a terminal of 80 columns, as a person sees it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.unit.trained import STACKED, save_run_of

COLUMNS = 80
REPORT = Path(__file__).parent / "reports" / "run.jsonl"
LAYER = STACKED.replace("layers.", "layers.1.")
SHOWN = [
    ("--help", 0, "Commands:"),
    ("ls run", 0, "5 *  datastates  yes"),
    ("show run", 0, "weights     29 parameters in float32, 116 B in 2 tensors"),
    ("show run", 0, "            batch 1024, lr 0.005, adam, weights in bfloat16"),
    ("show run/iter_0000005 decoder.layers.1.* --stats", 0, LAYER),
    ("show run embedding.*", 0, "float32  [5]         1      1  20 B  embedding.weight"),
    ("args run --keys *parallel*", 0, "tensor_model_parallel_size: 2"),
    ("args run/iter_0000005 run/iter_0000010", 1, "1 argument of 14 differs"),
    (f"cat run {LAYER} 0:2", 0, "[10., 11.]"),
    ("verify --all run", 0, "2 checkpoints: 2 good"),
    ("diff run/iter_0000005 run/iter_0000010", 0, "equal: 2 tensors"),
    ("trend run --keys decoder.*", 0, "decoder.layers.1"),
    ("convert run made", 0, "pass --load made"),
    ("export run weights", 0, "weights: 4 tensors"),
    ("prune run --keep-last 1", 0, "keep  run/iter_0000005  (the tracker names it)"),
    ("repair torn", 0, "torn: repaired: save"),
    ("report run.jsonl --last 3", 0, "the last"),
    ("plan --params 70B --tp 8 --pp 4 --dp 8", 0, "a checkpoint    980 GB"),
    ("options", 0, "--datastates-"),
    ("show nothing", 2, "datastates: nothing is not a directory"),
]
# Lines that hold what must stay whole: descriptions of options, and sentences that the terminal folds.
MAY_BE_LONG = ("options", "plan", "report", "repair", "verify", "show nothing")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run, a checkpoint without its manifest, and a report file."""
    root = tmp_path_factory.mktemp("place")
    save_run_of(root / "run", "datastates")
    (root / "run" / "latest_checkpointed_iteration.txt").write_text("5")
    shutil.copytree(root / "run" / "iter_0000005", root / "torn")
    (root / "torn" / "datastates.manifest").unlink()
    shutil.copy(REPORT, root / "run.jsonl")
    return root


def in_terminal(words: str, directory: Path) -> tuple[int, str]:
    """Returns the exit code of a command line, and all that it writes to its terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "megatron_datastates", *words.split()]
    running = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=directory,
        env=environment | {"PYTHONPATH": path, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 4096):
            seen += part
    except OSError:  # the terminal's other side is closed
        pass
    finally:
        os.close(ours)
    return running.wait(), seen.decode()


@pytest.mark.parametrize(("words", "code", "text"), SHOWN, ids=lambda value: str(value)[:40])
def test_a_command_in_a_terminal(words: str, code: int, text: str, place: Path, tmp_path: Path) -> None:
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    found, seen = in_terminal(words, tmp_path)
    assert found == code, seen
    # Without the bars, which are erased.
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen).replace("\r\n", "\n")
    lines = [line.rpartition("\r")[2] for line in plain.split("\n")]
    assert any(text in line for line in lines), plain
    assert all(line == line.rstrip() for line in lines)
    if not words.startswith(MAY_BE_LONG):
        assert not [line for line in lines if len(line) > COLUMNS]
