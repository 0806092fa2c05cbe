"""Proof from its source that a program leaves nothing for the next run of its process, which is in a fresh module.

What runs share is what lives as long as the interpreter. A plain program has no way to change any of that, since

- values that it can name are its own or cannot be changed: built-in functions, immutable types, numbers, texts;
- a module occurs only as MODULE.NAME, and a class or function written in Python only where it is called;
- special attributes, frames, and names given as text (getattr, eval) do not occur;
- none of its code runs after its end: no finalizers, no generators with something to finish;
- modules that keep what they are given in caches, such as re and fractions, do not occur.

What depends on earlier runs all the same is the addresses of objects, which printing some shows.
"""

import ast
import builtins
import importlib
import symtable
import sys
import types


def _words(text: str) -> set[str]:
    return set(text.split())


_IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE
_STREAMS = {"stdin", "stdout", "stderr"}  # made anew for each run
_WHOLE = ("bisect", "cmath", "heapq", "itertools", "math", "string")
# What a program may name of a module, provided that it cannot be changed, and what else it may call.
_VALUES = {name: set(dir(importlib.import_module(name))) for name in (*_WHOLE, "operator")}
_VALUES["operator"] -= {"attrgetter", "methodcaller"}
_VALUES |= {
    "__future__": set(),
    "collections": {"OrderedDict", "defaultdict", "deque"},
    "copy": set(),
    "functools": {"cmp_to_key", "partial", "reduce"},
    "io": set(),
    "sys": _STREAMS | {"exit", "getrecursionlimit", "maxsize", "set_int_max_str_digits", "setrecursionlimit"},
    "typing": set(),
}
_CALLED = {
    "collections": {"Counter", "namedtuple"},
    "copy": {"copy", "deepcopy"},
    "functools": {"cache", "lru_cache", "total_ordering", "wraps"},
    "heapq": {"merge", "nlargest", "nsmallest"},
    "io": {"BytesIO", "StringIO"},
}
_NO_BUILTINS = _words("delattr dir eval exec compile getattr globals hasattr hash help id locals open setattr")
_NO_BUILTINS |= _words("__import__ aiter anext breakpoint memoryview type vars")
# Frames and code; objects held by exceptions and keys; a mapping that named tuples of modules share.
_NO_ATTRIBUTES = ("ag_", "co_", "cr_", "f_", "gi_", "tb_", "obj", "_field_defaults")
_METHODS = _words("init repr str format bool len iter next reversed contains getitem setitem delitem missing call")
_METHODS |= _words("enter exit hash eq ne lt le gt ge neg pos abs invert int float index round copy deepcopy")
_OPERATORS = _words("add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor")
_METHODS |= {kind + name for kind in ("", "r", "i") for name in _OPERATORS}
# The last two run code of the program that has no name here: a delegate's `close`, attributes by a pattern.
_FIXED = (bool, complex, float, int, str, types.BuiltinFunctionType, type(Ellipsis), type(NotImplemented))
_NO_NODES = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await, ast.YieldFrom, ast.MatchClass)
_LATER = {getattr(ast, "TryStar", ast.Try)}  # from 3.11 on
_SILENT = (ast.expr_context, ast.operator, ast.cmpop, ast.unaryop, ast.boolop, ast.Constant)
_OF_TYPES = (ast.Name, ast.Attribute, ast.Subscript, ast.Tuple, ast.List, ast.Constant, ast.BinOp, ast.BitOr, ast.Load)


def plain(source: bytes, prelude: str) -> bool:
    """True if the program, run after its prelude, is proven plain.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: as `ast.parse`.
    """
    nodes = [node for text in (prelude, source) for node in ast.walk(ast.parse(text))]
    return _Program([node for node in nodes if not isinstance(node, _SILENT)]).is_plain()


class _Program:
    def __init__(self, nodes: list[ast.AST]) -> None:
        self._nodes = nodes
        # Names by what an import gave them: modules, things to call, types for annotations.
        self._modules: dict[str, str] = {}
        self._called: set[str] = set()
        self._types: set[str] = set()
        # Nodes whose value goes nowhere: what is called, the module before a dot, an annotation.
        self._callees: set[int] = set()
        self._before_dot: set[int] = set()
        self._annotations: set[int] = set()
        self._openings: set[int] = set()

    def is_plain(self) -> bool:
        imports = [node for node in self._nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        if not all(self._imports(node) for node in imports):
            return False
        bound: set[str] | None = None
        for node in self._nodes:
            self._callees.update(map(id, getattr(node, "decorator_list", ())))
            annotation = getattr(node, "returns", None) or getattr(node, "annotation", None)
            if isinstance(annotation, ast.expr):
                bound = bound or {name for other in self._nodes for name in _bound(other)}
                if self._is_of_types(annotation, bound):
                    self._annotations.update(map(id, ast.walk(annotation)))
            if isinstance(node, ast.Attribute):
                self._before_dot.add(id(node.value))
            elif isinstance(node, ast.Call):
                self._callees.add(id(node.func))
                match node:
                    case ast.Call(args=[ast.Constant(value=0)], keywords=[]):
                        # Standard input, to read; with a mode it could be written to.
                        self._openings.add(id(node.func))
        return all(id(node) in self._annotations or self._allows(node) for node in self._nodes)

    def _imports(self, node: ast.Import | ast.ImportFrom) -> bool:
        for alias in node.names:
            name = alias.asname or alias.name
            if isinstance(node, ast.Import):
                if alias.name not in _VALUES or self._modules.setdefault(name, alias.name) != alias.name:
                    return False
            elif node.level or node.module is None or alias.name == "*" or alias.name.startswith("_"):
                return False
            elif node.module == "typing":
                self._types.add(name)
            elif alias.name in _CALLED.get(node.module, ()):
                self._called.add(name)
            elif not (node.module == "__future__" or _is_value(node.module, alias.name)):
                return False
        return True

    def _is_of_types(self, annotation: ast.expr, bound: set[str]) -> bool:
        """True if evaluating it runs none of the program's code; its value, in `__annotations__`, is out of reach."""
        for node in ast.walk(annotation):
            match node:
                case ast.Name(id=name) if name in bound:
                    return False
                case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                    if self._modules.get(name) != "typing" or attribute.startswith("_"):
                        return False
                case ast.Attribute():
                    return False
            if not isinstance(node, _OF_TYPES):
                return False
        return True

    def _allows(self, node: ast.AST) -> bool:
        if isinstance(node, _NO_NODES) or any(_is_special(name, node) for name in _identifiers(node)):
            return False
        match node:
            case ast.FunctionDef():
                # A generator that is thrown away is finished, whenever that is.
                kinds = {type(part) for part in ast.walk(node)}
                return ast.Yield not in kinds or kinds.isdisjoint({ast.Try, ast.With, *_LATER})
            case ast.ClassDef():
                return not node.keywords
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in self._modules:
                module = self._modules[name]
                if not isinstance(node.ctx, ast.Load):
                    return False
                return _is_value(module, attribute) or (
                    attribute in _CALLED.get(module, ()) and id(node) in self._callees
                )
            case ast.Attribute(attr=attribute):
                return not attribute.startswith(_NO_ATTRIBUTES)
            case ast.Name(id=name, ctx=ast.Load()):
                if name in self._modules:
                    return id(node) in self._before_dot
                if name in self._called:
                    return id(node) in self._callees
                if name == "open":
                    return id(node) in self._openings
                return name not in self._types | _NO_BUILTINS and _is_fixed(getattr(builtins, name, None))
        return True


def _identifiers(node: ast.AST) -> list[str]:
    if isinstance(node, _SILENT):
        return []
    parts = [part for _, field in ast.iter_fields(node) for part in (field if isinstance(field, list) else [field])]
    return [part for part in parts if isinstance(part, str)]


def _bound(node: ast.AST) -> list[str]:
    """Names that the node gives something to, imports aside."""
    if isinstance(node, ast.Attribute | ast.keyword | ast.alias | ast.ImportFrom | ast.Global | ast.Nonlocal):
        return []
    return [] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else _identifiers(node)


def _is_special(name: str, node: ast.AST) -> bool:
    """True for names with a meaning of their own, and for those that a class replaces by another."""
    if not name.startswith("__"):
        return False
    whole = name.endswith("__")
    match node:
        case ast.FunctionDef():
            return whole and name[2:-2] not in _METHODS
        case ast.Attribute():
            return whole and not (name == "__init__" and isinstance(node.ctx, ast.Load))
        case ast.Name():
            return name not in ("__name__", "__slots__")
        case ast.ImportFrom():
            return name != "__future__"
    return True


def _is_value(module: str, name: str) -> bool:
    """True if the module's name is for all to use: made anew for each run, or not to be changed."""
    if name.startswith("_") or name not in _VALUES.get(module, ()):
        return False
    return (module == "sys" and name in _STREAMS) or _is_fixed(getattr(importlib.import_module(module), name, sys))


def _is_fixed(value: object) -> bool:
    """True if no program can change the value."""
    if isinstance(value, type):
        return bool(value.__flags__ & _IMMUTABLE_TYPE)
    return value is None or type(value) in _FIXED


def needed(prelude: str, source: bytes) -> str:
    """Lines of the prelude, each an import of one name, that the source looks up; not the names that it binds first.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: as `ast.parse`.
    """
    if not prelude:
        return ""
    tables = [symtable.symtable(source, "main.py", "exec")]  # type: ignore[arg-type]
    used = {symbol.get_name() for symbol in tables[0].get_symbols()}
    while tables:
        below = tables.pop().get_children()
        used |= {symbol.get_name() for table in below for symbol in table.get_symbols() if symbol.is_global()}
        tables += below
    body = ast.parse(source).body
    lines = ((line, line.split()[-1]) for line in prelude.splitlines())
    return "\n".join(line for line, name in lines if name in used and not _binds_first(body, name))


def _binds_first(body: list[ast.stmt], name: str) -> bool:
    """True if the first statement that mentions the name is bound to give it a value."""
    for statement in body:
        mentions = [node for node in ast.walk(statement) if name in _identifiers(node)]
        mentions = [node for node in mentions if not isinstance(node, ast.Attribute | ast.keyword)]
        if mentions:
            if isinstance(statement, ast.FunctionDef) and statement.name == name:
                return not (statement.decorator_list or statement.args.defaults or statement.args.kw_defaults)
            if not isinstance(statement, ast.Assign | ast.Import | ast.ImportFrom):
                return False
            return all(
                (isinstance(node, ast.alias) and (node.asname or node.name) == name)
                or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
                for node in mentions
            )
    return False
