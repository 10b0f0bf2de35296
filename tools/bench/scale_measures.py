"""Measures of scale.py, each run in a process of its own, so that its memory is its own.

Each tells names and values as it comes to know them; later ones add to earlier ones, so that a measure that
is ended in its middle has told what it knew. `plan` leaves the indexes of all ranks in the folder, `commit`
turns them into a published checkpoint without data files, and `load` plans one rank's load of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import shutil
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from scale_loads import enter_world, plan_load, request_of
from scale_states import Model, Parallel, RankState, rank_states

from megatron_datastates.engine.faults import Faults
from megatron_datastates.format.values import MANIFEST_NAME, Fragment, SaveId
from megatron_datastates.pipeline.agreement import Collectives
from megatron_datastates.pipeline.publication import LayoutStore, Publication
from megatron_datastates.pipeline.records import RankRecord
from megatron_datastates.pipeline.save import RankSave, SaveContext
from megatron_datastates.plan.layout import plan_layout

MIB = 1 << 20
_FACTORS = (1, 2, 4, 8)
_LEAST_FRAGMENTS = 250  # of the smallest plan in the series: below that, constant costs are all there is
_COMMITS = 3
_PLANS = 9
Facts = dict[str, Any]
Tell = Callable[[Facts], None]


def clocked(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds that passed, and seconds of the processor: on a busy machine the two are far apart."""
    begin, cpu = time.perf_counter(), time.process_time()
    work()
    return round(time.perf_counter() - begin, 4), round(time.process_time() - cpu, 4)


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


@contextlib.contextmanager
def resident_growth(facts: Facts, name: str) -> Iterator[None]:
    """Puts the peak of the resident memory inside, beyond that before, into facts[name], in MiB."""
    gc.collect()
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here
    yield
    facts[name] = round((_status_bytes("VmHWM") - before) / MIB, 1)


def traced_mib(work: Callable[[], Any]) -> float:
    """The peak of what Python and numpy allocated, in MiB."""
    gc.collect()
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return round(peak / MIB, 1)


# -- planning ---------------------------------------------------------------------------------------------


def measure_plan(model: Model, parallel: Parallel, folder: Path, tell: Tell) -> None:
    """Plans every rank's file, and one of growing size. In time of the processor: it is arithmetic alone."""
    largest = RankState([], [], [])
    some: list[Fragment] = []
    keys: set[str] = set()
    seconds, ranks = [], []
    with (folder / "indexes").open("wb") as into:
        for state in rank_states(model, parallel):
            begin = time.process_time()
            plan = plan_layout(state.fragments, state.eager, state.objects)
            seconds.append(time.process_time() - begin)
            into.write(plan.index)
            counts = {"fragments": len(state.fragments), "objects": len(state.objects)}
            ranks.append({"bytes": len(plan.index), "digest": plan.digest.hex()} | counts)
            keys.update(fragment.key for fragment in state.fragments)
            largest = max(largest, state, key=lambda state: len(state.fragments))
            if len(some) < _FACTORS[-1] * max(len(largest.fragments), _LEAST_FRAGMENTS):
                some += state.fragments
    (folder / "ranks.json").write_text(json.dumps(ranks))
    tell(
        {
            "fragments": sum(rank["fragments"] for rank in ranks),
            "objects": sum(rank["objects"] for rank in ranks),
            "keys": len(keys),
            "median_fragments": statistics.median(rank["fragments"] for rank in ranks),
            "largest_fragments": len(largest.fragments),
            "median_rank_ms": round(statistics.median(seconds) * 1e3, 3),
            "largest_rank_ms": _plan_ms(largest),
            "median_index_bytes": statistics.median(rank["bytes"] for rank in ranks),
            "largest_index_bytes": max(rank["bytes"] for rank in ranks),
        }
        | _growth(some)
    )


def _plan_ms(state: RankState) -> float:
    """Of the fastest of several plans: what else runs on the machine only adds to it."""
    took = []
    for _ in range(_PLANS):
        begin = time.process_time()
        plan_layout(state.fragments, state.eager, state.objects)
        took.append(time.process_time() - begin)
    return round(min(took) * 1e3, 3)


def _growth(fragments: list[Fragment]) -> Facts:
    """Milliseconds to plan a rank with so many fragments: 1, 2, 4 and 8 times a number."""
    base = len(fragments) // _FACTORS[-1]
    found = {
        count: _plan_ms(RankState(fragments[:count], [False] * count, []))
        for count in (factor * base for factor in _FACTORS)
    }
    per_fragment = [ms / count for count, ms in found.items()]
    # Steepness is 1 where planning is linear in a rank's fragments.
    return {"ms_by_fragments": found, "steepness": round(per_fragment[-1] / per_fragment[0], 3)}


# -- commit -----------------------------------------------------------------------------------------------


def measure_commit(model: Model, parallel: Parallel, folder: Path, tell: Tell) -> None:
    """What rank 0 does when all are durable: a first time, and with a layout that it knows."""
    records = _records(json.loads((folder / "ranks.json").read_text()))
    facts: Facts = {}
    store = LayoutStore()
    before = _status_bytes("VmRSS")
    with resident_growth(facts, "first_peak_mib"):
        _fill(store, folder, records)
        facts["merge_seconds"], facts["merge_cpu_seconds"] = clocked(lambda: store.merged(records))
    gc.collect()
    facts["kept_mib"] = round((_status_bytes("VmRSS") - before) / MIB, 1)
    tell(facts)
    encoded = [record.encode() for record in records]
    took = []
    for number in range(_COMMITS):
        directory = folder / f"checkpoint-{number}"
        _make_files(directory, records, number + 1)
        with resident_growth(facts, "cached_peak_mib"):
            took.append(clocked(functools.partial(_publish, store, encoded, directory, number + 1)))
        shutil.rmtree(folder / f"checkpoint-{number - 1}", ignore_errors=True)
    (folder / f"checkpoint-{_COMMITS - 1}").rename(folder / "checkpoint")
    facts["cached_seconds"], facts["cached_cpu_seconds"] = sorted(took)[_COMMITS // 2]
    facts["cached_spread_seconds"] = [min(took)[0], max(took)[0]]
    facts["manifest_bytes"] = (folder / "checkpoint" / MANIFEST_NAME).stat().st_size
    (index,) = (folder / "checkpoint").glob("index-*")
    facts["merged_index_bytes"] = index.stat().st_size
    tell(facts)
    store = LayoutStore()

    def again() -> None:
        _fill(store, folder, records)
        store.merged(records)

    tell({"first_traced_mib": traced_mib(again)})
    _make_files(folder / "traced", records, _COMMITS + 1)
    publish = functools.partial(_publish, store, encoded, folder / "traced", _COMMITS + 1)
    tell({"cached_traced_mib": traced_mib(publish)})
    shutil.rmtree(folder / "traced")


def _records(ranks: Sequence[Facts]) -> list[RankRecord]:
    """Of ranks with data files that nobody wrote."""
    return [
        RankRecord(
            rank=rank,
            has_file=True,
            file_bytes=1 << 30,
            footer_offset=(1 << 30) - 4096,
            footer_crc=rank,
            layout_digest=bytes.fromhex(facts["digest"]),
            layout_bytes=0,
            **dict.fromkeys(
                ("held", "fence", "stream_wait", "staging", "writing", "durable", "slot_wait"), 0.5
            ),
        )
        for rank, facts in enumerate(ranks)
    ]


def _fill(store: LayoutStore, folder: Path, records: Sequence[RankRecord]) -> None:
    """Gives rank 0 the indexes of all ranks, as a gather does."""
    ranks = json.loads((folder / "ranks.json").read_text())
    with (folder / "indexes").open("rb") as file:
        for record, facts in zip(records, ranks, strict=True):
            store.add(record.rank, record.layout_digest, file.read(facts["bytes"]))


def _make_files(directory: Path, records: Sequence[RankRecord], ordinal: int) -> None:
    """Sparse data files: rank 0 looks whether they are there, and how long they are."""
    directory.mkdir()
    for record in records:
        with (directory / SaveId(1, ordinal).data_file_name(record.rank)).open("wb") as file:
            file.truncate(record.file_bytes)


def _publish(store: LayoutStore, encoded: Sequence[bytes], directory: Path, ordinal: int) -> None:
    """From the records of all ranks to a manifest that is in place, by rank 0's own code."""
    save = RankSave(SaveContext(SaveId(1, ordinal), directory, 0, len(encoded), iteration=ordinal), 60.0)
    publication = Publication(save, cast(Collectives, None), store, Faults(""))  # nothing here is collective
    publication.records = [RankRecord.decode(data) for data in encoded]
    publication._publish()
    if save.failure is not None:
        raise RuntimeError(save.failure)


# -- load -------------------------------------------------------------------------------------------------


def measure_load(
    model: Model, parallel: Parallel, folder: Path, tell: Tell, *, reshard: bool = False, trace: bool = False
) -> None:
    """What rank 0 does before it reads the first byte of data, for all that it saved.

    Or, to `reshard`: for the model alone, with twice the tensor-parallel size.
    """
    if reshard:
        parallel = dataclasses.replace(parallel, tp=2 * parallel.tp, dp=max(parallel.dp // 2, 1))
    enter_world(0, parallel.ranks)
    request = request_of(model, parallel, with_optimizer=not reshard)
    facts: Facts = {}
    if trace:  # apart: it takes time, and what a process has opened it remembers
        facts["mib"] = traced_mib(lambda: plan_load(folder / "checkpoint", request))
    else:
        with resident_growth(facts, "peak_mib"):
            facts |= plan_load(folder / "checkpoint", request)
    tell(facts)


MEASURES = {
    "plan": measure_plan,
    "commit": measure_commit,
    "load": measure_load,
    "load_traced": functools.partial(measure_load, trace=True),
    "reshard": functools.partial(measure_load, reshard=True),
    "reshard_traced": functools.partial(measure_load, reshard=True, trace=True),
}


def run(name: str, model: Model, parallel: Parallel, folder: Path, pipe: Connection) -> None:
    """The target of a process: tells through the pipe."""
    MEASURES[name](model, parallel, folder, pipe.send)
