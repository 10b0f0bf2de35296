"""Megatron's command line: `--ckpt-format datastates` and the `--datastates-*` options.

Megatron compares `args.ckpt_format` with "torch_dist" in twenty places, so that value is stored there (with
Megatron-FSDP "fsdp_dtensor": fsdp.py), and `args.ckpt_backend` is "datastates". Arguments are part of
checkpoints in every format: options that were not given are not stored.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from megatron_datastates import stores
from megatron_datastates.config import ENVIRONMENT_PREFIX, Options, OptionSpec, advice_on
from megatron_datastates.errors import DataStatesError, OptionError, StorageError
from megatron_datastates.files import is_object, path_of
from megatron_datastates.format.directory import BACKEND, TRACKER_NAME, iteration_in_name
from megatron_datastates.pipeline.near.places import near_root
from megatron_datastates.pipeline.runs.runs import has_file, is_published, stored_backend

logger = logging.getLogger(__name__)
_DEVICE = Path("/dev/nvidiactl")  # where there is a GPU, and not only a stand-in for torch.cuda
_IN_STORES = ("save", "load", "pretrained_checkpoint")  # arguments that may name object stores
_PREFIX = "--datastates-"
_NEAR_FOLDER = "datastates-near"  # of the node's directory for temporary files
_has_set_structure = False  # whether `set_dependent_arguments` has set --ckpt-assume-constant-structure


class _FormatAction(argparse._StoreAction):
    """Stores the format that Megatron expects, and the requested one in `ckpt_backend`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        vars(namespace).pop("ckpt_backend", None)  # the last one given wins
        if values == BACKEND:
            namespace.ckpt_backend = BACKEND
        setattr(namespace, self.dest, "torch_dist" if values == BACKEND else values)


def wrap_add_checkpointing_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `_add_checkpointing_args`: adds our format and the `--datastates-*` options."""

    def _add_checkpointing_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original(parser)
        action = parser._option_string_actions.get("--ckpt-format")
        if action is None:  # an unknown release: leave its parser alone
            logger.warning(
                "Megatron's parser has no --ckpt-format: --ckpt-format datastates is not available"
            )
            return parser
        action.__class__ = _FormatAction
        action.choices = [*(action.choices or ()), BACKEND]
        action.help = (
            action.help or ""
        ) + " datastates: asynchronous, lazy, checksummed (megatron_datastates)."
        group = parser.add_argument_group("datastates", "used with --ckpt-format datastates")
        for name, spec in Options.specs().items():
            flag = _PREFIX + name.replace("_", "-")
            group.add_argument(
                flag, type=_type(spec), metavar=spec.metavar, help=spec.help, default=argparse.SUPPRESS
            )
        _explain_misspelt(parser)
        return parser

    return _add_checkpointing_args


def _explain_misspelt(parser: argparse.ArgumentParser) -> None:
    """Lets the parser's error name the option that a misspelt one of ours may mean."""
    refuse, known = parser.error, [name.replace("_", "-") for name in Options.specs()]

    def error(message: str) -> NoReturn:
        if message.startswith("unrecognized arguments:"):
            for flag in (word.split("=")[0] for word in message.split() if word.startswith(_PREFIX)):
                advice = advice_on(flag.removeprefix(_PREFIX), known, _PREFIX)
                message += f"\n{flag}: no such option; {advice}"
        refuse(message)

    parser.error = error  # type: ignore[method-assign]


def _type(spec: OptionSpec) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return spec.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return parse


def is_selected(args: Any) -> bool:
    """Returns whether these arguments select our format."""
    return getattr(args, "ckpt_backend", None) == BACKEND


def adopt(args: Any) -> bool:
    """Returns whether these arguments select our format, even if our parser has not seen them (YAML).

    If they do, stores the values that the parser would have stored.
    """
    if getattr(args, "ckpt_format", None) == BACKEND:
        args.ckpt_backend, args.ckpt_format = BACKEND, "torch_dist"
    if is_selected(args) and uses_fsdp(args) and not is_converting(args):
        args.ckpt_format = "fsdp_dtensor"
    return is_selected(args)


def uses_fsdp(args: Any) -> bool:
    """Returns whether these arguments are of a run with Megatron-FSDP."""
    return bool(getattr(args, "use_megatron_fsdp", False))


def options_of(args: Any) -> Options:
    """Returns the options: as given, else from the environment, else defaults. Raises OptionError."""
    options = _given(args)
    if getattr(args, "perform_rl_step", False):
        # Reinforcement learning moves weights between training and inference without a fence.
        options = dataclasses.replace(options, lazy=False)
    if not options.near and is_object(getattr(args, "save", None) or ""):
        options = dataclasses.replace(options, near=default_near())
    return options


def _given(args: Any) -> Options:
    given = {name: getattr(args, f"datastates_{name}", None) for name in Options.specs()}
    return Options.from_environment({name: value for name, value in given.items() if value is not None})


def default_near() -> str:
    """Returns the near tier for saves to an object store, where no other one is given.

    Makes it, as anybody can foresee its name: whoever else owned it could read weights, and put a newer
    checkpoint there, which would be resumed from.

    Raises:
        OptionError: it cannot be made, or others may write to it.
    """
    path = Path(tempfile.gettempdir(), f"{_NEAR_FOLDER}-{os.getuid()}")
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise OptionError(
            f"the near tier {path} cannot be used ({error.strerror}): name another one with --datastates-near"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise OptionError(
            f"the near tier {path} may not be this user's alone: expected a directory that user "
            f"{os.getuid()} owns and nobody else may write to, found {stat.filemode(found.st_mode)} of user "
            f"{found.st_uid}. Remove it, or name another one with --datastates-near"
        )
    return str(path)


def is_converting(args: Any) -> bool:
    """Returns whether Megatron converts a checkpoint: we leave that save to it, as it finalizes none."""
    return getattr(args, "ckpt_convert_format", None) is not None


def check_object_stores(args: Any) -> None:
    """Checks arguments that name object stores (`msc://PROFILE/PATH`), once Megatron has validated its own.

    Raises:
        OptionError: they need an option, are URLs of another kind, or the store cannot be used for what they
            name.
        StorageError: the store does not answer.
    """
    places = {name: _place(args, name) for name in _IN_STORES if getattr(args, name, None)}
    named = [name for name, place in places.items() if is_object(place)]
    if named and not msc_is_enabled():
        raise OptionError(
            f"{_flag(named[0])} {getattr(args, named[0])} is in an object store: give --enable-msc, too "
            "(before Megatron-Core 0.18: leave out --disable-msc), and install multi-storage-client with the "
            "extra of the store, such as multi-storage-client[boto3]"
        )
    place = getattr(args, "non_persistent_global_ckpt_dir", None)
    if getattr(args, "non_persistent_ckpt_type", None) == "global":
        place = place or getattr(args, "save", None)
    if is_object(place or ""):
        raise OptionError(
            f"non-persistent checkpoints are not saved to an object store ({place}): expected "
            "--non-persistent-global-ckpt-dir in a file system"
        )
    for name in named:
        _require_answer(name, places[name])
    if "save" in named and not _given(args).near:
        near = default_near()  # on every rank: each node has its own
        if getattr(args, "rank", 0) == 0:
            logger.info(
                "--save is in an object store, so checkpoints are written to %s of each node first "
                "(--datastates-near names another directory)",
                near,
            )


def _place(args: Any, name: str) -> Path:
    try:
        return path_of(getattr(args, name))
    except OptionError as error:
        raise OptionError(f"{_flag(name)} {error}") from None


def _require_answer(name: str, place: Path) -> None:
    """Makes one request on each rank: an error on one alone would let the others wait for it."""
    try:
        stores.require_answer(place)
    except OSError as error:
        raise StorageError(
            f"{_flag(name)} {place} cannot be listed: {error.strerror}. Correct the profile, its bucket or "
            "its credentials, or start again once the store answers"
        ) from error


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def msc_is_enabled() -> bool:
    """Returns whether Megatron itself opens files through the multi-storage client."""
    try:
        from megatron.core.msc_utils import MultiStorageClientFeature
    except ImportError:  # an older release
        return False
    return bool(MultiStorageClientFeature.is_enabled())


def validate_without_worker(original: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any) -> Any:
    """Calls Megatron's validation, which would drop --async-save if no worker process were requested."""
    if not hasattr(args, "use_persistent_ckpt_worker"):
        return original(args, *rest, **kwargs)
    args.use_persistent_ckpt_worker = True
    try:
        return original(args, *rest, **kwargs)
    finally:
        args.use_persistent_ckpt_worker = False


def set_dependent_arguments(args: Any) -> None:
    """Sets other arguments as our saves need them."""
    global _has_set_structure
    if getattr(args, "async_strategy", None) == "nvrx" and not _nvrx_is_usable():
        args.async_strategy = "mcore"  # we only need its queue
    if not getattr(args, "ckpt_assume_constant_structure", True):
        args.ckpt_assume_constant_structure = _has_set_structure = True
        if getattr(args, "rank", 0) == 0:
            logger.info("--ckpt-format datastates sets --ckpt-assume-constant-structure")


@contextlib.contextmanager
def structure_as_given(args: Any) -> Iterator[None]:
    """Wraps a save of Megatron's own: only the user may say that its structure is constant.

    Megatron's local checkpoints fail at a tensor that the first one did not have, such as a state of an
    optimizer whose first steps were skipped.
    """
    if not _has_set_structure:
        yield
        return
    args.ckpt_assume_constant_structure = False
    try:
        yield
    finally:
        args.ckpt_assume_constant_structure = True


def warn_of_deadline(args: Any, options: Options) -> None:
    """Logs a warning if a save may wait for longer than NCCL lets the other ranks wait for this one."""
    limits = [
        60 * (getattr(args, "distributed_timeout_minutes", None) or 0),
        getattr(args, "distributed_timeout_seconds_after_init", None) or 0,
    ]
    least = min((limit for limit in limits if limit), default=None)
    if least is not None and 2 * options.fence_deadline > least and getattr(args, "rank", 0) == 0:
        logger.warning(
            "--datastates-fence-deadline %g: a save may wait twice as long, at its start and at the next "
            "step, and process groups time out after %g s, which would end the job instead of the save: "
            "expected at most %g",
            options.fence_deadline,
            least,
            least / 2,
        )


def warn_of_shared_queue(args: Any) -> None:
    """Logs a warning on rank 0 if copies of asynchronous saves would take turns with the trainer's kernels.

    It is too late to change that: CUDA reads its environment when it starts.
    """
    is_one = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    is_shared = is_one and "CUDA_DEVICE_MAX_COPY_CONNECTIONS" not in os.environ
    is_asked = getattr(args, "async_save", False) and getattr(args, "rank", 0) == 0
    if is_shared and is_asked and _DEVICE.exists():
        logger.warning(
            "CUDA_DEVICE_MAX_CONNECTIONS=1: copies of a save share the kernels' queue, and the iteration "
            "after a save takes longer by their time. Set CUDA_DEVICE_MAX_COPY_CONNECTIONS=8 in the "
            "environment that starts Python: it gives copies queues of their own, and leaves kernels in order"
        )


def check_fsdp(args: Any) -> None:
    """Checks arguments of a run with Megatron-FSDP that saves in our format.

    Raises:
        OptionError: it asks for checkpoints that Megatron could not resume from, in any format.
    """
    if uses_fsdp(args) and getattr(args, "non_persistent_ckpt_type", None) == "global":
        raise OptionError(
            "--non-persistent-ckpt-type global: with --use-megatron-fsdp, Megatron cannot resume from such "
            "checkpoints. Leave it out, and give a smaller --save-interval"
        )


def check_near_options(args: Any, options: Options) -> None:
    """Checks options of a near tier in a run that saves, and may have none.

    Raises:
        OptionError: the near tier is --save, or in it; or Megatron would hash files that are not in --save
            yet; or there is no near tier, and another option is an argument. In the environment, which many
            jobs may share, the latter is a warning.
    """
    if options.near and getattr(args, "verify_integrity", False):
        raise OptionError(
            f"--verify-integrity: Megatron hashes the files in --save {args.save} as soon as a checkpoint is "
            "published, when they are still in the near tier only (--datastates-near): leave it out. Loads "
            "compare the checksums of all that they read, and `datastates verify` those of whole checkpoints"
        )
    if options.near and not is_object(args.save):
        _require_apart(args.save, options.near)
    given = {
        "near_replicas": options.near_replicas > 0,
        "drain_every": options.drain_every != 1,
        "drain_limit": options.drain_limit > 0,
    }
    for name in (name for name, is_given in given.items() if is_given and not options.near):
        flag = _flag("datastates_" + name)
        if getattr(args, "datastates_" + name, None) is not None:
            raise OptionError(f"{flag} needs --datastates-near DIR")
        if getattr(args, "rank", 0) == 0:
            variable = ENVIRONMENT_PREFIX + name.upper()
            logger.warning("%s needs --datastates-near DIR: it is ignored", variable)


def _require_apart(save: str, option: str) -> None:
    """Raises OptionError if the near tier is --save, or in it, among the checkpoints of the run."""
    try:
        near = Path(os.path.realpath(near_root(option)))
    except OptionError:
        return  # it is none on this node: the first load or save says so, on all ranks
    run = Path(os.path.realpath(save))
    if near.is_relative_to(run) and "$" not in str(near):  # a variable without a value is an error of its own
        raise OptionError(
            f"--datastates-near {near} is in --save {run}: expected a directory outside of it, on faster "
            "storage"
        )


def warn_of_report_file(args: Any, options: Options) -> None:
    """Logs a warning on rank 0 if reports cannot be written as things are: saves go on without."""
    folder = Path(options.report_file).absolute().parent
    if not options.report_file or getattr(args, "rank", 0) != 0:
        return
    if Path(options.report_file).is_dir():
        reason = "it is a directory"
    elif not os.access(folder, os.W_OK | os.X_OK):
        reason = f"{folder} {'is not writable' if folder.exists() else 'does not exist'}"
    else:
        return
    logger.warning(
        "--datastates-report-file %s: no report can be written there now, as %s", options.report_file, reason
    )


def warn_of_checkpoint_as_run(args: Any) -> None:
    """Logs a warning on rank 0 if --load is a checkpoint: Megatron finds no tracker in it, and goes on."""
    given = getattr(args, "load", None)
    if not given or getattr(args, "ckpt_step", None) or getattr(args, "rank", 0) != 0:
        return
    path = path_of(given)
    with contextlib.suppress(OSError, DataStatesError):  # a load says more
        if not (is_published(path) or stored_backend(path)) or has_file(path / TRACKER_NAME):
            return
        iteration = iteration_in_name(path.name)
        step = f"--load {path.parent} --ckpt-step {iteration}" if iteration else "the directory of its run"
        logger.warning(
            "--load %s is a checkpoint, and has no tracker: Megatron starts from random weights. Pass %s",
            given,
            step,
        )


def _nvrx_is_usable() -> bool:
    """Returns whether nvidia-resiliency-ext is installed, in a version that this Megatron supports."""
    from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy

    try:
        get_async_strategy("nvrx")
    except (ImportError, AssertionError):
        return False
    return True
