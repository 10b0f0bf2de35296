"""Megatron's command line: `--ckpt-format datastates` and the `--datastates-*` options.

Megatron compares `args.ckpt_format` with "torch_dist" in twenty places, so that value is stored there (with
Megatron-FSDP "fsdp_dtensor": fsdp.py), and `args.ckpt_backend` is "datastates". Arguments are part of
checkpoints in every format: options that were not given are not stored.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from megatron_datastates.config import ENVIRONMENT_PREFIX, Options, OptionSpec, advice_on
from megatron_datastates.errors import OptionError
from megatron_datastates.files import is_object
from megatron_datastates.format.directory import BACKEND
from megatron_datastates.mcore.hooks import versions
from megatron_datastates.mcore.hooks.attach import replaced

logger = logging.getLogger(__name__)
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


def wrap_add_checkpointing_args(
    original: Callable[..., Any], parser: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    """Wraps `_add_checkpointing_args`: adds our format and the `--datastates-*` options."""
    parser = original(parser)
    action = parser._option_string_actions.get("--ckpt-format")
    if action is None:  # an unknown release: leave its parser alone
        logger.warning("Megatron's parser has no --ckpt-format: --ckpt-format datastates is not available")
        return parser
    action.__class__ = _FormatAction
    action.choices = [*(action.choices or ()), BACKEND]
    action.help = (action.help or "") + " datastates: asynchronous, lazy, checksummed (megatron_datastates)."
    group = parser.add_argument_group("datastates", "used with --ckpt-format datastates")
    for name, spec in Options.specs().items():
        flag = _PREFIX + name.replace("_", "-")
        group.add_argument(
            flag, type=_type(spec), metavar=spec.metavar, help=spec.help, default=argparse.SUPPRESS
        )
    _explain_misspelt(parser)
    return parser


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


def run_arguments() -> Any:
    """Returns the arguments of this run, as Megatron's loop has them."""
    from megatron.training.checkpointing import get_args

    return get_args()


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
    """Returns the options of saves and loads: the given ones, as this run needs them. Raises OptionError."""
    options = given_options(args)
    if getattr(args, "perform_rl_step", False):
        # Reinforcement learning moves weights between training and inference without a fence.
        options = dataclasses.replace(options, lazy=False)
    version = versions.installed_version()
    if options.lazy and not versions.is_tested(version) and not _is_lazy_given(args):
        options = dataclasses.replace(options, lazy=False)
        if getattr(args, "rank", 0) == 0:
            _warn_of_untested(version)
    if not options.near and is_object(getattr(args, "save", None) or ""):
        options = dataclasses.replace(options, near=default_near())
    return options


def _is_lazy_given(args: Any) -> bool:
    return f"{ENVIRONMENT_PREFIX}LAZY" in os.environ or getattr(args, "datastates_lazy", None) is not None


@functools.cache
def _warn_of_untested(version: str) -> None:
    logger.warning(
        "megatron_datastates has not been tested with Megatron-Core %s, which may change parameters or "
        "optimizer state where no fence is: everything is copied before save_checkpoint returns. "
        "--datastates-lazy on copies during the next forward and backward pass all the same",
        version,
    )


def given_options(args: Any) -> Options:
    """Returns the options as given, else from the environment, else defaults. Raises OptionError."""
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


def msc_is_enabled() -> bool:
    """Returns whether Megatron itself opens files through the multi-storage client."""
    from megatron.core.msc_utils import MultiStorageClientFeature

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


def structure_as_given(args: Any) -> contextlib.AbstractContextManager[None]:
    """Wraps a save of Megatron's own: only the user may say that its structure is constant.

    Megatron's local checkpoints fail at a tensor that the first one did not have, such as a state of an
    optimizer whose first steps were skipped.
    """
    if not _has_set_structure:
        return contextlib.nullcontext()
    return replaced(args, "ckpt_assume_constant_structure", False)


def _nvrx_is_usable() -> bool:
    """Returns whether nvidia-resiliency-ext is installed, in a version that this Megatron supports."""
    from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy

    try:
        get_async_strategy("nvrx")
    except (ImportError, AssertionError):
        return False
    return True
