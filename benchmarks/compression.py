"""Whether compressing checkpoints pays, on disks of several speeds (`--datastates-compress`).

The state is a small transformer's that was trained for some steps with Adam in mixed precision: bf16
parameters, fp32 master copies and both moments. Random numbers would compress differently. A disk's speed is
imitated by the engine's own write limit (`--datastates-write-limit`).
"""

from __future__ import annotations

import functools
import shutil
import time
from pathlib import Path

import click
import torch

import megatron_datastates as ds
from benchmarks import machine
from benchmarks.command import PATH, Result, benchmark_command, measure_parts, scratch, write_results
from benchmarks.rounds import Bar, interleave, median, spread

MB = 1_000_000
_LEVELS = {"plain": 0, "zstd 1": 1, "zstd 6": 6}
_LIMITS = {"no limit": 0, "200 MB/s": 200 * MB, "50 MB/s": 50 * MB}


def trained_state(layers: int, steps: int) -> dict[str, torch.Tensor]:
    """Returns a state by name, of about 14 bytes a parameter: 44 MB a layer."""
    torch.manual_seed(0)
    block = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    data = torch.randn(4, 64, 512).cumsum(1)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(data[:, :-1]) - data[:, 1:]).square().mean().backward()
        optimizer.step()
    state: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        moments = optimizer.state[parameter]
        state[f"model.{name}"] = parameter.detach().bfloat16()
        state[f"master.{name}"] = parameter.detach()
        state[f"exp_avg.{name}"] = moments["exp_avg"]
        state[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"]
    return state


def measure_limit(limit: int, state: dict[str, torch.Tensor], folder: Path, repeats: int) -> Result:
    """Measures synchronous saves and loads at one write limit, in interleaved rounds."""
    stored: dict[str, int] = {}
    targets = {name: torch.empty_like(tensor) for name, tensor in state.items()}

    def save(name: str) -> float:
        path = folder / name
        shutil.rmtree(path, ignore_errors=True)
        report = ds.save(state, path, compress=_LEVELS[name], write_limit=limit)
        stored[name] = int(report["bytes"])
        return float(report["durable_ms"]) / 1e3

    durable = interleave(repeats, {name: functools.partial(save, name) for name in _LEVELS})
    loads = interleave(repeats, {name: functools.partial(_load, folder / name, targets) for name in _LEVELS})
    for name, tensor in targets.items():
        assert tensor.equal(state[name]), f"{name} was not restored exactly"
    plain = median(durable["plain"])
    return {
        name: {
            "durable_s": round(median(durable[name]), 3),
            "durable_spread_s": spread(durable[name]),
            "speed_of_plain": round(plain / median(durable[name]), 2),
            "load_s": round(median(loads[name]), 3),
            "stored_mb": round(stored[name] / MB, 1),
            "stored_of_plain": round(stored[name] / stored["plain"], 3),
        }
        for name in _LEVELS
    }


def _load(path: Path, targets: dict[str, torch.Tensor]) -> float:
    begin = time.perf_counter()
    ds.load(path, into=targets)
    return time.perf_counter() - begin


@benchmark_command
@click.option(
    "--layers", type=click.IntRange(min=1), default=6, help="Layers of the model; 44 MB of state each."
)
@click.option("--steps", type=click.IntRange(min=1), default=40, help="Steps that it is trained for.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, help="Rounds of each comparison.")
@click.option(
    "--quick", "is_quick", is_flag=True, help="One layer, one round: seconds, and figures that mean little."
)
@click.option("--folder", type=PATH, default=".", help="Where to write checkpoints.")
@click.option("--out", type=PATH, help="Write the results to this JSON file.")
def run(layers: int, steps: int, repeats: int, is_quick: bool, folder: Path, out: Path | None) -> None:
    """Measures what compressing brings, in time and in bytes, on disks of several speeds.

    Trains a small transformer, saves its state with and without compression under several write limits, and
    loads it again. Needs the package zstandard.

    \b
    Examples:
      python -m benchmarks.compression              # about 10 minutes
      python -m benchmarks.compression --quick      # only to see that it works
      python -m benchmarks.compression --out benchmarks/results/compression.json
    """
    if is_quick:
        layers, steps, repeats = 1, 2, 1
    state = trained_state(layers, steps)
    total = sum(tensor.nbytes for tensor in state.values())
    results: Result = {
        "machine": machine.describe(folder),
        "state_mb": round(total / MB, 1),
        "steps": steps,
        "repeats": repeats,
    }

    def measure(name: str) -> tuple[Result, list[Bar]]:
        with scratch(folder) as inside:
            return measure_limit(_LIMITS[name], state, inside, repeats), []

    measure_parts(results, list(_LIMITS), measure)
    write_results(results, out)


if __name__ == "__main__":
    run()
