"""One rank of a training job of `jobs`, which notes the state after each step at once: it may be killed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pretrain_tiny
import tiny_rank
from megatron.training import training as loop


def train(arguments: list[str], folder: str) -> None:
    """Pretrains, and appends a line to FOLDER/rankN.jsonl when training begins and after each step.

    The environment variable TINY_FAULTS_OF_RANK_N is the fault plan of rank N.
    """
    rank = os.environ["RANK"]
    sys.argv = ["pretrain_tiny.py", *arguments]
    if (plan := os.environ.get(f"TINY_FAULTS_OF_RANK_{rank}")) is not None:
        os.environ[tiny_rank.FAULTS] = plan
    recorder = tiny_rank.Recorder()
    recorder.attach()
    set_up, take_step = loop.setup_model_and_optimizer, loop.train_step
    notes = Path(folder, f"rank{rank}.jsonl").open("a", buffering=1)  # noqa: SIM115 (until the end)

    def note(step: int, state: dict[str, str]) -> None:
        notes.write(json.dumps([step, state]) + "\n")

    def setup_model_and_optimizer(*args: Any, **options: Any) -> Any:
        made = set_up(*args, **options)
        note(recorder.begun["iteration"], recorder.begun["state"])
        return made

    def train_step(*args: Any, **options: Any) -> Any:
        results = take_step(*args, **options)
        name, state = next(reversed(recorder.states.items()))
        note(int(name.removeprefix("step ")), state)
        return results

    loop.setup_model_and_optimizer, loop.train_step = setup_model_and_optimizer, train_step
    pretrain_tiny.main()


def command(*arguments: str) -> None:
    """Runs the command `datastates`."""
    from megatron_datastates.cli.entry import main

    sys.argv = ["datastates", *arguments]
    sys.exit(main())
