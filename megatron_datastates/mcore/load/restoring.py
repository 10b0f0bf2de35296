"""Restores the state providers of a program from a checkpoint that Megatron has loaded."""

from __future__ import annotations

import logging

from megatron_datastates.errors import MissingKeyError
from megatron_datastates.mcore.dataloader import LOOP
from megatron_datastates.mcore.load import state
from megatron_datastates.mcore.providers import DATA_LOADER, registered
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.loading.restoring import PrefixReader, restore

logger = logging.getLogger(__name__)


def restore_registered(checkpoint: Checkpoint) -> None:
    """Restores the providers that the checkpoint has state of; logs a warning for each other.

    Raises:
        ProviderError: the `restore` of one raised an exception.
        MissingKeyError: one has no state in an older checkpoint that is loaded in place of a damaged one.
    """
    wanted = registered(state.current().options().providers)
    providers = {DATA_LOADER: LOOP, **wanted}
    absent = {name for name in providers if PrefixReader(checkpoint, name).is_empty}
    if state.current().is_fallback and absent & wanted.keys():
        raise MissingKeyError(
            f"{checkpoint.directory} has no state of the provider {min(absent & wanted.keys())!r}, which the "
            "damaged checkpoint may have restored already: start again, and choose it with --ckpt-step"
        )
    for name in sorted(absent & wanted.keys()):
        logger.warning(
            "%s has no state of the provider %r, which stays as it is: the checkpoint was saved without it",
            checkpoint.directory,
            name,
        )
    if DATA_LOADER not in absent and state.current().in_training_loop:
        LOOP.drop_replaced()
    restore(checkpoint, {name: provider for name, provider in providers.items() if name not in absent})
