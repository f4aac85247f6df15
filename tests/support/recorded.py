"""What several tests of inspections use: inputs, and comparisons of two inspections."""

import json

import torch


def tokens(vocabulary, B, T, seed=0):
    return torch.randint(3, vocabulary, (B, T), generator=torch.Generator().manual_seed(seed))


def assert_means(inspection, expected, tolerance=2e-4):
    for name, value in expected.items():
        got = inspection.mean(name)
        assert got.shape == value.shape
        assert torch.allclose(got, value, rtol=tolerance, atol=tolerance), (name, (got - value).abs().max())


def assert_same(a, b, tolerance=1e-4):
    """Everything that is recorded, bin by bin."""
    assert [layer.name for layer in a.layers] == [layer.name for layer in b.layers]
    for x, y in zip(a.layers, b.layers, strict=True):
        assert torch.equal(x.rows, y.rows) and torch.equal(x.counts, y.counts), x.name
        assert torch.allclose(x.sums, y.sums, rtol=tolerance, atol=tolerance), x.name
        assert torch.allclose(x.maxima, y.maxima, rtol=tolerance, atol=tolerance), x.name
        n = min(len(x.key_sums), len(y.key_sums))  # a static cache has positions that no query sees
        assert not x.key_viewers[n:].any() and not y.key_viewers[n:].any()
        assert torch.equal(x.key_viewers[:n], y.key_viewers[:n]), x.name
        assert torch.allclose(x.key_sums[:n], y.key_sums[:n], rtol=tolerance, atol=tolerance), x.name


def numbers(inspection):
    """Everything that is recorded except the date and the duration."""
    record = json.loads(inspection.to_json())
    return record | {"provenance": {k: v for k, v in record["provenance"].items() if k not in ("date", "seconds")}}
