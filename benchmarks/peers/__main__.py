"""The command line of benchmarks.peers: what is measured, and what is printed and written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks import machine
from benchmarks.command import (
    PATH,
    Result,
    benchmark_command,
    choose,
    load_average,
    resume,
    scratch,
    write_results,
)
from benchmarks.peers.measures import Peers, Plan
from benchmarks.peers.megatron import CONTENDERS
from benchmarks.peers.states import Model
from benchmarks.peers.table import markdown
from megatron_datastates.config import GIB

_MEMORY = Path("/dev/shm")
PARTS = {
    f"{where}, {ranks} rank{'s' if ranks > 1 else ''}": (where, ranks)
    for where in ("disk", "memory")
    for ranks in (1, 2, 4)
}
_QUICK = "disk, 1 rank"
_QUICK_CONTENDERS = ("datastates", "datastates async", "torch_dist", "torch.save")
_PEERS = ("torchsnapshot", "nvidia-resiliency-ext")


@benchmark_command
@click.option("--gib", default=2.0, help="Size of the checkpoint, all ranks together, in GiB.")
@click.option("--layers", default=64, help="Layers of the model: 48 tensors each.")
@click.option("--repeats", default=3, help="Rounds that count, at most; medians are reported.")
@click.option("--minutes", type=float, default=10, help="Time for the rounds of a part; one is always made.")
@click.option("--work-ms", type=float, default=500, help="Pause between an asynchronous save and its fence.")
@click.option("--only", multiple=True, help=f"A part to run: {'; '.join(PARTS)}.")
@click.option("--contender", multiple=True, help=f"A contender to run: {'; '.join(CONTENDERS)}.")
@click.option(
    "--quick", "is_quick", is_flag=True, help="A tiny state, few contenders, one round; figures mean little."
)
@click.option("--folder", type=PATH, default=".", help="Where to write; on the disk to be measured.")
@click.option(
    "--out", type=PATH, help="Write the results to this JSON file, with tables (.md) and a picture (.svg)."
)
def run(
    gib: float,
    layers: int,
    repeats: int,
    minutes: float,
    work_ms: float,
    only: Sequence[str],
    contender: Sequence[str],
    is_quick: bool,
    folder: Path,
    out: Path | None,
) -> None:
    """Measures saves and loads of one state by this package and by its peers, in turns.

    The state is that of a GPT with a distributed optimizer. Each rank is a process of a gloo world. A save
    holds its trainer while the state is prepared, in the call, in the fence before the next step, and in
    every poll. It is durable once all files are synced, which this benchmark does for programs that do not.
    Every checkpoint is loaded, with cold and with warm caches, and compared bit for bit. First saves are
    reported apart. Peers that are not installed, or fail here, are named with the reason.

    A part that the file of --out has already is not measured again, unless --only names it.

    \b
    Examples:
      python -m benchmarks.peers --only "disk, 1 rank" --out benchmarks/results/peers.json
      python -m benchmarks.peers --out benchmarks/results/peers.json   # all others, 15 minutes each
      python -m benchmarks.peers --contender datastates --contender torch_dist --only "memory, 2 ranks"
      python -m benchmarks.peers --quick          # only to see that it works
    """
    chosen = choose(only, PARTS, [_QUICK] if is_quick else list(PARTS), "part")
    names = choose(contender, CONTENDERS, _QUICK_CONTENDERS if is_quick else list(CONTENDERS), "contender")
    model = Model(2, 32, 512) if is_quick else Model.of_bytes(int(gib * GIB), layers)
    results = resume(out, _description(folder, model))
    for part in chosen:
        if part in results["parts"] and not only:
            continue
        where, ranks = PARTS[part]
        rounds, work = (1, 0.0) if is_quick else (repeats, work_ms / 1e3)
        plan = Plan(ranks, model, rounds, 60 * minutes, work, names)
        with scratch(folder if where == "disk" else _MEMORY) as inside:
            found = Peers(plan, inside).measure()
        results["parts"][part] = found | {"load_average": load_average()}
        click.echo(markdown(part, results))
        write_results(results, out)
    if out is not None:
        from benchmarks.peers import picture  # here: matplotlib is needed for pictures only

        out.with_suffix(".md").write_text("\n".join(markdown(part, results) for part in results["parts"]))
        picture.draw(results, out.with_suffix(".svg"))


def _description(folder: Path, model: Model) -> Result:
    described = machine.describe(folder)
    described["packages"] |= {name: machine.version(name) for name in _PEERS}
    return {"machine": described, "gib": model.bytes / GIB, "layers": model.layers, "hidden": model.hidden}


if __name__ == "__main__":
    run()
