"""What several tests of the lab share: a text to train on, and what a cell of a grid wrote."""

import json
from pathlib import Path

from regard.lab.corpus import Corpus

TEXT = Corpus("abc", "the cat sat on the mat. " * 200)


def contents(folder: Path) -> dict[str, bytes]:
    """What a cell wrote, without the times (in the result and in the checkpoint's header)."""
    from safetensors.torch import load_file

    found = {"metrics": (folder / "metrics.jsonl").read_bytes()}
    found |= {n: t.numpy().tobytes() for n, t in load_file(folder / "checkpoint.safetensors").items()}
    result = json.loads((folder / "result.json").read_text())
    return found | {"result": json.dumps({**result, "seconds": 0}).encode()}
