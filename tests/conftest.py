"""What every test file shares, and what is said of the tests that do not run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from tests import ROOT
from tests.support.selection import SLOW, choose

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, which no test file does before this

hypothesis.settings.register_profile("lowbit", deadline=None)  # how long an example takes depends on who else is at work
hypothesis.settings.load_profile("lowbit")

RECORD = ROOT / "evals" / "results" / "test_all.json"
LEFT = pytest.StashKey[dict[str, int]]()  # how many tests do not run, by the reason


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run slow tests too, and whole products in place of samples")
    parser.addoption("--record", type=Path, help="write into this JSON file what ran, when, and on what")


@pytest.hookimpl(trylast=True)  # after -k and -m, so that what they leave out is not counted
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("works_with"):
            item.user_properties.append(("works_with", " / ".join(mark.args)))
    named = any("::" in argument for argument in config.args)  # a test that is named runs
    slow = config.option.slow or named or "slow" in config.option.markexpr
    items[:], left = choose(list(items), torch.cuda.is_available(), slow)
    config.stash[LEFT] = {reason: len(others) for reason, others in left.items()}
    if left:
        config.hook.pytest_deselected(items=[item for others in left.values() for item in others])


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)  # a process of pytest-xdist tells the one that reports
    if output is not None:
        output["left"] = session.config.stash.get(LEFT, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT] = getattr(node, "workeroutput", {}).get("left", {})  # each process collects the same tests


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    left = config.stash.get(LEFT, {})
    for reason, count in left.items():
        terminalreporter.write_line(f"NOT RUN {count} tests: they {reason}")
    if SLOW in left:
        last = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else None
        when = "has no record yet" if last is None else f"ran last on {last['date']} at {last['commit']}: {last['tests']}"
        terminalreporter.write_line(f"make test-all {when}")
    if config.option.record is not None and not hasattr(config, "workerinput"):
        from lowbit.evals.results import write_result

        tests = {outcome: len(terminalreporter.stats.get(outcome, ())) for outcome in ("passed", "failed", "error", "skipped")}
        chosen = {
            "files": [] if config.args == ["tests"] else config.args,
            "-k": config.option.keyword,
            "-m": config.option.markexpr,
        }
        only = {name: value for name, value in chosen.items() if value}  # a run of parts says so
        write_result(config.option.record, {"tests": tests, "not_run": left, "only": only, "exit_status": int(exitstatus)})


# ---- no test changes what the next one meets -----------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_state_left() -> Iterator[None]:
    from tests.support.thread_state import thread_state

    before = thread_state()
    yield
    after = thread_state()
    left = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert not left, f"left behind, before and after: {left}"


# ---- a tiny model that answers an exam -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.models import word_model

    return word_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.models import exam_and_text

    return exam_and_text(tmp_path_factory.mktemp("material"))
