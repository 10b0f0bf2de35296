"""Reads a checkpoint of buckets as one with fully reshardable optimizer state, which other layouts load.

The tensors of buckets are states of parameters here, found through the optimizer map, and the objects beside
them are a part of the common state.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from megatron_datastates.convert.foreign_classes import changed_object
from megatron_datastates.convert.parts import is_state
from megatron_datastates.convert.sources.datastates import DataStatesSource
from megatron_datastates.convert.sources.source import FragmentRange, RankContents, Source, SourceTensor
from megatron_datastates.errors import FormatError, OptionError
from megatron_datastates.format.directory import BACKEND, COMMON_FILE, COMMON_STATE_KEY
from megatron_datastates.format.values import element_bytes, is_optimizer_map
from megatron_datastates.pipeline.loading.optimizer import REMAINDERS, BucketStates
from megatron_datastates.pipeline.loading.optimizer_groups import beside_maps, reshardable_common_state
from megatron_datastates.plan.boxes import contiguous_strides
from megatron_datastates.plan.reads import ScheduledRead
from megatron_datastates.plan.strided import boxes_in_range


def tensors_by_parameter(stored: DataStatesSource, states: BucketStates) -> Mapping[str, SourceTensor]:
    """Returns the stored tensors, with states in place of buckets. Raises FormatError: one is there twice."""
    own = {key: entry for key, entry in stored.tensors.items() if key not in states.buckets}
    twice = own.keys() & states.keys()
    if twice:
        raise FormatError(f"{stored.directory} has {min(twice)!r} both in buckets and by parameter")
    return ChainMap(own, dict(states.items()))


class ByParameterSource(Source):
    """See Source. A view of another source."""

    format = DataStatesSource.format

    def __init__(self, stored: Source) -> None:
        """Raises OptionError: there is no optimizer map (or not in our format), or no common state."""
        super().__init__(stored.directory)
        states = BucketStates(stored.checkpoint) if isinstance(stored, DataStatesSource) else None
        if states is None and any(map(is_optimizer_map, stored.objects)):
            raise OptionError(
                f"{stored.directory} is a checkpoint of {stored.format}, and --optimizer fully-reshardable "
                f"reads those of {BACKEND}: convert it to {BACKEND}, which keeps its optimizer map, and then "
                "that with --optimizer fully-reshardable"
            )
        if not states and any(map(is_state, stored.tensors)):
            raise OptionError(
                f"{stored.directory} stores optimizer state by parameter already: convert it without "
                "--optimizer fully-reshardable"
            )
        if not isinstance(stored, DataStatesSource) or not states:
            raise OptionError(
                f"{stored.directory} has no optimizer map, which --optimizer fully-reshardable needs: "
                "convert one that was saved with --ckpt-format datastates and a distributed optimizer"
            )
        self._stored, self._states = stored, states
        self.manifest = stored.manifest
        self._beside = beside_maps(stored.checkpoint)
        self._made: tempfile.TemporaryDirectory[str] | None = None  # has the common state, if it is a file
        change = functools.partial(reshardable_common_state, stored.checkpoint)
        if COMMON_STATE_KEY in stored.objects:
            self._common = changed_object(stored.read_object(COMMON_STATE_KEY), COMMON_STATE_KEY, change)
        elif COMMON_FILE in stored.other_files:  # of Megatron before 0.19
            common = stored.checkpoint.read_other(COMMON_FILE)
            self._made = tempfile.TemporaryDirectory(prefix="datastates-common-")
            self.other_path(COMMON_FILE).write_bytes(
                changed_object(common, COMMON_FILE, lambda value: change([value])[0])
            )
        else:
            raise OptionError(
                f"{stored.directory} has no common state, which --optimizer fully-reshardable needs: "
                "it was not saved by Megatron"
            )
        self.tensors = tensors_by_parameter(stored, states)

    def require_whole(self) -> None:
        """Raises OptionError for a state of only a part of its parameter, as where layers are frozen.

        Also for main parameters of which only the remainders are stored, and for a chain of optimizers that
        are not all stored in buckets.
        """
        beside = next((key for key in self.tensors if key not in self._states and is_state(key)), None)
        if beside is not None:  # its key and its parameter groups would have to change, too
            raise OptionError(
                f"{self.directory} stores {beside!r} by parameter, and another optimizer's state in buckets, "
                "as with Muon and --use-distributed-optimizer: --optimizer fully-reshardable needs all of it "
                "in buckets. Leave it out: a run that resumes from datastates needs no conversion"
            )
        for key, state in self._states.items():
            if state.dtype == REMAINDERS:
                raise OptionError(
                    f"{self.directory} has only the remainders of main parameters in {key!r}, the 16 bits "
                    "that bfloat16 weights lack, as --use-precision-aware-optimizer stores them. Other "
                    "optimizers would take them for main parameters: leave --optimizer fully-reshardable out"
                )
            elements = math.prod(state.global_shape)
            if state.stored_elements < elements:
                raise OptionError(
                    f"{self.directory} has {state.stored_elements} of the {elements} elements of {key!r}, as "
                    "a part of the parameter was frozen, or a map is missing. Fully reshardable state has no "
                    "holes: leave --optimizer fully-reshardable out"
                )

    @property
    def objects(self) -> Sequence[str]:
        return [key for key in self._stored.objects if key not in self._beside]

    @property
    def streams(self) -> Sequence[str]:
        return self._stored.streams

    def open_stream(self, key: str) -> Iterator[memoryview]:
        return self._stored.open_stream(key)

    def stream_bytes(self, key: str) -> int:
        return self._stored.stream_bytes(key)

    @property
    def other_files(self) -> Sequence[str]:
        return self._stored.other_files

    def other_path(self, name: str) -> Path:
        if self._made is not None and name == COMMON_FILE:
            return Path(self._made.name, name)
        return self._stored.other_path(name)

    def read_tensor(
        self, key: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        if key in self._states:
            return self._states[key].read(offset, shape)
        return self._stored.read_tensor(key, offset, shape)

    def read_ranges(self, ranges: Sequence[FragmentRange], window: npt.NDArray[np.uint8]) -> None:
        scheduled: list[ScheduledRead] = []
        for part in ranges:
            if part.key in self._states:
                scheduled += self._reads(part, window.ctypes.data + part.at)
        self._stored.checkpoint.read(scheduled)
        self._stored.read_ranges([part for part in ranges if part.key not in self._states], window)

    def _reads(self, part: FragmentRange, address: int) -> list[ScheduledRead]:
        """Returns the reads of a range of a piece, which consists of boxes of it."""
        state = self._states[part.key]
        offset, shape = state.offsets[part.fragment].tolist(), state.shapes[part.fragment].tolist()
        item, strides = element_bytes(state.dtype), contiguous_strides(shape)
        begin, end = part.begin // item, (part.begin + part.size) // item
        found = []
        for within, lengths in boxes_in_range(shape, strides, begin, end):
            at = [o + w for o, w in zip(offset, within, strict=True)]
            to = address + item * (sum(w * s for w, s in zip(within, strides, strict=True)) - begin)
            found += [ScheduledRead(reads, to) for reads in state.plan(at, lengths, strides)]
        return found

    def read_object(self, key: str) -> bytes:
        return self._common if key == COMMON_STATE_KEY else self._stored.read_object(key)

    def object_bytes(self, key: str) -> int:
        return len(self._common) if key == COMMON_STATE_KEY else self._stored.object_bytes(key)

    def require_files(self) -> None:
        self._stored.require_files()

    def check_other(self, name: str) -> None:
        self._stored.check_other(name)

    def stored_by_rank(self) -> list[RankContents]:
        """Returns the pieces of states with the files that hold their first elements."""
        ranks = {
            rank: RankContents(
                [one for one in contents.fragments if one[0] not in self._states.buckets],
                [key for key in contents.objects if key not in self._beside],
                contents.streams,
            )
            for rank, contents in self._stored.contents_of_ranks().items()
        }
        files = self._stored.manifest.files
        for key, state in self._states.items():
            for n, (offset, shape) in enumerate(
                zip(state.offsets.tolist(), state.shapes.tolist(), strict=True)
            ):
                has_place = math.prod(shape) > 0
                rank = files[state.place(offset, shape)[1][0]].rank if has_place else min(ranks)
                ranks[rank].fragments.append((key, n))
        return [contents for _, contents in sorted(ranks.items()) if not contents.is_empty]
