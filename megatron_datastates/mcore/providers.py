"""State providers that Megatron's saves and loads include besides Megatron's own state.

They come from `enable(providers=...)`, from strategies, from the option `providers`, and from installed
packages: an entry point of the group `megatron_datastates.providers`, like a function that the option names,
is called without arguments and returns one or several providers. It is called when Megatron has set itself
up: at the first load, at the beginning of Megatron's own training loop, or at the first save.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from megatron_datastates.errors import OptionError, ProviderError
from megatron_datastates.option_text import named_functions

if TYPE_CHECKING:
    from megatron_datastates.providers.base import StateProvider

GROUP = "megatron_datastates.providers"
DATA_LOADER = "dataloader"  # name of the provider of the training loop's data loader (dataloader.py)
Providers = Mapping[str, "StateProvider"] | Iterable["StateProvider"]
_registered: dict[str, StateProvider] = {}
_of_loop: dict[str, StateProvider] = {}  # the loop's data loader, under its name


def register(providers: Providers) -> None:
    """Includes providers in all later saves and loads of this process, instead of those of the same names.

    Raises:
        ProviderError: one has no name, or is no state provider.
    """
    from megatron_datastates.providers.collect import named

    _registered.update(named(providers))


def register_loader(provider: StateProvider) -> None:
    """Includes the training loop's data loader in all later saves and loads of this process."""
    _of_loop[DATA_LOADER] = provider


def registered(functions: str = "", *, expects_loader: bool = False) -> dict[str, StateProvider]:
    """Returns the providers of packages, of the option `providers`, and those registered, by name.

    Args:
        functions: the option's value.
        expects_loader: the training loop's data loader will be included in saves; nothing may have its name.

    Raises:
        ProviderError: a function of theirs failed, or returned something else; or two have one name, and the
            second is not one that was registered.
    """
    found = dict(_of_packages())
    _add(found, _of_functions(functions), "of --datastates-providers")
    found.update(_registered)
    loader = "for the training loop's data loader"
    if expects_loader:
        _require_free(found, [DATA_LOADER], loader)
    _add(found, _of_loop, loader)
    return found


def _add(found: dict[str, StateProvider], others: Mapping[str, StateProvider], what: str) -> None:
    """Adds providers. Raises ProviderError if one has the name of another, which would not be saved."""
    _require_free(found, others, what)
    found.update(others)


def _require_free(found: Mapping[str, StateProvider], names: Iterable[str], what: str) -> None:
    for name in names:
        if name in found:
            raise ProviderError(
                f"two state providers are named {name!r}, one of them {what}: rename one, or leave it out"
            )


def find_functions(functions: str) -> dict[str, Callable[[], Any]]:
    """Imports the functions that the option names; returns them by `package.module:function`.

    Raises:
        OptionError: one of them cannot be imported.
    """
    return {name: _find(name) for name in named_functions(functions)}


def _find(name: str) -> Callable[[], Any]:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise OptionError(
            f"--datastates-providers {name} cannot be imported: {type(error).__name__}: {error}; expected "
            "package.module:function, on Python's path"
        ) from error
    return found  # type: ignore[no-any-return]


@functools.cache
def _of_functions(functions: str) -> dict[str, StateProvider]:
    found: dict[str, StateProvider] = {}
    for name, function in find_functions(functions).items():
        what = f"of --datastates-providers {name}"
        _add(found, _made_by(function, what), what)
    return found


@functools.cache
def _of_packages() -> dict[str, StateProvider]:
    found: dict[str, StateProvider] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        what = f"{entry.name!r} ({entry.value}) of an installed package"
        _add(found, _made_by(lambda entry=entry: entry.load()(), what), what)  # type: ignore[misc]
    return found


def _made_by(function: Callable[[], Any], what: str) -> dict[str, StateProvider]:
    from megatron_datastates.providers.base import StateProvider
    from megatron_datastates.providers.collect import named

    try:
        made = function()
    except Exception as error:
        raise ProviderError(
            f"the state provider {what} cannot be made: {type(error).__name__}: {error}"
        ) from error
    return named([made] if isinstance(made, StateProvider) else made)
