"""No command writes into a checkpoint, neither into its source nor into another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_datastates.convert.sinks.target import publish_on_exit
from tests.unit import hf_models
from tests.unit.command import run
from tests.unit.trained import STACKED, save_run_of

WRITING = [
    ("export", "{0}", "{0}/x"),
    ("export", "{0}", "{1}/deep/x"),
    ("export", "{llama}", "{llama}/x", "--hf"),
    ("convert", "{0}", "{0}/iter_0000005"),
    ("convert", "{0}", "{1}/x"),
    ("convert", "--all", "{run}", "{0}"),
    ("cat", "{0}", STACKED, "--out", "{0}/x.npy"),
    ("cat", "{0}", STACKED, "--out", "{link}/x.npy"),
    ("diff", "{0}", "{1}", "--plot", "{1}/x.png"),
    ("trend", "{run}", "--plot", "{1}/x.png"),
    ("import", "{hf}", "{0}/run"),
    ("import", "{hf}", "{hf}/run"),
]  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("places")
    save_run_of(root / "run", "torch_dist")
    (root / "link").symlink_to("run/iter_0000005")
    llama = hf_models.arguments(hf_models.LLAMA)
    hf_models.save(root / "llama", llama, hf_models.state(llama))
    assert run("export", root / "llama", root / "hf", "--hf")[0] == 0
    names = {"0": "run/iter_0000005", "1": "run/iter_0000010"}
    return {name: root / names.get(name, name) for name in ("run", "link", "hf", "llama", "0", "1")}


@pytest.mark.parametrize("words", WRITING, ids=" ".join)
def test_a_target_within_a_checkpoint_is_refused(words: tuple[str, ...], places: dict[str, Path]) -> None:
    def listing() -> list[str]:
        return [str(Path(at, name)) for at, _, names in os.walk(places["run"].parent) for name in names]

    texts = {name: str(path) for name, path in places.items()}
    before = listing()
    code, _, said = run(*(word.format(texts["0"], texts["1"], **texts) for word in words))
    assert code in (1, 2) and "lies inside" in said, said
    assert listing() == before


def test_of_two_calls_in_processes_of_one_number_none_removes_what_the_other_makes(tmp_path: Path) -> None:
    """As in two containers with one directory, where process numbers repeat."""
    target = tmp_path / "out"
    with publish_on_exit(target) as first:
        first.mkdir()
        (first / "file").write_text("first")
        with pytest.raises(KeyboardInterrupt), publish_on_exit(target) as second:
            second.mkdir()
            raise KeyboardInterrupt
    assert (target / "file").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
