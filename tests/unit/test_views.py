"""What comparisons see of optimizer state that is stored in buckets; and the pictures of differences."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

import megatron_datastates as ds
from megatron_datastates.convert import pictures
from tests.unit.command import json_of, run
from tests.unit.states import SMALL, new_saver, save
from tests.unit.test_optimizer_state import BUCKET, bucket, map_of, parameter, shard

PREFIX = "optimizer.distributed.dp_group_idx_"
LAYERS = "decoder.layers.mlp.linear_fc1.weight"
STATE = f"optimizer.state.exp_avg.{LAYERS}"
WHOLE = torch.arange(24.0).reshape(4, 6)  # four layers
SHAPES = ((4, 6), (4, 3))


def in_buckets(directory: Path, whole: torch.Tensor = WHOLE, *, halves: int = 2, **fields: Any) -> Path:
    """Saves a model of four layers, and a state of it by columns, each part in the bucket of a rank."""
    tensors: dict[str, torch.Tensor] = {LAYERS: WHOLE, "embedding.word_embeddings.weight": torch.ones(3)}
    tensors["decoder.final_layernorm.weight"] = torch.ones(3)
    objects: dict[str, Any] = {}
    width = 6 // halves
    for rank in range(halves):
        part = whole[:, rank * width : (rank + 1) * width].reshape(-1)
        tensors[f"{PREFIX}{rank}.{BUCKET}.exp_avg"] = torch.cat([torch.full((5,), -1.0), part])
        place = shard(LAYERS, (4, 6), (0, rank * width), (4, width), 0, (width, 1)) | fields
        described = map_of(bucket(5 + len(part), parameter("w", 5, 5 + len(part), place)))
        objects[f"{PREFIX}{rank}.datastates_map/shard_0_1"] = [described]
    saver = new_saver()
    save(saver, directory, tensors, objects)
    saver.close()
    return directory


found = functools.partial(json_of, "diff")


def test_buckets_of_other_parallel_layouts_are_compared_by_parameter(tmp_path: Path) -> None:
    one, other = in_buckets(tmp_path / "a"), in_buckets(tmp_path / "b", halves=3)
    assert STATE in found(one, other, code=0)["tensors"]
    changed = WHOLE.clone()
    changed[2, 4] += 1
    reported = found(one, in_buckets(tmp_path / "c", changed, halves=1), code=1)
    layers = reported["layers"]["optimizer exp_avg"]
    assert {name: drift["changed"] for name, drift in layers.items()} == {
        f"decoder.layers.{n}": int(n == 2) for n in range(4)
    }
    assert list(reported["modules"]["model"]) == ["decoder.final_layernorm", "embedding.word_embeddings"]


def test_buckets_equal_state_that_is_stored_by_parameter(tmp_path: Path) -> None:
    model = {LAYERS: WHOLE, "embedding.word_embeddings.weight": torch.ones(3)}
    ds.save({**model, "decoder.final_layernorm.weight": torch.ones(3), STATE: WHOLE}, tmp_path / "b", **SMALL)
    reported = found(in_buckets(tmp_path / "a"), tmp_path / "b", code=0)
    assert reported["tensors"][STATE]["changed"] == 0


def test_where_another_has_buckets_and_no_map_all_are_compared_as_stored(tmp_path: Path) -> None:
    one = in_buckets(tmp_path / "a")
    stored = ds.open(one)
    ds.save({key: stored.read_tensor(key) for key in stored.tensors}, tmp_path / "b", **SMALL)
    reported = found(one, tmp_path / "b", code=0)
    assert f"{PREFIX}0.{BUCKET}.exp_avg" in reported["tensors"] and STATE not in reported["tensors"]
    assert list(reported["modules"]["optimizer exp_avg"]) == ["buckets"]


def test_elements_without_state_are_zeros(tmp_path: Path) -> None:
    # Six layers, of which the last two are frozen.
    fields = {"global_shape": [6, 6], "shape": [4, 6], "offset": [0, 0]}
    one = in_buckets(tmp_path / "a", halves=1, **fields)
    whole = torch.cat([WHOLE, torch.zeros(2, 6)])
    ds.save({STATE: whole}, tmp_path / "b", **SMALL)
    reported = found(one, tmp_path / "b", "--keys", STATE, code=0)
    assert len(reported["layers"]["optimizer exp_avg"]) == 6


def test_a_map_with_almost_nothing_but_holes_is_refused(tmp_path: Path) -> None:
    hostile = in_buckets(tmp_path / "a", halves=1, global_shape=[4, 1 << 50])
    code, printed, reported = run("diff", hostile, hostile)
    assert (code, printed) == (1, "") and f"'{STATE}' has holes: 24 of {1 << 52} elements" in reported


def test_trend_follows_buckets_by_parameter(tmp_path: Path) -> None:
    in_buckets(tmp_path / "iter_0000001")
    in_buckets(tmp_path / "iter_0000002", WHOLE * 3, halves=1)
    code, printed, _ = run("trend", tmp_path, "--json", "--keys", "optimizer*")
    assert code == 0
    points = json.loads(printed)["groups"]["optimizer exp_avg"]["places"]["decoder.layers.3"]
    norm = float(WHOLE[3].norm())
    assert [point["norm"] for point in points] == pytest.approx([norm, 3 * norm])
    assert points[1]["relative"] == pytest.approx(2)


def test_trend_skips_a_checkpoint_whose_map_is_damaged(tmp_path: Path) -> None:
    in_buckets(tmp_path / "iter_0000001")
    in_buckets(tmp_path / "iter_0000002", halves=1, global_shape=[4, 1 << 50])
    code, _, reported = run("trend", tmp_path)
    assert code == 1 and reported.count("\n") == 1 and "iter_0000002: " in reported


# -- pictures -----------------------------------------------------------------------------------------------


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects figures instead of saving them."""
    made: list[Any] = []
    monkeypatch.setattr(pictures, "_save", lambda figure, target: made.append(figure))
    return made


def texts(figure: Any) -> set[str]:
    labels = [figure._suptitle]
    for axes in figure.axes:
        labels += [axes.title, axes.yaxis.label, *axes.get_xticklabels()]
    return {label.get_text() for label in labels}


def require_whole(figure: Any) -> None:
    """Checks that nothing that is drawn leaves the picture."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    box, (width, height) = figure.get_tightbbox(canvas.get_renderer()), figure.get_size_inches()
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height


def test_the_plot_of_a_difference_has_names_modules_buckets_and_axes_from_zero(
    tmp_path: Path, figures: list[Any]
) -> None:
    one, other = in_buckets(tmp_path / "a"), in_buckets(tmp_path / "b", WHOLE + 100)
    run("diff", one, other, "--plot", tmp_path / "drift.png")
    (figure,) = figures
    require_whole(figure)
    shown = texts(figure)
    assert {"model", "optimizer exp_avg", "embedding.word_embeddings", "decoder.final_layernorm"} <= shown
    assert {"0", "1", "2", "3"} <= shown
    (title,) = [text for text in shown if "Difference" in text]
    assert title.count("\n") == 2 and str(one)[-20:] in title and str(other)[-20:] in title
    assert all(axes.get_ylim()[0] == 0 for axes in figure.axes)
    assert len(figure.axes) == 4
    (line,) = figure.axes[2].lines
    assert list(line.get_ydata()) == pytest.approx(
        [float((WHOLE[n] * 0 + 100).norm() / WHOLE[n].norm()) for n in range(4)]
    )


def test_the_plot_of_a_trend_has_a_line_for_each_layer_and_module(tmp_path: Path, figures: list[Any]) -> None:
    for n in (1, 2, 3):
        in_buckets(tmp_path / "run" / f"iter_{n:07d}", WHOLE * n)
    run("trend", tmp_path / "run", "--plot", tmp_path / "trend.png")
    (figure,) = figures
    require_whole(figure)
    model, moment = figure.axes[0], figure.axes[3]
    assert (len(model.lines), len(moment.lines)) == (6, 4)
    assert list(moment.lines[1].get_xdata()) == [1, 2, 3]
    norm = float(WHOLE[1].norm())
    assert list(moment.lines[1].get_ydata()) == pytest.approx([norm, 2 * norm, 3 * norm])
    assert all(axes.get_ylim()[0] == 0 for axes in figure.axes)
