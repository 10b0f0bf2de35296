"""Quantized weights and extra states, as Transformer Engine makes them, load as from torch_dist.

These tests run without Transformer Engine, with the stand-ins of quantized_ranks.py. Those that need it are
in test_transformer_engine.py.
"""

from pathlib import Path

import pytest

from tests.support.world import World

pytestmark = pytest.mark.conformance


def test_quantized_weights_are_stored_and_loaded_as_torch_dist_does(world: World, tmp_path: Path) -> None:
    world.run("quantized_ranks:save_quantized", tmp_path)
    reports = world.run("quantized_ranks:load_quantized", tmp_path)
    assert reports[0]["dtypes"] == ["torch.bfloat16"], "what is stored is dequantized"


def test_tensor_subclass_that_is_not_quantized_keeps_its_dtype(world: World, tmp_path: Path) -> None:
    reports = world.run("quantized_ranks:subclass_keeps_its_dtype", tmp_path)
    assert reports[0]["ours"] == reports[0]["stock"]


def test_extra_states_in_every_form_load_as_with_torch_dist(world: World, tmp_path: Path) -> None:
    reports = world.run("quantized_ranks:extra_states", tmp_path)
    assert len(reports[0]["objects"]) == 5
