"""Write figures into a baseline: only the values change; comments, order and layout stay as they were."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple

import yaml

from sim.base.errors import BadInput
from sim.base.files import replacing

if TYPE_CHECKING:
    from sim.studies.check.check import Checked, Verdict

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_.=/ -]*[A-Za-z0-9]")


class Edit(NamedTuple):
    """Text that takes the place of `text[start:stop]`."""

    start: int
    stop: int
    text: str


def update(verdict: Verdict) -> int:
    """Write every figure that is not what was found, and the inputs they rest on. Returns how many figures changed.

    A run that did not run keeps what is recorded of it.

    Raises:
        BadInput: the file cannot be written.
    """
    held = verdict.held
    text, n_changed = updated(held.text, verdict)
    if text != held.text:
        carriage = b"\r\n" in held.path.read_bytes()
        with replacing(held.path) as part:
            part.write_bytes((text.replace("\n", "\r\n") if carriage else text).encode())
    return n_changed


def updated(text: str, verdict: Verdict) -> tuple[str, int]:
    """The file's text with what was found, and how many figures changed."""
    root = yaml.compose(text, yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    runs = _only(root, "runs")
    assert isinstance(runs, yaml.SequenceNode)
    edits: list[Edit] = []
    n_changed = 0
    for node, run in zip(runs.value, verdict.runs, strict=True):
        found = {one.key: one.value for one in run.figures if one.value != one.expected}
        n_changed += len(found)
        edits += _of_run(text, node, run, found)
    edits += _inputs(text, root, verdict.inputs)
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.stop :]
    return text, n_changed


def _of_run(text: str, node: yaml.MappingNode, run: Checked, found: dict[str, float | None]) -> list[Edit]:
    if not found:
        return []
    written = _child(node, "figures")
    if isinstance(written, yaml.MappingNode):
        return [_replacing(text, _only(written, key), _show(value)) for key, value in found.items()]
    line = "{" + ", ".join(f"{key}: {_show(one.value)}" for key in found for one in run.figures if one.key == key) + "}"
    if written is not None:  # `figures:` with nothing behind it
        return [_replacing(text, written, line)]
    if node.flow_style:
        at = node.end_mark.index - 1
        return [Edit(at, at, f", figures: {line}")]
    line_end = text.find("\n", _end(node))  # a comment behind the last value stays where it is
    at = len(text) if line_end < 0 else line_end
    return [Edit(at, at, "\n" + " " * node.start_mark.column + f"figures: {line}")]


def _inputs(text: str, root: yaml.MappingNode, inputs: dict[str, str]) -> list[Edit]:
    """The block `inputs:`, in place of the one there, or at the end."""
    written = _child(root, "inputs")
    block = isinstance(written, yaml.MappingNode) and not written.flow_style
    indent = "\n" + " " * (written.start_mark.column if written is not None and block else 2)
    lines = "".join(f"{indent}{_key(name)}: {json.dumps(digest)}" for name, digest in inputs.items())
    if written is not None and block:  # a comment behind `inputs:` stays
        return [Edit(written.start_mark.index, _end(written), lines.removeprefix(indent))]
    if written is not None:
        start = next(key.end_mark.index for key, value in root.value if value is written) + 1
        return [Edit(start, max(start, _end(written)), lines)]
    if root.flow_style:
        at = root.end_mark.index - 1
        return [Edit(at, at, ", inputs: {" + ", ".join(lines.strip().splitlines()) + "}")]
    gap = "" if text.endswith("\n") else "\n"
    return [Edit(len(text), len(text), f"{gap}inputs:  # what names meant when this was recorded{lines}\n")]


def _child(node: yaml.MappingNode, name: str) -> yaml.Node | None:
    return next((value for key, value in node.value if key.value == name), None)


def _only(node: yaml.MappingNode, name: str) -> yaml.Node:
    found = _child(node, name)
    assert found is not None
    return found


def _replacing(text: str, node: yaml.Node, value: str) -> Edit:
    """A value in place of another; one that is not there yet stands behind its key's colon."""
    start, stop = node.start_mark.index, _end(node)
    if start == stop:
        return Edit(start, start, value if text[start - 1 : start].isspace() else f" {value}")
    if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"):
        raise BadInput(f"line {node.start_mark.line + 1}: a figure in a block of text; write it behind its name")
    return Edit(start, stop, value)


def _end(node: yaml.Node) -> int:
    """Where the text of a node ends; the mark of a block stands at what follows it, comments included."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _show(value: float | None) -> str:
    """A number that reads back as the very same."""
    if value is None:
        return "null"
    text = repr(value)
    mantissa, e, exponent = text.partition("e")  # YAML 1.1 wants a point before, and a sign behind
    if not e:
        return text
    sign = "" if exponent[0] in "+-" else "+"
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{sign}{exponent}"


def _key(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else json.dumps(name)
