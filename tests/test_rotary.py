"""A rotation rounds one product of two, and always the same one: else bits would depend on who compiled it."""

import numpy as np
import pytest
from paged_problem import Problem


def fused(a, b, c):
    """Return a · b + c, rounded once but for one case in about 2⁴⁰."""
    return (a.astype(np.longdouble) * b + c).astype(np.float32)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("dim", [64, 48])
def test_the_product_with_a_sine_is_rounded_first(interleaved, dim):
    problem = Problem([(0, 40)], rotary_dim=dim, attributes={"rotary_interleaved": interleaved})
    keys = problem.cpu()[1][problem.at(0, np.arange(40))][:, 0]
    key, half = problem.qkv[:, 192:256], dim // 2
    pairs = (slice(0, dim, 2), slice(1, dim, 2)) if interleaved else (slice(0, half), slice(half, dim))
    (a, b), cos, sin = (key[:, pair] for pair in pairs), problem.cos[:40], problem.sin[:40]
    expected = fused(a, cos, -(b * sin)), fused(b, cos, a * sin)
    for pair, wanted in zip(pairs, expected, strict=True):
        assert keys[:, pair].tobytes() == wanted.tobytes()
    assert keys[:, dim:].tobytes() == key[:, dim:].tobytes()
    assert (expected[0] != fused(-b, sin, a * cos)).any(), "it can tell"
    assert (expected[1] != fused(a, sin, b * cos)).any()
