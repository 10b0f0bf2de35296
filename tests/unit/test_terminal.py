"""Every command in a terminal of 80 columns, as a person sees it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from megatron_datastates.cli import entry
from megatron_datastates.cli.main import app
from tests.support.programs import Programs
from tests.support.terminal import COLUMNS, in_terminal, written_to_terminal
from tests.unit import hf_models
from tests.unit.command import run
from tests.unit.states import new_saver, save
from tests.unit.trained import STACKED, arguments, save_run_of, save_trained

REPORT = Path(__file__).parent / "reports" / "run.jsonl"
LAYER = STACKED.replace("layers.", "layers.1.")
SHOWN = [
    ("--help", 0, "Commands:"),
    ("ls run", 0, "5 *  datastates  yes"),
    ("show run", 0, "weights     29 parameters in float32, 116 B in 2 tensors"),
    ("show run", 0, "            0.005, adam, weights in bfloat16"),
    ("show run/iter_0000005 decoder.layers.1.* --stats", 0, LAYER),
    ("show run embedding.*", 0, "float32  [5]         1      1  20 B  embedding.weight"),
    ("args run --keys *parallel*", 0, "tensor_model_parallel_size: 2"),
    ("args run/iter_0000005 run/iter_0000010", 1, "1 argument of 14 differs"),
    (f"cat run {LAYER} 0:2", 0, "[10., 11.]"),
    ("verify --all run", 0, "2 checkpoints: 2 good"),
    ("diff run/iter_0000005 run/iter_0000010", 0, "equal: 2 tensors"),
    ("trend run --keys decoder.*", 0, "decoder.layers.1"),
    ("trend damaged", 1, "datastates: skipped damaged/iter_0000010: unfinished: it has no"),
    ("ls theirs", 0, "5 *  torch_dist  yes"),
    ("show theirs", 0, "saved       2026"),
    ("args theirs --keys lr", 0, "lr: 0.005"),
    ("verify theirs", 0, "theirs/iter_0000005: good: 2 tensors and 1 object in 1 file"),
    ("import llama made", 0, "--num-layers"),
    ("convert run made", 0, "pass --load made"),
    ("export run weights", 0, "weights: 4 tensors"),
    ("prune run --keep-last 1", 0, "keep  run/iter_0000005  (the tracker names it)"),
    ("repair torn", 0, "torn: repaired: save"),
    ("report run.jsonl --last 3", 0, "What a save costs"),
    ("plan --params 70B --tp 8 --pp 4 --dp 8", 0, "a checkpoint    980 GB"),
    ("preflight made --size 1MiB --saves 1", 0, "preflight: OK"),
    ("options", 0, "--datastates-"),
    ("show nothing", 2, "datastates: nothing does not exist: give a checkpoint, or the directory of a run"),
    ("ls nothing", 2, "datastates: nothing does not exist: give the directory of a run"),
]
MAY_BE_LONG = ("import",)  # a command line to copy must stay whole


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run, a checkpoint without its manifest, and a report file."""
    root = tmp_path_factory.mktemp("place")
    save_run_of(root / "run", "datastates")
    save_run_of(root / "theirs", "torch_dist")
    shutil.copytree(root / "run", root / "damaged")
    (root / "damaged" / "iter_0000010" / "datastates.manifest").unlink()
    llama = hf_models.arguments(hf_models.LLAMA)
    hf_models.save(root / "megatron", llama, hf_models.state(llama))
    assert run("export", root / "megatron", root / "llama", "--hf")[0] == 0
    shutil.copytree(root / "run" / "iter_0000005", root / "torn")
    (root / "torn" / "datastates.manifest").unlink()
    shutil.copy(REPORT, root / "run.jsonl")
    return root


def test_every_command_is_here() -> None:
    modules = {name: command.callback.__module__.rpartition(".")[2] for name, command in app.commands.items()}
    assert modules == entry.MODULES  # what is imported for it
    assert set(app.commands) == {words.split()[0] for words, _, _ in SHOWN} - {"--help"}


@pytest.mark.parametrize(("words", "code", "text"), SHOWN, ids=lambda value: str(value)[:40])
def test_a_command_in_a_terminal(
    words: str, code: int, text: str, place: Path, tmp_path: Path, programs: Programs
) -> None:
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    found, lines = in_terminal(words, tmp_path, programs)
    assert found == code, lines
    assert any(text in line for line in lines), lines
    assert all(line == line.rstrip() for line in lines)
    if not words.startswith(MAY_BE_LONG):
        assert not [line for line in lines if len(line) > COLUMNS]


LONG = "runs-of-a-team-that-names-its-directories-at-length/gpt-with-many-settings"
KEY = f"optimizer.dtype_(torch.bfloat16, torch.float32).{LAYER.replace('mlp', 'a_long_name')}.exp_avg"


@pytest.fixture(scope="module")
def long_names(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with long names: runs, a key, and values of arguments."""
    root = tmp_path_factory.mktemp("place")
    saver = new_saver()
    common = {"common_state/shard_0_1": [{"args": arguments(data_path=[f"/data/{LONG}"] * 2)}]}
    save(saver, root / LONG / "iter_0000005", {KEY: torch.ones(3, 4), "w": torch.ones(3, 4)}, common)
    saver.close()
    shutil.copytree(root / LONG, root / f"{LONG}-2")
    save_trained(root / "other", "datastates")
    torn = root / f"{LONG}-2" / "iter_0000005"
    next(torn.glob("data-*")).unlink()
    return root


@pytest.mark.parametrize(
    ("words", "whole"),
    [
        (f"show {LONG}/none", [f"{LONG}/none"]),
        (f"show {LONG}/iter_0000005", [f"    {KEY}"]),
        (f"show {LONG}/iter_0000005 x*", [f"{LONG}/iter_0000005"]),
        (f"args {LONG}/iter_0000005 other", [f'    ["/data/{LONG}", "/data/{LONG}"]']),
        (f"verify {LONG}-2/iter_0000005", [f"{LONG}-2/iter_0000005:"]),
        (f"ls {LONG}-2", ["iter_0000005: missing or of another size: data-"]),
        (f"diff {LONG}/iter_0000005 {LONG}-2/iter_0000005", [f"{LONG}-2/iter_0000005/data-"]),
        (f"prune {LONG}-2 --keep-last 1", [f"{LONG}-2/iter_0000005"]),
        (f"convert {LONG}-2/iter_0000005 made", [f"{LONG}-2/iter_0000005"]),
        (f"trend {LONG}-2", [f"    {LONG}-2"]),
    ],
    ids=lambda value: str(value)[:20],
)
def test_long_names_stay_whole_and_lines_end_between_words(
    words: str, whole: list[str], long_names: Path, programs: Programs
) -> None:
    _, lines = in_terminal(words, long_names, programs)
    for text in whole:
        assert any(text in line for line in lines), lines
    cells = [line for line in lines if line in whole]  # of a table: never folded
    assert not [line for line in lines if len(line) > COLUMNS and len(line.split()) > 1 and line not in cells]


def test_outside_a_terminal_each_row_and_each_error_is_one_line(long_names: Path) -> None:
    code, printed, said = run("show", long_names / LONG / "iter_0000005", KEY)
    row = f"float32  [3, 4]       1      1  48 B  {KEY}"
    assert code == 0 and row in printed.splitlines() and not said
    code, printed, said = run("show", long_names / LONG / "iter_0000005", "x*")
    assert code == 2 and not printed and said.count("\n") == 1


def test_a_terminal_that_names_no_width_has_its_own(place: Path, programs: Programs) -> None:
    command = [sys.executable, "-m", "megatron_datastates", "ls", "nothing"]
    code, text = written_to_terminal(command, place, programs, COLUMNS="-5")
    assert code == 2 and "nothing does not exist" in text
