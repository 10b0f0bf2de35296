"""Megatron's command line: `--ckpt-format datastates` and the `--datastates-*` options.

Megatron compares `args.ckpt_format` with "torch_dist" in twenty places, so that value is stored there, and
`args.ckpt_backend` is "datastates". Arguments are part of checkpoints in every format: options that were not
given are not stored.
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
    """Stores the format that Megatron expects, and the requested one in `ckpt_backend`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        vars(namespace).pop("ckpt_backend", None)  # the last one given wins
        if values == FORMAT:
            namespace.ckpt_backend = FORMAT
        setattr(namespace, self.dest, "torch_dist" if values == FORMAT else values)


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
    """Returns whether these arguments select our format."""
    return getattr(args, "ckpt_backend", None) == FORMAT


def adopt(args: Any) -> bool:
    """Returns whether these arguments select our format, even if our parser has not seen them (YAML).

    If they do, stores the values that the parser would have stored.
    """
    if getattr(args, "ckpt_format", None) == FORMAT:
        args.ckpt_backend, args.ckpt_format = FORMAT, "torch_dist"
    return is_selected(args)


def options_of(args: Any) -> Options:
    """Returns the options: as given, else from the environment, else defaults. Raises OptionError."""
    given = {name: getattr(args, f"datastates_{name}", None) for name in Options.specs()}
    options = Options.from_environment({name: value for name, value in given.items() if value is not None})
    if getattr(args, "perform_rl_step", False):
        # Reinforcement learning moves weights between training and inference without a fence.
        options = dataclasses.replace(options, lazy=False)
    return options


def is_converting(args: Any) -> bool:
    """Returns whether Megatron converts a checkpoint: we leave that save to it, as it finalizes none."""
    return getattr(args, "ckpt_convert_format", None) is not None


def refuse_object_stores(args: Any) -> None:
    """Raises OptionError if a directory of a save or load is in an object store."""
    for name in _DIRECTORIES:
        path = getattr(args, name, None)
        if path is not None and str(path).startswith("msc://"):
            flag = "--" + name.replace("_", "-")
            raise OptionError(f"--ckpt-format datastates needs a file system path, found {flag} {path}")


def validate_without_worker(original: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any) -> Any:
    """Calls Megatron's validation, which would drop --async-save if no worker process were requested."""
    if not hasattr(args, "use_persistent_ckpt_worker"):
        return original(args, *rest, **kwargs)
    args.use_persistent_ckpt_worker = True
    try:
        return original(args, *rest, **kwargs)
    finally:
        args.use_persistent_ckpt_worker = False


def settle(args: Any) -> None:
    """Sets other arguments as our saves need them."""
    if getattr(args, "async_strategy", None) == "nvrx" and not _nvrx_is_usable():
        args.async_strategy = "mcore"  # we only need its queue
    if not getattr(args, "ckpt_assume_constant_structure", True):
        args.ckpt_assume_constant_structure = True
        if getattr(args, "rank", 0) == 0:
            logger.info("--ckpt-format datastates sets --ckpt-assume-constant-structure")


def _nvrx_is_usable() -> bool:
    """Returns whether nvidia-resiliency-ext is installed, in a version that this Megatron supports."""
    from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy

    try:
        get_async_strategy("nvrx")
    except (ImportError, AssertionError):
        return False
    return True
