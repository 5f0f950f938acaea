"""Calibration data in all the ways that people hold it, and what is said of data that will not do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lowbit import Calibration
from tests.support.models import WORDS, exam_and_text, llama, mlp, word_model


def ids_of(what: Any, model: Any = None) -> list[Tensor]:
    return [batch.kwargs["input_ids"] for batch in Calibration.of(what).batches(model or llama())]


def rows_of(what: Any, model: Any = None) -> list[list[int]]:
    return [row for batch in ids_of(what, model) for row in batch.tolist()]


@given(st.lists(st.lists(st.integers(3, 95), min_size=1, max_size=9), min_size=1, max_size=12), st.integers(1, 5))
def test_rows_of_any_lengths_come_out_in_order_and_batched_by_length(rows, size):
    batches = ids_of(Calibration(rows, batch_size=size))
    assert [row for batch in batches for row in batch.tolist()] == rows
    assert all(len(batch) <= size for batch in batches)


@pytest.mark.parametrize(
    "make",
    [
        lambda ids: ids,
        lambda ids: ids.tolist(),
        lambda ids: list(ids),
        lambda ids: [{"input_ids": ids, "labels": ids}],
        lambda ids: {"input_ids": ids},
        lambda ids: (batch for batch in ids.split(2)),
        lambda ids: DataLoader([{"input_ids": row} for row in ids], batch_size=2),
    ],
)
def test_one_set_of_rows_in_every_form(make):
    ids = torch.randint(3, 96, (5, 7))
    assert rows_of(make(ids)) == ids.tolist()


def test_rows_and_lengths_are_limited_as_asked():
    ids = torch.randint(3, 96, (5, 7))
    assert rows_of(Calibration(ids, rows=2, length=4)) == ids[:2, :4].tolist()
    endless = ({"input_ids": ids} for _ in iter(int, 1))
    assert len(ids_of(Calibration(endless, rows=12))) == 3


def test_other_models_take_floats_and_positional_arguments():
    x = torch.randn(6, 40)
    (batch,) = Calibration.of(x).batches(mlp())
    assert torch.equal(batch.args[0], x)
    batches = Calibration.of(DataLoader(TensorDataset(x), batch_size=4)).batches(mlp())
    assert [len(batch.args[0]) for batch in batches] == [4, 2]


def test_text_is_tokenized_by_the_model_s_own_tokenizer(tmp_path):
    folder = exam_and_text(word_model(tmp_path))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = (folder / "text.txt").read_text()
    whole = tokenizer(text)["input_ids"]
    assert rows_of(folder / "text.txt", model) == [whole[start : start + 128] for start in range(0, 512, 128)]
    assert rows_of(Calibration(str(folder / "text.txt"), rows=3, length=10), model) == [whole[:10], whole[10:20], whole[20:30]]
    assert rows_of([" ".join(WORDS[:5]), WORDS[7]], model) == [[1, 2, 3, 4, 5], [8]]
    assert rows_of(Calibration([" ".join(WORDS[:5])], tokenizer=tokenizer), llama()) == [[1, 2, 3, 4, 5]]


def test_the_beginning_of_a_long_text_gives_the_same_rows_as_all_of_it(tmp_path):
    folder = exam_and_text(word_model(tmp_path))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    text = " ".join(WORDS[i * i % 40] for i in range(20_000))
    (folder / "long.txt").write_text(text)
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert rows_of(Calibration(folder / "long.txt", rows=4, length=16), model) == [ids[i : i + 16] for i in range(0, 64, 16)]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ("nowhere.txt", ValueError, "no text file 'nowhere.txt'"),
        (["some text"], ValueError, "text needs a tokenizer"),
        ([], ValueError, "holds no row"),
        ([[]], ValueError, "holds no row"),
        (3, TypeError, "texts, token ids, batches or the path of a text file, got 3"),
        ([3.5], TypeError, "a dict, a tensor or a tuple"),
    ],
)
def test_data_that_will_not_do(data, error, message):
    with pytest.raises(error, match=message):
        Calibration.of(data).batches(llama())


@pytest.mark.parametrize(("field", "value"), [("rows", 0), ("length", -1), ("batch_size", 1.5)])
def test_settings_that_mean_nothing(field, value):
    with pytest.raises(ValueError, match=re.escape(f"{field} must be a number from 1 on, got {value!r}")):
        Calibration([[1]], **{field: value})
