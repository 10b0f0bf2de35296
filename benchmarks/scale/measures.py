"""What benchmarks.scale measures, each in its own process, so that its memory can be measured.

A measure sends names and values as it finds them; later ones add to earlier ones, so that a measure that is
ended early has sent what it had found. `plan` leaves the indexes of all ranks in the folder, `commit`, as
results name it, publishes a checkpoint of them (with sparse data files), and `load` plans one load of it.
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
from typing import Any

from benchmarks import machine
from benchmarks.scale.loads import enter_world, plan_load, request_of
from benchmarks.scale.models import Model, Parallel
from benchmarks.scale.ranks import RankState, rank_states
from megatron_datastates.config import Options
from megatron_datastates.engine.faults import Faults
from megatron_datastates.format.tail import Kind
from megatron_datastates.format.values import MANIFEST_NAME, Fragment, SaveId
from megatron_datastates.pipeline.publisher import Publisher
from megatron_datastates.pipeline.publishing.documents import PublicationExtras
from megatron_datastates.pipeline.publishing.layouts import LayoutStore, encode_providers
from megatron_datastates.pipeline.saving.milestones import SaveContext
from megatron_datastates.pipeline.saving.rank_save import RankSave
from megatron_datastates.pipeline.saving.records import RankRecord, Records
from megatron_datastates.plan.layout import TailItem, plan_layout

MIB = 1 << 20
_FACTORS = (1, 2, 4, 8)
_LEAST_FRAGMENTS = 250  # of the smallest plan in the series; fewer would measure constant costs alone
_PUBLISHES = 3
_PLANS = 9
Facts = dict[str, Any]
Send = Callable[[Facts], None]


def clocked(work: Callable[[], Any]) -> tuple[float, float]:
    """Returns the elapsed seconds and those of the processor: on a busy machine the two are far apart."""
    begin, cpu = time.perf_counter(), time.process_time()
    work()
    return round(time.perf_counter() - begin, 4), round(time.process_time() - cpu, 4)


@contextlib.contextmanager
def resident_growth(facts: Facts, name: str) -> Iterator[None]:
    """Sets facts[name] to the greatest growth of resident memory while this is entered, in MiB."""
    gc.collect()
    before = machine.status_bytes("VmRSS")
    machine.reset_peak()
    yield
    facts[name] = round((machine.status_bytes("VmHWM") - before) / MIB, 1)


def traced_mib(work: Callable[[], Any]) -> float:
    """Returns the peak of what Python and numpy allocate in `work`, in MiB."""
    gc.collect()
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return round(peak / MIB, 1)


# -- planning ---------------------------------------------------------------------------------------------


def measure_plan(model: Model, parallel: Parallel, folder: Path, send: Send) -> None:
    """Measures planning every rank's file, and files of growing size, in processor time."""
    largest = RankState([], [], [])
    some: list[Fragment] = []
    keys: set[str] = set()
    seconds: list[float] = []
    ranks: list[Facts] = []
    with (folder / "indexes").open("wb") as into:
        for state in rank_states(model, parallel):
            begin = time.process_time()
            plan = plan_layout(state.fragments, state.eager, _tail(state))
            seconds.append(time.process_time() - begin)
            into.write(plan.index)
            counts = {"fragments": len(state.fragments), "objects": len(state.objects)}
            ranks.append({"bytes": len(plan.index), "digest": plan.digest.hex()} | counts)
            keys.update(fragment.key for fragment in state.fragments)
            largest = max(largest, state, key=lambda state: len(state.fragments))
            if len(some) < _FACTORS[-1] * max(len(largest.fragments), _LEAST_FRAGMENTS):
                some += state.fragments
    (folder / "ranks.json").write_text(json.dumps(ranks))
    send(
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


def _tail(state: RankState) -> list[TailItem]:
    return [TailItem(Kind.OBJECT, key) for key in state.objects]


def _plan_ms(state: RankState) -> float:
    """Returns the time of the fastest of several plans: other processes can only add to it."""
    took = []
    for _ in range(_PLANS):
        begin = time.process_time()
        plan_layout(state.fragments, state.eager, _tail(state))
        took.append(time.process_time() - begin)
    return round(min(took) * 1e3, 3)


def _growth(fragments: list[Fragment]) -> Facts:
    """Returns milliseconds to plan a rank with 1, 2, 4 and 8 times a number of fragments."""
    base = len(fragments) // _FACTORS[-1]
    found = {
        count: _plan_ms(RankState(fragments[:count], [False] * count, []))
        for count in (factor * base for factor in _FACTORS)
    }
    per_fragment = [ms / count for count, ms in found.items()]
    # Steepness is 1 where planning is linear in a rank's fragments.
    return {"ms_by_fragments": found, "steepness": round(per_fragment[-1] / per_fragment[0], 3)}


# -- publishing -------------------------------------------------------------------------------------------


def measure_publish(model: Model, parallel: Parallel, folder: Path, send: Send) -> None:
    """Measures what rank 0 does when all ranks are durable: with a new layout, and with a known one."""
    records = _records(json.loads((folder / "ranks.json").read_text()))
    facts: Facts = {}
    store = LayoutStore()
    before = machine.status_bytes("VmRSS")
    with resident_growth(facts, "first_peak_mib"):
        _fill(store, folder, records)
        merge = functools.partial(store.merged, Records.of(records))
        facts["merge_seconds"], facts["merge_cpu_seconds"] = clocked(merge)
    gc.collect()
    facts["kept_mib"] = round((machine.status_bytes("VmRSS") - before) / MIB, 1)
    send(facts)
    encoded = b"".join(record.encode() for record in records)
    took = []
    for number in range(_PUBLISHES):
        directory = folder / f"checkpoint-{number}"
        _make_files(directory, records, number + 1)
        with resident_growth(facts, "cached_peak_mib"):
            took.append(clocked(functools.partial(_publish, store, encoded, directory, number + 1)))
        shutil.rmtree(folder / f"checkpoint-{number - 1}", ignore_errors=True)
    (folder / f"checkpoint-{_PUBLISHES - 1}").rename(folder / "checkpoint")
    facts["cached_seconds"], facts["cached_cpu_seconds"] = sorted(took)[_PUBLISHES // 2]
    facts["cached_spread_seconds"] = [min(took)[0], max(took)[0]]
    facts["manifest_bytes"] = (folder / "checkpoint" / MANIFEST_NAME).stat().st_size
    (index,) = (folder / "checkpoint").glob("index-*")
    facts["merged_index_bytes"] = index.stat().st_size
    send(facts)
    _trace_publish(folder, records, send)


def _trace_publish(folder: Path, records: list[RankRecord], send: Send) -> None:
    """Publishes again and measures what Python allocates; apart, since tracing takes time."""
    store, directory, ordinal = LayoutStore(), folder / "traced", _PUBLISHES + 1

    def first() -> None:
        _fill(store, folder, records)
        store.merged(Records.of(records))

    send({"first_traced_mib": traced_mib(first)})
    _make_files(directory, records, ordinal)
    encoded = b"".join(record.encode() for record in records)
    send({"cached_traced_mib": traced_mib(lambda: _publish(store, encoded, directory, ordinal))})
    shutil.rmtree(directory)


def _records(ranks: Sequence[Facts]) -> list[RankRecord]:
    """Returns records of ranks that have data files, which nobody wrote."""
    seconds: Any = dict.fromkeys(
        ("held", "fence", "stream_wait", "staging", "writing", "durable", "slot_wait"), 0.5
    )
    return [
        RankRecord(
            rank=rank,
            has_file=True,
            file_bytes=1 << 30,
            footer_offset=(1 << 30) - 4096,
            footer_crc=rank,
            layout_digest=bytes.fromhex(facts["digest"]),
            layout_bytes=0,
            providers_digest=encode_providers([])[0],
            **seconds,
        )
        for rank, facts in enumerate(ranks)
    ]


def _fill(store: LayoutStore, folder: Path, records: Sequence[RankRecord]) -> None:
    """Adds the indexes of all ranks, and their empty lists of providers, to rank 0's store."""
    store.add_providers(*encode_providers([]))
    ranks = json.loads((folder / "ranks.json").read_text())
    with (folder / "indexes").open("rb") as file:
        for record, facts in zip(records, ranks, strict=True):
            store.add(record.rank, record.layout_digest, file.read(facts["bytes"]))


def _make_files(directory: Path, records: Sequence[RankRecord], ordinal: int) -> None:
    """Makes sparse data files: rank 0 checks their presence and size."""
    directory.mkdir()
    for record in records:
        with (directory / SaveId(1, ordinal).data_file_name(record.rank)).open("wb") as file:
            file.truncate(record.file_bytes)


def _publish(store: LayoutStore, encoded: bytes, directory: Path, ordinal: int) -> None:
    """Goes from the records of all ranks to a manifest in place, by rank 0's own code."""
    records = Records(encoded)
    save = RankSave(SaveContext(SaveId(1, ordinal), directory, 0, len(records), iteration=ordinal), Options())
    publisher = Publisher(save, store, Faults(""), PublicationExtras(), far_published=None)
    publisher.records = records
    publisher._publish()
    if save.failure is not None:
        raise RuntimeError(save.failure)


# -- load -------------------------------------------------------------------------------------------------


def measure_load(
    model: Model, parallel: Parallel, folder: Path, send: Send, *, reshard: bool = False, trace: bool = False
) -> None:
    """Measures what rank 0 does before it reads the first byte of data, for all that it saved.

    With `reshard`, it loads the model alone, with twice the tensor-parallel size.
    """
    if reshard:
        parallel = dataclasses.replace(parallel, tp=2 * parallel.tp, dp=max(parallel.dp // 2, 1))
    enter_world(0, parallel.ranks)
    request = request_of(model, parallel, with_optimizer=not reshard)
    facts: Facts = {}
    if trace:  # in another process: tracing takes time, and a process remembers what it has opened
        facts["mib"] = traced_mib(lambda: plan_load(folder / "checkpoint", request))
    else:
        with resident_growth(facts, "peak_mib"):
            facts |= plan_load(folder / "checkpoint", request)
    send(facts)


MEASURES: dict[str, Callable[[Model, Parallel, Path, Send], None]] = {
    "plan": measure_plan,
    "commit": measure_publish,
    "load": measure_load,
    "load_traced": functools.partial(measure_load, trace=True),
    "reshard": functools.partial(measure_load, reshard=True),
    "reshard_traced": functools.partial(measure_load, reshard=True, trace=True),
}


def run(name: str, model: Model, parallel: Parallel, folder: Path, pipe: Connection) -> None:
    """Runs a measure in a process that was started for it, and sends what it finds through the pipe."""
    MEASURES[name](model, parallel, folder, pipe.send)
