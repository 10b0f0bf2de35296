"""The command, run in this process."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner

from megatron_datastates.cli.main import app


def run(*arguments: Any) -> tuple[int, str, str]:
    """Returns exit code, standard output and standard error of `datastates ARGUMENTS`."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def json_of(*arguments: Any, code: int = 0) -> dict[str, Any]:
    """Returns what `datastates ARGUMENTS --json` prints, which has to end with this exit code."""
    exit_code, printed, reported = run(*arguments, "--json")
    assert exit_code == code, reported
    return json.loads(printed)
