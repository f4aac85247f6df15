"""The text of tokens: a character that is split into several tokens is shown whole."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import regard
from regard.inspection.token_texts import TokenTexts, first_words, opening, token_texts
from support.models import build


def of_bytes(*merged):
    """A tokenizer with a token for every byte, and for these texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(merged))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def with_fallback():
    """Words as tokens, and bytes for the rest, as in Llama."""
    vocabulary = {f"<0x{n:02X}>": n for n in range(256)} | {"▁": 256, "a": 257, "<unk>": 258}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def shown(text, tokenizer):
    """The groups of tokens of a text: (text, number of tokens)."""
    ids = tokenizer(text)["input_ids"]
    found = token_texts(ids, tokenizer)
    assert len(found.texts) == len(ids)
    groups = []
    for i, piece in enumerate(found.texts):
        part, of = found.parts.get(i, (1, 1))
        assert part == 1 or (groups[-1] == (piece, of) and found.parts[i - 1] == (part - 1, of))
        if part == 1:
            groups.append((piece, of))
    return groups


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("🙂", 4),
        ("界", 3),
        ("é", 2),
        ("❤️", 6),
        ("👩‍🚀", 11),
        ("👍🏽", 8),
        ("🇩🇪", 8),
        ("1️⃣", 7),
        ("👨‍👩‍👧‍👦", 25),
        ("\U0001f3f4" + "".join(chr(0xE0000 + ord(c)) for c in "gbsct\x7f"), 28),
    ],
)
def test_a_character_of_several_tokens_is_whole(text, size):
    assert shown(f"a{text}b", of_bytes()) == [("a", 1), (text, size), ("b", 1)]
    assert shown(f"{text}{text}", of_bytes()) == [(text, size)] * 2


def test_a_token_may_have_half_a_character():
    """SmolLM2's tokens, for example, are a space with the first half of an emoji."""

    class Halves:
        parts = (b" \xf0\x9f", b"\x99\x82", b"ok", b"\xf0\x9f\x90", b"\x88\xf0\x9f\x99", b"\x82")

        def decode(self, ids, **_):
            return b"".join(self.parts[i] for i in ids).decode("utf-8", "replace")

    found = token_texts(range(6), Halves())
    assert found.texts == [" 🙂"] * 2 + ["ok"] + ["🐈🙂"] * 3
    assert found.parts == {0: (1, 2), 1: (2, 2), 3: (1, 3), 4: (2, 3), 5: (3, 3)}


def test_bytes_as_a_fallback():
    assert shown("a🙂a", with_fallback()) == [("a", 1), ("🙂", 4), ("a", 1)]


def test_what_is_no_character_stays_alone():
    tokenizer = of_bytes("word", "\ufffd")
    ids = tokenizer("🙂")["input_ids"][:3] + tokenizer("word")["input_ids"]
    found = token_texts(ids, tokenizer)
    assert found.texts[-1] == "word" and found.parts == {}  # the text was cut inside of the character
    assert shown("a\ufffdb🙂", tokenizer) == [("a", 1), ("\ufffd", 1), ("b", 1), ("🙂", 4)]
    assert token_texts([], tokenizer).texts == []
    assert token_texts([3, 5], None).texts == ["3", "5"]


def test_the_text_of_a_block_has_each_character_once():
    tokenizer = of_bytes()
    found = token_texts(tokenizer("ab🙂cd")["input_ids"], tokenizer)
    assert found.between(0, 8, 80) == "ab🙂cd" and found.between(0, 3, 80) == "ab🙂"
    assert found.between(4, 7, 80) == "🙂c" and found.between(0, 8, 3) == "ab🙂…"
    assert found.parts_among([1, 2, 5]) == {"2": [1, 4], "5": [4, 4]}
    assert TokenTexts([]).of(7) == "#7"


def test_the_views_have_whole_characters():
    tokenizer, model = of_bytes(), build("llama", vocab_size=300)
    ids = torch.tensor(tokenizer("The cat 🐈 " * 6)["input_ids"])
    record = regard.inspect(model, ids, views=True, tokenizer=tokenizer).record()
    assert record["window"]["tokens"][7:13] == [" ", "🐈", "🐈", "🐈", "🐈", " "]
    assert record["window"]["parts"]["9"] == [2, 4] and "12" not in record["window"]["parts"]
    assert "\ufffd" not in "".join([*record["window"]["tokens"], *record["map"]["texts"]])
    assert "\ufffd" not in "".join(record["top_keys"]["tokens"].values())
    expected = {str(i): list(part) for i, part in token_texts(ids.tolist(), tokenizer).parts.items()}
    assert record["top_keys"]["parts"] == {i: expected[i] for i in record["top_keys"]["tokens"] if i in expected}


def test_first_words():
    text = "Once upon a time\nthere  was a cat"
    assert first_words(text, 40) == "Once upon a time there was a cat"
    assert first_words(text, 14) == "Once upon a …" and first_words("x" * 30, 10) == "x" * 10 + " …"
    tokenizer = of_bytes()
    ids = tokenizer(text + " 🙂" * 60)["input_ids"]
    found = opening(ids, tokenizer)
    assert found.startswith("Once upon a time there was a cat 🙂") and "\ufffd" not in found
    assert opening([5, 6], None) == "5 6"
