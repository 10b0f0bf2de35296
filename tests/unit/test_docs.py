"""README.md and docs/: links lead somewhere, commands run, code runs, and tables are up to date."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import megatron_datastates as ds
from tests.unit.command import run

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*DOCS, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", ROOT / "recipes" / "README.md"]
NAMES = {"DIR": "runs/gpt", "RUN": "runs/gpt", "CHECKPOINT": "runs/gpt/iter_0001000", "OUT": "converted/out"}


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in links:
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}, which is not there"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}: no such heading"


def commands(page: Path) -> Iterator[list[str]]:
    """Returns the arguments of each `datastates` command on a page, with names for its placeholders."""
    for line in page.read_text().splitlines():
        if line.startswith("    datastates "):
            words = shlex.split(line, comments=True)[1:]
            for name, value in NAMES.items():
                words = [re.sub(rf"^{name}\b", value, word) for word in words]
            yield words


SHOWN = [(page.name, words) for page in DOCS for words in commands(page)]


def test_the_pages_show_commands() -> None:
    assert {"ls", "verify", "convert"} <= {words[0] for _, words in SHOWN}


@pytest.fixture
def a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current directory with a small run in runs/gpt, a report file, and a script that starts a run."""
    monkeypatch.chdir(tmp_path)
    state = {"embedding.word_embeddings.weight": torch.randn(8, 16), "note": "hello"}
    for iteration in (1000, 2000):
        ds.save(state, f"runs/gpt/iter_{iteration:07d}", iteration=iteration)
    Path("runs/gpt/latest_checkpointed_iteration.txt").write_text("2000")
    shutil.copy(ROOT / "tests" / "unit" / "reports" / "run.jsonl", "report.jsonl")
    words = "--num-layers 2 --hidden-size 64 --num-attention-heads 2"
    words += " --vocab-size 9 --max-position-embeddings 9"
    Path("train.sh").write_text(f"torchrun pretrain_gpt.py {words}")


@pytest.mark.parametrize(("page", "words"), SHOWN, ids=lambda value: str(value)[:60])
@pytest.mark.usefixtures("a_run")
def test_commands_that_are_shown_run(page: str, words: list[str]) -> None:
    code, out, err = run(*words)
    assert code == 0, f"{page}: datastates {' '.join(words)}: {out}{err}"


def named_in_table() -> list[str]:
    rows = (ROOT / "docs" / "commands.md").read_text().splitlines()
    return [match[1] for row in rows if (match := re.match(r"\| `(\w+)", row))]


def test_the_table_of_commands_has_all_of_them() -> None:
    help_text = run("--help")[1]
    listed = set(re.findall(r"^\W*(\w+)  ", help_text.partition("Commands")[2], re.MULTILINE))
    assert listed and listed == set(named_in_table())


def test_the_table_of_options_is_up_to_date() -> None:
    assert run("options", "--markdown")[1] in (ROOT / "docs" / "options.md").read_text()


@pytest.mark.usefixtures("a_run")
def test_the_program_without_megatron_runs() -> None:
    text = (ROOT / "docs" / "programs.md").read_text().partition("## Without Megatron")[2]
    code = text.partition("```python\n")[2].partition("```")[0]
    model = torch.nn.Sequential(torch.nn.Linear(16, 8))
    optimizer = torch.optim.SGD(model.parameters())
    names = {"ds": ds, "model": model, "optimizer": optimizer}
    exec(code, names)
    assert names["everything"]["step"] == 7
    assert names["report"]["state"] == "published"


@pytest.mark.usefixtures("a_run")
def test_the_code_on_state_providers_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "providers.md").read_text(), re.DOTALL)
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 5 and Path("ckpt/step_10/datastates.manifest").exists()
