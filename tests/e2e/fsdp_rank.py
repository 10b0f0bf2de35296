"""One rank of a tiny pretraining with Megatron-FSDP whose checkpoints DCP saves with our writer."""

import os

import tiny_rank
import torch.distributed.checkpoint as dcp

from megatron_datastates.dcp import DataStatesWriter


class Recorder(tiny_rank.Recorder):
    """Records weights that are whole: Megatron-FSDP ends a step while it still gathers them for the next."""

    def state(self) -> tiny_rank.Digests:
        for chunk in self.working()[0]:
            pipeline = chunk.module.all_gather_pipeline
            for bucket in list(pipeline.param_gather_event_map):
                pipeline.wait_bucket_ready(*bucket)
        return super().state()


def main(arguments: list[str], folder: str) -> None:
    if os.environ["WRITER"] == "ours":
        dcp.FileSystemWriter = DataStatesWriter
    tiny_rank.Recorder = Recorder
    tiny_rank.main(arguments, folder)
