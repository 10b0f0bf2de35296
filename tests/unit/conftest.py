"""What all unit tests share."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import settings

from megatron_datastates.pipeline.saver import Saver
from megatron_datastates.pipeline.saver_pool import close_all
from tests.support.programs import Programs
from tests.unit.converting import dcp_state, save_with_dcp
from tests.unit.inspecting import save_run
from tests.unit.states import new_saver

# No deadline: the first example of a test may be the one that loads half of torch.
# HYPOTHESIS_EXAMPLES=5000 looks at that many examples, others each time; without it they are always the same.
EXAMPLES = os.environ.get("HYPOTHESIS_EXAMPLES")
settings.register_profile(
    "unit", deadline=None, print_blob=True, derandomize=EXAMPLES is None, max_examples=int(EXAMPLES or 50)
)
settings.load_profile("unit")


@pytest.fixture(autouse=True, scope="module")
def close_front_door() -> Iterator[None]:
    """Closes the savers that `ds.save` has made, whose threads and memory other modules would see."""
    yield
    close_all()


@pytest.fixture
def saver() -> Iterator[Saver]:
    saver = new_saver()
    yield saver
    saver.close()


@pytest.fixture(scope="module")
def world_of_one() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Runs programs that start at once, since torch is imported already."""
    with Programs() as server:
        yield server


@pytest.fixture(scope="session")
def by_dcp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that DCP wrote, a file for each tensor and for an object. Not to be changed."""
    directory = tmp_path_factory.mktemp("run") / "iter_0000012"
    save_with_dcp(directory, dcp_state() | {"object": "words"}, single_file_per_rank=False)
    return directory


@pytest.fixture(scope="session")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two iterations; see inspecting.py. Not to be changed."""
    root = tmp_path_factory.mktemp("saved") / "run"
    save_run(root)
    return root


@pytest.fixture
def root(saved_run: Path, tmp_path: Path) -> Path:
    """A copy of the run."""
    return Path(shutil.copytree(saved_run, tmp_path / "run"))


@pytest.fixture
def checkpoint(root: Path) -> Path:
    """The first checkpoint in the copy of the run."""
    return root / "iter_0000005"
