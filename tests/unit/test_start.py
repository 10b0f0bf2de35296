"""The command line starts without torch: help, errors of usage, listings, arguments, completion."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from megatron_datastates.cli.shared import argument
from tests.unit.command import run
from tests.unit.inspecting import output_of
from tests.unit.trained import save_trained

COMMANDS = (
    "args", "cat", "convert", "diff", "export", "import", "ls", "options", "plan", "prune", "repair",
    "report", "show", "trend", "verify",
)  # fmt: skip
GOLDEN = Path(__file__).parents[1] / "golden" / "megatron-0.19"
# Runs several command lines in one process, and prints which of the named modules were imported.
PROGRAM = """
import sys
from megatron_datastates.cli.entry import main
heavy, *lines = sys.argv[1:]
for line in lines:
    sys.argv = ["datastates", *line.split()]
    try:
        main()
    except SystemExit as error:
        print("exit", error.code)
print("imported", sorted(set(heavy.split()) & sys.modules.keys()))
"""


FRAMEWORKS = "typer pydantic rich"  # any of them would take longer than a command


def imported_by(heavy: str, *lines: str) -> tuple[str, str]:
    """Returns what the command lines print, and which modules of `heavy` they have imported."""
    command = [sys.executable, "-c", PROGRAM, heavy, *lines]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    text, _, found = done.stdout.rpartition("imported ")
    return text, found.strip()


def test_without_the_native_module_commands_end_with_one_line_that_says_how_to_build_it(tmp_path):
    """Exit code 1 would say that the checkpoint is damaged."""
    one = tmp_path / "iter_0000001"
    shutil.copytree(GOLDEN, one)
    lines = [
        *(f"ls {tmp_path}", f"verify {one}", f"repair {one}", f"trend {tmp_path}"),
        *(f"prune {tmp_path} --keep-last 1", f"show {one}", f"cat {one} x", f"diff {one} {one}"),
        *(f"convert {one} {tmp_path / 'out'}", f"export {one} {tmp_path / 'out.safetensors'}"),
    ]
    program = f"import sys; sys.modules['megatron_datastates.engine._native'] = None\n{PROGRAM}"
    command = [sys.executable, "-c", program, "", *lines]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[:-1] == ["exit 2"] * len(lines)
    printed = done.stderr.splitlines()
    assert len(printed) == len(lines)
    for line in printed:
        assert line.startswith(
            "datastates: the native module of megatron_datastates is not built, or not for"
        )
        assert "`make env`" in line and "`pip install .`" in line


@pytest.mark.parametrize(
    ("raised", "printed"),
    [
        ('RuntimeError("can\'t start new thread")', "datastates: can't start new thread: raise "),
        ("MemoryError", "datastates: there is not enough memory: "),
        ('RuntimeError("DefaultCPUAllocator: can\'t allocate")', "datastates: there is not enough memory: "),
        ('ImportError("libtorch_cpu.so: failed to map segment")', "Traceback (most recent call last):\n"),
    ],
)
def test_an_error_that_no_command_expects_does_not_end_with_the_code_of_damage(tmp_path, raised, printed):
    program = (
        "import sys; from megatron_datastates.cli import entry, listing\n"
        f"def refused(*arguments): raise {raised}\n"
        "listing.require_directory = refused\n"
        f"sys.argv = ['datastates', 'ls', {str(tmp_path)!r}]; entry.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(printed), done.stderr


def test_where_python_does_not_read_names_as_utf8_the_error_says_so():
    environment = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "POSIX"}
    command = [sys.executable, "-m", "megatron_datastates", "show", "/none/mod\u00e8le"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    text = "Python reads names as ascii here, expected utf-8: set PYTHONUTF8=1"
    assert (done.returncode, done.stdout) == (2, "") and text in done.stderr, done.stderr


def test_help_usage_errors_and_the_version_import_neither_torch_nor_numpy():
    lines = ["--help", "-h", "--version", "nonsense", "ls", "show --jsn x", "convert a b --ranks 0"]
    lines += [f"{command} --help" for command in COMMANDS]
    text, found = imported_by(
        f"{FRAMEWORKS} torch numpy matplotlib megatron_datastates.engine._native", *lines
    )
    assert found == "[]"
    assert "datastates 0." in text
    assert all(f"Usage: datastates {command}" in text for command in COMMANDS)
    assert text.count("exit 2") == 4


def test_a_listing_imports_neither_torch_nor_numpy(root: Path, by_dcp: Path):
    text, found = imported_by("torch numpy", f"ls {root}", f"ls {by_dcp.parent}")
    assert found == "[]" and "torch_dist" in text and "datastates" in text


def test_a_directory_that_is_missing_is_said_without_torch(tmp_path: Path):
    missing = tmp_path / "none"
    lines = [f"{command} {missing}" for command in ("show", "args", "verify", "repair", "ls")]
    lines += [
        f"{command} {missing} {tmp_path}/x" for command in ("cat", "convert", "export", "diff", "import")
    ]
    text, found = imported_by("torch", *lines)
    assert found == "[]" and text.count("exit 2") == 10


OURS = "megatron_datastates.convert.sources.datastates megatron_datastates.pipeline.loading.load"
THEIRS = "megatron_datastates.convert.sources.torch_dist megatron_datastates.convert.sources.archives"
SELDOM = (
    "megatron_datastates.convert.statistics megatron_datastates.pipeline.loading.optimizer numpy.ma torch"
)


@pytest.mark.parametrize(("format", "other"), [("datastates", THEIRS), ("torch_dist", OURS)])
def test_show_and_args_import_one_format_and_no_torch(format: str, other: str, tmp_path: Path):
    save_trained(tmp_path / "one", format)
    save_trained(tmp_path / "two", format)
    lines = [f"show {tmp_path}/one", f"show {tmp_path}/one decoder.layers.1.*", f"show {tmp_path}/one --json"]
    text, found = imported_by(f"{FRAMEWORKS} {SELDOM} {other}", *lines, f"args {tmp_path}/one {tmp_path}/two")
    assert found == "[]" and text.count("exit 0") == 4, text
    assert "decoder.layers.1.mlp" in text and "0 arguments of 14 differ" in text


def test_a_command_imports_no_other_commands(root: Path):
    others = {name: f"megatron_datastates.cli.{name}" for name in ("args", "listing", "plan", "convert")}
    text, found = imported_by(" ".join(others.values()), f"show {root}/iter_0000005")
    assert found == "[]" and "exit 0" in text
    text, found = imported_by(" ".join(others.values()), f"ls {root}")
    assert found == str([others["listing"]])


def test_what_is_no_checkpoint_is_said_before_formats_are_imported(tmp_path: Path):
    lines = [f"{command} {tmp_path}/none" for command in ("show", "args", "ls")]
    text, found = imported_by(f"numpy {OURS} {THEIRS}", *lines)
    assert found == "[]" and text.count("exit 2") == 3


@pytest.mark.parametrize("line", ["verify {at}", "cat {at} a", "show {at} --stats", "convert {at} {at}-2"])
@pytest.mark.parametrize("lacking", ["torch", "numpy"])
def test_a_package_that_is_not_installed_is_one_line(line: str, lacking: str, root: Path, tmp_path: Path):
    (tmp_path / f"{lacking}.py").write_text(f"raise ModuleNotFoundError(name={lacking!r})")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = line.format(at=root / "iter_0000005").split()
    done = subprocess.run(
        [sys.executable, "-m", "megatron_datastates", *words],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    said = f"datastates {words[0]} needs {lacking}, which is not installed here: pip install {lacking}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("datastates re", ["plain,repair", "plain,report"]),
        ("datastates show --o", ["plain,--optimizer"]),
        ("datastates import msc://nowhere/llama --t", ["plain,--to", "plain,--transformer-impl"]),
        ("datastates export a b --dtype f", ["plain,float32", "plain,float16"]),
        ("datastates ls ru", ["file,ru"]),
    ],
)
def test_completion_imports_no_torch(line: str, completed: list[str], tmp_path: Path):
    """As bash calls it: with a torch that cannot be imported."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    words = {"_DATASTATES_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    code = "import sys; sys.argv = ['datastates']\nfrom megatron_datastates.cli.entry import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | words | {"PYTHONPATH": path},
    )
    assert (done.stdout.split(), done.stderr) == (completed, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_completion_calls_the_command(shell: str):
    text = output_of("--show-completion", shell)
    assert f"_DATASTATES_COMPLETE={shell}_complete" in text and "datastates" in text


def test_summaries_are_whole_and_fit_80_columns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    for words in ([], *([command] for command in COMMANDS)):
        text = output_of(*words, "--help")
        assert text == output_of(*words, "-h")
        # An example may be longer: a line that is copied must be whole.
        lines = [
            line for line in text.splitlines() if not re.search("datastates |torchrun |^ +--vocab-size", line)
        ]
        assert max(map(len, lines)) <= 80, [line for line in lines if len(line) > 80]
    summaries = output_of("--help").partition("Commands:")[2]
    assert all(command in summaries for command in COMMANDS) and "..." not in summaries


def test_every_command_has_exit_codes_and_an_example_in_its_help():
    for command in COMMANDS:
        text = " ".join(output_of(command, "--help").split())
        assert "Exit codes: 0" in text, command
        assert f"Example: datastates {command}" in text or f"Examples: datastates {command}" in text, command


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "a", "b", "--ranks", "0"],
        ["convert", "a", "b", "--workers", "-1"],
        ["export", str(GOLDEN), "x", "--max-shard-size", "0"],
        ["show", str(GOLDEN.parent), "--iteration", "-1"],
        ["convert", str(GOLDEN), "b", "--all", "--iteration", "3"],
        ["verify", str(GOLDEN), "--all", "--iteration", "3"],
    ],
)
def test_wrong_values_are_refused(words: list[str]):
    code, printed, reported = run(*words)
    assert code == 2 and printed == "" and words[-2] in reported


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
module = sys.argv[1]
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from megatron_datastates.cli.entry import main
sys.argv = ["datastates", *sys.argv[2:]]
main()
"""


@pytest.mark.parametrize("module", ["click", "megatron_datastates.cli.convert", "numpy", "torch"])
def test_an_interrupt_while_something_is_imported_is_one_line(module: str, tmp_path: Path):
    words = ["convert", str(GOLDEN), str(tmp_path / "made" / "iter_0000001")]
    command = [sys.executable, "-c", INTERRUPTED, module, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "datastates: interrupted\n")
    assert not os.listdir(tmp_path)


def test_an_ignored_sigint_stays_ignored():
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from megatron_datastates.cli.entry import run\n"
        "run(lambda: lambda: signal.raise_signal(signal.SIGINT))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert signal.SIGINT.value + 128 == 130


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("name", ["verify", "show"])
def test_an_output_that_cannot_be_written_is_one_line_and_not_a_faulty_checkpoint(name: str, unbuffered: str):
    command = [sys.executable, "-m", "megatron_datastates", name, str(GOLDEN)]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    text = "datastates: standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, text)


@pytest.mark.parametrize("line", ["verify {golden} >/dev/full 2>/dev/full", "ls {golden}/none 2>/dev/full"])
def test_errors_that_cannot_be_written_are_not_a_faulty_checkpoint(line: str):
    command = f"{sys.executable} -m megatron_datastates {line.format(golden=GOLDEN)}"
    assert subprocess.run(["sh", "-c", command], check=False).returncode == 2


def test_a_command_without_an_output_is_carried_out(root: Path):
    command = f"{sys.executable} -m megatron_datastates ls {root}"
    for line, expected in ((f"{command} >&-", 0), (f"{command}/none <&- 2>&-", 2)):
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (expected, "", "")


@pytest.mark.parametrize(
    "line", ["--help", "options", "ls {root}", "ls {root}/none 2>&1", "verify --quick {root}/iter_0000005"]
)
def test_a_reader_that_has_gone_ends_a_command_quietly(line: str, root: Path):
    """As of `datastates ls RUN | head -1`: the exit code is that of a program that SIGPIPE ends."""
    command = f"{sys.executable} -m megatron_datastates {line.format(root=root)}"
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(["sh", "-c", command], stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, "")


def test_releases_of_click_without_help_of_arguments_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def page() -> str:
        command = click.command()(argument("place", help="What it is.")(lambda place: None))
        return CliRunner().invoke(command, ["--help"]).output

    class Older(click.Argument):
        def __init__(self, param_decls, required=None, **attributes) -> None:
            super().__init__(param_decls, required, **attributes)

    assert "What it is." in page()
    monkeypatch.setattr(click, "Argument", Older)
    assert "PLACE" in page() and "What it is." not in page()


def test_what_the_stores_client_logs_of_its_attempts_is_not_printed() -> None:
    code = (
        "import logging\n"
        "from megatron_datastates.cli.shared import PLACED\n"
        "PLACED.convert(PATH, None, None)\n"
        "logging.getLogger('multistorageclient.retry').warning('Attempt 1 failed')\n"
    )
    for path, expected in (("here", "Attempt 1 failed\n"), ("msc://store/run", "")):
        words = [sys.executable, "-c", code.replace("PATH", repr(path))]
        assert subprocess.run(words, capture_output=True, text=True, check=True).stderr == expected


@pytest.mark.parametrize("url", ["s3://bucket/x", "gs:/bucket/x"])
def test_urls_of_other_kinds_are_no_local_paths(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (
        ("ls", url),
        ("verify", url),
        ("convert", tmp_path, url),
        ("export", tmp_path, url),
        ("report", tmp_path, "--out", url),
        ("prune", url, "--keep-last", 1),
    ):
        code, out, err = run(*command)
        assert (code, out) == (2, ""), command
        assert err == f"datastates: {url}: expected a directory, or msc://PROFILE/PATH of an object store\n"
    code, _, err = run("report", tmp_path, "--out", "msc://store/x")
    assert code == 2 and "msc://store/x is in an object store: expected a path in a file system" in err
    assert not list(tmp_path.iterdir())
