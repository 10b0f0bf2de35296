"""Makes the pictures of docs/pictures: what each command prints in a terminal of 80 columns.

    tools/pictures.py            # trains a tiny run on the CPU for that (a minute), and replaces all pictures
    tools/pictures.py --check    # says which pictures are missing or show a command line that is refused, and
                                 # whether what needs no run still prints what they show

A picture is an SVG file of a few kB, text and nothing else: its title is the command line.
"""

from __future__ import annotations

import argparse
import html
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from click import Command, Context

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
PAGE = ROOT / "docs" / "commands.md"
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

LAYERS = "--keys 'decoder.*' --keys 'embedding*'"
PICTURES = {  # in the order in which they are run
    "ls": "ls runs/gpt",
    "show": "show runs/gpt",
    "args": "args runs/gpt/iter_0000010 runs/gpt/iter_0000040",
    "cat": "cat runs/gpt decoder.layers.3.self_attention.linear_qkv.weight 0:3,0:6",
    "verify": "verify --all runs/gpt",
    "repair": "repair torn/iter_0000040",
    "diff": f"diff runs/gpt/iter_0000010 runs/gpt/iter_0000040 {LAYERS} --plot diff.png",
    "trend": f"trend runs/gpt {LAYERS} --plot trend.png",
    "convert": "convert runs/gpt/iter_0000040 runs/converted --to torch_dist",
    "export": "export runs/gpt llama --hf --vocab-size 127",
    "import": "import llama runs/tuned",
    "prune": "prune runs/gpt --keep-last 2 --yes",
    "plan": "plan --params 70B --tp 8 --pp 4 --dp 8 --rate 10GB/s",
    "preflight": "preflight runs/gpt",
    "report": "report report.jsonl",
    "options": "options",
}
WITHOUT_A_RUN = ("plan", "options")
PLOTS = ("diff.png", "trend.png")
TRAINING = (
    "--num-layers 4 --hidden-size 64 --normalization RMSNorm --swiglu --disable-bias-linear "
    "--tensor-model-parallel-size 2 --train-iters 40 --lr 3e-3 --lr-decay-iters 40 --save runs/gpt "
    "--save-interval 10 --ckpt-format datastates --async-save --datastates-report-file report.jsonl"
)
TIMEOUT_SECONDS = 500.0
COLUMNS, MOST_LINES = 80, 34
# Sizes in pixels: a character of a monospaced font of this size, and a line of it.
FONT, CHARACTER, LINE, MARGIN = 13, 7.82, 17, 12
TITLE = re.compile("<title>(.*)</title>")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the pictures of commands, or check them.")
    parser.add_argument("--check", action="store_true", help="only say which pictures are out of date")
    parser.add_argument("--folder", type=lambda text: Path(text).resolve(), default=FOLDER)
    chosen = parser.parse_args()
    if not chosen.check:
        make(chosen.folder)
    faults = list(check(chosen.folder))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


# -- making -------------------------------------------------------------------------------------------------


def make(folder: Path) -> None:
    """Trains a run in a temporary directory, runs all commands there, and writes their pictures."""
    from tests.support.terminal import in_terminal

    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        train(place)
        for command, words in PICTURES.items():
            code, lines = in_terminal(words, place)
            if code == 2:
                raise SystemExit(f"datastates {words} failed: {lines}")
            (folder / f"{command}.svg").write_text(drawn(words, lines), encoding="utf-8")
        for plot in PLOTS:
            shutil.copy(place / plot, folder / plot)


def train(place: Path) -> None:
    """Leaves a run, its report, and a checkpoint without a manifest in `place`."""
    from launcher import Run

    os.chdir(place)
    (place / "runs").mkdir()
    with Run(TRAINING.split(), ranks=2, log=place / "log") as run:
        run.wait(TIMEOUT_SECONDS)
    shutil.copytree(place / "runs" / "gpt" / "iter_0000040", place / "torn" / "iter_0000040")
    (place / "torn" / "iter_0000040" / "datastates.manifest").unlink()


def drawn(words: str, lines: list[str]) -> str:
    """Returns an SVG picture of a command line and what it printed; of a long text, the beginning."""
    rows = [row for line in lines for row in folded(line)]
    while rows and not rows[-1]:
        rows.pop()
    left_out = len(rows) - MOST_LINES
    if left_out > 0:
        rows = [*rows[: MOST_LINES - 1], f"(and {left_out + 1} more lines)"]
    rows = [row for line in [f"$ datastates {words}"] for row in folded(line)] + rows
    width, height = round(COLUMNS * CHARACTER) + 2 * MARGIN, LINE * len(rows) + 2 * MARGIN
    texts = "\n".join(
        f'<text x="{MARGIN}" y="{MARGIN + LINE * (n + 1) - 5}" textLength="{len(row) * CHARACTER:.1f}">'
        f"{html.escape(row)}</text>"
        for n, row in enumerate(rows)
        if row
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">\n'
        f"<title>{html.escape('datastates ' + words)}</title>\n"
        f'<rect width="{width}" height="{height}" rx="6" fill="#f6f8fa" stroke="#d0d7de"/>\n'
        f'<g font-family="ui-monospace, Menlo, Consolas, monospace" font-size="{FONT}" fill="#1f2328" '
        f'xml:space="preserve" style="white-space: pre">\n{texts}\n</g>\n</svg>\n'
    )


def folded(line: str) -> list[str]:
    """Cuts a line where a terminal would."""
    return [line[at : at + COLUMNS] for at in range(0, len(line), COLUMNS)] or [""]


# -- checking -----------------------------------------------------------------------------------------------


def check(folder: Path) -> Iterator[str]:
    """Yields what is wrong: pictures that lack, that show another command line, or one that is refused."""
    from megatron_datastates.cli.main import app

    page = PAGE.read_text(encoding="utf-8")
    for command in sorted(set(app.commands) | set(PICTURES)):
        path = folder / f"{command}.svg"
        if command not in PICTURES:
            yield f"PICTURES has no command line for `datastates {command}`: add one, and make the pictures"
            continue
        if f"(pictures/{command}.svg)" not in page:
            yield f"{PAGE.name} does not show pictures/{command}.svg"
        if not path.is_file():
            yield f"{path} is missing: run tools/pictures.py"
            continue
        found = TITLE.search(path.read_text(encoding="utf-8"))
        words = html.unescape(found[1]) if found else ""
        if words != f"datastates {PICTURES[command]}":
            yield f"{path} shows {words!r}, expected 'datastates {PICTURES[command]}': run tools/pictures.py"
        why = refused(app.commands, shlex.split(words)[1:])
        if why:
            yield f"{path} shows {words!r}, which is refused: {why}"
        elif command in WITHOUT_A_RUN and not is_current(command, path):
            yield f"{path} shows other lines than {words!r} prints: run tools/pictures.py"


def is_current(command: str, path: Path) -> bool:
    """Returns whether the command still prints what its picture shows."""
    from tests.support.terminal import in_terminal

    _, lines = in_terminal(PICTURES[command], ROOT)
    return drawn(PICTURES[command], lines) == path.read_text(encoding="utf-8")


def refused(commands: Mapping[str, Command], words: list[str]) -> str:
    """Returns why the command line would be refused, without running it; empty if it would not."""
    name, *rest = words or [""]
    command = commands.get(name)
    if command is None:
        return f"there is no command {name!r}"
    try:
        command.make_parser(Context(command)).parse_args(list(rest))
    except Exception as error:
        return str(error)
    return ""


if __name__ == "__main__":
    raise SystemExit(main())
