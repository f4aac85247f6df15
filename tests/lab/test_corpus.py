"""Texts to learn from: the standard library and text files."""

import pytest
import torch

from regard.lab.corpus import UNKNOWN, Corpus, from_file, standard_library


def test_standard_library():
    corpus = standard_library(50_000)
    assert len(corpus.text) == 50_000 and "def " in corpus.text and "import " in corpus.text
    assert corpus.decode(corpus.tokens[:500]) == corpus.text[:500]
    assert standard_library(50_000).digest == corpus.digest != standard_library(50_001).digest
    pieces = corpus.batch(40, 30, torch.Generator().manual_seed(0), "validation")
    assert pieces.shape == (40, 31) and all(corpus.decode(p) in corpus.text[45_000:] for p in pieces)
    assert all(corpus.decode(p) in corpus.text[:45_000] for p in corpus.batch(40, 30, torch.Generator()))


def test_rare_characters_share_a_token():
    corpus = Corpus("many", "".join(chr(0x4E00 + n) for n in range(300)) + "ab" * 50)
    assert len(corpus.characters) == 256 and UNKNOWN in corpus.characters
    assert corpus.decode(corpus.tokens[-4:]) == "abab" and UNKNOWN in corpus.decode(corpus.tokens)
    with pytest.raises(ValueError, match="expected characters of the corpus, got 'c'"):
        Corpus("few", "ab" * 50).encode("abc")


def test_a_text_file(tmp_path):
    (tmp_path / "a.txt").write_text("to be " * 300)
    assert from_file(tmp_path / "a.txt").characters == " beot"
    (tmp_path / "b.txt").write_text("short")
    with pytest.raises(ValueError, match="at least 1000 characters, got 5"):
        from_file(tmp_path / "b.txt")
