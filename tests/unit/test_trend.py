"""Trend: what is reported of runs whose norms and changes are known."""

from __future__ import annotations

import errno
import functools
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import megatron_datastates as ds
from megatron_datastates.cli import shared
from megatron_datastates.cli.trend import sparkline
from megatron_datastates.convert import pictures, trend
from megatron_datastates.convert.sources.datastates import DataStatesSource
from megatron_datastates.convert.sources.torch_dist import TorchDistSource
from tests.unit.command import json_of, run
from tests.unit.states import SMALL
from tests.unit.test_prune import save_job, track

FC1 = "decoder.layers.mlp.linear_fc1.weight"
EMBEDDING = "embedding.word_embeddings.weight"
MOMENT = f"optimizer.state.exp_avg.{FC1}"
OURS, TORCH_DIST = "datastates", "torch_dist"
STEPS = (10, 20, 30)


def state(step: int) -> dict[str, torch.Tensor]:
    """Layer n of 3 has the value n + step / 10, one element of the embedding is a power of 2 of it."""
    fc1 = torch.arange(3.0).reshape(3, 1, 1).expand(3, 4, 2) + step / 10
    embedding = torch.ones(5).bfloat16()
    embedding[3] = 2.0 ** (step // 10)
    return {FC1: fc1.contiguous(), EMBEDDING: embedding, MOMENT: torch.zeros(3, 4, 2)}


def save(directory: Path, format: str, tensors: dict[str, torch.Tensor]) -> None:
    if format == OURS:
        ds.save(tensors, directory, **SMALL)
        return
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(directory), planner=planner, no_dist=True)
    (directory / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )


@pytest.fixture(params=[(OURS,) * 3, (TORCH_DIST,) * 3, (TORCH_DIST, OURS, TORCH_DIST)], ids=str)
def a_run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    for step, format in zip(STEPS, request.param, strict=True):
        save(tmp_path / "run" / f"iter_{step:07d}", format, state(step))
    return tmp_path / "run"


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    for step in STEPS:
        save(tmp_path / "run" / f"iter_{step:07d}", OURS, state(step))
    return tmp_path / "run"


found = functools.partial(json_of, "trend")


@pytest.mark.parametrize("memory", ["1", "2KiB", "1GiB"])
def test_norms_updates_and_largest_changes_of_each_layer(a_run: Path, memory: str, monkeypatch) -> None:
    monkeypatch.setattr(shared.MEMORY, "least_bytes", 1)
    reported = found(a_run, "--memory", memory)
    assert [one["iteration"] for one in reported["checkpoints"]] == list(STEPS)
    places = reported["groups"]["model"]["places"]
    assert list(places) == ["embedding.word_embeddings", *(f"decoder.layers.{n}" for n in range(3))]
    root = math.sqrt(8)  # a layer has 8 elements, all of the same value
    for n in range(3):
        points = places[f"decoder.layers.{n}"]
        assert [point["norm"] for point in points] == pytest.approx([root * (n + k) for k in (1, 2, 3)])
        assert [point["update"] for point in points] == [None, *(pytest.approx(root) for _ in (1, 2))]
        assert points[2]["relative"] == pytest.approx(1 / (n + 2))
        assert [point["largest_change"] for point in points] == [None, 1, 1]
    first, *rest = places["embedding.word_embeddings"]
    assert first["norm"] == pytest.approx(math.sqrt(4 + 4))
    assert [point["largest_change"] for point in rest] == [2, 4]
    total = reported["groups"]["model"]["all"][1]
    assert total["update"] == pytest.approx(math.sqrt(3 * 8 + 4))
    assert reported["groups"]["optimizer exp_avg"]["all"][2]["norm"] == 0


def test_patterns_choose_a_layer(ours: Path) -> None:
    reported = found(ours, "--keys", "decoder.layers.1.*", "--keys", "embedding*")
    assert list(reported["groups"]["model"]["places"]) == ["embedding.word_embeddings", "decoder.layers.1"]
    code, _, error = run("trend", ours, "--keys", "nothing*")
    assert code == 2 and "no tensor in" in error


def test_every_element_of_every_checkpoint_is_read_once_and_nothing_is_written(
    a_run: Path, monkeypatch
) -> None:
    sizes: dict[Path, int] = {}
    for kind in (DataStatesSource, TorchDistSource):

        def read(self, slices, real=kind.read_tensors):
            tensors = real(self, slices)
            sizes[self.directory] = sizes.get(self.directory, 0) + sum(one.nbytes for one in tensors)
            return tensors

        monkeypatch.setattr(kind, "read_tensors", read)
    before = {path: path.stat().st_mtime_ns for path in a_run.parent.rglob("*")}
    monkeypatch.setattr(shared.MEMORY, "least_bytes", 1)
    found(a_run, "--memory", "2KiB")
    expected = sum(tensor.nbytes for tensor in state(10).values())
    assert sizes == {a_run / f"iter_{step:07d}": expected for step in STEPS}
    assert {path: path.stat().st_mtime_ns for path in a_run.parent.rglob("*")} == before


def test_a_block_that_many_tensors_share_is_read_once(tmp_path: Path) -> None:
    tensors = {f"decoder.layers.{n % 40}.{n:04d}.bias": torch.ones(4096) for n in range(200)}
    for step in (1, 2):
        save(tmp_path / f"iter_{step:07d}", OURS, tensors)
    selection = trend.select(trend.open_run(tmp_path), [], "run")
    trend.follow(selection)
    for step in selection.steps:
        stored = sum(path.stat().st_size for path in step.path.glob("data-*"))
        assert step.tensors.checkpoint.costs.bytes_read <= stored


def test_what_a_rollback_has_abandoned_is_left_out(tmp_path: Path) -> None:
    """Else the update of 110 would be from 105, which it does not continue."""
    first = save_job(tmp_path, [100, 105])[100]
    save_job(tmp_path, [110], first)
    track(tmp_path, 110)
    assert [one["iteration"] for one in found(tmp_path)["checkpoints"]] == [100, 110]
    assert "iter_0000105: of an abandoned branch" in run("trend", tmp_path)[2]


def test_progress_reaches_the_total(a_run: Path) -> None:
    selection = trend.select(trend.open_run(a_run), [], "run")
    done: list[int] = []
    trend.follow(selection, progress=done.append)
    assert sum(done) == selection.bytes == 3 * sum(tensor.nbytes for tensor in state(10).values())


def test_a_tensor_that_comes_goes_or_is_reshaped_has_no_update_there(tmp_path: Path) -> None:
    states = [state(10), state(20), state(30), state(40)]
    del states[1][EMBEDDING]
    states[2][FC1] = torch.ones(3, 4, 1)
    for n, one in enumerate(states):
        save(tmp_path / f"iter_{n:07d}", OURS, one)
    places = found(tmp_path)["groups"]["model"]["places"]
    norms = [None if point is None else point["norm"] for point in places["embedding.word_embeddings"]]
    assert norms == [pytest.approx(math.sqrt(8)), None, *(pytest.approx(x) for x in (68**0.5, 260**0.5))]
    updates = [point and point["update"] for point in places["embedding.word_embeddings"]]
    assert updates == [None, None, None, 8]
    assert [point and point["update"] for point in places["decoder.layers.0"]] == [
        None, pytest.approx(math.sqrt(8)), None, None,
    ]  # fmt: skip


# -- checkpoints that cannot be read -----------------------------------------------------------------------


def break_block(directory: Path) -> None:
    (path,) = directory.glob("data-*")
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)


def remove_manifest(directory: Path) -> None:
    (directory / "datastates.manifest").unlink()


def cut_file(directory: Path) -> None:
    (path,) = directory.glob("data-*")
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (break_block, "a wrong checksum"),
        (remove_manifest, "unfinished: it has no"),
        (cut_file, "damaged: missing or of another size: data-"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_in_one_line(ours: Path, damage, reason: str, tmp_path: Path) -> None:
    shutil.copytree(ours / "iter_0000030", ours / "iter_0000040")
    whole = found(ours)
    damage(ours / "iter_0000020")
    code, _, reported = run("trend", ours, "--json")
    (line,) = reported.splitlines()
    assert code == 1
    assert line.startswith(f"datastates: skipped {ours / 'iter_0000020'}: ") and reason in line
    partial = found(ours, code=1)
    assert [bool(one["skipped"]) for one in partial["checkpoints"]] == [False, True, False, False]
    for group, expected in whole["groups"].items():
        for place, points in expected["places"].items():
            points[1] = None
            points[2] |= dict.fromkeys(["update", "relative", "largest_change", "not_finite"])
            assert partial["groups"][group]["places"][place] == points
    assert run("trend", ours)[0] == 1


def test_without_a_readable_checkpoint_there_is_an_error(ours: Path, tmp_path: Path) -> None:
    for directory in ours.glob("iter_*"):
        cut_file(directory)
    for arguments, expected in [
        ((ours,), "no checkpoint of"),
        ((ours / "iter_0000010",), "is a checkpoint, not the directory of a run"),
        ((tmp_path / "nowhere",), "does not exist"),
        ((ours, "--memory", "1023KiB"), "expected at least 1MiB"),
        ((ours, "--plot", tmp_path / "no" / "trend.png"), "is not a directory"),
    ]:
        code, printed, reported = run("trend", *arguments)
        assert (code, printed, reported.count("\n")) == (2, "", 1), reported
        assert expected in reported


# -- text ---------------------------------------------------------------------------------------------------


def test_the_text_has_a_row_for_each_checkpoint_and_for_each_layer(ours: Path) -> None:
    code, printed, reported = run("trend", ours, "--keys", FC1)
    assert (code, reported) == (0, "")
    rows = [line.split() for line in printed.splitlines()]
    assert [row[0] for row in rows[1:4]] == ["10", "20", "30"]
    assert rows[3][1:5] == ["20", "4.9", "0.322", "1"]
    (layer,) = [row for row in rows if row[-1:] == ["decoder.layers.0"]]
    assert layer == ["2.83", "8.49", "█▅", "1", "20", "1", "decoder.layers.0"]


def test_a_sparkline_has_the_largest_of_values_that_share_a_character() -> None:
    assert sparkline([0.0, 1.0, None, 0.5]) == "▁█ ▅"
    assert sparkline([0.0] * 15 + [1.0]) == "▁▁▁▁▁▁▁█"
    assert sparkline([math.inf, 1.0]) == "█▁"
    assert sparkline([math.nan, 1.0]) == " █"
    assert sparkline([0.0]) == "▁" and sparkline([]) == ""


def test_a_plot_that_cannot_be_written_does_not_lose_the_numbers(
    ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "trend.png")

    monkeypatch.setattr(pictures, "plot_trend", full)
    code, printed, reported = run("trend", ours, "--json", "--plot", tmp_path / "trend.png")
    assert code == 2 and reported == "datastates: trend.png: No space left on device\n"
    assert json.loads(printed)["groups"]


def test_a_plot_is_drawn_and_never_over_another_file(ours: Path, tmp_path: Path) -> None:
    target = tmp_path / "trend.png"
    assert run("trend", ours, "--plot", target)[0] == 0
    assert target.read_bytes().startswith(b"\x89PNG")
    code, printed, reported = run("trend", ours, "--plot", target)
    assert (code, printed) == (2, "") and "exists: choose another target" in reported


@pytest.mark.parametrize(
    "words",
    ["diff {} {other}", "diff {other} {}", "cat {} w", "cat {} o", "cat {} w --out {out}", "show {} --stats"],
)
def test_a_checkpoint_that_is_saved_again_meanwhile_is_not_compared(
    words: str, tmp_path: Path, monkeypatch
) -> None:
    def stored(directory: Path, value: float) -> None:
        save(directory, TORCH_DIST, {"w": torch.full((3,), value), "o": ["an object"]})

    again = tmp_path / "again"
    for path in (again, tmp_path / "other"):
        stored(path, 1)
    for name in ("read_tensor", "read_object"):

        def read(self, *arguments, real=getattr(TorchDistSource, name)):  # noqa: B008
            value = real(self, *arguments)
            if self.directory == again:
                stored(again, 2)
            return value

        monkeypatch.setattr(TorchDistSource, name, read)
    names = {"other": tmp_path / "other", "out": tmp_path / "w.npy"}
    code, printed, reported = run(*words.format(again, **names).split())
    assert (code, printed) == (2, "") and "has changed since it was opened: a save into" in reported
    assert not names["out"].exists()


def test_a_checkpoint_that_is_saved_again_meanwhile_is_skipped(tmp_path: Path, monkeypatch) -> None:
    for number in (1, 2):
        save(tmp_path / f"iter_{number:07d}", TORCH_DIST, state(10))
    real = TorchDistSource.read_tensors

    def read(self, slices):
        found = real(self, slices)
        if self.directory.name == "iter_0000002":
            save(self.directory, TORCH_DIST, state(20))
        return found

    monkeypatch.setattr(TorchDistSource, "read_tensors", read)
    reported = found(tmp_path, code=1)
    assert [bool(one["skipped"]) for one in reported["checkpoints"]] == [False, True]
    assert "has changed since it was opened" in reported["checkpoints"][1]["skipped"]
    assert reported["groups"]["model"]["all"][1] is None
