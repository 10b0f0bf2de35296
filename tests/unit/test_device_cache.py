"""Device memory that torch has cached is released before the first save of a process, and no later one."""

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_datastates.mcore import bridge_settings
from megatron_datastates.mcore.training import device_cache


class Loop:
    """A loop like Megatron's, and the moments at which it released memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_ours: bool = True) -> None:
        self.released: list[str] = []
        self.moment = ""
        self.is_ours = is_ours
        self.fails = False
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.released.append(self.moment))
        monkeypatch.setattr(device_cache, "_has_saved", False)
        self.save = functools.partial(
            device_cache.wrap_save_and_time, self._save_and_time, is_ours=self._is_ours
        )

    def _is_ours(self, call: Mapping[str, Any]) -> bool:
        assert call == {"iteration": 7}
        return self.is_ours

    def _save_and_time(self, iteration: int) -> None:
        self.moment = "before"
        torch.cuda.empty_cache()
        with device_cache.saving(is_ours=self.is_ours):
            self.moment = "within"
            torch.cuda.empty_cache()
            if self.fails:
                raise OSError
        self.moment = "after"
        torch.cuda.empty_cache()

    def saved(self) -> list[str]:
        self.released = []
        self.save(7)
        return self.released


@pytest.fixture
def make_loop(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Loop]:
    return lambda **options: Loop(monkeypatch, **options)


def test_from_the_second_save_on_nothing_is_released_before(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    assert loop.saved() == ["before", "within", "after"]
    assert loop.saved() == loop.saved() == ["within", "after"]


def test_saves_in_other_formats_stay_as_they_are(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop(is_ours=False)
    assert loop.saved() == loop.saved() == ["before", "within", "after"]
    loop.is_ours = True
    assert loop.saved() == ["before", "within", "after"], "it is the first one of ours"
    loop.is_ours = False
    assert loop.saved() == ["before", "within", "after"]


@pytest.mark.parametrize("saves_before", [0, 1])
def test_a_save_that_fails_leaves_torch_as_it_was(make_loop: Callable[..., Loop], saves_before: int) -> None:
    loop, original = make_loop(), torch.cuda.empty_cache
    for _ in range(saves_before):
        loop.saved()
    loop.fails = True
    with pytest.raises(OSError):
        loop.save(7)
    assert torch.cuda.empty_cache is original
    loop.fails = False
    assert loop.saved() == (["within", "after"] if saves_before else ["before", "within", "after"])


def test_a_save_that_is_left_out_leaves_torch_as_it_was(
    make_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `--datastates-while-saving skip`: save_checkpoint returns at once."""
    loop, original = make_loop(), torch.cuda.empty_cache
    loop.saved()
    device_cache.wrap_save_and_time(lambda: torch.cuda.empty_cache(), is_ours=lambda call: True)
    assert torch.cuda.empty_cache is original and loop.released == ["before", "within", "after"]


def test_the_loop_of_bridge_is_wrapped_where_it_has_this_function(
    make_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop()
    config = SimpleNamespace(ckpt_format="datastates", custom_manager_class=None)
    state = SimpleNamespace(cfg=SimpleNamespace(checkpoint=config))
    module = SimpleNamespace(
        __name__="a loop", save_checkpoint_and_time=lambda state: torch.cuda.empty_cache()
    )
    monkeypatch.setitem(bridge_settings.sys.modules, "a loop", module)

    def train() -> list[str]:
        """Saves by its own function, before and after a save of ours, and then in another format."""
        module.save_checkpoint_and_time(state)
        loop.saved()
        loop.released = []
        module.save_checkpoint_and_time(state)
        config.ckpt_format, config.custom_manager_class = "torch_dist", None
        loop.moment = "another format"
        module.save_checkpoint_and_time(state)
        return loop.released

    train.__module__ = "a loop"
    assert bridge_settings.wrap_train(train) == ["another format"]
    config.ckpt_format = "datastates"
    assert bridge_settings.wrap_train(train) == ["another format"]


def test_a_new_loop_in_the_same_process_begins_anew(make_loop: Callable[..., Loop]) -> None:
    """As after a restart within the process, which makes new communicators."""
    loop = make_loop()
    loop.saved()
    device_cache.forget_saves()
    assert loop.saved() == ["before", "within", "after"]
