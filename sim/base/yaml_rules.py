"""YAML as this project reads it: plain data, by the numbers of YAML 1.2, and errors where PyYAML is too kind."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any, NoReturn

import yaml

from sim.base.errors import BadInput

MAX_YAML_DEPTH = 32
MAX_NUMBER_CHARS = 100
HALF = re.compile("[\ud800-\udfff]")

# The YAML 1.2 floats that PyYAML's YAML 1.1 takes for text, and the characters they begin with.
FLOAT = (
    re.compile(r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$|^[-+]?\.[0-9]+(?:[eE][-+]?[0-9]+)?$"),
    list("-+0123456789."),
)


class _Rules(yaml.composer.Composer, yaml.constructor.SafeConstructor, yaml.resolver.Resolver):
    """YAML 1.2 numbers (PyYAML reads `5e10` as text), and errors where PyYAML is too kind.

    A key given twice would be a silent loss; an alias can stand for exponentially many values; and time grows with the
    square of the depth. So none of them gets further than where it begins.
    """

    check_event: Any  # a scanner's
    peek_event: Any
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            self._refuse("YAML aliases are not accepted, write the value out")
        self.depth += 1
        if self.depth > MAX_YAML_DEPTH:
            self._refuse(f"nested deeper than {MAX_YAML_DEPTH} levels")
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def resolve(self, kind: type[yaml.Node], value: str, implicit: Any) -> str:
        """`1:8` is text, a range of a sweep, and no number of base 60."""
        tag: str = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        return "tag:yaml.org,2002:str" if tag.endswith((":int", ":float")) and ":" in value else tag

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        """Text as JSON has it, too: `\\ud83d\\ude00` is one character, and half of one is none."""
        text = super().construct_scalar(node)
        if HALF.search(text):
            try:
                return text.encode("utf-16", "surrogatepass").decode("utf-16")
            except UnicodeDecodeError:
                raise yaml.MarkedYAMLError(
                    problem=f"{text[:40]!r} holds half a character (a lone surrogate)", problem_mark=node.start_mark
                ) from None
        return text

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        value = node.value if isinstance(node.value, str) else ""
        if tag in ("!!int", "!!float") and len(value) > MAX_NUMBER_CHARS:
            raise yaml.MarkedYAMLError(
                problem=f"a number of {len(value)} characters: at most {MAX_NUMBER_CHARS}", problem_mark=node.start_mark
            )
        try:
            return super().construct_object(node, deep)
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError):  # PyYAML trusts a tag
            raise yaml.MarkedYAMLError(
                problem=f"{value[:40]!r} is no {tag}" if value else f"not a value of {tag}",
                problem_mark=node.start_mark,
            ) from None

    def _refuse(self, problem: str) -> NoReturn:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.peek_event().start_mark)


def _no_duplicate_keys(loader: _Rules, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, (str, int, float, bool)) and key is not None:
            raise yaml.MarkedYAMLError(problem="a key must be a plain word", problem_mark=key_node.start_mark)
        if key in seen:
            raise yaml.MarkedYAMLError(problem=f"key {key!r} appears twice", problem_mark=key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Rules.add_implicit_resolver("tag:yaml.org,2002:float", *FLOAT)
_Rules.add_constructor("tag:yaml.org,2002:map", _no_duplicate_keys)  # type: ignore[type-var]


class _Loader(_Rules, yaml.SafeLoader):
    """Reads by PyYAML's own scanner, whose messages are the same everywhere."""


if yaml.__with_libyaml__:

    class _QuickLoader(_Rules, yaml.CSafeLoader):
        """Reads by libyaml's scanner, five times as fast: a run that names no model reads the whole catalogue."""

        def __init__(self, text: str) -> None:
            yaml.CSafeLoader.__init__(self, text)
            yaml.composer.Composer.__init__(self)  # so that composing keeps the rules, too


def parse(text: str, where: str) -> Any:
    """As `sim.base.files.parse_yaml`, which is how others ask."""
    if yaml.__with_libyaml__:
        with suppress(Exception):  # what is wrong with a text is said below, in the same words with and without libyaml
            return yaml.load(text, Loader=_QuickLoader)  # noqa: S506 - it constructs as SafeLoader does
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - it constructs as SafeLoader does
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise BadInput(f"{where}{at}: {error.problem or 'not YAML'}; fix the file") from None
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        raise BadInput(f"{where}: not YAML ({str(error).splitlines()[0]}); fix the file") from None
