"""Shows on one machine, without a GPU, what `--ckpt-format datastates` does for a training run.

Trains a tiny GPT in two processes with asynchronous saves, kills both in mid-training, resumes from
the last published checkpoint, verifies the checkpoints, resumes in another parallel layout, prints what
each save cost the trainer, and leaves a page that shows it. Takes one or two minutes. The last line is
`demo: OK`. On a failure it prints the reason, exits with a code other than 0, and keeps its files.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import Run, RunFailed
from rich.console import Console
from rich.table import Table

OURS = "datastates"
RANKS = 2
STEPS, SAVE_INTERVAL, STEPS_IN_OTHER_LAYOUT = 60, 10, 3
TIMEOUT_SECONDS = 240.0
LOG_TAIL_LINES = 40
PAGES = {"report.html": "page", "report.png": "picture"}
MODEL = ["--num-layers", "4", "--hidden-size", "256", "--train-iters", str(STEPS)]
SCHEDULE = ["--lr", "3e-3", "--lr-decay-iters", str(STEPS), "--step-delay-ms", "25"]
TENSOR_PARALLEL = ["--tensor-model-parallel-size", str(RANKS)]
PIPELINE_PARALLEL = ["--pipeline-model-parallel-size", str(RANKS)]
WEIGHTS_ONLY = ["--finetune", "--no-load-optim", "--no-load-rng"]
PROVIDER_FIELDS = {
    "tensors": "tensors",
    "eager_bytes": "their bytes copied before the save returns",
    "lazy_bytes": "their bytes copied while training goes on",
    "objects": "objects",
    "streams": "streams",
    "tail_stored_bytes": "bytes of objects and streams",
    "tail_ms": "ms to write those",
}


@dataclass(frozen=True)
class Demo:
    """The demo's folder, checkpoint format and console."""

    folder: Path
    ckpt_format: str
    console: Console

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def checkpoint(self, iteration: int) -> Path:
        return self.checkpoints / f"iter_{iteration:07d}"

    def report(self, phase: str) -> Path:
        return self.folder / f"report-{phase}.jsonl"

    def published(self) -> list[int]:
        """Returns the iterations with a published checkpoint: in our format, one that has a manifest."""
        mark = "datastates.manifest" if self.ckpt_format == OURS else "metadata.json"
        return sorted(int(path.parent.name[5:]) for path in self.checkpoints.glob(f"iter_*/{mark}"))

    def tracked(self) -> int:
        """Returns the iteration that Megatron's tracker names, or 0 if there is no tracker."""
        tracker = self.checkpoints / "latest_checkpointed_iteration.txt"
        text = tracker.read_text() if tracker.exists() else ""
        return int(text) if text else 0

    def start(self, phase: str, *arguments: str) -> Run:
        log = self.folder / f"{phase}.log"
        return Run([*MODEL, *SCHEDULE, *arguments], ranks=RANKS, log=log)

    def saving(self, phase: str) -> list[str]:
        """Returns the arguments of a run that saves while it trains."""
        where = ["--save", str(self.checkpoints), "--save-interval", str(SAVE_INTERVAL)]
        how = ["--ckpt-format", self.ckpt_format]
        if self.ckpt_format == OURS:
            how += ["--async-save", "--datastates-report-file", str(self.report(phase))]
        return [*where, *how]

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Prints the title of a part of the demo; on a terminal, shows a spinner while the part runs."""
        self.console.print(f"[bold]{title}[/bold]")
        if self.console.is_terminal:
            with self.console.status(title):
                yield
        else:
            yield

    def print_line(self, line: str) -> None:
        self.console.print(f"    {line}", markup=False, soft_wrap=True)


def train_and_kill(demo: Demo) -> float:
    """Kills a run some iterations after its second checkpoint is published; returns its first loss."""
    with demo.start("killed", *TENSOR_PARALLEL, *demo.saving("killed")) as run:
        second = 2 * SAVE_INTERVAL
        run.wait_until(lambda: demo.tracked() >= second, "its second checkpoint", TIMEOUT_SECONDS)
        run.wait_until(lambda: max(run.losses()) > second + 2, "more iterations", TIMEOUT_SECONDS)
        killed = run.kill()
    losses = run.losses()
    if not killed or max(losses) >= STEPS:
        raise RunFailed("training was over before it could be killed", run.log)
    whom = f"all {killed} processes, the launcher among them,"
    demo.print_line(f"sent SIGKILL to {whom} after iteration {max(losses)} of {STEPS}")
    demo.print_line(f"published checkpoints: {demo.published()}; the tracker names {demo.tracked()}")
    return losses[1]


def resume(demo: Demo) -> float:
    """Resumes from the iteration that the tracker names, trains to the end, and returns the last loss."""
    start, published = demo.tracked(), demo.published()
    if start not in published:
        raise RunFailed(f"the tracker names iteration {start}, which is not published", demo.checkpoints)
    with demo.start(
        "resumed", *TENSOR_PARALLEL, *demo.saving("resumed"), "--load", str(demo.checkpoints)
    ) as run:
        run.wait(TIMEOUT_SECONDS)
    losses = run.losses()
    if f"at iteration {start}" not in run.text() or min(losses) != start + 1:
        raise RunFailed(
            f"expected to resume after iteration {start}, but the first iteration was {min(losses)}", run.log
        )
    if demo.tracked() != STEPS or STEPS not in demo.published():
        raise RunFailed(f"no checkpoint of iteration {STEPS} was published", run.log)
    newest = "the newest" if start == published[-1] else f"the tracker's; {published[-1]} was newer"
    demo.print_line(f"loaded iteration {start}, {newest} that the killed run had published")
    demo.print_line(f"trained to iteration {STEPS}: loss {losses[STEPS]:.3f}")
    return losses[STEPS]


def verify(demo: Demo) -> None:
    """Runs `datastates verify` on every published checkpoint."""
    directories, log = list(map(demo.checkpoint, demo.published())), demo.folder / "verify.log"
    command = [sys.executable, "-m", "megatron_datastates", "verify", *map(str, directories)]
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=TIMEOUT_SECONDS)
    if done.returncode:
        raise RunFailed(f"a checkpoint is faulty (exit code {done.returncode})", log)
    for directory in directories:
        demo.print_line(f"{directory.name}: good")


def resume_in_other_layout(demo: Demo, first: float, last: float) -> None:
    """Resumes as pipeline parallel 2, with the optimizer's state, and checks that the loss goes on.

    From `torch_dist`, weights only: with its default optimizer layout it cannot change TP or PP.
    """
    end = str(STEPS + STEPS_IN_OTHER_LAYOUT)
    arguments = [*PIPELINE_PARALLEL, "--load", str(demo.checkpoints), "--train-iters", end]
    # The schedule of the checkpoint: that of these arguments would end later.
    arguments += ["--use-checkpoint-opt_param-scheduler"] if demo.ckpt_format == OURS else WEIGHTS_ONLY
    with demo.start("other-layout", *arguments, "--exit-interval", str(STEPS_IN_OTHER_LAYOUT)) as run:
        run.wait(TIMEOUT_SECONDS)
    losses = run.losses()
    begin, loss = min(losses.items())
    if begin != (STEPS + 1 if demo.ckpt_format == OURS else 1):
        raise RunFailed(f"expected to go on after iteration {STEPS}, found iteration {begin} first", run.log)
    if not loss < (first + last) / 2:
        raise RunFailed(f"expected a first loss near {last}, as when saved, found {loss}", run.log)
    demo.print_line(f"loss of iteration {begin}: {loss:.3f} (untrained: {first:.3f})")


def read_saves(report: Path) -> list[dict[str, Any]]:
    """Reads the save events of a report file, without an incomplete last line that a kill may leave."""
    whole = [line for line in report.read_text().splitlines(keepends=True) if line[-1] == "\n"]
    return [event for event in map(json.loads, whole) if event["event"] == "save"]


def show_costs(demo: Demo) -> None:
    """Prints what each save cost, from the report files of both runs."""
    resumed = read_saves(demo.report("resumed"))
    published = {save["iteration"] for save in resumed if save["state"] == "published"}
    missing = {i for i in demo.published() if i > min(published, default=0)} - published
    if not published or missing:
        raise RunFailed(f"no report of the saves {sorted(missing)}", demo.report("resumed"))
    table = Table(title="What each save cost the trainer")
    for heading in ("iteration", "held ms", "of which fence ms", "bytes", "written MB/s", "state"):
        table.add_column(heading, justify="right")
    reported = [*read_saves(demo.report("killed")), *resumed]
    for save in reported:
        times = [f"{save[key]:.1f}" for key in ("held_ms", "fence_ms")]
        size, rate = f"{save['bytes']:,}", f"{save['write_mb_per_s']:.0f}"
        table.add_row(str(save["iteration"]), *times, size, rate, save["state"])
    demo.console.print(table)
    demo.print_line("the first save after each start takes longer: it allocates and plans")
    silent = sorted(set(demo.published()) - {save["iteration"] for save in reported})
    if silent:
        iterations = " and ".join(map(str, silent))
        demo.print_line(
            f"iteration {iterations} was published, but the run was killed before it could report that"
        )
    show_providers(demo, resumed[-1])
    make_page(demo)


def make_page(demo: Demo) -> None:
    """Runs `datastates report` on the reports of both runs, which leaves a page and a picture."""
    files, log = [str(demo.report(phase)) for phase in ("killed", "resumed")], demo.folder / "report.log"
    command = [sys.executable, "-m", "megatron_datastates", "report", *files, "--out", str(demo.folder)]
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=TIMEOUT_SECONDS)
    if done.returncode:
        raise RunFailed(f"`datastates report` failed (exit code {done.returncode})", log)


def remove_files(demo: Demo) -> None:
    """Removes everything but the page and the picture of the saves."""
    for path in demo.folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in PAGES:
            path.unlink()
    if not any(demo.folder.iterdir()):
        demo.folder.rmdir()


def show_providers(demo: Demo, save: dict[str, Any]) -> None:
    """Prints what one rank stored in one save, by state provider."""
    table = Table(title=f"Stored by rank {save['rank']} at iteration {save['iteration']}")
    table.add_column()
    for name in save["providers"]:
        table.add_column(name or "Megatron", justify="right")
    for field, heading in PROVIDER_FIELDS.items():
        values = (share[field] for share in save["providers"].values())
        table.add_row(heading, *(f"{value:,}" for value in values))
    demo.console.print(table)


def run_demo(demo: Demo) -> None:
    """Runs all parts in order. Raises RunFailed at the first that fails."""
    with demo.step(f"Training in {RANKS} processes (tensor parallel), then killing them"):
        first = train_and_kill(demo)
    with demo.step("Resuming from the last published checkpoint"):
        last = resume(demo)
    if demo.ckpt_format == OURS:
        with demo.step("Verifying the checkpoints"):
            verify(demo)
    with demo.step("Resuming as pipeline parallel"):
        resume_in_other_layout(demo, first, last)
    if demo.ckpt_format == OURS:
        show_costs(demo)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="examples: make demo; make demo ARGS='--keep runs/demo'",
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep all files in this new folder")
    parser.add_argument(
        "--ckpt-format",
        choices=(OURS, "torch_dist"),
        default=OURS,
        help="torch_dist, Megatron's own format, is for comparison: without verification and costs of saves",
    )
    arguments = parser.parse_args()
    if arguments.keep and arguments.keep.exists():
        if not arguments.keep.is_dir():
            parser.error(f"--keep: {arguments.keep} is not a directory")
        if any(arguments.keep.iterdir()):
            parser.error(f"--keep: {arguments.keep} is not empty: name another folder, or remove it")
    return arguments


def explain(failure: RunFailed, demo: Demo) -> None:
    """Prints the reason, the end of the log concerned, and where all files are."""
    print(f"demo: FAILED: {failure}", file=sys.stderr)
    if failure.log.is_file():
        lines = failure.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        print(f"--- the end of {failure.log}", *lines, "---", sep="\n", file=sys.stderr)
    print(f"demo: logs, reports and checkpoints are in {demo.folder}", file=sys.stderr)


def main() -> int:
    arguments = parse_arguments()
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="datastates-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    demo = Demo(folder.resolve(), arguments.ckpt_format, Console(highlight=False))
    try:
        run_demo(demo)
    except RunFailed as failure:
        explain(failure, demo)
        return 1
    except KeyboardInterrupt:
        print(f"demo: interrupted; what it made is in {demo.folder}", file=sys.stderr)
        return 130
    if not arguments.keep:
        remove_files(demo)
    for name, kind in PAGES.items():
        if (demo.folder / name).exists():
            demo.print_line(f"what each save did, and when, as a {kind}: {demo.folder / name}")
    if arguments.keep:
        demo.print_line(f"to look at its checkpoints: .venv/bin/datastates ls {demo.checkpoints}")
    else:
        demo.print_line("to keep its checkpoints, and look at them: make demo ARGS='--keep DIR'")
    demo.console.print("demo: OK")
    return 0


if __name__ == "__main__":
    sys.exit(main())
