"""A save of tensors from an allocator that the environment names; run by test_device_saves.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from megatron_datastates.config import MIB, Options
from megatron_datastates.engine.staging import StagingEngine
from tests.gpu.device_save import DeviceSave


def main(folder: Path) -> None:
    engine = StagingEngine(Options(staging_memory=256 * MIB, slot_size=4 * MIB))
    whole = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda").random_()
    tensors = {f"small{n}": torch.rand(99, device="cuda") for n in range(300)}
    tensors |= {"whole": whole, "columns": whole.view(-1, 4096)[:, 1:100]}
    wanted = {key: tensor.to("cpu", copy=True) for key, tensor in tensors.items()}
    save = DeviceSave(engine, folder, tensors)
    save.fence()
    for tensor in tensors.values():
        tensor.zero_()
    save.finish()
    differing = [key for key, found in save.stored().items() if not torch.equal(found, wanted[key])]
    engine.close()
    print(differing or "as it was")


main(Path(sys.argv[1]))
