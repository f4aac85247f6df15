"""How results show themselves: short reprs, and small tables in notebooks with light and dark themes."""

import dataclasses
import re
from html.parser import HTMLParser

import pytest
import torch
from torch import Tensor

import regard
from regard import AuxRequest, Causal, Rows, Transport, Tsallis
from regard._display import html_table
from regard._pytree import Part
from support.browser import ATTACK, contrast
from support.training import llama, tokens


def results():
    """One of each kind, with thousands of numbers."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 100, 16)
    scores = torch.randn(4, 100, 60)
    plan = regard.solve(scores, Transport(Tsallis(1.5), marginal=Rows(sink=0.5)))
    return {
        "Plan": plan,
        "Certificate": plan.certificate(),
        "AuxOutput": regard.attention(q, k, v, is_causal=True, return_aux=AuxRequest(lse=True, entropy=True))[1],
        "Estimate": regard.estimate(q, k, v, is_causal=True),
        "Calibration": regard.calibrate(scores, torch.randint(60, (4, 100)), per="head"),
        "Evidence": regard.evidence(q, k),
        "Path": regard.path(scores, [0.5, 1.0, 2.0]),
        "Inspection": regard.inspect(llama(num_hidden_layers=3), tokens(8, 40), patterns=True),
    }


@pytest.fixture(scope="module")
def found():
    return results()


NAMES = ["Plan", "Certificate", "AuxOutput", "Estimate", "Calibration", "Evidence", "Path", "Inspection"]


@pytest.mark.parametrize("name", NAMES)
def test_a_repr_is_one_short_line(found, name):
    text = repr(found[name])
    assert text.startswith(f"{name}(") and len(text) <= 300 and "\n" not in text and "tensor(" not in text


def test_every_public_result_has_a_short_repr(found):
    """A new public dataclass of tensors must be in the tests of this file."""
    kinds = [getattr(regard, name) for name in regard.__all__]
    kinds = [kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
    with_tensors = {
        kind.__name__
        for kind in kinds
        if not issubclass(kind, Part)  # the parts of a problem are not results
        and any("Tensor" in str(field.type) or "Layer" in str(field.type) for field in dataclasses.fields(kind))
    }
    assert with_tensors == set(NAMES)


def test_what_a_repr_shows(found):
    assert repr(found["AuxOutput"]) == (
        "AuxOutput(lse=Tensor(float32, [2, 4, 100]), entropy=Tensor(float32, [2, 4, 100]))"
    )
    assert repr(found["Inspection"]) == "Inspection(LlamaForCausalLM, layers=3, heads=12, rows=320, statistics=14)"
    assert re.fullmatch(
        r"Certificate\(rows=\[4, 100\], gap=\S+, row_residual=\S+, stationarity=\S+\)", repr(found["Certificate"])
    )
    assert repr(found["Plan"]).endswith("problem=Transport(Tsallis(1.5), marginal=Rows(sink=0.5)))")
    [layer] = found["Inspection"].layers[:1]
    assert "tensor(" not in repr(layer) and "name='model.layers.0.self_attn'" in repr(layer)


def test_findings_are_short_and_name_their_remedy(found):
    all_of_them = found["Inspection"].findings()
    assert max(len(repr(finding)) for finding in all_of_them) < 300
    finding = next(f for f in all_of_them if f.layer is not None)
    assert f"in layer {finding.layer}, head {finding.head}: {finding.message}" in str(finding)
    assert str(finding).endswith(f"Remedy: {finding.remedy}")


class Checker(HTMLParser):
    """The text of a table, and whether every tag that opens is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.tags = [], [], set()

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(html):
    checker = Checker()
    checker.feed(html)
    assert checker.open == []
    return checker


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_shows_a_small_table(found, name):
    html = found[name]._repr_html_()
    page = parsed(html)
    assert page.tags <= {"div", "strong", "table", "thead", "tbody", "tr", "th", "td"}
    assert len(html) < 10_000 and "tensor(" not in html
    assert not re.search(r"[;\"](color|background(-color)?):(?!none)", html)  # the theme's colours


def test_what_a_table_shows(found):
    aux = found["AuxOutput"]
    text = " ".join(parsed(aux._repr_html_()).text)
    for number in (aux.entropy.min(), aux.entropy.mean(), aux.entropy.max()):
        assert f"{float(number):.4g}" in text
    assert "float32" in text and "[2, 4, 100]" in text and "max_scores" not in text
    seen = found["Inspection"]
    text = " ".join(parsed(seen._repr_html_()).text)
    assert "3 attention layers, 320 queries each" in text and f"{float(seen.mean('entropy')[1].mean()):.4g}" in text
    assert "largest score:" in text and "12 heads" in text  # the verdict


def test_text_is_escaped():
    html = html_table(ATTACK, [(ATTACK, 1.0), (ATTACK,)], (ATTACK, "n"), [ATTACK])
    page = parsed(html)
    assert not page.tags & {"img", "script"} and "".join(page.text).count(ATTACK) == 5
    assert ATTACK in "".join(parsed(regard.Inspection(("entropy",), {"model": ATTACK})._repr_html_()).text)


def test_results_without_numbers():
    """Nothing recorded, no rows, NaN, and tensors whose values cannot be read."""
    assert "Nothing was recorded" in regard.Inspection(("entropy",))._repr_html_()
    assert "rows=0" in repr(regard.Inspection(("entropy",)))
    empty = regard.solve(torch.zeros(2, 0, 5))
    assert "[2, 0, 5]" in empty._repr_html_() and repr(empty.certificate()) and empty.certificate()._repr_html_()
    aux = regard.AuxOutput(entropy=torch.full((2, 3), torch.nan), lse=torch.zeros(3, device="meta"))
    assert "nan" not in aux._repr_html_() and "[2, 3]" in aux._repr_html_()
    shown = []
    torch.vmap(lambda x: shown.append(regard.AuxOutput(entropy=x)._repr_html_()) or x)(torch.ones(2, 3))
    assert "[3]" in shown[0]


def test_an_auxiliary_output_can_still_be_compiled():
    def entropy(q: Tensor) -> Tensor | None:
        aux = regard.attention(q, q, q, problem=Transport(prior=Causal()), return_aux=AuxRequest(entropy=True))[1]
        return aux.entropy

    q = torch.randn(1, 2, 5, 4)
    compiled = torch.compile(entropy, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), entropy(q))


@pytest.mark.parametrize(("text", "ground"), [("#212121", "#ffffff"), ("#dedede", "#111111")])
def test_tables_are_readable_on_light_and_dark_pages(found, browser, text, ground):
    long = html_table("A model of 80 layers", [(n, 0.5) for n in range(80)], ("layer", "entropy"))
    body = "".join(found[name]._repr_html_() for name in NAMES) + long
    page = browser.new_page(viewport={"width": 900, "height": 800})
    page.set_content(f'<body style="color:{text};background:{ground}">{body}</body>')
    for selector in ("strong", "th", "td"):
        assert contrast(page, selector, "body") >= 7
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    heights = page.eval_on_selector_all("body > div", "divs => divs.map(d => d.offsetHeight)")
    assert len(heights) == len(NAMES) + 1 and max(heights) < 400
    page.close()
