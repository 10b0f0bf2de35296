"""Loads that met damage: what the error advises, and the older checkpoint that may be loaded instead.

Belongs here: which older checkpoint all ranks agree on, and when it is sure to be meant. Does not belong
here: the loads themselves (load.py); the search (pipeline/upkeep/fallback.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_datastates.config import Options
from megatron_datastates.files import any_path, path_of
from megatron_datastates.format.directory import RELEASE_NAME, TRACKER_NAME, iteration_name
from megatron_datastates.mcore.load.state import Load
from megatron_datastates.mcore.training.arguments import run_arguments
from megatron_datastates.pipeline.publishing.collectives import Collectives

if TYPE_CHECKING:
    from megatron_datastates.mcore.errors import MegatronLoadFailedError

_STRICT = ("assume_ok_unexpected", "raise_unexpected", "raise_all")  # a missing tensor is an error


def damage_error(
    damage: Exception, load: Load, options: Options, *, is_resume: bool
) -> MegatronLoadFailedError:
    """Returns the error of a load that met damage, with what the user can do.

    Collective if the ranks search for an older checkpoint.

    Args:
        is_resume: whether the load continues a run; in place of other loads, no older checkpoint is loaded.
    """
    from megatron_datastates.mcore.errors import MegatronLoadFailedError

    advice, older = _advice(load, options, is_resume)
    error = MegatronLoadFailedError(f"{str(damage).removesuffix('.')}. {advice}")
    error.older = older
    return error


def _advice(load: Load, options: Options, is_resume: bool) -> tuple[str, int | None]:
    """Returns what the user can do, and an iteration to load instead. Collective if the ranks search."""
    from megatron_datastates.pipeline.upkeep.fallback import find_older_checkpoint, verify_together

    args, directory = run_arguments(), any_path(load.directory or "")
    root = any_path(args.load) if directory.parent == _non_persistent(args) else directory.parent
    if directory.name == RELEASE_NAME:
        return (
            f"The tracker {root / TRACKER_NAME} says release, so that --ckpt-step chooses nothing: to "
            "load another checkpoint there, write its iteration into that file."
        ), None
    collectives = Collectives()
    most = collectives.share_from_first(options.fallback)
    if most == 0:
        return (
            "Start again with --datastates-fallback N to find the newest undamaged one of the N checkpoints "
            "before it; --ckpt-step loads that one."
        ), None
    found = find_older_checkpoint(directory, root, most, collectives, options)
    other = _other_format(root, found.other) + _unread([*map(iteration_name, found.unread)])
    if found.iteration is None:
        looked = ", ".join(iteration_name(iteration) for iteration in found.damaged) or "none found"
        return f"No older checkpoint in {root} verifies ({looked}).{other}", None
    first = " --no-load-optim, as its optimizer's state was removed" if found.is_without_optimizer else ""
    if getattr(args, "non_persistent_ckpt_type", None) is not None:
        first += ", without --non-persistent-ckpt-type, which would load a newer one"
    name = iteration_name(found.iteration)
    how = "verifies" if found.has_checksums else "is complete, but its data has no checksums to verify"
    is_chosen = not is_resume or bool(getattr(args, "ckpt_step", None))
    # Other values let tensors that the older one lacks stay as the damaged one has filled them.
    is_strict = getattr(args, "dist_ckpt_strictness", _STRICT[0]) in _STRICT
    is_sure = found.has_checksums and is_strict and not (first or other or is_chosen)
    if collectives.share_from_first(int(options.on_damage == "fallback" and is_sure)):
        faults, unread, _ = verify_together(directory, collectives, options)
        if faults:
            return f"{name} verifies.", found.iteration
        if not unread:  # storage failed for a while, or it was replaced
            return f"{directory.name} itself verifies now: start again.", None
        other = _unread([directory.name])
    return f"{name} {how}: resume with --ckpt-step {found.iteration}{first}.{other}", None


def _other_format(root: Path, iteration: int | None) -> str:
    """Returns which checkpoint of another format was not verified, if there is one."""
    if iteration is None:
        return ""
    path = root / iteration_name(iteration)
    return (
        f" Only datastates checkpoints were verified: {path.name}, of another format, may lose less "
        f"training. `datastates verify {path}` checks it if it is of torch_dist; then resume with "
        f"--ckpt-step {iteration}."
    )


def _unread(names: Sequence[str]) -> str:
    """Returns which checkpoints may be undamaged, if there are any: a store did not answer, say."""
    listed = ", ".join(names)
    return f" First start again: in {listed}, which cannot be read now, no fault was found." if names else ""


def _non_persistent(args: Any) -> Path | None:
    if getattr(args, "non_persistent_ckpt_type", None) != "global" or not args.load:
        return None
    return path_of(args.non_persistent_global_ckpt_dir or path_of(args.load) / "non_persistent")
