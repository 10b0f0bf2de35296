"""Requests for optimizer state in buckets from checkpoints of Megatron's own formats.

Their state by parameter loads into the buckets of any layout, as that of ours. Their buckets have no map, so
they load into the layout that saved them; an error in another one says what works. Megatron's own training
loop asks for what is stored. This serves programs that ask for what their own configuration says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import load_common_state_dict, load_tensors_metadata
from torch.distributed.checkpoint.api import CheckpointException

from megatron_datastates.format.directory import SHARDING_KEY
from megatron_datastates.format.values import is_of_optimizer
from megatron_datastates.mcore.errors import load_errors
from megatron_datastates.mcore.load.optimizer_layout import (
    NO_STATE,
    announce,
    asks_for_buckets,
    bucket_mismatch,
    restated_from,
)
from megatron_datastates.mcore.load.optimizer_names import StateNames
from megatron_datastates.mcore.load.state import Restated
from megatron_datastates.pipeline.loading.optimizer_groups import from_common_state

_BY_PARAMETER = "fully_reshardable"
_BUCKET = ".gbuf_idx_"  # in the keys of buckets


def restated_where_needed(arguments: dict[str, Any]) -> Restated | None:
    """Returns the restated request of a `dist_checkpointing.load`; None if it is to be loaded as it is.

    Raises:
        CheckpointingException: the checkpoint lacks something that the optimizer needs.
    """
    directory, request = str(arguments["checkpoint_dir"]), arguments["sharded_state_dict"]
    if not asks_for_buckets(request):
        return None
    common = load_common_state_dict(directory)
    if ((common or {}).get("content_metadata") or {}).get(SHARDING_KEY) != _BY_PARAMETER:
        return None
    announce(directory)
    with load_errors():
        return restated_from(request, StateNames(_shapes(directory)), from_common_state(common), None)


@contextlib.contextmanager
def explaining(arguments: dict[str, Any]) -> Iterator[None]:
    """Says what works if a load fails that asks for other buckets than are stored."""
    directory, request = str(arguments["checkpoint_dir"]), arguments["sharded_state_dict"]
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        problem = None
        if asks_for_buckets(request):
            shapes = _shapes(directory)
            if any(_BUCKET in key for key in shapes):
                problem = bucket_mismatch(request, shapes)
            elif not any(map(is_of_optimizer, shapes)):
                problem = NO_STATE
        if problem is None:
            raise
        raise CheckpointingException(f"{directory}: {problem}") from error


def _shapes(directory: str) -> dict[str, tuple[int, ...]]:
    return {key: tuple(item.global_shape) for key, item in load_tensors_metadata(directory).items()}
