"""Every converter under seeded mutations of a sound input: a sound trace or one line of BadInput, nothing else."""

import random

import pytest
from convert_samples import SAMPLES
from test_arrivals import AZURE_2023, AZURE_2024, MOONCAKE

from sim.base.errors import BadInput
from traces.convert import convert
from traces.format.check import check_trace
from traces.format.reader import Trace
from traces.synth.arrivals import arrivals

ROUNDS = 60
BITS = (
    b"",
    b",",
    b"[",
    b"]",
    b"{",
    b"}",
    b'"',
    b"\t",
    b"\n",
    b"0",
    b"-1",
    b"9" * 20,
    b"1e400",
    b"NaN",
    b"null",
    b"true",
    b"\xff",
    b"\x00",
    b"[[[]]]",
    b'"a":',
    b"0.5",
    b"65536",
    b" ",
)


def mutated(data, rng):
    """Cut, flip, insert, repeat or delete a few places."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(changed) + 1)
        how = rng.randrange(6)
        if how == 0:
            changed[at:] = b""
        elif how == 1 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif how == 2:
            changed[at:at] = rng.choice(BITS)
        elif how == 3:
            changed[at : at + rng.randrange(1, 40)] = b""
        elif how == 4:
            changed[at : at + rng.randrange(1, 4)] = rng.choice(BITS)
        else:
            changed[at:at] = changed[max(0, at - rng.randrange(1, 80)) : at]
    return bytes(changed)


@pytest.mark.parametrize("name", SAMPLES)
def test_mutations(tmp_path, name):
    write, options, source = SAMPLES[name]
    path = write(tmp_path)
    victims = sorted(path.iterdir()) if path.is_dir() else [path]
    sound = {victim: victim.read_bytes() for victim in victims}
    out = tmp_path / "out" / "t.safetensors"
    out.parent.mkdir()
    rng = random.Random(f"convert {name}")
    refused = 0
    for round_ in range(ROUNDS):
        victim = rng.choice(victims)
        victim.write_bytes(mutated(sound[victim], rng))
        try:
            convert([path], out, source if round_ % 2 else None, options)
        except BadInput as error:
            refused += 1
            assert "\n" not in str(error)
            assert str(error).isprintable()
            assert list(out.parent.iterdir()) == []
        else:
            assert list(out.parent.iterdir()) == [out]
            with Trace(out) as trace:
                assert check_trace(trace) == []
            out.unlink()
        victim.write_bytes(sound[victim])
    assert 0 < refused < ROUNDS


@pytest.mark.parametrize("text", [AZURE_2023, AZURE_2024, MOONCAKE], ids=["azure_2023", "azure_2024", "mooncake"])
def test_mutated_arrivals(tmp_path, text):
    path, rng, refused = tmp_path / "log", random.Random("arrivals"), 0
    for _ in range(300):
        path.write_bytes(mutated(text.encode(), rng))
        try:
            times = [one.at_s for one in arrivals(str(path), 10)]
        except BadInput as error:
            refused += 1
            assert "\n" not in str(error)
        else:
            assert times == sorted(times)
            assert times[0] == 0
    assert 0 < refused < 300
