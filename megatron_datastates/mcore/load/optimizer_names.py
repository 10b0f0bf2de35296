"""The keys under which a checkpoint holds states of parameters, in any of Megatron's optimizers.

A distributed optimizer calls the main copy of a parameter `param`, others `fp32_param`; a chain of optimizers
may put its own prefix before a key.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from megatron_datastates.pipeline.loading.optimizer import PREFIX

# Of a parameter's state: what a chain puts before it, the state and the parameter.
KEY = re.compile(rf"(chained_\d+\.)?{re.escape(PREFIX)}\.(\w+)\.(.*)", re.DOTALL)
_MAIN = ("param", "fp32_param")


class StateNames:
    """Finds the keys of a checkpoint's states, stored ones and those that are held in buckets."""

    def __init__(self, tensors: Collection[str], states: Collection[str] = ()) -> None:
        """Args: the keys of the stored tensors, and of the states in buckets."""
        self._tensors, self._states = tensors, states
        found = [match for key in (*states, *tensors) if (match := KEY.fullmatch(key))]
        kinds = {match[2] for match in found}
        self._main = next((name for name in _MAIN if name in kinds), None)
        self._prefixes = ["", *sorted({match[1] for match in found if match[1]})]

    def of(self, state: str, parameter: str) -> str:
        """Returns the key of a parameter's state. If the checkpoint lacks it, the key that it should have."""
        name = self._main if state in _MAIN and self._main else state
        names = dict.fromkeys((name, *_MAIN)) if state in _MAIN else (name,)  # each of a chain has its own
        keys = [f"{PREFIX}.{one}.{parameter}" for one in names]
        prefixed = (prefix + key for prefix in self._prefixes for key in keys)
        return next((key for key in prefixed if key in self._states or key in self._tensors), keys[0])

    def of_request(self, key: str) -> str:
        """Returns the checkpoint's key for one that a request has."""
        found = KEY.fullmatch(key)
        return self.of(found[2], found[3]) if found else key
