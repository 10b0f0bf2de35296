"""The command `datastates`, whole, as --help and completion need it. For one sub-command, see entry.py.

Each sub-command is a module, which imports what it needs when it runs.
"""

from __future__ import annotations

from megatron_datastates.cli import (  # each adds its sub-command to `app`
    args,
    cat,
    convert,
    diff,
    export,
    hugging_face,
    listing,
    options,
    plan,
    prune,
    repair,
    report,
    show,
    trend,
    verify,
)
from megatron_datastates.cli.entry import main
from megatron_datastates.cli.program import app

__all__ = [
    "app",
    "args",
    "cat",
    "convert",
    "diff",
    "export",
    "hugging_face",
    "listing",
    "main",
    "options",
    "plan",
    "prune",
    "repair",
    "report",
    "show",
    "trend",
    "verify",
]
