"""Prints the help of Megatron's checkpointing options. (In 0.19.2, --help fails at another one.)"""

import argparse

from megatron.training import arguments


def main() -> None:
    print(arguments._add_checkpointing_args(argparse.ArgumentParser()).format_help())
