"""README.md and docs/: links lead somewhere, commands run, code runs, and tables are up to date."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

import megatron_datastates as ds
from megatron_datastates.cli.main import app
from tests.unit import hf_models
from tests.unit.command import run

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [*sorted({*DOCS, *ROOT.glob("*.md")}), ROOT / "recipes" / "README.md"]
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


def case(*values: Any, words: list[str]) -> ParameterSet:
    """Returns a case; `preflight` in its default size takes seconds: test_terminal.py runs a small one."""
    return pytest.param(*values, marks=[pytest.mark.long] if "preflight" in words else [])


def test_the_pages_show_commands() -> None:
    assert {"ls", "verify", "convert"} <= {words[0] for _, words in SHOWN}


def examples() -> Iterator[list[str]]:
    """Returns the arguments of the commands in help texts, but of those that need more than `a_run` has."""
    for name, command in app.commands.items():
        text = (command.help or "").replace("\\\n", " ")
        for line in re.findall(r"^ *(?:Example: )?(datastates .*)", text, re.MULTILINE):
            words = shlex.split(line)[1:]
            if name not in ("args", "repair") and "--optimizer" not in words and "before.jsonl" not in words:
                yield words


@pytest.fixture
def a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current directory with small runs, a report file, a script that starts a run, a model's folder."""
    monkeypatch.chdir(tmp_path)
    state = {"embedding.word_embeddings.weight": torch.randn(8, 16), "note": "hello"}
    state["decoder.layers.mlp.linear_fc1.weight"] = torch.randn(4, 8, 4)
    state["decoder.layers.mlp.linear_fc1.layer_norm_weight"] = torch.ones(4, 8)
    for iteration in (1000, 2000):
        ds.save(state, f"runs/gpt/iter_{iteration:07d}", iteration=iteration)
    ds.save(state, "runs/gpt/non_persistent/iter_0002500", iteration=2500)
    Path("runs/gpt/latest_checkpointed_iteration.txt").write_text("2000")
    Path("runs/gpt/non_persistent/latest_checkpointed_iteration.txt").write_text("2500")
    shutil.copy(ROOT / "tests" / "unit" / "reports" / "run.jsonl", "report.jsonl")
    words = "--num-layers 2 --hidden-size 64 --num-attention-heads 2"
    words += " --vocab-size 9 --max-position-embeddings 9"
    Path("train.sh").write_text(f"torchrun pretrain_gpt.py {words}")
    llama = hf_models.arguments(hf_models.LLAMA)
    hf_models.save(Path("runs/llama/iter_0001000"), llama, hf_models.state(llama))
    Path("tokenizers/llama").mkdir(parents=True)
    Path("tokenizers/llama/tokenizer.json").write_text("{}")
    assert run("export", "runs/llama/iter_0001000", "Llama-3.1-8B", "--hf")[0] == 0


@pytest.mark.parametrize(
    ("page", "words"),
    [case(page, words, words=words) for page, words in SHOWN],
    ids=lambda value: str(value)[:60],
)
@pytest.mark.usefixtures("a_run")
def test_commands_that_are_shown_run(page: str, words: list[str]) -> None:
    code, out, err = run(*words)
    assert code == 0, f"{page}: datastates {' '.join(words)}: {out}{err}"


@pytest.mark.parametrize(
    "words", [case(words, words=words) for words in examples()], ids=lambda words: " ".join(words)[:60]
)
@pytest.mark.usefixtures("a_run")
def test_examples_of_help_run(words: list[str]) -> None:
    if words[0] == "import":
        Path("Llama-3.1-8B").rename("llama-hf")
    code, out, err = run(*words)
    assert code == 0, out + err


def named_in_table() -> list[str]:
    rows = (ROOT / "docs" / "commands.md").read_text().splitlines()
    return [match[1] for row in rows if (match := re.match(r"\| `(\w+)", row))]


def test_the_table_of_commands_has_all_of_them() -> None:
    help_text = run("--help")[1]
    listed = set(re.findall(r"^\W*(\w+)  ", help_text.partition("Commands")[2], re.MULTILINE))
    assert listed and listed == set(named_in_table())


def test_the_table_of_exit_codes_has_what_the_help_texts_say() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    row = "".join(re.findall(r"^\| 1 \| .*$", page, re.MULTILINE))
    codes = {
        name: re.search(r"; 1 (.*?); 2", command.help or "", re.DOTALL)
        for name, command in app.commands.items()
    }
    others = {name for name, code in codes.items() if code and not re.search("damaged|differ", code[1])}
    assert {"prune", "trend", "verify"} <= others
    assert (
        all(f"`{name}`" in row for name in others)
        and "`convert --all`" in row
        and "`convert --verify`" in row
    )


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
def test_a_new_process_resumes_as_the_page_says() -> None:
    text = (ROOT / "docs" / "programs.md").read_text().partition("A new process resumes")[2]
    code = text.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(_TRAIN, names)
    names["train"](1)
    state = {"model": names["model"].state_dict(), "optimizer": names["optimizer"].state_dict(), "step": 7}
    ds.save(state, "ckpt/step_7")
    names["train"](2)
    resume = f"import megatron_datastates as ds\n{_TRAIN}\n{code}\ntrain(2)\nprint(step, *values())"
    done = subprocess.run([sys.executable, "-c", resume], capture_output=True, text=True)
    assert done.stdout.split() == ["7", *map(str, names["values"]())], done.stderr


_TRAIN = """
import torch
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).pow(2).sum().backward()
        optimizer.step()
def values():
    return [value for one in model.parameters() for value in one.flatten().tolist()]
"""


@pytest.mark.usefixtures("a_run")
def test_the_code_on_state_providers_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "providers.md").read_text(), re.DOTALL)
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 5 and Path("ckpt/step_10/datastates.manifest").exists()


def results_table(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "results_table.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_readme_shows_what_the_result_files_say() -> None:
    checked = results_table("--check")
    assert checked.returncode == 0, checked.stderr


def test_a_result_that_changed_is_missing_in_the_readme(tmp_path: Path) -> None:
    page, results = tmp_path / "README.md", tmp_path / "results"
    shutil.copytree(ROOT / "benchmarks" / "results", results)
    shutil.copy(ROOT / "README.md", page)
    measured = json.loads((results / "engine.json").read_text())
    measured["write"]["gb_per_s"]["datastates"] = 1.234
    measured["write"]["gb_per_s"]["threads 1 MiB x 8"] = 5.0
    measured["write"]["best_of_the_disk"] = "threads 1 MiB x 8"
    measured["machine"]["cpu"] = "A processor"
    (results / "engine.json").write_text(json.dumps(measured))
    where = ("--page", page, "--results", results)

    checked = results_table("--check", *where)
    assert checked.returncode == 1 and "run tools/results_table.py" in checked.stderr
    assert results_table(*where).returncode == 0
    assert "1.23 GB/s |  | 5.00 GB/s (without fio) |" in page.read_text()
    assert "A processor, 2 cores" in page.read_text()
    assert results_table("--check", *where).returncode == 0


def pictures(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "pictures.py"), "--check", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_every_command_has_a_picture_of_a_command_line_that_still_runs() -> None:
    checked = pictures()
    assert checked.returncode == 0, checked.stderr
    for path in (ROOT / "docs" / "pictures").iterdir():
        assert path.stat().st_size < (100_000 if path.suffix == ".png" else 8_000), path
        assert path.suffix == ".png" or not re.search(r"/(tmp|home|root|work)\b", path.read_text()), path


def test_pictures_that_are_out_of_date_are_named(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ROOT / "docs" / "pictures", tmp_path / "pictures"))
    (folder / "ls.svg").unlink()
    for command, before, after in (
        ("verify", "--all", "--every"),
        ("plan", "plan --params", "guess --params"),
        ("options", "--datastates-lazy", "--datastates-crazy"),
    ):
        path = folder / f"{command}.svg"
        path.write_text(path.read_text().replace(before, after))
    checked = pictures("--folder", folder)
    assert checked.returncode == 1
    assert "ls.svg is missing: run tools/pictures.py" in checked.stderr
    assert "which is refused: No such option '--every'" in checked.stderr
    assert "which is refused: there is no command 'guess'" in checked.stderr
    assert "options.svg shows other lines than 'datastates options' prints" in checked.stderr


def test_results_of_peers_and_of_training_get_rows(tmp_path: Path) -> None:
    page, results = tmp_path / "README.md", tmp_path / "results"
    results.mkdir()
    shutil.copy(ROOT / "README.md", page)
    machine = json.loads((ROOT / "benchmarks" / "results" / "engine.json").read_text())["machine"]
    held = {"datastates": 21.0, "datastates async": 4.4, "torch_dist": 900, "torch_dist async, fork": 310}
    held["torch_dist async, worker"] = 9  # which returned other bits
    peers = {
        "date": "2027-01-02",
        "bytes": 2 << 30,
        "tensors": 3084,
        "contenders": {name: {"held_ms": value, "exact": value != 9} for name, value in held.items()},
    }
    blocked = {"datastates async, every 1": 14.6, "torch_dist async, every 1": 769}
    blocked["datastates async, every 10"] = 13.2
    training = {
        "date": "2027-01-03",
        "iterations": 20,
        "cases": {
            name: {"blocked_ms_per_save": value, "checkpoint_bytes": 404_600_000, "end_to_end_s": value}
            for name, value in blocked.items()
        }
        | {"no checkpoints": {"end_to_end_s": 12.34}},
    }
    for name, part, found in (
        ("peers", "disk, 1 rank", peers),
        ("training-one-rank", "large, DP 1", training),
    ):
        content = {"machine": machine, "parts": {part: found}}
        (results / f"{name}.json").write_text(json.dumps(content))

    assert results_table("--page", page, "--results", results).returncode == 0
    text = page.read_text()
    assert "| trainer held by a synchronous save of 2.00 GiB in 3,084 tensors | 21 ms | 900 ms |" in text
    assert "| trainer held by an asynchronous save of the same | 4 ms | 310 ms |" in text
    what = "Megatron's loop held by an asynchronous save of 405 MB in every iteration, one rank"
    assert f"| {what} (`torch_dist`: forking) | 15 ms | 769 ms |" in text
    assert "20 iterations end to end (12.3 s without saves) | 14.6 s | 769.0 s |" in text
    assert "with a save every 10 iterations (12.3 s without saves) | 13.2 s |  |" in text
    assert "2027-01-02\n" in text and "2027-01-03\n" in text
    assert "- versions where a file names no other: torch 2.11.0, " in text


def test_a_result_of_other_versions_names_them(tmp_path: Path) -> None:
    page, results = tmp_path / "README.md", tmp_path / "results"
    shutil.copytree(ROOT / "benchmarks" / "results", results)
    shutil.copy(ROOT / "README.md", page)
    measured = json.loads((results / "load.json").read_text())
    measured["machine"]["packages"] |= {"torch": "2.98.0", "peer": "1.0"}
    (results / "load.json").write_text(json.dumps(measured))

    assert results_table("--page", page, "--results", results).returncode == 0
    sources = [line for line in page.read_text().splitlines() if line.startswith("- ")]
    assert [line.endswith("; torch 2.98.0, peer 1.0") for line in sources if "load.json" in line] == [True]
    assert [line for line in sources if "torch 2.11.0" in line and "no other" not in line] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_asynchronous_saves_of_torch_dist_are_named_with_the_worker_that_they_need(page: Path) -> None:
    """Without it, Megatron-Core 0.19 saves synchronously, and a comparison would be unfair."""
    for command in re.findall(r"`[^`]*--ckpt-format torch_dist[^`]*--async-save[^`]*`", page.read_text()):
        assert "--use-persistent-ckpt-worker" in command
