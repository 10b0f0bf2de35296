"""msgspec looks into a class at its first use, and crashes where two threads do so at once."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import megatron_datastates

PACKAGE = Path(megatron_datastates.__file__).parent
ALL_AT_ONCE = """
import gc, sys, threading
from pathlib import Path
from megatron_datastates.pipeline.near.nodes import NODES_NAME, NodeEntry, Nodes, nodes_in

folder = Path(sys.argv[1])
(folder / NODES_NAME).write_bytes(Nodes(0, [NodeEntry("a", [0, 1])]).encode())
gc.set_threshold(1)
sys.setswitchinterval(1e-6)
together = threading.Barrier(16)

def read():
    together.wait()
    assert nodes_in(folder) is not None

threads = [threading.Thread(target=read) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_read_their_first_list_of_nodes_at_once(tmp_path: Path) -> None:
    """As the looks of a recovery do. Half of such processes crashed."""
    for _ in range(5):
        subprocess.run([sys.executable, "-c", ALL_AT_ONCE, tmp_path], check=True)


def test_decoders_are_made_at_import() -> None:
    at_import, elsewhere = [], []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        of_module = {
            call for node in tree.body if isinstance(node, ast.Assign) for call in ast.walk(node.value)
        }
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call):
                continue
            function = ast.unparse(call.func)
            if not re.fullmatch(r"msgspec\.(convert|\w+\.(decode|Decoder))", function):
                continue
            if path == PACKAGE / "reports" / "reading.py":  # of a command that has one thread
                continue
            is_right = function.endswith(".Decoder") and call in of_module
            (at_import if is_right else elsewhere).append(f"{path.name}:{call.lineno}: {function}")
    assert not elsewhere and len(at_import) >= 8, (elsewhere, at_import)
