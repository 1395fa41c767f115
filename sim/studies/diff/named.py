"""What a side of a comparison is called: a run's folder or file, a configuration, or a run in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.base.errors import BadInput
from sim.base.files import to_struct
from sim.base.own_file import is_file
from sim.options import OPTIONS, RunSpec
from sim.policy.policy_file import split
from sim.profiles.overrides import GROUPS
from sim.results.run_folder import CONFIG, RESULT
from sim.setup.spec import read_spec
from sim.setup.words import words_of
from sim.studies.diff.told import facts_of

if TYPE_CHECKING:
    from sim.policy.api import Policy

CALLED = "name a run's folder (simulate --out), its result.json or config.yaml, or a policy: lru hw=rtx3090"
SWEEP = "sweep.json"


@dataclass(frozen=True)
class Named:
    """What one side is made of, before anything is run.

    Attributes:
        label: as it was called. folder: of a run, with its tables. facts: the result that is recorded, where one is.
        spec: what replays it, where that is known. meant: what its names stood for when it was recorded.
        times: (request, TTFT, TPOT) as a sweep's record has them. kind: the policy, where it is a class.
    """

    label: str
    folder: Path | None = None
    facts: dict[str, Any] | None = None
    spec: RunSpec | None = None
    meant: dict[str, Any] = field(default_factory=dict)
    times: list[Any] | None = None
    kind: type[Policy] | None = None


def both(a: str, b: str, given: dict[str, Any]) -> tuple[Named, Named]:
    """Two sides. What a run in words does not say is as in the other one.

    Args:
        given: fields that options gave; they stand over those of a configuration, and of no record.

    Raises:
        BadInput: nothing of such a name can be read, or options are given and both runs are recorded.
    """
    if _in_path(a) is None and _in_path(b) is not None:
        second = named(b, given)
        return named(a, given, second.spec), second
    first = named(a, given)
    second = named(b, given, first.spec)
    if given and first.facts is not None and second.facts is not None:
        raise BadInput(
            f"{', '.join(OPTIONS.by_field[name].said for name in given)}, got runs that are recorded: options are for "
            "runs in "
            "words; leave them out"
        )
    return first, second


def named(text: str, given: dict[str, Any], like: RunSpec | None = None) -> Named:
    """One side.

    Args:
        given: fields that options gave; they stand over those of a configuration. like: what words do not say is as in
            this run; None: as in `given`.

    Raises:
        BadInput: nothing of that name can be read.
    """
    if not text.strip():
        raise BadInput(f"run, got an empty name: {CALLED}")
    path = _in_path(text)
    if path is None:
        return _in_words(text, given, like)
    if path.is_dir():
        return _of_folder(text, path)
    if path.suffix == ".json":
        if path.name == RESULT and (path.parent / CONFIG).is_file():
            return _of_folder(text, path.parent)
        return _of_result(text, path)
    fields, meant = read_spec(path)
    return Named(text, spec=_spec({**fields, **given}, text), meant={} if given else meant)


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
    if is_file(text) or (path.name == text and _is_policy(text)):
        return None  # `./lru` is the folder
    return path


def _is_policy(text: str) -> bool:
    from sim.policy.registry import policies

    return text in policies()


def _of_folder(text: str, folder: Path) -> Named:
    if not (folder / RESULT).is_file():
        if (folder / SWEEP).is_file():
            raise BadInput(f"{folder}: it holds a sweep; name one of its points, {folder / 'points'}/RUN_ID.json")
        raise BadInput(f"{folder}: it holds no {RESULT}, so it is no run's folder; {CALLED}")
    facts = facts_of(folder / RESULT)
    spec: RunSpec | None = None
    meant: dict[str, Any] = {}
    if (folder / CONFIG).is_file():
        fields, meant = read_spec(folder / CONFIG)
        spec = _spec(fields, str(folder / CONFIG))
    return Named(text, folder, facts, spec, meant)


def _of_result(text: str, path: Path) -> Named:
    facts = facts_of(path)
    if "result" not in facts and "id" in facts:
        raise BadInput(f"{path}: this point of a sweep did not run: {facts.get('reason') or facts.get('status')}")
    if "result" not in facts:
        return Named(text, facts=facts)
    result, times = facts["result"], facts.get("requests")
    if not isinstance(result, dict) or not isinstance(times, list):
        raise BadInput(f"{path}: result and requests: not those of a sweep's point; {CALLED}")
    return Named(text, facts=result, times=times)


def _in_words(text: str, given: dict[str, Any], like: RunSpec | None) -> Named:
    """`lru scope=layer hw=rtx3090`: a policy, its parameters, and fields of a run. Without a policy (`hw=rtx4090`), and
    for all fields that are not said, it is as the other one."""
    first, *words = split(text)
    if "=" in first:
        first, words = "", [first, *words]
    fields: dict[str, Any] = {} if like is None else {name: getattr(like, name) for name in like.__struct_fields__}
    own, shared = words_of(first or fields.get("policy", ""), words)
    before = fields.get("set", {})
    if first and first != fields.get("policy"):  # what is said of one policy is no business of another
        before = {key: value for key, value in before.items() if _shared(key)}
        fields.pop("predictor", None)
    set_ = {**before, **given.get("set", {}), **own}
    found = {**fields, **given, **shared, "set": set_, **({"policy": first} if first else {})}
    if "policy" not in found:
        raise BadInput(f"{text}, got no policy: {CALLED}")
    if "hw" not in found:
        raise BadInput(f"{text}: on which GPU? add hw=NAME behind it, or --hw NAME (`moesim hw` lists them)")
    return Named(text, spec=_spec(found, text))


def _shared(key: str) -> bool:
    return "." in key and key.partition(".")[0] in GROUPS


def _spec(fields: dict[str, Any], where: str) -> RunSpec:
    return to_struct(fields, RunSpec, where)
