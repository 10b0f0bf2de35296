"""Loads of Megatron's training loop: they fail on all ranks alike, and an error says what to do next.

No other checkpoint is ever loaded than the one that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_datastates.config import Options
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.format.directory import iteration_name
from megatron_datastates.mcore.load import state
from megatron_datastates.mcore.load.agreement import Agreement, is_damage
from megatron_datastates.mcore.training.arguments import options_of
from megatron_datastates.pipeline.runs import may_be_ours


def guarded(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `load_checkpoint`, in any format: another one may overwrite what a save is still reading, too."""

    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        from megatron.core.dist_checkpointing.core import CheckpointingException

        from megatron_datastates.mcore.errors import MegatronLoadFailedError

        FENCE.wait("a load")
        with state.opened(options=_options, in_training_loop=True, failed_alike=False) as load:
            try:
                return original(*args, **kwargs)
            except CheckpointingException as error:
                if not is_damage(error) or not _together(load):
                    raise
                raise MegatronLoadFailedError(f"{error} {_advice(load)}") from error.__cause__

    return load_checkpoint


def _options() -> Options:
    from megatron.training.global_vars import get_args

    return options_of(get_args())


def _together(load: state.Load) -> bool:
    """Whether all ranks are here."""
    from megatron_datastates.pipeline.agreement import ranks_of

    return load.failed_alike or len(ranks_of()) == 1


def begun_alike(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `_load_base_checkpoint`, which reads arguments and common state when it is called with `rank0`.

    Ranks have to agree on it at once: what Megatron does next is up to what was read, and communicates.
    """

    def _load_base_checkpoint(
        load_dir: Any, args: Any, rank0: bool = False, *rest: Any, **kwargs: Any
    ) -> Any:
        from megatron_datastates.pipeline.agreement import ranks_of

        load = state.current()
        if not rank0 or not load.in_training_loop or len(ranks_of()) == 1:
            return original(load_dir, args, rank0, *rest, **kwargs)
        load.directory = None
        try:
            result, error = original(load_dir, args, rank0, *rest, **kwargs), None
        except Exception as raised:
            result, error = None, raised
        if load.directory is not None and may_be_ours(load.directory):
            agreement = Agreement(load.directory, None)
            if error is not None:
                agreement.fail(error)
            agreement.settle()
        if error is not None:
            raise error
        return result

    return _load_base_checkpoint


def _advice(load: state.Load) -> str:
    """What the user can do; collective if the ranks look for an older checkpoint."""
    from megatron.training.global_vars import get_args

    from megatron_datastates.pipeline.agreement import Collectives
    from megatron_datastates.pipeline.fallback import find_older_checkpoint

    options, collectives = _options(), Collectives()
    most = collectives.share_from_first(options.fallback)
    if most == 0:
        return (
            "--datastates-fallback N tells which is the newest of the N older checkpoints that is whole; "
            "--ckpt-step loads it."
        )
    args, directory = get_args(), Path(load.directory or "")
    root = Path(args.load) if directory.parent == _non_persistent(args) else directory.parent
    found = find_older_checkpoint(directory, root, most, collectives, options)
    if found.iteration is None:
        looked = ", ".join(iteration_name(iteration) for iteration in found.damaged) or "there is none"
        return f"No older checkpoint in {root} verifies ({looked})."
    first = ""
    if getattr(args, "non_persistent_ckpt_type", None) is not None:
        first = ", without --non-persistent-ckpt-type, which loads what is newer than that step first"
    how = "verifies" if found.has_checksums else "is whole but for data, which has no checksums"
    return f"{iteration_name(found.iteration)} {how}: resume with --ckpt-step {found.iteration}{first}."


def _non_persistent(args: Any) -> Path | None:
    if getattr(args, "non_persistent_ckpt_type", None) != "global" or not args.load:
        return None
    return Path(args.non_persistent_global_ckpt_dir or Path(args.load, "non_persistent"))
