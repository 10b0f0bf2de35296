"""Diff: what is reported of checkpoints whose differences are known."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.cli import shared
from megatron_datastates.convert import pictures
from megatron_datastates.convert.diff import choose_comparison, diff
from megatron_datastates.convert.drift import Drift, compare
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.sources.datastates import DataStatesSource
from tests.unit.command import json_of, run
from tests.unit.states import KNOWN_DTYPES, SMALL, random_tensor

FC1 = "decoder.layers.mlp.linear_fc1.weight"
NORM = "decoder.final_layernorm.weight"
MOMENT = f"optimizer.state.exp_avg.{FC1}"


def state() -> dict[str, torch.Tensor]:
    return {FC1: torch.ones(4, 8, 2), NORM: torch.ones(8), MOMENT: torch.ones(4, 8, 2)}


@pytest.fixture
def pair(tmp_path: Path):
    """Saves two states; returns their directories."""

    def saved(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> tuple[Path, Path]:
        ds.save(one, tmp_path / "a", **SMALL)
        ds.save(other, tmp_path / "b", **SMALL)
        return tmp_path / "a", tmp_path / "b"

    return saved


found = functools.partial(json_of, "diff")


@pytest.mark.parametrize("memory", ["1", "1KiB", "1GiB"])
def test_a_change_in_one_layer_is_reported_with_its_size_and_place(pair, memory, monkeypatch):
    monkeypatch.setattr(shared.MEMORY, "least_bytes", 1)
    other = state()
    other[FC1][2, 3, 1] = 1.5
    other[FC1][3, 0, 0] = 0.875
    other[FC1][3, 0, 1] = math.nan
    other[MOMENT][1, 0, 0] = -1.0
    reported = found(*pair(state(), other), "--memory", memory, code=1)
    assert reported["tensors"][FC1] == {
        "changed": 3, "largest_absolute": 0.5, "largest_relative": pytest.approx(1 / 3), "not_finite": 1,
        "distance": pytest.approx(math.hypot(0.5, 0.125) / float(state()[FC1].double().norm())),
    }  # fmt: skip
    assert reported["tensors"][NORM]["changed"] == 0
    distance = math.hypot(0.5, 0.125) / float(torch.cat([state()[FC1].flatten(), state()[NORM]]).norm())
    assert reported["groups"]["model"] == reported["tensors"][FC1] | {"distance": pytest.approx(distance)}
    assert reported["groups"]["optimizer exp_avg"]["largest_relative"] == 2.0
    layers = reported["layers"]["model"]
    assert [layers[f"decoder.layers.{n}"]["largest_absolute"] for n in range(4)] == [0, 0, 0.5, 0.125]
    assert reported["first_layer"] == "decoder.layers.2"  # of the model; its optimizer differs from 1 on
    assert reported["equal"] is False


def test_equal_checkpoints_are_equal(pair):
    reported = found(*pair(state(), state()), code=0)
    assert reported["equal"] is True and reported["first_layer"] is None and len(reported["tensors"]) == 3


def test_layers_whose_keys_have_numbers_are_layers_too(pair):
    keys = [f"decoder.layers.{n}.mixer.weight" for n in (9, 10, 11)]
    one = {key: torch.zeros(2) for key in keys}
    reported = found(*pair(one, {**one, keys[0]: torch.ones(2), keys[1]: torch.ones(2)}), code=1)
    assert reported["first_layer"] == "decoder.layers.9"


def test_keys_shapes_and_dtypes_that_differ_are_reported_and_the_rest_compared(pair):
    one = {"same": torch.ones(2), "gone": torch.ones(2), "shape": torch.ones(2), "dtype": torch.ones(2)}
    two = {"same": torch.ones(2), "new": torch.ones(2), "shape": torch.ones(3)}
    reported = found(*pair(one, {**two, "dtype": torch.ones(2).bfloat16()}), code=1)
    assert (reported["removed"], reported["added"]) == (["gone"], ["new"])
    assert reported["reshaped"] == {"shape": [[2], [3]]}
    assert reported["retyped"] == {"dtype": ["float32", "bfloat16"]}
    assert reported["tensors"].keys() == {"same", "dtype"} and reported["tensors"]["dtype"]["changed"] == 0


@pytest.mark.parametrize("alone", ["removed", "added", "reshaped", "retyped"])
def test_any_of_these_alone_is_a_difference(pair, alone):
    base = {"w": torch.ones(2)}
    changed = {
        "removed": ({**base, "x": torch.ones(1)}, base),
        "added": (base, {**base, "x": torch.ones(1)}),
        "reshaped": (base, {"w": torch.ones(1, 2)}),
        "retyped": (base, {"w": torch.ones(2).half()}),
    }
    assert found(*pair(*changed[alone]), code=1)[alone]


def test_patterns_choose_what_is_compared(pair):
    other = {**state(), NORM: torch.zeros(8)}
    directories = pair(state(), other)
    assert found(*directories, "--keys", "decoder.layers.*", code=0)["tensors"].keys() == {FC1}
    assert found(*directories, "--keys", "*norm*", code=1)["tensors"].keys() == {NORM}


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([NAN, 1.0], [NAN, 1.0], Drift()),
        ([NAN, 1.0], [1.0, 1.0], Drift(1, 0.0, 0.0, 1)),
        ([1.0, 1.0], [1.0, INF], Drift(1, 0.0, 0.0, 1)),
        ([INF, 1.0], [INF, 3.0], Drift(1, 2.0, 2 / 3, 0)),
        ([INF, 1.0], [-INF, 1.0], Drift(1, 0.0, 0.0, 1)),
        ([0.0, 1.0], [-0.0, 1.0], Drift()),
        ([0.0], [1e-300], Drift(1, 1e-300, 1.0, 0)),
    ],
)
def test_values_that_are_not_finite_are_counted_and_do_not_hide_others(left, right, expected):
    seen = compare(torch.tensor(left, dtype=torch.float64), torch.tensor(right, dtype=torch.float64))
    assert dataclasses.replace(seen, squares_apart=0.0, squares_first=0.0) == expected


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 4.0], [3.0, 9.0], 1.0),
        ([3.0, 4.0, NAN], [4.0, 4.0, 1.0], 0.2),
        ([0.0, 0.0], [0.0, 1.0], INF),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
    ],
)
def test_distance_is_that_of_vectors(left, right, expected):
    halves = [compare(torch.tensor(left[i:][:1]), torch.tensor(right[i:][:1])) for i in range(len(left))]
    whole = Drift()
    for half in halves:
        whole.add(half)
    assert whole.distance == expected
    assert compare(torch.tensor(left), torch.tensor(right)).distance == expected


def test_distance_in_json_is_a_number_or_null(pair):
    tensors = {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2)}
    reported = found(*pair(tensors, {"a": torch.tensor([3.0, 9.0]), "b": torch.ones(2)}), code=1)["tensors"]
    assert (reported["a"]["distance"], reported["b"]["distance"]) == (1.0, None)


def test_nans_with_other_bits_are_equal():
    nans = torch.tensor([0x7FC0, 0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    assert compare(nans[:1], nans[1:]).changed == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_integers_that_a_double_cannot_tell_apart_differ(dtype):
    one = torch.tensor([1 << 60, 5]).to(dtype)
    other = torch.tensor([(1 << 60) + 1, 5]).to(dtype)
    assert compare(one, other).changed == 1


@pytest.mark.parametrize(
    ("left", "right", "apart"),
    [
        ((torch.int64, (1 << 53) + 1), (torch.int64, 1 << 53), 1),
        ((torch.int64, -(1 << 63)), (torch.int64, (1 << 63) - 1), float((1 << 64) - 1)),
        ((torch.uint64, (1 << 64) - 1), (torch.uint64, (1 << 64) - 2), 1),
        ((torch.uint64, (1 << 63) + 1), (torch.int64, (1 << 63) - 1), 2),
        ((torch.int64, (1 << 53) + 1), (torch.float64, 1 << 53), 1),
        ((torch.float64, 2.0**63), (torch.int64, (1 << 63) - 1), 1),
        ((torch.int64, 1 << 60), (torch.float64, 0.5), float(1 << 60)),
        ((torch.int64, 1 << 60), (torch.bfloat16, 1 << 60), 0),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (2, 1)])
def test_differences_of_integers_are_exact(left, right, apart, shape, monkeypatch):
    monkeypatch.setattr("megatron_datastates.convert.drift._AT_A_TIME", 1)
    one, other = (torch.full(shape, value, dtype=dtype) for dtype, value in (left, right))
    seen = compare(one, other)
    assert (seen.changed, seen.largest_absolute) == ((one.numel() if apart else 0), apart)
    assert (seen.distance > 0) == (seen.largest_relative > 0) == bool(apart)


@pytest.mark.parametrize(
    ("left", "right", "changed"),
    [
        (complex(NAN, 1), complex(2, NAN), 1),
        (complex(NAN, 1), complex(NAN, 2), 1),
        (complex(NAN, 1), complex(NAN, 1), 0),
        (complex(1, INF), complex(1, INF), 0),
    ],
)
def test_complex_numbers_are_compared_by_their_halves(left, right, changed):
    assert compare(torch.tensor([left, 1j]), torch.tensor([right, 1j])).changed == changed


@pytest.mark.parametrize(
    ("change", "first_layer"),
    [
        ({"decoder.layers.1.w": torch.ones(3)}, "decoder.layers.1"),
        ({"decoder.layers.0.w": torch.ones(2)}, "decoder.layers.0"),
        ({"decoder.layers.1.w": None}, "decoder.layers.1"),
        ({"decoder.layers.w": torch.ones(4, 2)}, "decoder.layers.0"),
        ({"optimizer.state.exp_avg.decoder.layers.0.w": torch.ones(2)}, "decoder.layers.5"),
    ],
)
def test_layers_of_tensors_without_a_twin_differ(pair, change, first_layer):
    one = {f"decoder.layers.{n}.w": torch.ones(2) for n in (1, 5)}
    other = {**one, "decoder.layers.5.w": torch.zeros(2), **change}
    other = {key: tensor for key, tensor in other.items() if tensor is not None}
    assert found(*pair(one, other), code=1)["first_layer"] == first_layer


def test_json_is_json_where_numbers_overflow(pair):
    huge = torch.tensor([1e308], dtype=torch.float64)
    printed = run("diff", *pair({"w": huge}, {"w": -huge}), "--json")[1]
    assert "Infinity" not in printed and "NaN" not in printed
    assert json.loads(printed)["tensors"]["w"]["largest_absolute"] is None


def test_a_long_key_is_never_folded(pair):
    key = "decoder.layers." + "a" * 200
    assert f"  {key}\n" in run("diff", *pair({key: torch.ones(1)}, {key: torch.zeros(1)}))[1]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", [name for name in KNOWN_DTYPES if name != "float4_e2m1fn_x2"])
def test_tensors_of_every_dtype_are_compared(name: str):
    dtype = getattr(torch, name)
    one = torch.tensor([True, False, True]).to(torch.float32).to(dtype)
    other = torch.tensor([True, True, True]).to(torch.float32).to(dtype)
    assert compare(one, one.clone()).changed == 0
    assert compare(one, other).changed == (
        0 if name == "float8_e8m0fnu" and bool((one == other).all()) else 1
    )
    assert compare(random_tensor(dtype, (4, 4)), random_tensor(dtype, (4, 4))).changed == 0


def test_torchs_warning_of_complex_halves_does_not_reach_standard_error(pair):
    state = {"w": torch.zeros(8, dtype=torch.uint8).view(torch.complex32)}
    paths = pair(state, state)
    words = [sys.executable, "-m", "megatron_datastates", "diff", *paths]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("equal: 1 tensor compared, 0 changed\n", "")


def test_tensors_without_elements_are_equal(pair):
    one = {"none": torch.empty(0, 3), "layers.none": torch.empty(0), "layers.scalar": torch.tensor(1.0)}
    assert found(*pair(one, one), code=0)["tensors"].keys() == one.keys()


def test_no_more_than_the_memory_asked_for_is_read_at_once(pair, monkeypatch):
    directories, real, sizes = pair(state(), state()), DataStatesSource.read_tensors, []

    def read(*arguments: object) -> list[torch.Tensor]:
        tensors = real(*arguments)
        sizes.append(sum(tensor.numel() for tensor in tensors))
        return tensors

    monkeypatch.setattr(DataStatesSource, "read_tensors", read)
    monkeypatch.setattr(shared.MEMORY, "least_bytes", 256)
    found(*directories, "--memory", "1024", code=0)
    assert max(sizes) == 4  # elements of 64 bytes, with all that is computed of them; four such parts at once


def test_progress_reaches_the_total_also_where_shapes_differ(pair):
    one, other = (open_source(path) for path in pair(state(), {**state(), NORM: torch.ones(3)}))
    comparison, done = choose_comparison(one, other), []
    diff(one, other, comparison, progress=done.append)
    assert sum(done) == comparison.bytes == sum(tensor.nbytes for tensor in state().values())


def test_the_text_output_says_what_changed(pair):
    other = state()
    other[FC1][2] += 0.5
    del other[NORM]
    code, printed, _ = run("diff", *pair(state(), other))
    assert code == 1
    assert f"removed: {NORM}" in printed and "first differing layer: decoder.layers.2" in printed
    assert "different: 2 tensors compared, 1 changed" in printed and "0.333" in printed


def test_the_help_explains_every_column(pair):
    other = state()
    other[FC1][2] += 0.5
    lines = run("diff", *pair(state(), other))[1].splitlines()
    head = next(line for line in lines if line.endswith("  tensor"))
    columns = re.split(" {2,}", head.strip())[:-1]
    assert len(columns) == 5 and all(f'"{column}"' in run("diff", "--help")[1] for column in columns)


def test_the_last_line_says_what_was_not_compared(pair):
    objects = [{"rng": [1], "common": [2]}, {"rng": [3], "args": [4]}]
    paths = pair(*[{"w": torch.ones(1), **one} for one in objects])
    assert run("diff", *paths)[1] == "equal: 1 tensor compared, 0 changed; 3 objects not compared\n"
    assert run("diff", *paths, "--keys", "w")[1] == "equal: 1 tensor compared, 0 changed\n"
    assert found(*paths, code=0)["objects_not_compared"] == 3


def test_brackets_in_a_key_are_shown_as_they_are(pair):
    printed = run("diff", *pair({"w[bold]": torch.ones(1)}, {"w[bold]": torch.zeros(1)}))[1]
    assert "  w[bold]\n" in printed


def test_a_key_with_a_line_feed_makes_no_line_of_its_own(pair):
    key = "x\nequal: 2 tensors compared, 0 changed"
    other = {key: torch.ones(2), "layers.0.w": torch.ones(1)}
    printed = run("diff", *pair({"w": torch.ones(1), key: torch.ones(1)}, other))[1]
    assert not [line for line in printed.splitlines() if line.startswith("equal")]
    assert "shape: x\\nequal" in printed


def test_a_plot_that_cannot_be_written_does_not_lose_the_numbers(pair, tmp_path, monkeypatch):
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "drift.png")

    monkeypatch.setattr(pictures, "plot_drift", full)
    directories = pair(state(), {**state(), FC1: torch.zeros(4, 8, 2)})
    code, printed, reported = run("diff", *directories, "--json", "--plot", tmp_path / "drift.png")
    assert code == 2 and reported == "datastates: drift.png: No space left on device\n"
    assert json.loads(printed)["groups"]


def test_a_plot_is_drawn_and_never_over_another_file(pair, tmp_path):
    other = {**state(), FC1: torch.zeros(4, 8, 2)}
    directories, target = pair(state(), other), tmp_path / "drift.png"
    assert run("diff", *directories, "--plot", target)[0] == 1
    assert target.read_bytes().startswith(b"\x89PNG")
    before = sorted(tmp_path.rglob("*"))
    code, printed, reported = run("diff", *directories, "--plot", target)
    assert (code, printed) == (2, "") and "exists: choose another target" in reported
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("command", ["diff", "trend"])
def test_names_with_dollar_signs_are_no_formulas(command: str, pair, tmp_path):
    name = "$\\frac{$"
    one, other = pair(*({f"{name}.w": torch.ones(1), f"{name}.layers.0.w": torch.ones(1)},) * 2)
    (tmp_path / name).mkdir()
    for number, path in enumerate((one, other)):
        path.rename(tmp_path / name / f"iter_{number:07d}")
    places = sorted((tmp_path / name).iterdir()) if command == "diff" else [tmp_path / name]
    code, _, reported = run(command, *places, "--plot", tmp_path / "plot.png")
    assert (code, reported) == (0, "") and (tmp_path / "plot.png").stat().st_size > 10_000


def test_a_plot_without_matplotlib_says_at_once_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, reported = run("diff", tmp_path / "not read", tmp_path, "--plot", tmp_path / "drift.png")
    assert code == 2 and "pip install 'megatron-datastates[plot]'" in reported


def test_bad_input_is_one_line(pair, tmp_path):
    one, other = pair(state(), state())
    for arguments, expected in [
        ((one, tmp_path), "no checkpoint"),
        ((tmp_path / "nowhere", other), "does not exist"),
        ((one, other, "--keys", "nothing"), "no tensor in"),
        ((one, other, "--memory", "much"), "expected a size such as"),
        ((one, other, "--memory", "1023KiB"), "'--memory': 1023KiB: expected at least 1MiB"),
        ((one, other, "--plot", tmp_path / "no" / "drift.png"), "is not a directory"),
    ]:
        code, printed, reported = run("diff", *arguments)
        assert (code, printed, reported.count("\n")) == (2, "", 1), reported
        assert expected in reported


@pytest.mark.parametrize("command", ["diff", "trend"])
def test_elements_without_numbers_are_compared_by_their_bytes(command: str, pair):
    odd = [torch.tensor([1, 2, n], dtype=torch.uint8).view(torch.float4_e2m1fn_x2) for n in (3, 4)]
    one, other = pair({"w": odd[0], "x": torch.ones(1)}, {"w": odd[1], "x": torch.zeros(1)})
    if command == "diff":
        tensors = found(one, other, code=1)["tensors"]
        assert (tensors["w"]["changed"], tensors["w"]["distance"]) == (1, None)
        assert (tensors["x"]["changed"], tensors["x"]["distance"]) == (1, 1.0)
        return
    for number, path in enumerate((one, other), 1):
        path.rename(one.parent / f"iter_{number:07d}")
    code, printed, said = run("trend", one.parent, "--json")
    assert code == 0, said
    (points,) = json.loads(printed)["groups"].values()
    assert [point["norm"] for point in points["places"]["w"]] == [None, None]
    assert points["all"][0] == dict.fromkeys(("norm", "update", "relative", "largest_change", "not_finite"))
    assert [point["norm"] for point in points["places"]["x"]] == [1, 0]
