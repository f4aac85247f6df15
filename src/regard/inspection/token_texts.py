"""The text of tokens, as the report shows it.

A tokenizer of bytes may split a character into several tokens. Such a token has no text of its own: decoded alone it is
the replacement character. `token_texts` gives each of them the text of the whole group, with its place in the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

REPLACEMENT = "\ufffd"
LONGEST = 12  # tokens that are searched for a whole character
LARGEST = 64  # tokens of a group: an emoji may have a dozen code points of up to four bytes
OPENING = 160  # characters of `opening`


@dataclass(frozen=True)
class TokenTexts:
    """The texts of the tokens of one sequence."""

    texts: list[str]  # every token of a group has the text of the whole group
    parts: dict[int, tuple[int, int]] = field(
        default_factory=dict
    )  # token -> its place in a group, from 1, and its size
    space: str = ""  # between two texts

    def of(self, token: int) -> str:
        return self.texts[token] if token < len(self.texts) else f"#{token}"

    def between(self, start: int, stop: int, longest: int) -> str:
        """The text of some tokens, each group once, cut at `longest` characters."""
        begins = [i for i in range(start, min(stop, len(self.texts))) if i == start or self.parts.get(i, (1,))[0] == 1]
        text = self.space.join(self.texts[i] for i in begins)
        return text if len(text) <= longest else f"{text[:longest]}…"

    def parts_among(self, tokens: Sequence[int]) -> dict[str, list[int]]:
        """`parts` of these tokens, as JSON has it."""
        return {str(i): list(self.parts[i]) for i in tokens if i in self.parts}


def token_texts(ids: Sequence[int], tokenizer: Any) -> TokenTexts:
    """The texts of these tokens. Without a tokenizer the ids are the texts."""
    if tokenizer is None:
        return TokenTexts([str(i) for i in ids], space=" ")
    texts: list[str] = []
    parts: dict[int, tuple[int, int]] = {}
    while len(texts) < len(ids):
        start = len(texts)
        text, size = _group(ids, start, tokenizer.decode)
        texts += [text] * size
        if size > 1:
            parts |= {start + k: (k + 1, size) for k in range(size)}
    return TokenTexts(texts, parts)


def _group(ids: Sequence[int], start: int, decode: Callable[[list[int]], str]) -> tuple[str, int]:
    """The text of the tokens from `start` on that form whole characters together, and their number."""
    alone = decode([ids[start]])
    text, size = alone, 1
    if REPLACEMENT in alone:
        whole = _first_whole(ids, start, decode)
        if whole is None:  # not valid UTF-8, or the text was cut inside of a character
            return alone, 1
        text, size = whole
    while start + size < len(ids) and size < LARGEST:
        found = _first_whole(ids, start + size, decode)
        if found is None or size + found[1] > LARGEST or not _joins(text, found[0]):
            break
        text, size = text + found[0], size + found[1]
    return text, size


def _first_whole(ids: Sequence[int], start: int, decode: Callable[[list[int]], str]) -> tuple[str, int] | None:
    """The text of the fewest tokens from `start` on that have no incomplete character, and their number."""
    for size in range(1, min(LONGEST, len(ids) - start) + 1):
        text = decode(list(ids[start : start + size]))
        if REPLACEMENT not in text:
            return text, size
    return None


def _joins(text: str, more: str) -> bool:
    """Whether `more` continues the last emoji of `text`: a variation, a skin tone, a keycap, the next part of a joined
    emoji, the second letter of a flag, or a tag (the letters of the flag of Scotland)."""
    if not text or not more:
        return False
    last, first = text[-1], more[0]
    if "\U0001f1e6" <= first <= "\U0001f1ff":
        letters = len(text) - len(text.rstrip("".join(map(chr, range(0x1F1E6, 0x1F200)))))
        return letters % 2 == 1
    continues = first in "\u200d\ufe0e\ufe0f\u20e3" or last == "\u200d"
    return continues or "\U0001f3fb" <= first <= "\U0001f3ff" or "\U000e0020" <= first <= "\U000e007f"


def opening(ids: Sequence[int], tokenizer: Any) -> str:
    """The beginning of a sequence, on one line; without a tokenizer, its first token ids."""
    start = list(ids[:OPENING])
    if tokenizer is None:
        text = " ".join(map(str, start))
    else:
        text = tokenizer.decode(start, skip_special_tokens=True).rstrip(REPLACEMENT)
    return first_words(text, OPENING)


def first_words(text: str, longest: int) -> str:
    """The words at the beginning of a text, on one line, in at most about this many characters."""
    text = " ".join(text.split())
    if len(text) <= longest:
        return text
    return (text[: longest + 1].rpartition(" ")[0] or text[:longest]) + " …"
