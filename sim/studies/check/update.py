"""Write figures into a baseline: only the values change; comments, order and layout stay as they were.

The text is edited at the marks of a parser, since a library that keeps comments (ruamel.yaml) loses those inside flow
mappings and lays JSON and indented lists out anew. What was written is read back and has to mean what was meant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from sim.base.errors import BadInput
from sim.base.files import MAX_YAML_BYTES, must_be_writable, parse_yaml, replacing

if TYPE_CHECKING:
    from sim.studies.check.baseline import Held
    from sim.studies.check.check import Verdict

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_.=/ -]*[A-Za-z0-9]")
_BLOCKS = ("|", ">")
BYTE_ORDER_MARK = "\ufeff"
LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader  # what reads tabs, where it can be had

Figures = Mapping[str, float | None]


class Edit(NamedTuple):
    """Text that takes the place of `text[start:stop]`."""

    start: int
    stop: int
    text: str


def update(verdict: Verdict) -> int:
    """Write every figure that is not what was found, and the inputs they rest on. Returns how many figures changed.

    A run that did not run keeps what is recorded of it.

    Raises:
        BadInput: the file cannot be written, was changed meanwhile, or cannot be kept as it is laid out.
    """
    held = verdict.held
    text = _raw(held.path)
    if text.replace("\r\n", "\n") != held.text:
        raise BadInput(f"{held.path}: it was changed while its runs were replayed; check it again")
    found = [{one.key: one.b for one in run.figures if one.b != one.a} for run in verdict.runs]
    written = updated(held.path, text, found, verdict.inputs)
    if written != text:
        with replacing(held.path) as part:
            part.write_bytes(written.encode())
    return sum(len(figures) for figures in found)


def check_update(held: Held) -> None:
    """Find out before the runs whether figures can be written into the file. Raises BadInput; changes nothing."""
    must_be_writable(held.path)
    updated(held.path, _raw(held.path), [dict.fromkeys(run.figures, 0.125) for run in held.runs], {"hw any": "0" * 12})


def updated(path: Path, text: str, found: Sequence[Figures], inputs: Mapping[str, str]) -> str:
    """The file's text with these figures of each run, and these inputs.

    Raises:
        BadInput: it is laid out in a way in which they cannot be written.
    """
    try:
        new = _edited(text, found, inputs)
        kept = _meaning(parse_yaml(new, "")) == _meaning(_updated(parse_yaml(text, ""), found, inputs))
        kept = kept and (not _is_json(text) or _is_json(new)) and len(new.encode()) <= MAX_YAML_BYTES
    except (BadInput, yaml.YAMLError):
        kept = False
    if not kept:
        raise BadInput(
            f"{path}: as it is laid out no figures can be written into it, and it is left as it was; write each field "
            "on a line of its own, as docs/check.md has it"
        )
    return new


def _raw(path: Path) -> str:
    return path.read_bytes().decode("utf-8")


def _is_json(text: str) -> bool:
    try:
        json.loads(text.removeprefix(BYTE_ORDER_MARK))
    except (ValueError, RecursionError):
        return False
    return True


def _updated(data: dict[str, Any], found: Sequence[Figures], inputs: Mapping[str, str]) -> dict[str, Any]:
    """What the file shall mean."""
    for run, figures in zip(data["runs"], found, strict=True):
        if figures:
            run["figures"] = {**(run.get("figures") or {}), **figures}
    return {**data, "inputs": dict(inputs)}


def _meaning(data: Any) -> Any:
    """Data in a form in which equal means the same: no order of keys, but 1, 1.0 and true apart."""
    if isinstance(data, dict):
        return sorted((repr(key), _meaning(value)) for key, value in data.items())
    return [_meaning(value) for value in data] if isinstance(data, list) else repr(data)


def _edited(text: str, found: Sequence[Figures], inputs: Mapping[str, str]) -> str:
    if text.startswith(BYTE_ORDER_MARK):  # which libyaml leaves out of its marks
        return BYTE_ORDER_MARK + _edited(text.removeprefix(BYTE_ORDER_MARK), found, inputs)
    root = yaml.compose(text, LOADER)
    assert isinstance(root, yaml.MappingNode)
    runs = _child(root, "runs")
    assert isinstance(runs, yaml.SequenceNode)
    edits: list[Edit] = []
    for node, figures in zip(runs.value, found, strict=True):
        edits += _of_run(text, node, figures)
    edits += _of_inputs(text, root, inputs)
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.stop :]
    return text


def _of_run(text: str, node: yaml.MappingNode, figures: Figures) -> list[Edit]:
    if not figures:
        return []
    written = _child(node, "figures")
    if isinstance(written, yaml.MappingNode):
        values = {key.value: value for key, value in written.value}
        return [_replaced(text, values[key], _show(value)) for key, value in figures.items()]
    line = _in_a_line(node, {key: _show(value) for key, value in figures.items()})
    if written is not None:  # `figures:` with nothing behind it
        return [_replaced(text, written, line)]
    return [_added(text, node, {"figures": line})]


def _of_inputs(text: str, root: yaml.MappingNode, inputs: Mapping[str, str]) -> list[Edit]:
    """The mapping `inputs`: values in place of others, names that are gone out, new ones behind; or all of it."""
    values = {name: json.dumps(digest) for name, digest in inputs.items()}
    written = _child(root, "inputs")
    if written is None and root.flow_style:
        return [_added(text, root, {"inputs": _in_a_line(root, values)})]
    if written is None:
        at, newline = _end_of_document(text), _newline(text)
        gap = "" if at == 0 or text[at - 1] == "\n" else newline
        own = " " * root.start_mark.column
        lines = "".join(f"{newline}{own}  {_key(name)}: {value}" for name, value in values.items())
        return [Edit(at, at, f"{gap}{own}inputs:  # what names meant when this was recorded{lines}{newline}")]
    assert isinstance(written, yaml.MappingNode)
    there = {key.value: (key, value) for key, value in written.value}
    gone = [there[name] for name in there if name not in values]
    if (written.flow_style and gone) or not set(values) & set(there):  # nothing of it stays
        if written.flow_style:
            return [Edit(written.start_mark.index, _end(written), _in_a_line(root, values))]
        indent = _newline(text) + " " * written.start_mark.column
        lines = indent.join(f"{_key(name)}: {value}" for name, value in values.items())
        return [Edit(written.start_mark.index, _end(written), lines)]
    edits = [_replaced(text, there[name][1], value) for name, value in values.items() if name in there]
    for key, value in gone:
        start, stop = text.rfind("\n", 0, key.start_mark.index) + 1, text.find("\n", _end(value)) + 1
        edits.append(Edit(start, stop or len(text), ""))
    new = {name: value for name, value in values.items() if name not in there}
    kept = [pair for pair in written.value if pair[0].value in values]
    return [*edits, _added(text, written, new, kept[-1][1])] if new else edits


def _added(text: str, node: yaml.MappingNode, pairs: Mapping[str, str], last: yaml.Node | None = None) -> Edit:
    """Names with their values behind the last value of a mapping, or behind another of its values."""
    first_key, last_key = node.value[0][0], node.value[-1][0]
    last = node.value[-1][1] if last is None else last
    at = _end(last)
    if node.flow_style:
        alone = last_key is not first_key and not text[: last_key.start_mark.index].rpartition("\n")[2].strip()
        gap = _newline(text) + " " * last_key.start_mark.column if alone else " "  # as its last name stands
        return Edit(at, at, "".join(f",{gap}{_name(node, name)}: {value}" for name, value in pairs.items()))
    newline, indent = _newline(text), " " * node.start_mark.column
    lines = [f"{indent}{_key(name)}: {value}" for name, value in pairs.items()]
    if isinstance(last, yaml.ScalarNode) and last.style in _BLOCKS and text[at - 1] == "\n":
        return Edit(at, at, "".join(line + newline for line in lines))
    at = _line_end(text, at)  # a comment behind the last value stays where it is
    return Edit(at, at, "".join(newline + line for line in lines))


def _in_a_line(beside: yaml.MappingNode, pairs: Mapping[str, str]) -> str:
    """A flow mapping, its names quoted where those of the mapping around it are: JSON stays JSON."""
    return "{" + ", ".join(f"{_name(beside, name)}: {value}" for name, value in pairs.items()) + "}"


def _name(beside: yaml.MappingNode, name: str) -> str:
    quoted = beside.flow_style and any(key.style == '"' for key, _ in beside.value)
    return json.dumps(name) if quoted else _key(name)


def _key(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else json.dumps(name)


def _child(node: yaml.MappingNode, name: str) -> yaml.Node | None:
    return next((value for key, value in node.value if key.value == name), None)


def _replaced(text: str, node: yaml.Node, value: str) -> Edit:
    """A value in place of another; one that is not there yet stands behind its key's colon."""
    start, stop = node.start_mark.index, _end(node)
    if start == stop:
        return Edit(start, start, value if text[start - 1 : start].isspace() else f" {value}")
    if isinstance(node, yaml.ScalarNode) and node.style in _BLOCKS and text[stop - 1] == "\n":
        value += _newline(text)
    return Edit(start, stop, value)


def _end(node: yaml.Node) -> int:
    """Where the text of a node ends; the mark of a block stands at what follows it, comments included."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _line_end(text: str, at: int) -> int:
    """Where the line ends, before the characters that end it."""
    end = text.find("\n", at)
    end = len(text) if end < 0 else end
    return end - 1 if text[end - 1 : end] == "\r" else end


def _end_of_document(text: str) -> int:
    """Where a line can still be added: the end of the text, or the `...` that ends the document."""
    for event in yaml.parse(text, LOADER):
        if isinstance(event, yaml.DocumentEndEvent) and event.explicit and event.start_mark is not None:
            return int(event.start_mark.index)
    return len(text)


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
