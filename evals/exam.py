"""Questions in MMLU's own layout: a table a subject, as CSV, JSONL or parquet, and the prompt that they are asked in."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .rows import ENDINGS, RowsError, find, lines_of, read_rows

__all__ = ["LETTERS", "ExamError", "Question", "as_rows", "prompt", "read_exam", "read_subject", "subjects_of", "table_of"]

LETTERS = "ABCD"
_CSV = ".csv"


class ExamError(ValueError):
    """A table of questions that cannot be read; the message names the file and the row."""


@dataclass(frozen=True)
class Question:
    """One question of a ``subject`` with four ``choices``; ``answer`` (0..3) is the place of the right one."""

    subject: str
    text: str
    choices: tuple[str, str, str, str]
    answer: int


def subjects_of(folder: str | Path, split: str = "test") -> list[str]:
    """The subjects that ``folder`` has a table of, in alphabetical order; :class:`ExamError` where there are none."""
    endings = tuple(f"_{split}{ending}" for ending in (_CSV, *ENDINGS))
    names = (path.name for path in (Path(folder) / split).glob(f"*_{split}.*"))
    found = sorted({name[: -len(ending)] for name in names for ending in endings if name.endswith(ending)})
    if not found:
        raise ExamError(f"{folder} holds no {split}/SUBJECT_{split}.csv (nor .jsonl, nor .parquet)")
    return found


def table_of(folder: str | Path, subject: str, split: str = "test") -> Path | None:
    """The file with the questions of ``subject``, if there is one."""
    return find(Path(folder) / split, f"{subject}_{split}", (_CSV, *ENDINGS))


def read_exam(folder: str | Path, split: str = "test") -> list[Question]:
    """The questions of all subjects in ``folder``, in their alphabetical order."""
    return [question for subject in subjects_of(folder, split) for question in read_subject(folder, subject, split)]


def read_subject(folder: str | Path, subject: str, split: str = "test") -> list[Question]:
    """The questions of ``folder/split/SUBJECT_split.csv`` (or ``.jsonl``, or ``.parquet``).

    A row of a CSV table holds the question, four choices and the letter of the right one; there is no header. In the other
    two a row has the fields ``question``, ``choices`` and ``answer``, the last a letter or a number from 0. Raises
    :class:`ExamError` for a table that is not there, is empty, or holds a row of another form, naming file and row.
    """
    path = table_of(folder, subject, split)
    if path is None:
        raise ExamError(f"{Path(folder) / split} holds no {subject}_{split}.csv (nor .jsonl, nor .parquet)")
    questions: list[Question] = []
    try:
        for row in _fields(path):
            questions.append(_question(row, subject))
    except RowsError as error:
        raise ExamError(str(error)) from None
    except (ValueError, csv.Error) as error:
        # Rows up to the bad one are in the list already.
        raise ExamError(f"{path}, row {len(questions) + 1}: {error}") from None
    except OSError as error:
        raise ExamError(f"{path} cannot be read: {error.strerror or error}") from None
    if not questions:
        raise ExamError(f"{path} holds no questions")
    return questions


def _fields(path: Path) -> Iterator[list[Any]]:
    """Question, choices and answer of each row."""
    if path.suffix == _CSV:
        with path.open(encoding="utf-8-sig", newline="") as table:
            yield from csv.reader(lines_of(table), strict=True)
        return
    for row in read_rows(path):
        if missing := [name for name in ("question", "choices", "answer") if name not in row]:
            raise ExamError(f"the field {missing[0]!r} is missing")
        choices = row["choices"]
        yield [row["question"], *(choices if isinstance(choices, list) else [choices]), row["answer"]]


def _question(row: Sequence[Any], subject: str) -> Question:
    if len(row) != 6:
        raise ExamError(f"a row is a question, four choices and a letter, got {len(row)} fields")
    text, a, b, c, d, answer = row
    if not isinstance(text, str) or not text.strip():
        raise ExamError("the question is empty")
    if isinstance(answer, int) and 0 <= answer < len(LETTERS):
        answer = LETTERS[answer]
    if str(answer).strip() not in tuple(LETTERS):
        raise ExamError(f"the answer must be one of {', '.join(LETTERS)}, got {answer!r}")
    return Question(subject, text, (str(a), str(b), str(c), str(d)), LETTERS.index(str(answer).strip()))


def as_rows(questions: Sequence[Question]) -> list[Mapping[str, Any]]:
    """``questions`` as the rows of the hub's MMLU, which lm-eval's prompt reads."""
    return [{**asdict(q), "question": q.text, "choices": list(q.choices)} for q in questions]


def prompt(question: Question, examples: Sequence[Question] = ()) -> str:
    """MMLU's prompt, which ends in "Answer:", behind ``examples`` with their answers (Hendrycks et al., 2021)."""
    heading = f"The following are multiple choice questions (with answers) about {question.subject.replace('_', ' ')}."
    solved = [f"{_asked(example)} {LETTERS[example.answer]}" for example in examples]
    return "\n\n".join([heading, *solved, _asked(question)])


def _asked(question: Question) -> str:
    choices = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, question.choices, strict=True)]
    return "\n".join([question.text, *choices, "Answer:"])
