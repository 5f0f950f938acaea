"""What a report is about: the outcomes of all its runs in one order, and what the runs do not share."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..paired import Paired, paired_difference

__all__ = ["Change", "Entry", "Runs", "called", "clean", "finite", "front"]


def clean(text: str, longest: int = 200) -> str:
    """``text`` in one line of characters that every document can hold, cut in its middle where it is longer."""
    cleaned = "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cs", "Cn", "Co") or c in "\u2028\u2029" else c for c in text)
    return (
        cleaned
        if len(cleaned) <= longest
        else f"{cleaned[: longest // 2]}…{cleaned[len(cleaned) - (longest - longest // 2 - 1) :]}"
    )


def called(result: dict[str, Any]) -> str:
    """The model: a hub id, or of a folder its last part, since a page that is sent need not tell where it lay."""
    model = clean(result["model"])
    parts = [part for part in model.replace("\\", "/").split("/") if part]
    local = model.startswith(("/", "\\", ".", "~")) or len(parts) > 2 or ":" in model
    return parts[-1] if local and parts else model or "a model without a name"


def finite(value: Any) -> float | None:
    """``value`` as a number; None where it is null, NaN or infinite."""
    return float(value) if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class Entry:
    """An outcome; ``letter`` names its run, and is empty where there is one run alone."""

    run: int
    letter: str
    outcome: dict[str, Any]

    @property
    def recipe(self) -> str:
        return clean(self.outcome["recipe"]) or "no name"

    @property
    def label(self) -> str:
        return f"{self.recipe} · {self.letter}" if self.letter else self.recipe

    @property
    def bits(self) -> float:
        return float(self.outcome["bits_per_weight"])

    @property
    def is_float(self) -> bool:
        """Whether it is what the others are held against."""
        return self.outcome["recipe"] == "float"

    def task(self, name: str) -> dict[str, Any] | None:
        return (self.outcome.get("tasks") or {}).get(name)

    def difference(self, task: str) -> dict[str, Any] | None:
        """The accuracy against the float model on ``task``; None where either was not measured."""
        found = (self.task(task) or {}).get("difference")
        return found if found and finite(found["difference"]) is not None else None

    def part(self, name: str) -> dict[str, Any]:
        """An object of the outcome such as ``perplexity``; empty where it was not measured."""
        return self.outcome.get(name) or {}


@dataclass(frozen=True)
class Change:
    """One recipe in two runs: ``paired`` over the questions that both asked, where they left their answers."""

    recipe: str
    task: str | None
    before: Entry
    after: Entry
    paired: Paired | None


@dataclass(frozen=True)
class Runs:
    """All runs of a report: ``entries`` in the order of the first run's recipes, the same recipe of each run together.

    ``speeds``: weights per second, by what they are called: those of a run by its letter, others by their file.
    """

    results: list[dict[str, Any]]
    names: list[str]
    entries: list[Entry]
    speeds: list[tuple[str, dict[str, Any]]]

    @staticmethod
    def of(results: Sequence[dict[str, Any]], names: Sequence[str], speeds: Mapping[str, dict[str, Any]] | None = None) -> Runs:
        """``names``: what each run is called in words; ``speeds``: figures of ``lowbit bench gemv`` by their names."""
        letters = [chr(65 + i % 26) + (str(i // 26) if i >= 26 else "") for i in range(len(results))]
        made = [
            Entry(i, letters[i] if len(results) > 1 else "", outcome)
            for i, result in enumerate(results)
            for outcome in result["outcomes"]
        ]
        order = list(dict.fromkeys(entry.outcome["recipe"] for entry in made))
        entries = sorted(made, key=lambda entry: order.index(entry.outcome["recipe"]))
        measured = [
            (letter if len(results) > 1 else "", r["gemv"]) for letter, r in zip(letters, results, strict=True) if r.get("gemv")
        ]
        given = [(clean(name), figures) for name, figures in (speeds or {}).items()]
        return Runs(list(results), [clean(name) for name in names], entries, measured + given)

    @property
    def letters(self) -> list[str]:
        found = {entry.run: entry.letter for entry in self.entries}
        return [found[i] for i in range(len(self.results))]

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks that anything was measured on."""
        return list(dict.fromkeys(name for entry in self.entries for name in entry.part("tasks")))

    def changes(self) -> Iterator[Change]:
        """Each recipe of the first run beside the same of every other."""
        first = {entry.outcome["recipe"]: entry for entry in reversed(self.entries) if entry.run == 0}
        for entry in self.entries:
            before = first.get(entry.outcome["recipe"])
            if entry.run == 0 or before is None:
                continue
            tasks = [name for name in entry.part("tasks") if name in before.part("tasks")]
            for task in tasks or [None]:
                paired = None if task is None else _paired(before.task(task), entry.task(task))
                yield Change(entry.recipe, task, before, entry, paired)

    def warnings(self) -> list[str]:
        """In words, what the runs do not share and a comparison of them would need."""
        found = []
        for what, of, consequence in _SHARED:
            values = [of(result) for result in self.results]
            if all(isinstance(value, dict) for value in values):
                values = [{k: v for k, v in value.items() if any(o.get(k) != v for o in values)} for value in values]
            if len({repr(value) for value in values}) > 1:
                values_of_runs = "; ".join(
                    f"{letter}: {clean(_words(value))}" for letter, value in zip(self.letters, values, strict=True)
                )
                found.append(f"The runs differ in {what} ({values_of_runs}). {consequence}")
        for task in self.tasks:
            asked = [_questions(result, task) for result in self.results]
            if all(asked) and any(questions != asked[0] for questions in asked):
                counts = "; ".join(f"{letter}: {len(ids)}" for letter, ids in zip(self.letters, asked, strict=True))
                shared = len(set.intersection(*asked))
                found.append(
                    f"The runs asked different questions of {clean(task)} ({counts}); {shared} are common to all. "
                    "Only those are compared question by question; accuracies in the tables are of each run's own."
                )
        return found


def front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Which of ``points`` (cost, loss) no other beats: none has less of one and not more of the other."""
    return [
        not any((c <= cost and l <= loss) and (c < cost or l < loss) for c, l in points)  # noqa: E741
        for cost, loss in points
    ]


def _paired(before: dict[str, Any] | None, after: dict[str, Any] | None) -> Paired | None:
    """The answers of two runs to the questions that both asked."""
    first, second = (
        {(sample.get("subject"), sample["id"]): sample["right"] for sample in (task or {}).get("samples") or ()}
        for task in (before, after)
    )
    shared = [key for key in first if key in second]
    return paired_difference([first[key] for key in shared], [second[key] for key in shared]) if shared else None


def _questions(result: dict[str, Any], task: str) -> set[Any]:
    samples = ((result["outcomes"][0].get("tasks") or {}).get(task) or {}).get("samples") or ()
    return {(sample.get("subject"), sample["id"]) for sample in samples}


def _text(result: dict[str, Any]) -> Any:
    found = result["outcomes"][0].get("perplexity")
    return found and [found.get("tokens"), found.get("context")]


def _machine(result: dict[str, Any]) -> Any:
    origin = result.get("origin") or {}
    cpu = origin.get("cpu") or {}
    return [*(origin.get("gpus") or []), f"{cpu.get('name') or 'a processor unknown'}, {cpu.get('threads') or '?'} threads"]


def _versions(result: dict[str, Any]) -> Any:
    return (result.get("origin") or {}).get("versions") or {}


def _commit(result: dict[str, Any]) -> Any:
    return (result.get("origin") or {}).get("commit")


def _words(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{name} {version}" for name, version in value.items()] or ["none of these"]
    return ", ".join(map(str, value)) if isinstance(value, list) else "unknown" if value is None else str(value)


# (what, of a result, what follows where it differs)
_SHARED: tuple[tuple[str, Callable[[dict[str, Any]], Any], str], ...] = (
    ("model", called, "What differs below is the models' doing as well as the recipes'."),
    ("tasks", lambda result: result.get("tasks"), "Only tasks of both are compared."),
    ("text for perplexity: tokens, context", _text, "Their perplexities are not of the same text."),
    ("versions", _versions, "A difference may come from either side's software."),
    ("commit", _commit, "A difference may come from the code between them."),
    ("machine", _machine, "Speeds are of different machines, and the last digits of a sum may differ."),
)
