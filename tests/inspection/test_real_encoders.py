"""Real encoders, as their packages ship them: a BERT without the head of its class, and an ALBERT whose layers share
their weights. The statistics are those of the matrices that transformers returns."""

import pytest
import torch
from typer.testing import CliRunner

import regard
from regard.cli import app
from support.checkpoints import encoder_folder

ENCODERS = {"minilm": "6 layers, 72 heads, 22.7M parameters", "rxnmapper": "12 layers, 96 heads, 736K parameters"}


@pytest.mark.parametrize("name", ENCODERS)
def test_statistics_are_those_of_the_matrices(name):
    model, tokenizer = regard.hf.load(str(encoder_folder(name)))
    assert (tokenizer is None) == (name == "rxnmapper")
    torch.manual_seed(0)
    ids = torch.randint(20, 500, (2, 60))
    seen = regard.inspect(model, ids)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = torch.stack(model(ids, output_attentions=True).attentions).double()  # [layers, B, H, Tq, Tk]
    assert [layer.index for layer in seen.layers] == list(range(len(weights)))
    entropy = -(weights * weights.clamp(min=1e-30).log()).sum(-1).mean((1, 3))
    torch.testing.assert_close(seen.mean("entropy"), entropy, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(seen.mean("max_weight"), weights.amax(-1).mean((1, 3)), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(seen.mean("first_key_mass"), weights[..., 0].mean((1, 3)), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ENCODERS)
def test_from_the_command_line(name, tmp_path):
    folder, tokens, page = str(encoder_folder(name)), tmp_path / "tokens.txt", tmp_path / "page.html"
    tokens.write_text(" ".join(map(str, range(20, 120))))
    options = ("--tokens", str(tokens)) if name == "rxnmapper" else ()  # the others read the sample text
    result = CliRunner().invoke(app, ["inspect", folder, *options, "--out", str(page)], env={"COLUMNS": "400"})
    assert result.exit_code == 0 and ENCODERS[name] in result.output, result.output
    assert "</html>" in page.read_text()


def test_a_model_without_a_tokenizer_asks_for_tokens():
    result = CliRunner().invoke(app, ["inspect", str(encoder_folder("rxnmapper"))], env={"COLUMNS": "400"})
    assert result.exit_code == 2 and "has no tokenizer: give token ids with --tokens FILE" in result.output
