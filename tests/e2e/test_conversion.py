"""Megatron's own conversion (--ckpt-convert-format), from our format into Megatron's."""

from pathlib import Path

import pytest

from tests.support.tiny import LAYOUTS, MANIFEST, Checkpoints, Ending, Pretraining

COMMON = [*LAYOUTS["tp2"], "--train-iters", "6"]


@pytest.fixture(scope="module")
def saved(forge, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ending]:
    folder = tmp_path_factory.mktemp("saved")
    saving = ["--save", folder / "ck", "--exit-interval", "4", "--ckpt-format", "datastates"]
    return folder / "ck", Pretraining(forge, folder / "runs").run(*COMMON, *saving)


@pytest.mark.parametrize("target", ["torch_dist", "torch"])
@pytest.mark.parametrize("given", [["--async-save"], []], ids=["async", "sync"])
def test_conversion_writes_the_other_format_and_nothing_of_ours(
    target: str, given: list[str], saved: tuple[Path, Ending], pretraining: Pretraining, tmp_path: Path
) -> None:
    source, before = saved
    convert = ["--ckpt-convert-format", target, "--ckpt-convert-save", tmp_path, "--load", source]
    # As from torch_dist: the legacy format cannot take over the distributed optimizer of another format.
    how = ["--no-load-optim", "--no-save-optim"] if target == "torch" else []
    saving = ["--save", tmp_path / "unused", *given]

    outcome = pretraining.fail(*COMMON, "--ckpt-format", "datastates", *convert, *saving, *how)

    assert outcome.exits == [0, 0], outcome.log[-3000:]
    assert "> converted checkpoint: torch_dist -> " + target in outcome.log
    converted = Checkpoints(tmp_path / target)
    assert converted.tracked() == 4
    assert not list(converted.root.rglob(MANIFEST)) and not list(converted.root.rglob("data-*"))
    loading = ["--load", converted.root, "--ckpt-format", target]
    loaded = pretraining.run(*COMMON, *loading, *(["--no-load-optim"] if target == "torch" else []))
    if target == "torch_dist":
        converted.assert_format(4, "torch_dist")
        assert loaded.resumed_from(before) == 4
    else:
        assert loaded.ranks[0].begun_at == 4
        assert models(loaded) == models(pretraining.run(*COMMON, "--load", source, "--no-load-optim"))


def models(ending: Ending) -> list[dict[str, str]]:
    """Returns the parameters that each rank began with."""
    return [
        {name: value for name, value in rank.begun.items() if name.startswith("model")}
        for rank in ending.ranks
    ]


def test_conversion_into_our_format_is_refused(
    saved: tuple[Path, Ending], pretraining: Pretraining, tmp_path: Path
) -> None:
    convert = ["--ckpt-convert-format", "datastates", "--ckpt-convert-save", str(tmp_path)]
    outcome = pretraining.fail(*COMMON, "--load", saved[0], *convert)
    assert outcome.exits == [2, 2] and "--ckpt-convert-format: invalid choice" in outcome.log
