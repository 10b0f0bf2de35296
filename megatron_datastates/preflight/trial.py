"""Saves and loads as a run makes them, and compares every bit."""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from megatron_datastates.api import async_save, fence, load
from megatron_datastates.engine.memory import local_ranks
from megatron_datastates.errors import DataStatesError, describe_error
from megatron_datastates.preflight.ranks import Ranks

_TENSOR_BYTES = 64 << 20
_SMALL_ELEMENTS, _SMALL_TENSORS = 1000, 100  # as biases and norms
_POLL_SECONDS = 0.02
KEPT = 2  # checkpoints that are on storage at once, at most
_UNREPORTED: dict[str, Any] = {"report_file": ""}  # that of the environment is for the reports of runs
_MIXING = -7046029254386353131  # an odd number whose bits are mixed: 2**64 divided by the golden ratio


@dataclasses.dataclass(frozen=True)
class Trial:
    """What saves and loads took.

    Attributes:
        bytes: of one checkpoint, of all ranks.
        start_ms: for which the trainer was held when a save began; of each save, on the slowest rank.
        durable_s: from the beginning of a save until all of its bytes were on storage; of each save.
        load_s: seconds of the load, of the slowest rank.
        fault: what was wrong with what this rank has loaded, or why it could not; None if it was good.
    """

    bytes: int
    start_ms: list[float]
    durable_s: list[float]
    load_s: float
    fault: str | None

    @property
    def write_rate(self) -> float:
        """Bytes a second, of all ranks together, in the median save."""
        return self.bytes / statistics.median(self.durable_s)

    @property
    def load_rate(self) -> float:
        """Bytes a second, of all ranks together."""
        return self.bytes / self.load_s


class State:
    """A rank's tensors, whose values follow from the rank, the tensor and the save."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._seed, self._device = rank << 32, device
        for number in range(_SMALL_TENSORS):
            self._add(f"rank{rank}.small{number}", _SMALL_ELEMENTS)
        left = size // 8 - _SMALL_TENSORS * _SMALL_ELEMENTS
        for number in range(-(-max(left, 0) * 8 // _TENSOR_BYTES)):
            self._add(
                f"rank{rank}.large{number}", min(left - number * (_TENSOR_BYTES // 8), _TENSOR_BYTES // 8)
            )

    def _add(self, key: str, elements: int) -> None:
        self.tensors[key] = torch.empty(elements, dtype=torch.int64, device=self._device)

    def fill(self, save: int) -> None:
        """Fills the tensors with the values of a save."""
        for number, tensor in enumerate(self.tensors.values()):
            tensor.copy_(self._values(number, save, len(tensor)))

    def become(self, rank: int) -> None:
        """Takes the keys and the values of another rank, whose state is as large."""
        self._seed = rank << 32
        tensors = self.tensors.items()
        self.tensors = {f"rank{rank}.{key.partition('.')[2]}": tensor for key, tensor in tensors}

    def clear(self) -> None:
        """Fills the tensors with what no save has."""
        for tensor in self.tensors.values():
            tensor.fill_(-1)

    def wrong(self, save: int) -> list[str]:
        """Returns the keys of tensors that have other values than those of a save."""
        return [
            key
            for number, (key, tensor) in enumerate(self.tensors.items())
            if not torch.equal(tensor, self._values(number, save, len(tensor)))
        ]

    def _values(self, number: int, save: int, elements: int) -> torch.Tensor:
        first = self._seed + (number << 16) + save + 1
        return torch.arange(elements, dtype=torch.int64, device=self._device).add_(first).mul_(_MIXING)


def save_and_load(ranks: Ranks, state: State, folder: Path, saves: int) -> Trial:
    """Saves some times, loads what another rank has saved last, and compares. Every rank calls it.

    Raises:
        SaveFailedError: a save failed, on all ranks alike.
    """
    start_ms, durable_s = [], []
    stored = sum(ranks.gathered(sum(tensor.nbytes for tensor in state.tensors.values())))
    for number in range(saves):
        fence()
        if ranks.rank == 0 and number >= KEPT:
            shutil.rmtree(folder / f"save-{number - KEPT}", ignore_errors=True)
        state.fill(number)
        if state.tensors and next(iter(state.tensors.values())).is_cuda:
            torch.cuda.synchronize()
        ranks.gathered(None)  # all begin together
        begin = time.perf_counter()
        handle = async_save(state.tensors, folder / f"save-{number}", lazy=True, **_UNREPORTED)
        start_ms.append(ranks.largest(1000 * (time.perf_counter() - begin)))
        while not handle.done():
            time.sleep(_POLL_SECONDS)
        report = handle.wait()
        durable_s.append(ranks.largest(report["durable_ms"] / 1000))
    fence()
    state.become((ranks.rank + (local_ranks() if ranks.node_count > 1 else 1)) % ranks.size)
    state.clear()
    ranks.gathered(None)
    begin, fault = time.perf_counter(), None
    try:
        load(folder / f"save-{saves - 1}", into=state.tensors, **_UNREPORTED)
    except (DataStatesError, OSError, RuntimeError) as error:  # of this rank alone: the others wait for it
        fault = describe_error(error)
    load_s = ranks.largest(time.perf_counter() - begin)
    if fault is None and (wrong := state.wrong(saves - 1)):
        count = f"{len(wrong)} tensors have" if len(wrong) > 1 else "1 tensor has"
        fault = f"{count} other bytes than were saved, first {wrong[0]!r}"
    return Trial(stored, start_ms, durable_s, load_s, fault)
