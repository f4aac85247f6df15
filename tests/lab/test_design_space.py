"""The design space: every cell runs, the plan of every problem is optimal, and the page is current."""

import dataclasses
from pathlib import Path

import pytest
import torch

import regard
from regard.features import Features
from regard.lab import design_space
from regard.lab.design_space import CELLS, MARGINALS, REGULARIZERS, DesignCell, run_cell


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.expression}{' causal' * cell.is_causal}")
def test_every_cell_runs(cell):
    found = run_cell(cell.made, cell.is_causal)
    assert found.out.shape == (1, design_space.H, design_space.T, design_space.D) and found.out.isfinite().all()
    assert found.out.any()
    assert (found.residual is None) == isinstance(cell.made, Features)
    assert found.residual is None or found.residual < 1e-9
    assert cell.names and cell.reference


@pytest.mark.parametrize("regularizer", REGULARIZERS)
@pytest.mark.parametrize("marginal", MARGINALS)
def test_the_whole_plane_runs(regularizer, marginal):
    found = run_cell(DesignCell(f"Transport({regularizer}, marginal={marginal})", "", "").made)
    assert found.out.isfinite().all() and found.residual < 1e-9


def test_a_plan_that_is_not_optimal_has_a_large_residual(monkeypatch):
    solve = regard.solve

    def wrong(scores, problem):
        plan = solve(scores, problem)
        return dataclasses.replace(plan, weights=plan.weights.roll(1, -1))

    monkeypatch.setattr(regard, "solve", wrong)
    assert run_cell(CELLS[0].made).residual > 1e-2


def test_names_of_the_plane():
    assert design_space.name_in_plane("Tsallis(2.0)", "Rows()") == "sparsemax"
    assert design_space.name_in_plane("FermiDirac()", "Rows(mass=2.0)").startswith("soft top-m")
    assert design_space.name_in_plane("Tsallis(1.5)", "Rows(relax=0.5)") == "–"


def test_every_reference_has_a_title_and_every_title_a_cell():
    cited = {name for cell in CELLS if cell.reference != design_space.UNNAMED for name in cell.reference.split("; ")}
    assert cited == design_space.REFERENCES.keys()


def test_the_page_is_current():
    page = Path(__file__).resolve().parents[2] / "docs" / "design-space.md"
    torch.manual_seed(7)  # the page does not depend on the global generator
    assert page.read_text() == design_space.to_markdown(), "run python -m regard.lab.design_space"


def test_the_relative_bias_depends_on_the_distance_only():
    (cell,) = (cell for cell in CELLS if cell.names == "a bias for every pair")
    bias = eval("log_prior", design_space._names())
    assert bias.shape == (design_space.H, design_space.T, design_space.T) and "Bias(log_prior)" in cell.expression
    assert torch.equal(bias[:, 1:, 1:], bias[:, :-1, :-1])
    assert (
        len(bias[:, 0].unique()) == len(bias[:, :, 0].unique()) == bias[:, 0].numel()
    )  # different for each distance and head, in both directions


def test_cells_are_different():
    assert len({(cell.expression, cell.is_causal) for cell in CELLS}) == len(CELLS)
