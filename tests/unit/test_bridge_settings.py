"""Settings of Megatron-Bridge that select our format, with a config that has Bridge's fields and rules."""

import functools
from dataclasses import dataclass
from typing import Any

import pytest

from megatron_datastates.errors import OptionError
from megatron_datastates.mcore import bridge_settings as bridge

FOREIGN = "somewhere.Manager"


@dataclass
class Config:
    """The fields of Bridge's CheckpointConfig that matter, and its rules for asynchronous saves."""

    ckpt_format: str = "torch_dist"
    custom_manager_class: str | None = None
    async_save: bool = False
    use_persistent_ckpt_worker: bool = True

    def finalize(self) -> None:
        if self.async_save:
            assert self.use_persistent_ckpt_worker
            assert self.ckpt_format in ("torch_dist", "fsdp_dtensor")


@pytest.fixture
def finalize() -> Any:
    return functools.partial(bridge.wrap_finalize, Config.finalize)


@pytest.mark.parametrize(
    "settings", [{"ckpt_format": "datastates"}, {"custom_manager_class": bridge.MANAGER}]
)
def test_bridge_sees_its_own_format_and_needs_no_worker(finalize: Any, settings: dict[str, str]) -> None:
    config = Config(async_save=True, **settings)
    finalize(config)
    finalize(config)  # Bridge validates a configuration again
    assert config == Config("torch_dist", bridge.MANAGER, async_save=True, use_persistent_ckpt_worker=False)


@pytest.mark.parametrize("manager", [None, FOREIGN])
def test_other_settings_stay_as_they_are(finalize: Any, manager: str | None) -> None:
    config = Config("fsdp_dtensor", manager, async_save=True)
    finalize(config)
    assert config == Config("fsdp_dtensor", manager, async_save=True)
    assert not bridge.adopt(config)


def test_settings_that_contradict_each_other_are_refused(finalize: Any) -> None:
    with pytest.raises(OptionError, match=r"custom_manager_class='somewhere.Manager': leave one of them out"):
        finalize(Config("datastates", FOREIGN))
    with pytest.raises(OptionError, match=r"ckpt_format='fsdp_dtensor' is not saved by .*CheckpointManager"):
        finalize(Config("fsdp_dtensor", bridge.MANAGER))


def test_saves_are_lazy_only_while_the_loop_of_bridge_runs() -> None:
    assert not bridge.is_training()
    assert bridge.wrap_train(bridge.is_training)
    with pytest.raises(ZeroDivisionError):
        bridge.wrap_train(lambda: 1 // 0)
    assert not bridge.is_training()
