"""One rank of a tiny pretraining that counts collective calls. Runs in forked ranks.

Counts the functions of torch.distributed that Megatron and this package call (sums that join the records of
all ranks apart), by what the trainer is doing:
`save N` (in the Nth save_checkpoint), `load`, or `poll` (in maybe_finalize_async_save). Calls at any other
time are not counted.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pretrain_tiny
import torch
from megatron.training import training as loop

KINDS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "new_group",
    "reduce_scatter_tensor",
)
MOST_FLAGS = 50  # that a sum of flags has in these tests; records of two ranks have more numbers
counts: dict[str, Counter[str]] = {}
doing: list[str] = []
saves = 0


def counted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if doing:
            joins = kind == "all_reduce" and args[0].dtype == torch.int32 and args[0].numel() > MOST_FLAGS
            counts.setdefault(doing[-1], Counter())[f"{kind} of records" if joins else kind] += 1
        return function(*args, **kwargs)

    return call


def during(name: Callable[[], str], function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        doing.append(name())
        counts.setdefault(doing[-1], Counter())
        try:
            return function(*args, **kwargs)
        finally:
            doing.pop()

    return call


def next_save() -> str:
    global saves
    saves += 1
    return f"save {saves}"


def after_the_last(save: Callable[..., Any]) -> Callable[..., Any]:
    """Lets each save begin once the last one is published: one that overlaps it sends the layouts again."""

    def call(*args: Any, **kwargs: Any) -> Any:
        loop.maybe_finalize_async_save(blocking=True)
        return save(*args, **kwargs)

    return call


def main(arguments: list[str], folder: str) -> None:
    """Pretrains and writes the counts to FOLDER/rankN.json."""
    sys.argv = ["pretrain_tiny.py", *arguments]
    for kind in KINDS:
        setattr(torch.distributed, kind, counted(kind, getattr(torch.distributed, kind)))
    set_up = loop.setup_model_and_optimizer

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        # Not earlier: this package replaces these functions once the arguments are parsed.
        loop.save_checkpoint = after_the_last(during(next_save, loop.save_checkpoint))
        loop.load_checkpoint = during(lambda: "load", loop.load_checkpoint)
        loop.maybe_finalize_async_save = during(lambda: "poll", loop.maybe_finalize_async_save)
        return set_up(*args, **kwargs)

    loop.setup_model_and_optimizer = setup_model_and_optimizer
    try:
        pretrain_tiny.main()
    finally:  # --exit-interval ends the process
        Path(folder, f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(counts))
