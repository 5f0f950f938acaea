"""A multiple-choice exam in MMLU's own layout: its tables, its prompt, and a model's answers."""

from __future__ import annotations

import csv
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .perplexity import context_of

__all__ = ["LETTERS", "Answers", "ExamError", "Question", "prompt", "read_exam", "sample", "take_exam"]

LETTERS = "ABCD"
_BATCH_TOKENS = 4096  # enough that a quantized weight is decoded once for many rows, little enough for any memory


class ExamError(ValueError):
    """A table of questions that cannot be read; the message names the file and the row."""


@dataclass(frozen=True)
class Question:
    """One question of a ``subject`` with four ``choices``; ``answer`` (0..3) is the place of the right one."""

    subject: str
    text: str
    choices: tuple[str, str, str, str]
    answer: int


@dataclass(frozen=True)
class Answers:
    """What a model answered: ``picked[i]`` (0..3) to ``questions[i]``. ``shortened``: prompts that lost examples or their
    beginning to fit the model's context."""

    questions: tuple[Question, ...]
    picked: tuple[int, ...]
    shortened: int = 0

    @property
    def right(self) -> tuple[bool, ...]:
        """Whether each question was answered right."""
        return tuple(p == q.answer for p, q in zip(self.picked, self.questions, strict=True))

    @property
    def accuracy(self) -> float:
        """The share of right answers, 0..1."""
        return sum(self.right) / len(self.questions)


# ---- tables ----------------------------------------------------------------------------------------------------------


def read_exam(folder: str | Path, split: str = "test") -> list[Question]:
    """The questions of ``folder/split/SUBJECT_split.csv``, subjects in alphabetical order.

    A row holds the question, four choices and the letter of the right one; there is no header. Raises
    :class:`ExamError` for a folder without tables and for a row of another form, naming file and row.
    """
    paths = sorted((Path(folder) / split).glob(f"*_{split}.csv"))
    if not paths:
        raise ExamError(f"{folder} holds no {split}/SUBJECT_{split}.csv")
    return [question for path in paths for question in _read_table(path, path.name.removesuffix(f"_{split}.csv"))]


def _read_table(path: Path, subject: str) -> list[Question]:
    questions: list[Question] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as table:
            for row in csv.reader(table, strict=True):
                questions.append(_question(row, subject))
    except (ValueError, csv.Error) as error:
        # Rows up to the bad one are in the list already.
        raise ExamError(f"{path}, row {len(questions) + 1}: {error}") from None
    except OSError as error:
        raise ExamError(f"{path} cannot be read: {error.strerror}") from None
    if not questions:
        raise ExamError(f"{path} holds no questions")
    return questions


def _question(row: list[str], subject: str) -> Question:
    if len(row) != 6:
        raise ExamError(f"a row is a question, four choices and a letter, got {len(row)} fields")
    text, a, b, c, d, letter = row
    if not text.strip():
        raise ExamError("the question is empty")
    if letter.strip() not in tuple(LETTERS):
        raise ExamError(f"the answer must be one of {', '.join(LETTERS)}, got {letter!r}")
    return Question(subject, text, (a, b, c, d), LETTERS.index(letter.strip()))


def sample(questions: Sequence[Question], per_subject: int | None) -> list[Question]:
    """At most ``per_subject`` questions of each subject, in their order; all of them if None.

    Which ones hangs on their wording alone, so that every run and every machine takes the same, and a larger sample
    contains the smaller. Raises ``ValueError`` for ``per_subject`` below 1.
    """
    if per_subject is None:
        return list(questions)
    if per_subject < 1:
        raise ValueError(f"the limit must be at least 1 question a subject, got {per_subject}")
    by_subject: dict[str, list[int]] = {}
    for i, question in enumerate(questions):
        by_subject.setdefault(question.subject, []).append(i)
    chosen = {i for group in by_subject.values() for i in sorted(group, key=lambda i: _digest(questions[i]))[:per_subject]}
    return [question for i, question in enumerate(questions) if i in chosen]


def _digest(question: Question) -> bytes:
    return hashlib.sha256("\0".join([question.text, *question.choices]).encode()).digest()


# ---- the model's answers ---------------------------------------------------------------------------------------------


def prompt(question: Question, examples: Sequence[Question] = ()) -> str:
    """MMLU's prompt, which ends in "Answer:", behind ``examples`` with their answers (Hendrycks et al., 2021)."""
    heading = f"The following are multiple choice questions (with answers) about {question.subject.replace('_', ' ')}."
    solved = [f"{_asked(example)} {LETTERS[example.answer]}" for example in examples]
    return "\n\n".join([heading, *solved, _asked(question)])


def _asked(question: Question) -> str:
    choices = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, question.choices, strict=True)]
    return "\n".join([question.text, *choices, "Answer:"])


def take_exam(
    model: nn.Module,
    tokenizer: Any,
    questions: Sequence[Question],
    *,
    examples: Mapping[str, Sequence[Question]] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Answers:
    """``model``'s answers: of " A", " B", " C" and " D" the one with the highest logit behind the prompt.

    Args:
        model: a causal model of transformers.
        tokenizer: its tokenizer, in which each of " A" to " D" is one token.
        examples: solved questions of each subject to put before; fewer where the prompt would exceed the context, and
            a prompt that exceeds it without any keeps its end.
        progress: called with (questions done, questions in all) after each batch.

    Raises ``ValueError`` for no questions, and for a tokenizer that splits " A".
    """
    if not questions:
        raise ValueError("an exam needs at least one question")
    device = next(model.parameters()).device
    letters = torch.tensor([_single(tokenizer, f" {letter}") for letter in LETTERS], device=device)
    context = context_of(model)
    rows, shortened = [], 0
    for question in questions:
        ids, whole = _prompt_ids(tokenizer, question, (examples or {}).get(question.subject, ()), context)
        rows.append(ids)
        shortened += not whole
    picked = [0] * len(rows)
    done = 0
    with torch.inference_mode():
        for batch in _batches(rows):
            logits = _last_logits(model, [rows[i] for i in batch], device)
            for i, choice in zip(batch, logits[:, letters].float().argmax(-1).tolist(), strict=True):
                picked[i] = choice
            done += len(batch)
            if progress is not None:
                progress(done, len(rows))
    return Answers(tuple(questions), tuple(picked), shortened)


def _single(tokenizer: Any, text: str) -> int:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(f"the exam reads the logit of {text!r}, which this tokenizer splits into {len(ids)} tokens")
    return int(ids[0])


def _prompt_ids(tokenizer: Any, question: Question, examples: Sequence[Question], context: int) -> tuple[list[int], bool]:
    for shots in range(len(examples), -1, -1):
        ids = tokenizer(prompt(question, examples[:shots]), verbose=False)["input_ids"]
        if len(ids) <= context:
            return ids, shots == len(examples)
    return ids[-context:], False


def _batches(rows: list[list[int]]) -> list[list[int]]:
    """Places of ``rows`` in batches of similar length, each at most ``_BATCH_TOKENS`` tokens with its padding."""
    batches: list[list[int]] = []
    for i in sorted(range(len(rows)), key=lambda i: len(rows[i])):
        if batches and (len(batches[-1]) + 1) * len(rows[i]) <= _BATCH_TOKENS:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def _last_logits(model: nn.Module, rows: list[list[int]], device: torch.device) -> Tensor:
    """Logits [batch, vocabulary] behind the last token of each row."""
    # Padding stands to the right, where a causal model's positions stay as they are, and is masked.
    lengths = torch.tensor([len(row) for row in rows], device=device)
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)
    mask = (torch.arange(ids.shape[1], device=device) < lengths[:, None]).long()
    each = torch.arange(len(rows), device=device)
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        return model(ids, attention_mask=mask).logits[each, lengths - 1]
    # Rows of a batch have similar lengths, so the head is spared nearly every position.
    ends, place = torch.unique(lengths - 1, return_inverse=True)
    return model(ids, attention_mask=mask, logits_to_keep=ends).logits[each, place]
