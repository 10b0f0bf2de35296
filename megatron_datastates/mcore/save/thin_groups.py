"""Parameter groups of torch optimizers without their states, while Megatron makes a thin state dict.

Of its inner optimizer's state dict, a distributed optimizer stores the groups' plain values. torch would
number every parameter for that, and Transformer Engine's FusedAdam convert every state to fp32.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from megatron_datastates.mcore.save.survey import code_of, has_buckets

_TRUSTED = ("torch.", "transformer_engine.", "apex.")  # their state dicts leave groups as torch's does
_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")


@contextlib.contextmanager
def groups_alone(optimizers: Iterable[Any]) -> Iterator[None]:
    """Leaves the states out of what distributed optimizers ask of torch's, where nothing else changes."""
    thin = [one.optimizer for one in optimizers if has_buckets(one) and _may_be_thin(one.optimizer)]
    try:  # from the first one on: an interrupt may come between any two
        for inner in thin:
            inner.__dict__["state_dict"] = functools.partial(_groups_alone, inner)
        yield
    finally:
        for inner in thin:
            inner.__dict__.pop("state_dict", None)


def _may_be_thin(inner: Any) -> bool:
    from megatron.core.optimizer import distrib_optimizer

    # Without a fused optimizer, Megatron asks each parameter's state for its step.
    return getattr(distrib_optimizer, "HAVE_APEX_OR_TE", False) and makes_groups_as_torch(inner)


def makes_groups_as_torch(inner: Any) -> bool:
    """Returns whether the groups in a torch optimizer's state dict are its own but for their parameters."""
    is_own = "state_dict" in vars(inner) or any(getattr(inner, name, None) for name in _HOOKS)
    return not is_own and all(home.startswith(_TRUSTED) for home in code_of(type(inner).state_dict))


def _groups_alone(inner: Any) -> dict[str, Any]:
    groups = [dict(group) | {"params": list(range(len(group["params"])))} for group in inner.param_groups]
    return {"state": {}, "param_groups": groups}
