"""Loads in Megatron's training loop: they fail on all ranks, and the error says what to do next.

They load no checkpoint other than the requested one, unless that is damaged and the option `on_damage` asks
for an older one.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_datastates.config import Options
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.errors import DataStatesError, StorageError
from megatron_datastates.files import any_path, is_object, path_of
from megatron_datastates.format.directory import (
    RELEASE_NAME,
    SHARDING_KEY,
    TORCH_DIST,
    TRACKER_NAME,
)
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.values import is_dcp_file_name
from megatron_datastates.mcore.hooks.attach import replaced
from megatron_datastates.mcore.hooks.calls import parameters_of
from megatron_datastates.mcore.load import state
from megatron_datastates.mcore.load.agreement import Agreement, is_caused_by_damage, is_of_files
from megatron_datastates.mcore.load.opening import forget, is_ours, open_checkpoint
from megatron_datastates.mcore.training.absent import problem_of_chosen, require_there
from megatron_datastates.mcore.training.arguments import is_selected, options_of, run_arguments, uses_fsdp
from megatron_datastates.mcore.training.damaged import damage_error
from megatron_datastates.mcore.training.origin import note_load
from megatron_datastates.pipeline.publishing.collectives import Collectives, ranks_of
from megatron_datastates.pipeline.runs.runs import has_file, may_be_ours

logger = logging.getLogger(__name__)
_REFUSAL = "not supported for DistributedOptimizer with sharding type dp_reshardable"
_WITHOUT_MAP = (
    "megatron_datastates: {} stores the optimizer state in buckets and has no optimizer map, which would say "
    "where each parameter lies in them. Resume with the TP and PP sizes that saved it, save once with "
    "--ckpt-format datastates, and resume from that with any; or load without it (--no-load-optim)."
)
_LOCAL = (
    "megatron_datastates: a local checkpoint loads only with the parallel sizes that saved it. Resume with "
    "those; or leave out --non-persistent-ckpt-type, to load the checkpoint that the tracker in --load names."
)
_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")  # the second in older releases
_REFUSED = ("tensor_model_parallel_size", "pipeline_model_parallel_size")  # sizes that Megatron compares


def wrap_load_checkpoint(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps `load_checkpoint`, in any format: each may overwrite memory that a save is still reading."""
    from megatron.training.checkpointing import print_rank_0

    from megatron_datastates.mcore.errors import MegatronLoadFailedError

    FENCE.wait("a load")
    purpose = parameters_of(original).of_call(args, kwargs).get("load_arg", "load")
    load = functools.partial(_load, functools.partial(original, *args, **kwargs), purpose)
    _expect_loader(purpose)
    _agree()
    _recover_newest(purpose)
    _require_chosen(purpose)
    try:
        return load()
    except MegatronLoadFailedError as error:
        if error.older is None:
            raise
        older = error.older
        print_rank_0(f"  datastates: {error} It is loaded now (--datastates-on-damage fallback)")
    gc.collect()  # what the failed load has made: its frames are in a cycle with its exception
    _expect_loader(purpose)
    with replaced(run_arguments(), "ckpt_step", older), state.opened(is_fallback=True):  # as by --ckpt-step
        return load()


def _load(original: Callable[[], Any], purpose: str) -> Any:
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    from megatron_datastates.mcore.errors import MegatronLoadFailedError, ours_within

    facts: dict[str, Any] = {"options": _options, "restores_providers": lambda: _has_resumed(purpose)}
    with state.opened(**facts, in_training_loop=True, failed_on_all_ranks=False, directory=None) as load:
        try:
            with _shards_at_once():
                result = original()
            if _has_resumed(purpose):
                _restore_after_dcp(load)
                manifest = _manifest_of(load)
                note_load(load.directory, result, manifest)
                if manifest is not None:
                    from megatron_datastates.mcore.training.lagging import note_newer  # our native module

                    note_newer()
            _require_loader()
            return result
        except CheckpointingException as error:
            if not is_caused_by_damage(error) or not _all_ranks_are_here(load):
                raise
            raise damage_error(error, load, _options(), is_resume=_is_resume(purpose)) from error.__cause__
        except CheckpointException as error:  # of a load that DCP makes (Megatron-FSDP), on all ranks
            cause = ours_within(error)
            if cause is None:
                raise
            if not is_of_files(cause):
                raise MegatronLoadFailedError(str(cause)) from cause
            raise damage_error(cause, load, _options(), is_resume=_is_resume(purpose)) from cause
        except RuntimeError as error:  # Megatron's own refusal, the same on all ranks
            if _REFUSAL not in str(error):
                raise
            more = _LOCAL if load.directory is None else _WITHOUT_MAP.format(load.directory)
            raise RuntimeError(f"{error} {more}") from error
        finally:
            forget()  # or the checkpoint's index would stay in memory while the run trains


def _shards_at_once() -> contextlib.AbstractContextManager[None]:
    if not (is_selected(run_arguments()) and uses_fsdp(run_arguments())):
        return contextlib.nullcontext()
    from megatron_datastates.mcore.training.fsdp_shards import gathered_at_once

    return gathered_at_once()


def _restore_after_dcp(load: state.Load) -> None:
    """Restores state providers after a load that DCP has made, as with Megatron-FSDP. Collective.

    Raises:
        ProviderError: the `restore` of one raised an exception, on some rank.
    """
    if load.directory is None or not uses_fsdp(run_arguments()) or not is_ours(load.directory):
        return
    from megatron_datastates.mcore.errors import load_errors
    from megatron_datastates.mcore.load.restoring import restore_registered

    is_alone = len(ranks_of()) == 1
    sharing = contextlib.nullcontext() if is_alone else Agreement(load.directory, None).sharing_failures()
    with sharing, load_errors():
        restore_registered(open_checkpoint(load.directory))


def _expect_loader(purpose: str) -> None:
    """Lets the loop attach a data loader after this load, also if it did so before it was restarted.

    Not in loads that a running `train` makes, as it does to fetch a reference model.
    """
    from megatron_datastates.mcore.dataloader import LOOP
    from megatron_datastates.mcore.training.loop import is_training

    if purpose == "load" and not is_training():
        LOOP.expect_loader(is_resume=_is_resume(purpose))


def _require_loader() -> None:
    """Lets Megatron's `train` start only with the data loader at the position that was loaded, if one was.

    Also in runs that save in another format, whose `train` is Megatron's own otherwise.
    """
    from megatron_datastates.mcore.dataloader import LOOP
    from megatron_datastates.mcore.training.loop import attach_to_train

    if LOOP.awaits_loader:
        attach_to_train()


def _manifest_of(load: state.Load) -> Manifest | None:
    """Returns the manifest of the checkpoint that was loaded, if it was one of ours."""
    if load.directory is None:
        return None
    found = load.checkpoints.get(any_path(load.directory).absolute())
    return None if found is None else found[1].manifest


def _agree() -> None:
    """Compares releases and options of all ranks, if none has before. Collective.

    Raises:
        RanksDifferError: they differ. On all ranks.
    """
    if is_selected(run_arguments()):
        from megatron_datastates.pipeline.saver_pool import agree

        agree(_options())


def _recover_newest(purpose: str) -> None:
    """Brings a newer checkpoint from the near tiers to the directory of a load that resumes a run.

    Collective. For a load of a chosen iteration (--ckpt-step), that one, if it is not there.

    Raises:
        StorageError: `recover_newest` does; or the run was to have the arguments of a checkpoint, of which
            Megatron has found none.
    """
    args = run_arguments()
    if not is_selected(args) or not _is_resume(purpose):
        return
    if not getattr(args, "load", None) or not dist.is_initialized():
        return
    options = _options()
    if options.near:  # on all ranks, or they would not have agreed
        from megatron_datastates.pipeline.near.recovery import recover_newest

        run = path_of(args.load)
        is_new = getattr(args, "use_checkpoint_args", False) and _has_no_tracker(run)
        found = recover_newest(run, options, logger.warning, wanted=_wanted(args))
        if is_new and found is not None:
            raise StorageError(
                f"--use-checkpoint-args: {run} had no checkpoint when Megatron read the arguments, so this "
                f"run has its own. Iteration {found} was copied there from near tiers since: start again"
            )


def _has_no_tracker(run: Path) -> bool:
    """Returns whether rank 0 sees no tracker. Collective."""
    collectives, is_absent = Collectives(), False
    if collectives.rank == 0:
        with contextlib.suppress(OSError):  # the recovery says what is wrong
            is_absent = not has_file(run / TRACKER_NAME)
    return bool(collectives.share_from_first(int(is_absent)))


def _wanted(args: Any) -> int | None:
    """Returns the iteration that --ckpt-step names; 0 names none, as to Megatron."""
    return getattr(args, "ckpt_step", None) or None


def _require_chosen(purpose: str) -> None:
    """Checks that the iteration of --ckpt-step is there, in any format. Collective if one is chosen.

    Only rank 0 looks: ranks may see different files, as where a file system caches that a name is absent.

    Raises:
        NotACheckpointError: it is not; Megatron would name a file of it.
        StorageError: rank 0 cannot look.
    """
    args = run_arguments()
    wanted = _wanted(args)
    if wanted is None or not args.load or not is_selected(args) or not _is_resume(purpose):
        return
    run = path_of(args.load)
    if getattr(args, "non_persistent_ckpt_type", None) is not None or is_object(run):
        return  # a non-persistent checkpoint of that iteration or a later one is loaded in its place
    collectives = Collectives()
    problem = problem_of_chosen(run, wanted) if collectives.rank == 0 else None
    if (shared := collectives.gather_values(problem)[0]) is not None:
        raise shared


def _is_resume(purpose: str) -> bool:
    """Returns whether this load continues a run: not one of weights alone, nor of another model's."""
    # Looked up late: load_checkpoint itself sets `finetune` for a pretrained checkpoint.
    return purpose == "load" and not getattr(run_arguments(), "finetune", False)


def _has_resumed(purpose: str) -> bool:
    """Returns whether an open load has continued a run, not taken weights from a `release` that it found."""
    directory = state.current().directory
    return _is_resume(purpose) and (directory is None or any_path(directory).name != RELEASE_NAME)


def _options() -> Options:
    return options_of(run_arguments())


def _all_ranks_are_here(load: state.Load) -> bool:
    """Returns whether all ranks are handling this failure, so that they may communicate."""
    return load.failed_on_all_ranks or len(ranks_of()) == 1


def wrap_load_base_checkpoint(
    original: Callable[..., Any], load_dir: Any, args: Any, rank0: bool = False, *rest: Any, **kwargs: Any
) -> Any:
    """Wraps `_load_base_checkpoint`, which with `rank0` reads arguments and common state.

    Ranks must agree on the outcome at once: Megatron's next collective calls depend on what was read.
    """
    load = state.current()
    if not rank0 or not load.in_training_loop or len(ranks_of()) == 1:
        return original(load_dir, args, rank0, *rest, **kwargs)
    load.directory = None
    try:
        result, error = original(load_dir, args, rank0, *rest, **kwargs), None
    except Exception as raised:
        result, error = None, raised
    # A rank that cannot look into the directory does not see whose it is: the arguments say more.
    if load.directory is not None and (is_selected(args) or may_be_ours(load.directory)):
        agreement = Agreement(load.directory, None)
        if error is not None:
            agreement.fail(error)
        agreement.settle()
    if error is not None:
        raise error
    return result


def wrap_get_checkpoint_format(
    original: Callable[..., Any], checkpoint_name: str, args: Any, *rest: Any, **kwargs: Any
) -> Any:
    """Wraps `_get_checkpoint_format`: a directory of ours is of torch_dist's kind to Megatron.

    One that DCP saved is of DCP's: Megatron would look for a common state, which only its own saves have. The
    original is not asked about ours: on each rank it lists the directory, which has a file of each rank.
    """
    state.current().directory = checkpoint_name  # what fails here, ranks are to agree on
    if not is_ours(checkpoint_name):
        try:
            return original(checkpoint_name, args, *rest, **kwargs)
        except (FileNotFoundError, NotImplementedError):
            if may_be_ours(checkpoint_name):
                open_checkpoint(checkpoint_name)  # raises an error that says what is wrong
            elif is_selected(args):
                require_there(path_of(checkpoint_name), _wanted(args))
            raise
    if not _is_of_dcp(checkpoint_name):
        return TORCH_DIST
    return "fsdp_dtensor" if getattr(args, "use_megatron_fsdp", False) else "torch_dcp"


def _is_of_dcp(directory: str) -> bool:
    try:
        others = open_checkpoint(directory).manifest.others
    except (DataStatesError, OSError):
        return False  # the load fails, where ranks agree on errors
    return any(is_dcp_file_name(other.name) for other in others)


def wrap_load_content_metadata(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps `load_content_metadata`, from which `load_checkpoint` learns how optimizer state is stored.

    It refuses buckets of another TP or PP size, and knows no state of an optimizer that was not distributed.
    For a checkpoint of ours that has what another layout needs, the answer is a sharding type that it
    accepts, with a mark by which the optimizer asks for its own buckets (optimizer_request.py).
    """
    metadata, load = original(*args, **kwargs), state.current()
    if load.directory is None or not is_ours(load.directory):  # None outside of load_checkpoint
        return metadata
    from megatron_datastates.mcore.load.optimizer_request import BY_OWN_BUCKETS

    stored = kwargs.get("preloaded_state_dict") or {}
    if not _asks_for_own_buckets(metadata, stored.get("args"), run_arguments(), load.directory):
        return metadata
    return {**(metadata or {}), SHARDING_KEY: "fully_reshardable", BY_OWN_BUCKETS: True}


def _asks_for_own_buckets(metadata: Any, stored: Any, own: Any, directory: str) -> bool:
    """Returns whether the optimizer asks for its own buckets, though Megatron would not allow it."""
    from megatron_datastates.pipeline.loading.optimizer import has_optimizer_maps

    if not getattr(own, "use_distributed_optimizer", False):
        return False
    kind = (metadata or {}).get(SHARDING_KEY)
    if kind is None and metadata is not None:
        return not getattr(stored, "use_distributed_optimizer", True)
    if _pattern(stored) or not _pattern(own):
        same = all(getattr(stored, name, 1) == getattr(own, name, 1) for name in _REFUSED)
        is_asked = not same and bool(_pattern(stored)) == bool(_pattern(own))
    else:
        is_asked = _has_layers_of_a_gpt(_pattern(own))
    # Else Megatron loads it, or refuses it by what names the cause.
    return kind == "dp_reshardable" and is_asked and has_optimizer_maps(open_checkpoint(directory))


def _pattern(args: Any) -> str:
    """Returns the layers of a hybrid model; "" for a GPT."""
    return next((found for name in _PATTERNS if (found := getattr(args, name, None))), "")


def _has_layers_of_a_gpt(pattern: str) -> bool:
    """Returns whether Megatron can load all of a hybrid model from a GPT's checkpoint.

    Not if it has layers that a GPT has not: for those, buckets have no state in the checkpoint.
    """
    try:
        from megatron.core.dist_checkpointing.gpt_checkpoint_interop import gpt_compatible_layer_maps
    except ImportError:  # a release that cannot
        return False
    try:
        return not gpt_compatible_layer_maps(pattern).fresh_init
    except ValueError:  # Megatron says why
        return False
