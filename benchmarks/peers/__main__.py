"""The command line of benchmarks.peers: what is measured, and what is printed and written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks import machine
from benchmarks.command import (
    Result,
    choose,
    load_average,
    resume,
    run_command,
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


def run(
    gib: Annotated[float, typer.Option(help="Size of the checkpoint, all ranks together, in GiB.")] = 2.0,
    layers: Annotated[int, typer.Option(help="Layers of the model: 48 tensors each.")] = 64,
    repeats: Annotated[int, typer.Option(help="Rounds that count, at most; medians are reported.")] = 3,
    minutes: Annotated[float, typer.Option(help="Time for the rounds of a part; one is always made.")] = 10,
    work_ms: Annotated[float, typer.Option(help="Pause between an asynchronous save and its fence.")] = 500,
    only: Annotated[list[str] | None, typer.Option(help=f"A part to run: {'; '.join(PARTS)}.")] = None,
    contender: Annotated[
        list[str] | None, typer.Option(help=f"A contender to run: {'; '.join(CONTENDERS)}.")
    ] = None,
    is_quick: Annotated[
        bool, typer.Option("--quick", help="A tiny state, few contenders, one round; figures mean little.")
    ] = False,
    folder: Annotated[Path, typer.Option(help="Where to write; on the disk to be measured.")] = Path(),
    out: Annotated[
        Path | None,
        typer.Option(help="Write the results to this JSON file, with tables (.md) and a picture (.svg)."),
    ] = None,
) -> None:
    r"""Measures saves and loads of one state by this package and by its peers, in turns.

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
        typer.echo(markdown(part, results))
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
    run_command(run)
