"""Names in the directories of runs and of checkpoints, of every format.

Belongs here: what a name says. Does not belong here: looking into files (pipeline/runs/runs.py), and the
names of files that a save of ours makes (values.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection

from megatron_datastates.format.values import MANIFEST_NAME, is_own_file_name

BACKEND = "datastates"  # this format, as metadata.json names it
TORCH_DIST = "torch_dist"  # likewise
LEGACY = "torch"  # Megatron's format of one file for each rank, as --ckpt-format names it: no file says it
LEGACY_FOLDER = "mp_rank_"  # its names begin with this
LEGACY_FILE = "model_optim_rng.pt"  # in each
METADATA_NAME = "metadata.json"  # Megatron's, in every format: says which format it is; written last
TORCH_DIST_INDEX = ".metadata"  # DCP's
OPTIMIZER_MAPS_NAME = "datastates-optimizer-maps.json"  # ours, in a converted checkpoint of torch_dist
INTEGRITY_NAME = "integrity.json"  # Megatron's hashes of a checkpoint's files
TRACKER_NAME = "latest_checkpointed_iteration.txt"  # Megatron's, beside the iterations of a run
NON_PERSISTENT_NAME = "non_persistent"  # Megatron's, in a run's directory: has a tracker and iterations
REMOVAL_NAME = ".datastates-removal.tmp"  # what was the manifest, or the index, of what prune removes
JOURNAL_NAME = ".datastates-weights.tmp"  # what prune --drop-optimizer makes and replaces in a directory
COMMON_FILE = "common.pt"  # of Megatron before 0.19; beside a common_state object it is a left-over
COMMON_STATE_KEY = "common_state/shard_0_1"  # the same as an object
SHARDING_KEY = "distrib_optim_sharding_type"  # of optimizer state: in the content metadata
ARGUMENTS_KEY = "args"  # an object where Megatron saves through DCP, as with Megatron-FSDP
ITERATION_KEY = "iteration"  # likewise
_VERSION_KEY = "checkpoint_version"  # likewise
# What a checkpoint of torch_dist consists of: not part of one that is published over it.
FILES_OF_TORCH_DIST = ("*.distcp", TORCH_DIST_INDEX, COMMON_FILE)
RELEASE_NAME = "release"  # a checkpoint of a run that has no iteration, as the tracker says, too
_ITERATION = re.compile(r"iter_(\d+)", re.ASCII)


def iteration_name(iteration: int) -> str:
    """Returns the name of an iteration's directory, as Megatron makes it: `iter_0000100`."""
    return f"iter_{iteration:07d}"


def iteration_in_name(name: str) -> int | None:
    """Returns the iteration that a directory is named after; None if its name is no iteration's."""
    match = _ITERATION.fullmatch(name)
    return int(match[1]) if match else None


def is_through_dcp(keys: Collection[str]) -> bool:
    """Returns whether Megatron saved a checkpoint with objects of these keys through DCP.

    Such a checkpoint has no common state and no metadata.json, and DCP's own facts are needed to resume.
    """
    return {ARGUMENTS_KEY, _VERSION_KEY} <= set(keys) and COMMON_STATE_KEY not in keys


def is_of_a_format(name: str) -> bool:
    """Returns whether a format makes files of this name: a converted checkpoint has its own."""
    known = {METADATA_NAME, TORCH_DIST_INDEX, INTEGRITY_NAME, MANIFEST_NAME, OPTIMIZER_MAPS_NAME}
    is_ours = name.startswith(".datastates-") or is_own_file_name(name)  # a call's claim, too
    return is_ours or name in known or name.endswith((".distcp", ".tmp"))
