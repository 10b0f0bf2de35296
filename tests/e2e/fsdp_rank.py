"""One rank of a tiny pretraining with Megatron-FSDP whose checkpoints DCP saves with our writer."""

import os

import tiny_rank
import torch.distributed.checkpoint as dcp

from megatron_datastates.dcp import DataStatesWriter


def main(arguments: list[str], folder: str) -> None:
    if os.environ["WRITER"] == "ours":
        dcp.FileSystemWriter = DataStatesWriter
    tiny_rank.main(arguments, folder)
