"""A load that fails on one rank: no rank hangs, and all raise the same error."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from megatron.core.dist_checkpointing.validation import StrictHandling

from megatron_datastates.mcore.hooks import versions
from tests.faults.test_damaged import (
    bit_in_data,
    bit_in_footer,
    bit_in_index,
    bit_in_manifest,
    data_file,
    missing,
    no_manifest,
    truncated,
)
from tests.support.ranks import RankForge
from tests.support.world import World

pytestmark = pytest.mark.conformance

HOWS = ["plain", "parallel"]
BOTH = pytest.mark.parametrize("ranks", [2, 4])


@pytest.fixture(scope="module")
def saved(world_forge: RankForge, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Returns, by number of ranks, a checkpoint that they saved. Each is made once; copy it to damage it."""
    folder = tmp_path_factory.mktemp("saved")
    world = World(world_forge, folder / "runs")

    def by(ranks: int) -> Path:
        directory = folder / str(ranks)
        if not directory.exists():
            world.run_to_end("fault_ranks:save_only", directory, 1, ranks=ranks)
        return directory

    return by


def failures(
    world: World,
    directory: Path | str,
    good: Path,
    ranks: int,
    *,
    hows: list[str] = HOWS,
    plan: str = "",
    odd_rank: int = -1,
    views: Path | str = "",
) -> dict[str, dict]:
    """Returns, by load strategy, the failure that all ranks reported, after checking that it is the same."""
    reports = world.run(
        "load_ranks:fail_together",
        directory,
        good,
        hows,
        plan,
        odd_rank,
        views,
        ranks=ranks,
        timeout_seconds=120,
    )
    for how in hows:
        assert all(each["failures"][how] == reports[0]["failures"][how] for each in reports), reports
        assert reports[0]["failures"][how]["error"] is not None, how
    found: dict[str, dict] = reports[0]["failures"]
    return found


def require_verify_integrity() -> None:
    if not versions.installed_version().startswith("0.19"):
        pytest.skip("load(verify_integrity=...) is new in 0.19")


@BOTH
@pytest.mark.parametrize(
    "damage", [missing, truncated, bit_in_data, bit_in_footer], ids=lambda damage: damage.__name__
)
def test_file_that_one_rank_reads_fails_all(
    world: World, saved: Callable[[int], Path], tmp_path: Path, ranks: int, damage: Callable[[Path], str]
) -> None:
    directory = Path(shutil.copytree(saved(ranks), tmp_path / "ck"))
    words = damage(directory)
    for failure in failures(world, directory, saved(ranks), ranks).values():
        assert f"failed on 1 of {ranks} ranks: rank 1: " in failure["error"]
        assert (
            words in failure["error"]
            and str(next(directory.glob("data-00001-*"), "data-00001-")) in failure["error"]
        )
        assert "'weight'" in failure["error"]
        assert re.search("[Rr]ank 1 wrote", failure["error"])


def test_bad_block_is_reported_with_its_offset(
    world: World, saved: Callable[[int], Path], tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(saved(2), tmp_path / "ck"))
    path = data_file(directory, 1)
    data = bytearray(path.read_bytes())
    data[(1 << 20) + 5] ^= 1
    path.write_bytes(data)
    for failure in failures(world, directory, saved(2), 2).values():
        assert f"{path}, which rank 1 wrote, is corrupt" in failure["error"]
        assert (
            f"at byte offset {1 << 20} has a wrong checksum. It holds data of 'weight'." in failure["error"]
        )
        assert failure["cause"] == "CorruptDataError"


@BOTH
@pytest.mark.parametrize(
    "damage", [bit_in_index, bit_in_manifest, no_manifest], ids=lambda damage: damage.__name__
)
def test_error_common_to_all_ranks_is_reported_once(
    world: World, saved: Callable[[int], Path], tmp_path: Path, ranks: int, damage: Callable[[Path], str]
) -> None:
    directory = Path(shutil.copytree(saved(ranks), tmp_path / "ck"))
    words = damage(directory)
    for failure in failures(world, directory, saved(ranks), ranks).values():
        assert f"failed on {ranks} of {ranks} ranks: ranks 0, 1" in failure["error"]
        assert failure["error"].count(words) == 1
        assert ("ranks 0, 1, 2 and 1 more: " in failure["error"]) == (ranks == 4)


@BOTH
@pytest.mark.parametrize("plan", ["read:1:EIO", "late read:1:EIO"], ids=["common state", "shards"])
def test_disk_error_on_one_rank_fails_all(
    world: World, saved: Callable[[int], Path], ranks: int, plan: str
) -> None:
    """The error comes before Megatron gathers metadata, or after."""
    for failure in failures(world, saved(ranks), saved(ranks), ranks, plan=plan, odd_rank=1).values():
        assert f"failed on 1 of {ranks} ranks: rank 1: " in failure["error"]
        assert "Input/output error" in failure["error"] and str(saved(ranks)) in failure["error"]
        assert failure["error"].count(" failed on ") == 1, "ranks share no failure that they have in common"
        assert failure["cause"] == "StorageError"


@BOTH
def test_mismatch_on_one_rank_fails_all(world: World, saved: Callable[[int], Path], ranks: int) -> None:
    for failure in failures(world, saved(ranks), saved(ranks), ranks, odd_rank=ranks - 1).values():
        assert f"rank {ranks - 1}: " in failure["error"] and "no tensor 'other.weight'" in failure["error"]
        assert failure["is torch's"], "programs that catch torch's exception catch this one"


def test_strictness_that_raises_on_one_rank_fails_all(world: World, saved: Callable[[int], Path]) -> None:
    """Megatron's own check, after it has gathered metadata and before the ranks communicate again."""
    hows = ["strict plain", "strict parallel"]
    for failure in failures(world, saved(2), saved(2), 2, hows=hows, odd_rank=1).values():
        assert "failed on 1 of 2 ranks: rank 1: " in failure["error"]
        assert "Unexpected keys" in failure["error"] and "other.weight" in failure["error"]


@pytest.mark.parametrize(
    "sums", ['{"files"', '{"files": {"datastates.manifest": "00"}}'], ids=["cut", "wrong"]
)
def test_wrong_checksums_of_megatron_fail_all(
    world: World, saved: Callable[[int], Path], tmp_path: Path, sums: str
) -> None:
    """Only the first rank checks them."""
    require_verify_integrity()
    directory = Path(shutil.copytree(saved(2), tmp_path / "ck"))
    (directory / "integrity.json").write_text(sums)
    for failure in failures(
        world, directory, saved(2), 2, hows=["verified plain", "verified parallel"]
    ).values():
        assert "failed on 1 of 2 ranks: rank 0: " in failure["error"]
        assert ("JSONDecodeError" in failure["error"]) == (sums == '{"files"')


def test_missing_checksums_of_megatron_fail_all_whatever_the_strictness(
    world: World, saved: Callable[[int], Path]
) -> None:
    """Only the first rank looks for them; with most values the ranks agree next on what they request."""
    require_verify_integrity()
    hows = [f"verified {value.value} {how}" for value in StrictHandling for how in HOWS]
    for failure in failures(world, saved(2), saved(2), 2, hows=hows).values():
        assert "failed on 1 of 2 ranks: rank 0: Integrity manifest not found" in failure["error"]


@pytest.mark.parametrize("unseen", ["datastates.manifest", "index-*", "data-00001-*", "both"])
def test_file_that_one_rank_does_not_see_fails_all(
    world: World, saved: Callable[[int], Path], tmp_path: Path, unseen: str
) -> None:
    """Each rank has its own view of the directory, as over NFS, where each machine has its own cache."""
    hidden = ["datastates.manifest", "metadata.json"] if unseen == "both" else [unseen]
    for rank in range(2):
        view = tmp_path / str(rank) / "ck"
        view.mkdir(parents=True)
        for path in saved(2).iterdir():
            if rank == 0 or not any(path.match(pattern) for pattern in hidden):
                (view / path.name).symlink_to(path)
    for failure in failures(world, "ck", saved(2), 2, views=tmp_path).values():
        assert failure["error"].startswith("loading ck failed on 1 of 2 ranks: rank 1: ")


def test_malicious_object_does_not_run_and_fails_all(world: World, tmp_path: Path) -> None:
    reports = world.run("load_ranks:save_and_load_malicious", tmp_path / "ck", tmp_path / "ran", HOWS)
    for each in reports:
        assert not each["ran"]
        assert each["failures"] == reports[0]["failures"]
        for failure in each["failures"].values():
            assert "'object/shard_0_1'" in failure["error"] and "is not trusted" in failure["error"]


def test_merge_that_fails_on_one_rank_fails_all(world: World, saved: Callable[[int], Path]) -> None:
    """In a fully parallel load that is after the exchange."""
    for failure in failures(world, saved(2), saved(2), 2, plan="merge", odd_rank=1).values():
        assert "failed on 1 of 2 ranks: rank 1: RuntimeError: not to be merged" in failure["error"]


@pytest.mark.parametrize("how", HOWS)
def test_process_groups_may_load_a_checkpoint_each(world: World, tmp_path: Path, how: str) -> None:
    require_verify_integrity()  # process_group is of that release, too
    reports = world.run("load_ranks:load_another_checkpoint_in_each_group", tmp_path, how, -1, ranks=4)
    assert [each["found"] for each in reports] == [0, 0, 1, 1]


def test_the_first_rank_of_each_process_group_looks_for_its_checksums(world: World, tmp_path: Path) -> None:
    require_verify_integrity()
    function = "load_ranks:load_another_checkpoint_in_each_group"
    reports = world.run(function, tmp_path, "verified plain", -1, ranks=4)
    for error, first in zip([each["error"] for each in reports], (0, 0, 2, 2), strict=True):
        assert f"failed on 1 of 2 ranks: rank {first}: Integrity manifest not found" in (error or "")


@pytest.mark.parametrize("how", ["parallel", "late parallel"])
def test_a_failure_before_an_exchange_reaches_the_ranks_of_all_groups(
    world: World, tmp_path: Path, how: str
) -> None:
    """It comes before Megatron gathers metadata, or after."""
    require_verify_integrity()
    function = "load_ranks:load_another_checkpoint_in_each_group"
    errors = [each["error"] for each in world.run(function, tmp_path, how, 0, ranks=4)]
    assert all(error and "rank 0: " in error and "Input/output error" in error for error in errors)


# Besides Megatron's own gather of metadata and the collectives of an exchange.
@pytest.mark.parametrize(
    ("how", "validated", "sums"),
    [("plain", True, 2), ("plain", False, 0), ("parallel", True, 3), ("parallel", False, 4)],
)
def test_good_load_costs_two_sums_one_for_an_exchange_and_one_where_megatron_gathers_nothing(
    world: World, saved: Callable[[int], Path], how: str, validated: bool, sums: int
) -> None:
    for each in world.run("load_ranks:count_of_good_load", saved(2), how, validated):
        assert each["counts"].get("all_reduce", 0) == sums
        gathers = int(validated) + 2 * (how == "parallel")
        assert each["counts"].get("all_gather_object", 0) == gathers


def test_one_rank_reads_without_its_peers(world: World, saved: Callable[[int], Path], tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(saved(2), tmp_path / "ck"))
    bit_in_data(damaged)
    reports = world.run("load_ranks:read_alone", saved(2), damaged)[0]
    assert reports["counts"] == {}
    assert "is corrupt" in reports["errors"][0] and "ranks" not in reports["errors"][0]
    assert reports["errors"][1] is None, "the part that rank 0 loads is whole"


def test_load_never_mixes_two_saves_that_are_published_one_after_the_other(
    world: World, tmp_path: Path
) -> None:
    reports = world.run("load_ranks:load_while_another_save_is_published", tmp_path)
    assert len({each["error"] for each in reports}) == 1
    for each in reports:
        assert each["error"] is not None and each["found"] == [], "its tensors are another save's"
        assert "was replaced by another save while it was read: load again" in each["error"]


def test_load_never_mixes_two_checkpoints_that_ranks_have_opened(world: World, tmp_path: Path) -> None:
    for each in world.run("load_ranks:load_another_checkpoint_on_each_rank", tmp_path):
        assert each["error"] is not None and "ranks have opened different checkpoints" in each["error"]


def test_checkpoint_that_is_removed_while_it_is_read_is_said_to_be_gone(world: World, tmp_path: Path) -> None:
    """Not: taken for one of another format, whose reader knows nothing of it."""
    for each in world.run("load_ranks:load_while_it_is_removed", tmp_path):
        assert each["error"] is not None and "No such file or directory" in each["error"]
