"""Number formats: which number each code of 1 to 8 bits stands for.

A :class:`Format` is one table, ``values``. Range, rounding, encoding, decoding, what kernels are handed and
the test cases all derive from it, so a new format is one line in ``_ALL`` at the end of this file.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from .catalog import Catalog, cached
from .decoding import Decoding, decoding_of

__all__ = ["FORMATS", "Float", "Format", "FormatSet", "Int", "Table", "get_format"]


@dataclass(frozen=True, eq=False)
class Format:
    """A table of ``2**bits`` numbers, one for each code.

    ``values[code]`` is the number of ``code``; NaN and infinity mark codes that stand for no finite number.
    ``unused`` holds codes that decode but that :meth:`encode` never produces (ternary's fourth code, the -2 that
    OCP's MXINT8 leaves out so that the range is symmetric). ``decoding`` is how kernels compute the number of a code.
    """

    name: str
    values: tuple[float, ...]
    unused: frozenset[int] = frozenset()
    decoding: Decoding = field(init=False, repr=False)  # known from the start: a compiler that traces cannot work it out

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w+", self.name):  # the name is a part of a scheme's canonical name
            raise ValueError(f"a format's name is made of letters, digits and underscores, got {self.name!r}")
        if len(self.values) not in (2, 4, 8, 16, 32, 64, 128, 256):
            raise ValueError(f"format {self.name!r}: values must hold 2**bits numbers, bits 1..8, got {len(self.values)}")
        if not self._grid:
            raise ValueError(f"format {self.name!r}: no code stands for a finite number")
        if max(-self.min, self.max) > torch.finfo(torch.float32).max:
            raise ValueError(f"format {self.name!r}: numbers must fit float32, got {self.min:.3g} to {self.max:.3g}")
        object.__setattr__(self, "decoding", decoding_of(self.values))

    # ---- what follows from the table -------------------------------------------------------------------------

    @cached_property
    def bits(self) -> int:
        """Bits of one code, 1 to 8."""
        return len(self.values).bit_length() - 1

    @cached_property
    def _grid(self) -> tuple[tuple[float, int], ...]:
        """(number, code) of every code that encode produces, ascending; of two zeros the positive one."""
        found: dict[float, int] = {}
        for code, value in enumerate(self.values):
            if code not in self.unused and math.isfinite(value):
                if value == 0 and math.copysign(1, self.values[found.get(value, code)]) < 0:
                    found.pop(value, None)  # with its key, which is -0
                found.setdefault(value, code)
        return tuple(sorted(found.items()))

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """The numbers that encode can produce, ascending."""
        return tuple(value for value, _ in self._grid)

    @property
    def min(self) -> float:
        return self.numbers[0]

    @property
    def max(self) -> float:
        return self.numbers[-1]

    @property
    def symmetric_max(self) -> float:
        """The largest m for which both -m and m can be encoded without saturating."""
        return min(-self.min, self.max)

    @property
    def signed(self) -> bool:
        return self.min < 0

    @cached_property
    def negative_zero(self) -> int | None:
        """The code of -0, where the format has one."""
        zeros = (c for c, v in enumerate(self.values) if v == 0 and math.copysign(1, v) < 0 and c not in self.unused)
        return next(zeros, None)

    @cached_property
    def nan(self) -> int | None:
        """The first code that means NaN, where the format has one."""
        return next((code for code, value in enumerate(self.values) if math.isnan(value)), None)

    @cached_property
    def step(self) -> float | None:
        """The distance between neighbours if the format is a plain (two's complement) integer times that distance."""
        numbers = self.numbers
        if len(numbers) == 1 or self.negative_zero is not None:
            return None
        step = numbers[1] - numbers[0]
        if math.frexp(step)[0] != 0.5:  # only a power of two divides without rounding
            return None
        even = all(b - a == step for a, b in pairwise(numbers))
        coded = all(value % step == 0 and int(value / step) % (1 << self.bits) == code for value, code in self._grid)
        return step if even and coded else None

    # ---- encode and decode -----------------------------------------------------------------------------------

    def encode(self, x: Tensor) -> Tensor:
        """Codes (uint8, shape of ``x``) of the numbers nearest to ``x``.

        Ties go to the even one (see :func:`_even_is_high`), numbers beyond the largest saturate, -0 keeps its sign
        where the format has one.
        NaN becomes the format's NaN; a format without one raises ``ValueError``.
        """
        if self.nan is None and bool(torch.isnan(x).any()):
            raise ValueError(f"{self.name} has no code for NaN, and x holds {int(torch.isnan(x).sum())}: remove them first")
        return self.nearest(x)

    def nearest(self, x: Tensor) -> Tensor:
        """:meth:`encode` without the check for NaN, for data that is known to be finite."""
        if x.dtype not in (torch.float32, torch.float64):
            x = x.to(torch.float32)
        if self.step is not None and self.nan is None:
            scaled = x if self.step == 1 else x / self.step
            rounded = scaled.round().clamp_(self.min / self.step, self.max / self.step)
            return rounded.to(torch.int16).bitwise_and_((1 << self.bits) - 1).to(torch.uint8)
        thresholds = constant(self._thresholds(x.dtype), x.dtype, x.device)
        order = constant(tuple(code for _, code in self._grid), torch.uint8, x.device)
        codes = order[torch.bucketize(x.contiguous(), thresholds, out_int32=True).clamp_(max=len(self._grid) - 1)]
        if self.negative_zero is not None:
            zero = next(code for value, code in self._grid if value == 0)
            codes = torch.where((codes == zero) & torch.signbit(x), self.negative_zero, codes).to(torch.uint8)
        if self.nan is not None:
            codes = torch.where(torch.isnan(x), self.nan, codes).to(torch.uint8)
        return codes

    def round(self, x: Tensor) -> Tensor:
        """The numbers nearest to ``x`` (float32 or float64, finite), in its dtype: :meth:`decode` of :meth:`nearest`, without
        codes between them (and without the sign of a zero)."""
        if self.step is not None and self.nan is None:
            if self.step == 1:
                return x.round().clamp_(self.min, self.max)
            return (x / self.step).round_().clamp_(self.min / self.step, self.max / self.step).mul_(self.step)
        thresholds = constant(self._thresholds(x.dtype), x.dtype, x.device)
        numbers = constant(self.numbers, x.dtype, x.device)
        return numbers[torch.bucketize(x.contiguous(), thresholds, out_int32=True)]

    def decode(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers of ``codes`` (any integer dtype, any shape), as ``dtype``."""
        table = constant(self.values, dtype, codes.device)
        return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)

    def _thresholds(self, dtype: torch.dtype) -> tuple[float, ...]:
        """t[i] such that x takes a number above the i-th exactly if x > t[i], for x of ``dtype``."""
        return _thresholds(self._grid, dtype)

    @cached_property
    def _identity(self) -> tuple[str, bytes, frozenset[int]]:
        """What two equal formats share: unlike ``==`` of floats this tells 0 from -0 and finds NaN equal to itself."""
        return self.name, _bits_of(self.values), self.unused

    def __eq__(self, other: object) -> bool:
        return self._identity == other._identity if isinstance(other, Format) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._identity)

    def __str__(self) -> str:
        return self.name


def _bits_of(values: tuple[float, ...]) -> bytes:
    return array("d", (math.nan if math.isnan(value) else value for value in values)).tobytes()


def _even_is_high(low: float, high: float) -> bool:
    """Which neighbour a tie goes to: the even multiple of their distance, which is IEEE's even significand for floats
    and the even number for integers; in a table without such multiples the one nearer to zero, so that a symmetric
    table rounds symmetrically."""
    multiple = high / (high - low)
    return multiple % 2 == 0 if multiple == int(multiple) else abs(high) < abs(low)


@lru_cache(maxsize=512)
def _thresholds(grid: tuple[tuple[float, int], ...], dtype: torch.dtype) -> tuple[float, ...]:
    thresholds = []
    for (low, _), (high, _) in pairwise(grid):
        middle = low / 2 + high / 2
        t = torch.tensor(middle, dtype=torch.float64).to(dtype)
        # A middle that dtype cannot hold is no tie.
        if t.double() > middle or (t.double() == middle and _even_is_high(low, high)):
            t = torch.nextafter(t, torch.tensor(-torch.inf, dtype=dtype))
        thresholds.append(t.item())
    return tuple(thresholds)


@lru_cache(maxsize=1024)
def _cached_constant(values: bytes, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return torch.tensor(array("d", values).tolist(), dtype=dtype, device=device)


def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A table on a device: kept, so that a CUDA graph can capture its use; not while tracing, which would keep a fake."""
    if torch.compiler.is_compiling() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return torch.tensor(values, dtype=dtype, device=device)
    # By their bits: equal tuples may differ in the sign of a zero.
    return _cached_constant(array("d", values).tobytes(), dtype, device)


# ---- the three families --------------------------------------------------------------------------------------


def Int(name: str, bits: int, signed: bool) -> Format:  # noqa: N802 - families read as types
    """Integers of 1 to 8 bits.

    Args:
        name: of the format, in schemes and files.
        bits: 1 to 8.
        signed: two's complement, of which one bit is {-1, +1}; else plain integers from 0 on.

    Raises ``ValueError`` for other bits.
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"bits must be 1..8, got {bits}")
    if signed and bits == 1:
        return Table(name, (-1.0, 1.0))
    half = 1 << (bits - 1)
    return Format(name, tuple(float(c - 2 * half if signed and c >= half else c) for c in range(2 * half)))


def Float(name: str, exponent: int, mantissa: int, specials: str = "none", bias: int | None = None) -> Format:  # noqa: N802
    """Sign, ``exponent`` and ``mantissa`` bits with subnormals; at most 8 bits in all. ``name``: in schemes and files.

    ``specials``: ``"none"`` (every code is finite: OCP MX fp4 and fp6), ``"ieee"`` (the top exponent means infinity
    and NaN), ``"fn"`` (only the code of all ones is NaN: OCP fp8 e4m3), ``"fnuz"`` (the code of -0 is the only NaN and
    the bias is one larger). ``bias`` defaults to the format's usual ``2**(exponent-1) - 1`` (one more for fnuz).
    """
    if specials not in ("none", "ieee", "fn", "fnuz"):
        raise ValueError(f"specials must be none, ieee, fn or fnuz, got {specials!r}")
    if exponent < 1 or mantissa < 0 or 1 + exponent + mantissa > 8:
        raise ValueError(f"{name}: 1 + exponent + mantissa bits must be at most 8, got 1 + {exponent} + {mantissa}")
    if bias is None:
        bias = (1 << (exponent - 1)) - (0 if specials == "fnuz" else 1)
    half, top = 1 << (exponent + mantissa), (1 << exponent) - 1

    def magnitude(code: int) -> float:
        e, m = code >> mantissa, code & ((1 << mantissa) - 1)
        if specials == "ieee" and e == top:
            return math.inf if m == 0 else math.nan
        if specials == "fn" and code == half - 1:
            return math.nan
        if e == 0:
            return math.ldexp(m, 1 - bias - mantissa)
        return math.ldexp((1 << mantissa) + m, e - bias - mantissa)

    positive = [magnitude(code) for code in range(half)]
    negative = [-v for v in positive]
    if specials == "fnuz":
        negative[0] = math.nan
    return Format(name, (*positive, *negative))


def Table(name: str, values: Iterable[float], unused: Iterable[int] = ()) -> Format:  # noqa: N802
    """A format given by its numbers.

    Args:
        name: of the format, in schemes and files.
        values: the number of each code, in the order of the codes: 2, 4, ..., 256 of them.
        unused: codes that rounding never gives.
    """
    return Format(name, tuple(float(v) for v in values), frozenset(unused))


# NF4: the quantiles of a normal distribution that QLoRA (Dettmers et al. 2023, appendix E) derives, as float32.
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

_ALL = (
    *(Int(f"int{bits}", bits, signed=True) for bits in range(1, 9)),
    *(Int(f"uint{bits}", bits, signed=False) for bits in range(1, 9)),
    Table("ternary", (0, 1, 0, -1), unused=(2,)),
    Table("nf4", _NF4),
    Float("fp4_e2m1", 2, 1),
    Float("fp5_e2m2", 2, 2),
    Float("fp5_e3m1", 3, 1),
    Float("fp6_e2m3", 2, 3),
    Float("fp6_e3m2", 3, 2),
    Float("fp8_e4m3fn", 4, 3, "fn"),
    Float("fp8_e5m2", 5, 2, "ieee"),
    Float("fp8_e3m4", 3, 4, "ieee"),
    Float("fp8_e4m3fnuz", 4, 3, "fnuz"),
    Float("fp8_e5m2fnuz", 5, 2, "fnuz"),
    # OCP MX v1.0 section 5.3.4: MXINT8's elements are int8 times 2**-6; -2 stays unused, so that the range is symmetric.
    Table("mxint8", ((c - 256 if c > 127 else c) / 64 for c in range(256)), unused=(128,)),
    # OCP MX v1.0 section 5.4.1: a power of two by its biased exponent; 255 is NaN.
    Table("e8m0", (*(math.ldexp(1.0, c - 127) for c in range(255)), math.nan)),
)


def _check(name: str, fmt: Format) -> None:
    if not isinstance(fmt, Format):
        raise TypeError(f"FORMATS[{name!r}] must be a Format (Int, Float or Table make one), got {type(fmt).__name__}")
    if fmt.name != name:
        raise ValueError(f"the format {fmt.name!r} stands under its own name alone: FORMATS[{fmt.name!r}] = ..., got {name!r}")


FORMATS: Catalog[Format] = Catalog("FORMATS", {fmt.name: fmt for fmt in _ALL}, _check)
"""Every named format. Adding one of your own, at any time: ``FORMATS["fp5_e1m3"] = Float("fp5_e1m3", 1, 3)``."""


class FormatSet(Set[str]):
    """The names of the formats that ``predicate`` takes, of those too that are added later."""

    def __init__(self, predicate: Callable[[Format], bool]) -> None:
        self._is_member = cached(maxsize=1024)(lambda name: predicate(FORMATS[name]))

    def __contains__(self, name: object) -> bool:
        return name in FORMATS and self._is_member(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in list(FORMATS) if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def get_format(name: str) -> Format:
    """``FORMATS[name]``, with the nearest names in the error."""
    if FORMATS.has(name):
        return FORMATS[name]
    import difflib

    near = difflib.get_close_matches(str(name), FORMATS, n=3, cutoff=0.3) or sorted(FORMATS)
    raise ValueError(f"no format named {name!r}; did you mean {', '.join(near)}?")
