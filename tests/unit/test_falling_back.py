"""Which loads of a training loop fall back to an older checkpoint; whole runs: e2e/test_failing_loads.py."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_datastates.errors import CorruptDataError, MissingKeyError
from megatron_datastates.format.directory import iteration_name
from megatron_datastates.mcore.errors import MegatronLoadFailedError
from megatron_datastates.mcore.load import restoring, state
from megatron_datastates.mcore.training import load as loads
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.saver import Saver
from tests.support.capabilities import bound_by_permissions
from tests.unit.states import OPTIONS, data_files, flip, save


class Run:
    """A run with the checkpoints 1 and 2, and a `load_checkpoint` that meets damage at its first call."""

    def __init__(self, saver: Saver, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.newest = root, 2
        for iteration in (1, 2):
            save(saver, root / iteration_name(iteration), {"w": torch.ones(1000)})
        self.args = SimpleNamespace(load=str(root), ckpt_step=None, finetune=False, rank=0)
        self.chosen: list[int | None] = []
        monkeypatch.setattr("megatron.training.checkpointing.get_args", lambda: self.args)
        monkeypatch.setenv("MEGATRON_DATASTATES_FALLBACK", "3")
        monkeypatch.setenv("MEGATRON_DATASTATES_ON_DAMAGE", "fallback")

    def damage(self) -> None:
        (file,) = data_files(self.root / iteration_name(self.newest))
        flip(file, file.stat().st_size // 8)

    def load(self) -> Any:
        return loads.wrap_load_checkpoint(self._load_checkpoint)

    def _load_checkpoint(self) -> tuple[int, int]:
        self.chosen.append(self.args.ckpt_step)
        iteration = self.args.ckpt_step or self.newest
        state.current().directory = str(self.root / iteration_name(iteration))
        if len(self.chosen) == 1:
            cause = CorruptDataError("data-00000 is corrupt")
            raise MegatronLoadFailedError(str(cause)) from cause
        return iteration, 0


@pytest.fixture
def run(saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(saver, tmp_path, monkeypatch)


def test_the_older_checkpoint_is_loaded_as_if_it_had_been_chosen(run: Run) -> None:
    run.damage()
    assert run.load() == (1, 0)
    assert run.chosen == [None, 1] and run.args.ckpt_step is None


def test_a_failure_that_has_passed_is_no_damage(run: Run) -> None:
    """Of storage, or of a checkpoint that another job has replaced: the newest one is whole."""
    with pytest.raises(MegatronLoadFailedError, match="iter_0000002 itself verifies now: start again"):
        run.load()
    assert run.chosen == [None]


def test_what_cannot_be_read_now_is_no_damage(run: Run) -> None:
    """A store does not answer, or credentials have expired: nothing is wrong with the newest one."""
    (file,) = data_files(run.root / iteration_name(2))
    said = (
        "iter_0000001 verifies: resume with --ckpt-step 1. First start again: in iter_0000002, which cannot"
    )
    with bound_by_permissions():
        file.chmod(0)
        with pytest.raises(MegatronLoadFailedError, match=said):
            run.load()
    assert run.chosen == [None]


def test_nothing_is_loaded_in_place_of_what_cannot_be_read_now(run: Run, saver: Saver) -> None:
    """The newest one is damaged, and the one before it may be as good as ever."""
    save(saver, run.root / iteration_name(3), {"w": torch.ones(1000)})
    run.newest = 3
    run.damage()
    (file,) = data_files(run.root / iteration_name(2))
    with bound_by_permissions():
        file.chmod(0)
        with pytest.raises(
            MegatronLoadFailedError, match=r"--ckpt-step 1\. First start again: in iter_0000002"
        ):
            run.load()
    file.chmod(0o644)
    run.chosen.clear()
    assert run.load() == (2, 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ckpt_step": 2}, "resume with --ckpt-step 1"),
        ({"finetune": True}, "resume with --ckpt-step 1"),
        ({"dist_ckpt_strictness": "log_all"}, "resume with --ckpt-step 1"),
        ({"non_persistent_ckpt_type": "local"}, "without --non-persistent-ckpt-type"),
    ],
)
def test_what_may_not_be_meant_is_an_error(changes: dict[str, Any], said: str, run: Run) -> None:
    run.damage()
    vars(run.args).update(changes)
    with pytest.raises(MegatronLoadFailedError, match=said):
        run.load()
    assert len(run.chosen) == 1


def test_what_the_failed_load_has_made_is_freed_before_the_second_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.damage()
    made, load_checkpoint = list[weakref.ref[Any]](), run._load_checkpoint

    def load_in_a_cycle() -> tuple[int, int]:
        alive = [one for one in made if one() is not None]
        assert not alive, "twice the memory"
        request = torch.zeros(3)
        made.append(weakref.ref(request))
        try:
            return load_checkpoint()
        except MegatronLoadFailedError as error:
            request.error = error  # its traceback has this frame, which has the request
            raise

    monkeypatch.setattr(run, "_load_checkpoint", load_in_a_cycle)
    gc.disable()
    try:
        assert run.load() == (1, 0) and len(made) == 2
    finally:
        gc.enable()


def test_a_provider_that_the_older_checkpoint_lacks_is_an_error(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The damaged one may have restored it already, on some ranks."""
    monkeypatch.setattr(restoring, "registered", lambda providers: {"mine": object()})
    checkpoint = Checkpoint.open(run.root / iteration_name(1), OPTIONS)
    with state.opened():
        restoring.restore_registered(checkpoint)
    assert "has no state of the provider 'mine', which stays as it is" in caplog.text
    with state.opened(is_fallback=True), pytest.raises(MissingKeyError, match="'mine', which the damaged"):
        restoring.restore_registered(checkpoint)
