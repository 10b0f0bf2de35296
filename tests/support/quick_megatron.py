"""Spares ranks what Megatron would do anew in each: a part of a second, and seconds if it saves torch_dist.

Called in the process that forks ranks, after the stand-ins. Training and checkpoints are as without it.
"""

import argparse
import contextlib
import functools
import inspect
import sys


def install() -> None:
    """Installs this in a process that has imported what of Megatron its ranks use."""
    if "megatron.training" in sys.modules:
        with contextlib.suppress(ImportError):  # not in every release
            _read_descriptions_once()
    with contextlib.suppress(ImportError, AttributeError):
        _fork_the_queue()


def _read_descriptions_once() -> None:
    """Parses here the sources in which Megatron's options are described, for --help."""
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.arguments import add_megatron_arguments

    factory = ArgumentGroupFactory.__new__(ArgumentGroupFactory)
    read = functools.cache(factory._get_field_docstrings)
    ArgumentGroupFactory._get_field_docstrings = lambda self, source: read(source)
    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def _fork_the_queue() -> None:
    """Lets a rank fork the process of torch_dist's queue of results: a new one would import all of torch."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    make_queue = inspect.unwrap(filesystem_async.get_write_results_queue)
    if make_queue.__defaults__ == ("spawn",):
        make_queue.__defaults__ = ("fork",)
