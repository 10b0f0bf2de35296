"""Megatron's command line: `--ckpt-format datastates` and the `--datastates-*` options.

Twenty places of Megatron compare `args.ckpt_format` with "torch_dist", so that is what is stored there;
`args.ckpt_backend` says "datastates" beside it. Arguments are part of every checkpoint, of other formats too:
what was not given leaves no trace in them.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from megatron_datastates.config import Options, OptionSpec
from megatron_datastates.errors import OptionError

logger = logging.getLogger(__name__)
FORMAT = "datastates"
_DIRECTORIES = ("save", "load", "pretrained_checkpoint", "non_persistent_global_ckpt_dir")


class _FormatAction(argparse._StoreAction):
    """Stores what Megatron expects and remembers what was asked for."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        vars(namespace).pop("ckpt_backend", None)  # the last one given wins
        if values == FORMAT:
            namespace.ckpt_backend = FORMAT
        setattr(namespace, self.dest, "torch_dist" if values == FORMAT else values)


def wrap_add_checkpointing_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `_add_checkpointing_args`."""

    def _add_checkpointing_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original(parser)
        action = parser._option_string_actions.get("--ckpt-format")
        if action is None:  # of a release that we do not know: leave its parser alone
            logger.warning("megatron_datastates found no --ckpt-format among Megatron's arguments")
            return parser
        action.__class__ = _FormatAction
        action.choices = [*(action.choices or ()), FORMAT]
        action.help = (
            action.help or ""
        ) + " datastates: asynchronous, lazy, checksummed (megatron_datastates)."
        group = parser.add_argument_group("datastates", "used with --ckpt-format datastates")
        for name, spec in Options.specs().items():
            flag = "--datastates-" + name.replace("_", "-")
            group.add_argument(
                flag, type=_type(spec), metavar=spec.metavar, help=spec.help, default=argparse.SUPPRESS
            )
        return parser

    return _add_checkpointing_args


def _type(spec: OptionSpec) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return spec.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return parse


def is_selected(args: Any) -> bool:
    """Whether these arguments ask for our format."""
    return getattr(args, "ckpt_backend", None) == FORMAT


def adopt(args: Any) -> bool:
    """Whether these arguments ask for our format, also where our parser has not seen them (a YAML file).

    What Megatron expects is then put in its place.
    """
    if getattr(args, "ckpt_format", None) == FORMAT:
        args.ckpt_backend, args.ckpt_format = FORMAT, "torch_dist"
    return is_selected(args)


def options_of(args: Any) -> Options:
    """The options given, then the environment, then defaults. Raises OptionError."""
    given = {name: getattr(args, f"datastates_{name}", None) for name in Options.specs()}
    options = Options.from_environment({name: value for name, value in given.items() if value is not None})
    if getattr(args, "perform_rl_step", False):
        # Reinforcement learning moves weights between training and inference, behind no hook of ours.
        options = dataclasses.replace(options, lazy=False)
    return options


def is_converting(args: Any) -> bool:
    """Whether Megatron converts a checkpoint: that save stays its own, as it ends without finalizing any."""
    return getattr(args, "ckpt_convert_format", None) is not None


def refuse_object_stores(args: Any) -> None:
    """Raises OptionError: a directory that our saves concern is in an object store."""
    for name in _DIRECTORIES:
        path = getattr(args, name, None)
        if path is not None and str(path).startswith("msc://"):
            flag = "--" + name.replace("_", "-")
            raise OptionError(f"--ckpt-format datastates works with file systems only: {flag} is {path}")


def without_worker(original: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any) -> Any:
    """Validates as Megatron does, which drops --async-save where no worker process is asked for."""
    if not hasattr(args, "use_persistent_ckpt_worker"):
        return original(args, *rest, **kwargs)
    args.use_persistent_ckpt_worker = True
    try:
        return original(args, *rest, **kwargs)
    finally:
        args.use_persistent_ckpt_worker = False


def settle(args: Any) -> None:
    """Sets what our saves need of other arguments."""
    if getattr(args, "async_strategy", None) == "nvrx" and not _nvrx_is_usable():
        args.async_strategy = "mcore"  # only whose queue polls us
    if not getattr(args, "ckpt_assume_constant_structure", True):
        args.ckpt_assume_constant_structure = True
        if getattr(args, "rank", 0) == 0:
            logger.info("--ckpt-format datastates sets --ckpt-assume-constant-structure")


def _nvrx_is_usable() -> bool:
    """Whether nvidia-resiliency-ext is there, in a version that this Megatron works with."""
    from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy

    try:
        get_async_strategy("nvrx")
    except (ImportError, AssertionError):
        return False
    return True
