"""The single rank of test_damaged_metadata.py: loads checkpoints whose metadata.json is damaged."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor, core
from megatron.core.dist_checkpointing.core import CheckpointingException
from saving_rank import join, report, save

from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.mcore import DataStatesSaveStrategy


def sharded(value: float) -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((100,), value), replica_id=0)}


def outcome(action: Callable[[Path], object], directory: Path) -> list[Any]:
    """Returns what `action` returned, or the class and the text of what it raised."""
    try:
        return ["returned", action(directory)]
    except BaseException as error:  # torch's CheckpointException is no Exception
        kind = "CheckpointingException" if isinstance(error, CheckpointingException) else type(error).__name__
        return [kind, str(error)]


def load(directory: Path) -> bool:
    return bool((dist_checkpointing.load(sharded(0.0), str(directory))["w"] == 3).all())


def load_config_without_us(directory: Path) -> bool:
    return core.maybe_load_config.__wrapped__(str(directory)) is None


def loads(root: str, damages: dict[str, str], folder: str) -> None:
    """Reports, by damage, what a load returned or raised, and what Megatron's unhooked function does."""
    join()
    save(Path(root, "ours"), sharded(3.0), DataStatesSaveStrategy(), "sync")
    save(Path(root, "stock"), sharded(3.0), None, "sync")
    outcomes: dict[str, dict[str, Any]] = {
        "published": {},
        "not published": {},
        "stock": {},
        "megatron only": {},
    }
    for number, (damage, text) in enumerate(damages.items()):
        for kind in ("published", "not published", "stock"):
            directory = Path(root, f"{kind} {number}")
            shutil.copytree(Path(root, "stock" if kind == "stock" else "ours"), directory)
            (directory / "metadata.json").write_bytes(text.encode("latin-1"))
            if kind == "not published":
                (directory / MANIFEST_NAME).unlink()
            outcomes[kind][damage] = outcome(load, directory)
        outcomes["megatron only"][damage] = outcome(load_config_without_us, directory)
    another = Path(root, "ours") / "metadata.json"
    another.write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    outcomes["another format"] = {"with it": outcome(load, another.parent)}
    another.unlink()
    outcomes["another format"]["without it"] = outcome(load, another.parent)
    report(folder, **outcomes)
