"""What can go wrong, as one tree.

    MoesimError
    ├── BadInput          the user's file, name or value: printed as one line, exit 2
    │   └── DoesNotFit    a budget, a GPU or a host too small: carries the table that shows it
    ├── IllegalDecision   a policy broke a rule of the engine: a bug in the policy, exit 1
    └── CheckFailed       a check the user asked for did not hold, exit 1

Messages read `what, got what: rule; way out`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

SHOWN_NAMES = 16  # of a list of known ones
CUT_SHORT = 4  # letters of a name that may be the beginning of a longer one
# A message quotes what was wrong, and a file may hold anything: its beginning and its end (the way out) are kept.
HEAD_CHARS, TAIL_CHARS = 1200, 400


class MoesimError(Exception):
    """Base of every error this project raises on purpose; its message is one printable line, whatever it quotes."""

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))


class BadInput(MoesimError):
    """Something the user gave cannot be used; the message names file, field and remedy in one line."""

    exit_code = 2


class DoesNotFit(BadInput):
    """The model, budget or buffers exceed a memory; `sizes` shows why: bytes by item, worded by `sim.results.text`."""

    def __init__(self, message: str, sizes: Mapping[str, int] | None = None) -> None:
        super().__init__(message)
        self.sizes = dict(sizes or {})


class IllegalDecision(MoesimError):
    """A policy asked for something the engine's rules forbid; `located`: the message says in which hook."""

    located = False


class CheckFailed(MoesimError):
    """A requested check (validator, conformance, tolerance) did not hold."""


def one_line(text: str) -> str:
    """Escape what would break or recolour a terminal's line, and leave out the middle of what floods it."""
    if len(text) > HEAD_CHARS + TAIL_CHARS + 20:
        text = f"{text[:HEAD_CHARS]} [...] {text[-TAIL_CHARS:]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else escaped(c) for c in text)


def escaped(character: str) -> str:
    """As Python writes it between quotes: `\\x1b`."""
    return character.encode("unicode_escape").decode()


def did_you_mean(name: str, known: Iterable[str], also: Iterable[str] = ()) -> str:
    """Return `"did you mean 'lru'?"` or, without a near name, `"known: a, b, c"`; `"there is none"`.

    A name cut short is near too: `bandwith` means `bandwidth_bytes_per_s`. `also`: names that may be meant, and are not
    listed.
    """
    import difflib  # errors alone need it

    names, name = sorted(set(known)), name[:100]
    near = difflib.get_close_matches(name, sorted({*names, *also}), n=3, cutoff=0.6)
    near.sort(key=lambda other: not other.startswith(name))  # `gen4` is as near to gen5x4 as to gen4x4
    if not near and len(name) >= CUT_SHORT:
        begins = {other[: len(name) + 1]: other for other in reversed(names)}
        near = [begins[found] for found in difflib.get_close_matches(name, begins, n=1, cutoff=0.8)]
    if near:
        return f"did you mean {near[0]!r}?"
    if not names:
        return "there is none"
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES + 1 else ""
    return "known: " + ", ".join(names[:SHOWN_NAMES] if more else names) + more
