"""The position of a data loader: a state provider for torchdata's StatefulDataLoader and for Energon.

Each data-parallel rank has a loader of its own and stores one object, `rank-<rank>-of-<ranks>`, so no two
ranks store one key. A position is valid only for the number of data-parallel ranks that saved it: with
another one, data would be read twice or never. So such a resume fails, unless the user asks to start from the
beginning of the data.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from megatron_datastates.errors import MismatchError
from megatron_datastates.providers.base import StateReader
from megatron_datastates.providers.energon import to_energon, to_plain
from megatron_datastates.providers.objects import ObjectSource

logger = logging.getLogger(__name__)
# Names of the methods that return and set the state of one rank's loader: Energon's, and everybody else's.
_METHODS = (("save_state_rank", "restore_state_rank"), ("state_dict", "load_state_dict"))
_KEY = re.compile(r"rank-\d+-of-(\d+)")


class DataLoaderState:
    """The position of one rank's data loader.

    Args:
        loader: has `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader, or any object of the
            program), or `save_state_rank` and `restore_state_rank` (Megatron-Energon). Its state is plain
            data of Python, numpy and torch, or of Energon's own classes.
        rank: number of this loader among those that share the data: the data-parallel rank. By default the
            rank of torch.distributed, or 0.
        ranks: number of such loaders; by default the world size of torch.distributed, or 1.
        stores: whether this rank stores its state. Of ranks with the same `rank` (those of one tensor
            parallel group, for instance), exactly one does; all of them restore.
        strict: with False, a checkpoint of another number of ranks leaves the loader as it is, at the
            beginning of its data, with a warning.

    Raises:
        TypeError: `loader` has no such methods.
    """

    name = "dataloader"

    def __init__(
        self,
        loader: Any,
        *,
        rank: int | None = None,
        ranks: int | None = None,
        stores: bool = True,
        strict: bool = True,
    ) -> None:
        self._save, self._restore = _methods(loader)
        is_distributed = dist.is_available() and dist.is_initialized()
        self._rank = rank if rank is not None else dist.get_rank() if is_distributed else 0
        self._ranks = ranks if ranks is not None else dist.get_world_size() if is_distributed else 1
        self._stores, self._strict = stores, strict

    def entries(self) -> Iterator[ObjectSource]:
        """Yields the position after the last batch that the program has received, on a rank that stores."""
        if self._stores:
            yield ObjectSource(key_of(self._rank, self._ranks), to_plain(self._save()))

    def restore(self, reader: StateReader) -> None:
        """Sets the loader to the stored position. Call before its first batch.

        Raises:
            MismatchError: the checkpoint was saved with another number of ranks, and `strict` is set.
        """
        self.resume(reader)

    def resume(self, reader: StateReader) -> bool:
        """Restores as `restore` does; returns whether the checkpoint has this rank's position.

        Needs of the reader `objects`, and `read_object` of this position.
        """
        key, stored = key_of(self._rank, self._ranks), list(reader.objects)
        if key in stored:
            self._restore(to_energon(reader.read_object(key)))
            return True
        problem = _why_absent(stored, self._rank, self._ranks)
        if self._strict:
            raise MismatchError(
                f"{problem}; resume with as many data-parallel ranks as saved it, or pass strict=False to "
                "start from the beginning of the data"
            )
        logger.warning(
            "%s. The data loader starts from the beginning of its data, as strict=False was passed", problem
        )
        return False


def key_of(rank: int, ranks: int) -> str:
    """Returns the key of one rank's position, relative to the provider's name."""
    return f"rank-{rank}-of-{ranks}"


def _why_absent(stored: list[str], rank: int, ranks: int) -> str:
    counts = sorted({int(match[1]) for name in stored if (match := _KEY.fullmatch(name))})
    if counts == [ranks]:
        return f"the checkpoint lacks the position of data-parallel rank {rank} (of {ranks})"
    saved = " and ".join(map(str, counts)) or "no"
    return (
        f"the checkpoint has the positions of {saved} data-parallel ranks, and this run has {ranks}: a "
        "position is valid only for the number of data-parallel ranks that saved it"
    )


def _methods(loader: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    for save, restore in _METHODS:
        if hasattr(loader, save) and hasattr(loader, restore):
            return getattr(loader, save), getattr(loader, restore)
    raise TypeError(
        f"a {type(loader).__name__} cannot return and set its position: expected state_dict and "
        "load_state_dict (torchdata's StatefulDataLoader), or save_state_rank and restore_state_rank "
        "(Energon's savable loader)"
    )
