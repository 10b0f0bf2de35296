"""Benchmarks of megatron_datastates, each a package that runs with `python -m`.

- `benchmarks.engine`: saves on this machine's CPU and disk, compared with fio.
- `benchmarks.ablation`: what overlapping, coalescing and lazy copies each bring to a save.
- `benchmarks.load`: loads through Megatron, compared with torch_dist and fio.
- `benchmarks.scale`: planning, publishing and opening checkpoints of up to 16,384 simulated ranks.
- `benchmarks.peers`: saves and loads of one state by this package and by all others, in turns.
- `benchmarks.training`: what checkpoints cost a run in Megatron's own loop, as the papers measure it.
- `benchmarks.near_simulation`: 1,024 nodes that fail, by published rates: which tier restores, what is lost.
- `benchmarks.gpu`: what a save costs a GPU that trains; `benchmarks/gpu/run.sh` prepares the machine.

This folder holds what they share: interleaved rounds (`rounds`), the description of the machine (`machine`),
the limit of the disk (`disk`), states and saves (`states`, `saves`), ranks (`worlds`), command lines
(`command`) and pictures (`picture`). Results are in `results/`, and `tools/results_table.py` puts some of
them into the README. DIARY.md has what was tried, and what came of it. This module imports nothing: part of
`benchmarks.gpu` has to run without torch.
"""
