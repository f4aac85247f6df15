"""Helpers for the tests of the lab: a text to train on, and the files of a cell."""

import json
from pathlib import Path

from regard.lab.corpus import Corpus

TEXT = Corpus("abc", "the cat sat on the mat. " * 200)


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a cell, without the times in its result and in the header of its checkpoint."""
    from safetensors.torch import load_file

    found = {"metrics": (folder / "metrics.jsonl").read_bytes()}
    found |= {n: t.numpy().tobytes() for n, t in load_file(folder / "checkpoint.safetensors").items()}
    result = json.loads((folder / "result.json").read_text())
    return found | {"result": json.dumps({**result, "seconds": 0}).encode()}
