"""slime: our strategy writes, a resume is exact, and weights may be swapped once a save has returned."""

import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.ranks import RankForge
from tests.support.tiny import RECIPES
from tests.support.world import PATH

HOW = {
    "format": (["--ckpt-format", "datastates"], {}),
    "format-async": (["--ckpt-format", "datastates", "--async-save"], {}),
    "switch": ([], {"MEGATRON_DATASTATES_ENABLE": "1"}),
    "near": (["--ckpt-format", "datastates", "--async-save", "--datastates-near", "$NEAR"], {}),
}


@pytest.fixture(scope="module")
def forge() -> Iterator[RankForge]:
    if metadata.version("megatron-core") < "0.17":
        pytest.skip("megatron-core 0.16 has no training loop")
    preload = ("stand_ins:install", "megatron.training", "slime_ranks")
    with RankForge(preload, (Path(__file__).parent, *PATH)) as parent:
        yield parent


@pytest.mark.parametrize(("arguments", "environment"), HOW.values(), ids=HOW)
def test_weights_swapped_after_a_save_do_no_harm(
    forge: RankForge, tmp_path: Path, arguments: list[str], environment: dict[str, str]
) -> None:
    root, logs, near = tmp_path / "checkpoints", tmp_path / "logs", tmp_path / "near"
    tiny = (RECIPES / "tiny.args").read_text().split()
    outcome = forge.run(
        "slime_ranks:main",
        ranks=2,
        logs=logs,
        arguments=[[*tiny, *arguments, "--save", str(root)], str(logs)],
        environment=environment
        | {"MEGATRON_DATASTATES_REPORT_FILE": str(tmp_path / "saves.jsonl"), "NEAR": str(near)},
        timeout_seconds=60,
    )
    outcome.succeeded()
    for rank in (json.loads((logs / f"rank{number}.json").read_text()) for number in range(2)):
        assert rank["swapped"] > 20
        assert rank["different"] == []
        assert (rank["iteration"], rank["tracker"]) == (2, "2")
    events = [json.loads(line) for line in (tmp_path / "saves.jsonl").read_text().splitlines()]
    saves = [event for event in events if event["event"] == "save"]
    assert [event["lazy_bytes"] for event in saves] == [0, 0], "all was copied before each save returned"
    assert near.exists() == ("$NEAR" in arguments)
    for step in (1, 2):
        assert (root / f"iter_{step:07d}" / "datastates.manifest").is_file()
        assert not list((root / f"iter_{step:07d}").glob("*.distcp"))
