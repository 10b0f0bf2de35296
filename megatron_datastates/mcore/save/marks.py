"""Marks in state dicts, by which the strategy recognizes those of prepared saves (prepared.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_datastates.errors import SaveFailedError

if TYPE_CHECKING:
    from megatron_datastates.mcore.save.prepared import Preparation, ThinSave

MARK = "datastates_prepared"


class Mark(ShardedObject):  # type: ignore[misc]
    """Marks the state dict of a model chunk as one of a save that is, or may be, prepared."""

    preparation: Preparation | None = None  # of a full save: what it prepares for the next ones
    thin: ThinSave | None = None  # the prepared save

    @classmethod
    def of(
        cls,
        number: int,
        rank: int,
        *,
        preparation: Preparation | None = None,
        thin: ThinSave | None = None,
    ) -> Mark:
        """Returns a mark for one model chunk of this rank, in a full save or in a prepared one.

        Whole by itself: Megatron checks that all shards of an object are there, and other ranks may have
        none.
        """
        mark = cls(f"{MARK}.{number}.{rank}", None if thin is None else _Unsaveable(), (1,), (0,))
        mark.preparation, mark.thin = preparation, thin
        return mark

    def __reduce__(self) -> Any:  # in metadata that ranks exchange
        return ShardedObject, (self.key, self.data, self.global_shape, self.global_offset, self.replica_id)


class _Unsaveable:
    """The data of a mark in a thin state dict."""

    def __reduce__(self) -> Any:
        raise SaveFailedError(
            "a state dict without tensors, of a prepared save, was about to be saved by another strategy: "
            "use --datastates-prepared off, and report this"
        )


def mark_of(state: Mapping[str, Any]) -> Mark | None:
    """Returns the mark in a sharded state dict."""
    for key in ("model", "model0"):
        chunk = state.get(key)
        if isinstance(chunk, dict) and isinstance(chunk.get(MARK), Mark):
            mark: Mark = chunk[MARK]
            return mark
    return None
