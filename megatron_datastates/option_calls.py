"""The options that the calls of a program may set: `ds.save`, `ds.load`, `enable` and those of DCP.

Belongs here: which options have no effect in which call, and what to do instead. Does not belong here: the
table of options (config.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from megatron_datastates.config import Options
from megatron_datastates.errors import OptionError

# Options without effect in calls that save or load what they are given, and what to do instead.
_PROVIDERS = {
    "providers": "to ds.save and ds.load, pass state providers as values of the state (docs/providers.md)"
}
_FALLBACK = dict.fromkeys(
    ("fallback", "on_damage"),
    "elsewhere, `datastates verify --all` finds the newest undamaged checkpoint of a run",
)
_NEAR = ("near", "near_keep", "near_replicas", "drain_every", "drain_limit")
_NOT_IN_CALLS: dict[Literal["save", "load", "enable"], dict[str, str]] = {
    "save": _PROVIDERS
    | dict.fromkeys(_NEAR, "other calls write to the directory that they are given")
    | {
        "while_saving": "in other programs, ask whether the handle of the last save is `done`",
        "on_failure": "elsewhere, catch SaveFailedError where a failed save must not end the program",
    },
    "load": _PROVIDERS | _FALLBACK,
    "enable": dict.fromkeys(_NEAR, "other saves write to the directory that they are given")
    | {"while_saving": "elsewhere, the program itself decides whether to save"}
    | _FALLBACK,
}


def options_of_call(
    options: Mapping[str, Any], call: Literal["save", "load", "enable"], **defaults: Any
) -> Options:
    """Reads the options of a call that saves or loads what it is given, or of `enable()`.

    Args:
        defaults: values that replace the options' own defaults.

    Raises:
        OptionError: as `Options.from_environment`; or one is for saves and loads through Megatron, or (of
            `enable`) in its training loop only. Left out without an error, providers' state would be lost, or
            a near tier missed.
    """
    read = Options.from_environment(options, **defaults)
    where = "saves and loads through Megatron"
    if call == "enable":
        where = "Megatron's training loop with --ckpt-format datastates"
    for name, advice in _NOT_IN_CALLS[call].items():
        if name in options and getattr(read, name) != Options.__dataclass_fields__[name].default:
            raise OptionError(f"{name}={options[name]!r}: this option is for {where}; {advice}")
    return read
