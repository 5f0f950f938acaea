"""Tasks of lm-eval by name, with their data from the hub or from a folder.

Prompts, choices, few-shot examples and metrics are lm-eval's own; a folder replaces the rows that they are made from.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .cache import digest
from .exam import ExamError, Question, as_rows, read_subject, subjects_of, table_of
from .rows import RowsError, find, read_rows

__all__ = ["MMLU", "MissingDataError", "Suite", "TaskError", "UnknownTaskError", "quiet_harness", "read_tasks", "suite_of"]

MMLU = "mmlu"
_METRICS = ("acc", "exact_match")
_HEADING = "The following are multiple choice questions (with answers) about {}.\n\n"
# Rows of other harnesses, in which the prompt is written out already: what asks for them in lm-eval's terms.
_WRITTEN_OUT = {
    frozenset({"query", "choices", "gold"}): {
        "doc_to_text": "{{query.strip()}}\nAnswer:", "doc_to_choice": "choices", "doc_to_target": "gold",
        "doc_to_decontamination_query": "query", "process_docs": None,
    },
    frozenset({"context", "continuation"}): {
        "doc_to_text": "context", "doc_to_target": "{{' ' + continuation.strip()}}", "doc_to_decontamination_query": "context",
        "process_docs": None,
    },
}  # fmt: skip


class TaskError(ValueError):
    """A task that does not exist or that lowbit cannot compare models on."""


class UnknownTaskError(TaskError):
    """A name that lm-eval has no task of."""


class MissingDataError(ValueError):
    """Data that is neither in the folder nor to be had from the hub; the message says what to fetch."""


@dataclass(frozen=True)
class Suite:
    """Tasks that are ready to be asked.

    Attributes:
        members: for each name, the tasks of lm-eval that stand behind it, by their names there.
        tasks, groups: lm-eval's own objects.
        limit: questions a task at most, the first ones; None for all.
        data: where the rows come from; None for the hub.
    """

    members: Mapping[str, tuple[str, ...]]
    tasks: Mapping[str, Any]
    groups: Mapping[str, Any]
    limit: int | None = None
    data: Path | None = None

    @functools.cached_property
    def identity(self) -> list[Any]:
        """What answers depend on: of each task its settings and the content of its rows."""
        return [
            [name, str(task.dump_config()), digest(list(task.eval_docs)[: self.limit]), digest(_examples(task))]
            for name, task in sorted(self.tasks.items())
        ]

    @property
    def questions(self) -> int:
        """In all tasks together."""
        return sum(self.size(name) for name in self.tasks)

    def size(self, task: str) -> int:
        """Questions that are asked of one task."""
        n = len(self.tasks[task].eval_docs)
        return n if self.limit is None else min(n, self.limit)

    def subject(self, name: str, task: str) -> str | None:
        """What ``task`` is called within the group ``name``; None where it stands alone."""
        return None if self.members[name] == (name,) else task.removeprefix(f"{MMLU}_")


def read_tasks(
    names: Sequence[str], data: str | Path | None = None, *, limit: int | None = None, shots: int | None = None
) -> Suite:
    """The tasks and groups of lm-eval called ``names``, with their rows in memory.

    Args:
        data: a folder with the rows, for MMLU ``test/SUBJECT_test.csv`` and ``dev/SUBJECT_dev.csv`` as MMLU itself comes (or
            ``.jsonl``, or ``.parquet``), subjects that lm-eval does not know included; for another task ``TASK.jsonl`` (or
            ``.parquet``) with the hub's fields, or ``SPLIT/TASK_SPLIT.jsonl`` where it needs several splits. None: the hub.
        limit: questions a task at most: the first ones, as lm-eval takes them.
        shots: solved examples before each question; the task's own number if None.

    Raises :class:`TaskError` for a name that lm-eval does not know, :class:`MissingDataError` for data that is not there, and
    ``ValueError`` for a row that cannot be read, naming its file.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"the limit must be at least 1 question a task, got {limit}")
    if data is not None and not Path(data).is_dir():
        raise MissingDataError(f"the data must be a folder, and {data} is none")
    with quiet_harness():
        reader = _Reader(names, None if data is None else Path(data), shots)
        built = [(name, reader.build(name)) for name in dict.fromkeys(names)]
        reader.complain()
        members: dict[str, tuple[str, ...]] = {}
        tasks: dict[str, Any] = {}
        groups: dict[str, Any] = {}
        for name, items in built:
            _collect(name, items, members, tasks, groups)
        for task in tasks.values():
            _prepare(task, shots)
    return Suite(members, tasks, groups, limit, None if data is None else Path(data))


@contextlib.contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Where the hub has no address, what was fetched before is used, and what was not is missed at once and not after minutes."""
    import datasets.config
    import huggingface_hub.constants as constants

    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")) or _has_address(
        constants.ENDPOINT
    ):
        yield
        return
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _has_address(url: str) -> bool:
    try:
        return bool(socket.getaddrinfo(urlsplit(url).hostname, None))
    except OSError:
        return False


@contextlib.contextmanager
def quiet_harness() -> Iterator[None]:
    """lm-eval says nothing below an error while the block runs, and draws no bars of datasets."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger = logging.getLogger("lm_eval")
    level, drawn = logger.level, not are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if drawn:
            enable_progress_bars()


def _collect(name: str, items: list[Any], members: dict[str, Any], tasks: dict[str, Any], groups: dict[str, Any]) -> None:
    from lm_eval.api.group import Group

    for item in items:
        if not isinstance(item, Group):
            tasks[item.task_name] = item
            members[item.task_name] = (item.task_name,)
        elif item.has_aggregation:
            leaves = item.get_all_tasks()
            tasks.update({task.task_name: task for task in leaves})
            groups.update({group.name: group for group in (item, *item.get_all_groups())})
            members[item.name] = tuple(task.task_name for task in leaves)
        else:
            _collect(name, list(item), members, tasks, groups)


def _prepare(task: Any, shots: int | None) -> None:
    """What lm-eval's own ``simple_evaluate`` does to a task before it asks."""
    shots_of_task = task.get_config("num_fewshot")
    if shots is not None and shots_of_task != 0:
        task.set_config(key="num_fewshot", value=shots)
    elif shots_of_task is None:
        task.set_config(key="num_fewshot", value=0)
    metrics = list(task.aggregation())
    if not set(metrics) & set(_METRICS):
        raise TaskError(f"{task.task_name} has no accuracy to compare models by: lm-eval measures {', '.join(metrics)}")
    wanted, there = task.get_config("num_fewshot"), len(_examples(task))
    if wanted > there:
        raise MissingDataError(f"{task.task_name} asks for {wanted} solved examples before each question, and there are {there}")


def _examples(task: Any) -> list[Any]:
    """The rows that solved examples are drawn from; empty for a task that is asked without any."""
    return list(task.fewshot_docs() or ()) if task.get_config("num_fewshot") else []


class _Reader:
    """Makes lm-eval's objects for names, and keeps a list of what is missing."""

    def __init__(self, names: Sequence[str], data: Path | None, shots: int | None) -> None:
        try:
            import lm_eval.tasks  # noqa: F401
        except ImportError:
            raise ImportError("tasks need lm-eval: pip install 'lowbit[eval]'") from None
        mmlu = all(name == MMLU or name.startswith(f"{MMLU}_") for name in names)
        self.manager = _mmlu_manager() if mmlu else _full_manager()
        self.data, self.shots = data, shots
        self.missing: list[str] = []

    @property
    def index(self) -> Mapping[str, Any]:
        return self.manager.task_index

    def build(self, name: str) -> list[Any]:
        """The tasks and groups behind ``name``."""
        if self.data is not None and (name == MMLU or (name.startswith(f"{MMLU}_") and self._is_default(name))):
            return self._mmlu(name)
        if name not in self.index:
            raise UnknownTaskError(f"lm-eval knows no task {name!r}{_guess(name, self.index)}")
        return self._from_hub(name) if self.data is None else self._local(name)

    def complain(self) -> None:
        """Raise for everything that is missing together."""
        if self.missing:
            raise MissingDataError("; ".join(self.missing))

    def _is_default(self, name: str) -> bool:
        entry = self.index.get(name)
        return entry is None or entry.yaml_path is None or entry.yaml_path.parent.name == "default"

    # -- from the hub --

    def _from_hub(self, name: str) -> list[Any]:
        from datasets.exceptions import DatasetNotFoundError

        try:
            with offline_if_unreachable():
                loaded = self.manager.load([name])
        except (OSError, DatasetNotFoundError, ValueError) as error:
            where = self._hub_ids(name)
            what = " ".join(str(error).split())[:160]
            raise MissingDataError(
                f"the data of {name} ({where} on the hub) cannot be had: {what}; fetch it where there is a network, or give "
                f"its rows with --data FOLDER"
            ) from None
        top = loaded["groups"].get(name)
        return [top] if top is not None else list(loaded["tasks"].values())

    def _hub_ids(self, name: str) -> str:
        paths = {str((self.index[leaf].cfg or {}).get("dataset_path")) for leaf in self._leaves(name)}
        return ", ".join(sorted(paths))

    def _leaves(self, name: str) -> list[str]:
        """The tasks behind the name of a task, a tag or a group."""
        entry = self.index.get(name)
        if entry is None:
            return []
        children = sorted(entry.tags) if entry.kind.name == "TAG" else (entry.cfg or {}).get("task")
        if isinstance(children, str) or not children:
            return [name]
        named = (child if isinstance(child, str) else child.get("task", child.get("group")) for child in children)
        return [leaf for child in named if isinstance(child, str) for leaf in self._leaves(child)]

    # -- MMLU from a folder --

    def _mmlu(self, name: str) -> list[Any]:
        present = subjects_of(self.data)  # type: ignore[arg-type]
        known = {leaf.removeprefix(f"{MMLU}_") for leaf in self._leaves(MMLU)}
        if name in self.index and self.index[name].kind.name in ("GROUP", "TAG"):
            group = self._group(name, present)
            if name == MMLU:
                for subject in present:
                    if subject not in known:
                        group.add(self._subject(subject))
            if not group.get_all_tasks():
                raise MissingDataError(f"{self.data} holds no subject of {name}: it holds {', '.join(present)}")
            return [group]
        subject = name.removeprefix(f"{MMLU}_")
        if subject not in present:
            if subject not in known:
                raise TaskError(f"no subject {subject!r} in {self.data}{_guess(subject, present)}")
            self.missing.append(f"{self.data} holds no test/{subject}_test.csv (nor .jsonl, nor .parquet), which {name} needs")
            return []
        return [self._subject(subject)]

    def _group(self, name: str, present: Sequence[str]) -> Any:
        from lm_eval.api.group import Group
        from lm_eval.config.group import GroupConfig

        entry = self.index[name]
        if entry.kind.name == "TAG":
            group = Group(name)
            children: Sequence[str] = sorted(entry.tags)
        else:
            group = Group.from_config(GroupConfig(**dict(entry.cfg)))
            children = entry.cfg["task"]
        for child in children:
            if self.index[child].kind.name == "TAG":
                below = [task.removeprefix(f"{MMLU}_") for task in sorted(self.index[child].tags)]
                for subject in below:
                    if subject in present:
                        group.add(self._subject(subject))
            elif self.index[child].kind.name == "GROUP":
                inner = self._group(child, present)
                if len(inner):
                    group.add(inner)
            elif child.removeprefix(f"{MMLU}_") in present:
                group.add(self._subject(child.removeprefix(f"{MMLU}_")))
        return group

    def _subject(self, subject: str) -> Any:
        rows = {"test": as_rows(read_subject(self.data, subject))}  # type: ignore[arg-type]
        if table_of(self.data, subject, "dev") is not None:  # type: ignore[arg-type]
            rows["dev"] = as_rows(read_subject(self.data, subject, "dev"))  # type: ignore[arg-type]
        elif self.shots:
            raise ExamError(f"{self.data} holds no dev/{subject}_dev.csv (nor .jsonl, nor .parquet), which solved examples need")
        return _subject_task(_mmlu_manager(), subject, rows)

    # -- other tasks from a folder --

    def _local(self, name: str) -> list[Any]:
        return [task for leaf in self._leaves(name) if (task := self._local_task(leaf)) is not None]

    def _local_task(self, name: str) -> Any:
        config = self.index[name].cfg or {}
        asked = config.get("test_split") or config.get("validation_split")
        if asked is None:
            raise TaskError(f"{name} cannot be made from a folder: lm-eval makes its rows by a program")
        rows = {}
        fewshot = config.get("fewshot_split") or config.get("training_split") or config.get("validation_split")
        for split in dict.fromkeys((asked, fewshot)):
            path = self._file(name, split, split == asked) if split else None
            if path is not None:
                rows[split] = read_rows(path)
                if not rows[split]:
                    raise RowsError(f"{path} holds no rows")
        hub = config.get("dataset_path")
        if asked not in rows:
            self.missing.append(
                f"{self.data} holds no {name}.jsonl (nor .parquet, nor {asked}/{name}_{asked}.jsonl), which {name} needs: fetch "
                f"the split {asked!r} of {hub}"
            )
        if fewshot and fewshot not in rows and self._wants_examples(config):
            self.missing.append(
                f"{self.data} holds no {fewshot}/{name}_{fewshot}.jsonl (nor .parquet), which solved examples of {name} need: "
                f"fetch the split {fewshot!r} of {hub}, or ask for none with 0 shots"
            )
        if self.missing:
            return None
        overrides: dict[str, Any] = {"custom_dataset": _dataset(rows)}
        overrides |= {
            f"{kind}_split": None for kind in ("training", "validation", "test") if config.get(f"{kind}_split") not in rows
        }
        if config.get("fewshot_split") not in rows:
            overrides["fewshot_split"] = None
        fields = set(rows[asked][0])
        for written, asks in _WRITTEN_OUT.items():
            overrides |= asks if written <= fields else {}
        try:
            return self.manager.load([{"group": "local", "task": [{"task": name, **overrides}]}])["tasks"][name]
        except Exception as error:
            # Templates and functions of the task fail in many ways on rows that they were not made for.
            why = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
            raise RowsError(
                f"the rows of {name} in {self.data} do not have its fields ({', '.join(sorted(fields))}): {why}"
            ) from None

    def _wants_examples(self, config: Mapping[str, Any]) -> bool:
        """Whether rows have to be solved before a question, and the task does not bring its own."""
        shots_of_task = config.get("num_fewshot")
        shots = shots_of_task if self.shots is None or shots_of_task == 0 else self.shots
        return bool(shots) and not (config.get("fewshot_config") or {}).get("samples")

    def _file(self, name: str, split: str, asked: bool) -> Path | None:
        folder = self.data or Path()
        return (
            find(folder / split, f"{name}_{split}") or find(folder, f"{name}_{split}") or (find(folder, name) if asked else None)
        )


@functools.cache
def _full_manager() -> Any:
    import lm_eval.tasks

    return lm_eval.tasks.TaskManager()


@functools.cache
def _mmlu_manager() -> Any:
    """Knows MMLU alone: the index of all of lm-eval's tasks takes seconds to read."""
    import lm_eval.tasks

    home = Path(lm_eval.tasks.__file__).parent
    return lm_eval.tasks.TaskManager(include_defaults=False, include_path=str(home / MMLU / "default"))


def _subject_task(manager: Any, subject: str, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
    """lm-eval's task for a subject of MMLU, or for another in its form, over ``rows`` by split."""
    name = f"{MMLU}_{subject}"
    if name in manager.task_index:
        config = dict(manager.task_index[name].cfg)
    else:
        template = next(entry.cfg for entry in manager.task_index.values() if entry.kind.name == "TASK")
        config = {**template, "description": _HEADING.format(subject.replace("_", " ")), "task_alias": subject}
    config |= {"task": name, "custom_dataset": _dataset(rows), "dataset_name": subject}
    config.pop("tag", None)
    if "dev" not in rows:
        config |= {"fewshot_split": None, "fewshot_config": None}
    return manager.load([config])["tasks"][name]


def suite_of(questions: Sequence[Question]) -> Suite:
    """``questions`` as the task ``mmlu``, asked without solved examples."""
    from lm_eval.api.group import Group
    from lm_eval.config.group import GroupConfig

    with quiet_harness():
        manager = _mmlu_manager()
        group = Group.from_config(GroupConfig(**dict(manager.task_index[MMLU].cfg)))
        for subject in sorted({question.subject for question in questions}):
            of_subject = [question for question in questions if question.subject == subject]
            group.add(_subject_task(manager, subject, {"test": as_rows(of_subject)}))
        tasks = {task.task_name: task for task in group.get_all_tasks()}
        for task in tasks.values():
            _prepare(task, None)
    return Suite({MMLU: tuple(tasks)}, tasks, {MMLU: group})


def _dataset(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
    """A function that gives ``rows`` by split, as lm-eval wants to be handed data."""
    import datasets

    made = datasets.DatasetDict({split: datasets.Dataset.from_list(list(some)) for split, some in rows.items()})
    return lambda **_: made


def _guess(name: str, names: Any) -> str:
    import difflib

    near = difflib.get_close_matches(name, list(names), n=3)
    return f"; did you mean {', '.join(near)}?" if near else ""
