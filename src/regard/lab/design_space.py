"""The design space: regulariser x marginal x prior x kernel. Each cell has its name in the literature and can be run.

A cell is given by the expression that creates it; the table reads its parts from the object. The tests run every cell
and certify its plan. `python -m regard.lab.design_space` writes docs/design-space.md. To add a cell, add a line to
`CELLS`, and its reference to `REFERENCES`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import regard
from regard import features
from regard.problem import Marginal, Rows, TemperatureRule, Transport

H, T, D = 4, 6, 8
UNNAMED = "no name known to us"


@dataclass(frozen=True)
class DesignCell:
    """An attention: a `Transport`, or a module of `regard.features` (with `is_causal` or without)."""

    expression: str
    names: str
    reference: str
    is_causal: bool = False

    @property
    def made(self) -> Transport | features.Features:
        torch.manual_seed(0)  # a module draws its random directions
        return eval(self.expression, _names())


CELLS: list[DesignCell] = [
    # --- KL: softmax and its relatives
    DesignCell(
        "Transport()", "softmax attention; one-sided entropic optimal transport", "Vaswani et al. 2017; Litman 2025"
    ),
    DesignCell("Transport(prior=Causal())", "causal (decoder) attention", "Vaswani et al. 2017"),
    DesignCell("Transport(prior=Window(2, 2))", "local, sliding-window attention", "Beltagy et al. 2020"),
    DesignCell("Transport(prior=Causal() * Window(2))", "causal sliding window", "Jiang et al. 2023 (Mistral)"),
    DesignCell("Transport(prior=Causal() * ALiBi(slopes))", "ALiBi", "Press et al. 2022"),
    DesignCell("Transport(prior=Bias(log_prior))", "a bias for every pair", "Ying et al. 2021 (Graphormer)"),
    DesignCell(
        "Transport(prior=Relative.t5(buckets, bidirectional=True, max_distance=4))",
        "relative position bias of T5",
        "Raffel et al. 2020 (T5)",
    ),
    DesignCell("Transport(prior=LowRank(a, c))", "learned low-rank prior", "Litman and Guo 2026 (GOAT)"),
    DesignCell("Transport(prior=Decay(log_forget))", "forgetting attention (FoX)", "Lin et al. 2025 (FoX)"),
    DesignCell("Transport(prior=Density(density))", "soft mask, weights from 0 to 1", UNNAMED),
    DesignCell("Transport(prior=Causal() * Selected(index))", "selected keys (DSA)", "DeepSeek-AI 2025 (DSA)"),
    DesignCell(
        "Transport(prior=Causal() * Selected(index, block=2))",
        "selected blocks of keys (NSA)",
        "Yuan et al. 2025 (NSA)",
    ),
    DesignCell("Transport(prior=Causal() | Prefix(3))", "prefix-LM", "Raffel et al. 2020 (T5)"),
    DesignCell("Transport(prior=Window(1, 1) | Prefix(1))", "global tokens beside a window", "Beltagy et al. 2020"),
    DesignCell("Transport(prior=Blocks(block_map, 2))", "block-sparse attention", "Child et al. 2019"),
    DesignCell("Transport(prior=Documents(ids))", "packing without cross-contamination", "Krell et al. 2021"),
    DesignCell("Transport(temperature=tau)", "softmax with a temperature per head", "Liu et al. 2022 (Swin V2)"),
    DesignCell("Transport(temperature=0.0)", "average-hard (saturated) attention", "Merrill et al. 2022"),
    DesignCell(
        "Transport(temperature=MatchEntropy(1.0))",
        "each row at one perplexity, as t-SNE's neighbours",
        "van der Maaten and Hinton 2008",
    ),
    DesignCell("Transport(prior=Causal(), temperature=ByKeys(s))", "scalable softmax", "Nakanishi 2025"),
    DesignCell("Transport(temperature=MatchKL(0.3))", "relative-entropy constraint, as in REPS", "Peters et al. 2010"),
    DesignCell("Transport(marginal=Rows(sink=0.0))", "softmax-1, “off by one”", "Miller 2023"),
    DesignCell("Transport(marginal=Rows(sink=b))", "learned attention sinks", "OpenAI 2025 (gpt-oss)"),
    DesignCell(
        "Transport(prior=Causal(), marginal=Rows(sink=b))", "causal with learned sinks", "OpenAI 2025 (gpt-oss)"
    ),
    DesignCell(
        "Transport(marginal=Rows(relax=0.5))", "unbalanced optimal transport, rows relaxed", "Chizat et al. 2018"
    ),
    DesignCell("Transport(marginal=Rows(mass=2.0))", "softmax of mass 2", UNNAMED),
    DesignCell(
        "Transport(marginal=Free(offset=-math.log(n)))", "the exponential kernel, not normalised", "Tsai et al. 2019"
    ),
    # --- Tsallis: sparse plans
    DesignCell("Transport(Tsallis(1.5))", "1.5-entmax", "Peters et al. 2019"),
    DesignCell("Transport(Tsallis(2.0))", "sparsemax", "Martins and Astudillo 2016"),
    DesignCell(
        "Transport(Tsallis(alpha))", "adaptively sparse: alpha-entmax, an alpha per head", "Correia et al. 2019"
    ),
    DesignCell("Transport(Tsallis(1.5), prior=Causal())", "causal entmax", "Correia et al. 2019"),
    DesignCell(
        "Transport(Tsallis(1.5), prior=Causal(), temperature=ByKeys(s, offset=1.0, power=gamma))",
        "adaptive-scalable entmax (ASEntmax)",
        "Vasylenko et al. 2025",
    ),
    DesignCell("Transport(Tsallis(1.5), prior=Causal() * ALiBi(slopes))", "entmax under ALiBi as a prior", UNNAMED),
    DesignCell("Transport(Tsallis(2.0), marginal=Rows(sink=b))", "sparsemax with a sink", UNNAMED),
    DesignCell(
        "Transport(Tsallis(2.0), marginal=Free())", "ReLU attention, rectified linear attention", "Zhang et al. 2021"
    ),
    DesignCell("Transport(Tsallis(1.5), marginal=Free())", "squared-ReLU attention", "Hua et al. 2022"),
    # --- Fermi-Dirac: weights between 0 and 1
    DesignCell(
        "Transport(FermiDirac(), marginal=Free(offset=-math.log(n)))", "sigmoid attention", "Ramapuram et al. 2024"
    ),
    DesignCell(
        "Transport(FermiDirac(), prior=Causal(), marginal=Free(offset=-math.log(n)))",
        "causal sigmoid attention",
        "Ramapuram et al. 2024",
    ),
    DesignCell(
        "Transport(FermiDirac(), marginal=Rows(mass=2.0))",
        "soft top-m; the limited multi-label projection",
        "Amos et al. 2019",
    ),
    DesignCell("Transport(FermiDirac())", "the limited multi-label projection to one label", "Amos et al. 2019"),
    # --- a divergence of your own
    DesignCell("Transport(chi2)", "Pearson's chi-squared: quadratic regularisation", "Blondel et al. 2018"),
    # --- both marginals: each key receives its share, too
    DesignCell(
        "Transport(marginal=RowsAndColumns(tolerance=1e-12))",
        "Sinkhorn attention, Sinkformer at convergence; entropic optimal transport",
        "Sander et al. 2022; Cuturi 2013",
    ),
    DesignCell(
        "Transport(prior=Documents(ids), marginal=RowsAndColumns(tolerance=1e-12))",
        "Sinkhorn attention, packed and padded",
        UNNAMED,
    ),
    DesignCell(
        "Transport(marginal=RowsAndColumns(relax=0.5, tolerance=1e-12))",
        "unbalanced optimal transport, columns relaxed",
        "Chizat et al. 2018",
    ),
    # --- kernels of low rank: not optima, but rows that sum to 1, in O(T)
    DesignCell("LinearAttention()", "linear transformer, elu + 1", "Katharopoulos et al. 2020"),
    DesignCell("LinearAttention()", "linear transformer as an RNN", "Katharopoulos et al. 2020", is_causal=True),
    DesignCell("ReLUFeatures()", "ReLU linear attention", "Cai et al. 2023 (EfficientViT)"),
    DesignCell(
        "ReLUFeatures(D, 32)", "Performer-ReLU; arc-cosine kernel", "Choromanski et al. 2021; Cho and Saul 2009"
    ),
    DesignCell("Performer(D, 32)", "Performer, FAVOR+", "Choromanski et al. 2021"),
    DesignCell("Performer(D, 32)", "causal Performer", "Choromanski et al. 2021", is_causal=True),
    DesignCell(
        "Performer(D, 32, orthogonal=False)", "positive random features, independent", "Choromanski et al. 2021"
    ),
]

REFERENCES = {
    "Vaswani et al. 2017": "Attention Is All You Need, NIPS 2017",
    "Litman 2025": "Scaled-Dot-Product Attention as One-Sided Entropic Optimal Transport, arXiv:2508.08369",
    "Beltagy et al. 2020": "Longformer: The Long-Document Transformer, arXiv:2004.05150",
    "Jiang et al. 2023 (Mistral)": "Mistral 7B, arXiv:2310.06825",
    "Press et al. 2022": "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation, "
    "ICLR 2022, arXiv:2108.12409",
    "Raffel et al. 2020 (T5)": "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer, "
    "JMLR 21, arXiv:1910.10683",
    "Ying et al. 2021 (Graphormer)": "Do Transformers Really Perform Bad for Graph Representation?, NeurIPS 2021, "
    "arXiv:2106.05234",
    "Litman and Guo 2026 (GOAT)": "You Need Better Attention Priors, arXiv:2601.15380",
    "Lin et al. 2025 (FoX)": "Forgetting Transformer: Softmax Attention with a Forget Gate, ICLR 2025, "
    "arXiv:2503.02130",
    "DeepSeek-AI 2025 (DSA)": "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models, arXiv:2512.02556",
    "Yuan et al. 2025 (NSA)": "Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention, "
    "ACL 2025, arXiv:2502.11089",
    "Child et al. 2019": "Generating Long Sequences with Sparse Transformers, arXiv:1904.10509",
    "Nakanishi 2025": "Scalable-Softmax Is Superior for Attention, arXiv:2501.19399",
    "Vasylenko et al. 2025": "Long-Context Generalization with Sparse Attention, arXiv:2506.16640",
    "Krell et al. 2021": "Efficient Sequence Packing without Cross-contamination, arXiv:2107.02027",
    "Liu et al. 2022 (Swin V2)": "Swin Transformer V2: Scaling Up Capacity and Resolution, CVPR 2022, arXiv:2111.09883",
    "Merrill et al. 2022": "Saturated Transformers are Constant-Depth Threshold Circuits, TACL 10, arXiv:2106.16213",
    "van der Maaten and Hinton 2008": "Visualizing Data using t-SNE, JMLR 9",
    "Peters et al. 2010": "Relative Entropy Policy Search, AAAI 2010 (J. Peters)",
    "Miller 2023": "Attention Is Off By One, evanmiller.org/attention-is-off-by-one.html",
    "OpenAI 2025 (gpt-oss)": "gpt-oss-120b & gpt-oss-20b Model Card, arXiv:2508.10925",
    "Chizat et al. 2018": "Scaling Algorithms for Unbalanced Optimal Transport Problems, arXiv:1607.05816",
    "Tsai et al. 2019": "Transformer Dissection: A Unified Understanding of Transformer's Attention via the Lens of "
    "Kernel, EMNLP 2019, arXiv:1908.11775",
    "Peters et al. 2019": "Sparse Sequence-to-Sequence Models, ACL 2019, arXiv:1905.05702 (B. Peters)",
    "Martins and Astudillo 2016": "From Softmax to Sparsemax: A Sparse Model of Attention and Multi-Label "
    "Classification, arXiv:1602.02068",
    "Correia et al. 2019": "Adaptively Sparse Transformers, arXiv:1909.00015",
    "Zhang et al. 2021": "Sparse Attention with Linear Units, EMNLP 2021, arXiv:2104.07012",
    "Hua et al. 2022": "Transformer Quality in Linear Time, ICML 2022, arXiv:2202.10447",
    "Ramapuram et al. 2024": "Theory, Analysis, and Best Practices for Sigmoid Self-Attention, arXiv:2409.04431",
    "Amos et al. 2019": "The Limited Multi-Label Projection Layer, arXiv:1906.08707",
    "Blondel et al. 2018": "Smooth and Sparse Optimal Transport, arXiv:1710.06276",
    "Sander et al. 2022": "Sinkformers: Transformers with Doubly Stochastic Attention, AISTATS 2022, arXiv:2110.11773",
    "Cuturi 2013": "Sinkhorn Distances: Lightspeed Computation of Optimal Transport, NIPS 2013",
    "Katharopoulos et al. 2020": "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention, "
    "ICML 2020, arXiv:2006.16236",
    "Cai et al. 2023 (EfficientViT)": "EfficientViT: Multi-Scale Linear Attention for High-Resolution Dense "
    "Prediction, ICCV 2023, arXiv:2205.14756",
    "Choromanski et al. 2021": "Rethinking Attention with Performers, ICLR 2021, arXiv:2009.14794",
    "Cho and Saul 2009": "Kernel Methods for Deep Learning, NIPS 2009",
}

# The plane of regularisers and marginals, without a prior, at temperature 1: every combination, named or not.
REGULARIZERS = ("KL()", "Tsallis(1.5)", "Tsallis(2.0)", "FermiDirac()")
MARGINALS = ("Rows()", "Rows(sink=b)", "Rows(mass=2.0)", "Rows(relax=0.5)", "Free(offset=-math.log(n))")


@cache
def _names() -> dict[str, Any]:
    """The names that expressions can use. Each tensor is one object, so that equal expressions give equal problems."""
    own = {
        "n": T,
        "D": D,
        "ids": torch.tensor([0, 0, 0, 1, 1, -1]),
        "slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]),
        "b": torch.tensor([0.5, -0.5, 1.0, 0.0]),
        "tau": torch.tensor([0.5, 1.0, 2.0, 4.0])[:, None, None],
        "alpha": torch.tensor([1.2, 1.5, 1.8, 2.0]),
        "log_prior": _of_distance(torch.linspace(-1, 1, H * (2 * T - 1)).sin().reshape(H, -1)),
        "buckets": torch.linspace(-1, 1, 8 * H).cos().reshape(8, H),
        "a": torch.linspace(-1, 1, H * T * 2).reshape(H, T, 2),
        "c": torch.linspace(-2, 2, H * T * 2).sin().reshape(H, T, 2),
        "log_forget": -torch.linspace(0.1, 1, H * T).reshape(H, T),
        "density": torch.linspace(0, 1, T * T).reshape(T, T).flip(1),
        "index": torch.stack([torch.zeros(T).long(), torch.arange(T) // 2], -1)[None, None],
        "block_map": torch.ones(T // 2, T // 2, dtype=torch.bool).tril(),
        "s": torch.tensor([0.4, 0.5, 0.6, 0.7]),
        "gamma": torch.tensor([0.8, 1.0, 1.2, 1.5]),
        "chi2": regard.FDivergence(f=_chi2, link=_chi2_link, slope=torch.ones_like, lower=-1.0),
        "math": math,
    }
    return {name: getattr(regard, name) for name in regard.__all__} | vars(features) | own


def _of_distance(table: torch.Tensor) -> torch.Tensor:
    """The bias [H, T, T] of query i and key j, from a table [H, 2T - 1] with a number for each i - j."""
    positions = torch.arange(T)
    return table[:, positions[:, None] - positions + T - 1]


def _chi2(x: torch.Tensor) -> torch.Tensor:
    return (x - 1) ** 2 / 2


def _chi2_link(t: torch.Tensor) -> torch.Tensor:
    return t + 1


@dataclass(frozen=True)
class CellRun:
    """The output of a cell, and the worst residual of its plan's certificate (None for a kernel, which has no plan)."""

    out: torch.Tensor
    residual: float | None


def run_cell(made: Transport | features.Features, is_causal: bool = False) -> CellRun:
    """Run a cell on a small input, and certify its plan."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, H, T, D, generator=generator, dtype=torch.float64) for _ in range(3))
    if isinstance(made, features.Features):
        return CellRun(made(q, k, v, is_causal), None)
    out = regard.attention(q, k, v, problem=made)
    plan = regard.solve(q @ k.mT / math.sqrt(D), made)
    return CellRun(out, max(plan.certificate().worst().values()))


def kind(marginal: Marginal | None) -> str:
    """The column of the plane to which a marginal belongs."""
    if not isinstance(marginal, Rows):
        return type(marginal).__name__
    parts = {"mass": marginal.mass != 1, "sink": marginal.sink is not None, "relax": marginal.relax is not None}
    return "Rows" + "".join(f"({name})" for name, there in parts.items() if there)


def name_in_plane(regularizer: str, marginal: str) -> str:
    """The name of a cell of the plane: that of the first of `CELLS` with these parts, whatever their parameters."""
    wanted = eval(f"Transport({regularizer}, marginal={marginal})", _names())
    for cell in CELLS:
        made = cell.made
        if not isinstance(made, Transport) or made.prior is not None or isinstance(made.temperature, TemperatureRule):
            continue
        if made.regularizer == wanted.regularizer and kind(made.marginal) == kind(wanted.marginal):
            return cell.names
    return "–"


def parts(cell: DesignCell) -> tuple[str, str, str, str]:
    """The names of regulariser, marginal, prior and kernel, read from the object."""
    made = cell.made
    if isinstance(made, features.Features):
        return "–", "rows", "causal" if cell.is_causal else "–", type(made).__name__
    factors = () if made.prior is None else made.prior.factors()
    prior = " × ".join(" ∪ ".join(type(a).__name__ for a in factor.alternatives()) for factor in factors) or "–"
    if isinstance(made.temperature, TemperatureRule):
        temperature = f", τ by {type(made.temperature).__name__}"
    elif isinstance(made.temperature, torch.Tensor):
        temperature = ", τ per head"
    else:
        temperature = "" if made.temperature == 1 else f", τ = {made.temperature:g}"
    return type(made.regularizer).__name__, kind(made.marginal), prior, f"exact{temperature}"


def to_markdown() -> str:
    """The page docs/design-space.md."""
    lines = [
        "# The design space",
        "",
        "This page is written by `python -m regard.lab.design_space` from the list in",
        "[design_space.py](../src/regard/lab/design_space.py). Every line evaluates its expression and reads the parts",
        "from the object. The tests run every line and certify the plan of every problem (float64, residuals below",
        "1e-9). With scores s, prior π and temperature τ the weights are p = π g((s − λ)/τ): the regulariser gives g,",
        "and the marginal gives λ ([theory](theory.md)). Kernels of low rank replace exp(s) by a product of features,",
        "in O(T) ([features](features.md)); they are not the optimum of such a problem.",
        "",
        "## Regulariser × marginal",
        "",
        "Without a prior, at temperature 1. Every cell runs; “–” marks a cell for which we know no name.",
        "",
        "| | " + " | ".join(f"`{m}`" for m in MARGINALS) + " |",
        "|---|" + "---|" * len(MARGINALS),
    ]
    for regularizer in REGULARIZERS:
        names = (name_in_plane(regularizer, marginal) for marginal in MARGINALS)
        lines.append(f"| `{regularizer}` | " + " | ".join(names) + " |")
    lines += [
        "",
        "Each of them can be combined with a prior: `Causal`, `Window`, `Documents`, `Prefix`, `Blocks`, `Selected`,",
        "`ALiBi`, `Relative`, `LowRank`, `Decay`, `Density`, `Bias`, a product of priors, or a union of masks",
        "([masks](masks.md) has a line for each mask of attention-gym). Each takes a temperature or a rule for it",
        "(`ByKeys`), and each score of `attention(..., score=)`: the dot product, the cosine, or minus half of the",
        "squared distance. Differential attention, gated outputs and value residuals need no part of their own",
        "([recipes](recipes.md)).",
        "",
        "## Every cell with a name",
        "",
        "| name | regulariser | marginal | prior | kernel | expression | reference |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in CELLS:
        expression = cell.expression.replace("|", "\\|")  # a bar would end the table's column
        call = f"`{expression}`" + (", `is_causal=True`" if cell.is_causal else "")
        lines.append(f"| {cell.names} | {' | '.join(parts(cell))} | {call} | {cell.reference} |")
    lines += [
        "",
        "In the expressions `n` is the number of keys. `b`, `slopes`, `tau`, `alpha`, `s` and `gamma` have a number",
        "per head. `ids` numbers documents. `log_prior` [H, T, T] has a number per head and distance i − j, `buckets`",
        "[buckets, H] one per bucket of distances, `density` [T, T] a weight per pair, `log_forget` [H, T] a gate per",
        "key, `index` [1, 1, T, n] the keys of each query. `a` and `c` [H, T, r] are factors, `block_map` is a bool",
        "map, and `chi2` is an `FDivergence`.",
        "",
        "## References",
        "",
        *(f"- {name}: {title}" for name, title in REFERENCES.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).resolve().parents[3].joinpath("docs", "design-space.md").write_text(to_markdown())
