"""The normalizations of a file of weights, of a model and of an ONNX graph, each as a list of names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from normscope.doctor.check_state import opened
from normscope.doctor.site import Site
from normscope.doctor.stored_norms import ROLES, StoredNorm, find_norms
from normscope.doctor.stored_sites import bare, sites_of
from normscope.doctor.stored_state import StoredState, in_memory
from normscope.doctor.wording import listed
from normscope.targets import resolve
from normscope.targets.norms.listed import FILE, GRAPH, MODEL, ListedNorm, NormList
from normscope.targets.state_files import names_state

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from normscope.reading.graphs.norms import NodeNorm

GRAPHS = (".onnx", ".pt2")


def is_file(target: str) -> bool:
    """Whether a target of a command is a file or a folder that holds normalizations, and no import."""
    return target.lower().endswith(GRAPHS) or names_state(target)


def of_target(target: str, *, input_spec: str | None = None, trust: bool = False) -> NormList:
    """Of what a command is pointed at. ``trust``: a ``.pt2`` program may run code.

    Raises:
        BadTarget: it cannot be loaded.
    """
    if names_state(target):
        return of_state(target, target)
    if target.lower().endswith(GRAPHS[0]):
        return of_graph(target, target)
    loaded = resolve(target, input_spec=input_spec, trust=trust)
    return of_model(loaded.model, loaded.inputs, target)


def of_state(state: Mapping[str, Any] | str | Path, source: str = "") -> NormList:
    """Of a state dict, or of a file or folder of weights; read tensor by tensor.

    Raises:
        BadTarget: the file cannot be used.
        BadInput: the mapping is no state dict.
    """
    stored = opened(state)
    found = find_norms(stored.tensors)
    notes = [*stored.notes]
    if found.quantized:
        notes.append(f"left out, since their parameters are stored as integers: {listed(found.quantized)}")
    norms, maybe = (
        tuple(_stored(norm, stored) for norm in bare(some)) for some in (found.norms, found.alone)
    )
    return NormList(
        source or stored.source or "a state dict", FILE, norms, tuple(notes), maybe, found.vectors
    )


def _stored(norm: StoredNorm, stored: StoredState) -> ListedNorm:
    return ListedNorm(norm.path, norm.path, tuple(norm.tensors), partial(_read, norm, stored.config))


def _read(norm: StoredNorm, config: Mapping[str, Any] | None) -> Site:
    (site,), _ = sites_of((norm,), config)
    return site


def of_model(model: torch.nn.Module, inputs: Any = None, source: str = "") -> NormList:
    """Of a PyTorch model: what can be read, with inputs also what is written by hand or called as a function.

    What its state dict holds under a norm's name counts too, as a file would tell it: a class that nobody can read
    without running it is a norm all the same.
    """
    from normscope.doctor.arguments import module, on_device
    from normscope.doctor.check import find
    from normscope.doctor.session import Session

    args, kwargs, _ = on_device(module(model), inputs)
    with Session(model, seed=0) as session:
        sites = find(session, args, kwargs)
    norms = [_of_site(site) for site in sites]
    known = {norm.name for norm in norms if norm.tensors}
    held = in_memory(state) if (state := model.state_dict()) else StoredState({})
    also = [norm for norm in bare(find_norms(held.tensors).norms) if norm.named and norm.path not in known]
    places = {norm.path for norm in also}
    norms = [norm for norm in norms if norm.tensors or norm.name not in places]
    norms += [_stored(norm, held) for norm in also]
    return NormList(source or type(model).__name__, MODEL, tuple(norms))


def _of_site(site: Site) -> ListedNorm:
    return ListedNorm(site.path if site.tensors else site.name, site.name, tuple(site.tensors), lambda: site)


def of_graph(source: Any, name: str = "") -> NormList:
    """Of an ONNX file or model.

    Raises:
        BadTarget: it is broken, or asks for files outside of its folder.
        MissingExtra: onnx is not installed.
    """
    from normscope.reading.graphs.norms import node_norms
    from normscope.targets.onnx_files import name_of, read_graph, readable

    name = name or name_of(source)
    graph = read_graph(source)
    with readable(name):
        norms = tuple(
            ListedNorm(module_path(norm), norm.name, tuple(norm.parameters), partial(_node, norm, name))
            for norm in node_norms(graph)
        )
    return NormList(name, GRAPH, norms)


def _node(norm: NodeNorm, name: str) -> Site:
    from normscope.targets.onnx_files import readable

    mode = "frozen" if norm.mode == "running" else norm.mode
    site = Site(norm.name, norm.name, "node", norm.type_name, spec=norm.spec, reason=norm.reason)
    site.mode_train = site.mode_eval = site.mode_now = mode
    with readable(name):
        site.tensors = {role: _as_tensor(norm.array(role)) for role in norm.parameters}
    return site


def _as_tensor(array: NDArray[Any]) -> torch.Tensor:
    if array.dtype.name == "bfloat16":  # of ml_dtypes, which torch does not know
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.array(array, order="C"))


def module_path(norm: NodeNorm) -> str:
    """The module that a node was exported from: by the names of its tensors, else by its own.

    PyTorch's exporters keep the names of parameters, ``layer1.0.bn1.weight``, and one of them writes the modules into
    the names of nodes, ``/layer1/layer1.0/bn1/BatchNormalization``.
    """
    owners = {
        name.rpartition(".")[0] for name in norm.parameters.values() if name.rpartition(".")[2] in ROLES
    }
    if len(owners) == 1 and all(name.rpartition(".")[2] in ROLES for name in norm.parameters.values()):
        return owners.pop()
    scopes = norm.name.strip("/").split("/")
    return joined(scopes[:-1]) if len(scopes) > 1 else norm.name


def joined(scopes: list[str]) -> str:
    """The path of nested scopes, each of which may repeat an end of the path so far.

    >>> joined(["layer1", "layer1.0", "layer1.0.2", "bn1"]), joined(["model", "layers.0", "norm"])
    ('layer1.0.2.bn1', 'model.layers.0.norm')
    """
    path = ""
    for scope in scopes:
        parts = path.split(".") if path else []
        ends = (".".join(parts[start:]) for start in range(len(parts)))
        repeated = next((end for end in ends if scope.startswith(f"{end}.")), None)
        if repeated is not None:
            path = path.removesuffix(repeated) + scope
        else:
            path = f"{path}.{scope}" if path else scope
    return path
