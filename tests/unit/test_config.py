"""Options: how they are read, what is refused and how that is said, and which setting wins."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_datastates.config import ENVIRONMENT_PREFIX, GIB, KIB, MIB, Options
from megatron_datastates.errors import OptionError
from megatron_datastates.option_text import parse_bytes
from megatron_datastates.pipeline.report import Reporter

# Option -> (text, value) that differs from the default.
SETTINGS = {
    "staging_memory": ("2GiB", 2 * GIB),
    "slot_size": ("16MiB", 16 * MIB),
    "direct_io": ("off", False),
    "checksums": ("off", False),
    "lazy": ("off", False),
    "paranoid": ("on", True),
    "prepared": ("off", False),
    "copy_threads": ("7", 7),
    "write_threads": ("3", 3),
    "read_threads": ("9", 9),
    "copy_limit": ("1GB", 10**9),
    "write_limit": ("500MB", 500 * 10**6),
    "link": ("off", False),
    "fence_deadline": ("2.5", 2.5),
    "compress": ("19", 19),
    "on_failure": ("warn", "warn"),
    "while_saving": ("skip", "skip"),
    "fallback": ("3", 3),
    "on_damage": ("fallback", "fallback"),
    "near": ("/local/checkpoints", "/local/checkpoints"),
    "near_keep": ("2", 2),
    "near_replicas": ("1", 1),
    "drain_every": ("5", 5),
    "drain_limit": ("1GB", 10**9),
    "trust_objects": ("on", True),
    "providers": ("mine:position,other.part:make.two", "mine:position,other.part:make.two"),
    "report_file": ("/tmp/report.jsonl", "/tmp/report.jsonl"),
}


def read(name: str, text: str) -> object:
    return getattr(Options.from_environment(environment={ENVIRONMENT_PREFIX + name.upper(): text}), name)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0), ("4096", 4096), ("1b", 1), ("1kib", KIB), ("2KiB", 2 * KIB), ("3MiB", 3 * MIB),
        ("2GiB", 2 * GIB), ("1TiB", 1 << 40), ("1kB", 1000), ("500MB", 500 * 10**6), ("1GB", 10**9),
        ("1TB", 10**12), ("1.5GiB", 3 * GIB // 2), (" 2 gib ", 2 * GIB), ("0.5MB", 500_000),
        ("9007199254740993", 9007199254740993), ("9223372036854775807", 2**63 - 1),
    ],
)  # fmt: skip
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@given(st.integers(0, 2**63 - 1))
def test_whole_numbers_are_read_exactly(size):
    assert parse_bytes(str(size)) == size


@pytest.mark.parametrize(
    "text",
    ["", " ", "GiB", "-1", "+1", "1e9", "0x10", "1,5GiB", "1 2", "2GiBs", "1PiB", "nan", "inf", ".5", "5.",
     "٣", "9223372036854775808", "8388608TiB", "1" * 400, "0.5"],
)  # fmt: skip
def test_other_sizes_are_refused(text):
    with pytest.raises(ValueError, match="expected a size such as 2GiB"):
        parse_bytes(text)


def test_every_option_has_a_setting_here():
    assert set(SETTINGS) == set(Options.specs())


@pytest.mark.parametrize("name", SETTINGS)
def test_every_option_is_read_from_its_variable(name):
    text, value = SETTINGS[name]
    assert getattr(Options(), name) != value
    assert read(name, text) == value
    assert type(read(name, text)) is type(value)


@pytest.mark.parametrize("name", SETTINGS)
def test_only_the_option_that_was_set_changes(name):
    text, _ = SETTINGS[name]
    options = Options.from_environment(environment={ENVIRONMENT_PREFIX + name.upper(): text})
    assert dataclasses.replace(options, **{name: getattr(Options(), name)}) == Options()


@pytest.mark.parametrize("name", SETTINGS)
def test_an_override_wins_over_the_variable(name):
    text, value = SETTINGS[name]
    other = getattr(Options(), name)
    environment = {ENVIRONMENT_PREFIX + name.upper(): text}
    assert getattr(Options.from_environment({name: other}, environment), name) == other
    assert getattr(Options.from_environment({name: value}, {}), name) == value


def test_without_variables_everything_is_the_default():
    assert Options.from_environment(environment={"SLOT_SIZE": "1MiB", "HOME": "/"}) == Options()


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("SLOTSIZE", "did you mean MEGATRON_DATASTATES_SLOT_SIZE?"),
        ("ENABLED", "did you mean MEGATRON_DATASTATES_ENABLE?"),
        ("XYZ_0123456789_XYZ_0123456789", "`datastates options` lists all"),
    ],
)
def test_a_variable_that_sets_nothing_is_an_error(name, advice):
    message = f"environment variable {ENVIRONMENT_PREFIX}{name}: no such option; {advice}"
    with pytest.raises(OptionError, match=re.escape(message)):
        Options.from_environment(environment={ENVIRONMENT_PREFIX + name: "1"})
    assert Options.from_environment(environment={ENVIRONMENT_PREFIX + "ENABLE": "1"}) == Options()


def test_the_environment_of_the_process_is_read_at_the_time_of_the_call(monkeypatch):
    monkeypatch.setenv("MEGATRON_DATASTATES_SLOT_SIZE", "32MiB")
    assert Options.from_environment().slot_size == 32 * MIB


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("staging_memory", "7MiB", "'auto' or at least 8MiB"),
        ("staging_memory", "0", "'auto' or at least 8MiB"),
        ("staging_memory", "much", "a size such as 2GiB"),
        ("slot_size", "1000000", "'auto' or a multiple of 1MiB, from 1MiB to 1GiB"),
        ("slot_size", "0", "'auto' or a multiple of 1MiB, from 1MiB to 1GiB"),
        ("slot_size", "1025MiB", "a multiple of 1MiB, from 1MiB to 1GiB"),
        ("direct_io", "maybe", "on or off"),
        ("checksums", "", "on or off"),
        ("lazy", "2", "on or off"),
        ("copy_threads", "0", "from 1 to 64"),
        ("write_threads", "65", "from 1 to 64"),
        ("read_threads", "-1", "from 1 to 64"),
        ("read_threads", "1.5", "from 1 to 64"),
        ("read_threads", "²", "from 1 to 64"),
        ("read_threads", "1" * 5000, "from 1 to 64"),
        ("copy_limit", "fast", "a size such as"),
        ("write_limit", "-1", "a size such as"),
        ("compress", "20", "a whole number from 0 to 19"),
        ("compress", "-1", "a whole number from 0 to 19"),
        ("compress", "on", "a whole number from 0 to 19"),
        ("fence_deadline", "0", "above 0 and below 1e9"),
        ("fence_deadline", "-1", "above 0"),
        ("fence_deadline", "nan", "above 0"),
        ("fence_deadline", "inf", "below 1e9"),
        ("fence_deadline", "soon", "seconds"),
        ("on_failure", "ignore", "raise or warn"),
        ("while_saving", "queue", "wait or skip"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(name, text, allowed):
    variable = ENVIRONMENT_PREFIX + name.upper()
    with pytest.raises(OptionError, match=re.escape(f"{variable}={text!r}: expected") + f".*{allowed}"):
        read(name, text)


@pytest.mark.parametrize("text", ["on", "ON", "1", "true", "True"])
def test_words_for_on(text):
    assert read("checksums", text) is True


@pytest.mark.parametrize("text", ["off", "Off", "0", "false", "FALSE"])
def test_words_for_off(text):
    assert read("checksums", text) is False


def test_tripwire_is_on_unless_a_test_says_otherwise():
    assert Options().tripwire is True and "tripwire" not in Options.specs()
    assert read("tripwire", "off") is False


def test_samples_are_chosen_anew_unless_a_test_says_otherwise():
    assert Options().sample_seed == 0 and "sample_seed" not in Options.specs()
    assert read("sample_seed", "7") == 7


def test_auto_lets_the_memory_be_chosen():
    assert read("staging_memory", "auto") == Options().staging_memory == 0


def test_every_options_help_states_its_default():
    for name, spec in Options.specs().items():
        assert "default" in spec.help % (), name


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("trust_objects", "off", False),
        ("lazy", "no", False),
        ("slot_size", "4MiB", 4 << 20),
        ("staging_memory", 0, 0),
        ("staging_memory", 0.0, 0),
        ("fence_deadline", 5, 5.0),
        ("report_file", Path("/a/b"), "/a/b"),
    ],
)
def test_a_program_may_give_values_or_text(name: str, given: object, wanted: object) -> None:
    found = getattr(Options.from_environment({name: given}, {}), name)
    assert (found, type(found)) == (wanted, type(wanted))


def test_a_report_file_lies_where_the_program_was_when_it_gave_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    options = Options.from_environment({"report_file": "report.jsonl"}, {})
    monkeypatch.chdir(elsewhere)
    Reporter(options.report_file).write({"event": "of this test"})
    assert [path.name for path in tmp_path.glob("**/*.jsonl")] == ["report.jsonl"]
    assert (tmp_path / "report.jsonl").read_text()


def test_a_report_file_of_a_removed_working_directory_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank may have lost its own, and must not fail alone: its reports are not written."""
    (removed := tmp_path / "removed").mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()
    assert Options.from_environment({"report_file": "r"}, {}).report_file == "r"


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("lazy", "of", "expected on or off"),
        ("direct_io", 1, "expected True or False, found int"),
        ("copy_limit", True, "expected a whole number, found bool"),
        ("copy_threads", 0, "from 1 to 64"),
        ("near_keep", 2.5, "a whole number from 1 to 9999"),
        ("staging_memory", -3, "expected a size"),
        ("staging_memory", None, "expected a whole number, found NoneType"),
        ("slot_size", "4MB", "a multiple of 1MiB"),
        ("fence_deadline", "soon", "a number of seconds"),
        ("on_failure", "ignore", "expected raise or warn"),
        ("near", "msc://store/near", "expected a directory of a file system"),
        ("near", "s3://bucket/near", "expected a directory, or msc://PROFILE/PATH"),
        ("providers", 3, "expected a text, found int"),
        ("slot_sise", 1, "did you mean slot_size?"),
        ("nothing_like_it", 1, "`datastates options` lists all"),
    ],
)
def test_values_of_a_program_that_make_no_sense_are_refused(name: str, given: object, expected: str) -> None:
    with pytest.raises(OptionError, match=re.escape(expected)) as failed:
        Options.from_environment({name: given}, {})
    assert name in str(failed.value)
