"""Prints the help of Megatron's checkpointing options; 0.19.2's own --help fails at another option."""

import argparse

from megatron.training import arguments


def main() -> None:
    print(arguments._add_checkpointing_args(argparse.ArgumentParser()).format_help())
