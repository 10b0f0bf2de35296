"""The savers of a process: as many engines as options ask for, and none for options that were used once."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.config import MIB, Options
from megatron_datastates.engine import memory, staging
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.engine.staging import StagingEngine
from megatron_datastates.errors import SaveFailedError
from megatron_datastates.pipeline import saver_pool
from megatron_datastates.pipeline.external_ranks import external_rank_saver_for
from megatron_datastates.pipeline.report import Listener
from megatron_datastates.pipeline.saver import Saver
from megatron_datastates.pipeline.saver_pool import saver_for
from megatron_datastates.pipeline.session import SaveSession
from tests.unit.states import OPTIONS, SMALL, State, data_files, new_saver

STATE = {"w": torch.arange(1000.0)}
MANY = 12  # sets of options; more than are kept


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    saver_pool.close_all()
    yield
    saver_pool.close_all()


def engines() -> list[StagingEngine]:
    return [saver._engine for saver in saver_pool._savers.values() if saver._engine is not None]


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def limited(number: int) -> dict[str, Any]:
    """Returns options that ask for an engine of their own."""
    return {**SMALL, "write_limit": (1 << 40) + number}


def save(directory: Path, **options: Any) -> None:
    ds.save(STATE, directory, **options)
    assert torch.equal(ds.load(directory)["w"], STATE["w"])


def test_options_that_no_engine_reads_share_an_engine_and_its_threads(tmp_path: Path) -> None:
    save(tmp_path / "c", **SMALL)
    (engine,), before = engines(), threads()
    for number in range(MANY):
        report = tmp_path / f"{number}.jsonl"
        save(tmp_path / "c", **SMALL, report_file=str(report), fallback=number, link=False)
        assert json.loads(report.read_text())["staging_bytes"] > 0
    assert engines() == [engine] and threads() <= before + 1  # a thread of the last save may be ending
    assert len(saver_pool._savers) <= saver_pool._KEPT_IDLE + 2


@pytest.mark.parametrize("kind", ["Saver", "ExternalRankSaver"])
def test_engines_of_options_that_are_not_used_again_are_closed(tmp_path: Path, kind: str) -> None:
    for number in range(MANY):
        if kind == "Saver":
            save(tmp_path / "c", **limited(number))
        else:
            external_rank_saver_for(Options(**limited(number)))._get_engine()
    left = {options.write_limit - (1 << 40) for _, options in saver_pool._savers}
    assert left == set(range(MANY - 1 - saver_pool._KEPT_IDLE, MANY)) and len(engines()) == len(left)


def test_options_that_were_used_lately_keep_their_engine(tmp_path: Path) -> None:
    save(tmp_path / "c", **limited(0))
    kept = engines()[0]
    for number in range(1, MANY):
        save(tmp_path / "c", **limited(number))
        save(tmp_path / "c", **limited(0))
    assert kept in engines()


@pytest.mark.parametrize("options", [{}, {"fallback": 1}], ids=["own engine", "shared engine"])
def test_a_save_that_is_not_finished_keeps_its_engine(tmp_path: Path, options: dict[str, Any]) -> None:
    save(tmp_path / "first", **SMALL)
    handle = ds.async_save(STATE, tmp_path / "lazy", lazy=True, **SMALL, **options, lazy_delay=3600.0)
    for number in range(MANY):
        ds.async_save(STATE, tmp_path / f"{number}", **limited(number)).wait()
    assert not (tmp_path / "lazy" / "manifest.json").exists()
    FENCE.wait("the step")
    assert handle.wait()["state"] == "published"
    assert torch.equal(ds.load(tmp_path / "lazy")["w"], STATE["w"])


def test_a_saver_that_somebody_listens_to_is_kept(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    options = Options.from_environment(limited(0))
    saver_for(options).reporter.listeners.append(Listener(heard.append))
    for number in (*range(1, MANY), 0):
        save(tmp_path / "c", **limited(number))
    assert len(heard) == 1


def test_a_saver_is_not_closed_while_a_save_starts(tmp_path: Path) -> None:
    saver = saver_for(OPTIONS)
    saver.start(tmp_path / "c", lambda: {}).wait()
    with saver.session.turn.lock:
        saver.session.turn.owner = 1
        assert not saver.close_if_idle()
        saver.session.turn.owner = None
        assert saver.close_if_idle()


def test_threads_that_save_first_at_once_get_one_saver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would close the other one."""
    both, owner_of = threading.Barrier(2), saver_pool._engine_owner

    def owner_at_once(*args: Any) -> Saver | None:
        both.wait(30)
        return owner_of(*args)

    monkeypatch.setattr(saver_pool, "_engine_owner", owner_at_once)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(saver_for, [OPTIONS, OPTIONS])
    assert first is second


def test_savers_of_one_engine_are_all_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path / "c", **SMALL)
    for name in ("d", "e"):
        ds.async_save(STATE, tmp_path / name, lazy=True, **SMALL, link=name == "d", lazy_delay=3600.0)
    saver_pool.close_all()
    for name in ("d", "e"):
        assert f"the save to {tmp_path / name} was not published" in caplog.text
        assert not data_files(tmp_path / name)
    assert "hangs" not in caplog.text
    FENCE.wait("the step")
    save(tmp_path / "d", **SMALL)


def test_memory_is_prepared_in_the_engine_that_is_shared() -> None:
    first, second = saver_for(OPTIONS), saver_for(dataclasses.replace(OPTIONS, fallback=1))
    second.warm_up()
    first.warm_up()
    assert second.engine_owner is first and len(engines()) == 1


def test_another_thread_makes_a_saver_while_the_end_of_training_waits(tmp_path: Path) -> None:
    saver = saver_for(dataclasses.replace(OPTIONS, near=str(tmp_path / "near")))
    assert saver.near is not None
    waited = []

    def finish_objects() -> None:
        with ThreadPoolExecutor(1) as thread:  # meanwhile, which may be minutes
            waited.append(thread.submit(external_rank_saver_for, OPTIONS).result())

    saver.near.drain.finish_objects = finish_objects  # type: ignore[method-assign]
    saver_pool.finish_objects()
    assert waited


def test_savers_are_closed_while_another_thread_makes_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the end of the interpreter closes them, beside threads that still save."""
    interval = sys.getswitchinterval()
    monkeypatch.setattr(saver_pool, "_KEPT_IDLE", 300)  # in a loop over so many, something happens
    with ThreadPoolExecutor(1) as thread:
        try:
            sys.setswitchinterval(1e-6)
            made = thread.submit(
                lambda: [external_rank_saver_for(Options(report_file=str(n))) for n in range(500)]
            )
            while not made.done():
                saver_pool.close_all(Saver)
        finally:
            sys.setswitchinterval(interval)
        made.result()


def test_a_save_that_is_over_is_reported_while_another_thread_closes_its_saver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has nothing to do any more, when many others have saved with other options."""
    pool_facts = StagingEngine.pool_facts

    def closed_meanwhile(engine: StagingEngine) -> dict[str, object]:
        (saver,) = saver_pool._savers.values()
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(saver.close_if_idle).result()
        return pool_facts(engine)

    monkeypatch.setattr(StagingEngine, "pool_facts", closed_meanwhile)
    save(tmp_path / "c", **SMALL, report_file=str(tmp_path / "reports"))
    assert json.loads((tmp_path / "reports").read_text().splitlines()[0])["state"] == "published"


def test_faults_of_two_savers_are_counted_apart(tmp_path: Path) -> None:
    for fallback in (1, 2):
        with pytest.raises(SaveFailedError):
            ds.save(STATE, tmp_path / "c", **SMALL, faults="write:1:EIO", fallback=fallback)


def test_engines_read_the_options_that_are_marked_and_no_other() -> None:
    text = "".join(Path(str(module.__file__)).read_text() for module in (staging, memory))
    marked = {field.name for field in dataclasses.fields(Options) if field.metadata["engine"]}
    assert set(re.findall(r"\boptions\.(\w+)", text)) == marked
    changed = Options(staging_memory=9 * MIB, report_file="r", link_from=7, lazy=False)
    assert changed.of_engine() == Options(staging_memory=9 * MIB)


def test_a_saver_of_ones_own_shares_nothing() -> None:
    own = Saver(OPTIONS, SaveSession())
    own.warm_up()
    kept = saver_for(OPTIONS)
    kept.warm_up()
    assert kept.engine_owner is None and kept._engine is not own._engine
    own.close()


def test_the_error_of_a_runs_last_save_is_not_that_of_a_programs_own(tmp_path: Path) -> None:
    saver = new_saver(faults="sync:2:EIO,sync:4:EIO")
    errors = []
    for number, is_of_training in enumerate([True, True, False, False, True]):
        publication = saver.start(
            tmp_path / str(number), State({"w": torch.ones(9)}), is_of_training=is_of_training
        )
        publication.wait()
        errors.append(saver.session.last_error)
    saver.close()
    assert not errors[0] and not errors[4]
    assert errors[1] == errors[2] == errors[3] and str(tmp_path / "1") in errors[1]
