"""FORMAT.md says what the code does: every tensor and key, the bounds, and the worked example byte for byte."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

import traces
from traces.format.header import OPTIONAL, REQUIRED, Header
from traces.format.layout import (
    CODES,
    MAX_EXPERTS,
    MAX_HEADER_BYTES,
    MAX_LAYERS,
    MAX_TEXT,
    REQUIRED_TENSORS,
    TENSORS,
    common_scale,
)
from traces.format.requests import Request
from traces.format.writer import write_trace

TEXT = Path(traces.__file__).with_name("FORMAT.md").read_text(encoding="utf-8")


def cells(section):
    """Rows of the first table of a section, without its header."""
    body = TEXT.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in body.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def code_blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.S)


def test_the_table_of_tensors_is_the_codes():
    listed = {}
    for names, types, shapes, _ in cells("Tensors"):
        for name, shape in zip(re.findall(r"`([^`]+)`", names), shapes.split(" and "), strict=True):
            listed[name] = (types, shape)
    assert list(listed) == [name for name in TENSORS if name in listed]
    assert set(listed) == set(TENSORS)
    for name, spec in TENSORS.items():
        types = "code" if spec.scored else ", ".join(spec.dtypes)
        assert listed[name] == (types, ", ".join(spec.dims)), name
    for name in REQUIRED_TENSORS:
        assert f"`{name}`" in TEXT.split("are always there")[0].rsplit("\n\n", 1)[1]


def test_the_table_of_keys_is_the_codes():
    rows = cells("Header facts")
    required = {key for row in rows if row[1] == "yes" for key in re.findall(r"`([^`]+)`", row[0])}
    optional = {key for row in rows if row[1] == "no" for key in re.findall(r"`([^`]+)`", row[0])}
    assert required == set(REQUIRED)
    assert optional == {*OPTIONAL, "<tensor>.rows", "<tensor>.squeezed", "x.<name>"}
    assert f"L (1 to {MAX_LAYERS}), E (1 to {MAX_EXPERTS})" in TEXT
    assert f"at most {MAX_HEADER_BYTES // 1024**2} MiB" in TEXT
    assert f"{MAX_TEXT:,} characters" in TEXT


def test_the_table_of_codes_and_its_bounds():
    linear, square, packed, nibble = (CODES[re.findall(r"`(.*)`", row[0])[0]] for row in cells("Score codes"))
    assert (linear.dtype, linear.top, linear.scale) == ("U16", 4095, 4095)
    assert (square.dtype, square.top, square.scale) == ("U8", 255, 65025)
    assert f"{linear.max_error():.2e}".replace("e-0", "e-") <= "1.23e-4"
    assert [f"{square.max_error(p):.2e}" for p in (0.001, 1.0)] == ["1.28e-04", "3.93e-03"]
    assert square.max_error(0.3) == math.sqrt(0.3) / 255 + 0.25 / 65025
    assert (packed.dtype, packed.top, packed.scale, packed.bits) == ("U8", 63, 3969, 6)
    assert [f"{packed.max_error(p):.2e}" for p in (0.001, 1.0)] == ["5.65e-04", "1.59e-02"]
    assert (nibble.dtype, nibble.top, nibble.scale, nibble.bits) == ("U8", 15, 225, 4)
    assert [f"{nibble.max_error(p):.2e}" for p in (0.001, 1.0)] == ["3.22e-03", "6.78e-02"]
    assert nibble.store(np.array([1, 2, 3])).tobytes().hex(" ") == "21 03"
    assert "4095, 65025, 3969 and 225 are the scales" in TEXT
    assert common_scale([linear, square]) == 5917275


def test_the_worked_example_byte_for_byte(tmp_path):
    header = Header("example", "traces/FORMAT.md", 1, 3, 2, created_by="hand")
    experts = np.array([[[1, 0]], [[0, 2]]])
    data = write_trace(tmp_path / "t.safetensors", header, [Request(0, 0, 1, 2)], experts=experts).read_bytes()
    for block in code_blocks("hex"):
        for line in block.splitlines():
            at, hexes, text = int(line[:4], 16), bytes.fromhex(line[6:53]), line[55:]
            assert data[at : at + len(hexes)] == hexes
            assert text == "".join(chr(byte) if 32 <= byte < 127 else "." for byte in hexes)
    n_header = int.from_bytes(data[:8], "little")
    shown = "".join(line.strip() for line in code_blocks("json")[0].splitlines())  # folded on the page
    assert data[8 : 8 + n_header].decode().rstrip(" ") == shown
    assert f"{8} + {n_header} + {len(data) - 8 - n_header}" in TEXT
    assert (
        sum(len(bytes.fromhex(line[6:53])) for line in code_blocks("hex")[1].splitlines()) == len(data) - 8 - n_header
    )


def test_the_bundled_table_can_be_found_by_the_command_that_fills_it():
    assert re.search(r"<!-- bundled: begin -->\n\| name \|.*\n<!-- bundled: end -->", TEXT, re.S)


def test_any_safetensors_reader_opens_a_trace(tmp_path):
    numpy_reader = pytest.importorskip("safetensors.numpy")
    experts = np.array([[[1, 0]], [[0, 2]]])
    path = write_trace(tmp_path / "t.safetensors", Header("m", "s", 1, 3, 2), [Request(0, 0, 1, 2)], experts=experts)
    assert np.array_equal(numpy_reader.load_file(path)["experts"], experts)
