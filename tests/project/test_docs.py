"""The pages: README.md, the other pages beside it, and docs/*.md.

Every python snippet runs, in order and in one namespace per page. A text block that follows a snippet is compared with
what the snippet printed. Links and file names lead to files that exist. The table of problems in docs/choose.md is
compared with the formulas of the weights, and the speed table of README.md with docs/speed.md.

After a change of output, `python tests/project/test_docs.py` writes the text blocks again.
"""

import contextlib
import importlib
import io
import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import entmax
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
SNIPPET = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n*```text\n(?P<text>.*?)^```\n)?", re.MULTILINE | re.DOTALL)


@contextlib.contextmanager
def _leaving_no_trace():
    """Undo what a page may do: write files, seed, set the default dtype, replace PyTorch's attention."""
    stock, dtype = F.scaled_dot_product_attention, torch.get_default_dtype()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            yield
        finally:
            F.scaled_dot_product_attention = stock
            torch.set_default_dtype(dtype)


@_leaving_no_trace()
def run(page: str, name: str = "page") -> tuple[dict, list[tuple[re.Match, str]]]:
    """The page's namespace at its end, and each snippet with what it printed."""
    namespace, outputs = {}, []
    for snippet in SNIPPET.finditer(page):
        above = page.count("\n", 0, snippet.start("code"))  # a traceback shows the page's own line
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * above + snippet["code"], name, "exec"), namespace)
        outputs.append((snippet, re.sub(" +$", "", printed.getvalue(), flags=re.MULTILINE)))
    return namespace, outputs


def check(page: str, name: str = "page") -> dict:
    namespace, outputs = run(page, name)
    for snippet, printed in outputs:
        if snippet["text"] is not None:
            assert printed == snippet["text"], f"{name}: the snippet printed\n{printed}"
    return namespace


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_snippets_run_and_print_what_the_page_says(path):
    page = path.read_text()
    if path.name == "support.md" and regard.select_backend(*torch.zeros(3, 1, 1, 1, 1)).backend != "native":
        pytest.skip("the page shows a build with the native engine")
    check(page, str(path))
    assert page.count("\n```python") == len(SNIPPET.findall(page))
    assert page.count("\n```text") == sum(m["text"] is not None for m in SNIPPET.finditer(page))


def test_a_wrong_output_is_noticed():
    check("\n```python\nprint(1)\n```\n```text\n1\n```\n")
    with pytest.raises(AssertionError, match="printed"):
        check("\n```python\nprint(1)\n```\n\n```text\n2\n```\n")


def _anchors(page: str) -> set[str]:
    """The names under which a page's headings can be linked to: lower case, punctuation dropped, spaces as hyphens."""
    without_code = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", without_code, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", path.read_text()):
        if "://" not in target:
            linked = path.parent / target if target else path
            assert linked.exists(), f"{path.name} links to {target}"
            assert not anchor or anchor in _anchors(linked.read_text()), f"{path.name} links to {target}#{anchor}"


def test_the_index_lists_every_page():
    index = (ROOT / "docs" / "index.md").read_text()
    unlisted = {path.name for path in (ROOT / "docs").glob("*.md") if f"({path.name})" not in index}
    assert unlisted == {"index.md"}


def test_files_named_by_the_architecture_page_exist():
    """Paths in backticks, below src/regard or below the repository."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    layers = re.search(r"^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert layers is not None
    named = {*re.findall(r"`([\w./]+(?:\.py|\.h|/))`", page), *re.findall(r"[\w/]+(?:\.py|/)(?= |\n)", layers[1])}
    assert len(named) > 30
    missing = {name for name in named if not ((ROOT / "src/regard" / name).exists() or (ROOT / name).exists())}
    assert missing == set()


def test_one_version_everywhere():
    """The package, CITATION.cff and the newest dated section of the changelog."""
    changelog = re.search(r"^## (\d\S*) \((\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = (ROOT / "CITATION.cff").read_text()
    assert changelog is not None
    assert f"\nversion: {changelog[1]}\ndate-released: {changelog[2]}\n" in citation
    assert changelog[1] == regard.__version__


def test_figures_are_what_the_library_draws(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "docs")
    figures = importlib.import_module("figures")
    drawn = figures.FOLDER
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    shown = "".join(path.read_text() for path in PAGES)
    number = re.compile(r"-?\d+\.\d")
    for figure in figures.FIGURES:
        figure()
        new, old = ((folder / f"{figure.__name__}.svg").read_text() for folder in (tmp_path, drawn))
        assert number.sub("", new) == number.sub("", old), f"{figure.__name__}: run python docs/figures.py"
        moved = [abs(float(a) - float(b)) for a, b in zip(number.findall(new), number.findall(old), strict=True)]
        assert max(moved) < 0.5, f"{figure.__name__}: run python docs/figures.py"  # pixels
        assert f"figures/{figure.__name__}.svg" in shown
    assert {path.name for path in drawn.glob("*.svg")} == {path.name for path in tmp_path.iterdir()}


# --- README -----------------------------------------------------------------------------------------------------------


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 170


def test_readme_shows_the_report():
    assert "(docs/figures/report.png)" in (ROOT / "README.md").read_text()
    assert (ROOT / "docs" / "figures" / "report.png").stat().st_size < 200_000


def test_the_speeds_of_readme_are_those_of_the_speed_page():
    """Case, kind, T, peer and ratio of each row of README's table occur in one row of docs/speed.md."""
    section = (ROOT / "README.md").read_text().partition("\n## Speed\n")[2].partition("\n## ")[0]
    ratios = re.compile(r"^\|.*\*\*.*\|$", re.MULTILINE)
    short = [_cells(row) for row in ratios.findall(section)]
    measured = [_cells(row) for row in ratios.findall((ROOT / "docs" / "speed.md").read_text())]
    assert len(short) >= 5
    for *case, ratio in short:
        assert [row[4].split()[0] for row in measured if row[:4] == case] == [ratio], case


# --- docs/choose.md: which attention is which problem -----------------------------------------------------------------


def _softmax_where(keep: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def weights(s: Tensor, names: dict) -> Tensor:
        i, j = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
        return s.masked_fill(~keep(i, j), -math.inf).softmax(-1)

    return weights


def _alibi(s: Tensor, names: dict) -> Tensor:
    i, j = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
    biased = s - names["slopes"][:, None, None] * (i - j).abs()
    return biased.masked_fill(j > i, -math.inf).softmax(-1)


def _documents(s: Tensor, names: dict) -> Tensor:
    ids = names["ids"]
    same = (ids[:, None] == ids) & (ids >= 0)
    return s.masked_fill(~same, -math.inf).softmax(-1).nan_to_num(0.0)


def _distance(s: Tensor) -> Tensor:
    return torch.arange(s.shape[-1]) - torch.arange(s.shape[-2])[:, None]


def _past(s: Tensor) -> Tensor:
    return s.masked_fill(_distance(s) > 0, -math.inf)


def _seen(s: Tensor) -> Tensor:
    """The number of keys of each causal row."""
    return torch.arange(1, s.shape[-2] + 1, dtype=s.dtype)[:, None]


def _forgetting(s: Tensor, names: dict) -> Tensor:
    gates, n = names["log_forget"].double(), s.shape[-1]
    forgotten = torch.stack([torch.stack([gates[:, j + 1 : i + 1].sum(-1) for j in range(n)], -1) for i in range(n)], 1)
    return _past(s + forgotten).softmax(-1)


def _selected(s: Tensor, index: Tensor) -> Tensor:
    listed = (torch.arange(s.shape[-1]) // 2 == index[0, 0, :, :, None]).any(1)
    return s.masked_fill(~listed, -math.inf).softmax(-1)


def _threshold(g: Callable[[Tensor], Tensor], mass: float) -> Callable[..., Tensor]:
    """g(s - lambda) with lambda by bisection, so that rows sum to the mass."""

    def weights(s: Tensor, names: dict) -> Tensor:
        low, high = s.amin(-1, keepdim=True) - 50, s.amax(-1, keepdim=True) + 50
        for _ in range(200):
            middle = (low + high) / 2
            heavy = g(s - middle).sum(-1, keepdim=True) > mass
            low, high = torch.where(heavy, middle, low), torch.where(heavy, high, middle)
        return g(s - low)

    return weights


WEIGHTS = {
    "softmax": lambda s, n: s.softmax(-1),
    "causal": _softmax_where(lambda i, j: j <= i),
    "sliding window": _softmax_where(lambda i, j: (j <= i) & (j >= i - 2)),
    "ALiBi": _alibi,
    "any bias": lambda s, n: (s + n["log_prior"]).softmax(-1),
    "bias per distance": lambda s, n: (s + n["table"][:, _distance(s).clamp(-3, 3) + 3]).softmax(-1),
    "low-rank prior (GOAT)": lambda s, n: (s + n["a"].double() @ n["c"].double().mT).softmax(-1),
    "forgetting attention (FoX)": _forgetting,
    "soft mask": lambda s, n: F.normalize(n["density"] * s.exp(), p=1.0, dim=-1),
    "selected blocks (DSA, NSA)": lambda s, n: _selected(s, n["index"]),
    "prefix-LM": _softmax_where(lambda i, j: (j <= i) | (j < 3)),
    "scalable softmax": lambda s, n: _past(s * 0.5 * _seen(s).log()).softmax(-1),
    "ASEntmax": lambda s, n: entmax.entmax15(_past(s * (1 + 0.5 * _seen(s).log() ** 1.5)), -1),
    "packed documents": _documents,
    "entmax": lambda s, n: entmax.entmax15(s, -1),
    "sparsemax": lambda s, n: entmax.sparsemax(s, -1),
    "softmax-1": lambda s, n: s.exp() / (1 + s.exp().sum(-1, keepdim=True)),
    "learned sinks (gpt-oss)": lambda s, n: s.exp() / (n["b"][:, None, None].exp() + s.exp().sum(-1, keepdim=True)),
    "sigmoid": lambda s, n: (s - math.log(s.shape[-1])).sigmoid(),
    "ReLU": lambda s, n: s.relu(),
    "soft top-m": _threshold(torch.sigmoid, 2.0),
    "relaxed (unbalanced)": lambda s, n: s.softmax(-1) * s.exp().sum(-1, keepdim=True) ** (1 / 1.5),
    "Sinkhorn, both marginals": lambda s, n: _by_turns(s),
    "hard routing": lambda s, n: F.one_hot(s.argmax(-1), s.shape[-1]).double(),
    "your own (here χ²)": _threshold(lambda t: (1 + t).relu(), 1.0),
}


def _by_turns(s):
    """Rows and columns normalised in turns until nothing changes. Tq = Tk, so each of them sums to 1."""
    p = s.softmax(-1)
    for _ in range(5000):
        p = p / p.sum(-2, keepdim=True)
        p = p / p.sum(-1, keepdim=True)
    return p


def test_the_table_of_problems_is_true():
    page = (ROOT / "docs" / "choose.md").read_text()
    names = check(page, "docs/choose.md")
    rows = dict(re.findall(r"^\| ([^|]+) \| `(Transport\(.*?\))` \|", page, re.MULTILINE))
    assert rows.keys() == WEIGHTS.keys()
    torch.manual_seed(0)
    s = 2 * torch.randn(2, 4, names["n"], names["n"], dtype=torch.float64)
    v = torch.randn(2, 4, names["n"], 3, dtype=torch.float64)
    eye = torch.eye(names["n"], dtype=torch.float64).expand_as(s)
    for attention, expression in rows.items():
        problem = eval(expression.replace("\\|", "|"), names)
        expected = WEIGHTS[attention](s, names)
        plan = regard.solve(s, problem)
        close = 1e-5 if "RowsAndColumns" in expression else 1e-6  # its columns are met to its tolerance
        torch.testing.assert_close(plan.weights, expected, rtol=close, atol=close, msg=attention)
        assert plan.certificate().holds(1e-5 if "RowsAndColumns" in expression else 1e-9), attention
        assert not regard.certify(s, expected.roll(1, -1), problem).holds(1e-2), attention
        out = regard.attention(s, eye, v, scale=1.0, problem=problem)
        torch.testing.assert_close(out, expected @ v, rtol=close, atol=close, msg=attention)


if __name__ == "__main__":
    for path in PAGES:
        text = path.read_text()
        for snippet, printed in reversed(run(text, str(path))[1]):
            if snippet["text"] is not None:
                text = text[: snippet.start("text")] + printed + text[snippet.end("text") :]
        path.write_text(text)
