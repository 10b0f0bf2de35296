"""A program that pretrains after `ds.enable(transform=...)`."""

import torch

import megatron_datastates as ds
from megatron_datastates.providers import Cast


def main(arguments: list[str], folder: str) -> None:
    """Pretrains; moments are stored as bfloat16."""
    import tiny_rank

    ds.enable(transform=lambda state: Cast(state, torch.bfloat16, "*exp_avg*"))
    tiny_rank.main(arguments, folder)
