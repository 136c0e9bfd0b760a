"""``normscope verify``: evidence on this machine and build, from the public API.

`run` checks PyTorch's own layers against the float64 reference; `run_layer` puts a user's own layer through the same
protocol. A topic is one file with a tuple ``CHECKS`` of functions that yield `Evidence`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from normscope.errors import told
from normscope.verify.evidence import Evidence, VerifyReport, versions

if TYPE_CHECKING:
    import torch

    from normscope.spec import NormSpec

__all__ = ["Evidence", "VerifyReport", "run", "run_layer"]


def run() -> VerifyReport:
    """Check PyTorch's own normalization layers on this machine against the formulas, in float64.

    Takes a second or two, and reads and writes no file. Gradients are recorded inside, also under ``torch.no_grad()``.

    Raises BadInput under ``torch.device("meta")``.

    >>> report = run()
    >>> report.passed, len(report.evidence) > 30
    (True, True)
    """
    from normscope.verify import axes, batch, distribution, geometry, rms
    from normscope.verify.surroundings import plain_torch

    topics = (geometry, batch, axes, rms, distribution)
    with plain_torch():
        evidence = tuple(item for topic in topics for item in _collect(topic.TOPIC, topic.CHECKS))
    return VerifyReport(evidence, "torch.nn on this machine", versions())


def run_layer(
    module: torch.nn.Module,
    *,
    name: str = "",
    spec: NormSpec | None = None,
    shape: Sequence[int] | None = None,
    inputs: Any = None,
) -> VerifyReport:
    """Put one's own normalization layer, or every one in a model, through the same protocol.

    Arguments:
        module: is copied and never changed.
        name: what to call it in the report.
        spec: what the layer computes, where it cannot be read or should not be: it is then checked against this.
            Its gain, bias and state are found as ``weight`` (``gamma``, ``scale``), ``bias`` (``beta``, ``shift``),
            ``running_mean`` and ``running_var``, else by their shapes.
        shape: of an input that the declared layer takes; without it, small ones are tried.
        inputs: of the model, as for `normscope.check`: one forward finds the norms that are no modules of their own,
            so that the report can say that they were not verified.

    Raises UnknownNormalization where there is no normalization in it that can be read and run (a layer that raises, or
    holds NaN, infinity or a negative variance, is neither right nor wrong), and BadInput where the declared
    specification and the layer's tensors do not fit together, or under ``torch.device("meta")``.

    >>> import torch
    >>> from normscope import NormSpec
    >>> run_layer(torch.nn.LayerNorm(4)).passed
    True
    >>> run_layer(torch.nn.LayerNorm(4), spec=NormSpec("... d -> ...", weight="d", bias="d", correction=1)).passed
    False
    """
    from normscope.errors import BadInput
    from normscope.verify import declared, layer
    from normscope.verify.obstacles import obstacle
    from normscope.verify.surroundings import plain_torch
    from normscope.verify.unverified import blocked, nothing_to_verify, unverified

    title = name or type(module).__name__
    if spec is not None:
        with plain_torch():
            declaration = declared.declare(module, spec, shape)
            why = obstacle(module, declaration)
            if why:
                raise BadInput(f"{title} is {why}")
            checked = tuple(_collect(title, layer.checks(module, title, declaration)))
        return VerifyReport(checked, title, versions(), by_norm=True)
    if shape is not None:
        raise BadInput("shape is that of a declared layer's input: pass spec= too, or inputs= of a model")
    parts = layer.normalizations(module)
    missed = unverified(module, {path for path, _ in parts}, inputs)
    if not parts:
        raise nothing_to_verify(module, missed)
    evidence: list[Evidence] = []
    with plain_torch():
        stuck = {path: why for path, part in parts if (why := obstacle(part))}
        missed = blocked(module, stuck, missed)
        if len(stuck) == len(parts):
            raise nothing_to_verify(module, missed)
        for path, part in parts:
            if path not in stuck:
                evidence += _collect(path or title, layer.checks(part, path or title))
    return VerifyReport(tuple(evidence), title, versions(), missed, by_norm=True)


def _collect(topic: str, checks: Iterable[Callable[[], Iterator[Evidence]]]) -> Iterator[Evidence]:
    """What the checks say, a check that raises being evidence that failed."""
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            why = told(error)
            claim = f"the check {check.__name__.replace('_', ' ')} runs"
            yield Evidence(topic, claim, "", "", None, float("nan"), 0.0, why)
