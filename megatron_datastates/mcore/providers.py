"""State providers that Megatron's saves and loads include besides Megatron's own state.

They come from `enable(providers=...)`, from strategies, and from installed packages: an entry point of the
group `megatron_datastates.providers` is a function without arguments that returns one or several providers.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from megatron_datastates.errors import ProviderError

if TYPE_CHECKING:
    from megatron_datastates.pipeline.load import Checkpoint
    from megatron_datastates.providers.base import StateProvider

logger = logging.getLogger(__name__)
GROUP = "megatron_datastates.providers"
Providers = Mapping[str, "StateProvider"] | Iterable["StateProvider"]
_registered: dict[str, StateProvider] = {}


def register(providers: Providers) -> None:
    """Includes providers in all later saves and loads of this process, instead of those of the same names.

    Raises:
        ProviderError: one has no name, or is no state provider.
    """
    from megatron_datastates.providers.collect import named

    _registered.update(named(providers))


def registered() -> dict[str, StateProvider]:
    """Returns the providers of installed packages and those that were registered, by name.

    Raises:
        ProviderError: a package's entry point failed, or returned something else.
    """
    return {**_of_packages(), **_registered}


@functools.cache
def _of_packages() -> dict[str, StateProvider]:
    from megatron_datastates.providers.base import StateProvider
    from megatron_datastates.providers.collect import named

    found: dict[str, StateProvider] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            made = entry.load()()
        except Exception as error:
            raise ProviderError(
                f"the state provider {entry.name!r} ({entry.value}) of an installed package cannot be made: "
                f"{type(error).__name__}: {error}"
            ) from error
        found.update(named([made] if isinstance(made, StateProvider) else made))
    return found


def restore_registered(checkpoint: Checkpoint) -> None:
    """Restores the registered providers that the checkpoint has state of; logs a warning for each other.

    Raises:
        ProviderError: the `restore` of one raised an exception.
    """
    providers = registered()
    if not providers:
        return
    from megatron_datastates.pipeline.restoring import PrefixReader, restore

    absent = {name for name in providers if PrefixReader(checkpoint, name).is_empty}
    for name in sorted(absent):
        logger.warning(
            "%s has no state of the provider %r, which stays as it is: the checkpoint was saved without it",
            checkpoint.directory,
            name,
        )
    restore(checkpoint, {name: provider for name, provider in providers.items() if name not in absent})
