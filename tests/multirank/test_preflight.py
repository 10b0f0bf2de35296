"""datastates preflight on several ranks."""

from pathlib import Path

import megatron_datastates as ds
from tests.support.world import World


def test_ranks_that_share_a_directory(world: World, tmp_path: Path) -> None:
    first, second = world.run("preflight_ranks:preflight", [str(tmp_path)] * 2)
    assert first == second and first["good"]
    assert first["nodes"] == 1 and first["trial"] == {"bytes": 4 << 20, "fault": None}
    assert first["checks"]["load"] == ["OK", "the same bits, each rank what another one has saved"]
    assert first["checks"]["shared directory"] == ["OK", "all ranks see the same files"]
    assert not (tmp_path / "run").exists()


def test_nodes_of_one_name_are_not_taken_for_one(world: World, tmp_path: Path) -> None:
    """Ranks would load what their own node has saved, and has in its page cache."""
    first, second = world.run("preflight_ranks:preflight_of_two_kernels", tmp_path)
    assert first == second and first["good"] and first["nodes"] == 2


def test_nodes_that_do_not_share_it(world: World, tmp_path: Path) -> None:
    nodes = [tmp_path / "a", tmp_path / "b"]
    for node in nodes:
        node.mkdir()
    first, second = world.run("preflight_ranks:preflight", [str(node) for node in nodes])
    assert first == second and not first["good"] and first["trial"] is None
    verdict, text = first["checks"]["shared directory"]
    assert verdict == "FAILED" and "does not see the files of 1 rank" in text and "2 of 2 ranks" in text
    assert [list(node.iterdir()) for node in nodes] == [[], []]


def test_ranks_that_differ(world: World, tmp_path: Path) -> None:
    first, second = world.run("preflight_ranks:preflight_where_a_rank_differs", tmp_path)
    assert first == second and not first["good"]
    assert first["checks"]["release"] == ["OK", f"megatron_datastates {ds.__version__}"]
    verdict, text = first["checks"]["save"]
    assert verdict == "FAILED" and "--datastates-drain-every is '2', not '1' as on rank 0" in text
    assert not (tmp_path / "run").exists()


def test_no_rank_ends_before_the_first_has_printed(world: World, tmp_path: Path) -> None:
    """torchrun would end the first one, too, with results unprinted and files left."""
    assert world.run("preflight_ranks:close", tmp_path)[1]["printed"]
