"""Training runs: their arguments, launching them, and what their records say."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.training import rank

_TINY = Path(__file__).parents[2] / "recipes" / "tiny.args"
_PATIENCE_SECONDS = 1200.0
_LOG_TAIL = 3000
_REPORT = "report.jsonl"
Span = tuple[float, float]  # begin and end, of time.perf_counter()


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a model, and how many tokens it is trained with in each iteration."""

    layers: int
    hidden: int
    sequence: int

    @property
    def arguments(self) -> list[str]:
        sizes = {
            "--num-layers": self.layers,
            "--hidden-size": self.hidden,
            "--seq-length": self.sequence,
            "--max-position-embeddings": self.sequence,
        }
        return [str(word) for pair in sizes.items() for word in pair]


_CONSTANT = ["--ckpt-assume-constant-structure"]
_TORCH_DIST = ["--ckpt-format", "torch_dist", *_CONSTANT]
_ASYNC = ["--async-save"]
_MCORE = ["--async-strategy", "mcore", "--dist-ckpt-workers", "2"]
NONE = "none"
FORMATS: dict[str, list[str]] = {
    NONE: [],
    "torch_dist": _TORCH_DIST,
    "torch_dist async": [*_TORCH_DIST, *_ASYNC, *_MCORE],
    "datastates": ["--ckpt-format", "datastates"],
    "datastates async": ["--ckpt-format", "datastates", *_ASYNC],
}


@dataclasses.dataclass(frozen=True)
class Case:
    """What a run saves, and how often.

    Attributes:
        write_limit: of the storage that checkpoints go to, in bytes a second; 0 for none.
        drain_every: with a near tier, which is not limited: every which checkpoint goes on to that storage.
    """

    format: str
    interval: int = 0  # iterations
    write_limit: int = 0
    drain_every: int = 0  # 0: no near tier

    def __str__(self) -> str:
        if self.format == NONE:
            return "no checkpoints"
        limit = f", at most {self.write_limit / 1e6:.0f} MB/s" if self.write_limit else ""
        near = f", near first, 1 of {self.drain_every} drained" if self.drain_every else ""
        return f"{self.format}, every {self.interval}{near}{limit}"


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all runs of a part have in common. Iterations up to `warm_up` are not counted."""

    model: Model
    data_parallel: int
    iterations: int
    warm_up: int

    def saves(self, interval: int) -> int:
        """Returns how many saves are counted."""
        return self.iterations // interval - self.warm_up // interval if interval else 0


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run took; of several ranks, the longest."""

    iterations: dict[int, float]  # seconds from the beginning of a counted step to that of the next
    seconds: float  # of all counted iterations, with what is waited for at the end
    blocked: float  # seconds in save_checkpoint, polls and fences, without the wait at the end
    waited: float  # for the last save, after the last iteration
    first_save: float  # seconds in save_checkpoint
    checkpoints: int
    checkpoint_bytes: int  # of the last one
    drained: float = 0.0  # seconds after all that, until the near tier has no more to bring
    published: tuple[float, ...] = ()  # seconds until each save was published, since the last one if later
    copied: tuple[float, ...] = ()  # seconds for which each drained checkpoint was copied


def train(setting: Setting, case: Case, folder: Path) -> Run:
    """Runs one training, and removes its checkpoints; raises RuntimeError if it fails."""
    with run_ranks(setting, case, folder) as records:
        size, complete = checkpoint_bytes(folder / "checkpoints")
        saves = setting.iterations // case.interval if case.interval else 0
        expected = saves // case.drain_every + (saves % case.drain_every > 0) if case.drain_every else saves
        if complete != expected:
            raise RuntimeError(f"{case}: expected {expected} complete checkpoints, found {complete}")
        runs = [_measure(setting, record, complete, size) for record in records]
        published, copied = _times(folder / _REPORT, setting.warm_up)
    names = ("seconds", "blocked", "waited", "drained")
    longest = {name: max(getattr(run, name) for run in runs) for name in names}
    return dataclasses.replace(runs[0], published=published, copied=copied, **longest)


@contextlib.contextmanager
def run_ranks(
    setting: Setting, case: Case, folder: Path, *, save_blocks: int = 0
) -> Iterator[list[dict[str, list[Span]]]]:
    """Runs one training, yields what its ranks have recorded, and removes its checkpoints.

    Args:
        save_blocks: if not 0, only every other block of so many iterations saves; the first one does not.
    """
    checkpoints = folder / "checkpoints"
    try:
        arguments = arguments_of(setting, case, checkpoints)
        yield launch(setting, arguments, case, folder, save_blocks=save_blocks)
    finally:
        (folder / _REPORT).unlink(missing_ok=True)
        shutil.rmtree(checkpoints, ignore_errors=True)
        shutil.rmtree(folder / "near", ignore_errors=True)


def checkpoint_bytes(checkpoints: Path, last_file: str = "metadata.json") -> tuple[int, int]:
    """Returns the bytes of the last checkpoint that has its last file, and how many have theirs."""
    complete = sorted(path.parent for path in checkpoints.glob(f"iter_*/{last_file}"))
    return sum(path.stat().st_size for path in complete[-1].iterdir()) if complete else 0, len(complete)


def _times(report: Path, warm_up: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns `published` and `copied` of a run; nothing if it made no report."""
    lines = report.read_text().splitlines() if report.exists() else []
    found = [one for one in map(json.loads, lines) if (one["iteration"] or 0) > warm_up]
    drains = [one["node_copying_ms"] / 1e3 for one in found if one["event"] == "drain"]
    published, last = [], 0.0
    for save in (one for one in found if one["event"] == "save"):
        begin, end = save["started_at"], save["started_at"] + save["published_ms"] / 1e3
        published.append(end - max(begin, last))
        last = end
    return tuple(published), tuple(drains)


def arguments_of(setting: Setting, case: Case, checkpoints: Path) -> list[str]:
    """Returns the command line of a run."""
    arguments = [*_TINY.read_text().split(), *setting.model.arguments]
    iterations = str(setting.iterations)
    arguments += ["--train-iters", iterations, "--lr-decay-iters", iterations, "--log-interval", "1000"]
    if case.format != NONE:
        arguments += ["--save", str(checkpoints), "--save-interval", str(case.interval)]
    if case.drain_every:
        arguments += ["--datastates-near", str(checkpoints.with_name("near"))]
        arguments += ["--datastates-drain-every", str(case.drain_every)]
    if case.write_limit:
        arguments += ["--datastates-report-file", str(checkpoints.with_name(_REPORT))]
        limit = "--datastates-drain-limit" if case.drain_every else "--datastates-write-limit"
        arguments += [limit, str(case.write_limit)]
    return arguments + FORMATS[case.format]


def launch(
    setting: Setting,
    arguments: list[str],
    case: Case,
    folder: Path,
    far: tuple[Path, int] | None = None,
    save_blocks: int = 0,
) -> list[dict[str, list[Span]]]:
    """Forks the ranks from a process that has imported Megatron, and waits for their ends.

    Args:
        far: a folder, and the rate in bytes a second at which each rank is to read and write there.
        save_blocks: as in `run_ranks`.

    Returns:
        what each rank has recorded.
    """
    os.environ |= {"OMP_NUM_THREADS": "1"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.training.preload"])
    records = [folder / f"rank{number}.json" for number in range(setting.data_parallel)]
    port, forks = free_port(), case.format == "torch_dist async"
    processes = []
    for number, record in enumerate(records):
        place = (number, setting.data_parallel, port)
        process = context.Process(target=rank.run, args=(place, arguments, record, forks, far, save_blocks))
        process.start()
        processes.append(process)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes) or time.monotonic() > deadline:
            break  # the others would wait for it
        time.sleep(0.05)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    if any(code != 0 for code in codes):
        logs = "".join(record.with_suffix(".log").read_text()[-_LOG_TAIL:] for record in records)
        raise RuntimeError(f"{case}: ranks ended with {codes}; their logs end:\n{logs}")
    found = [json.loads(record.read_text()) for record in records]
    for path in folder.glob("rank*"):
        path.unlink()
    return found


def _measure(setting: Setting, spans: dict[str, list[Span]], checkpoints: int, size: int) -> Run:
    steps = [begin for begin, _ in spans["step"]]
    assert len(steps) == setting.iterations, f"{len(steps)} iterations, expected {setting.iterations}"
    begin = steps[setting.warm_up]
    last_step_end = spans["step"][-1][1]
    last_save_end = max([last_step_end, *(end for _, end in spans["save"])])
    holding = [span for name in ("save", "poll", "fence") for span in outermost(spans, name)]
    end = max(end for _, end in [*holding, spans["step"][-1]])
    counted = [b - a for a, b in holding if a >= begin]
    after = [b - a for a, b in outermost(spans, "poll") if a >= last_save_end]
    numbers = range(setting.warm_up + 1, setting.iterations)
    return Run(
        iterations={number: steps[number] - steps[number - 1] for number in numbers},
        seconds=end - begin,
        blocked=sum(counted) - sum(after),
        waited=sum(after),
        first_save=spans["save"][0][1] - spans["save"][0][0] if spans["save"] else 0.0,
        checkpoints=checkpoints,
        checkpoint_bytes=size,
        drained=sum(b - a for a, b in spans.get("drain", [])),
    )


def outermost(spans: dict[str, list[Span]], name: str) -> list[Span]:
    """Returns the spans of a name that do not lie within a save: a save polls and fences, too."""
    saves = spans["save"] if name != "save" else []
    return [span for span in spans[name] if not any(a <= span[0] <= b for a, b in saves)]


def free_port() -> int:
    """Returns a port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
