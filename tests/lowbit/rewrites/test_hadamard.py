"""Hadamard matrices and the rotations made of them, against their definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.rewrites.hadamard import Rotation, hadamard
from lowbit.transforms import kronecker

# Orders up to 256 for which neither doubling nor Paley's constructions over fields of degree 1 to 3 give a matrix.
UNKNOWN = {92, 116, 156, 172, 184, 188, 232, 236}


@pytest.mark.parametrize("n", [1, 2, *range(4, 257, 4), 344, 428])
def test_a_hadamard_matrix_has_signs_alone_and_orthogonal_rows(n: int) -> None:
    found = hadamard(n)
    assert (found is None) == (n in UNKNOWN | {428})
    if found is not None:
        assert set(found.unique().tolist()) <= {-1, 1}
        assert torch.equal(found.long() @ found.long().T, n * torch.eye(n, dtype=torch.long))


@pytest.mark.parametrize("n", [-4, 0, 3, 6, 22])
def test_there_is_no_hadamard_matrix_of_other_orders(n: int) -> None:
    assert hadamard(n) is None


@given(n=st.integers(1, 300), seed=st.none() | st.integers(0, 9))
@settings(deadline=None, max_examples=40)
def test_a_rotation_is_the_matrix_that_it_says_and_orthogonal(n: int, seed: int | None) -> None:
    rotation = Rotation.of(n, seed)
    dense = torch.ones(1, 1, dtype=torch.float64)
    for factor in rotation.factors:
        dense = torch.kron(dense, factor)
    dense = rotation.signs[:, None] * dense / rotation.scale
    eye = torch.eye(n, dtype=torch.float64)
    torch.testing.assert_close(dense @ dense.T, eye, rtol=0, atol=1e-12)
    x = torch.randn(2, 3, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    torch.testing.assert_close(rotation.apply(x), x @ dense, rtol=0, atol=1e-12)
    torch.testing.assert_close(rotation.invert(rotation.apply(x)), x, rtol=0, atol=1e-12)
    again = Rotation.of(n, seed)
    assert torch.equal(again.signs, rotation.signs)
    assert all(map(torch.equal, again.factors, rotation.factors))
    assert seed is not None or bool((rotation.signs == 1).all())


@pytest.mark.parametrize(
    ("n", "orders"),
    [
        (4096, "64 x 64"),
        (768, "64 x 12"),
        (1408, "32 x 44"),
        (11008, "32 x 344"),
        (14336, "64 x 8 x 28"),
        (13696, "64 x 2 x 107"),
    ],
)
def test_sizes_of_known_models_are_mixed_by_small_factors(n: int, orders: str) -> None:
    rotation = Rotation.of(n)
    assert str(rotation).split(" matrices ")[1].split(",")[0] == orders
    assert rotation.is_hadamard == ("107" not in orders)
    spike = torch.zeros(n, dtype=torch.float64)
    spike[0] = 1
    spread = rotation.apply(spike).abs().max() * n**0.5
    assert float(spread) == pytest.approx(1) or "107" in orders  # signs alone spread one channel evenly over all


def test_no_rows_stay_no_rows() -> None:
    rotation = Rotation.of(12)
    assert rotation.apply(torch.empty(0, 5, 12)).shape == (0, 5, 12)
    assert kronecker(torch.ones(2, 1), [], 1.0).shape == (2, 1)
