"""datastates report: reading report files, advice, the picture and the page.

`reports/run.jsonl` was written by recipes/demo.py: a run that was killed, and one that resumed it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed.checkpoint as dcp

import megatron_datastates as ds
from megatron_datastates.dcp import DataStatesWriter
from megatron_datastates.errors import (
    CHANGED_TOO_EARLY,
    MismatchError,
    StorageError,
    UnsupportedFormatError,
    plot_text,
)
from megatron_datastates.reports.advice import Advice, advise
from megatron_datastates.reports.picture import _joined, draw
from megatron_datastates.reports.reading import Save, read_reports
from megatron_datastates.reports.timing import held_shares, intervals, iteration_seconds, usual
from tests.unit.command import run
from tests.unit.states import SMALL

RUN = Path(__file__).parent / "reports" / "run.jsonl"
LINES = RUN.read_text().splitlines(keepends=True)
SAVES = [report for report in map(json.loads, LINES) if report["event"] == "save"]
MIB = 1 << 20


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str | list[dict[str, Any]]], Path]:
    def write(content: str | list[dict[str, Any]]) -> Path:
        path = tmp_path / "report.jsonl"
        text = content if isinstance(content, str) else "".join(json.dumps(one) + "\n" for one in content)
        path.write_text(text)
        return path

    return write


def changed(**fields: Any) -> list[dict[str, Any]]:
    """Returns the saves of the run with other values; a function maps the old value to the new one."""
    return [
        save | {name: value(save[name]) if callable(value) else value for name, value in fields.items()}
        for save in SAVES
    ]


@pytest.fixture
def advised(written: Callable[..., Path]) -> Callable[..., dict[str, Advice]]:
    def advise_on(**fields: Any) -> dict[str, Advice]:
        return {one.title: one for one in advise(read_reports([written(changed(**fields))]).saves)}

    return advise_on


def test_a_run_and_the_one_that_resumed_it_are_read_in_order() -> None:
    found = read_reports([RUN])
    assert [save.iteration for save in found.saves] == [10, 20, 30, 40, 50, 60]
    assert len({save.run for save in found.saves}) == 2
    assert [load.iteration for load in found.loads] == [20]
    assert found.notes == []
    assert all(save.published_ms and save.held_spans_ms for save in found.saves)


def test_files_in_any_order_and_lines_of_other_ranks_change_nothing(tmp_path: Path) -> None:
    others = [save | {"rank": 1, "held_ms": 1e6} for save in SAVES]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(one) + "\n" for one in others))
    assert read_reports([tmp_path / "1.jsonl", RUN]).saves == read_reports([RUN]).saves


def test_an_incomplete_last_line_is_skipped_with_a_note(written: Callable[..., Path]) -> None:
    found = read_reports([written("".join(LINES)[:-200])])
    assert [save.iteration for save in found.saves] == [10, 20, 30, 40, 50]
    assert len(found.notes) == 1 and "killed while it writes" in found.notes[0]


def test_a_line_that_follows_an_incomplete_one_is_read(written: Callable[..., Path]) -> None:
    found = read_reports([written(LINES[0][:100] + LINES[1])])
    assert [save.iteration for save in found.saves] == [20]


def test_a_whole_last_line_of_something_else_is_not_called_incomplete(written: Callable[..., Path]) -> None:
    found = read_reports([written(LINES[0] + '{"event": "other"}')])
    assert len(found.notes) == 1 and "no valid report of a save" in found.notes[0]


def test_a_clock_that_is_set_back_changes_no_order(written: Callable[..., Path]) -> None:
    saves = many(10)
    for save in saves[5:]:
        save["started_at"] -= 3600
    path = written(saves)
    found = read_reports([path]).saves
    assert [save.iteration for save in found] == list(range(1, 11))
    assert intervals(found) == [1.0] * 4 + [None] + [1.0] * 4 + [None]
    assert run("report", path, "--png", path.with_suffix(".png"))[0] == 0


def test_runs_that_overlap_keep_their_intervals(written: Callable[..., Path]) -> None:
    both = [save for one in many(3) for save in (one, one | {"save_id": one["save_id"].replace("ab", "cd")})]
    found = read_reports([written(both)]).saves
    assert [save.run for save in found] == ["ab"] * 3 + ["cd"] * 3
    assert intervals(found) == [1.0, 1.0, None] * 2


def test_files_without_a_save_are_refused_with_what_they_hold(written: Callable[..., Path]) -> None:
    drain = {"event": "drain", "save_id": "ab-1", "iteration": 1, "bytes": 1, "near_ms": 1.0}
    _, _, err = run("report", written([drain]))
    assert "no report of a save in these files, only of other events: drain" in err


def line_with(field: str, value: Any) -> str:
    return json.dumps(SAVES[0] | {field: value}) + "\n"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("nonsense\n", "line 1 was skipped: it is not a whole line of JSON"),
        ('{"loss": 3.5}\n', "line 1 was skipped: it is JSON, but no valid report"),
        ("[1, 2]\n", "no valid report of a save or a load: Expected `object`, got `array`"),
        (LINES[0].replace('"bytes": ', '"bites": ', 1), "Object missing required field `bytes`"),
        (
            LINES[0].replace('"held_ms": ', '"held_ms": "', 1).replace(', "held_parts', '", "held_parts', 1),
            "Expected `float`, got `str` - at `$.held_ms`",
        ),
        (LINES[0].replace('"slowest_rank"', '"rank"'), "required field `slowest_rank` - at `$.ranks_ms"),
        (
            LINES[0].replace('"slowest_rank": 1', '"slowest_rank": Infinity', 1),
            "Expected `int`, got `float` - at `$.ranks_ms",
        ),
        (
            line_with("held_parts_ms", {"a": None}),
            "got `null` - at `$.held_parts_ms[...]`, found {'a': None}",
        ),
        (line_with("providers", {"": 5}), "got `int` - at `$.providers[...]`, found {'': 5}"),
        (line_with("providers", {"": {"eager_bytes": "x"}}), "Expected `float`, got `str` - at `$.providers"),
        (line_with("held_ms", float("nan")), "at `$.held_ms`, found nan"),
        (
            line_with("held_spans_ms", [["polls", 0, float("inf")]]),
            "at `$.held_spans_ms[0][2]`, found [['polls', 0, inf]]",
        ),
        (line_with("held_parts_ms", {"a": 10**400}), "out of range - at `$.held_parts_ms"),
        (line_with("held_ms", 10**400), "out of range - at `$.held_ms`, found 1000"),
        (line_with("bytes", 10**400), "at `$.bytes`, found 1000"),
    ],
)
def test_what_is_not_a_report_is_skipped_with_a_note(
    damage: str, reason: str, written: Callable[..., Path]
) -> None:
    found = read_reports([written(damage + LINES[1])])
    assert len(found.saves) == 1 and len(found.notes) == 1
    assert reason in found.notes[0]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file or directory: give a file that --datastates-report-file has written"),
        ("", "is empty"),
        (
            '{\n  "loss": 3.5\n}\n',
            "holds no report: expected the lines of JSON that --datastates-report-file writes",
        ),
        ('{"loss": 3.5}\n', "it is JSON, but no valid report of a save or a load"),
    ],
)
def test_a_file_without_reports_is_one_line_and_exit_code_2(
    content: str | None, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "other.jsonl"
    if content is not None:
        path.write_text(content)
    code, out, err = run("report", path)
    assert code == 2 and out == ""
    assert reason in err and str(path) in err and err.count("\n") == 1
    with pytest.raises((StorageError, UnsupportedFormatError)):
        read_reports([path])


def test_a_file_without_an_end_is_refused() -> None:
    code, _, err = run("report", "/dev/zero")
    assert code == 2 and "/dev/zero: it has more than" in err


def test_intervals_end_with_their_run() -> None:
    saves = read_reports([RUN]).saves
    known = intervals(saves)
    assert [seconds is None for seconds in known] == [False, True, False, False, False, True]
    assert iteration_seconds(saves) == pytest.approx(
        sorted(s for s in known if s)[1] / 20 + sorted(s for s in known if s)[2] / 20
    )
    assert [save.iteration for save in usual(saves)] == [20, 40, 50, 60]


def test_held_time_is_not_counted_twice() -> None:
    for save in read_reports([RUN]).saves:
        assert sum(held_shares(save).values()) == pytest.approx(save.held_ms, abs=0.01)


def test_held_time_of_programs_is_not_counted_twice(tmp_path: Path) -> None:
    path = tmp_path / "reports.jsonl"
    state = {"w": torch.ones(1 << 16)}
    ds.save(state, tmp_path / "a", report_file=str(path), **SMALL)
    ds.async_save(state, tmp_path / "b", report_file=str(path), **SMALL).wait()
    shares = [held_shares(save) for save in read_reports([path]).saves]
    assert [next(iter(share)) for share in shares] == ["save", "wait"]
    for share, save in zip(shares, read_reports([path]).saves, strict=True):
        assert sum(share.values()) == pytest.approx(save.held_ms, abs=0.01)


def test_a_run_without_trouble_gets_a_note_on_its_cost_only(
    advised: Callable[..., dict[str, Advice]],
) -> None:
    found = advised()
    assert list(found) == ["What a save costs the trainer"]
    text = found["What a save costs the trainer"].text
    assert "(median of 4 saves, without the first ones of a run" in text and "of the time" in text


def test_one_save_that_was_held_for_long_does_not_make_a_part_larger_than_the_whole(
    written: Callable[..., Path],
) -> None:
    saves = many(6, held_ms=10.0, held_parts_ms={"start": 6.0, "polls": 4.0})
    saves[-1] |= {"held_ms": 5e3, "held_parts_ms": {"start": 6.0, "polls": 4994.0}}
    text = advice_on(written(saves), "What a save costs")
    assert "10 ms (median of 5 saves" in text and "the largest part is start: 6.0 ms." in text


def test_failed_saves_come_first(advised: Callable[..., dict[str, Advice]]) -> None:
    found = advised(state="failed", error=f"rank 3: 'w' {CHANGED_TOO_EARLY} torn\nmore", published_ms=None)
    first = next(iter(found.values()))
    assert first.title == "6 of 6 saves failed" and first.level == "failure"
    assert "rank 3: 'w' changed too early: torn." in first.text and "--datastates-paranoid" in first.text
    found = advised(state="failed", error="No space left. Nothing was published.", published_ms=None)
    assert "Nothing was published. docs/operations.md" in next(iter(found.values())).text


def test_a_disk_that_is_slower_than_the_interval_is_found(advised: Callable[..., dict[str, Advice]]) -> None:
    slow = {"min": 3e3, "median": 7e3, "max": 8e3, "slowest_rank": 1}
    found = advised(ranks_ms={"durable": slow}, saves_before=1)
    advice = found["The disk needs most of the interval between saves"]
    assert "6 of 6 saves began" in advice.text and "syncing one takes 8.0 s" in advice.text
    saves = read_reports([RUN]).saves
    assert f"every {-(-8 / 0.8 // (iteration_seconds(saves) or 0)):.0f} iterations" in advice.text


@pytest.mark.parametrize(("confirmed", "takes"), [(930.0, ""), (100.0, "takes 890 ms")])
def test_the_wait_for_the_next_optimizer_step_is_not_the_disks(
    confirmed: float, takes: str, written: Callable[..., Path]
) -> None:
    """Of saves each second: all are durable after 0.95 s, the footer could be written earlier or not."""
    times = {"writing_ms": 40.0, "durable_ms": 950.0, "ranks_ms": {}}
    text = advice_on(written(many(5, **times, confirmed_ms=confirmed, saves_before=1)), "The disk needs")
    assert takes in text and bool(text) == bool(takes)


def test_a_rank_that_is_far_slower_is_named(advised: Callable[..., dict[str, Advice]]) -> None:
    spread = {"min": 300.0, "median": 400.0, "max": 900.0, "slowest_rank": 17}
    advice = advised(ranks=64, ranks_ms={"writing": spread})["Rank 17 is far slower than the others to write"]
    assert "slowest in 4 of 4 saves, and needed 900 ms; the median rank needed 400 ms" in advice.text
    alike = {"min": 300.0, "median": 400.0, "max": 450.0, "slowest_rank": 17}
    assert not any("far slower" in title for title in advised(ranks=64, ranks_ms={"writing": alike}))


@pytest.mark.parametrize(
    ("fields", "title", "text"),
    [
        (
            {"slot_wait_ms": 500.0, "fence_ms": 90.0, "lazy_bytes": 3 << 30, "staging_bytes": 1 << 30},
            "The staging memory is smaller than the shard",
            "--datastates-staging-memory 3GiB",
        ),
        (
            {"memory_wait_ms": 700.0, "slot_wait_ms": 700.0},
            "Copies waited for staging memory to be allocated",
            "700 ms",
        ),
        ({"fence_ms": 80.0}, "The optimizer waits for copies", "80 ms of the host's time"),
        ({"stream_wait_ms": 80.0}, "The optimizer waits for copies", "80 ms of the device's"),
        (
            {"eager_bytes": 900 * MIB, "lazy_bytes": 0, "mode": "sync"},
            "Many bytes are copied before the save returns",
            "add --async-save",
        ),
        (
            {"eager_bytes": 900 * MIB, "lazy_bytes": 0},
            "Many bytes are copied before the save returns",
            "--datastates-lazy is off",
        ),
        (
            {"providers": {"": SAVES[0]["providers"][""] | {"tail_ms": 5e3}}, "durable_ms": 6e3},
            "Serialized objects take most of a save",
            "takes 5.0 s of 6.0 s",
        ),
        (
            {"staging_trouble": "the driver refused"},
            "The staging memory is not as it should be",
            "the driver refused",
        ),
    ],
)
def test_advice_has_numbers(
    fields: dict[str, Any], title: str, text: str, advised: Callable[..., dict[str, Advice]]
) -> None:
    assert text in advised(**fields)[title].text


def advice_on(path: Path, title: str) -> str:
    """Returns the text of all advice whose title begins so."""
    return "".join(one.text for one in advise(read_reports([path]).saves) if one.title.startswith(title))


@pytest.mark.parametrize(
    ("drain_ms", "every"), [(1_500.0, ""), (3_500.0, "--datastates-drain-every 5")], ids=["keeps up", "slow"]
)
def test_the_drain_is_compared_with_the_interval_of_what_it_brings(
    drain_ms: float, every: str, written: Callable[..., Path]
) -> None:
    """Of saves each second, each third one is brought to --save."""
    saves = many(12)
    drain = {"event": "drain", "bytes": 1, "near_ms": drain_ms}
    drains = [drain | {name: save[name] for name in ("save_id", "iteration")} for save in saves[2::3]]
    text = advice_on(written([*saves, *drains]), "Copying from the near tiers")
    assert every in text and bool(text) == bool(every)


@pytest.mark.parametrize(
    ("waited", "option"), [(0.0, "--datastates-copy-threads"), (90.0, "--datastates-staging-memory")]
)
def test_more_staging_memory_is_advised_only_if_copies_waited_for_it(
    waited: float, option: str, written: Callable[..., Path]
) -> None:
    text = advice_on(written(changed(fence_ms=80.0, slot_wait_ms=waited)), "The optimizer waits for copies")
    options = {"--datastates-copy-threads", "--datastates-staging-memory"}
    assert {one for one in options if one in text} == {option}


def test_synchronous_saves_are_not_compared_with_the_interval_that_they_are_part_of(
    written: Callable[..., Path],
) -> None:
    path = written(many(5, mode="sync", durable_ms=950.0, ranks_ms={}))
    assert advice_on(path, "The disk needs") == ""
    assert "--async-save" in advice_on(path, "What a save costs")


def test_a_synchronous_save_at_the_end_does_not_make_a_run_one_of_synchronous_saves(
    written: Callable[..., Path],
) -> None:
    saves = many(6, durable_ms=950.0, confirmed_ms=100.0, ranks_ms={}, eager_bytes=900 * MIB, lazy_bytes=0)
    saves[-1]["mode"] = "sync"
    path = written(saves)
    assert "Writing and syncing one takes" in advice_on(path, "The disk needs")
    assert "--async-save" not in advice_on(path, "")


@pytest.mark.parametrize("encoded", [0, 3])
def test_no_encoding_is_advised_only_where_something_is_encoded(
    encoded: int, written: Callable[..., Path]
) -> None:
    shares = {"": SAVES[0]["providers"][""] | {"encoded_tensors": encoded, "tail_ms": 5e3}}
    path = written(changed(durable_ms=6e3, providers=shares))
    assert ("--datastates-compress 0" in advice_on(path, "Serialized objects")) == bool(encoded)


def test_the_wait_until_objects_may_be_serialized_is_not_the_objects(tmp_path: Path) -> None:
    """A loop that polls late: the thread that serializes begins 0.1 s after the call that saves."""
    path = tmp_path / "reports.jsonl"
    for n in range(2):
        state = {"w": torch.ones(4), "n": [n]}
        handle = ds.async_save(state, tmp_path / str(n), report_file=str(path), **SMALL)
        time.sleep(0.2)
        handle.wait()
    assert all(save.serializing_ms > 100.0 for save in read_reports([path]).saves)
    assert advice_on(path, "Serialized objects") == ""


def test_objects_that_take_long_are_named_whatever_the_last_save_has(written: Callable[..., Path]) -> None:
    shares = {"": SAVES[0]["providers"][""] | {"objects": 70_000, "tail_ms": 5e3}}
    saves = many(6, providers=shares, durable_ms=6e3)
    saves[-1]["providers"] = {}
    text = advice_on(written(saves), "Serialized objects")
    assert "of the model and the optimizer: 70,000 objects" in text


def test_saves_of_dcp_do_not_count_as_saves_that_held_nobody(written: Callable[..., Path]) -> None:
    dcps = {"mode": "dcp", "held_ms": 0.0, "held_parts_ms": {}, "held_spans_ms": []}
    saves = [one | dcps if n % 3 else one for n, one in enumerate(many(9, held_ms=80.0))]
    text = advice_on(written(saves), "What a save costs")
    assert text.startswith("80 ms (median of 2 saves, without the first ones of a run")


def test_the_legend_explains_all_columns_of_times_and_where_the_others_are(tmp_path: Path) -> None:
    out = run("report", RUN, "--html", tmp_path / "page.html")[1]
    head, legend = out.splitlines()[0], next(line for line in out.splitlines() if line.startswith("(held"))
    columns = [name for name in head.split() if name in ("held", "fence", "copied", "written", "published")]
    assert len(columns) == 5 and all(name in legend for name in columns)
    assert "durable" not in head and "--html FILE, has all columns, such as durable" in legend
    assert "durable: " in (tmp_path / "page.html").read_text()


def test_only_the_last_loads_are_printed(written: Callable[..., Path]) -> None:
    load = next(json.loads(line) for line in LINES if '"event": "load"' in line)
    loads = [load | {"iteration": number} for number in range(100, 108)]
    printed = run("report", written([SAVES[0], *loads]))[1]
    assert "the last 5 of 8 loads:" in printed
    assert [number in printed for number in ("iteration 102", "iteration 103")] == [False, True]
    assert "(one save); the largest part" in printed


def test_the_slowest_rank_of_a_load_is_printed(written: Callable[..., Path]) -> None:
    load = next(json.loads(line) for line in LINES if '"event": "load"' in line)
    times = {"opening": 1.0, "reading": 61_000.0, "planning": 7.0}
    load["ranks_ms"] = {part: {"max": most, "slowest_rank": 17} for part, most in times.items()}
    printed = run("report", written([SAVES[0], load]))[1]
    assert "loaded iteration 20 in 360 ms (longest: reading on rank 17, 61 s)" in printed


def test_a_load_that_failed_is_printed_with_its_error(tmp_path: Path) -> None:
    path = tmp_path / "reports.jsonl"
    ds.save({"w": torch.ones(4)}, tmp_path / "a", report_file=str(path), **SMALL)
    ds.load(tmp_path / "a", report_file=str(path))
    with pytest.raises(MismatchError):
        ds.load(tmp_path / "a", into={"w": torch.ones(5)}, report_file=str(path))
    printed = run("report", path)[1]
    assert re.search(r"^loaded a checkpoint in [\d.]+ ms$", printed, re.MULTILINE)
    assert re.search(
        r"^loading a checkpoint failed after [\d.]+ ms: MismatchError: .*'w'", printed, re.MULTILINE
    )


def test_saves_that_prepared_everything_anew_are_counted(written: Callable[..., Path]) -> None:
    saves = [save | {"prepared": save["iteration"] != 50} for save in SAVES]
    found = {one.title: one for one in advise(read_reports([written(saves)]).saves)}
    advice = found["1 of 4 saves could not reuse what the last one had prepared"]
    assert "the others for" in advice.text and "The last one was at iteration 50, for" in advice.text
    never = read_reports([written(changed(prepared=False))])
    assert not any("reuse" in one.title for one in advise(never.saves))


def test_saves_that_a_program_makes_itself_are_not_counted_among_those_not_prepared(
    tmp_path: Path, written: Callable[..., Path]
) -> None:
    own = tmp_path / "own.jsonl"
    for name in ("first", "second"):
        ds.save({"w": torch.ones(4)}, tmp_path / name, report_file=own, **SMALL)
        writer = DataStatesWriter(tmp_path / f"dcp-{name}", report_file=str(own), **SMALL)
        dcp.save({"w": torch.ones(4)}, storage_writer=writer)
    saves = [save | {"prepared": save["iteration"] != 50} for save in SAVES]
    found = advise(read_reports([written(saves), own]).saves)
    assert [one.title for one in found if "reuse" in one.title] == [
        "1 of 4 saves could not reuse what the last one had prepared"
    ]


def test_the_report_says_why_no_save_was_prepared(written: Callable[..., Path]) -> None:
    reason = "the optimizer is a Muon, not a DistributedOptimizer"
    found = read_reports([written(changed(prepared=False, not_prepared_because=reason))])
    advice = next(one for one in advise(found.saves) if "reuse" in one.title)
    assert advice.title.startswith("4 of 4 saves")
    assert advice.text.endswith(f"the last known reason: {reason}.") and "the others" not in advice.text


def test_the_page_is_whole_and_needs_no_network(tmp_path: Path) -> None:
    code, out, err = run("report", RUN, "--out", tmp_path / "pictures")
    assert (code, err) == (0, "")
    page = (tmp_path / "pictures" / "report.html").read_text()
    assert "src=" not in page and "<script" not in page and "@import" not in page
    links = re.findall(r'href="([^"]*)"', page)
    assert links and all(link.startswith("#") for link in links)
    svg = page[page.index("<svg") : page.index("</svg>") + 6]
    elements = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}title")
    titles = [element.text or "" for element in elements]
    assert any(title.startswith("iteration 40: published") for title in titles)
    assert page.count("<tr") == 1 + len(SAVES)
    assert (tmp_path / "pictures" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "wrote" in out


def many(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Returns the reports of a run with so many saves, one a second."""
    first = SAVES[0] | fields
    return [
        first | {"save_id": f"ab-{n}", "iteration": n, "started_at": 1e9 + n} for n in range(1, count + 1)
    ]


def test_a_picture_by_another_name_than_png_is_refused(tmp_path: Path) -> None:
    code, _, err = run("report", RUN, "--png", tmp_path / "x.svg")
    assert code == 2 and "x.svg: expected a name that ends in .png" in err
    assert not (tmp_path / "x.svg").exists()


def test_a_report_that_is_read_is_not_replaced_by_its_page(tmp_path: Path) -> None:
    (tmp_path / "report.jsonl").write_bytes(before := Path(RUN).read_bytes())
    code, out, err = run(
        "report", tmp_path / "report.jsonl", "--html", tmp_path / ".." / tmp_path.name / "report.jsonl"
    )
    assert (code, out) == (2, "") and "it is one of the files that are read" in err
    assert (tmp_path / "report.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["report.html", "report.png"])
def test_a_report_that_is_read_is_not_replaced_by_what_out_writes(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(before := RUN.read_bytes())
    code, out, err = run("report", tmp_path / name, "--out", tmp_path)
    assert (code, out) == (2, "") and err.startswith(f"datastates: --out {tmp_path / name}: it is one of")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(name, before)]


@pytest.mark.parametrize("option", ["--png", "--html"])
def test_what_a_full_disk_has_no_room_for_replaces_nothing(option: str, tmp_path: Path) -> None:
    (target := tmp_path / "report.png").write_bytes(b"the last one")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        code, _, err = run("report", RUN, option, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 2 and err == f"datastates: {target}: File too large\n"
    assert target.read_bytes() == b"the last one" and os.listdir(tmp_path) == ["report.png"]


def test_a_page_goes_through_a_link_or_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("page.html")
    for _ in range(2):
        assert run("report", RUN, "--html", tmp_path / "link")[0] == 0
    assert (tmp_path / "link").is_symlink() and not (tmp_path / "page.html").is_symlink()
    assert run("report", RUN, "--html", "/dev/null")[0] == 0


def test_a_file_in_the_place_of_the_folder_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = run("report", RUN, "--out", tmp_path / "file")
    assert (code, out) == (2, "") and err.endswith("file: it is not a directory\n")


@pytest.mark.parametrize("option", ["--png", "--html"])
def test_a_misspelt_directory_is_not_made(option: str, tmp_path: Path) -> None:
    code, out, err = run("report", RUN, option, tmp_path / "typo" / "x")
    assert (code, out) == (2, "") and f"there is no directory {tmp_path / 'typo'}" in err
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize(
    ("option", "name"), [("--png", "x.png"), ("--html", "x.html"), ("--out", "report.html")]
)
def test_a_directory_in_the_place_of_a_file_is_named_at_once(option: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    target = tmp_path if option == "--out" else tmp_path / name
    code, out, err = run("report", RUN, option, target)
    assert (code, out) == (2, "") and f"{tmp_path / name}: expected a file, found a directory" in err


def test_a_page_may_be_in_the_directory_that_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run("report", RUN, "--out", "new", "--html", "new/page.html")
    assert (code, err) == (0, "") and {path.name for path in Path("new").iterdir()} == {
        "page.html",
        "report.png",
    }


def test_saves_of_dcp_are_drawn_without_what_held_the_trainer(
    written: Callable[..., Path], tmp_path: Path
) -> None:
    nothing: dict[str, Any] = {"held_ms": 0.0, "held_parts_ms": {}, "held_spans_ms": []}
    path = written(many(3, mode="dcp", **nothing))
    assert run("report", path, "--out", tmp_path)[0] == 0
    assert run("report", path)[1].splitlines()[1].split()[2:5] == ["dcp", "-", "-"]
    assert advise(read_reports([path]).saves) == []
    titles = [axes.get_title(loc="left") for axes in draw(read_reports([path]).saves, "").axes]
    assert "What held the trainer" not in titles and "The last saves, one by one" in titles[1]


def test_saves_without_an_iteration_have_short_labels(written: Callable[..., Path]) -> None:
    """As all saves of DCP: labels with their ids lay over each other."""
    saves = many(12, state="failed", error="why", published_ms=None)
    for number, save in enumerate(saves, 1):
        save |= {"iteration": None, "save_id": f"63f181e23b1426f9-{number}"}
    figure = draw(read_reports([written(saves)]).saves, "a run")
    assert [label.get_text() for label in figure.axes[2].get_xticklabels()] == [f"#{n}" for n in range(1, 13)]
    text = advice_on(written(saves), "12 of 12 saves failed")
    assert text.startswith("The last one, at save 63f181e23b1426f9-12: why.")


@pytest.mark.parametrize("name", ["a$x_$b", "a$\\frac{$", "a\x01b", "a\udcff"], ids=ascii)
def test_names_that_are_no_formulas_and_no_xml_are_drawn(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.jsonl"
    path.write_text(
        "\n".join(map(json.dumps, changed(iteration=None, save_id=name, held_parts_ms={name: 1.0})))
    )
    assert run("report", path, "--out", tmp_path / "made")[0] == 0
    figure = draw(read_reports([path]).saves, name)
    assert plot_text(name) in [label.get_text() for label in figure.axes[3].get_legend().get_texts()]


def test_advice_compares_no_save_with_all_others(
    written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of 20,000 saves would take hours."""
    saves = read_reports([written(many(50))]).saves

    def compared(*_: object) -> bool:
        raise AssertionError("saves were compared")

    monkeypatch.setattr(Save, "__eq__", compared)
    assert [one.title for one in advise(saves)][-1] == "What a save costs the trainer"


def test_shapes_in_a_picture_do_not_grow_with_the_number_of_saves(written: Callable[..., Path]) -> None:
    """A page with each save as a shape in each panel would take minutes to make, and megabytes."""
    figure = draw(read_reports([written(many(2000))]).saves, "")
    shapes = [
        len(artist.get_paths()) if hasattr(artist, "get_paths") else 1
        for axes in figure.axes
        for artist in [*axes.patches, *axes.collections]
    ]
    assert sum(shapes) < 2000


def test_spans_that_look_like_one_are_one() -> None:
    assert _joined([(5.0, 1.0), (0.0, 1.0), (1.5, 0.5), (0.5, 0.2)], 1.0) == [(0.0, 2.0), (5.0, 1.0)]


def near_lines(**copies: Any) -> list[dict[str, Any]]:
    """Returns the saves of the run, copied to another node and drained."""
    lines = list(SAVES)
    for save in SAVES:
        same = {name: save[name] for name in ("save_id", "iteration", "directory")}
        made = {"state": "made", "error": None, "partners": ["node-b"], "files": 1, "bytes": 5_000_000}
        begin = save["started_at"] + save["durable_ms"] / 1000
        lines.append(same | made | {"event": "copies", "started_at": begin, "copying_ms": 20.0} | copies)
        lines.append(same | {"event": "drain", "bytes": save["bytes"], "near_ms": 400.0})
    return lines


def test_copies_and_the_drain_are_drawn(written: Callable[..., Path], tmp_path: Path) -> None:
    path = written(near_lines())
    save = read_reports([path]).saves[-1]
    assert save.copies_ms is not None and save.published_ms is not None
    assert save.copies_ms[0] == pytest.approx(save.durable_ms, abs=1.0)
    assert save.copies_ms[1] == pytest.approx(save.durable_ms + 20, abs=1.0)
    assert save.far_ms == save.published_ms + 400
    code, printed, said = run("report", path, "--out", tmp_path / "out")
    assert (code, said) == (0, ""), printed
    page = (tmp_path / "out" / "report.html").read_text()
    assert "copied 5.00 MB from node-b in 20 ms" in page and "in --save after" in page
    assert "no copies on other nodes" not in printed
    drawn = stages_drawn(path)
    without = stages_drawn(written(SAVES))
    assert all(one >= {"copies", "drained"} for one in drawn)
    assert {"copies", "drained"} & set().union(*without) == set()


def test_times_of_milestones_are_plain_numbers(written: Callable[..., Path]) -> None:
    figure = draw(read_reports([written(SAVES)]).saves, "")
    figure.draw_without_rendering()
    axis = figure.axes[2].yaxis
    texts = [label.get_text() for minor in (False, True) for label in axis.get_ticklabels(minor=minor)]
    assert "100" in texts and all(text == "" or float(text) > 0 for text in texts)


def stages_drawn(path: Path) -> list[set[str]]:
    """Returns what the lanes, the bars of single saves and the lines of milestones are called."""
    clock, details, milestones, *_ = draw(read_reports([path]).saves, "").axes
    lanes = {label.get_text() for label in clock.get_yticklabels()}
    return [
        lanes,
        *({text.get_text() for text in one.get_legend().get_texts()} for one in (details, milestones)),
    ]


def test_copies_that_are_missing_are_said(written: Callable[..., Path]) -> None:
    path = written(near_lines(state="incomplete", error="5 MiB are free", partners=[], bytes=0))
    code, printed, _ = run("report", path)
    assert code == 0 and f"{len(SAVES)} of {len(SAVES)} saves have no copies on other nodes" in printed
    assert "5 MiB are free" in printed


def test_a_page_cannot_be_made_to_run_code(written: Callable[..., Path], tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    path = written(changed(state="failed", error=evil, published_ms=None))
    assert run("report", path, "--html", tmp_path / "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert "&lt;script&gt;" in page and "<script" not in page


def test_without_matplotlib_there_are_the_table_and_the_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = run("report", RUN, "--out", tmp_path)
    assert code == 0 and "What a save costs" in out
    assert "pip install 'megatron-datastates[plot]'" in err
    assert "megatron-datastates[plot]" in (tmp_path / "report.html").read_text()
    assert not (tmp_path / "report.png").exists()
    assert run("report", RUN, "--png", tmp_path / "x.png")[0] == 2


def test_only_the_last_saves_are_looked_at_if_asked() -> None:
    out = run("report", RUN, "--last", "2")[1]
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["50", "60"]
    assert "(median of 2 saves); the largest part" in " ".join(out.split())  # neither is the first of its run
    assert run("report", RUN, "--last", "0")[0] == 2


@pytest.mark.parametrize("command", ["report", "plan"])
def test_the_command_starts_without_torch_and_the_native_module(command: str) -> None:
    code = (
        "import sys; sys.argv = ['datastates', '" + command + "', '--help']\n"
        "from megatron_datastates.cli.entry import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'megatron_datastates.engine._native'}\n"
        "loaded = heavy & sys.modules.keys()\n"
        "sys.exit(f'imported {loaded}' if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout and f"datastates {command}" in done.stdout


def test_a_page_has_half_of_a_surrogate_pair_as_an_escape(written, tmp_path: Path) -> None:
    line = line_with("error", "before \ud800 <b>after</b>")
    run("report", written(line), "--html", tmp_path / "page.html")
    assert "before \\ud800 &lt;b&gt;after" in (tmp_path / "page.html").read_text()


def test_a_script_gets_the_run_in_a_few_numbers(written: Callable[..., Path], tmp_path: Path) -> None:
    saves = changed(error=None)
    for save in saves[4:]:
        save |= {"state": "failed", "error": f"no space at {save['iteration']}", "published_ms": None}
    report = written(saves)
    code, printed, reported = run("report", report, "--json", "--html", tmp_path / "page.html")
    found = json.loads(printed)
    assert (code, reported) == (0, "") and (tmp_path / "page.html").is_file()
    last = saves[3]
    assert found["last_published"] == found["last_in_directory"]
    assert found["last_published"] == {
        "iteration": 40,
        "save_id": last["save_id"],
        "published_at": last["started_at"] + last["published_ms"] / 1000,
    }
    counts = [found[name] for name in ("saves", "published", "failed", "failed_since_published")]
    assert counts == [6, 4, 2, 2] and found["last_error"] == "no space at 60"
    held = [save.held_ms for save in usual(read_reports([report]).saves)]
    assert found["held_ms"] == {"median": statistics.median(held), "max": max(held)}
    assert found["written_bytes"] == sum(save["written_bytes"] for save in saves[:4])
    assert set(found["slowest_rank"]) == {"rank", "saves"} and found["slowest_rank"]["rank"] in (0, 1)
    assert found["advice"][0]["title"] == "2 of 6 saves failed" and found["notes"] == []


def test_a_script_gets_numbers_also_where_no_save_was_published(written: Callable[..., Path]) -> None:
    failed = changed(state="failed", error="no space", published_ms=None, ranks=1)
    code, printed, _ = run("report", written(failed), "--json", "--last", 2)
    found = json.loads(printed)
    assert code == 0 and found["saves"] == found["failed_since_published"] == 2
    nothing = ("last_published", "last_in_directory", "held_ms", "slowest_rank")
    assert [found[name] for name in nothing] == [None] * 4


def test_what_is_near_only_is_not_in_the_directory_for_scripts_either(written: Callable[..., Path]) -> None:
    lines = changed(near=True)
    drain = {"event": "drain", "save_id": lines[1]["save_id"], "iteration": 20, "bytes": 1, "near_ms": 500.0}
    _, printed, _ = run("report", written([*lines, drain]), "--json")
    found = json.loads(printed)
    assert found["last_published"]["iteration"] == 60 and found["last_in_directory"]["iteration"] == 20
    copied = lines[1]["started_at"] + (lines[1]["published_ms"] + 500) / 1000
    assert found["last_in_directory"]["published_at"] == pytest.approx(copied)


def test_a_script_gets_no_numbers_from_a_call_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, printed, reported = run("report", RUN, "--json", "--png", tmp_path / "saves.png")
    assert (code, printed) == (2, "") and "matplotlib" in reported


def test_skipped_saves_are_counted_but_for_those_that_were_made_after_all(
    written: Callable[..., Path],
) -> None:
    """Of saves each second, those of iterations 3, 5 and 6; the run ends in 6. Later 3 is saved, too."""
    skips = [
        {"event": "skip", "iteration": n, "unfinished": f"/ck/iter_{n - 1:07d}", "skipped_at": 1e9 + n - 0.1}
        for n in (6, 5, 3)
    ]
    run_of_skips = [*skips, *(save for save in many(6) if save["iteration"] not in (3, 5))]
    assert [skip.iteration for skip in read_reports([written(run_of_skips)]).skips] == [3, 5]
    _, printed, _ = run("report", written(run_of_skips))
    text = " ".join(printed.split())
    assert "2 of 6 saves were skipped" in text and "The last one, at iteration 5: an earlier save" in text
    for last, expected in ((3, 2), (2, 1), (1, 0)):
        found = json.loads(run("report", written(run_of_skips), "--json", "--last", last)[1])
        assert (found["saves"], found["skipped"]) == (last, expected)
    again = {"save_id": "cd-1", "iteration": 3, "started_at": 1e9 + 60}
    assert [skip.iteration for skip in read_reports([written([*run_of_skips, SAVES[0] | again])]).skips] == [
        5
    ]
    assert "only of other events: skip" in " ".join(run("report", written(skips))[2].split())
