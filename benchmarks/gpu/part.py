"""Runs parts of benchmarks.gpu in this process, and writes what they report line by line.

A line is a JSON object of names and values for a part; later ones add to earlier ones, so that a part that is
ended early has left what it had found.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.device import Device  # first: it decides whether "cuda" is a GPU

# isort: split
import torch

from benchmarks import disk, machine
from benchmarks.gpu.context import Part, Report
from benchmarks.gpu.copies import measure_copies
from benchmarks.gpu.environment import IS_FAKE, split
from benchmarks.gpu.held import measure_held
from benchmarks.gpu.loads import measure_loads
from benchmarks.gpu.megatron import measure_megatron
from benchmarks.gpu.page_locking import measure_page_locking
from benchmarks.gpu.pipeline import measure_pipeline
from benchmarks.gpu.small_copies import measure_small_copies
from benchmarks.gpu.steps import measure_steps
from benchmarks.gpu.training import measure_training
from megatron_datastates.config import GIB, MIB

_MEASURES = {
    "page_locking": measure_page_locking,
    "copies": measure_copies,
    "held": measure_held,
    "small_copies": measure_small_copies,
    "steps": measure_steps,
    "pipeline": measure_pipeline,
    "loads": measure_loads,
    "megatron": measure_megatron,
    "training": measure_training,
}


def describe_machine(folder: Path, report: Report) -> None:
    """Reports the machine, and the best rate of its disk."""
    facts = machine.describe(folder)
    if facts["gpu"] is None and not IS_FAKE:
        facts["gpu"] = {"name": torch.cuda.get_device_name(0)}
    report(**facts)
    report(disk=disk.best_write_rate(folder, 16 * MIB if IS_FAKE else 2 * GIB))


def main() -> None:
    """Runs the parts that the command line names, one after another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="+", help="as `python -m benchmarks.gpu --help` lists them")
    parser.add_argument("--into", type=Path, required=True, help="file of the results")
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints go; it exists")
    parser.add_argument("--seconds", type=float, required=True, help="no repeat begins that would end later")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    logging.getLogger("megatron_datastates").setLevel(logging.CRITICAL)  # saves are abandoned on purpose
    device = None
    with arguments.into.open("w") as into:
        for name in arguments.parts:

            def report(name: str = name, **values: Any) -> None:
                into.write(json.dumps({"part": name} | values) + "\n")
                into.flush()

            if name == "machine":
                describe_machine(arguments.folder, report)
            else:
                device = device or Device(arguments.folder)
                measure = _MEASURES[split(name)[0]]
                measure(Part(device, arguments.folder, IS_FAKE, deadline, report))
            report(complete=True)


if __name__ == "__main__":
    main()
