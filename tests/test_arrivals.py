"""Arrivals: logs written by hand read exactly, processes have the rate and spread they are asked for."""

import gzip

import numpy as np
import pytest

from sim.base.errors import BadInput
from traces.synth.arrivals import MAX_TOKENS, Arrival, arrivals

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:00.0000000,12,1
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-12 23:59:59.500000+00:00,10,2
2024-05-13 00:00:00+00:00,20,3
2024-05-13 01:00:00.250000+01:00,30,4
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46]}
"""


def log(tmp_path, text, name="log"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_azure_2023(tmp_path):
    assert arrivals(log(tmp_path, AZURE_2023), 9) == [
        Arrival(0.0, 374, 44),
        Arrival(4.314579, 396, 109),
        Arrival(13.31941, 12, 1),
    ]


def test_azure_2024_zones_and_whole_seconds(tmp_path):
    assert [one.at_s for one in arrivals(log(tmp_path, AZURE_2024), 9)] == [0.0, 0.5, 0.75]


def test_azure_columns_go_by_name(tmp_path):
    text = "TIMESTAMP,NumImages,GeneratedTokens,ContextTokens\n2024-10-15 00:00:00.1,3,7,8\n"
    assert arrivals(log(tmp_path, text), 9) == [Arrival(0.0, 8, 7)]


def test_mooncake(tmp_path):
    assert arrivals(log(tmp_path, MOONCAKE), 9) == [Arrival(0.0, 6955, 52), Arrival(3.053, 6472, 26)]


def test_gzip_limit_rate_and_order(tmp_path):
    rows = AZURE_2023.splitlines()
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress("\n".join([rows[0], rows[2], rows[1], rows[3]]).encode()))
    found = arrivals(str(path), 2, rate_scale=2.0)
    assert [(one.at_s, one.prompt_len) for one in found] == [(0.0, 374), (2.15729, 396)]


def test_poisson_has_its_rate():
    times = np.array([one.at_s for one in arrivals("poisson:4", 20_001, seed=3)])
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.03)
    doubled = [one.at_s for one in arrivals("poisson:4", 20_001, seed=3, rate_scale=2.0)]
    assert doubled == pytest.approx((times / 2).tolist(), abs=2e-6)


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_gamma_has_its_rate_and_spread(cv):
    gaps = np.diff([one.at_s for one in arrivals(f"gamma:0.5,{cv}", 40_001, seed=1)])
    assert gaps.mean() == pytest.approx(2.0, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_seeded():
    first, again, other = (arrivals("poisson:1", 5, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert len(arrivals("poisson:1", 1)) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (AZURE_2023 + "2023-11-16 25:00:00,1,1\n", "log:5: TIMESTAMP, got '2023-11-16 25:00:00'"),
        (AZURE_2023 + "2023-11-16 18:00:00,1\n", "log:5: row, got 2 columns"),
        (AZURE_2023 + "2023-11-16 18:00:00,-1,1\n", "log:5: ContextTokens, got '-1'"),
        (AZURE_2023 + f"2023-11-16 18:00:00,1,{MAX_TOKENS + 1}\n", "log:5: GeneratedTokens, got"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        (MOONCAKE + '{"timestamp": -1, "input_length": 1, "output_length": 1}\n', "log:3: timestamp, got -1"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 1}\n', "log:3: output_length, got no such field"),
        (MOONCAKE + '{"timestamp"\n', "log:3: not a line of JSON"),
        ("hello\n", "neither an Azure trace"),
    ],
)
def test_a_broken_log(tmp_path, text, said):
    with pytest.raises(BadInput) as caught:
        arrivals(log(tmp_path, text), 9)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "poisson:",
        "poisson:0",
        "poisson:nan",
        "poisson:1,2",
        "gamma:1",
        "gamma:1,0",
        "gamma:1,x",
        "gamma:-1,1",
        "nothing:1",
    ],
)
def test_a_broken_process(source):
    with pytest.raises(BadInput):
        arrivals(source, 3)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_broken_scale(scale):
    with pytest.raises(BadInput, match=r"--set arrivals\.scale"):
        arrivals("poisson:1", 3, rate_scale=scale)
