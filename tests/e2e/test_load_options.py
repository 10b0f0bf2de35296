"""Megatron's options for loading do with our checkpoints what they do with torch_dist's.

The same run is saved in each format; each option is tried on both checkpoints, and what was loaded and
logged is compared.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.ranks import RankForge
from tests.support.tiny import LAYOUTS, Checkpoints, Ending, Pretraining

HOW = {
    "torch_dist": ["--ckpt-format", "torch_dist"],
    "datastates": ["--ckpt-format", "datastates", "--async-save"],
}
SAVED = [2, 4]
COMMON = [*LAYOUTS["dp2"], "--train-iters", "5"]
MODEL = ["--ffn-hidden-size", "192"]
Saved = Callable[..., dict[str, Checkpoints]]


@pytest.fixture(scope="module")
def saved(forge: RankForge, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Returns, by options of the saving run, its checkpoints in each format. Each is made once."""
    folder = tmp_path_factory.mktemp("saved")
    pretraining = Pretraining(forge, folder / "runs")
    made: dict[tuple[str, ...], dict[str, Checkpoints]] = {}

    def by(*options: str) -> dict[str, Checkpoints]:
        if options not in made:
            found = {name: Checkpoints(folder / str(len(made)) / name) for name in HOW}
            for name, checkpoints in found.items():
                saving = ["--save", checkpoints.root, "--save-interval", "2", "--exit-interval", "4"]
                pretraining.run(*COMMON, *MODEL, *saving, "--verify-integrity", *HOW[name], *options)
                assert checkpoints.complete() == SAVED
            made[options] = found
        return made[options]

    return by


def load(pretraining: Pretraining, saved: dict[str, Checkpoints], *options: str) -> dict[str, Ending]:
    """Loads each format's checkpoint and takes one step. Saves nothing and passes no --ckpt-format."""
    return {
        name: pretraining.run(*COMMON, "--load", checkpoints.root, *options)
        for name, checkpoints in saved.items()
    }


def begun(ending: Ending) -> list[tuple[int, dict[str, str]]]:
    return [(rank.begun_at, rank.begun) for rank in ending.ranks]


OPTIONS = {
    "no optimizer, no rng": (4, ["--no-load-optim", "--no-load-rng"]),
    "weights only, in another layout": (4, ["--no-load-optim", "--no-load-rng", *LAYOUTS["tp2"]]),
    "finetune": (0, ["--finetune"]),
    "step": (2, ["--ckpt-step", "2"]),
    "parallel load": (4, ["--ckpt-fully-parallel-load"]),
    "verified": (4, ["--verify-integrity"]),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_option_loads_what_it_loads_from_torch_dist(
    option: str, saved: Saved, pretraining: Pretraining
) -> None:
    iteration, arguments = OPTIONS[option]
    endings = load(pretraining, saved(), *MODEL, *arguments)
    assert begun(endings["datastates"]) == begun(endings["torch_dist"])
    assert endings["datastates"].differences(endings["torch_dist"]) == []
    assert endings["datastates"].ranks[0].begun_at == iteration


def test_a_legacy_checkpoint_resumes_as_in_its_own_format(pretraining: Pretraining, tmp_path: Path) -> None:
    run, formats = ["--save", tmp_path, "--exit-interval", "2", "--ckpt-format"], ["torch", *HOW]
    before = pretraining.run(*COMMON, *MODEL, *run, "torch")
    stock, *others = (
        pretraining.run(*COMMON, *MODEL, "--load", tmp_path, "--ckpt-format", name) for name in formats
    )
    assert stock.resumed_from(before) == 2
    for ending in others:
        assert begun(ending) == begun(stock) and ending.differences(stock) == []


def test_arguments_of_the_checkpoint_are_used_on_request(saved: Saved, pretraining: Pretraining) -> None:
    """The run does not pass --ffn-hidden-size, and the checkpoint's is not the default."""
    endings = load(pretraining, saved(), "--use-checkpoint-args")
    assert begun(endings["datastates"]) == begun(endings["torch_dist"])
    assert "Setting ffn_hidden_size to 192 from checkpoint" in endings["datastates"].log


@pytest.mark.long
def test_what_was_not_saved_is_not_loaded(saved: Saved, pretraining: Pretraining) -> None:
    without_them = saved("--no-save-optim", "--no-save-rng")
    endings = load(pretraining, without_them, *MODEL, "--no-load-optim", "--no-load-rng")
    assert begun(endings["datastates"]) == begun(endings["torch_dist"])
    for name, checkpoints in without_them.items():
        outcome = pretraining.fail(*COMMON, *MODEL, "--load", checkpoints.root)
        assert all(outcome.exits), (name, outcome.exits)


# Whether the run ends with an error, and which kinds of keys it logs. Megatron's own loop fails when the
# load returns keys to it.
STRICTNESS: dict[str, tuple[bool, set[str]]] = {
    "assume_ok_unexpected": (True, set()),
    "log_unexpected": (False, {"Unexpected"}),
    "log_all": (False, {"Unexpected", "Missing"}),
    "raise_unexpected": (True, {"Unexpected"}),
    "raise_all": (True, {"Unexpected", "Missing"}),
    "return_unexpected": (True, set()),
    "return_all": (True, set()),
    "ignore_all": (False, set()),
}


@pytest.mark.parametrize("strictness", STRICTNESS)
def test_strictness_is_as_with_torch_dist(strictness: str, saved: Saved, pretraining: Pretraining) -> None:
    """The model has layer norms that the checkpoint lacks, and lacks biases that the checkpoint has."""
    other_model = [*MODEL, "--qk-layernorm", "--disable-bias-linear"]
    how = [*other_model, "--no-load-optim", "--no-load-rng", "--dist-ckpt-strictness", strictness]
    seen = {}
    for name, checkpoints in saved().items():
        outcome = pretraining.fail(*COMMON, "--load", checkpoints.root, *how)
        seen[name] = (outcome.exits, mismatches(outcome.log))
    assert seen["datastates"] == seen["torch_dist"]
    exits, lines = seen["datastates"]
    ends, sides = STRICTNESS[strictness]
    assert all(exits) == ends
    assert {side for side in ("Unexpected", "Missing") if side in " ".join(lines)} == sides


def mismatches(log: str) -> list[str]:
    """Returns Megatron's log lines on keys that do not match, without times and with the keys sorted."""
    lines = [line for line in log.splitlines() if re.search(r"(Unexpected|Missing) keys", line)]
    found = {re.sub(r"^.*?(Unexpected|Missing)", r"\1", line) for line in lines}
    return sorted(" ".join(sorted(re.findall(r"'[^']*'|^[A-Z][a-z]+", line))) for line in found)
