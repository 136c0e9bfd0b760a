"""What is refused, in whole sentences; and what the reference may import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from normscope import reference
from normscope.spec import NormSpec, Running

X = np.arange(12.0).reshape(3, 4)
PLAIN = NormSpec("b c -> c")
STORED = NormSpec("b c -> c", running=Running())
ZCA = NormSpec("b c -> c", whiten="c", scale="zca", running=Running())


def state(*shapes: tuple[int, ...]) -> reference.RunningState:
    return reference.RunningState(*(np.ones(shape) for shape in shapes))


def loose(**fields: Any) -> SimpleNamespace:
    """A specification that nobody validated."""
    plain = {"stats": "b c -> c", "sizes": {}, "weight": None, "bias": None, "center": True, "scale": "std"}
    plain |= {
        "correction": 0,
        "eps": 1e-5,
        "eps_at": "variance",
        "gain": 1.0,
        "weight_offset": 0.0,
        "running": None,
    }
    return SimpleNamespace(**(plain | {"sample_axis": None} | fields))


CASES = {
    "rank": (
        lambda: reference.forward(X[0], PLAIN),
        "pattern 'b c -> c' does not fit shape (4,) with sizes {}: it takes 2 axes, the input has 1. Is the batch "
        "axis there?",
    ),
    "rank with ellipsis": (
        lambda: reference.forward(X[0], NormSpec("b c ... -> c")),
        "pattern 'b c ... -> c' does not fit shape (4,) with sizes {}: it takes 2 axes or more, the input has 1. Is "
        "the batch axis there?",
    ),
    "bounded rank": (
        lambda: reference.forward(X, NormSpec("b c ... -> b c", ndim=(3, 5))),
        "pattern 'b c ... -> b c' does not fit shape (3, 4) with sizes {}: ndim=(3, 5) bounds the number of "
        "axes, the input has 2. Unbatched inputs have a spec of their own",
    ),
    "factor": (
        lambda: reference.forward(X, NormSpec("b (g c) -> b g", sizes={"g": 3})),
        "pattern 'b (g c) -> b g' does not fit shape (3, 4) with sizes {'g': 3}: axis (g c) of size 4 is not a "
        "multiple of 3. Change the size",
    ),
    "named size": (
        lambda: reference.forward(X, NormSpec("b c -> c", sizes={"c": 5})),
        "pattern 'b c -> c' does not fit shape (3, 4) with sizes {'c': 5}: axis c has size 4, its sizes make 5. "
        "Leave one out to infer it",
    ),
    "virtual batches": (
        lambda: reference.forward(X, NormSpec("(v b) c -> v c", sizes={"b": 2})),
        "pattern '(v b) c -> v c' does not fit shape (3, 4) with sizes {'b': 2}: axis (v b) of size 3 is not a "
        "multiple of 2. Change the size, or set remainder to 'short' or 'balanced'",
    ),
    "open factors": (
        lambda: reference.forward(X, loose(stats="b (g c) -> b g")),
        "pattern 'b (g c) -> b g' does not fit shape (3, 4) with sizes {}: axis (g c) leaves g and c open. Give all "
        "but one in sizes",
    ),
    "unknown axis": (
        lambda: reference.forward(X, loose(stats="b c -> d")),
        "axis 'd' of ' d' does not occur on the left side of 'b c -> d'",
    ),
    "scale": (
        lambda: reference.forward(X, loose(scale="mad")),
        "a scalar denominator has scale std, rms or l2; got 'mad'",
    ),
    "eps_at": (
        lambda: reference.forward(X, loose(eps_at="trace")),
        "eps stands at variance, std, max or max_variance of a scalar denominator; got 'trace'",
    ),
    "whitening eps_at": (
        lambda: reference.forward(X, loose(scale="zca", whiten="c", eps_at="std")),
        "eps stands at variance or trace of a covariance; got 'std'",
    ),
    "whiten": (
        lambda: reference.forward(X, loose(scale="zca", whiten="b")),
        "whitening decorrelates kept axes of 'b c -> c'; got whiten='b'",
    ),
    "weight not in the spec": (
        lambda: reference.forward(X, PLAIN, np.ones(4)),
        "a spec without weight takes none; got one of shape (4,). Name the axes it lives on in spec.weight",
    ),
    "weight shape": (
        lambda: reference.forward(X, NormSpec("b c -> c", weight="c"), np.ones(3)),
        "the weight on 'c' of an input of shape (3, 4) has shape (4,); got (3,)",
    ),
    "bias shape": (
        lambda: reference.forward(X, NormSpec("b c -> c", bias=""), None, np.ones(4)),
        "the bias on '' of an input of shape (3, 4) has shape (); got (4,)",
    ),
    "mask dtype": (
        lambda: reference.forward(X, PLAIN, mask=np.ones((3, 4))),
        "a mask is boolean, True where an element counts; got float64. Compare first: lengths > position",
    ),
    "mask shape": (
        lambda: reference.forward(X, PLAIN, mask=np.ones(3, bool)),
        "a mask broadcasts to the input's shape (3, 4); got (3,). Add axes of size 1 on the right",
    ),
    "mask across whitened channels": (
        lambda: reference.forward(X, ZCA, mask=np.eye(3, 4, dtype=bool)),
        "a mask holds for all channels that are whitened together; got one that differs along 'c'",
    ),
    "complex": (
        lambda: reference.forward(X + 1j, PLAIN),
        "inputs are real; got complex128. Normalize real and imaginary parts, or the modulus",
    ),
    "no state": (
        lambda: reference.forward(X, STORED, training=False),
        "normalizing by stored statistics needs them; got none. Pass running=RunningState(mean, var), with a mean of "
        "shape (4,)",
    ),
    "state shape": (
        lambda: reference.forward(X, STORED, training=False, running=state((3,), (4,))),
        "running.mean has shape (4,) under 'b c -> c' on an input of shape (3, 4); got (3,)",
    ),
    "covariance shape": (
        lambda: reference.forward(X, ZCA, training=False, running=state((4,), (4,))),
        "running.var has shape (4, 4) under 'b c -> c' on an input of shape (3, 4); got (4,)",
    ),
    "no running in the spec": (
        lambda: reference.update_running(state((4,), (4,)), X, PLAIN),
        "a spec without running statistics has no state; set spec.running to a Running",
    ),
    "over an erased axis": (
        lambda: reference.update_running(state((3,), (3,)), X, loose(running=SimpleNamespace(over="b"))),
        "running statistics live on kept axes; got over='b', and 'b' is erased in 'b c -> c'",
    ),
    "one value a channel": (
        lambda: reference.update_running(state((4,), (4,)), X[:1], STORED),
        "a stored variance divides by M - 1, so every set needs M > 1 elements; got M = 1 under 'b c -> c' in an input "
        "of shape (1, 4). Take larger batches, or Running(correction=0)",
    ),
    "gradient shape": (
        lambda: reference.vjp(X[0], X, PLAIN),
        "the gradient has the shape of the input, (3, 4); got (4,)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refusal(name: str) -> None:
    run, text = CASES[name]
    with pytest.raises(ValueError) as caught:
        run()
    assert str(caught.value) == text


def test_an_unvalidated_specification_serves_as_well() -> None:
    np.testing.assert_array_equal(reference.forward(X, loose()), reference.forward(X, PLAIN))


def test_the_reference_imports_numpy_alone() -> None:
    allowed = set(sys.stdlib_module_names) | {"numpy"}
    for file in sorted(Path(reference.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            else:
                continue
            for name in names:
                assert name.partition(".")[0] in allowed or name.startswith("normscope.reference."), (
                    file,
                    name,
                )


def test_importing_it_loads_no_torch_and_no_other_part() -> None:
    code = (
        "import sys, normscope.reference as r; r.forward([1.0, 2.0], __import__('types').SimpleNamespace("
        "stats='d -> ', sizes={}, weight=None, bias=None, center=True, scale='std', correction=0, eps=0.0, "
        "eps_at='variance', gain=1.0, weight_offset=0.0, running=None)); "
        "print([m for m in sys.modules if m.partition('.')[0] == 'torch' or m.startswith('normscope.') "
        "and not m.startswith('normscope.reference')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
