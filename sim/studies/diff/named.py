"""What a side of a comparison is called: a run's folder or file, a configuration, or a run in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.base.errors import BadInput
from sim.base.files import read_object, to_struct
from sim.base.plug_ins import is_file
from sim.figures import check_schema
from sim.options import OPTIONS, RunSpec
from sim.policy.policy_file import split
from sim.profiles.overrides import of_profile
from sim.results.record import Result
from sim.results.run_folder import CONFIG, MAX_RESULT_BYTES, RESULT
from sim.setup.config_file import read_spec
from sim.setup.naming import words_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.policy.api import Policy

CALLED = "name a run's folder (simulate --out), its result.json or config.yaml, or a policy: lru hw=rtx3090"
ANEW = "write it anew with simulate --out"
SWEEP = "sweep.json"
MOST = 2.0**63


@dataclass(frozen=True)
class Named:
    """What one side is made of, before anything is run.

    Attributes:
        label: as it was called. folder: of a run, with its tables. result: what is recorded, where anything is.
        spec: what replays it, where that is known. meant: what its names stood for when it was recorded.
        times: (request, TTFT, TPOT) as a sweep's record has them. kind: the policy, where it is a class.
    """

    label: str
    folder: Path | None = None
    result: Result | None = None
    spec: RunSpec | None = None
    meant: dict[str, Any] = field(default_factory=dict)
    times: list[Any] | None = None
    kind: type[Policy] | None = None


def both(a: str | Named, b: str | Named, given: Mapping[str, Any]) -> tuple[Named, Named]:
    """Two sides. What a run in words does not say is as in the other one.

    Args:
        given: fields that options gave; they stand over those of a configuration, and of no record.

    Raises:
        BadInput: nothing of such a name can be read, or options are given and both runs are recorded.
    """
    if isinstance(a, str) and _in_path(a) is None and (isinstance(b, Named) or _in_path(b) is not None):
        second = named(b, given)
        return named(a, given, second.spec), second
    first = named(a, given)
    second = named(b, given, first.spec)
    if given and first.result is not None and second.result is not None:
        said = ", ".join(OPTIONS.by_field[name].said for name in given)
        raise BadInput(f"{said}, got runs that are recorded: options are for runs in words; leave them out")
    return first, second


def named(text: str | Named, given: Mapping[str, Any], like: RunSpec | None = None) -> Named:
    """One side.

    Args:
        given: fields that options gave; they stand over those of a configuration. like: what words do not say is as in
            this run; None: as in `given`.

    Raises:
        BadInput: nothing of that name can be read.
    """
    if isinstance(text, Named):
        return text
    if not text.strip():
        raise BadInput(f"run, got an empty name: {CALLED}")
    path = _in_path(text)
    if path is None:
        return _in_words(text, given, like)
    if path.is_dir():
        return _of_folder(text, path)
    if path.suffix == ".json":
        beside = path.name == RESULT and (path.parent / CONFIG).is_file()
        return _of_folder(text, path.parent) if beside else _of_file(text, path)
    fields, meant = read_spec(path)
    return Named(text, spec=to_struct({**fields, **given}, RunSpec, text), meant={} if given else meant)


def _in_path(text: str) -> Path | None:
    """The file or folder that is meant; None for a run in words."""
    try:
        path = Path(text).expanduser()
        exists = path.exists()
    except (OSError, ValueError, RuntimeError):
        return None
    if not exists:
        if "=" not in text and len(text.split()) == 1 and not is_file(text) and ("/" in text or path.suffix):
            raise BadInput(f"{text}: no such file or folder; {CALLED}")
        return None
    return None if is_file(text) or (path.name == text and _is_policy(text)) else path  # `./lru` is the folder


def _is_policy(text: str) -> bool:
    from sim.policy.registry import policies

    return text in policies()


def _of_folder(text: str, folder: Path) -> Named:
    if not (folder / RESULT).is_file():
        if (folder / SWEEP).is_file():
            raise BadInput(f"{folder}: it holds a sweep; name one of its points, {folder / 'points'}/RUN_ID.json")
        raise BadInput(f"{folder}: it holds no {RESULT}, so it is no run's folder; {CALLED}")
    result = _result(_facts(folder / RESULT), folder / RESULT)
    if not (folder / CONFIG).is_file():
        return Named(text, folder, result)
    fields, meant = read_spec(folder / CONFIG)
    return Named(text, folder, result, to_struct(fields, RunSpec, str(folder / CONFIG)), meant)


def _of_file(text: str, path: Path) -> Named:
    """A result, or the record of a sweep's point."""
    facts = _facts(path)
    if "result" not in facts:
        if "id" in facts:
            raise BadInput(f"{path}: this point of a sweep did not run: {facts.get('reason') or facts.get('status')}")
        return Named(text, result=_result(facts, path))
    result, times = facts["result"], facts.get("requests")
    if not isinstance(result, dict) or not isinstance(times, list):
        raise BadInput(f"{path}: result and requests: not those of a sweep's point; {CALLED}")
    return Named(text, result=_result(result, path), times=times)


def _in_words(text: str, given: Mapping[str, Any], like: RunSpec | None) -> Named:
    """`lru scope=layer hw=rtx3090`: a policy, its parameters, and fields of a run. Without a policy (`hw=rtx4090`), and
    for all fields that are not said, it is as the other one."""
    first, *words = split(text)
    if "=" in first:
        first, words = "", [first, *words]
    fields: dict[str, Any] = {} if like is None else {name: getattr(like, name) for name in like.__struct_fields__}
    own, shared = words_of(first or fields.get("policy", ""), words)
    if first and first != fields.get("policy"):  # what is said of one policy is no business of another
        fields |= {"policy": first, "predictor": None, "set": of_profiles(fields.get("set", {}))}
    found = {**fields, **given, **shared, "set": {**fields.get("set", {}), **given.get("set", {}), **own}}
    if "policy" not in found:
        raise BadInput(f"{text}, got no policy: {CALLED}")
    if "hw" not in found:
        raise BadInput(f"{text}: on which GPU? add hw=NAME behind it, or --hw NAME (`moesim hw` lists them)")
    return Named(text, spec=to_struct({**found, **({"policy": first} if first else {})}, RunSpec, text))


def of_profiles(set_: Mapping[str, Any]) -> dict[str, Any]:
    """What is set of machine, model and engine; the rest are a policy's parameters."""
    return {key: value for key, value in set_.items() if of_profile(key)}


def _facts(path: Path) -> dict[str, Any]:
    facts = read_object(path, MAX_RESULT_BYTES, ANEW)
    try:
        _check(facts, "", path)
    except RecursionError:
        raise BadInput(f"{path}: nested deeper than any result; {ANEW}") from None
    return facts


def _result(facts: dict[str, Any], path: Path) -> Result:
    """A result as it was recorded. Raises BadInput naming the field."""
    check_schema(facts, path, ANEW)
    result = to_struct(facts, Result, str(path))
    if result.batch < 1:
        raise BadInput(f"{path}: batch, got {result.batch}: 1 at least; {ANEW}")
    return result


def _check(value: Any, key: str, path: Path) -> None:
    """Raises BadInput for a number that no figure is: sums of such would not be numbers any more."""
    if isinstance(value, dict):
        for name, child in value.items():
            _check(child, f"{key}.{name}" if key else name, path)
    elif isinstance(value, list):
        for at, child in enumerate(value):
            _check(child, f"{key}[{at}]", path)
    elif isinstance(value, int | float) and not -MOST < value < MOST:
        raise BadInput(f"{path}: {key}, got {str(value)[:20]}: no figure is so large; {ANEW}")
