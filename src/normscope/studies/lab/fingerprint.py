"""What a measurement depends on, as a fingerprint: the code it reaches, and the versions of what runs it.

Of a study's file only what ``measure`` and ``cells`` reach counts, so that a caption, a rule or a word can be mended
without measuring again. Comments, docstrings and the layout of the code do not count.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import marshal
import pkgutil
import platform
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from normscope.studies import lab
from normscope.studies.lab.study import Study

ALWAYS = ("cell", "data")
"""of the lab: what every measurement goes through"""
NEVER = {"study", "fingerprint"}
"""of the lab: imported for its words and types, and measures nothing"""


def versions() -> dict[str, str]:
    """Of what a result depends on."""
    import numpy
    import torch

    import normscope

    return {
        "normscope": normscope.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def digest(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


def code_fingerprint(study: Study) -> str:
    """Of the code that measures: the study's own, and the files of the lab that it imports."""
    parts = [*_reached(study.measure), *_reached(study.cells)]
    files = {m.name for m in pkgutil.iter_modules(lab.__path__)} - NEVER
    wanted, shared = {*ALWAYS, *_of_the_lab(parts, files)}, dict[str, str]()
    while wanted:
        name = wanted.pop()
        shared[name] = _plain(ast.parse(inspect.getsource(import_module(f"{lab.__name__}.{name}"))))
        wanted |= _of_the_lab([shared[name]], files) - set(shared)
    return digest("\n".join(parts + [shared[name] for name in sorted(shared)]))


def _reached(function: Callable[..., Any]) -> list[str]:
    """The definitions of its module that a function reaches, as text; its byte code where there is no source."""
    tree = _source(function)
    named: dict[str, list[ast.stmt]] = {}
    for statement in tree.body:
        for name in _defines(statement):
            named.setdefault(name, []).append(statement)
    if function.__name__ in named:
        wanted, seen = {function.__name__}, dict[str, list[str]]()
    else:
        line = function.__code__.co_firstlineno
        begin = [n for n in ast.walk(tree) if isinstance(n, ast.Lambda) and n.lineno == line]
        if not begin:
            return [repr(marshal.dumps(function.__code__))]
        wanted, seen = {name for n in begin for name in _uses(n)}, {"": [_plain(n) for n in begin]}
    while wanted:
        name = wanted.pop()
        if name in named and name not in seen:
            wanted |= {used for statement in named[name] for used in _uses(statement)}
            seen[name] = [_plain(statement) for statement in named[name]]
    return [part for name in sorted(seen) for part in seen[name]]


def _source(function: Callable[..., Any]) -> ast.Module:
    """Of the file that a function stands in; empty where there is none (a console)."""
    module = inspect.getmodule(function)
    try:
        if isinstance(module, ModuleType) and inspect.getsourcefile(function) == inspect.getsourcefile(
            module
        ):
            return ast.parse(inspect.getsource(module))
    except (OSError, TypeError):
        pass
    return ast.Module([], [])


def _defines(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name.split(".")[0] for alias in statement.names)
    else:
        stored = (n for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        yield from (n.id for n in stored)


def _uses(node: ast.AST) -> Iterator[str]:
    yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))


def _of_the_lab(parts: list[str], files: set[str]) -> set[str]:
    """Files of the lab that pieces of code import."""
    found: set[str] = set()
    for part in parts:
        if part.startswith(("b'", 'b"')):
            continue  # byte code
        for node in ast.walk(ast.parse(part)):
            if isinstance(node, ast.ImportFrom) and node.module == lab.__name__:
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{lab.__name__}."):
                found.add((node.module or "").rpartition(".")[2])
    return found & files


def _plain(node: ast.AST) -> str:
    """Code without comments, docstrings and layout."""
    for inner in ast.walk(node):
        body = getattr(inner, "body", None)
        if isinstance(body, list) and len(body) > 1 and _is_text(body[0]):
            del body[0]
    return ast.unparse(node)


def _is_text(statement: ast.AST) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
