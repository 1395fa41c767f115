"""A slice of the record: results of now are those of the day it was taken (`record.py` holds all of them)."""

import sys

import pytest
import record

RUNS = 60
TRACE = "mixtral-8x7b-small"  # runs on it are short
SLOW = {"edgemoe", "expertflow", "hobbit", "moepic", "seqmoe"}


@pytest.mark.skipif(sys.platform != "linux", reason="last digits of exp and log are those of the C library")
def test_results_are_those_of_the_record():
    known = record.load()
    asked = [run["options"] for run in known["runs"]]
    short = [number for number, one in enumerate(asked) if one["trace"] == TRACE and one["policy"] not in SLOW]
    assert record.compare(record.spread(short, RUNS), known, 1) == {}


def test_a_new_name_is_a_row(monkeypatch):
    """Keys and options that were renamed, moved, doubled and dropped are read back to those of the record."""
    was = {"bound": {"tpot_s": 1.5}, "above_frac": 0.25, "memory": {"peak": 3}, "peak": [3, 4], "labels": ["x"]}
    now = {"lower_bound": {"tpot_s": 1.5, "above_frac": 0.25, "gap": None, "new": 7}, "cache": {"peak": [3, 4]}}
    monkeypatch.setattr(
        record.names,
        "KEYS",
        {
            "lower_bound": "bound",
            "lower_bound.above_frac": "above_frac",
            "lower_bound.new": None,
            "cache.peak.*": "peak.*",
        },
    )
    monkeypatch.setattr(record.names, "DERIVED", {"memory.peak": lambda leaves: leaves["peak.0"]})
    record.known_as.cache_clear()
    read = record.leaves_of(now)
    monkeypatch.undo()
    record.known_as.cache_clear()
    assert record.digests_of(read) == record.digests_of(record.leaves_of(was))
    rows = {
        "stack": "engine",
        "set.stack.": "set.engine.",
        "peer": "gpus.peer",
        "cache_frac": ("cache", "{:.0%}".format),
        "unstable": None,
    }
    monkeypatch.setattr(record.names, "OPTIONS", rows)
    options = {
        "stack": "hf",
        "peer": "all-to-all",
        "cache_frac": 0.25,
        "unstable": True,
        "set": {"stack.pinned": False, "depth": 2},
    }
    assert record.asked(options) == {
        "engine": "hf",
        "cache": "25%",
        "set": {"gpus.peer": "all-to-all", "engine.pinned": False, "depth": 2},
    }
