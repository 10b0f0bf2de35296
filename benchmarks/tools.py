"""Conversions beside `cp -r` of the same bytes with a sync; `diff` and `show --stats` beside a plain read.

Each contender is a process of its own, as a person starts it. Two times are kept: all of it, and that without
the start of Python and torch. Of a conversion this is what it reports itself; of a look, what the same
command takes for a tiny checkpoint is taken off. The plain read is four threads that read the same files,
4 MiB at a time, and do nothing with it. Sources are in the page cache as far as the system has kept them
there, or on the disk with --cold; then the plain read is direct.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import torch

import megatron_datastates as ds
from benchmarks import machine
from benchmarks.command import (
    PATH,
    Result,
    benchmark_command,
    load_average,
    machine_line,
    markdown_table,
    scratch,
    write_results,
)
from benchmarks.rounds import interleave, median, spread

_ROOT = Path(__file__).parents[1]
_CONVERT = [sys.executable, str(_ROOT / "tools" / "convert.py")]
_LOOK = [sys.executable, "-m", "megatron_datastates"]
_TENSOR_ELEMENTS = 4 << 20  # 8 MiB in bfloat16, and a smaller one for each
_FORMATS = ("datastates", "torch_dist")
_PIECE_BYTES, _READ_THREADS = 4 << 20, 4


def _run(command: list[str], code: int = 0) -> str:
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    if done.returncode != code:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr}")
    return done.stdout


class Checkpoints:
    """The same tensors in both formats (`equal` is a copy of ours), all others changed, and tiny ones."""

    def __init__(self, folder: Path, mb: int, files: int) -> None:
        self.folder, self.target = folder, folder / "target"
        self.path = {name: folder / name for name in (*_FORMATS, "equal", "changed")}
        self.tiny = {name: folder / f"tiny-{name}" for name in self.path}
        count = max(mb * 10**6 // (_TENSOR_ELEMENTS * 2), 1)
        for paths, elements in ((self.path, min(_TENSOR_ELEMENTS, mb * 10**6 // 2)), (self.tiny, 8)):
            state = {
                f"decoder.layers.{n}.{name}": torch.randn(size).to(torch.bfloat16)
                for n in range(count if elements > 8 else 1)
                for name, size in (("weight", elements), ("bias", 4096))
            }
            self._save(paths, state, files)
        self.bytes = sum(tensor.nbytes for tensor in self._last.values())

    def _save(self, paths: dict[str, Path], state: dict[str, torch.Tensor], files: int) -> None:
        whole = self.folder / "whole"
        ranks = ["--ranks", str(files)]
        ds.save(state, whole)
        _run([*_CONVERT, str(whole), str(paths["datastates"]), "--to", "datastates", *ranks])
        _run([*_CONVERT, str(whole), str(paths["torch_dist"]), "--to", "torch_dist", *ranks])
        shutil.copytree(paths["datastates"], paths["equal"])
        shutil.rmtree(whole)
        ds.save({key: tensor + 1 for key, tensor in state.items()}, whole)
        _run([*_CONVERT, str(whole), str(paths["changed"]), "--to", "datastates", *ranks])
        shutil.rmtree(whole)
        if paths is self.path:
            self._last = state

    def prepare(self, cold: bool) -> None:
        """Removes the last target, waits until all is written, and if `cold`, empties the cache of them."""
        shutil.rmtree(self.target, ignore_errors=True)
        os.sync()
        for file in self.folder.rglob("*") if cold else ():
            if file.is_file():
                with file.open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _copy(made: Checkpoints, source: str) -> float:
    """Returns 0: it has no start that is worth to be told apart."""
    words = f"cp -r {made.path[source]} {made.target} && sync {made.target}/* {made.target}"
    _run(["sh", "-c", words])
    return 0.0


def _convert(made: Checkpoints, source: str, target: str) -> float:
    """Returns the seconds of the conversion without the start of its process."""
    command = [*_CONVERT, str(made.path[source]), str(made.target), "--to", target, "--json"]
    return float(json.loads(_run(command))["seconds"])


def _look(paths: list[Path], *words: str, differ: bool = False) -> float:
    """Returns 0; raises RuntimeError if the command fails, or does not find what is known to be there."""
    if not _run([*_LOOK, words[0], *map(str, paths), *words[1:]], code=int(differ)):
        # Damage ends with the exit code of a difference, but prints no result.
        raise RuntimeError(f"{words[0]} {' '.join(map(str, paths))}: no result")
    return 0.0


def _read(made: Checkpoints, which: tuple[str, ...], is_cold: bool) -> float:
    """Reads all files of checkpoints; returns how long that took."""
    flags = os.O_RDONLY | (os.O_DIRECT if is_cold else 0)
    paths = [path for one in which for path in made.path[one].iterdir()]
    pieces = [(path, at) for path in paths for at in range(0, path.stat().st_size, _PIECE_BYTES)]

    def read(share: list[tuple[Path, int]]) -> None:
        with mmap.mmap(-1, _PIECE_BYTES) as memory:  # direct reads need its alignment
            for path, at in share:
                descriptor = os.open(path, flags)
                os.preadv(descriptor, [memory], at)
                os.close(descriptor)

    begin = time.perf_counter()
    with ThreadPoolExecutor(_READ_THREADS) as pool:
        list(pool.map(read, [pieces[n::_READ_THREADS] for n in range(_READ_THREADS)]))
    return time.perf_counter() - begin


def contenders(made: Checkpoints, is_cold: bool) -> dict[str, Callable[[], float]]:
    """Returns the contenders by name; each returns its time without its start, 0 if it does not know that."""
    found: dict[str, Callable[[], float]] = {}
    for source, target in (_FORMATS, _FORMATS[::-1]):
        found[f"cp {source}"] = functools.partial(_copy, made, source)
        found[f"{source} to {target}"] = functools.partial(_convert, made, source, target)
    looks = {f"show --stats {name}": (["show", "--stats"], [name]) for name in _FORMATS}
    looks |= {f"diff {one} {two}": (["diff"], [one, two]) for one, two in _PAIRS}
    for name, (words, which) in looks.items():
        for label, paths in ((name, made.path), (f"{name}, tiny", made.tiny)):
            chosen = [paths[one] for one in which]
            found[label] = functools.partial(_look, chosen, *words, differ="changed" in which)
    for read in _READ:
        found[f"read {' '.join(read)}"] = functools.partial(_read, made, read, is_cold)
    return found


_TWICE = {"datastates equal", "datastates changed", "datastates torch_dist"}  # two checkpoints are read
_PAIRS = (("datastates", "equal"), ("datastates", "changed"), ("datastates", "torch_dist"))
_READ = (*((one,) for one in _FORMATS), *_PAIRS)


def measure(made: Checkpoints, rounds: int, cold: bool) -> Result:
    """Returns times of all contenders in interleaved rounds, their rates, and conversions' ratios to cp."""
    inner: dict[str, list[float]] = {}

    def timed(name: str, contender: Callable[[], float]) -> float:
        made.prepare(cold)
        begin = time.perf_counter()
        own = contender()
        seconds = time.perf_counter() - begin
        inner.setdefault(name, []).append(own or seconds)
        return seconds

    every = contenders(made, cold)
    walls = interleave(rounds, {name: functools.partial(timed, name, one) for name, one in every.items()})
    found: Result = {}
    for name, seconds in walls.items():
        start = median(walls[f"{name}, tiny"]) if f"{name}, tiny" in walls else 0.0
        own = median(inner[name][1:]) - start  # the first round is the warm-up
        size = made.bytes * (2 if name.removeprefix("read ").removeprefix("diff ") in _TWICE else 1)
        found[name] = {
            "seconds": round(median(seconds), 3),
            "spread_seconds": spread(seconds),
            "seconds_without_start": round(own, 3),
            "mb_per_s_without_start": round(size / 1e6 / own) if own > 0 else None,
        }
    for name in [name for name in found if name.startswith(("diff ", "show ")) and "tiny" not in name]:
        plain = found[f"read {name.removeprefix('show --stats ').removeprefix('diff ')}"]
        if found[name]["seconds_without_start"] > 0:
            ratio = plain["seconds_without_start"] / found[name]["seconds_without_start"]
            found[name]["of_read"] = round(ratio, 3)
    for source, target in (_FORMATS, _FORMATS[::-1]):
        one, copy = f"{source} to {target}", f"cp {source}"
        ratios = [b / a for a, b in zip(inner[one][1:], walls[copy], strict=True)]
        found[one]["of_cp"] = {"median": round(median(ratios), 3), "spread": spread(ratios)}
        whole = [b / a for a, b in zip(walls[one], walls[copy], strict=True)]
        found[one]["of_cp_with_start"] = {"median": round(median(whole), 3), "spread": spread(whole)}
    return found


def _table(results: Result) -> str:
    rows = [
        (
            name,
            one["seconds"],
            one["seconds_without_start"],
            one["mb_per_s_without_start"] or "-",
            one["of_cp"]["median"] if "of_cp" in one else one.get("of_read", ""),
        )
        for name, one in results["contenders"].items()
        if not name.endswith(", tiny")
    ]
    headings = ["", "s", "s without start", "MB/s without start", "rate, cp or plain read = 1"]
    size = f"{results['mb']} MB in {results['files']} files"
    where = "on disk" if results["cold"] else "as the page cache has them"
    return "\n".join(
        [
            f"### Tools: {size}, {results['machine']['date']}",
            "",
            f"{machine_line(results['machine'], results)} Sources {where}.",
            "",
            *markdown_table(headings, rows),
            "",
        ]
    )


@benchmark_command
@click.option("--mb", type=click.IntRange(min=1), default=800, help="MB of tensors in a checkpoint.")
@click.option("--files", type=click.IntRange(min=1), default=4, help="Data files of a checkpoint.")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=7, help="Rounds, after one that does not count."
)
@click.option("--cold", "is_cold", is_flag=True, help="Take sources out of the page cache.")
@click.option(
    "--quick", "is_quick", is_flag=True, help="2 MB, one round: a minute, and figures that mean little."
)
@click.option("--folder", type=PATH, default=".", help="Where checkpoints are: the disk that is measured.")
@click.option("--out", type=PATH, help="Write the results here, and a table beside it.")
def run(
    mb: int, files: int, rounds: int, is_cold: bool, is_quick: bool, folder: Path, out: Path | None
) -> None:
    """Measures conversions beside cp of the same bytes, and the rates of diff and show --stats.

    Needs six times the size of a checkpoint on the disk.

    \b
    Examples:
      python -m benchmarks.tools --mb 800 --rounds 7 --out benchmarks/results/tools.json
      python -m benchmarks.tools --quick                 # only to see that it works
    """
    if is_quick:
        mb, rounds = 2, 1
    results: Result = {
        "machine": machine.describe(folder),
        "load_average": load_average(),
        "repeats": rounds,
        "files": files,
        "cold": is_cold,
    }
    with scratch(folder) as inside:
        made = Checkpoints(inside.resolve(), mb, files)
        results["mb"] = round(made.bytes / 1e6)
        results["contenders"] = measure(made, rounds, is_cold)
    write_results(results, out)
    print(_table(results))
    if out is not None:
        out.with_suffix(".md").write_text(_table(results))


if __name__ == "__main__":
    run()
