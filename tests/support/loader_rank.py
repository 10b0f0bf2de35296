"""One rank of a tiny pretraining with a data loader of the script's own, torchdata's, with two workers.

What belongs here: replacing the data of `pretrain_tiny.py` as a user's script would. What does not: recording
and comparing (`tiny_rank.py`). The environment variable LOADER says what the script does with its loader:
`attach` (as documented), `attach anew` (restore=False), `attach not strict`, or nothing.

A run writes FOLDER/data-rankN.json: the samples that this rank's model has seen, in order.
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pretrain_tiny
import tiny_rank
import torch
from megatron.core import parallel_state
from megatron.training import get_args
from torchdata.stateful_dataloader import StatefulDataLoader

from megatron_datastates.mcore import attach_dataloader

SAMPLES = 5  # of each data-parallel rank, so that a few steps pass the end of an epoch


class Numbered(torch.utils.data.Dataset[Any]):
    """Every `ranks`-th sample of the script's own data set, with its number."""

    def __init__(self, samples: torch.utils.data.Dataset[Any], rank: int, ranks: int) -> None:
        self._samples, self._rank, self._ranks = samples, rank, ranks

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = self._rank + index * self._ranks
        return {"number": number, **self._samples[number]}


class Batches:
    """The iterator over all epochs of a loader that Megatron's loop is given."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.seen: list[int] = []
        self._batches: Iterator[Any] | None = None

    def __next__(self) -> Any:
        self._batches = self._batches or (batch for _ in iter(int, 1) for batch in self.loader)
        batch = next(self._batches)
        self.seen += batch.pop("number").tolist()
        return batch

    def save_state(self) -> Any:
        return self.loader.state_dict()


made: list[Batches] = []


def loaders(samples: list[int | None], vp_stage: int | None = None) -> tuple[Batches, None, None]:
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    text = pretrain_tiny.CountingSequences(100, get_args().seq_length, get_args().vocab_size)
    loader = StatefulDataLoader(
        Numbered(text, rank, ranks),
        batch_size=get_args().micro_batch_size,
        shuffle=True,
        num_workers=2,
        generator=torch.Generator().manual_seed(rank),
    )
    how = os.environ.get("LOADER", "")
    if how.startswith("attach"):
        resumed = attach_dataloader(loader, strict="not strict" not in how, restore="anew" not in how)
        print(f"data loader resumed: {resumed}")
    made.append(Batches(loader))
    return made[-1], None, None


loaders.is_distributed = True  # type: ignore[attr-defined]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = own_arguments(parser)
    parser.add_argument("--dataloader-save", help="as in Megatron's examples/multimodal")
    return parser


own_arguments = pretrain_tiny.add_arguments


def main(arguments: list[str], folder: str) -> None:
    pretrain_tiny.datasets, pretrain_tiny.add_arguments = loaders, add_arguments
    try:
        tiny_rank.main([*arguments, "--dataloader-type", "external"], folder)
    finally:
        seen = made[-1].seen if made else []
        Path(folder, f"data-rank{os.environ['RANK']}.json").write_text(json.dumps(seen))
