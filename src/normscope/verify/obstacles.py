"""Why a layer cannot be put through the protocol: no numbers, numbers that mean nothing, or a forward that raises.

Such a layer is neither right nor wrong. The text says what to mend.
"""

from __future__ import annotations

import numpy as np
from torch import nn

from normscope.doctor.graph_norm import GraphNorm
from normscope.errors import told
from normscope.verify.declared import Declaration
from normscope.verify.float64 import numpy
from normscope.verify.subject import Subject


def obstacle(module: nn.Module, declaration: Declaration | None = None) -> str:
    """The reason in words, or nothing where the layer can be verified.

    >>> import torch
    >>> obstacle(nn.LayerNorm(3))
    ''
    >>> layer = nn.BatchNorm1d(3)
    >>> layer.running_mean[1] = torch.nan
    >>> obstacle(layer)
    'not verifiable: because its running_mean holds NaN or infinity. Retrain or reload it'
    """
    reason = _reason(module, declaration)
    return f"not verifiable: because {reason}" if reason else ""


def _reason(module: nn.Module, declaration: Declaration | None) -> str:
    if isinstance(module, GraphNorm):
        return (
            "it is a node of a graph that another runtime runs, and no module to call on inputs of its own. normscope "
            "check measures it on the inputs of its graph"
        )
    if any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()]):
        return "it is on the meta device, where tensors hold no numbers. Materialize it first: to_empty, then load"
    subject = Subject(module, "", declaration)
    for name, tensor in subject.reading.tensors.items():
        if not tensor.isfinite().all():
            return f"its {name} holds NaN or infinity. Retrain or reload it"
    var = subject.reading.tensors.get("running_var")
    least = float(var.min()) if var is not None and var.numel() else 1.0
    if least < 0:
        return f"its running_var goes down to {least:.3g}, and no variance is negative. Retrain or reload it"
    if least == 0 and subject.eps == 0:
        return "its running_var is 0 somewhere and eps is 0, so that it divides by 0. Give it an eps above 0"
    x = subject.x()
    for train, word in ((True, "train"), (False, "eval")):
        try:
            subject.run(subject.layer, x, train)
        except Exception as error:  # of PyTorch, or of the user's own forward
            return f"in {word} on an input of shape {subject.shape} it raised {told(error)}"
        if not np.isfinite(subject.expected(numpy(x), train)).all():
            return f"in {word} its formula divides by 0, or leaves the numbers of float64: {subject.spec}"
    return ""
