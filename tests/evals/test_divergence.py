"""Divergence from the float model against scipy in float64, and its interval against known truth."""

from __future__ import annotations

import copy
import json
import math
import os
import tempfile
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lowbit.evals import divergence as measured
from lowbit.evals.divergence import Divergence, Reference, divergence, student_quantile

TOY = Path(measured.__file__).parent / "toy"
SHAPE = (6, 9, 17)  # chunks, tokens, vocabulary


class Fixed(nn.Module):
    """A model that gives the logits it is told [chunks, length, vocabulary]; ids [chunks, length] are the chunk's place."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(logits, requires_grad=False)
        self.batches: list[int] = []

    def forward(self, ids: torch.Tensor) -> SimpleNamespace:
        self.batches.append(len(ids))
        return SimpleNamespace(logits=self.table[ids[:, 0]])


def places(chunks: int, length: int) -> torch.Tensor:
    return torch.arange(chunks)[:, None].expand(chunks, length)


def draw(seed: int, scale: float = 3.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (scale * torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))).to(dtype)


def compare(theirs: torch.Tensor, ours: torch.Tensor) -> Divergence:
    chunks = places(*theirs.shape[:2])
    with Reference.collect(Fixed(theirs), chunks) as reference:
        return divergence(Fixed(ours), reference)


def by_scipy(theirs: torch.Tensor, ours: torch.Tensor) -> tuple[np.ndarray, float]:
    """KL of each chunk, and the agreement."""
    x, y = (logits[:, :-1].double().numpy() for logits in (theirs, ours))
    kl = scipy.special.rel_entr(scipy.special.softmax(x, -1), scipy.special.softmax(y, -1)).sum(-1)
    return kl.mean(-1), float(np.mean(x.argmax(-1) == y.argmax(-1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("noise", [1e-3, 0.3, 5.0])
def test_divergence_is_the_definition(dtype: torch.dtype, noise: float) -> None:
    theirs = draw(0, dtype=dtype)
    ours = (theirs + noise * draw(1)).to(dtype)
    found, (kl, agreement) = compare(theirs, ours), by_scipy(theirs, ours)
    assert found.kl == pytest.approx(kl.mean(), rel=1e-9)
    assert found.agreement == agreement
    assert found.tokens == 6 * 8
    interval = scipy.stats.ttest_1samp(kl, 0).confidence_interval(0.95)
    assert (found.kl_low, found.kl_high) == pytest.approx((max(0, interval.low), interval.high), rel=1e-9)


def test_a_model_agrees_with_itself() -> None:
    assert compare(draw(0), draw(0)) == Divergence(0.0, 0.0, 0.0, 1.0, 48)
    # A logit more on every token of the vocabulary is the same distribution.
    assert compare(draw(0), draw(0) + 2).kl == pytest.approx(0, abs=1e-12)


@given(st.integers(0, 1000), st.floats(0.01, 30), st.floats(0.0, 30))
@settings(deadline=None, max_examples=30)
def test_divergence_is_never_negative(seed: int, scale: float, noise: float) -> None:
    theirs = draw(seed, scale)
    found = compare(theirs, theirs + noise * draw(seed + 1, 1.0))
    assert 0 <= found.kl_low <= found.kl <= found.kl_high
    assert 0 <= found.agreement <= 1


def test_nothing_depends_on_how_work_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours, whole = draw(0), draw(1), compare(draw(0), draw(1))
    monkeypatch.setattr(measured, "_DOUBLES", 3 * 17)
    monkeypatch.setattr(measured, "_LOGITS", 4 * 9 * 17)
    chunks, seen = places(*SHAPE[:2]), []
    models = Fixed(theirs), Fixed(ours)
    for model in models:
        model.config = SimpleNamespace(vocab_size=17)
    with Reference.collect(models[0], chunks, progress=lambda *done: seen.append(done)) as reference:
        found = divergence(models[1], reference, progress=lambda *done: seen.append(done))
        assert torch.equal(reference.logits(1, 3), theirs[1:3, :-1])
    assert found.to_dict() == pytest.approx(whole.to_dict(), rel=1e-12)
    assert models[0].batches == models[1].batches == [4, 2]  # sums over another number of rows would round differently
    assert seen == [(4, 6), (6, 6)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_is_what_the_model_gave(dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = draw(3, dtype=dtype)
    with Reference.collect(Fixed(theirs), places(*SHAPE[:2]), folder=tmp_path) as reference:
        assert torch.equal(reference.logits(0, 6), theirs[:, :-1])
        assert reference.nbytes == 6 * 8 * 17 * dtype.itemsize == os.fstat(reference._file.fileno()).st_size
        if os.name == "posix":
            assert not any(tmp_path.iterdir())  # nothing stays behind, even of a process that is killed
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("limit", "taken"), [(2, [0, 5]), (3, [0, 2, 5]), (5, [0, 1, 2, 4, 5]), (6, [*range(6)]), (99, [*range(6)])]
)
def test_chunks_are_taken_evenly(limit: int, taken: list[int]) -> None:
    with Reference.collect(Fixed(draw(0)), places(*SHAPE[:2]), limit=limit) as reference:
        assert reference.chunks[:, 0].tolist() == taken
        assert torch.equal(reference.logits(0, len(taken)), draw(0)[taken, :-1])


def test_tokens_that_are_ruled_out() -> None:
    theirs, ours = draw(0), draw(1)
    theirs[..., 5] = ours[..., 5] = -math.inf
    kl, _ = by_scipy(theirs, ours)
    assert compare(theirs, ours).kl == pytest.approx(kl.mean(), rel=1e-9)
    ours[2, 3, 4] = -math.inf  # a token that the float model could say, and this one never
    endless = compare(theirs, ours)
    assert (endless.kl, endless.kl_high) == (math.inf, math.inf)
    assert json.loads(json.dumps(endless.to_dict(), allow_nan=False))["kl"] is None
    ours[2, 3, 4] = math.nan
    assert math.isnan(compare(theirs, ours).kl)


# ---- the interval ----------------------------------------------------------------------------------------------------


@given(st.floats(0.5, 0.9999), st.integers(1, 500))
def test_quantiles_of_student(p: float, degrees: int) -> None:
    assert student_quantile(p, degrees) == pytest.approx(scipy.stats.t.ppf(p, degrees), rel=1e-8, abs=1e-9)


@pytest.mark.parametrize("chunks", [10, 30, 100])
def test_the_interval_covers(chunks: int) -> None:
    """Divergence of a chunk is skewed: gamma-distributed means with a deviation of a third, twice that of
    511 tokens of WikiText."""
    rng = np.random.default_rng(chunks)
    drawn = rng.gamma(9, 1 / 9, size=(2000, chunks))
    covered = np.mean([low <= 1 <= high for low, high in (measured._interval(row) for row in drawn.tolist())])
    assert 0.93 <= covered <= 0.97


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 9), (6, 1), (6,)])
def test_chunks_that_tell_nothing(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least 2 of 2 tokens"):
        Reference.collect(Fixed(draw(0)), torch.zeros(shape, dtype=torch.long))


def test_models_that_cannot_be_compared() -> None:
    chunks = places(*SHAPE[:2])
    with pytest.raises(ValueError, match="at least 2 chunks, got 1"):
        Reference.collect(Fixed(draw(0)), chunks, limit=1)
    with Reference.collect(Fixed(draw(0)), chunks) as reference, pytest.raises(ValueError, match=r"12 logits a token and .* 17"):
        divergence(Fixed(draw(0)[..., :12]), reference)
    broken = draw(0)
    broken[4, 0, 0] = math.nan
    with pytest.raises(ValueError, match=r"NaN in chunks 1 to 6"):
        Reference.collect(Fixed(broken), chunks)


def test_a_disk_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(measured.shutil, "disk_usage", lambda _: usage(10**9, 10**9, 3000))
    with pytest.raises(ValueError, match=r"take 0\.0 GB .* take fewer chunks"):
        Reference.collect(Fixed(draw(0)), places(*SHAPE[:2]))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_disk_that_fills_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: open("/dev/full", "wb", buffering=0))  # noqa: SIM115
    with pytest.raises(OSError, match="No space left"):
        Reference.collect(Fixed(draw(0)), places(*SHAPE[:2]))


def test_a_file_that_was_cut(tmp_path: Path) -> None:
    with Reference.collect(Fixed(draw(0)), places(*SHAPE[:2]), folder=tmp_path) as reference:
        os.ftruncate(reference._file.fileno(), 1000)
        with pytest.raises(OSError, match="end after 1000 bytes"):
            reference.logits(0, 6)


# ---- a real model ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_more_bits_diverge_less() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lowbit import quantize_

    model = AutoModelForCausalLM.from_pretrained(TOY / "model", dtype=torch.float32, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(TOY / "model", local_files_only=True)
    text = (TOY / "data" / "heldout.txt").read_text(encoding="utf-8")
    chunks = torch.tensor(tokenizer(text, verbose=False)["input_ids"][: 8 * 64]).view(8, 64)
    with Reference.collect(model, chunks) as reference:
        found = []
        for scheme in ("int8", "int4", "int2"):
            again = copy.deepcopy(model)
            quantize_(again, scheme)
            found.append(divergence(again, reference))
    assert 0 < found[0].kl_high < found[1].kl_low
    assert found[1].kl_high < found[2].kl_low
    assert found[0].agreement > found[1].agreement > found[2].agreement
