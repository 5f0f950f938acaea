"""Hadamard matrices, and orthogonal matrices made of them that are quick to multiply with.

A matrix of n rows is a Kronecker product of small ones. n = 2^k m with m odd: the smallest divisor h = 2^j m of n for which a
Hadamard matrix is known here (Sylvester's doubling of 1; Paley's first construction for q + 1, his second for 2 (q + 1), q a
power of a prime: Paley, On orthogonal matrices, 1933) makes one factor, Sylvester's of order at most 64 the others. So
1408 = 32 x 44, 14336 = 64 x 8 x 28, 11008 = 32 x 344. Where none divides n, the factor of order m is a random orthogonal
matrix (Haar, by QR of Gaussian numbers), and only the power of two is mixed by signs: 13696 = 64 x 2 x 107.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..transforms import Hadamard, kronecker

__all__ = ["Rotation", "hadamard"]

_SYLVESTER = 64  # the order of a factor that one product takes: of n numbers and factors a b c, n (a + b + c) multiplications
_LARGEST = 512  # the order of a known factor that is worth its product


def hadamard(n: int) -> Tensor | None:
    """A Hadamard matrix of order ``n``, int8 [n, n] of 1 and -1 with H H^T = n I; None where no construction here gives one."""
    if n == 1:
        return torch.ones(1, 1, dtype=torch.int8)
    if n == 2:
        return torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
    if n < 1 or n % 4:
        return None
    if (n & (n - 1)) and (found := _paley(n)) is not None:
        return found
    half = hadamard(n // 2)
    return None if half is None else torch.kron(torch.tensor([[1, 1], [1, -1]], dtype=torch.int8), half)


def _paley(n: int) -> Tensor | None:
    """I + S for q + 1 where -1 is no square of the field, the doubled symmetric S for 2 (q + 1) where it is one."""
    if (n - 1) % 4 == 3 and (residues := _residues(n - 1)) is not None:
        bordered = torch.ones(n, n, dtype=torch.int8)
        bordered[0, 0], bordered[1:, 0] = 0, -1
        bordered[1:, 1:] = residues
        return bordered + torch.eye(n, dtype=torch.int8)
    q = n // 2 - 1
    if q % 4 == 1 and (residues := _residues(q)) is not None:
        bordered = torch.ones(q + 1, q + 1, dtype=torch.int8)
        bordered[0, 0] = 0
        bordered[1:, 1:] = residues
        one, eye = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8), torch.eye(q + 1, dtype=torch.int8)
        return torch.kron(bordered, one) + torch.kron(eye, torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8))
    return None


def _residues(q: int) -> Tensor | None:
    """int8 [q, q]: whether a - b is a square of the field of ``q`` elements (1), none (-1), or zero (0); None for no field."""
    prime = next((p for p in range(2, math.isqrt(q) + 1) if q % p == 0), q)
    degree = round(math.log(q, prime)) if q > 1 else 0
    if q < 3 or prime**degree != q or degree > 3:
        return None
    digits = torch.tensor(list(_polynomials(prime, degree)))  # [q, degree]: an element is a polynomial, lowest power first
    squares = {_index(_squared(element, prime, _irreducible(prime, degree)), prime) for element in digits.tolist()}
    character = torch.tensor([0, *(1 if i in squares else -1 for i in range(1, q))], dtype=torch.int8)
    powers = prime ** torch.arange(degree)
    difference = (digits[:, None] - digits[None]) % prime
    return character[(difference * powers).sum(-1)]


def _polynomials(prime: int, degree: int) -> Iterator[list[int]]:
    for number in range(prime**degree):
        yield [number // prime**i % prime for i in range(degree)]


def _index(element: list[int], prime: int) -> int:
    return sum(digit * prime**i for i, digit in enumerate(element))


def _irreducible(prime: int, degree: int) -> list[int]:
    """The lower coefficients of a polynomial x^degree + ... without a root, which of degree 2 and 3 has no divisor either."""
    for lower in _polynomials(prime, degree):
        if degree == 1 or all((sum(c * x**i for i, c in enumerate(lower)) + x**degree) % prime for x in range(prime)):
            return lower
    raise AssertionError("there is an irreducible polynomial of every degree")


def _squared(element: list[int], prime: int, lower: list[int]) -> list[int]:
    """The square of an element, modulo x^degree = -lower."""
    degree = len(element)
    product = [0] * (2 * degree - 1)
    for i, a in enumerate(element):
        for j, b in enumerate(element):
            product[i + j] += a * b
    for high in range(len(product) - 1, degree - 1, -1):
        top = product.pop()
        for i, c in enumerate(lower):
            product[high - degree + i] -= top * c
    return [c % prime for c in product]


@dataclass(frozen=True, eq=False)
class Rotation:
    """An orthogonal matrix Q = diag(signs) (F1 x F2 x ...) / scale, with x the Kronecker product.

    Attributes:
        factors: float64 [n_i, n_i] each; of 1 and -1 but for one that may be a random orthogonal matrix.
        signs: float64 [n] of 1 and -1.
        scale: the root of the product of the orders of the factors of signs.
    """

    factors: tuple[Tensor, ...]
    signs: Tensor
    scale: float

    @staticmethod
    def of(n: int, seed: int | None = 0) -> Rotation:
        """The rotation of ``n`` channels; ``seed`` draws the signs (none for None, and every sign is 1) and the factor that no
        construction gives. The same everywhere for the same seed, to the last bits of a random factor."""
        draw = torch.Generator().manual_seed(0 if seed is None else seed)
        signs = torch.ones(n, dtype=torch.float64)
        if seed is not None:
            signs = torch.randint(0, 2, (n,), generator=draw).double() * 2 - 1
        odd = n // (n & -n)
        orders = [odd << j for j in range((n // odd).bit_length()) if odd << j <= _LARGEST and odd > 1]
        known = next((found for order in orders if (found := hadamard(order)) is not None), None)
        rest = n // odd if known is None else n // len(known)
        factors = []
        while rest > 1:
            order = min(rest, _SYLVESTER)
            found = hadamard(order)
            assert found is not None
            factors.append(found.double())
            rest //= order
        mixing = math.prod(map(len, factors))
        if known is not None:
            factors.append(known.double())
            mixing *= len(known)
        elif odd > 1:
            factors.append(_haar(odd, draw))
        return Rotation(tuple(factors), signs, math.sqrt(mixing))

    @property
    def size(self) -> int:
        return len(self.signs)

    def apply(self, x: Tensor) -> Tensor:
        """``x`` [..., n] times Q, in the dtype of ``x`` (float32 or float64)."""
        return kronecker(x * self.signs.to(x), [factor.to(x) for factor in self.factors], self.scale)

    def invert(self, x: Tensor) -> Tensor:
        """``x`` [..., n] times Q^T: :meth:`apply` undone."""
        return kronecker(x, [factor.to(x).T for factor in self.factors], self.scale) * self.signs.to(x)

    @property
    def is_hadamard(self) -> bool:
        """Whether it is of signs alone, and no factor is a random orthogonal matrix."""
        return all(bool((factor.abs() == 1).all()) for factor in self.factors)

    def module(self) -> Hadamard:
        """The module that multiplies by this matrix, which then has to have no signs."""
        return Hadamard([factor.float() for factor in self.factors], self.scale)

    def __str__(self) -> str:
        orders = " x ".join(str(len(factor)) for factor in self.factors) or "1"
        return f"Hadamard matrices {orders}" if self.is_hadamard else f"orthogonal matrices {orders}, the last a random one"


def _haar(n: int, draw: torch.Generator) -> Tensor:
    q, r = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=draw))
    return (q * r.diagonal().sign()).contiguous()
