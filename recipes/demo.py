"""Shows on one machine, without a GPU, what `--ckpt-format datastates` does for a training run.

Trains a tiny GPT in two processes with asynchronous saves, kills all of it in mid-training, resumes
from the last committed checkpoint, verifies the checkpoints, loads the weights into another
parallel layout, and prints what each save cost the trainer. Takes one or two minutes. The last line
is `demo: OK`; on any failure it tells the reason, ends with another exit code than 0, and leaves
its files for you to look at.
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
MODEL = ["--num-layers", "4", "--hidden-size", "256", "--train-iters", str(STEPS)]
SCHEDULE = ["--lr", "3e-3", "--lr-decay-iters", str(STEPS), "--step-delay-ms", "25"]
TENSOR_PARALLEL = ["--tensor-model-parallel-size", str(RANKS)]
PIPELINE_PARALLEL = ["--pipeline-model-parallel-size", str(RANKS)]
WEIGHTS_ONLY = ["--finetune", "--no-load-optim", "--no-load-rng"]


@dataclass(frozen=True)
class Demo:
    """Where the demo keeps its files, and which format it saves in."""

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
        """Iterations with a committed checkpoint: for our format, those that hold a manifest."""
        mark = "datastates.manifest" if self.ckpt_format == OURS else "metadata.json"
        return sorted(int(path.parent.name[5:]) for path in self.checkpoints.glob(f"iter_*/{mark}"))

    def tracked(self) -> int:
        """The iteration that Megatron's tracker names, 0 if it names none."""
        tracker = self.checkpoints / "latest_checkpointed_iteration.txt"
        text = tracker.read_text() if tracker.exists() else ""
        return int(text) if text else 0

    def start(self, phase: str, *arguments: str) -> Run:
        log = self.folder / f"{phase}.log"
        return Run([*MODEL, *SCHEDULE, *arguments], ranks=RANKS, log=log)

    def saving(self, phase: str) -> list[str]:
        """The arguments of a run that saves as it trains."""
        where = ["--save", str(self.checkpoints), "--save-interval", str(SAVE_INTERVAL)]
        how = ["--ckpt-format", self.ckpt_format]
        if self.ckpt_format == OURS:
            how += ["--async-save", "--datastates-report-file", str(self.report(phase))]
        return [*where, *how]

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Announces a part of the demo; on a terminal, with a sign of life."""
        self.console.print(f"[bold]{title}[/bold]")
        if self.console.is_terminal:
            with self.console.status(title):
                yield
        else:
            yield

    def tell(self, line: str) -> None:
        self.console.print(f"    {line}", markup=False, soft_wrap=True)


def train_and_kill(demo: Demo) -> float:
    """Kills a run that trains on after its second checkpoint was committed; its first loss."""
    with demo.start("killed", *TENSOR_PARALLEL, *demo.saving("killed")) as run:
        second = 2 * SAVE_INTERVAL
        run.wait_until(lambda: demo.tracked() >= second, "its second checkpoint", TIMEOUT_SECONDS)
        run.wait_until(lambda: max(run.losses()) > second + 2, "more iterations", TIMEOUT_SECONDS)
        killed = run.kill()
    losses = run.losses()
    if not killed or max(losses) >= STEPS:
        raise RunFailed("training was over before it could be killed", run.log)
    demo.tell(f"sent SIGKILL to all {killed} processes after iteration {max(losses)} of {STEPS}")
    demo.tell(f"committed checkpoints: {demo.published()}; the tracker names {demo.tracked()}")
    return losses[1]


def resume(demo: Demo) -> float:
    """Resumes where the tracker points and trains to the end; the last loss."""
    start, committed = demo.tracked(), demo.published()
    if start not in committed:
        raise RunFailed(f"the tracker names {start}, which is not committed", demo.checkpoints)
    with demo.start(
        "resumed", *TENSOR_PARALLEL, *demo.saving("resumed"), "--load", str(demo.checkpoints)
    ) as run:
        run.wait(TIMEOUT_SECONDS)
    losses = run.losses()
    if f"at iteration {start}" not in run.text() or min(losses) != start + 1:
        raise RunFailed(f"did not resume from iteration {start} but at {min(losses)}", run.log)
    if demo.tracked() != STEPS or STEPS not in demo.published():
        raise RunFailed(f"no checkpoint of iteration {STEPS} was committed", run.log)
    newest = "the newest" if start == committed[-1] else f"the tracker's; {committed[-1]} was newer"
    demo.tell(f"loaded iteration {start}, {newest} that the killed run had committed")
    demo.tell(f"trained to iteration {STEPS}: loss {losses[STEPS]:.3f}")
    return losses[STEPS]


def verify(demo: Demo) -> None:
    """Has every committed checkpoint read and checked by the command-line tool."""
    for iteration in demo.published():
        directory, log = demo.checkpoint(iteration), demo.folder / f"verify-{iteration}.log"
        command = [sys.executable, "-m", "megatron_datastates", "verify", str(directory)]
        with log.open("w") as output:
            done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=TIMEOUT_SECONDS)
        if done.returncode:
            raise RunFailed(f"{directory} is not sound (exit code {done.returncode})", log)
        demo.tell(f"{directory.name}: sound")


def load_other_layout(demo: Demo, first: float, last: float) -> None:
    """Loads the weights as pipeline parallel 2: the loss has to be the trained one from the start.

    Only weights: the default optimizer layout (`dp_reshardable`) does not change TP or PP.
    """
    arguments = [*PIPELINE_PARALLEL, *WEIGHTS_ONLY, "--load", str(demo.checkpoints)]
    with demo.start("other-layout", *arguments, "--exit-interval", str(STEPS_IN_OTHER_LAYOUT)) as run:
        run.wait(TIMEOUT_SECONDS)
    loss = run.losses()[1]
    if not loss < (first + last) / 2:
        raise RunFailed(f"starts at loss {loss}; it was {last} when saved", run.log)
    demo.tell(f"loss of the first iteration: {loss:.3f} (untrained it was {first:.3f})")


def read_saves(report: Path) -> list[dict[str, Any]]:
    """The save events of a report file. A killed run may leave half a last line: no event."""
    whole = [line for line in report.read_text().splitlines(keepends=True) if line[-1] == "\n"]
    return [event for event in map(json.loads, whole) if event["event"] == "save"]


def show_costs(demo: Demo) -> None:
    """What each save cost, from the report files of both runs."""
    resumed = read_saves(demo.report("resumed"))
    published = {save["iteration"] for save in resumed if save["state"] == "published"}
    missing = {i for i in demo.published() if i > min(published, default=0)} - published
    if not published or missing:
        raise RunFailed(f"no report of the saves {sorted(missing)}", demo.report("resumed"))
    table = Table(title="What each save cost the trainer")
    for heading in ("iteration", "held ms", "of it fence ms", "bytes", "written MB/s", "state"):
        table.add_column(heading, justify="right")
    for save in [*read_saves(demo.report("killed")), *resumed]:
        times = [f"{save[key]:.1f}" for key in ("held_ms", "fence_ms")]
        size, rate = f"{save['bytes']:,}", f"{save['write_mb_per_s']:.0f}"
        table.add_row(str(save["iteration"]), *times, size, rate, save["state"])
    demo.console.print(table)


def run_demo(demo: Demo) -> None:
    """All parts in order; RunFailed from the first that goes wrong."""
    with demo.step(f"Training in {RANKS} processes (tensor parallel), to be killed half way"):
        first = train_and_kill(demo)
    with demo.step("Resuming from the last committed checkpoint"):
        last = resume(demo)
    if demo.ckpt_format == OURS:
        with demo.step("Verifying what was written"):
            verify(demo)
    with demo.step("Loading the weights as pipeline parallel"):
        load_other_layout(demo, first, last)
    if demo.ckpt_format == OURS:
        show_costs(demo)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep all files in this new folder")
    parser.add_argument(
        "--ckpt-format",
        choices=(OURS, "torch_dist"),
        default=OURS,
        help="torch_dist: Megatron's own format, to compare with; it shows less",
    )
    arguments = parser.parse_args()
    if arguments.keep and arguments.keep.exists() and any(arguments.keep.iterdir()):
        parser.error(f"--keep: {arguments.keep} is not empty")
    return arguments


def explain(failure: RunFailed, demo: Demo) -> None:
    """The reason, the end of the log concerned, and where everything is."""
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
    if arguments.keep:
        demo.tell(f"files: {demo.folder}")
    else:
        shutil.rmtree(demo.folder)
    demo.console.print("demo: OK")
    return 0


if __name__ == "__main__":
    sys.exit(main())
