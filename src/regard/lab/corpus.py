"""Text to learn from: the source of Python's standard library, which is on every machine, or any text file."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # replaces every character that is too rare
LARGEST_VOCABULARY = 256


@dataclass(frozen=True)
class Corpus:
    """A text as token ids, one per character; the last tenth is held out for validation."""

    name: str
    text: str

    @cached_property
    def characters(self) -> str:
        """The vocabulary: all characters, or the most frequent ones if there are more than `LARGEST_VOCABULARY`."""
        counted = Counter(self.text)
        if len(counted) <= LARGEST_VOCABULARY:
            return "".join(sorted(counted))
        frequent = sorted(counted, key=lambda c: (-counted[c], c))[: LARGEST_VOCABULARY - 1]
        return "".join(sorted({*frequent, UNKNOWN}))

    @cached_property
    def tokens(self) -> Tensor:
        return self.encode(self.text)

    @property
    def split(self) -> int:
        return int(0.9 * len(self.text))

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def encode(self, text: str) -> Tensor:
        number = {character: n for n, character in enumerate(self.characters)}
        unknown = number.get(UNKNOWN)
        missing = set(text) - number.keys()
        if missing and unknown is None:
            raise ValueError(f"text: expected characters of the corpus, got {min(missing)!r}")
        return torch.tensor([number.get(c, unknown) for c in text])

    def decode(self, tokens: Tensor) -> str:
        return "".join(self.characters[n] for n in tokens.tolist())

    def batch(self, count: int, length: int, generator: torch.Generator, part: str = "train") -> Tensor:
        """Random pieces of the training part (or of "validation"), [count, length + 1]."""
        start, stop = (0, self.split) if part == "train" else (self.split, len(self.text))
        if stop - start <= length:
            raise ValueError(f"length: expected less than the {stop - start} characters of {self.name}, got {length}")
        begins = torch.randint(start, stop - length, (count, 1), generator=generator)
        return self.tokens[begins + torch.arange(length + 1)]


def standard_library(characters: int | None = None) -> Corpus:
    """The source of Python's standard library without its tests, cut after `characters` characters."""
    found, length = [], 0
    for path in _sources(Path(sysconfig.get_path("stdlib"))):
        text = path.read_text("utf-8", errors="replace")
        found.append(text)
        length += len(text)
        if characters is not None and length >= characters:
            break
    return Corpus(f"the standard library of Python {sys.version.split()[0]}", "".join(found)[:characters])


def _sources(root: Path) -> Iterator[Path]:
    """The modules, ordered by a hash of their names, which mixes short and long, old and new."""
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
    names = []
    for folder, inner, files in os.walk(root):
        inner[:] = set(inner) - left_out
        names += [Path(folder, file) for file in files if file.endswith(".py")]
    return iter(sorted(names, key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()))


def from_file(path: Path) -> Corpus:
    """A text file in UTF-8."""
    text = path.read_text("utf-8", errors="replace")
    if len(text) < 1000:
        raise ValueError(f"text: expected a file of at least 1000 characters, got {len(text)} in {path}")
    return Corpus(path.name, text)
