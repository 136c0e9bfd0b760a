"""Laws of the house: what may import what, and what stays unloaded until it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import normscope

SRC = Path(normscope.__file__).parent

# From the ground up; a room imports only from its own floor or from floors below.
FLOORS = {
    "errors": 0,
    "allocator": 0,
    "spec": 1,
    "reference": 1,
    "kernels": 2,
    "functional": 3,
    "distributed": 3,
    "nn": 4,
    "reading": 5,
    "identify": 6,
    "doctor": 7,
    "verify": 7,
    "monitor": 8,
    "pytest_plugin": 8,
    "render": 8,
    "demo": 8,
    "transforms": 8,
    "porting": 8,
    "bench": 8,
    "targets": 9,
    "studies": 9,
    "cli": 10,
}


def imports(path: Path, *, lazily: bool = False) -> set[str]:
    """Dotted names that a file imports when it is loaded (with ``lazily``, also inside functions)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not lazily:
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


def room(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


FILES = sorted(p for p in SRC.rglob("*.py") if not room(p).startswith("__"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_no_import_goes_up(path: Path) -> None:
    here = FLOORS[room(path)]
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "normscope" and len(parts) > 1 and parts[1] in FLOORS:
            assert FLOORS[parts[1]] <= here, f"{path.relative_to(SRC)} imports {name} from a floor above"


def test_spec_and_reference_never_import_torch() -> None:
    for folder in ("spec", "reference"):
        for path in (SRC / folder).rglob("*.py"):
            assert not any(n.split(".")[0] == "torch" for n in imports(path, lazily=True)), path


def test_the_reference_shares_no_code() -> None:
    for path in (SRC / "reference").rglob("*.py"):
        inside = {n for n in imports(path, lazily=True) if n.startswith("normscope")}
        assert all(n.startswith("normscope.reference") for n in inside), (path, inside)


def test_rules_read_and_never_run() -> None:
    for path in (SRC / "doctor" / "rules").glob("ns*.py"):
        names = imports(path, lazily=True)
        assert not any(n.split(".")[0] == "torch" for n in names), f"{path.name}: a rule imports no torch"
        assert not any("doctor.session" in n or "doctor.runs" in n for n in names), path.name
        assert len(path.read_text(encoding="utf-8").splitlines()) < 200, (
            f"{path.name}: a rule stays under 200 lines"
        )


def test_probes_never_import_rules() -> None:
    for path in (SRC / "doctor" / "probes").glob("*.py"):
        assert not any("doctor.rules" in n for n in imports(path, lazily=True)), path.name


def test_every_probe_that_a_rule_names_exists() -> None:
    from normscope.doctor.probes import all_probes
    from normscope.doctor.rules import all_rules

    for rule in all_rules().values():
        assert {*rule.needs, *rule.uses} - {"data"} <= set(all_probes()), rule.code


def loaded_after(code: str) -> set[str]:
    heavy = ("torch", "torch._dynamo", "numpy", "safetensors", "rich")
    script = f"import sys\n{code}\nprint(' '.join(m for m in {heavy} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split()) if done.stdout.strip() else set()


@pytest.mark.parametrize(
    "code",
    [
        "import normscope; normscope.NormSpec; normscope.families",
        "import normscope.spec",
        "import normscope.errors, normscope.doctor.rules; normscope.doctor.rules.all_rules()",
        "sys.argv = ['normscope', '--help']\n"
        "from normscope.cli import main\n"
        "try:\n    main()\nexcept SystemExit: pass",
    ],
    ids=["names", "spec", "rule pages", "help"],
)
def test_stays_light(code: str) -> None:
    assert loaded_after(code) == set()


def test_the_compiler_is_not_loaded_by_what_does_not_compile() -> None:
    code = (
        "import normscope.nn.batch_norm, normscope.functional, normscope.doctor.check, normscope.transforms"
    )
    assert "torch._dynamo" not in loaded_after(code)


def test_public_names_resolve() -> None:
    for name in normscope.__all__:
        assert getattr(normscope, name) is not None
    with pytest.raises(AttributeError, match="module 'normscope' has no attribute 'norm'"):
        _ = normscope.norm
