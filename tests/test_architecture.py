"""Which room may import which, read from the files themselves: no process, no import."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import nemo_ext

pytestmark = pytest.mark.xdist_group(name="architecture")
"""Every file is parsed once."""

PACKAGE = Path(nemo_ext.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"

ROOMS = (
    *("job", "architecture", "chat", "endpoint", "memory", "data", "checkpoint", "megatron", "launch"),
    *("engines", "install"),
    *(
        "parity",
        "blockwise",
        "puzzle",
        "sensitivity",
        "quantization",
        "serving",
        "vllm",
        "generate",
        "rl",
        "evaluation",
        "synthesis",
        "online",
        "rehearsal",
        "slurm",
        "pipeline",
        "mixture",
        "memory_profile",
        "describe",
        "doctor",
        "cli",
        "__main__",
    ),
)
"""From the ground up: a room imports from those before it."""

ENGINES = {
    "megatron": ("megatron", "blockwise", "puzzle", "sensitivity", "evaluation.live", "rehearsal"),
    "mamba_ssm": ("megatron",),
    "transformer_engine": ("megatron",),
    "modelopt": ("quantization",),
    "trl": ("rl.trl",),
    "nemo_rl": ("rl.nemo_rl",),
    "nemo_gym": ("rl.gym",),
    "ray": ("rl.nemo_rl", "slurm"),
    "nemo": ("megatron",),
    "vllm": ("vllm",),
    "datatrove": ("data.curation",),
}
"""Frameworks, and the only rooms that import them."""

NO_TORCH = (
    "job",
    "architecture",
    "chat",
    "endpoint",
    "generate",
    "data",
    "memory",
    "launch",
    "describe",
    "doctor",
    "engines",
)
NO_TORCH += (
    "install",
    "cli",
    "slurm",
    "pipeline",
    "rehearsal.job",
    "rehearsal.puzzle",
    "sensitivity.job",
    "puzzle.job",
    "quantization.job",
    "checkpoint.convert",
)
NO_TORCH += (
    "evaluation.job",
    "rl.job",
    "rl.verifiers",
    "rl.rewards",
    "rl.tasks",
    "rl.worlds",
    "rl.sandbox",
    "rl.trl.render",
    "rl.nemo_rl.render",
)
"""Importing these imports no torch, nor anything of ours that does."""


def test_rooms_import_only_from_those_before_them() -> None:
    wrong = [
        f"{module} imports {other}"
        for module in modules()
        for other in ours(module, everywhere=True)
        if place(module) < place(other)
    ]

    assert not wrong


def test_no_two_folders_import_each_other() -> None:
    """Siblings in one folder; a folder and what lies directly in the one above it belong together."""
    edges = {
        (folder(module), folder(other))
        for module in modules()
        for other in ours(module, everywhere=True)
        if folder(module) != folder(other) and folder(module).rpartition(".")[0] == folder(other).rpartition(".")[0]
    }

    assert not [pair for pair in edges if pair[::-1] in edges]


def test_no_modules_import_each_other() -> None:
    """Inside functions neither."""
    TopologicalSorter({module: ours(module, everywhere=True) for module in modules()}).prepare()


def test_what_the_package_itself_imports_does_not_import_it_back() -> None:
    names = {name for module in ours("", everywhere=True) for name in imported(module, everywhere=True)}

    assert names and not [name for name in names if re.fullmatch(r"nemo_ext(\.[A-Z_]\w*|\.register)?", name)]


def test_an_engine_is_imported_only_in_its_rooms() -> None:
    wrong = [
        f"{module} imports {engine}"
        for module in modules()
        for engine in others(module, everywhere=True) & ENGINES.keys()
        if not any(within(module, room) for room in ENGINES[engine])
    ]

    assert not wrong


def test_what_runs_before_a_job_imports_no_torch() -> None:
    wrong = {
        module: found
        for module in modules()
        if any(within(module, room) for room in NO_TORCH)
        if (found := [each for each in (module, *closure(module)) if "torch" in others(each, everywhere=False)])
    }

    assert not wrong


def test_the_map_names_every_folder_and_file_that_is_there() -> None:
    """docs/architecture.md's list of rooms."""
    said = set(re.findall(r"[\w.]+/|[\w]+\.py", PAGE.read_text().split("\nnemo_ext/\n")[1].split("```")[0]))
    there = {f"{path.name}/" for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    there |= {path.name for path in PACKAGE.glob("*.py") if path.name != "__init__.py"}
    for room in ("job", "architecture", "blockwise", "chat", "puzzle", "rl", "data"):
        there |= {f"{path.name}/" for path in (PACKAGE / room).iterdir() if (path / "__init__.py").is_file()}
        there |= {path.name for path in (PACKAGE / room).glob("*.py") if path.name != "__init__.py"}
    every = {path.name for path in PACKAGE.rglob("*.py")} | {f"{p.name}/" for p in PACKAGE.rglob("*") if p.is_dir()}

    assert not there - said, "not on the map"
    assert not {name for name in said if name.endswith(".py")} - every, "on the map, but nowhere"


def test_places_that_the_map_points_to_exist() -> None:
    """docs/architecture.md's table "Where is ...?"."""
    table = PAGE.read_text().split("\n## Where is ...?\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+) \| `([\w/]+\.py)`(?: `(\w+)`)?.* \|$", table, re.MULTILINE)
    wrong = [
        question
        for question, path, name in rows
        if not (PACKAGE / path).is_file()
        or (name and not re.search(rf"^(def|class) {name}\b", (PACKAGE / path).read_text(), re.MULTILINE))
    ]

    assert len(rows) >= 30
    assert not wrong


@cache
def modules() -> dict[str, Path]:
    """Every module of ours by its dotted name below `nemo_ext`; a package by its folder's."""
    named = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


@cache
def imported(module: str, *, everywhere: bool) -> frozenset[str]:
    """Dotted names that a module imports: anywhere, or while it is imported itself."""
    found = set()
    for node in _statements(tree(module), everywhere=everywhere):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


@cache
def tree(module: str) -> ast.Module:
    """What a module says."""
    return ast.parse(modules()[module].read_text())


def _statements(whole: ast.AST, *, everywhere: bool) -> Iterator[ast.stmt]:
    """Statements, without what is in expressions, where nothing is imported."""
    waiting = [whole]
    while waiting:
        node = waiting.pop()
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            for inner in getattr(node, part, ()):
                if isinstance(inner, ast.stmt):
                    yield inner
                function = isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
                typing_only = isinstance(inner, ast.If) and "TYPE_CHECKING" in ast.dump(inner.test)
                if not typing_only and (everywhere or not function):
                    waiting.append(inner)


@cache
def ours(module: str, *, everywhere: bool) -> frozenset[str]:
    """Our modules among them, without `nemo_ext` itself."""
    found = set()
    for name in imported(module, everywhere=everywhere):
        top, _, rest = name.partition(".")
        while top == "nemo_ext" and rest and rest not in modules():
            rest = rest.rpartition(".")[0]
        if top == "nemo_ext" and rest:
            found.add(rest)
    return frozenset(found - {module})


def others(module: str, *, everywhere: bool) -> set[str]:
    """Top-level names of everything else."""
    return {name.partition(".")[0] for name in imported(module, everywhere=everywhere)} - {"nemo_ext"}


@cache
def closure(module: str) -> frozenset[str]:
    """Our modules that importing this one imports."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        for other in ours(waiting.pop(), everywhere=False) - found:
            found.add(other)
            waiting.append(other)
    return frozenset(found)


def place(module: str) -> int:
    """The place of a module's room; `nemo_ext` itself is above all."""
    room = module.partition(".")[0]
    return ROOMS.index(room) if room else len(ROOMS)


def folder(module: str) -> str:
    """The folder that a module lies in, dotted; a package is its own."""
    return module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]


def within(module: str, room: str) -> bool:
    """Whether a module is a room or in it."""
    return module == room or module.startswith(f"{room}.")
