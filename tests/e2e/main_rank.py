"""One rank of a tiny pretraining with Megatron-LM's main, with stand-ins for a rollout bank and logits."""

import json
import os
from pathlib import Path
from typing import Any

import tiny_rank
from megatron.training import checkpointing, get_args


def main(arguments: list[str], folder: str) -> None:
    checkpointing._maybe_compact_rollout_bank = compact
    if "LOGITS" in os.environ:
        from megatron.training.distillation import logits_saver

        logits_saver._ACTIVE_LOGITS_SAVER = Logits(Path(os.environ["LOGITS"]))
    tiny_rank.main(arguments, folder)


def compact(iteration: int) -> None:
    """Notes, in place of compacting, whether the checkpoint of that iteration was published."""
    save = Path(get_args().save)
    published = (save / f"iter_{iteration:07d}" / "datastates.manifest").exists()
    (save / f"bank-{iteration}.json").write_text(json.dumps(published))


class Logits:
    """What a checkpoint's request is followed by: a request of its own, which a worker writes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take_pending_data(self) -> tuple[Any, ...]:
        return (str(self._folder / f"logits-{os.environ['RANK']}-{get_args().curr_iteration + 1}"),)

    @staticmethod
    def _write_batched_tar(path: str) -> None:
        Path(path).write_text("written")
