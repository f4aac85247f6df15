"""`regard bench`: what it prints, and that a wrong result is not timed."""

import json

import pytest
import torch
from typer.testing import CliRunner

from regard import cli, speed

QUICK = ("bench", "--tokens", "40", "--heads", "2", "--head-dim", "8", "--seconds", "0")


def run(monkeypatch, *arguments: str):
    monkeypatch.setenv("COLUMNS", "80")
    return CliRunner().invoke(cli.app, arguments)


def test_every_case_is_in_the_table(monkeypatch):
    result = run(monkeypatch, *QUICK)
    assert result.exit_code == 0, result.output
    assert all(case.name in result.output for case in speed.CASES)
    assert max(map(len, result.output.splitlines())) <= 80
    assert "WRONG" not in result.output


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_as_json(monkeypatch, dtype):
    result = run(monkeypatch, *QUICK, "--dtype", dtype, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["dtype"] == dtype and len(found["cases"]) == len(speed.CASES)
    for case in found["cases"]:
        assert case["right"] and 0 <= case["error"] <= case["allowed"]
        assert 0 < case["ratio"]["low"] <= case["ratio"]["middle"] <= case["ratio"]["high"]


def test_an_unknown_dtype_raises(monkeypatch):
    result = run(monkeypatch, *QUICK, "--dtype", "int8")
    assert result.exit_code == 2
    assert "--dtype: expected one of float32, bfloat16, float16, got int8" in result.output


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_a_wrong_result_is_not_timed(monkeypatch, factor):
    right = speed.attention

    def wrong(*args, backend="auto", **options):
        result = right(*args, backend=backend, **options)
        if backend == "torch":  # the definition
            return result
        return (factor * result[0], *result[1:]) if isinstance(result, tuple) else factor * result

    monkeypatch.setattr(speed, "attention", wrong)
    result = run(monkeypatch, *QUICK)
    assert result.exit_code == 1
    assert result.output.count("WRONG") == len(speed.CASES)


def test_the_peer_is_pytorch_even_if_it_is_replaced(monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
    assert run(monkeypatch, *QUICK).exit_code == 0
