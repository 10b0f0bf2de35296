"""A program's own callbacks for reports, and the examples of docs/reports.md."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

import megatron_datastates as ds
from megatron_datastates.config import Options
from megatron_datastates.dcp import DataStatesWriter
from megatron_datastates.errors import MismatchError, OptionError, SaveFailedError
from megatron_datastates.mcore.providers import _of_functions, find_functions
from megatron_datastates.pipeline import report as reports
from megatron_datastates.pipeline.saver_pool import close_all

ROOT = Path(__file__).parents[2]
STATE = {"weight": torch.arange(10.0)}
Register = Callable[[Callable[[dict[str, Any]], object]], Callable[[], None]]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forgets what a test has registered."""
    monkeypatch.setattr(reports, "_of_program", [])
    monkeypatch.setattr(reports, "_failed", [])
    yield


def test_saves_and_loads_are_reported_as_in_the_file_whatever_their_options(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    ds.on_report(heard.append)
    path = tmp_path / "reports.jsonl"
    ds.save(STATE, tmp_path / "a", report_file=str(path))
    close_all()  # savers are made anew
    ds.async_save(STATE, tmp_path / "b", report_file=str(path), copy_threads=1).wait()
    ds.load(tmp_path / "a", report_file=str(path))
    assert heard == [json.loads(line) for line in path.read_text().splitlines()]
    assert [report["event"] for report in heard] == ["save", "save", "load"]
    ds.load(tmp_path / "b")
    assert len(heard) == 4, "without a file, too"


def test_failures_are_reported(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    ds.on_report(heard.append)
    (tmp_path / "file").touch()
    with pytest.raises(SaveFailedError):
        ds.save(STATE, tmp_path / "file" / "ck")
    ds.save(STATE, tmp_path / "ck")
    with pytest.raises(MismatchError):
        ds.load(tmp_path / "ck", into={"weight": torch.zeros(9)})
    assert [(report["event"], report["state"]) for report in heard] == [
        ("save", "failed"),
        ("save", "published"),
        ("load", "failed"),
    ]


def test_a_callback_that_fails_is_logged_once_and_fails_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[dict[str, Any]] = []
    ds.on_report(Mock(side_effect=ConnectionError("no gateway")))
    ds.on_report(heard.append)
    for number in range(3):
        assert ds.save(STATE, tmp_path / str(number))["state"] == "published"
    assert len(heard) == 3
    assert caplog.text.count("no gateway") == 1


def test_what_a_callback_changes_in_its_report_is_in_no_other_one(tmp_path: Path) -> None:
    """Nor in the file, whose line another thread writes later."""
    heard: list[dict[str, Any]] = []

    def flatten(report: dict[str, Any]) -> None:
        for name in ("ranks_ms", "held_parts_ms"):
            for part in list(report[name]):
                report[f"{name}_{part}"] = report[name].pop(part)
        report["held_spans_ms"].clear()

    ds.on_report(flatten)
    ds.on_report(heard.append)
    path = tmp_path / "reports.jsonl"
    handle = ds.async_save(STATE, tmp_path / "a", report_file=str(path))
    while not handle.done():
        time.sleep(0.001)
    close_all()
    assert heard == [json.loads(path.read_text())]
    assert heard[0]["ranks_ms"]["durable"] and heard[0]["held_parts_ms"] and heard[0]["held_spans_ms"]


def test_a_callback_that_is_registered_twice_is_called_once_until_it_ends(tmp_path: Path) -> None:
    """A restart within the process runs the program's main function again."""
    heard: list[dict[str, Any]] = []
    first, second = ds.on_report(heard.append), ds.on_report(heard.append)
    ds.save(STATE, tmp_path / "0")
    assert len(heard) == 1
    first()
    second()
    ds.save(STATE, tmp_path / "1")
    assert len(heard) == 1


def test_a_callback_that_another_one_ends_is_not_called_any_more(tmp_path: Path) -> None:
    """Not for the same report either: what it writes to may be closed."""
    ended = Mock()
    ds.on_report(lambda report: end())
    end = ds.on_report(ended)
    ds.save(STATE, tmp_path / "ck")
    ended.assert_not_called()


@dataclasses.dataclass
class Exporter:
    """A callback that equals others of its class."""

    heard: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def __call__(self, report: dict[str, Any]) -> None:
        self.heard.append(report)

    def hear(self, report: dict[str, Any]) -> None:
        self.heard.append(report)


def test_callbacks_with_equal_values_are_two_and_a_method_of_one_object_is_one(tmp_path: Path) -> None:
    one, other = Exporter(), Exporter()
    ends = [ds.on_report(callback) for callback in (one, other, other.hear, other.hear)]
    ds.save(STATE, tmp_path / "0")
    assert (len(one.heard), len(other.heard)) == (1, 2)
    one.heard[:] = other.heard
    for end in ends[1:]:
        end()
    ds.save(STATE, tmp_path / "1")
    assert (len(one.heard), len(other.heard)) == (3, 2)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(OptionError, match="expected a function that takes a report, found 3"):
        ds.on_report(3)  # type: ignore[arg-type]


def test_a_callback_may_save(tmp_path: Path) -> None:
    """The save that is reported is over, and another one may begin."""

    def keep(report: dict[str, Any]) -> None:
        if report["directory"].endswith("first"):
            ds.save({"report": report["save_id"]}, tmp_path / "second")

    ds.on_report(keep)
    saved = ds.save(STATE, tmp_path / "first")
    assert ds.load(tmp_path / "second") == {"report": saved["save_id"]}


@pytest.mark.parametrize("through", ["ds.save", "dcp.save"])
def test_a_callback_may_wait_for_a_save_of_another_thread(tmp_path: Path, through: str) -> None:
    def save(name: str) -> None:
        if through == "ds.save":
            ds.save(STATE, tmp_path / name)
        else:
            dcp.save(STATE, storage_writer=DataStatesWriter(tmp_path / name), no_dist=True)

    ended: list[bool] = []

    def wait(report: dict[str, Any]) -> None:
        if report["directory"].endswith("first"):
            other = threading.Thread(target=save, args=("second",), daemon=True)
            other.start()
            other.join(10)
            ended.append(not other.is_alive())

    ds.on_report(wait)
    save("first")
    assert ended == [True]


def skips(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Lets Megatron's loop skip the save of iteration 20 on this rank."""
    from megatron_datastates.mcore.training import loop
    from megatron_datastates.pipeline import saver_pool

    saver = Mock(reporter=reports.Reporter(""), unfinished_save=lambda: Path("ck/iter_0000010"))
    monkeypatch.setattr(saver_pool, "saver_for", lambda options: saver)
    monkeypatch.setattr(loop, "_may_skip", True)
    monkeypatch.setattr(loop, "_loops", 1)
    monkeypatch.setattr(loop, "_skipped", 0)
    args = SimpleNamespace(async_save=True, train_iters=100, save_interval=10, rank=rank)
    assert loop._is_skipped({"iteration": 20}, args, Options(while_saving="skip"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_skipped_save_is_reported_on_every_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    heard: list[dict[str, Any]] = []
    ds.on_report(heard.append)
    skips(monkeypatch, rank)
    assert [(one["event"], one["iteration"], one["unfinished"]) for one in heard] == [
        ("skip", 20, "ck/iter_0000010")
    ]


# -- docs/reports.md ----------------------------------------------------------------------------------------


class Metric:
    """As much of prometheus_client's Counter and Gauge as the example uses; a callable that keeps values."""

    made: ClassVar[dict[str, Metric]] = {}

    def __init__(self, name: str, text: str, labels: tuple[str, ...] = ()) -> None:
        self.values: dict[tuple[str, ...], float] = {}
        self._labels: tuple[str, ...] = ()
        self.made[name] = self

    def labels(self, *labels: str) -> Metric:
        self._labels = labels
        return self

    def set(self, value: float) -> None:
        self.values[self._labels] = value

    def inc(self) -> None:
        self.values[self._labels] = self.values.get(self._labels, 0.0) + 1


def examples() -> list[str]:
    section = (ROOT / "docs" / "reports.md").read_text().partition("## For monitoring")[2]
    return re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)


def test_the_example_for_prometheus_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(Counter=Metric, Gauge=Metric, start_http_server=Mock())
    monkeypatch.setitem(sys.modules, "prometheus_client", module)
    exec(examples()[0], {"__name__": "page"})
    module.start_http_server.assert_called_once()
    published = ds.save(STATE, tmp_path / "ck")
    (tmp_path / "file").touch()
    for _ in range(2):
        with pytest.raises(SaveFailedError):
            ds.save(STATE, tmp_path / "file" / "ck")
    ds.load(tmp_path / "ck")
    counts = Metric.made["checkpoint_events"].values
    assert counts == {("save", "published"): 1, ("save", "failed"): 2, ("load", "loaded"): 1}
    assert Metric.made["checkpoint_held_ms"].values == {(): published["held_ms"]}


def test_the_example_for_wandb_and_one_logger_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    global_vars = pytest.importorskip("megatron.training.global_vars")
    wandb, one_logger = Mock(), Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(global_vars, "_GLOBAL_ONE_LOGGER", one_logger)
    exec(examples()[1], {"__name__": "page"})
    saved = ds.save(STATE, tmp_path / "ck", iteration=7)
    values = {
        "save/held_ms": saved["held_ms"],
        "save/slowest_durable_ms": saved["ranks_ms"]["durable"]["max"],
        "save/published_ms": saved["published_ms"],
    }
    wandb.log.assert_called_once_with(values, commit=False)
    one_logger.log_metrics.assert_called_once_with(values)
    ds.load(tmp_path / "ck")
    assert wandb.log.call_count == 1 and not reports._failed


def test_a_run_whose_script_stays_registers_in_a_function_of_providers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_monitoring.py").write_text(examples()[2])
    monkeypatch.syspath_prepend(tmp_path)
    find_functions("my_monitoring:watch")
    assert reports._of_program == []
    assert _of_functions("my_monitoring:watch") == {}
    assert len(reports._of_program) == 1
