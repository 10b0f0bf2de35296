"""Kills a training that saves in each iteration, whose ranks see one directory through different mounts.

    python tests/filesystem/two_mounts.py DIR DIR2

DIR and DIR2 are mounts of one directory of one file system, as two nodes have it: what one client of it has
cached, the other may have changed. Each kill is followed by a resume. At the end, all checkpoints are
verified, and the last one is compared with that of a run that saved to a local disk and was never killed.
Needs root, for mounts that only a rank sees.
"""

import argparse
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "recipes"))

from launcher import Run, RunFailed  # noqa: E402

KILLS, EVERY, PATIENCE_SECONDS = 4, 6, 300.0
STEPS = (KILLS + 1) * EVERY
HOW = ["--ckpt-format", "datastates", "--async-save", "--save-interval", "1", "--step-delay-ms", "100"]
HOW += ["--train-iters", str(STEPS), "--lr-decay-iters", str(STEPS)]


def tracked(checkpoints: Path) -> int:
    """Returns the iteration that the tracker names, 0 if it names none."""
    try:
        return int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    except (OSError, ValueError):
        return 0


def is_tracked(checkpoints: Path, iteration: int) -> bool:
    return tracked(checkpoints) >= iteration


def datastates(*arguments: object) -> None:
    """Runs a command, which must succeed, and prints its last line."""
    command = [str(Path(sys.executable).with_name("datastates")), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print("  " + (done.stdout.splitlines() or [""])[-1], flush=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")


def train(root: Path, log: Path) -> Run:
    """Starts a run on two ranks, which resumes if it can."""
    return Run(
        [*HOW, "--save", str(root), "--load", str(root)], ranks=2, log=log, runner=HERE / "own_mount.py"
    )


def check(first: Path, second: Path, work: Path) -> None:
    """Does what the module describes; raises SystemExit or RunFailed if anything is wrong."""
    seen_at = work / "seen"
    seen_at.mkdir()
    os.environ.update(MOUNTS=f"{first}:{second}", SEEN_AT=str(seen_at))
    checkpoints = first / "two_mounts"
    shutil.rmtree(checkpoints, ignore_errors=True)
    for number in range(KILLS):
        with train(seen_at / checkpoints.name, work / f"killed-{number}.log") as run:
            has_saved = functools.partial(is_tracked, checkpoints, (number + 1) * EVERY)
            run.wait_until(has_saved, f"iteration {(number + 1) * EVERY}", PATIENCE_SECONDS)
            run.kill()
        print(f"killed; the tracker names iteration {tracked(checkpoints)}", flush=True)
        datastates("verify", second / checkpoints.name)
    with train(seen_at / checkpoints.name, work / "last.log") as run:
        run.wait(PATIENCE_SECONDS)
    print("trained to the end", flush=True)
    datastates("verify", "--all", checkpoints)
    with Run([*HOW, "--save", str(work / "reference")], ranks=2, log=work / "reference.log") as run:
        run.wait(PATIENCE_SECONDS)
    last = f"iter_{STEPS:07d}"
    datastates("diff", checkpoints / last, work / "reference" / last)
    shutil.rmtree(checkpoints)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directories", type=Path, nargs=2, metavar="DIR", help="two mounts of one directory")
    paths = [path.resolve(strict=True) for path in parser.parse_args().directories]
    with tempfile.TemporaryDirectory() as folder:
        try:
            check(*paths, Path(folder))
        except RunFailed as failure:
            raise SystemExit(f"{failure.log.read_text()[-5000:]}\n{failure}") from failure
