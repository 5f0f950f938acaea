"""Calibration data: what a person gives, as batches that a model can be called with."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ..checkpoint.hf_config import is_pretrained
from ..torch_state import isolated

__all__ = ["Batch", "Calibration", "CalibrationLike", "Data", "amount"]

_ROWS = 128  # of a text file, where nobody says how many
_LONGEST = 2048  # tokens in a row of text, where the model could take more
_BATCH_TOKENS = 2048


class Batch(NamedTuple):
    """One call of the model: ``model(*args, **kwargs)``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Data: TypeAlias = str | os.PathLike[str] | Tensor | Mapping[str, Any] | Iterable[Any]
"""The path of a text file, texts, token ids or batches, as :attr:`Calibration.data` describes them."""


@dataclass(frozen=True)
class Calibration:
    """Data to calibrate on, and how much of it.

    Attributes:
        data: the path of a text file; a list of strings, each a row; token ids (a tensor [rows, length], or a list of lists
            or of tensors [length]); or an iterable of batches, such as a DataLoader: dicts are keyword arguments of the
            model, tuples and lists positional ones, a tensor is the one argument. ``labels`` are passed on as everything else
            is: some models make from them what their decoder reads.
        rows: how many rows to take; by default 128 of a text file, and all of anything else.
        length: tokens in a row of text; by default what tokenizer and model allow, 2,048 at most.
        tokenizer: for text; by default the one in the folder that the model was loaded from.
        batch_size: rows of token ids that run at once; by default as many as make 2,048 tokens.
    """

    data: Data
    rows: int | None = None
    length: int | None = None
    tokenizer: Any = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "length", "batch_size"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a number from 1 on, got {value!r}")
        if self.data is None:
            raise ValueError("calibration data is None: give texts, token ids, batches or the path of a text file")

    @property
    def is_text(self) -> bool:
        data = self.data
        return isinstance(data, (str, os.PathLike)) or (isinstance(data, Sequence) and bool(data) and isinstance(data[0], str))

    @staticmethod
    def of(value: CalibrationLike) -> Calibration:
        """A calibration from anything that can be its ``data``."""
        return value if isinstance(value, Calibration) else Calibration(value)

    @isolated()
    def batches(self, model: nn.Module) -> list[Batch]:
        """The batches for ``model``, on the CPU.

        Raises ``ValueError`` for data without a row, text without a tokenizer and files that cannot be read, ``TypeError``
        for what is no data.
        """
        found = list(self._batches(model))
        if not found:
            raise ValueError("the calibration data holds no row: give texts, token ids or batches")
        return found

    def _batches(self, model: nn.Module) -> Iterator[Batch]:
        data = self.data
        if isinstance(data, (str, os.PathLike)):
            yield from self._of_rows(self._rows_of_file(Path(data), model), model)
        elif isinstance(data, Mapping):
            yield _batch(data, model)
        elif isinstance(data, Tensor):
            yield from self._of_rows(data[: self.rows], model) if _is_token_ids(data) else [_batch(data[: self.rows], model)]
        elif isinstance(data, Sequence) and data and isinstance(data[0], str):
            yield from self._of_rows(self._rows_of_texts(data, model), model)
        elif isinstance(data, Sequence) and data and _is_row(data[0]):
            yield from self._of_rows(data[: self.rows], model)
        elif isinstance(data, Sequence) and data and isinstance(data[0], int):
            yield from self._of_rows([data], model)
        elif isinstance(data, Iterable):
            yield from self._of_batches(data, model)
        else:
            raise TypeError(f"calibration data is texts, token ids, batches or the path of a text file, got {data!r:.80}")

    def _of_batches(self, data: Iterable[Any], model: nn.Module) -> Iterator[Batch]:
        left = self.rows
        for value in data:
            batch = _batch(value, model)
            yield batch
            if left is not None:
                first = next((v for v in (*batch.args, *batch.kwargs.values()) if isinstance(v, Tensor) and v.dim()), None)
                left -= 1 if first is None else len(first)
                if left <= 0:
                    return

    def _of_rows(self, rows: Any, model: nn.Module) -> Iterator[Batch]:
        """Rows of token ids, as many in a batch as stand together and are of one length."""
        waiting: list[Tensor] = []
        for i, row in enumerate(rows):
            ids = row.cpu() if isinstance(row, Tensor) else torch.tensor(row, dtype=None if len(row) else torch.long)
            if ids.dim() != 1 or ids.is_floating_point():
                raise TypeError(f"row {i} of the calibration data must be token ids [length], got {ids.dtype} {list(ids.shape)}")
            if self.length is not None:
                ids = ids[: self.length]
            if not ids.numel():
                continue
            if waiting and (len(ids) != len(waiting[0]) or len(waiting) >= self._rows_at_once(len(ids))):
                yield _batch(torch.stack(waiting), model)
                waiting = []
            waiting.append(ids.long())
        if waiting:
            yield _batch(torch.stack(waiting), model)

    def _rows_at_once(self, length: int) -> int:
        return self.batch_size or max(1, _BATCH_TOKENS // length)

    # ---- text ----------------------------------------------------------------------------------------------------

    def _rows_of_texts(self, texts: Sequence[str], model: nn.Module) -> Iterator[list[int]]:
        tokenizer = self._tokenizer(model)
        length = self._row_length(tokenizer, model)
        for i, text in enumerate(texts[: self.rows]):
            if not isinstance(text, str):
                raise TypeError(f"row {i} of the calibration data must be a string like the first, got {type(text).__name__}")
            yield _tokens(tokenizer, text)[:length]

    def _rows_of_file(self, path: Path, model: nn.Module) -> list[list[int]]:
        """The first rows of a text that is tokenized in one piece, or in a piece that is long enough for them."""
        if not path.is_file():
            raise ValueError(f"no text file {str(path)!r:.200} to calibrate on: give its path, or texts as a list of strings")
        tokenizer = self._tokenizer(model)
        length, rows = self._row_length(tokenizer, model), self.rows or _ROWS
        size = 8 * length * rows
        while True:
            try:
                with path.open(encoding="utf-8") as file:
                    text = file.read(size)
                    is_whole_text = not file.read(1)
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is no text in UTF-8: {error}") from None
            ids = _tokens(tokenizer, text)
            if is_whole_text or len(ids) > length * rows + length:  # what a cut does to the last words is behind the rows
                break
            size *= 2
        found = [ids[start : start + length] for start in range(0, len(ids), length)][:rows]
        return found[:-1] if len(found) > 1 and len(found[-1]) < length else found

    def _row_length(self, tokenizer: Any, model: nn.Module) -> int:
        if self.length is not None:
            return self.length
        config = getattr(model, "config", None)
        positions = getattr(config, "max_position_embeddings", None)
        longest = [_LONGEST, getattr(tokenizer, "model_max_length", None), positions]
        return min(int(n) for n in longest if isinstance(n, (int, float)) and n > 0)

    def _tokenizer(self, model: nn.Module) -> Any:
        if self.tokenizer is not None:
            return self.tokenizer
        folder = getattr(model, "name_or_path", "") if is_pretrained(model) else ""
        remedy = "give tokenizer=, or calibrate on token ids"
        if not folder:
            raise ValueError(f"text needs a tokenizer, and the model does not say which folder it came from: {remedy}")
        import transformers

        try:
            return transformers.AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"text needs a tokenizer, and {folder} has none that can be read ({error!s:.160}): {remedy}"
            ) from None


CalibrationLike: TypeAlias = Calibration | Data
"""What every ``calibration`` takes."""


def amount(batches: Iterable[Batch]) -> dict[str, int]:
    """How many ``rows`` are in ``batches``, and how many ``tokens`` where they hold token ids; what a mask hides is none."""
    rows = tokens = 0
    for batch in batches:
        given = [value for value in (*batch.args, *batch.kwargs.values()) if isinstance(value, Tensor) and value.dim()]
        ids = batch.kwargs.get("input_ids", next((value for value in given if _is_token_ids(value)), None))
        mask = batch.kwargs.get("attention_mask")
        rows += len(given[0]) if given else 1
        if isinstance(ids, Tensor):
            seen = mask if isinstance(mask, Tensor) and mask.shape == ids.shape else torch.ones_like(ids)
            tokens += int(seen.count_nonzero())
    return {"rows": rows, **({"tokens": tokens} if tokens else {})}


def _tokens(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return found


def _is_token_ids(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.is_floating_point()


def _is_row(value: Any) -> bool:
    """Whether ``value`` is one row of token ids."""
    if isinstance(value, Tensor):
        return value.dim() == 1 and not value.is_floating_point()
    return isinstance(value, (list, tuple)) and all(isinstance(token, int) for token in value[:1])


def _batch(value: Any, model: nn.Module) -> Batch:
    if isinstance(value, Mapping):
        given = {str(key): _on_cpu(value) for key, value in value.items()}
        if is_pretrained(model) and not _accepts(model, "labels"):
            given.pop("labels", None)  # of data that is meant for a head, given to a model without one
        return Batch((), given)
    if isinstance(value, Tensor):
        ids = is_pretrained(model) and not value.is_floating_point()
        return Batch((), {"input_ids": _on_cpu(value)}) if ids else Batch((_on_cpu(value),), {})
    if isinstance(value, (tuple, list)):
        return Batch(tuple(map(_on_cpu, value)), {})
    raise TypeError(f"a batch of calibration data is a dict, a tensor or a tuple of tensors, got {value!r:.80}")


def _accepts(model: nn.Module, name: str) -> bool:
    """Whether ``model`` can be called with an argument of this name."""
    parameters = inspect.signature(model.forward).parameters.values()
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)


def _on_cpu(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    # Tensors of inference mode do not tell whether they were changed.
    return value.clone().cpu() if value.is_inference() else value.detach().cpu()
