"""Files of tensors that are not expected to change, from a device, on the fake driver."""

import itertools
from pathlib import Path

import pytest
import torch

from megatron_datastates.engine.fence import FENCE
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.publication import Publication
from megatron_datastates.pipeline.runs.runs import is_published
from megatron_datastates.pipeline.saver import Saver
from megatron_datastates.pipeline.upkeep.verify import verify
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.named import NamedState
from tests.native.device_trainer import AFTER, Trainer, failure
from tests.native.device_trainer import trainer as trainer

MIB = 1 << 20
BASE_BYTES = 5 * MIB // 2
either = pytest.mark.parametrize("mutability", [Mutability.AT_FENCE, Mutability.NOW], ids=lambda m: m.name)


@pytest.fixture
def saver(trainer: Trainer) -> Saver:
    """Makes a saver whose slots are blocks, so that files can have digests."""
    sizes = {"slot_size": MIB, "staging_memory": 8 * MIB, "link_from": MIB}
    return trainer.saver(slots=8, **sizes, lazy_delay=3600.0)  # copies begin at the first poll or fence


@pytest.fixture
def model(trainer: Trainer) -> dict[str, torch.Tensor]:
    base = torch.arange(BASE_BYTES, dtype=torch.int64).to(torch.uint8)
    trainer.model = {
        "base": torch.nn.Parameter(base, requires_grad=False),
        "adapter": torch.nn.Parameter(torch.arange(1000.0)),
    }
    return trainer.model


def start(
    saver: Saver, directory: Path, model: dict[str, torch.Tensor], mutability: Mutability
) -> Publication:
    return saver.start(directory, NamedState(dict(model), mutability))


def content(model: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {key: tensor.detach().numpy().tobytes() for key, tensor in model.items()}


def check(publication: Publication, directory: Path, wanted: dict[str, bytes]) -> Path:
    """Checks what was stored; returns the file of the tensors that are not expected to change."""
    publication.wait()
    assert publication.error is None
    checkpoint = Checkpoint.open(directory)
    for key, data in wanted.items():
        assert checkpoint.read_tensor(key).numpy().tobytes() == data, key
    assert verify(directory).faults == []
    (path,) = directory.glob("data-00000.1-*.bin")
    return path


def overwrite(trainer: Trainer, key: str, bytes_: int, at: int = 0) -> None:
    """Has a kernel write into a tensor, as far as the host is concerned at once."""
    trainer.cuda.launch_fill(trainer.stream, trainer.model[key].data_ptr() + at, AFTER, bytes_, 0.05)


@either
def test_what_a_kernel_changed_is_written_and_the_rest_is_linked(
    trainer: Trainer, saver: Saver, model: dict[str, torch.Tensor], mutability: Mutability, tmp_path: Path
) -> None:
    paths = []
    for number, changed in enumerate(["", "adapter", "base", "", "base"]):
        if changed:
            # The kernel is still running when the save begins, and what it leaves is what has to be stored.
            overwrite(trainer, changed, 64 + number)
        publication = start(saver, tmp_path / str(number), model, mutability)
        FENCE.wait("a look at the model")
        trainer.cuda.synchronize(trainer.stream)
        paths.append(check(publication, tmp_path / str(number), content(model)))
    assert model["base"][:68].tolist() == [AFTER] * 68
    assert [one.samefile(other) for one, other in itertools.pairwise(paths)] == [
        True, False, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize("thawed", [False, True], ids=["linked", "written"])
def test_a_step_after_the_fence_changes_no_checkpoint(
    trainer: Trainer, saver: Saver, model: dict[str, torch.Tensor], thawed: bool, tmp_path: Path
) -> None:
    """The fence ends the digest pass, after which a changed tensor is copied once more."""
    first = check(start(saver, tmp_path / "0", model, Mutability.AT_FENCE), tmp_path / "0", content(model))
    if thawed:
        overwrite(trainer, "base", 1, at=BASE_BYTES - 1)
        trainer.cuda.synchronize(trainer.stream)
    wanted = content(model)
    trainer.cuda.delay_copies(seconds=0.01)
    publication = start(saver, tmp_path / "1", model, Mutability.AT_FENCE)
    trainer.optimizer_step()
    assert check(publication, tmp_path / "1", wanted).samefile(first) is not thawed
    assert set(model["base"].tolist()) == {AFTER}


def test_a_step_without_the_fence_links_and_publishes_nothing(
    trainer: Trainer, saver: Saver, model: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    publication = start(saver, tmp_path / "0", model, Mutability.AT_FENCE)
    check(publication, tmp_path / "0", content(model))
    publication = start(saver, tmp_path / "1", model, Mutability.AT_FENCE)
    trainer.optimizer_step(fenced=False)
    trainer.cuda.synchronize(trainer.stream)
    assert "changed too early" in failure(publication)
    publication.join()
    assert not is_published(tmp_path / "1") and not list((tmp_path / "1").glob("data-*"))
