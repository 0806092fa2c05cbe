"""The installed NeMo-RL's config keys, and what its asynchronous loop supports, read from its source files.

NeMo-RL is not imported, which would require ray, torch and half a minute. It does not reject unknown keys, since its
TypedDicts check nothing and its pydantic models allow extra keys. The known keys come from the types that annotate a
master config, and from the example config.
"""

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import OmegaConf

from nemo_ext.job.settings import nearest

Section = Literal["grpo", "distillation", "dpo"]
_EXAMPLES: Mapping[Section, str] = {
    "grpo": "grpo_math_1B.yaml",
    "distillation": "distillation_math.yaml",
    "dpo": "dpo.yaml",
}
_VLLM = "policy.generation.vllm_cfg"
"""Path of vLLM's section, whose class the class of the master config does not name."""
_READ_AS = {_VLLM: "vllm_cfg", "policy.megatron_cfg.fp8_cfg": "fp8_cfg"}
"""Mapping from a section's path to the variable from which NeMo-RL's modules read the section."""


@dataclass
class Keys:
    """Known keys of a mapping in a config.

    Attributes:
        children: mapping from each known key to the keys nested below it, which are empty unless it is a mapping.
        open: True if any other key is also allowed.
    """

    children: dict[str, "Keys"] = field(default_factory=dict)
    open: bool = False

    def merge(self, other: "Keys") -> None:
        """Add another mapping's keys to these, in place."""
        self.open |= other.open
        for key, keys in other.children.items():
            self.children.setdefault(key, Keys()).merge(keys)

    def missing(self, path: str) -> str | None:
        """Return a message with the nearest key if a path such as `loss_fn.ratio_clip_min` is missing, else None."""
        mapping = self
        words = path.split(".")
        for place, word in enumerate(words):
            if mapping.open and word not in mapping.children:
                return None
            if word not in mapping.children:
                above = ".".join(words[:place])
                elsewhere = [path for path in self._paths() if path.rpartition(".")[2] == word]
                hint = f"there is {elsewhere[0]}" if elsewhere else nearest(word, mapping.children)
                return f"no key {word!r}{f' in {above}' if above else ''}: {hint}"
            mapping = mapping.children[word]
        return None

    def _paths(self, above: str = "") -> Iterator[str]:
        for key, keys in self.children.items():
            yield above + key
            yield from keys._paths(f"{above}{key}.")


class Checkout:
    """A source checkout of NeMo-RL.

    Args:
        root: folder with `nemo_rl` and `examples`; if None, the checkout that Python imports `nemo_rl` from.

    Raises:
        ValueError: the folder is not a checkout, or NeMo-RL is not installed.
    """

    def __init__(self, root: str | Path | None = None) -> None:
        if root is None:
            spec = importlib.util.find_spec("nemo_rl")
            places = list(spec.submodule_search_locations or ()) if spec else []
            if not places:
                raise ValueError("NeMo-RL is not installed; put its checkout on PYTHONPATH (docs/rl/nemo_rl.md)")
            root = Path(places[0]).parent
        self.root = Path(root)
        self._keys: dict[Section, Keys] = {}
        if not (self.root / "nemo_rl" / "algorithms" / "grpo.py").is_file() or not self._example("grpo").is_file():
            raise ValueError(
                f"{self.root} is not a checkout of NeMo-RL, because nemo_rl/algorithms/grpo.py or examples/configs is "
                "missing; set NEMO_RL_ROOT to a checkout"
            )

    def _example(self, section: Section) -> Path:
        return self.root / "examples" / "configs" / _EXAMPLES[section]

    def keys(self, section: Section) -> Keys:
        """Return the keys of the master config for an algorithm; raise ValueError if this version does not have it."""
        if section in self._keys:
            return self._keys[section]
        if not self._example(section).is_file():
            raise ValueError(f"this version of NeMo-RL has no examples/configs/{_EXAMPLES[section]}; use 0.7 or later")
        sources = _Sources(self.root)
        keys = sources.keys_of("MasterConfig", f"nemo_rl.algorithms.{section}")
        keys.merge(_keys_in(yaml.safe_load(self._example(section).read_text(encoding="utf-8"))))
        for path, name in _READ_AS.items():
            keys.merge(_nested(path, Keys({key: Keys() for key in self._read_from(name)})))
        vllm = sources.keys_of("VllmSpecificArgs", "nemo_rl.models.generation.vllm.config")
        if not vllm.open:
            keys.merge(_nested(_VLLM, vllm))
        self._keys[section] = keys
        return keys

    def _read_from(self, name: str) -> frozenset[str]:
        """Return the config keys that code in `nemo_rl/models` reads from variables called `name`, as in `name["key"]`.

        Some of these keys occur neither in NeMo-RL's types nor in its example configs.
        """
        keys = set[str]()
        for file in sorted((self.root / "nemo_rl" / "models").rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            if name in text:
                keys |= _keys_read(ast.parse(text), name)
        return frozenset(keys)

    def config(self, section: Section, *changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the complete, resolved example config with changes applied, for `nemo_ext.rl.nemo_rl.run.run`.

        Args:
            section: algorithm of the config.
            changes: nested mappings; later ones take precedence, and interpolations are resolved at the end.

        Raises:
            ValueError: a key in `changes` does not exist in this version; the message suggests the nearest one.
        """
        for change in changes:
            for path in leaves(change):
                if missing := self.keys(section).missing(path):
                    raise ValueError(f"nemo_rl.set.{path}: this version of NeMo-RL has {missing}")
        merged = OmegaConf.merge(OmegaConf.load(self._example(section)), *(dict(change) for change in changes))
        # The resolver is temporary: importing NeMo-RL registers one of the same name and fails if it exists.
        temporary = not OmegaConf.has_resolver("mul")
        if temporary:
            OmegaConf.register_new_resolver("mul", lambda a, b: a * b)
        try:
            resolved = OmegaConf.to_container(merged, resolve=True)
        finally:
            if temporary:
                OmegaConf.clear_resolver("mul")
        assert isinstance(resolved, dict)
        return {str(key): value for key, value in resolved.items()}

    @cached_property
    def converts_dtensor_v2(self) -> bool:
        """True if `convert_dcp_to_hf` can read DTensor v2 workers' checkpoints, which are in a `model` folder."""
        return ".metadata" in self._names_in("nemo_rl/utils/native_checkpoint.py", "convert_dcp_to_hf")

    @cached_property
    def asynchronous(self) -> frozenset[str]:
        """Names that `async_grpo_train` uses, which show which features of `grpo_train` it supports."""
        return self._names_in("nemo_rl/algorithms/grpo.py", "async_grpo_train")

    @cached_property
    def _collector(self) -> str:
        file = self.root / "nemo_rl/algorithms/async_utils/trajectory_collector.py"
        return file.read_text(encoding="utf-8") if file.is_file() else ""

    @property
    def refills(self) -> bool:
        """True if the asynchronous loop replaces missing groups of a step, so that groups can be dropped."""
        return "get_trajectories_needed" in self._collector

    @property
    def distils(self) -> bool:
        """True if the asynchronous collector can have teachers score groups of any tasks that name an agent."""
        return "_compute_teacher_logprobs" in self._collector and "def _enqueue_rollout_group" in self._collector

    @cached_property
    def plays_gym(self) -> bool:
        """True if `grpo.setup` starts NeMo Gym, so that its agents play all tasks."""
        return "_spinup_nemo_gym" in self._names_in("nemo_rl/algorithms/grpo.py", "setup")

    def _names_in(self, file: str, function: str) -> frozenset[str]:
        """Return all identifiers and string constants in a function; empty if it is not in the file."""
        module = ast.parse((self.root / file).read_text(encoding="utf-8"))
        bodies = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == function]
        return frozenset(name for body in bodies for node in ast.walk(body) for name in _names(node))


def leaves(config: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield the dotted paths of all values in a nested config, each prefixed with `above`."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}"


_Parsed = tuple[dict[str, ast.ClassDef | ast.expr], dict[str, tuple[str, str]]]


class _Sources:
    """NeMo-RL's parsed modules, in which config classes are looked up by name."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._parsed: dict[str, _Parsed] = {}

    def keys_of(self, name: str, module: str, above: tuple[str, ...] = ()) -> Keys:
        """Return the keys of the TypedDict or pydantic model `name`; an unknown or recursive class allows any key.

        Args:
            above: names of the enclosing classes, to detect recursion.
        """
        keys = Keys()
        found = self._find(name, module)
        if found is None or name in above:
            return Keys(open=True)
        node, module = found
        if isinstance(node, ast.expr):
            return self._annotated(node, module, above)
        for base in node.bases:
            for base_name in _names(base):
                if self._find(base_name, module) is not None:
                    keys.merge(self.keys_of(base_name, module, (*above, name)))
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                keys.children[line.target.id] = self._annotated(line.annotation, module, (*above, name))
        return keys

    def _annotated(self, annotation: ast.expr, module: str, above: tuple[str, ...]) -> Keys:
        keys = Keys()
        names = [name for node in ast.walk(annotation) for name in _names(node)]
        if "list" in names:  # items of a list have no path
            return keys
        for name in names:
            if name in ("dict", "Dict", "Mapping", "Any"):
                keys.open = True
            elif self._find(name, module) is not None:
                keys.merge(self.keys_of(name, module, above))
        return keys

    def _find(self, name: str, module: str, depth: int = 0) -> tuple[ast.ClassDef | ast.expr, str] | None:
        """Return the definition of a class or alias and its module, or None if it is not found.

        Imports are followed up to a limit; `depth` is the number of imports followed so far.
        """
        defined, imported = self._parse(module)
        if name in defined:
            return defined[name], module
        if name not in imported or depth > 5:
            return None
        return self._find(imported[name][0], imported[name][1], depth + 1)

    def _parse(self, module: str) -> _Parsed:
        """Return a module's definitions, and a mapping from its imports from NeMo-RL to (original name, module)."""
        if module in self._parsed:
            return self._parsed[module]
        path = self._root.joinpath(*module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        defined: dict[str, ast.ClassDef | ast.expr] = {}
        imported: dict[str, tuple[str, str]] = {}
        for node in ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else ():
            if isinstance(node, ast.ClassDef):
                defined[node.name] = node
            elif isinstance(node, ast.Assign):
                defined |= {to.id: node.value for to in node.targets if isinstance(to, ast.Name)}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nemo_rl"):
                imported |= {alias.asname or alias.name: (alias.name, str(node.module)) for alias in node.names}
        self._parsed[module] = defined, imported
        return defined, imported


def _names(node: ast.AST) -> list[str]:
    """Return the identifier or string constant of a syntax node as a list of one; empty for other nodes."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def _keys_in(config: Any) -> Keys:
    if not isinstance(config, Mapping):
        return Keys()
    return Keys({str(key): _keys_in(value) for key, value in config.items()}, open=not config)


def _keys_read(module: ast.Module, name: str) -> set[str]:
    """Return the constant keys read as `name["key"]` or `name.get("key")` from variable or attribute `name`."""
    keys = set[str]()
    for node in ast.walk(module):
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript) and name in _names(node.value):
            key = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            key = node.args[0] if node.args and name in _names(node.func.value) else None
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            keys.add(key.value)
    return keys


def _nested(path: str, mapping: Keys) -> Keys:
    """Return `Keys` with a mapping's keys nested at a dotted path; empty if there are no keys."""
    if not mapping.children:
        return mapping
    for word in reversed(path.split(".")):
        mapping = Keys({word: mapping})
    return mapping
