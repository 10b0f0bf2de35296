"""Never another format in silence, and lazy copies only where the loop is known."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_datastates import stores
from megatron_datastates.config import Options
from megatron_datastates.engine import staging
from megatron_datastates.errors import OptionError
from megatron_datastates.mcore.save.mutability import nothing_promised
from megatron_datastates.mcore.save.strategy import DataStatesSaveStrategy, TrainingSaveStrategy
from megatron_datastates.mcore.training import (
    arguments,
    checks,
    device_cache,
    loop,
    retention,
    tracker_writing,
)
from megatron_datastates.mcore.training.arguments import adopt
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.saver import Saver
from megatron_datastates.pipeline.session import SaveSession
from megatron_datastates.providers.base import Mutability
from tests.unit.states import OPTIONS, State

pytest.importorskip("megatron.training")


@pytest.fixture
def enabled(monkeypatch):
    """The arguments of the calls of enable_saving, in a process in which arguments were not validated."""
    calls: list[Options] = []

    def enable_saving(options: Options) -> None:
        calls.append(options)
        loop._options = options

    monkeypatch.setattr(loop, "_options", None)
    monkeypatch.setattr(loop, "enable_saving", enable_saving)
    monkeypatch.setattr(loop, "set_dependent_arguments", lambda args: None)
    monkeypatch.setattr(retention, "finalize", None, raising=False)
    return calls


def saved_with(monkeypatch, args: argparse.Namespace) -> list[int]:
    """Calls save_checkpoint with these arguments of the program; returns the calls of Megatron's own."""
    from megatron.training import checkpointing, global_vars

    for module in (global_vars, checkpointing):
        monkeypatch.setattr(module, "get_args", lambda: args)
    seen: list[int] = []
    loop.wrap_save_checkpoint(lambda iteration: seen.append(iteration), 7)
    return seen


def namespace(**members) -> argparse.Namespace:
    return argparse.Namespace(**({"save": "somewhere", "rank": 0, "ckpt_format": "torch_dist"} | members))


def test_arguments_that_were_validated_in_another_process_are_heeded(monkeypatch, enabled):
    """slime validates them in a driver and sends them to workers."""
    driver = namespace(ckpt_backend="datastates", datastates_copy_threads=3)
    worker = pickle.loads(pickle.dumps(driver))
    assert saved_with(monkeypatch, worker) == [7]
    assert [options.copy_threads for options in enabled] == [3]
    assert saved_with(monkeypatch, worker) == [7]
    assert len(enabled) == 1, "once a process"


def test_the_first_save_into_a_near_tier_looks_for_nothing_in_save(monkeypatch, enabled, tmp_path):
    """It may hang, as for the later ones."""
    looked: list[object] = []
    monkeypatch.setattr(tracker_writing, "_is_near", False)
    monkeypatch.setattr(retention, "mend", looked.append)
    args = namespace(ckpt_backend="datastates", save=str(tmp_path), save_retain_interval=10)
    args.datastates_near = str(tmp_path / "near")
    assert saved_with(monkeypatch, args) == [7]
    assert looked == []
    tracker_writing._is_near = True
    args.datastates_near = ""
    loop._options = None
    assert saved_with(monkeypatch, args) == [7]
    assert looked == [tmp_path / "latest_checkpointed_iteration.txt"]


def test_a_format_that_no_parser_of_ours_has_seen_is_adopted(monkeypatch, enabled):
    """From a YAML file, or set by a framework."""
    args = namespace(ckpt_format="datastates")
    assert saved_with(monkeypatch, args) == [7]
    assert len(enabled) == 1
    assert (args.ckpt_backend, args.ckpt_format) == ("datastates", "torch_dist")


@pytest.mark.parametrize(
    "members", [{}, {"ckpt_format": "torch"}, {"ckpt_backend": "datastates", "ckpt_convert_format": "torch"}]
)
def test_other_formats_and_conversions_stay_megatrons_own(monkeypatch, enabled, members):
    before = namespace(**members)
    assert saved_with(monkeypatch, args := namespace(**members)) == [7]
    assert enabled == [] and args == before


def test_what_cannot_be_made_ours_raises(monkeypatch, enabled):
    def refuse(options: Options) -> None:
        raise OptionError("not to be had")

    monkeypatch.setattr(loop, "enable_saving", refuse)
    with pytest.raises(OptionError, match="not to be had"):
        saved_with(monkeypatch, namespace(ckpt_backend="datastates"))


def test_the_deprecated_flag_is_refused():
    """Megatron ignores it, and would save torch_dist."""
    with pytest.raises(OptionError, match="use --ckpt-format datastates"):
        loop.wrap_validate_args(lambda args: args, namespace(dist_ckpt_format_deprecated="datastates"))
    args = namespace(dist_ckpt_format_deprecated="torch_dist")
    assert loop.wrap_validate_args(lambda args: args, args) is args


@pytest.mark.parametrize(
    ("minutes", "seconds", "is_warned"),
    [(10, None, False), (10, 60, True), (7, None, True), (None, None, False)],
)
def test_a_fence_that_may_wait_for_longer_than_process_groups_is_warned_of(
    caplog, minutes: int | None, seconds: int | None, is_warned: bool
) -> None:
    args = namespace(distributed_timeout_minutes=minutes, distributed_timeout_seconds_after_init=seconds)
    checks.warn_of_deadline(args, OPTIONS)
    assert ("process groups time out" in caplog.text) == is_warned


@pytest.mark.parametrize(
    ("environment", "given", "is_warned"),
    [
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"async_save": True}, True),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"async_save": True, "rank": 1}, False),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"async_save": False}, False),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, {"async_save": True}, False),
        ({}, {"async_save": True}, False),
        (
            {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_DEVICE_MAX_COPY_CONNECTIONS": "8"},
            {"async_save": True},
            False,
        ),
    ],
)
def test_copies_that_take_turns_with_kernels_are_warned_of(
    environment: dict[str, str],
    given: dict[str, Any],
    is_warned: bool,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_MAX_COPY_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(checks, "_DEVICE", tmp_path / "none")
    checks.warn_of_shared_queue(namespace(**given))
    assert not caplog.text, "there is no GPU"
    monkeypatch.setattr(checks, "_DEVICE", tmp_path)
    checks.warn_of_shared_queue(namespace(**given))
    assert ("CUDA_DEVICE_MAX_COPY_CONNECTIONS=8" in caplog.text) == is_warned


@pytest.mark.parametrize(
    "given", [{"near_keep": 2}, {"near_replicas": 1}, {"drain_every": 5}, {"drain_limit": 10**9}]
)
def test_options_of_a_near_tier_need_one(
    given: dict[str, int],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    flag = "--datastates-" + next(iter(given)).replace("_", "-")
    args = namespace(**{f"datastates_{name}": value for name, value in given.items()})
    with pytest.raises(OptionError, match=f"^{flag} needs --datastates-near DIR"):
        checks.check_near_options(args, Options(**given))
    assert not caplog.text
    checks.check_near_options(namespace(), Options(**given))  # of an environment that many jobs share
    variable = f"MEGATRON_DATASTATES_{next(iter(given)).upper()}"
    assert f"{variable} needs --datastates-near DIR: it is ignored" in caplog.text
    checks.check_near_options(args, Options(near="/local", **given))
    args.save = "msc://store/run"
    checks.check_near_options(args, arguments.options_of(args))


@pytest.mark.parametrize(
    ("near", "is_refused"),
    [("run", True), ("run/", True), ("link", True), ("$PLACE/near", True), ("", False), ("run-near", False)],
)
def test_a_near_tier_in_the_directory_of_the_run_is_refused(
    near: str, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACE", "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    args, options = namespace(save=str(tmp_path / "run")), Options(near=f"{tmp_path}/{near}")
    refused = pytest.raises(OptionError, match=r"^--datastates-near .* is in --save ")
    with refused if is_refused else contextlib.nullcontext():
        checks.check_near_options(args, options)


@pytest.mark.parametrize("is_given", [False, True])
def test_only_the_user_says_that_the_structure_of_megatrons_own_saves_is_constant(
    is_given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "_has_set_structure", False)
    args = namespace(ckpt_assume_constant_structure=is_given)
    arguments.set_dependent_arguments(args)
    with arguments.structure_as_given(args):
        assert args.ckpt_assume_constant_structure == is_given
    assert args.ckpt_assume_constant_structure


def test_megatron_hashes_no_files_that_are_near_only() -> None:
    """Its integrity.json would list none, or some that are half copied, and a load would compare nothing."""
    args = namespace(verify_integrity=True)
    checks.check_near_options(args, Options())
    with pytest.raises(OptionError, match=r"^--verify-integrity: .*near tier only.*: leave it out"):
        checks.check_near_options(args, Options(near="/local"))


@pytest.mark.parametrize(
    ("version", "given", "in_environment", "lazy"),
    [
        ("0.19.9", None, None, True),
        ("0.20.0", None, None, False),
        ("0.20.0", True, None, True),
        ("0.20.0", None, "on", True),
        ("0.19.9", False, None, False),
    ],
)
def test_copies_are_lazy_with_releases_that_were_tested_or_where_asked_for(
    version: str,
    given: bool | None,
    in_environment: str | None,
    lazy: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A later one may have places without a fence that change what is being copied."""
    monkeypatch.setattr(arguments.versions, "installed_version", lambda: version)
    monkeypatch.delenv("MEGATRON_DATASTATES_LAZY", raising=False)
    if in_environment:
        monkeypatch.setenv("MEGATRON_DATASTATES_LAZY", in_environment)
    arguments._warn_of_untested.cache_clear()
    args = namespace(datastates_lazy=given, rank=0)
    assert [arguments.options_of(args).lazy for _ in range(2)] == [lazy] * 2
    is_eager_unasked = not lazy and given is None
    assert caplog.text.count(f"has not been tested with Megatron-Core {version}") == is_eager_unasked


@pytest.mark.parametrize("fault", ["", "a link", "of another user", "others write to it", "a file"])
def test_the_near_tier_in_the_folder_for_temporary_files_is_this_users_alone(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    args = namespace(save="msc://store/run")
    path = Path(arguments.options_of(args).near)
    assert path.parent == tmp_path and path.stat().st_mode & 0o777 == 0o700
    if fault == "others write to it":
        path.chmod(0o777)
    elif fault == "of another user":
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        path.rename(tmp_path / "datastates-near-12345")
    elif fault:
        path.rename(tmp_path / "other")
        path.symlink_to("other") if fault == "a link" else path.touch()
    if fault:
        with pytest.raises(OptionError, match=r"may not be this user's alone|cannot be used"):
            arguments.options_of(args)
    args.datastates_near = "/x"
    assert arguments.options_of(args).near == "/x"
    monkeypatch.setattr(checks, "msc_is_enabled", lambda: True)
    monkeypatch.setattr(stores, "require_answer", lambda place: None)
    checks.check_object_stores(args)


@pytest.mark.parametrize(
    ("folder", "rank", "is_warned"), [("no", 0, True), ("no", 1, False), (".", 0, False)]
)
def test_a_report_file_that_cannot_be_written_is_warned_of(
    caplog, tmp_path, folder: str, rank: int, is_warned: bool
) -> None:
    options = Options(report_file=str(tmp_path / folder / "report.jsonl"))
    checks.warn_of_report_file(namespace(rank=rank), options)
    assert ("no report can be written there now" in caplog.text) == is_warned


@pytest.mark.parametrize(
    ("load", "more", "advice"),
    [
        ("iter_0000004", {}, "Pass --load {} --ckpt-step 4"),
        ("iter_0000004/", {}, "Pass --load {} --ckpt-step 4"),
        ("release", {}, "Pass the directory of its run"),
        ("iter_0000004", {"rank": 1}, ""),
        ("iter_0000004", {"ckpt_step": 4}, ""),  # Megatron ends with an error
        (".", {}, ""),
        ("no", {}, ""),
    ],
)
@pytest.mark.parametrize("name", ["datastates.manifest", "metadata.json"])
def test_a_checkpoint_in_place_of_a_run_is_warned_of(
    caplog, tmp_path, name: str, load: str, more: dict[str, int], advice: str
) -> None:
    for directory in (tmp_path, tmp_path / "iter_0000004", tmp_path / "release"):
        directory.mkdir(exist_ok=True)
        (directory / name).write_text('{"sharded_backend": "torch_dist"}')
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    checks.warn_of_checkpoint_as_run(namespace(load=f"{tmp_path}/{load}", **more))
    assert bool(advice) == ("Megatron starts from random weights" in caplog.text)
    assert advice.format(tmp_path) in caplog.text


def test_arguments_are_adopted_once():
    args = namespace(ckpt_format="datastates")
    assert adopt(args) and adopt(args)
    assert not adopt(namespace())
    assert arguments.is_selected(args)


# -- lazy or not --------------------------------------------------------------------------------------------


@pytest.fixture
def arguments_of_the_loop(monkeypatch):
    """Megatron's global arguments, which its loop never runs without."""
    monkeypatch.setattr("megatron.training.checkpointing.get_args", namespace)


def test_lazy_is_for_megatrons_own_loop(arguments_of_the_loop):
    strategy = loop.wrap_save_strategy(object, "torch_dist", 1)
    assert isinstance(strategy, TrainingSaveStrategy)
    during: list[bool] = []
    loop.wrap_train(lambda: during.append(strategy.is_lazy()))
    assert during == [True]
    assert not strategy.is_lazy() and strategy.classifier() is nothing_promised


def test_a_loop_that_raises_is_over(arguments_of_the_loop):
    def train() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        loop.wrap_train(train)
    assert not loop.is_training()


def test_a_loop_that_is_interrupted_as_it_begins_does_not_run(arguments_of_the_loop, monkeypatch):
    """Later saves of the program would be lazy."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(device_cache, "forget_saves", interrupt)
    with pytest.raises(KeyboardInterrupt):
        loop.wrap_train(lambda: None)
    monkeypatch.undo()
    assert not loop.is_training()


@pytest.mark.parametrize("promised", [True, False])
def test_a_strategy_without_a_promise_is_not_lazy(promised):
    assert DataStatesSaveStrategy(assume_immutable=promised).is_lazy() is promised


def test_enable_is_eager_unless_lazy_is_promised(monkeypatch):
    def lazy(environment: dict[str, str], **options: object) -> bool:
        return Options.from_environment(options, environment, lazy=False).lazy

    assert not lazy({})
    assert lazy({}, lazy=True)
    assert lazy({"MEGATRON_DATASTATES_LAZY": "on"})
    assert not lazy({"MEGATRON_DATASTATES_LAZY": "on"}, lazy=False)
    assert Options.from_environment({}, {}).lazy, "Megatron's own loop"


@pytest.mark.parametrize(("await_copies", "lazy"), [(True, True), (False, False)])
def test_a_save_that_is_not_lazy_has_copied_everything_when_it_returns(
    tmp_path, monkeypatch, await_copies, lazy
):
    waited: list[float] = []
    monkeypatch.setattr(staging.FileSave, "await_copies", lambda self, seconds: waited.append(seconds))
    saver = Saver(OPTIONS.__class__(staging_memory=8 << 20, slot_size=1 << 20, lazy=lazy), SaveSession())
    state = State({"a": torch.ones(1000)}, mutability=Mutability.NEVER)
    publication = saver.start(tmp_path, state, await_copies=await_copies)
    assert publication.wait() is Outcome.PUBLISHED
    saver.close()
    assert len(waited) == 1


@pytest.mark.parametrize(
    ("save", "rank", "said"),
    [
        ("new/run", 0, ""),
        ("file/run", 0, "file is no directory"),
        ("link", 0, "link is a link to nowhere, which does not exist"),
        ("link/run", 0, "link is a link to nowhere, which does not exist"),
        ("closed/run", 0, "closed is not writable"),
        ("closed/run", 1, ""),
        ("away/run", 0, "Transport endpoint is not connected"),
    ],
)
def test_a_directory_that_takes_no_checkpoints_is_warned_of_before_the_first_save(
    save: str,
    rank: int,
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "closed").mkdir()
    access = os.access  # as on a file system that is mounted for reading: root may write anywhere else
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed" and access(path, mode))
    stat = os.stat

    def away(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if "away" in os.fspath(path):
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), path)
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", away)
    checks.warn_of_save(namespace(save=str(tmp_path / save), rank=rank))
    assert ("no checkpoint can be saved there now: " in caplog.text) == bool(said) and said in caplog.text


def test_falling_back_needs_a_number_of_checkpoints_to_look_at() -> None:
    checks.check_fallback(Options(on_damage="fallback", fallback=1))
    checks.check_fallback(Options(fallback=1))
    with pytest.raises(OptionError, match=r"^--datastates-on-damage fallback needs --datastates-fallback N"):
        checks.check_fallback(Options(on_damage="fallback"))
