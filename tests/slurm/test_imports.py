"""Imports within nemo_ext/slurm run one way, those inside functions too."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import nemo_ext.slurm

FOLDER = Path(nemo_ext.slurm.__file__).parent


def imported(file: Path) -> set[str]:
    """Names of the modules and packages that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return found


def test_no_file_imports_one_that_imports_it() -> None:
    graph = {f"nemo_ext.slurm.{file.stem}": imported(file) for file in FOLDER.glob("*.py") if file.stem != "__init__"}

    order = list(TopologicalSorter({name: needs & graph.keys() for name, needs in graph.items()}).static_order())

    assert set(order) == set(graph)
    assert not any(name.startswith("nemo_ext.data.sft") for needs in graph.values() for name in needs)
