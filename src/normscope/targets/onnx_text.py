"""Names of an ONNX graph as text: those that are no UTF-8 come out of protobuf as bytes, which nothing can print."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnx import ModelProto


def in_text(model: ModelProto) -> ModelProto:
    r"""The model itself, or a copy in which the bytes of each name are escaped, alike wherever it stands.

    A name that another one has already is told apart by underscores: a name is all that ties a value to its readers.

    >>> from onnx import NodeProto, helper
    >>> node = NodeProto.FromString(helper.make_node("Abs", ["x"], ["y?"]).SerializeToString().replace(b"?", b"\xff"))
    >>> model = helper.make_model(helper.make_graph([node, helper.make_node("Abs", [r"y\xff"], ["z"])], "g", [], []))
    >>> [list(node.input) + list(node.output) for node in in_text(model).graph.node]
    [['x', 'y\\xff_'], ['y\\xff', 'z']]
    """
    import onnx

    if not any(isinstance(text, bytes) for _, _, text in _strings(model)):
        return model
    made = onnx.ModelProto()
    made.CopyFrom(model)
    found = list(_strings(made))
    taken = {text for _, _, text in found if isinstance(text, str)}
    escaped: dict[bytes, str] = {}
    for holder, place, text in found:
        if not isinstance(text, bytes):
            continue
        if text not in escaped:
            name = text.decode(errors="backslashreplace")
            while name in taken:
                name += "_"
            taken.add(name)
            escaped[text] = name
        if isinstance(place, int):
            holder[place] = escaped[text]
        else:
            setattr(holder, place, escaped[text])
    return made


def _strings(message: Any) -> Iterator[tuple[Any, str | int, str | bytes]]:
    """Every text in a message and those inside it: what holds it, the field or index there, the text."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            if isinstance(value, (str, bytes)):
                yield message, field.name, value
            else:
                yield from ((value, i, text) for i, text in enumerate(value))
        elif field.type == field.TYPE_MESSAGE:
            for inner in (value,) if hasattr(value, "ListFields") else value:
                yield from _strings(inner)
