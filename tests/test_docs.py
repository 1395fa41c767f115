"""README and docs say what is so: commands and examples run, keys and columns are real, pasted output is current."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar, get_args

import msgspec
import pytest
from cli_help import mixtral_shaped, moesim, simulated

import moesim as moesim_face
from sim import run as sim_run
from sim.base import renamed
from sim.engine.counts import CLASSES
from sim.engine.engine import LANES, MAX_DECISIONS
from sim.options import HITS, RunSpec
from sim.policy.api import HOOKS, TRAITS, Policy
from sim.policy.decisions import Decision, Serve
from sim.policy.order import Rank
from sim.policy.outlook import Outlook
from sim.policy.registry import policies
from sim.policy.segments import Buffer
from sim.profiles import geometry as model_bytes
from sim.profiles import hardware, models, stack, stored
from sim.results.provenance import SPREAD
from sim.results.run_folder import TABLES
from sim.results.tables import columns_of
from sim.workload.iterations import PHASES
from tools import figures_page, paste
from traces.format.bundled import DEFAULT, bundled_traces
from traces.format.layout import LEVELS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BUNDLED = pytest.mark.skipif(DEFAULT not in bundled_traces(), reason="the default trace is not in this checkout")


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(path: Path) -> list[str]:
    lines = [line for block in blocks(path, "sh") for line in re.sub(r" *\\\n *", " ", block).splitlines()]
    return [line for line in lines if line.startswith(("moesim ", "simulate "))]


def names_in(page: str, heading: str, column: int = 0) -> list[str]:
    """Names in backticks in one column of the first table under a heading."""
    section = page.split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1 + column])]


THOROUGH = pytest.mark.thorough
# A fit of a whole trace, a measurement, a real run, a recording, many replays.
LONG = re.compile(
    r"traces synth|moesim (calibrate|diff|plan|record|report|timeline|saturate|validate)"
    r"|--(replicas|real|draft|kv-memory|prefill-chunk)"
)
REPLAYS = re.compile(
    r"\b(simulate|moesim (compare|conformance|run|plan|diff|sweep)|traces (synth|compose|list|realism))\b"
    r"|validation\.repredict"
    r"|^python \w+\.py$"  # run by tests/test_examples.py, too
)


def takes_long(lines: list[str]) -> bool:
    return bool(LONG.search("\n".join(lines))) or sum(bool(REPLAYS.search(line)) for line in lines) > 1


@BUNDLED
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(page, id=page.name, marks=[THOROUGH] if takes_long(commands(page)) else [])
        for page in PAGES
        if commands(page)
    ],
)
def test_commands_run(path: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))}
    for line in commands(path):
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}\n{done.stderr}"


# Block by block, so that workers share the pages that take minutes.
PASTED = [(path.name, *block) for path in PAGES for block in paste.pasted(path.read_text(encoding="utf-8"))]


@BUNDLED
@pytest.mark.parametrize(
    ("page", "command", "text"),
    [
        pytest.param(*one, id=f"{one[0]}-{i}", marks=[THOROUGH] if REPLAYS.search(one[1]) else [])
        for i, one in enumerate(PASTED)
    ],
)
def test_pasted_output_is_current(page: str, command: str, text: str) -> None:
    assert text == paste.output_of(command), f"{page} is stale: {command}; run python tools/paste.py docs/{page}"


def test_every_block_that_names_its_command_is_held_to_it() -> None:
    named = sum(path.read_text(encoding="utf-8").count("<!-- output of: ") for path in PAGES)
    assert len(PASTED) == named > 50


def test_set_up_commands_can_be_extracted() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    one, two = (re.search(rf"^<!-- command {n} -->\n```sh\n((?:.+\n)+?)```$", page, re.MULTILINE) for n in (1, 2))
    assert one is not None
    assert two is not None
    assert one[1].endswith("simulate --policy fine_moe --hw rtx3090\n")
    assert re.search(r"torch==[\d.]+ ", two[1])
    assert "pytest" in two[1]


def test_links_lead_somewhere() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_index_has_every_page_once() -> None:
    index = ROOT / "docs" / "README.md"
    found = re.findall(r"^- \[[^]]*\]\(([^)#]+)\): .+$", index.read_text(encoding="utf-8"), re.MULTILINE)
    own = sorted(name for name in found if not name.startswith("../"))
    assert own == sorted(page.name for page in PAGES[1:] if page != index)
    assert "](docs/README.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


class TestOutputPage:
    page = (ROOT / "docs" / "output.md").read_text(encoding="utf-8")
    figures = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")

    def test_the_keys_of_a_result_are_those_of_the_table(self) -> None:
        assert figures_page.written(self.figures) == self.figures, "run python tools/figures_page.py"

    def test_json_keys(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        trace = mixtral_shaped(tmp_path)
        result = simulated(capsys, "--policy", "lru", "--hw", "rtx3090", "--trace", trace, "--json").json
        assert set(result) <= set(names_in(self.figures, "## Keys of a result"))

    @pytest.mark.parametrize("table", [name for name in TABLES if name != "runs"])
    def test_columns(self, table: str) -> None:
        assert sorted(names_in(self.page, f"### {table}")) == sorted(columns_of(table))

    def test_classes_and_definitions(self) -> None:
        for name in (*CLASSES, *HITS):
            assert f"\n| {name} | " in self.page, name


def test_every_old_name_is_on_its_page() -> None:
    page = (ROOT / "docs" / "renamed.md").read_text(encoding="utf-8")
    named = {word.lstrip("-").replace("-", "_") for word in re.findall(r"(--[\w-]+|(?<=`)\w+)", page)}
    flags = {flag.lstrip("-").replace("-", "_") for flag in renamed.FLAGS}
    assert {*renamed.OPTIONS, *renamed.GONE, *flags} - {"attain"} <= named
    assert {key.rpartition(".")[2] for key in renamed.KEYS if "(" not in key} <= {*re.findall(r"\w+", page)}


def test_spreads_are_the_documented_ones() -> None:
    page = (ROOT / "docs" / "provenance.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (\d+) %", page, re.MULTILINE))
    assert {source: int(percent) / 100 for source, percent in rows.items()} == SPREAD


def test_traits_and_hooks_are_documented() -> None:
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    assert names_in(page, "## Traits and needs") == list(TRAITS)
    hooks = {name for name, value in vars(Policy).items() if callable(value) and not name.startswith("_")}
    assert hooks <= set(re.findall(r"`(\w+)`", page))


def test_every_decision_is_documented_and_how_many_a_hook_may_make() -> None:
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    rows = page.partition("## Decisions\n")[2].partition("\n## ")[0]
    named = {name for cell in re.findall(r"^\| (.*?) \|", rows, re.MULTILINE) for name in re.findall(r"`(\w+)\(", cell)}
    assert named == {kind.__name__ for kind in get_args(Decision)}
    assert f"fewer than {MAX_DECISIONS:,} decisions" in rows


# Those without a class are run by tests/test_python_face.py, the lane of docs/simpy.md by test_simpy.py; schedulers and
# routers are no policies.
EXAMPLES = [
    (path, index)
    for path in PAGES
    for index, text in enumerate(blocks(path, "python"))
    if "class " in text and path.name != "simpy.md" and not re.search(r"\((Scheduler|Router)\):", text)
]


@BUNDLED
@pytest.mark.parametrize(("path", "index"), EXAMPLES, ids=lambda value: getattr(value, "name", value))
def test_example_policies_run(path: Path, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # On the default trace, since that is what a reader tries first: it has predictions for decode rows only.
    scope: dict[str, Any] = {"__name__": "example"}
    exec(blocks(path, "python")[index], scope)
    (kind,) = (value for value in scope.values() if isinstance(value, type) and value.__module__ == "example")
    monkeypatch.setattr("sim.setup.prepare.find", lambda name: kind)
    setup = sim_run.prepare(RunSpec(policy=kind.name, hw="rtx3090", requests=1))
    result = sim_run.execute(setup).result
    setup.close()
    assert result.policy == kind.name
    assert (result.prefetch.issued.n > 0) == ("next_scores_1" in kind.needs)


class Looked(Policy):
    """Keeps what a policy is handed."""

    name = "looked"
    needs = frozenset({"experts", "scores"})
    seen: ClassVar[dict[str, Any]] = {}

    def bind(self, view: Any) -> None:
        self.order = Rank(view.n_layers * view.n_experts)
        self.seen.update(view=view, order=self.order, outlook=Outlook(view.n_layers, view.n_experts, 1, self.order))

    def learn(self, store: Any) -> None:
        self.seen["store"] = store

    def iteration_start(self, iteration: Any, view: Any) -> None:
        self.seen.update(iteration=iteration)

    def gate_done(self, gate: Any, view: Any) -> Any:
        self.seen.update(gate=gate, piece=view.piece(0, 0))
        yield Serve()


# Single words in backticks that name no part of the contract.
OTHER_WORDS = {
    "a6000",
    "rtx3090",
    "torch",
    "time",
    "datetime",
    "moesim",
    "policies",
    "run_id",
    "validate",
    "conformance",
}


@BUNDLED
def test_every_name_of_the_contract_exists() -> None:
    """What docs/policies.md and docs/policy_api.md name can be imported from `moesim`, or is there to be asked."""
    setup = sim_run.prepare(RunSpec(policy="lru", hw="rtx3090", requests=1), Looked)
    sim_run.execute(setup, begun=lambda engine: None)  # on the engine that has parts, too
    setup.close()
    guide, api = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("policies.md", "policy_api.md"))
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", guide, flags=re.DOTALL | re.MULTILINE) + api)
    heads = re.findall(r"^([A-Z]\w+)(?:$|\()", api, re.MULTILINE)
    named = {name for span in spans for name in re.findall(r"(?<![\w./])([A-Z][A-Za-z]+)\b", span) if len(name) > 1}
    named |= {name for span in spans for name in re.findall(r"^(\w+)\(", span)} - HOOKS - {"read", "view"}
    public = {name for name in dir(moesim_face) if not name.startswith("__")}
    assert {*heads, *named} - public - {"Lru", "NAME", "None", "True", "POLICIES", "Second"} == set()
    missing = []
    for root, rest in re.findall(
        r"(?<![\w/.])(view|gate|store|iteration|order|outlook)((?:\.[a-z]\w*)+)", " ".join(spans)
    ):
        found, *parts = Looked.seen[root], *rest[1:].split(".")
        for at, part in enumerate(parts):
            if not hasattr(type(found), part) and not hasattr(found, part):
                missing.append(root + rest)
                break
            found = getattr(found, part) if at + 1 < len(parts) else found
    assert missing == []
    asked = {
        name
        for found in (*Looked.seen.values(), Looked(), Buffer(1), Looked.seen["store"].trace)
        for name in dir(found)
    }
    fields = set(re.findall(r"\b\w+\b", " ".join(re.findall(r"^\w+\(([^)]*)\)", api, re.MULTILINE))))
    fields |= {name for kind in get_args(Decision) for name in kind._fields}
    words = {span for span in spans if re.fullmatch(r"[a-z]\w+", span)}
    known = (
        asked | fields | TRAITS.keys() | LEVELS.keys() | set(LANES) | set(PHASES) | set(policies()) | set(Looked.seen)
    )
    assert words - known - public - OTHER_WORDS == set()


@BUNDLED
def test_a_cache_per_layer_deals_out_what_does_not_divide() -> None:
    text = next(text for text in blocks(ROOT / "docs" / "policies.md", "python") if "def layer_budgets" in text)
    scope: dict[str, Any] = {"__name__": "example"}
    exec(text, scope)
    for experts in (75, 96):
        setup = sim_run.prepare(
            RunSpec(policy="lru", hw="a6000", requests=1, cache=f"{experts}experts"), scope["PerLayer"]
        )
        engines: list[Any] = []
        outcome = sim_run.execute(setup, begun=engines.append)
        setup.close()
        (budgets,) = setup.policy.layer_budgets(engines[0].view)
        size = outcome.report.counts.expert_bytes
        assert sum(budgets) == experts * size
        assert sorted(set(budgets)) == sorted({experts // 32 * size, -(-experts // 32) * size})
        assert list(outcome.report.counts.peak_bytes) == [experts * size]


def test_every_verb_is_in_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    verbs = re.findall(r"^  (\w+) ", moesim(capsys, "--help").out.split("Commands:")[1], re.MULTILINE)
    assert len(verbs) >= 6
    for verb in verbs:
        assert f"moesim {verb}" in page, f"README.md does not mention moesim {verb}"


def test_the_page_of_profiles_names_every_field() -> None:
    """docs/profiles.md: every field of the files a user may write, optional ones in italics, and no other."""
    page = (ROOT / "docs" / "profiles.md").read_text(encoding="utf-8")
    named = {part for name in re.findall(r"`([\w.]+)`", page) for part in name.split(".")}
    optional = {name.rsplit(".", 1)[-1] for name in re.findall(r"\*`([\w.]+)`\*", page)}
    kinds = (
        hardware.Hardware,
        hardware.Link,
        hardware.Gpu,
        hardware.Bus,
        hardware.Host,
        hardware.Cpu,
        hardware.Contention,
        hardware.Quantity,
        models.Model,
        models.ModelGate,
        models.Published,
        models.PublishedFile,
        model_bytes.Mla,
        model_bytes.OtherAttention,
        stored.StoredAs,
        model_bytes.Encoder,
        stack.Stack,
        stack.Kernels,
    )
    shared = {"aliases", "note", "sources", "source", "ref", "low", "high", "iqr", "n", "dense_layers", "attention"}
    for kind in kinds:
        for field in msgspec.structs.fields(kind):
            assert field.name in named, f"{kind.__name__}.{field.name}"
            if field.name not in shared:
                assert (field.name in optional) is not field.required, f"{kind.__name__}.{field.name}"


def test_the_accuracy_that_readme_quotes_is_the_kept_one() -> None:
    table = (ROOT / "docs" / "validate.md").read_text(encoding="utf-8")
    found = re.search(r"TPOT off by ([\d.]+)% \(median\), ([\d.]+)% \(worst\)", table)
    assert found is not None
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    n_cases = len(json.loads((ROOT / "reports/validation/cpu-backend.json").read_text(encoding="utf-8"))["comparisons"])
    assert f"off by {found[1]} % in the median of {n_cases} cases ({float(found[2]):.0f} % at worst)" in readme


def test_an_empty_block_is_filled_and_swallows_no_other() -> None:
    first, second = (f"<!-- output of: {name} -->\n```text\n" for name in ("one", "two"))
    page = f"before\n{first}```\nbetween\n{second}old\n\nlines\n```\nafter\n"
    assert paste.pasted(page) == [("one", ""), ("two", "old\n\nlines")]
    assert paste.refreshed(page, {"one": "1", "two": "2"}) == (
        f"before\n{first}1\n```\nbetween\n{second}2\n```\nafter\n"
    )
