"""Without `--ckpt-format datastates` a run is, byte for byte, what it is without this package.

Compares twin runs: in one, torch loads this package's entry point, as it does wherever it is installed; in
the other, it does not.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ranks import RankForge
from tests.support.tiny import LAYOUTS, PATH, PRELOAD, TRACKER, Ending, Pretraining

# Modules of ours that a run in another format must not import.
HEAVY = ("engine._native", "engine.native", "engine.staging", "pipeline.saver", "mcore.save.strategy")
FORMATS = {
    "torch_dist": ["--ckpt-format", "torch_dist"],
    "torch": ["--ckpt-format", "torch"],
}
DRAWN = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")
EVERYTHING = ["--save-retain-interval", "4", "--non-persistent-ckpt-type", "global"]
EVERYTHING += ["--non-persistent-save-interval", "1"]


@pytest.fixture(scope="module")
def without_us(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankForge]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        forge = RankForge(PRELOAD, PATH)
    with forge:
        yield forge


def save_then_resume(forge: RankForge, folder: Path, root: Path, how: list[str]) -> list[Ending]:
    pretraining = Pretraining(forge, folder)
    arguments = [*LAYOUTS["tp2"], "--train-iters", "6", *how, "--save-interval", "2"]
    directories = ["--save", root, "--load", root]
    return [pretraining.run(*arguments, *directories, "--exit-interval", stop) for stop in ("3", "5")]


@pytest.mark.parametrize("name", FORMATS)
def test_run_in_another_format_is_the_same_without_us(
    name: str, forge: RankForge, without_us: RankForge, tmp_path: Path
) -> None:
    """Both runs use the same path, one after the other: the arguments are part of what is saved."""
    root = tmp_path / "ck"
    how = [*FORMATS[name], *(EVERYTHING if name == "torch_dist" else [])]
    with_us = save_then_resume(forge, tmp_path / "with", root, how)
    root.rename(tmp_path / "kept")
    alone = save_then_resume(without_us, tmp_path / "without", root, how)

    for ours, theirs in zip(with_us, alone, strict=True):
        assert ours.differences(theirs) == []
        assert [rank.begun for rank in ours.ranks] == [rank.begun for rank in theirs.ranks]
        for rank in theirs.ranks:
            assert rank.facts["our modules"] == []
        for rank in ours.ranks:
            assert "megatron_datastates.mcore" in rank.facts["our modules"]
            loaded = [module for module in rank.facts["our modules"] if module.endswith(HEAVY)]
            assert loaded == []
    assert contents(tmp_path / "kept") == contents(root)
    assert (tmp_path / "kept" / TRACKER).exists()


def contents(root: Path) -> dict[str, bytes]:
    """Returns every file's bytes, without the random id that torch puts into the metadata of each save."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): DRAWN.sub(b"(drawn)", path.read_bytes()) for path in files}
