"""One thread per test process, as workers share the cores; Ctrl-C is heard; `--slice I/N`, one N-th of the tests."""

from __future__ import annotations

import gc
import os
import re
import signal

import pytest

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # before numpy and torch are imported; children inherit it
os.environ.pop("COLUMNS", None)  # workers are told 80; tests say for themselves how wide a terminal is
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun in the background of a script
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", metavar="I/N", type=part, help="Only every N-th of the tests, beginning with the I-th.")


def part(text: str) -> tuple[int, int]:
    """`2/7` as numbers. Raises UsageError."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise pytest.UsageError(f"--slice, got {text!r}: I/N with I from 1 to N; write e.g. --slice 2/7")
    return int(found[1]), int(found[2])


@pytest.hookimpl(trylast=True)  # of what markers and names left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (chosen := config.getoption("--slice")) is not None:
        first, step = chosen
        kept = items[first - 1 :: step]
        config.hook.pytest_deselected(items=[item for index, item in enumerate(items) if index % step != first - 1])
        items[:] = kept


def pytest_collection_finish() -> None:
    """What collecting leaves, thousands of tests and torch, stays: no later collection of garbage walks through it."""
    gc.collect()
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> str | None:
    chosen = config.getoption("--slice")
    return None if chosen is None else f"slice {chosen[0]} of {chosen[1]} of the chosen tests"
