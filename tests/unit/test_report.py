"""Reports of saves, and the records that ranks exchange for them."""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_datastates.config import Options
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.format.values import SaveId
from megatron_datastates.pipeline.load_report import reported_load
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.report import Listener, Reporter, save_report
from megatron_datastates.pipeline.saving.held import HeldTime, trainer_held
from megatron_datastates.pipeline.saving.milestones import SaveContext
from megatron_datastates.pipeline.saving.rank_save import RankSave
from megatron_datastates.pipeline.saving.records import (
    ENDPOINT_BYTES,
    HOST_BYTES,
    RankRecord,
    Records,
    decode_failures,
    encode_failure,
)
from megatron_datastates.providers.base import Mutability, TensorSource
from megatron_datastates.providers.objects import ObjectSource
from megatron_datastates.providers.streams import StreamSource
from megatron_datastates.providers.transforms import Compressed
from megatron_datastates.threads import BackgroundThread
from tests.support.waiting import eventually
from tests.unit.states import State, new_saver, save

WORD, LONG, SECONDS = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.floats(0, 1e9)
DIGEST, SHA256 = st.binary(min_size=16, max_size=16), st.binary(min_size=32, max_size=32)
HOST = st.binary(min_size=HOST_BYTES, max_size=HOST_BYTES)
ENDPOINT = st.binary(min_size=ENDPOINT_BYTES, max_size=ENDPOINT_BYTES)
RECORDS = st.builds(
    RankRecord, WORD, st.booleans(), LONG, LONG, WORD, DIGEST, LONG,
    SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, DIGEST, WORD, LONG,
    st.booleans(), st.booleans(), HOST, ENDPOINT, st.integers(-1, (1 << 63) - 1),
    LONG, LONG, WORD, DIGEST, LONG, LONG, SHA256,
)  # fmt: skip
RECORD = RankRecord(0, True, 10**6, 4096, 7, bytes(16), 0, 0.1, 0.01, 0.02, 0.2, 0.5, 0.6, 0.0)


@pytest.fixture
def reporting(tmp_path):
    path = tmp_path / "reports.jsonl"
    saver = new_saver(report_file=str(path))
    yield saver, lambda: [json.loads(line) for line in path.read_text().splitlines()]
    saver.close()


def test_every_save_appends_one_line(reporting, tmp_path):
    saver, lines = reporting
    tensors = {"a": torch.ones(1000, 1000)}
    for number in range(2):
        save(saver, tmp_path / str(number), tensors)
    reports = lines()
    assert [(r["event"], r["state"], r["error"]) for r in reports] == [("save", "published", None)] * 2
    assert [r["directory"] for r in reports] == [str(tmp_path / str(number)) for number in range(2)]
    assert [r["save_id"].split("-")[1] for r in reports] == ["1", "2"]
    assert all(r["bytes"] == sum(f.stat().st_size for f in (tmp_path / "0").glob("data-*")) for r in reports)


def test_a_report_is_made_while_the_trainer_waits_for_its_save_again(reporting, tmp_path, monkeypatch):
    """As after `done`, which says that a save is over: `wait` adds to what the report is made of."""
    saver, _ = reporting
    publication = save(saver, tmp_path / "0", {"a": torch.ones(99)})

    def milliseconds(seconds):
        with trainer_held(f"wait {len(publication.save.held.parts)}", publication.save):  # another thread
            return seconds * 1000

    monkeypatch.setattr("megatron_datastates.pipeline.report.milliseconds", milliseconds)
    assert "polls" in save_report(publication, "async")["held_parts_ms"]


def test_a_poll_does_not_wait_for_the_report_file(tmp_path):
    path = tmp_path / "reports.jsonl"
    os.mkfifo(path)  # opening it waits for a reader, as a file on storage that hangs would
    saver = new_saver(report_file=str(path))
    directories = [tmp_path / "0", tmp_path / "1"]
    for directory in directories:
        publication = saver.start(directory, State({"a": torch.ones(99)}))
        while publication.poll() is Outcome.PENDING:
            time.sleep(0.001)
    with os.fdopen(os.open(path, os.O_RDWR)) as file:  # as a writer, too: it never ends
        reports = [json.loads(file.readline()) for _ in directories]
    saver.close()
    assert [report["directory"] for report in reports] == list(map(str, directories))


@pytest.fixture
def hanging_file(tmp_path, monkeypatch):
    """Returns a file that hangs for 10 s, as on storage that does not answer. Reports wait 0.2 s for it."""
    monkeypatch.setattr("megatron_datastates.pipeline.report._PATIENCE_SECONDS", 0.2)
    path, opened = tmp_path / "reports.jsonl", []
    os.mkfifo(path)
    answers = threading.Timer(10.0, lambda: opened.append(os.open(path, os.O_RDWR)))
    answers.start()
    yield path
    answers.cancel()
    answers.join()
    opened = opened or [os.open(path, os.O_RDWR)]  # threads that wait end
    time.sleep(0.1)
    os.close(opened[0])


def test_saves_and_loads_do_not_wait_for_a_report_file_that_hangs(hanging_file, tmp_path, caplog):
    saver, begin = new_saver(report_file=str(hanging_file)), time.monotonic()
    for number in range(3):
        assert save(saver, tmp_path / str(number), {"a": torch.ones(99)}).outcome is Outcome.PUBLISHED
    for _ in range(2):
        with reported_load(tmp_path / "0", lambda: Options(report_file=str(hanging_file))):
            pass
    assert time.monotonic() - begin < 5.0
    said = [record.message for record in caplog.records if "hangs" in record.message]
    assert said == [f"{hanging_file} hangs: the last reports are not written yet"] * 2, (
        "one for saves, one for loads"
    )
    with os.fdopen(os.open(hanging_file, os.O_RDWR)) as pipe:  # as a writer, too: it never ends
        assert saver.reporter.flush(30.0)
        reports = [json.loads(pipe.readline()) for _ in range(5)]
    assert [one["directory"][-1] for one in reports if one["event"] == "save"] == ["0", "1", "2"]
    saver.close()


def test_no_report_is_left_out_of_a_wait_for_all_when_two_threads_make_one_at_once(tmp_path, monkeypatch):
    reporter, both = Reporter(str(tmp_path / "reports.jsonl")), threading.Barrier(2)

    class Thread(BackgroundThread):
        def start(self):
            both.wait(60.0)
            super().start()

    monkeypatch.setattr("megatron_datastates.pipeline.report.BackgroundThread", Thread)
    monkeypatch.setattr(Reporter, "write", lambda self, report: (time.sleep(report), written.append(report)))
    written = []
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda seconds: reporter.emit(0, lambda: seconds, later=True), (0.1, 0.2)))
    assert reporter.flush() and sorted(written) == [0.1, 0.2]


def test_reports_are_written_before_a_saver_is_closed_and_in_their_order(reporting, tmp_path):
    saver, lines = reporting
    polled = saver.start(tmp_path / "0", State({"a": torch.ones(99)}))
    while polled.poll() is Outcome.PENDING:
        time.sleep(0.001)
    saver.start(tmp_path / "1", State({"a": torch.ones(99)})).wait()
    last = saver.start(tmp_path / "2", State({"a": torch.ones(99)}))
    while last.poll() is Outcome.PENDING:
        time.sleep(0.001)
    saver.close()
    assert [report["directory"] for report in lines()] == [str(tmp_path / str(n)) for n in range(3)]


def test_a_log_line_says_what_the_save_cost(reporting, tmp_path):
    saver, lines = reporting
    publication = saver.start(tmp_path / "0", State({"a": torch.ones(99)}), iteration=70)
    publication.wait()
    (report,) = lines()
    assert (report["iteration"], report["mode"], report["ranks"]) == (70, "async", 1)
    assert report["held_ms"] == pytest.approx(sum(report["held_parts_ms"].values()), abs=0.01)
    assert 0 < report["staging_ms"] <= report["writing_ms"] <= report["durable_ms"] < report["published_ms"]
    assert report["ranks_ms"]["writing"]["slowest_rank"] == 0


def test_a_report_has_the_moments_of_the_save(reporting, tmp_path):
    saver, lines = reporting
    before = time.time()
    with trainer_held("save_checkpoint"), trainer_held("start"):
        publication = saver.start(tmp_path / "0", State({"a": torch.ones(99)}))
    while publication.poll() is Outcome.PENDING:
        time.sleep(0.05)  # as a report has 64 spans at most, and `wait` polls more often
    assert saver.reporter.flush(30.0)
    (report,) = lines()
    assert before - 0.001 <= report["started_at"] <= time.time()
    spans = report["held_spans_ms"]
    assert spans[0][0] == "save_checkpoint" and spans[0][1] < 0 < spans[0][2], "it began before the save did"
    assert {part for part, _, _ in spans} == {"save_checkpoint", "until_poll", "polls"}, "start is nested"
    assert sum(end - begin for _, begin, end in spans) == pytest.approx(report["held_ms"], abs=0.1)


def test_a_save_that_is_polled_for_long_has_a_short_report():
    held = HeldTime()
    for _ in range(1000):
        held.add("polls", 0.5)
    assert held.total == 500.0 and len(held.spans) == 64


def test_held_time_is_start_and_fence_and_polls(reporting, tmp_path):
    saver, lines = reporting
    tensors = {"a": torch.ones(99)}
    with trainer_held("start"):
        publication = saver.start(tmp_path / "0", State(tensors, mutability=Mutability.AT_FENCE))
    FENCE.wait("the step")
    publication.wait()
    (report,) = lines()
    assert set(report["held_parts_ms"]) == {"start", "fence", "polls"}
    assert report["held_ms"] == pytest.approx(sum(report["held_parts_ms"].values()), abs=0.01)
    assert 0 < report["held_parts_ms"]["fence"] <= report["fence_ms"] + 0.01


def lazy() -> State:
    return State({"a": torch.ones(99)}, mutability=Mutability.AT_FENCE)


def test_the_report_says_when_the_footer_could_be_written(reporting, tmp_path):
    saver, lines = reporting
    publication = saver.start(tmp_path / "0", lazy())
    publication.poll()  # copies begin
    while not publication.save.times()["writing"] > 0:
        time.sleep(0.001)
    FENCE.wait("the step")  # after a forward and backward pass: the disk is long done
    publication.wait()
    (report,) = lines()
    assert report["writing_ms"] <= report["confirmed_ms"] < report["published_ms"]


def test_what_follows_save_checkpoint_until_the_first_poll_is_held_time(reporting, tmp_path):
    saver, lines = reporting
    with trainer_held("save_checkpoint"):
        publication = saver.start(tmp_path / "0", lazy())
    time.sleep(0.05)  # as Megatron's timers
    publication.poll()
    time.sleep(0.05)  # the trainer trains
    publication.wait()
    (report,) = lines()
    assert set(report["held_parts_ms"]) == {"save_checkpoint", "until_poll", "polls"}
    assert report["held_parts_ms"]["until_poll"] >= 50
    assert report["held_ms"] == pytest.approx(sum(report["held_parts_ms"].values()), abs=0.01)


@pytest.mark.parametrize("span", ["save_checkpoint", "start"])
def test_training_until_a_fence_or_another_loops_poll_is_not_held_time(reporting, tmp_path, span):
    saver, lines = reporting
    with trainer_held(span):
        publication = saver.start(tmp_path / "0", lazy())
    if span == "save_checkpoint":
        FENCE.wait("the step")
    publication.wait()
    assert "until_poll" not in lines()[0]["held_parts_ms"]


def test_a_save_that_is_awaited_in_save_checkpoint_has_no_time_after_it(reporting, tmp_path):
    saver, lines = reporting
    with trainer_held("save_checkpoint"):
        saver.start(tmp_path / "0", lazy()).wait()
    assert set(lines()[0]["held_parts_ms"]) == {"save_checkpoint", "polls"}


class Part:
    """A provider of one lazy and one eager tensor, two objects and a stream of 3,000 bytes."""

    def __init__(self, count: int) -> None:
        self.count = count

    def entries(self):
        yield TensorSource("lazy", torch.ones(self.count), Mutability.AT_FENCE)
        yield TensorSource("eager", torch.ones(10 * self.count, dtype=torch.uint8))
        yield ObjectSource("object", {"step": 1})
        yield ObjectSource("other", [])
        yield StreamSource.from_buffers("stream", [bytes(1000)] * 3, Mutability.NEVER)

    def restore(self, reader):
        raise NotImplementedError


def test_the_report_counts_by_provider(reporting, tmp_path):
    saver, lines = reporting
    providers = {"": State({"w": torch.ones(7)}), "first": Part(100), "second": Part(200)}
    for number in range(2):  # the second save finds the plan of the first
        saver.start(tmp_path / str(number), lambda: providers).wait()
    for report in lines():
        shares = report["providers"]
        assert list(shares) == ["", "first", "second"]
        assert shares[""] == dict.fromkeys(shares[""], 0) | {
            "tensors": 1,
            "eager_bytes": 28,
            "host_bytes": 28,
        }
        for name, count in (("first", 100), ("second", 200)):
            share = shares[name]
            times, tail = share.pop("tail_ms"), share.pop("tail_bytes")
            assert share.pop("tail_stored_bytes") == tail
            assert share == {
                "tensors": 2, "eager_bytes": 10 * count, "lazy_bytes": 4 * count, "objects": 2, "streams": 1,
                "host_bytes": 14 * count, "device_bytes": 0, "encoded_tensors": 0,
            }  # fmt: skip
            assert times > 0 and 3000 < tail < 10_000
        assert sum(share["lazy_bytes"] for share in shares.values()) == report["lazy_bytes"]
        assert sum(share["eager_bytes"] for share in shares.values()) == report["eager_bytes"]


def test_the_report_says_what_compression_saves(reporting, tmp_path):
    saver, lines = reporting
    saver.start(tmp_path / "0", lambda: {"": Compressed(State({"w": torch.zeros(100_000)}))}).wait()
    share = lines()[0]["providers"][""]
    assert (share["tensors"], share["encoded_tensors"], share["objects"]) == (0, 1, 0)
    assert share["tail_bytes"] == 400_000 > 10 * share["tail_stored_bytes"] > 0


def test_a_save_that_fails_before_its_state_is_known_has_no_providers(reporting, tmp_path):
    saver, lines = reporting
    saver.start(tmp_path / "0", State({"a": torch.ones(2).to_sparse()})).wait()  # cannot be saved
    (report,) = lines()
    assert report["state"] == "failed" and report["providers"] == {}


def documented(heading: str) -> set[str]:
    """Returns the fields in the table below a heading of docs/reports.md."""
    page = (Path(__file__).parents[2] / "docs" / "reports.md").read_text()
    table = page.split(f"\n{heading}\n")[1].split("\n#")[0]
    cells = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_the_page_on_reports_lists_the_fields_of_a_save(reporting, tmp_path):
    saver, lines = reporting
    save(saver, tmp_path / "0", {"a": torch.ones(9)})
    (report,) = lines()
    fields = {
        name for name in report if name not in ("staging_bytes", "page_locked_bytes", "staging_trouble")
    }
    assert fields == documented("## Saves")
    assert report["providers"][""].keys() == documented("### Providers")


def test_a_failed_save_is_reported_with_its_error(tmp_path):
    path = tmp_path / "reports.jsonl"
    saver = new_saver(report_file=str(path), faults="write:1:ENOSPC")
    publication = save(saver, tmp_path / "0", {"a": torch.ones(99)})
    saver.close()
    report = json.loads(path.read_text())
    assert (report["state"], report["error"]) == ("failed", publication.error)
    assert report["published_ms"] is None
    assert "No space left on device" in report["error"]


def test_a_save_with_an_iteration_that_json_lacks_is_reported(tmp_path):
    """An error of the report would end the program on rank 0 alone, in place of the save's."""
    path = tmp_path / "reports.jsonl"
    saver = new_saver(report_file=str(path))
    publication = saver.start(tmp_path / "0", State({"a": torch.ones(99)}), iteration=1j)
    assert publication.wait() is Outcome.FAILED
    saver.close()
    assert json.loads(path.read_text())["iteration"] == "1j"


def test_a_report_waits_for_whoever_will_hold_the_trainer_again(reporting, tmp_path):
    saver, lines = reporting
    publication = saver.start(tmp_path / "0", State({"a": torch.ones(99)}))
    publication.hold_report = True
    publication.wait()
    assert not (tmp_path / "reports.jsonl").exists()
    with trainer_held("finalize", publication.save):
        publication.hold_report = False
    assert "finalize" in lines()[0]["held_parts_ms"]


def test_a_report_that_cannot_be_written_harms_nothing(tmp_path, caplog):
    saver = new_saver(report_file=str(tmp_path / "none" / "reports.jsonl"))
    publication = save(saver, tmp_path / "0", {"a": torch.ones(99)})
    saver.close()
    assert publication.outcome is Outcome.PUBLISHED
    assert "reports.jsonl: No such file" in caplog.text


def test_a_report_that_is_written_in_part_is_noticed(reporting, tmp_path, caplog):
    """As by a file system that is full within the line; the reader of reports knows such lines."""
    saver, lines = reporting
    save(saver, tmp_path / "0", {"a": torch.ones(99)})
    lines()
    path = tmp_path / "reports.jsonl"
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 30, usual[1]))
    try:
        saver.reporter.write(json.loads(path.read_text()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert "the report of a save was not written to" in caplog.text
    assert "File too large" in caplog.text


def test_listeners_are_given_the_report(reporting, tmp_path):
    saver, lines = reporting
    heard: list[dict] = []
    saver.reporter.listeners.append(Listener(heard.append))
    save(saver, tmp_path / "0", {"a": torch.ones(99)})
    assert heard == lines()


def test_a_report_that_nobody_wants_is_not_made():
    make = Mock()
    reporter = Reporter("")
    reporter.listeners.append(Listener(Mock(), is_listening=lambda: False))
    reporter.emit(1, make)
    make.assert_not_called()


def test_reports_are_made_beside_the_trainer(tmp_path):
    made_by = []
    reporter = Reporter(str(tmp_path / "reports.jsonl"))

    def make() -> dict:
        made_by.append(threading.current_thread())
        return save_report(publication_of([RECORD]), "async")

    reporter.emit(0, make, later=True)
    reporter.emit(0, make)
    assert len((tmp_path / "reports.jsonl").read_text().splitlines()) == 2, "the second one is waited for"
    assert threading.current_thread() not in made_by


def test_a_listener_that_changes_a_report_changes_only_its_own(tmp_path):
    reporter = Reporter(str(tmp_path / "reports.jsonl"))
    reporter.listeners.append(Listener(lambda report: report.clear()))
    for later in (True, False):
        reporter.emit(0, lambda: save_report(publication_of([RECORD]), "async"), later=later)
    assert reporter.flush(10.0)
    lines = (tmp_path / "reports.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["save", "save"]


def test_a_listener_that_cannot_be_asked_harms_nothing(caplog):
    hear = Mock()
    reporter = Reporter("")
    reporter.listeners.append(Listener(hear, is_listening=Mock(side_effect=RuntimeError("no answer"))))
    reporter.emit(0, lambda: save_report(publication_of([RECORD]), "async"))
    assert "no answer" in caplog.text and not hear.called


def test_a_file_that_hangs_keeps_reports_and_not_what_they_are_made_of(tmp_path):
    path = tmp_path / "reports.jsonl"
    os.mkfifo(path)  # opening it for writing waits for a reader
    reporter, publications = Reporter(str(path)), [publication_of([RECORD]) for _ in range(5)]
    kept = [weakref.ref(one.save) for one in publications]
    while publications:
        reporter.emit(0, functools.partial(save_report, publications.pop(), "async"), later=True)
    eventually(lambda: all(one() is None for one in kept), "no thread that waits holds a save")
    assert not reporter.flush(0.0)
    with path.open() as pipe:
        assert reporter.flush(30.0)
        assert [json.loads(line)["event"] for line in pipe] == ["save"] * len(kept)


def test_a_listener_that_fails_harms_nothing(reporting, tmp_path, caplog):
    saver, lines = reporting
    heard: list[dict] = []
    saver.reporter.listeners += [
        Listener(Mock(side_effect=OSError("no space for events"))),
        Listener(heard.append),
    ]
    assert save(saver, tmp_path / "0", {"a": torch.ones(99)}).outcome is Outcome.PUBLISHED
    assert "no space for events" in caplog.text and heard == lines()


def test_a_listener_that_fails_is_logged_once_and_may_have_changed_its_report(caplog):
    def fails(report: dict) -> None:
        report.clear()
        raise OSError("no space for events")

    reporter, heard = Reporter(""), []
    reporter.listeners += [Listener(fails), Listener(heard.append)]
    for _ in range(3):
        reporter.emit(1, lambda: save_report(publication_of([RECORD]), "async"))
    assert caplog.text.count("no space for events") == 1
    assert [report["event"] for report in heard] == ["save"] * 3


def test_statistics_name_the_slowest_rank():
    writing = [0.5, 0.9, 0.7]
    records = [RECORD._replace(rank=rank, writing=s) for rank, s in enumerate(writing)]
    report = save_report(publication_of(records), "sync")
    assert report["ranks_ms"]["writing"] == {"min": 500.0, "median": 700.0, "max": 900.0, "slowest_rank": 1}
    assert report["write_mb_per_s"] == round(3 / 0.9, 1)
    assert report["bytes"] == 3 * 10**6


def test_a_save_without_data_divides_by_nothing():
    record = RECORD._replace(has_file=False, file_bytes=0, writing=0.0)
    assert save_report(publication_of([record]), "sync")["write_mb_per_s"] == 0.0
    assert save_report(publication_of([]), "sync")["ranks_ms"] == {}


def publication_of(records: list[RankRecord]) -> SimpleNamespace:
    """Makes as much of a Publication as a report looks at."""
    rank_save = RankSave(SaveContext(SaveId(1, 1), Path("d"), 0, len(records)), Options())
    return SimpleNamespace(
        save=rank_save,
        publisher=SimpleNamespace(published_at=None),
        records=Records.of(records),
        outcome=Outcome.PUBLISHED,
        error=None,
        is_prepared=False,
        is_of_training=True,
        not_prepared_because="",
    )


@given(RECORDS)
def test_records_round_trip_and_have_one_size(record):
    assert RankRecord.decode(record.encode()) == record
    assert len(record.encode()) == len(RECORD.encode())


@given(st.lists(RECORDS, max_size=5))
def test_the_columns_of_records_are_their_fields(rows):
    records = Records.of(rows)
    assert [records[at] for at in range(len(records))] == rows
    columns = records.columns
    for name in RankRecord._fields:
        if not isinstance(getattr(RECORD, name), bytes):
            assert columns[name].tolist() == [getattr(row, name) for row in rows], name


def test_a_rank_that_is_not_there_has_no_record():
    records = Records.of([RECORD])
    assert records[-1] == RECORD
    with pytest.raises(IndexError):
        records[1]


def test_rank_0_is_sent_what_is_new_but_for_a_list_that_it_has_itself():
    own, other = b"a" * 16, b"a" * 15 + b"b"
    rows = [
        RECORD._replace(providers_digest=own, providers_bytes=5),
        RECORD._replace(providers_digest=own, providers_bytes=5, layout_bytes=7),
        RECORD._replace(providers_digest=other, providers_bytes=5, stable_layout_bytes=9),
    ]
    assert Records.of(rows).sent_bytes().tolist() == [[0, 0, 0], [7, 0, 0], [0, 9, 5]]
    assert Records().sent_bytes().tolist() == []


@given(st.one_of(st.none(), st.text()))
def test_failures_round_trip_and_have_one_size(text):
    data = encode_failure(text)
    assert len(data) == len(encode_failure(None))
    found = decode_failures(encode_failure(None) + data)
    assert list(found) == ([] if text is None else [1])
    if text is not None and len(text.encode()) < 700:
        assert found == {1: text}


@given(st.text(min_size=300).map(lambda text: "é" * 300 + text))
def test_a_long_failure_is_cut_before_the_name_of_its_node(text):
    (found,) = decode_failures(encode_failure(text, "gpu-17")).values()
    assert found.endswith(" (on node gpu-17)")
    (found,) = decode_failures(encode_failure(text)).values()
    assert text.startswith(found.rstrip("�"))
    assert len(found) > 100


def test_scalars_go_to_the_writers_that_megatron_has(reporting, tmp_path, monkeypatch):
    global_vars = pytest.importorskip("megatron.training.global_vars")
    from megatron_datastates.mcore.training.loop import _has_writers, _write_scalars

    board, wandb = Mock(), Mock()
    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", board)
    monkeypatch.setattr(global_vars, "_GLOBAL_WANDB_WRITER", wandb)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", SimpleNamespace(curr_iteration=72))
    saver, lines = reporting
    saver.reporter.listeners.append(Listener(_write_scalars, _has_writers))
    assert _has_writers()
    saver.start(tmp_path / "0", State({"a": torch.ones(99)}), iteration=70).wait()
    (report,) = lines()
    reported = {call.args[0]: call.args[1:] for call in board.add_scalar.call_args_list}
    assert reported["datastates/bytes"] == (report["bytes"], 70)
    assert reported["datastates/held_ms"] == (report["held_ms"], 70)
    scalars, step = wandb.log.call_args.args
    assert scalars == {name: value for name, (value, _) in reported.items()}
    assert step == 72, "W&B refuses steps of the past"
    assert reported["datastates/published_ms"] == (report["published_ms"], 70)
    spread = report["ranks_ms"]["stream_wait"]["max"]
    assert reported["datastates/max_stream_wait_ms"] == (spread, 70)
    assert {"datastates/max_held_ms", "datastates/max_durable_ms"} <= reported.keys()
    assert reported["datastates/failed_saves"] == (0, 70)


def test_failed_saves_are_counted_for_the_writers(monkeypatch):
    global_vars = pytest.importorskip("megatron.training.global_vars")
    from megatron_datastates.mcore.training import loop

    board = Mock()
    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", board)
    monkeypatch.setattr(loop, "_failed", 0)
    failed = {"event": "save", "state": "failed", "iteration": 70, "ranks_ms": {}}
    loop._write_scalars({"event": "skip", "iteration": 60})
    loop._write_scalars(failed)
    loop._write_scalars(failed | {"iteration": 80})
    assert [call.args for call in board.add_scalar.call_args_list] == [
        ("datastates/failed_saves", 1, 70),
        ("datastates/failed_saves", 2, 80),
    ]


def test_megatrons_loop_keeps_the_listeners_of_others(monkeypatch):
    pytest.importorskip("megatron.training.global_vars")
    from megatron_datastates.mcore.training import loop
    from megatron_datastates.pipeline import saver_pool

    reporter = Reporter("")
    reporter.listeners.append(other := Listener(Mock()))
    for name in ("attach_saving", "attach_training", "attach_to_train"):
        monkeypatch.setattr(loop, name, Mock())
    monkeypatch.setattr(loop, "_options", None)
    monkeypatch.setattr(saver_pool, "saver_for", lambda options: Mock(reporter=reporter))
    for _ in range(2):
        loop.enable_saving(Options())
    assert reporter.listeners == [other, Listener(loop._write_scalars, loop._has_writers)]
