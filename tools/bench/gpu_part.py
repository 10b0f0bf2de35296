"""Parts of gpu.py, in a process beside it: measures, and writes what it finds line by line.

A line is a JSON object of names and values for a part; later ones add to earlier ones, so that a part that
is ended in its middle has left what it knew.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path
from typing import Any

import disk
import gpu_device  # first: it decides whether "cuda" is a GPU
import machine
import torch
from gpu_copies import measure_copies
from gpu_held import measure_held
from gpu_loads import measure_loads
from gpu_megatron import measure_megatron
from gpu_page_locking import measure_page_locking
from gpu_results import ONE
from gpu_saves import Tell, measure_pipeline
from gpu_steps import measure_steps

_MEASURES = {
    "page_locking": measure_page_locking,
    "copies": measure_copies,
    "held": measure_held,
    "steps": measure_steps,
    "pipeline": measure_pipeline,
    "loads": measure_loads,
    "megatron": measure_megatron,
}


def describe_machine(folder: Path, small: bool, tell: Tell) -> None:
    facts = machine.describe(folder)
    if facts["gpu"] is None and not small:
        facts["gpu"] = {"name": torch.cuda.get_device_name(0)}
    tell(**facts)
    tell(disk=disk.best_write_rate(folder, (16 << 20) if small else (2 << 30)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", help="as gpu.py names them")
    parser.add_argument("--into", type=Path, required=True, help="file of the results")
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints go; it exists")
    parser.add_argument("--seconds", type=float, required=True, help="no repeat begins that would end later")
    arguments = parser.parse_args()
    until, small = time.monotonic() + arguments.seconds, gpu_device.IS_FAKE
    logging.getLogger("megatron_datastates").setLevel(logging.CRITICAL)  # saves that were given up
    device = None
    with arguments.into.open("w") as into:
        for part in arguments.parts:

            def tell(part: str = part, **values: Any) -> None:
                into.write(json.dumps({"part": part} | values) + "\n")
                into.flush()

            if part == "machine":
                describe_machine(arguments.folder, small, tell)
            else:
                device = device or gpu_device.Device(arguments.folder)
                _MEASURES[part.removesuffix(ONE)](device, arguments.folder, small, until, tell)
            tell(complete=True)


if __name__ == "__main__":
    main()
