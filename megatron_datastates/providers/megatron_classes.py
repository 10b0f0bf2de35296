"""Classes of Megatron's in stored objects: a fixed list, and the one import that makes them loadable.

Megatron-Core adds most of these classes to torch's safe globals when it is imported
(megatron/core/safe_globals.py). A program without Megatron meets them in its checkpoints, too. No name from
a checkpoint is imported: the import is always that of `megatron.core`.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

from megatron_datastates.errors import UntrustedClassError

logger = logging.getLogger(__name__)
_PACKAGE = "megatron.core"
# Named tuples, which the rerun state machine stores when a step is to be run again after a restart.
_UNREGISTERED = ("megatron.core.rerun_state_machine.Call", "megatron.core.rerun_state_machine.Caller")
MEGATRON_CLASSES = frozenset(
    {
        "megatron.core.enums.ModelType",
        "megatron.core.optimizer.optimizer_config.OptimizerConfig",
        *_UNREGISTERED,
        "megatron.core.rerun_state_machine.RerunDiagnostic",
        "megatron.core.rerun_state_machine.RerunMode",
        "megatron.core.rerun_state_machine.RerunState",
        "megatron.core.transformer.enums.AttnBackend",
        "megatron.core.transformer.enums.CudaGraphModule",
        "megatron.core.transformer.enums.CudaGraphScope",
        "megatron.core.transformer.enums.InferenceCudaGraphScope",
        "signal.Signals",
        "torch._C.Generator",
    }
)


class MegatronClassError(UntrustedClassError):
    """An object names a class of MEGATRON_CLASSES, and Megatron-Core cannot be imported."""


def unregistered_classes() -> dict[str, Any]:
    """Returns the classes that Megatron-Core does not add there, by name; none before it is imported."""
    found = {}
    for name in _UNREGISTERED:
        module, _, own = name.rpartition(".")
        kind = getattr(sys.modules.get(module), own, None)
        if isinstance(kind, type):
            found[name] = kind
    return found


def import_megatron(name: str) -> bool:
    """Imports Megatron-Core if `name` is one of its classes; returns whether it is.

    Waits for another thread that is importing it.

    Raises:
        MegatronClassError: it cannot be imported.
    """
    if name not in MEGATRON_CLASSES:
        return False
    if _PACKAGE not in sys.modules:
        logger.info("importing %s, as a stored object names its class %s", _PACKAGE, name)
    try:
        importlib.import_module(_PACKAGE)
    except Exception as error:  # of whatever it imports
        raise MegatronClassError(
            f"it contains {name}, a class of Megatron-Core, and {_PACKAGE} cannot be imported here "
            f"({type(error).__name__}: {error}): install megatron-core, or load what you need with `into`"
        ) from error
    return True
