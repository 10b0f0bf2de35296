"""Ranks that save and load through `import megatron_datastates as ds`."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from saving_rank import join, report

import megatron_datastates as ds
from megatron_datastates.config import Options
from megatron_datastates.errors import RanksDifferError, SaveFailedError
from megatron_datastates.pipeline.saver_pool import saver_for
from megatron_datastates.providers import Entry, ObjectSource, StateReader

ROWS = 12


def whole(value: int) -> torch.Tensor:
    return torch.arange(ROWS * 5, dtype=torch.float32).reshape(ROWS, 5) + value


def part(rank: int, ranks: int, value: int) -> ds.Shard:
    rows = ROWS // ranks
    return ds.Shard(whole(value)[rank * rows : (rank + 1) * rows].clone(), (ROWS, 5), (rank * rows, 0))


def save(root: str, value: int, folder: str) -> None:
    rank, ranks = join()
    state = {"weight": part(rank, ranks, value)} | ({"step": value} if rank == 0 else {})
    handle = ds.async_save(state, Path(root, "ck"), iteration=value)
    while not handle.done():
        time.sleep(0.001)
    assert handle.report is not None
    report(folder, state=handle.report["state"], ranks=handle.report["ranks"])


def save_where_one_rank_differs(
    root: str, environment: dict[str, str], release: str, own: int, folder: str
) -> None:
    """Saves twice; rank `own` has this environment and this release (""; the installed one)."""
    rank, ranks = join()
    if rank == own:
        os.environ |= environment
        ds.__version__ = release or ds.__version__
    errors = []
    for name in ("first", "second"):
        try:
            ds.save({"weight": part(rank, ranks, 1)}, Path(root, name))
            errors.append("")
        except RanksDifferError as error:
            errors.append(str(error))
    report(folder, errors=errors)


def load(root: str, value: int, folder: str) -> None:
    """Loads on any number of ranks, which do not communicate."""
    rank, ranks = join()
    blank = part(rank, ranks, -1)
    found = ds.load(Path(root, "ck"), into={"weight": blank, "step": None})
    assert torch.equal(blank.tensor, part(rank, ranks, value).tensor)
    assert found["step"] == value
    report(folder)


def save_and_load_with_another_default_device(root: str, value: int, folder: str) -> None:
    rank, ranks = join()
    given, blank = part(rank, ranks, value), part(rank, ranks, -1)
    objects = {f"of {rank}": [torch.tensor(float(value)), whole(value).to_sparse()]}
    torch.set_default_device("meta")  # for which a GPU may stand
    try:
        ds.save({"weight": given} | objects, Path(root, "ck"))
        found = ds.load(Path(root, "ck"), into={"weight": blank, **dict.fromkeys(objects)})
    finally:
        torch.set_default_device(None)
    assert torch.equal(blank.tensor, given.tensor)
    step, sparse = found[f"of {rank}"]
    assert step.device.type == "cpu" and step == value and torch.equal(sparse.to_dense(), whole(value))
    report(folder)


def save_what_fails(root: str, how: str, folder: str) -> None:
    """Saves an invalid state on one rank, or the same whole tensor on both."""
    rank, _ = join()
    states = {
        "replicas": {"weight": torch.ones(3)},
        "names": {"a": {"b": 1}, "a.b": 2} if rank else {"c": 3},
        "object": {"o": (lambda: None) if rank else 1, f"t{rank}": torch.ones(3)},
    }
    try:
        ds.save(states[how], Path(root, "ck"))
    except SaveFailedError as error:
        report(folder, error=str(error))


class Numbers:
    """A provider of one list, or of nothing, with a note."""

    def __init__(self, numbers: list[int], note: str) -> None:
        self.numbers, self.notes = numbers, {"note": note}

    def entries(self) -> Iterator[Entry]:
        if self.numbers:
            yield ObjectSource("numbers", self.numbers)

    def restore(self, reader: StateReader) -> None:
        self.numbers = reader.read_object("numbers") if list(reader.objects) else []


def save_with_own_providers(root: str, folder: str) -> None:
    """Saves, on every rank, a provider that all have and one that only this rank has; then loads them."""
    rank, _ = join()
    counts = []
    for number, note in enumerate(["a", "a", "b", "b"]):
        own: Any = Numbers([rank] if rank else [], f"{note} of {rank}")
        state = {"same": Numbers([], "same"), f"of{rank}": own}
        before = dict(saver_for(Options()).session.collectives.calls)
        ds.save(state, Path(root, str(number)))
        calls = saver_for(Options()).session.collectives.calls
        counts.append(calls.get("gather layouts", 0) - before.get("gather layouts", 0))
        found = {"same": Numbers([9], ""), f"of{rank}": Numbers([9], "")}
        torch.distributed.barrier()
        ds.load(Path(root, str(number)), into=found)
        assert found["same"].numbers == [] and found[f"of{rank}"].numbers == own.numbers
    report(folder, counts=counts)
