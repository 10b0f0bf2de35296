"""A data loader of Megatron-Energon over a small data set that needs no files. Imports Energon."""

from collections.abc import Iterator
from typing import Any

from megatron.energon import SavableDataset, WorkerConfig, get_savable_loader
from megatron.energon.rng import WorkerRng

SAMPLES = 20  # of each worker


class Numbers(SavableDataset[Any]):
    """Samples (worker, position, random number); the position and the generator are its state."""

    _savable_fields = ("position", "rng")

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(worker_config=config)
        self.reset_state_own()

    def reset_state_own(self) -> None:
        self.position, self.rng = 0, WorkerRng(self.worker_config)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        self.position %= SAMPLES
        while self.position < SAMPLES:
            self.position += 1
            yield self.worker_config.rank_worker_id(), self.position, self.rng.randbelow(1000)

    def len_worker(self, worker_idx: int | None = None) -> int:
        return SAMPLES

    def worker_has_samples(self) -> bool:
        return True

    def can_restore_sample(self) -> bool:
        return False

    def assert_can_restore(self) -> None:
        raise NotImplementedError

    def restore_sample(self, restore_key: Any) -> Any:
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        return {}

    def __str__(self) -> str:
        return "Numbers"


def new_loader(workers: int) -> Any:
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    return get_savable_loader(Numbers(config), checkpoint_every_sec=0, checkpoint_every_min_n_samples=1)
