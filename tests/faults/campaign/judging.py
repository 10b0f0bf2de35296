"""What loads, `verify` and the commands make of a directory, in this process.

A load is exactly one iteration, or is refused with one of our errors. All else is a violation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.core import CheckpointingException

from megatron_datastates.cli.main import app
from megatron_datastates.config import Options
from megatron_datastates.convert.open import open_source
from megatron_datastates.errors import DataStatesError
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.upkeep.repair import repair
from megatron_datastates.pipeline.upkeep.verify import verify
from megatron_datastates.providers.objects import deserialize
from tests.faults.campaign import patterns

Candidates = Sequence[tuple[int, str]]  # iteration and layout
NO_MEMORY = ("MemoryError", "Cannot allocate", "bad_alloc")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`iteration` if it loaded exactly that; else `refused` is our error's text, or `wrong` what was seen."""

    iteration: int | None = None
    refused: str = ""
    wrong: str = ""


def looked(load: Callable[[], patterns.State], candidates: Candidates) -> Outcome:
    try:
        found = load()
    except (DataStatesError, CheckpointingException) as error:
        text = str(error)
        if not text or any(word in text for word in NO_MEMORY):
            return Outcome(wrong=f"it ran out of memory, or does not say why: {text}")
        return Outcome(refused=text)
    iteration = patterns.iteration_of(found, candidates)
    if iteration is None:
        parts = patterns.iterations_of_parts(found, candidates)
        return Outcome(
            wrong=f"wrong bytes: {patterns.first_difference(found, *candidates[0])}; of each part: {parts}"
        )
    return Outcome(iteration)


def by_reader(directory: Path, candidates: Candidates, options: Options) -> Outcome:
    return looked(lambda: patterns.load_by_reader(Checkpoint.open(directory, options)), candidates)


def by_megatron(directory: Path, candidates: Candidates) -> Outcome:
    """Loads through Megatron with each layout that there is: a caller has to know it."""
    patterns.join_alone()
    found = [
        looked(
            lambda n=layout: patterns.load_by_megatron(directory, n),
            [c for c in candidates if c[1] == layout],
        )
        for layout in dict.fromkeys(layout for _, layout in candidates)
    ]
    wrong = next((each for each in found if each.wrong), None)
    return wrong or next((each for each in found if each.iteration is not None), found[0])


def faults_of(directory: Path, options: Options) -> list[str]:
    """Returns what `verify` finds, or raises if it cannot begin."""
    try:
        return verify(directory, options=options).faults
    except DataStatesError as error:
        return [str(error)]


def by_conversion(directory: Path, target: Path, form: str, candidates: Candidates) -> Outcome:
    """Converts and reads what came out."""
    code, said = command("convert", directory, target, "--to", form, "--workers", 1)
    if code:
        return (
            Outcome(refused=said)
            if not target.exists()
            else Outcome(wrong="convert failed and left its target")
        )

    def load() -> patterns.State:
        source = open_source(target)
        objects = {key: deserialize(source.read_object(key), key) for key in source.objects}
        return {key: source.read_tensor(key) for key in source.tensors} | patterns.named(objects)

    return looked(load, candidates)


def repaired(directory: Path, options: Options) -> bool:
    try:
        repair(directory, options=options)
    except DataStatesError:
        return False
    return True


def command(*arguments: Any) -> tuple[int, str]:
    """Returns exit code and output of `datastates ARGUMENTS`; raises what it raises."""
    shown = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            app.main([str(argument) for argument in arguments], prog_name="datastates")
        except SystemExit as end:
            code = end.code
    shown.flush()
    output = shown.buffer.getvalue().decode()
    if not isinstance(code, int) or code not in (0, 1, 2):
        raise AssertionError(f"`datastates {arguments}` ended with {code}: {output}")
    return code, output
