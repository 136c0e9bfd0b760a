"""What a file of weights says of how it was made: ``normscope recalibrate -o`` and its like write it there."""

from __future__ import annotations

import json
from typing import Any

KEY = "normscope"
"""in the metadata of a safetensors file: a JSON object with ``command``, ``version`` and what the command says"""
SHOWN = ("version", "source", "selection", "method", "samples", "valid", "data")
WIDTH = 80
"""letters of a value that are shown: anyone may have written it"""


def told(metadata: Any) -> list[str]:
    """Notes on a header's ``__metadata__``; none where it holds no record, or one of another form.

    >>> told({"normscope": '{"command": "recalibrate", "version": "0.1.0", "source": "instrument B", "samples": 300}'})
    ['the file says: made by normscope recalibrate (version 0.1.0, source instrument B, samples 300)']
    """
    text = metadata.get(KEY) if isinstance(metadata, dict) else None
    try:
        record = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return []
    if not isinstance(record, dict) or not isinstance(record.get("command"), str):
        return []
    known = [
        f"{name} {_plain(record[name])}"
        for name in SHOWN
        if isinstance(record.get(name), (str, int)) and record[name]
    ]
    sites = record.get("sites")
    if isinstance(sites, list):
        known.append(
            f"{sum(isinstance(s, dict) and bool(s.get('after')) for s in sites)} of {len(sites)} norms"
        )
    return [f"the file says: made by normscope {_plain(record['command'])} ({', '.join(known)})"]


def _plain(value: Any) -> str:
    text = "".join(sign if sign.isprintable() else "?" for sign in str(value)[: WIDTH + 1])
    return text if len(text) <= WIDTH else f"{text[:WIDTH]}..."
