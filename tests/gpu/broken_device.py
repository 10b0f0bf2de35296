"""A save during which the device fails; run by test_device_saves.py in a separate process."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from megatron_datastates.config import MIB, Options
from megatron_datastates.engine.staging import StagingEngine
from tests.gpu.device_save import DeviceSave


def main(folder: Path) -> None:
    engine = StagingEngine(Options(staging_memory=64 * MIB, slot_size=MIB))
    tensors = {"layer": torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")}
    small, outside = torch.ones(10, device="cuda"), torch.tensor([1000], device="cuda")
    small[torch.zeros(1, dtype=torch.long, device="cuda")]  # loads its kernel, which may wait for the device
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)  # most of a second: the kernel breaks once the save has begun
    small[outside]  # an index out of bounds: the kernel's assertion ends the context
    save = DeviceSave(engine, folder, tensors)
    save.fence()
    try:
        save.finish()
    except AssertionError as error:
        print(error)
        save.save.cancel_and_remove("the device broke")
        save.save.join()
        engine.close()
        sys.stdout.flush()
        os._exit(0)  # torch may abort at exit without a device
    print("the save did not fail")
    os._exit(1)


main(Path(sys.argv[1]))
