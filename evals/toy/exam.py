"""The exam in MMLU's own form: reading its tables, writing the prompt, scoring a model."""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

DATA = Path(__file__).parent / "data"
"""The folder of the committed exam: `dev/SUBJECT_dev.csv`, `test/SUBJECT_test.csv` and `heldout.txt`."""

LETTERS = "ABCD"


@dataclass(frozen=True)
class Question:
    """One question of a `subject`, with four `choices` and the letter of the right one."""

    subject: str
    text: str
    choices: tuple[str, ...]
    answer: str


def read(folder: Path = DATA, split: str = "test") -> list[Question]:
    """Return the questions of `split` ("test" or "dev") below `folder`, subjects in alphabetical order.

    Raises FileNotFoundError where `folder` holds no table of that split.
    """
    paths = sorted((folder / split).glob(f"*_{split}.csv"))
    if not paths:
        raise FileNotFoundError(f"no {split}/SUBJECT_{split}.csv in {folder}")
    questions = []
    for path in paths:
        subject = path.name.removesuffix(f"_{split}.csv")
        with path.open(encoding="utf-8", newline="") as table:
            questions += [Question(subject, row[0], tuple(row[1:5]), row[5]) for row in csv.reader(table)]
    return questions


def prompt(question: Question, examples: Iterable[Question] = ()) -> str:
    """Return the prompt that ends in "Answer:", after the `examples` with their answers."""
    heading = f"The following are multiple choice questions (with answers) about {question.subject.replace('_', ' ')}."
    solved = [f"{_asked(example)} {example.answer}" for example in examples]
    return "\n\n".join([heading, *solved, _asked(question)])


def _asked(question: Question) -> str:
    choices = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, question.choices, strict=True)]
    return "\n".join([question.text, *choices, "Answer:"])


@torch.no_grad()
def score(model: nn.Module, tokenizer: Any, questions: list[Question], batch: int = 64) -> float:
    """Return the share (0..1) of `questions` for which " A" to " D" of the right letter has the highest logit.

    `model` maps token ids [batch, length] to an output with `.logits`; `tokenizer` is a transformers tokenizer in which
    each of " A" to " D" is one token. Prompts carry no examples. Raises ValueError for a letter of several tokens.
    """
    letters = torch.tensor([_single(tokenizer, f" {letter}") for letter in LETTERS])
    device = next(model.parameters()).device
    rows = [tokenizer(prompt(question))["input_ids"] for question in questions]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    right = 0
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        # Padding to the right needs no mask: a causal model never looks at it.
        ids = nn.utils.rnn.pad_sequence([torch.tensor(rows[i]) for i in chosen], batch_first=True)
        last = torch.tensor([len(rows[i]) - 1 for i in chosen])
        logits: Tensor = model(ids.to(device)).logits[torch.arange(len(chosen)), last.to(device)]
        picked = logits[:, letters.to(device)].float().argmax(-1).tolist()
        right += sum(LETTERS[p] == questions[i].answer for p, i in zip(picked, chosen, strict=True))
    return right / len(questions)


def _single(tokenizer: Any, text: str) -> int:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(f"{text!r} must be one token, got {len(ids)}")
    return ids[0]
