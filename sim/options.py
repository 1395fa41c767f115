"""Options of a run, each said once: its field of `RunSpec` has the row that says everything else about it.

From this table come the options of every verb, axes of sweeps and plans, keys of grid and configuration files, keywords
of Python, columns of tables, the identity and title of a run, what `moesim diff` compares, and docs/options.md. A new
option is a field here, and the code that reads it.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import msgspec

from sim.base.errors import BadInput, did_you_mean
from sim.base.files import to_struct
from sim.base.kinds import (
    CACHE,
    NUMBER,
    RAM_SIZE,
    SIZE,
    SWITCH,
    TEXT,
    WHOLE,
    Capacity,
    Kind,
    capacity_of,
)
from sim.base.renamed import GROUPS as OLD_GROUPS
from sim.base.renamed import OPTIONS as OLD_NAMES
from sim.base.renamed import VALUES as OLD_VALUES
from sim.base.renamed import refuse_old
from sim.machine.several import HOST_LINKS_WAYS, PEER_WAYS, Several, way_of
from sim.profiles.overrides import GROUPS as PROFILES
from sim.profiles.overrides import Overrides, grouped, parse_set

WHAT, MACHINE, MEMORY, LOAD, SIMULATION, OUTPUT = "What runs", "Machine", "Memory", "Load", "Simulation", "Output"
VALUE, MEANT = "value", "meaning"

MAX_GPUS = 256
MAX_REPLICAS = 256
MOST_TOKENS = 10**9  # of an iteration, so of a batch
CORE, SIMPY = "core", "simpy"

HITS = {
    "gate": "usable on the GPU when the gate asks (FineMoE release 2; the default)",
    "slot": "has its slot when the gate asks, in flight or not (cache look-up: HybriMoE figure 9, MoE-Infinity head)",
    "cached": "usable when the gate asks and not brought by an unused prefetch (MoEpic, AdapMoE code)",
    "token": "as gate, but every (token, expert) counts (MoEpic's tokens x K)",
}
"""What a hit is."""

Value = bool | int | float | str | None


class Limits(Kind):
    """What requests are promised: task -> limit -> seconds."""

    example = "'ttft_s <= 2s, tpot_s <= 200ms'"

    def read(self, text: str, what: str) -> dict[str, dict[str, float]]:
        from sim.workload.slo import parse_slo

        return parse_slo(text, what)

    def take(self, data: Any, what: str) -> dict[str, dict[str, float]]:
        from sim.workload.slo import slo_of

        return slo_of(data, what) if data else {}

    def show(self, value: Any) -> str:
        from sim.workload.slo import slo_text

        return slo_text(value)


class Drafts(Kind):
    """Speculative decoding; one text lists several of its k and acceptance."""

    example = "k=4,acceptance=0.7"

    def several(self, text: str) -> list[str]:
        from sim.workload.draft_options import each_of

        return each_of(text)


class Settings(Kind):
    """A mapping."""

    def take(self, data: Any, what: str) -> dict[str, Value]:
        if not isinstance(data, Mapping):
            raise BadInput(f"{what}, got {type(data).__name__}: a mapping of keys to values; correct it")
        return dict(data)


LIMITS, DRAFTS, SETTINGS = Limits(), Drafts(), Settings()


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table.

    Attributes:
        group, help: of `--help`, without the default. dotted: it is called by its group, `drive.evict`, and has no
            option of its own but `--set drive.evict=VALUE`; others are called `run.batch`, or `batch`, and `--batch`.
        flags: other spellings on a command line; of `dotted`, all. flag_value: what a flag without a value stands for.
        metavar: of its value. top: among the first in `--help`.
        kind: how it is written. choices: all values there are. lists: names there are, beside files. least, most: of
            a number. otherwise: what holds where it is left out, if that is no value of its own.
        identity: whether its VALUE is part of `run_id` (where it is not the default), or what it MEANT.
        bound: whether a lower bound of the time depends on it. decides: whether decisions may depend on it beyond the
            experts that fit; runs that differ in other options alone may share a recording. workload: it says what is
            served, so that runs that differ in it are not ranked against one another.
        title: of a run, `{}` for its value; empty: the name.
        per_policy: it may differ between policies of one comparison. replaces: it stands for figures of a profile, or
            room, so that results list it among what was set. axis: it may vary in a sweep.
        column: of a table; empty: its field, and unit.
        name, field, default: of `RunSpec`, filled in by `rows`; of `flags`, the first stands in messages.
    """

    group: str
    help: str
    dotted: bool = False
    flags: tuple[str, ...] = ()
    flag_value: str | None = None
    metavar: str = "NAME"
    top: bool = False
    kind: Kind = TEXT
    choices: tuple[str, ...] = ()
    lists: Callable[[], Iterable[str]] | None = None
    least: float | None = None
    most: float | None = None
    otherwise: str = ""
    identity: str = VALUE
    bound: bool = True
    decides: bool = True
    workload: bool = False
    title: str = ""
    per_policy: bool = False
    replaces: bool = False
    axis: bool = True
    column: str = ""
    name: str = ""
    field: str = ""
    default: Any = None

    @property
    def key(self) -> str:
        """Its name in files, axes and words."""
        return self.name.removeprefix("run.")

    @property
    def said(self) -> str:
        """How it is written on a command line."""
        return self.flags[0] if self.flags else f"--set {self.name}"

    @property
    def columned(self) -> str:
        """The name of its column."""
        return self.column or (f"{self.field}_{self.kind.unit}" if self.kind.unit else self.field)

    @property
    def shown_default(self) -> str:
        """What holds where it is left out, in words; empty: nothing."""
        usual = self.default is None or self.default == {}
        return self.otherwise or ("" if usual else self.kind.show(self.default))

    def show(self, value: Any) -> str:
        """A value as it can be typed again."""
        return "null" if value is None else self.kind.show(value)

    def titled(self, value: Any) -> str:
        """A value that is not the usual one, as the title of a run has it."""
        said = self.title or f"{self.key.replace('.', ' ').replace('_', ' ')} {{}}"
        return said.format(self.show(value), s="" if value == 1 else "s")

    def check(self, value: Any) -> None:
        """Raises BadInput for a value that cannot be, whatever it meets."""
        if value is None:
            return
        if isinstance(value, str) and (way_out := OLD_VALUES.get((self.field, value))):
            raise BadInput(f"{self.said}, got {value!r}: {way_out}")
        if self.choices and value not in self.choices:
            raise BadInput(f"{self.said}, got {value!r}: no such value; {did_you_mean(value, self.choices)}")
        if self.least is not None and value < self.least:
            usual = f", or leave it out for {self.shown_default}" if self.shown_default else ""
            raise BadInput(f"{self.said}, got {value}: at least {self.least:,}; raise it{usual}")
        if self.most is not None and value > self.most:
            raise BadInput(f"{self.said}, got {value}: at most {self.most:,}; lower it")


def _routers() -> Iterable[str]:
    from sim.workload.routers import routers

    return routers()


def _schedulers() -> Iterable[str]:
    from sim.workload.schedulers import schedulers

    return schedulers()


REQUIRED = {
    "policy": Option(
        group=WHAT,
        top=True,
        metavar="'NAME|FILE.py KEY=VALUE ...'",
        help="What decides: see `moesim policies`; or a file of yours, ./mine.py[:Class]; its parameters after its "
        "name",
        identity=MEANT,
        bound=False,
        axis=False,
    ),
    "hw": Option(
        group=MACHINE,
        top=True,
        flags=("--gpu",),
        metavar="NAME|FILE",
        help="GPU and its machine: see `moesim hw`",
        identity=MEANT,
    ),
}
"""Rows of what has no default."""


class Default(msgspec.Struct, frozen=True):
    """What a field of `RunSpec` is where it is left out, and its row."""

    value: Any
    row: Option

    def __call__(self) -> Any:
        """The value; a mapping is each run's own."""
        return {} if self.value == {} else self.value


def option(default: Any, group: str, help: str, **more: Any) -> Any:  # noqa: A002 - as a row calls it
    """A field with this default, and its row."""
    return msgspec.field(default_factory=Default(default, Option(group=group, help=help, **more)))


class RunSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=False):
    """Everything that decides a run's numbers, as data. Sizes are bytes."""

    policy: str
    model: str | None = option(
        None,
        WHAT,
        "Geometry: see `moesim models`; a file, or the folder or config.json of a checkpoint",
        top=True,
        metavar="NAME|FILE",
        otherwise="the one that the trace names, or one of its routing shape",
        identity=MEANT,
        workload=True,
    )
    precision: str = option(
        "bf16",
        WHAT,
        "Type of the weights: bf16, q4_k_m ... (`moesim models MODEL` lists them)",
        top=True,
        flags=("--quant",),
        metavar="TYPE",
        workload=True,
    )
    trace: str | None = option(
        None,
        WHAT,
        "Routing trace: see `moesim traces`",
        top=True,
        metavar="NAME|FILE",
        otherwise="the bundled one of the model's shape",
        identity=MEANT,
        workload=True,
    )
    engine: str = option(
        "bare",
        WHAT,
        "Serving engine and what it costs: bare, hf, llama_cpp, vllm ... (docs/engine_stacks.md)",
        top=True,
        metavar="NAME|FILE",
        identity=MEANT,
        per_policy=True,
    )
    requests: int | None = option(
        None,
        WHAT,
        "The first N of the split; more are drawn where requests arrive",
        top=True,
        metavar="N",
        kind=WHOLE,
        least=1,
        otherwise="all of the split",
        title="first {} request{s}",
        column="max_requests",
        workload=True,
    )
    split: str = option(
        "test", WHAT, "Requests to score: test, train or all", choices=("test", "train", "all"), workload=True
    )
    predictor: str | None = option(
        None,
        WHAT,
        "What a policy predicts with: trained, a file, or surrogate:0.85, right so often (labelled), which "
        "also draws what a log of expert ids lacks",
        metavar="surrogate:SHARE|FILE",
        otherwise="trained",
        per_policy=True,
        bound=False,
    )
    seed: int = option(
        0,
        WHAT,
        "For whatever is drawn: arrivals, requests, choices of policies",
        metavar="N",
        kind=WHOLE,
        least=0,
        most=2**63 - 1,
        bound=False,
    )
    set: dict[str, Value] = option(
        {},
        WHAT,
        "Any option by its dotted name (docs/options.md), a parameter of the policy by its bare name, or "
        "hw.*, model.*, engine.*: a field of a profile; repeat it",
        metavar="NAME=VALUE",
        kind=SETTINGS,
        identity=MEANT,
        axis=False,
    )

    hw: str
    cpu: str | None = option(
        None,
        MACHINE,
        "Put the card into a machine with another CPU: epyc-7302, ryzen-7950x ... (hwprofiles/cpus)",
        otherwise="the profile's",
        identity=MEANT,
        replaces=True,
    )
    gpus: int = option(
        1,
        MACHINE,
        "GPUs that hold experts",
        top=True,
        metavar="N",
        kind=WHOLE,
        least=1,
        most=MAX_GPUS,
        title="{} GPUs",
        workload=True,
    )
    gpus_map: str | None = option(
        None,
        MACHINE,
        "A file: which GPU each expert lives on",
        dotted=True,
        metavar="FILE",
        otherwise="dealt round-robin",
        identity=MEANT,
        title="experts placed by {}",
    )
    gpus_dispatch: str = option(
        PEER_WAYS[0],
        MACHINE,
        "How tokens cross to experts on other GPUs: per-expert, or all-to-all: together, in a queue",
        dotted=True,
        choices=PEER_WAYS,
        title="dispatch {}",
        decides=False,
    )
    gpus_host_bandwidth: str = option(
        HOST_LINKS_WAYS[0],
        MACHINE,
        "The host's bandwidth for copies to several GPUs: per-link (no limit), shared, or split equally",
        dotted=True,
        choices=HOST_LINKS_WAYS,
        title="host bandwidth {}",
        decides=False,
    )
    parallel: str | None = option(
        None,
        MACHINE,
        "Attention and all that is no expert: gpu0, tensor (1/N on each), data (requests dealt out) or layers "
        "(whole ones, experts included; layers:3/1: by shares)",
        metavar="WAY",
        otherwise="gpu0, or what the serving engine does (llama_cpp: layers)",
        identity=MEANT,
    )
    pcie: str | None = option(
        None,
        MACHINE,
        "Put the card on another link: gen3x4 to gen6x16",
        metavar="gen4x16",
        otherwise="the profile's",
        identity=MEANT,
        replaces=True,
    )

    vram: int | None = option(
        None,
        MEMORY,
        "Cap the memory of each whole GPU",
        metavar="SIZE",
        kind=SIZE,
        otherwise="all that it has",
        replaces=True,
        bound=False,
        decides=False,
    )
    cache: str | None = option(
        None,
        MEMORY,
        "Room for experts, on all GPUs together",
        top=True,
        metavar="40%|12GB|60experts",
        kind=CACHE,
        otherwise="all VRAM left",
        replaces=True,
        bound=False,
        decides=False,
    )
    ram: int | None = option(
        None,
        MEMORY,
        "RAM for experts, in which GB is GiB, as it is sold",
        metavar="SIZE",
        kind=RAM_SIZE,
        otherwise="what the profile's host has",
        bound=False,
        decides=False,
    )
    drive: str | None = option(
        None,
        MEMORY,
        "Read from a drive what RAM does not hold: gen3x4, gen4x4, gen5x4, own; with terms, e.g. "
        "gen4x4:depth=8:block=256KiB:reads=buffered:ahead=2:start=warm:evict=lfu",
        metavar="DRIVE",
        otherwise="none",
        identity=MEANT,
    )
    drive_evict: str | None = option(
        None,
        MEMORY,
        "A cache policy: which experts stay in RAM above a drive",
        dotted=True,
        metavar="NAME|FILE",
        otherwise="lru",
        identity=MEANT,
        title="RAM by {}",
    )
    drive_depth: int | None = option(
        None,
        MEMORY,
        "Reads under way at a time",
        dotted=True,
        metavar="N",
        kind=WHOLE,
        least=1,
        most=65536,
        otherwise="32, or 1 where reads are buffered",
        identity=MEANT,
    )
    drive_block: int | None = option(
        None,
        MEMORY,
        "Bytes of each read, a sector at least",
        dotted=True,
        metavar="SIZE",
        kind=SIZE,
        least=512,
        otherwise="1 MiB, or 128 KiB where reads are buffered",
        identity=MEANT,
    )
    drive_reads: str | None = option(
        None,
        MEMORY,
        "direct, into page-locked memory, or buffered, through the page cache",
        dotted=True,
        choices=("direct", "buffered"),
        otherwise="direct, or buffered where the serving engine maps its file",
        identity=MEANT,
    )
    drive_ahead: int | None = option(
        None,
        MEMORY,
        "Experts that follow in the file, read after each that was missing",
        dotted=True,
        metavar="N",
        kind=WHOLE,
        least=0,
        most=4096,
        otherwise="0",
        identity=MEANT,
    )
    drive_start: str | None = option(
        None,
        MEMORY,
        "What RAM holds at first: nothing (cold), or the end of the file, as loading leaves it (warm)",
        dotted=True,
        choices=("cold", "warm"),
        otherwise="cold, or warm where reads of a mapped file are buffered",
        identity=MEANT,
    )
    kv_memory: int | None = option(
        None,
        MEMORY,
        "A pool for keys and values, given out page by page",
        metavar="SIZE",
        kind=SIZE,
        otherwise="all that the longest contexts need",
        title="KV memory {}",
    )
    kv_page: int = option(
        16,
        MEMORY,
        "Tokens of a page of --kv-memory",
        dotted=True,
        metavar="TOKENS",
        kind=WHOLE,
        least=1,
        title="pages of {} tokens",
    )
    kv_preempt: str = option(
        "recompute",
        MEMORY,
        "What becomes of the last to come where --kv-memory is full: recompute or swap",
        dotted=True,
        choices=("recompute", "swap"),
        title="pre-empted by {}",
    )

    batch: int = option(
        1,
        LOAD,
        "Requests decoded together",
        top=True,
        flags=("--users",),
        metavar="N",
        kind=WHOLE,
        least=1,
        most=MOST_TOKENS,
        workload=True,
    )
    batch_static: bool = option(
        False,
        LOAD,
        "Fill a batch only when the last of it is done; off: continuous batching",
        dotted=True,
        metavar="on|off",
        kind=SWITCH,
        title="static batches",
    )
    arrivals: str | None = option(
        None,
        LOAD,
        "When requests come: poisson:RATE, gamma:RATE,CV, closed:CLIENTS, an Azure, Mooncake or BurstGPT log, "
        "none (back to back)",
        metavar="SOURCE|FILE",
        otherwise="as the trace has it",
        identity=MEANT,
        workload=True,
    )
    arrivals_scale: float = option(
        1.0,
        LOAD,
        "Times the rate of --arrivals",
        dotted=True,
        metavar="X",
        kind=NUMBER,
        title="at {} times the rate",
        workload=True,
    )
    scheduler: str | None = option(
        None, LOAD, "Whose prompt runs next", metavar="NAME|FILE", lists=_schedulers, otherwise="fcfs", identity=MEANT
    )
    prefill_chunk: int | None = option(
        None,
        LOAD,
        "At most N tokens an iteration: decode tokens first, then prompts, in chunks",
        metavar="N",
        kind=WHOLE,
        most=MOST_TOKENS,
        otherwise="a prompt is an iteration of its own",
        title="at most {} token{s} an iteration",
    )
    draft: str | None = option(
        None,
        LOAD,
        "Speculative decoding: k=4,acceptance=0.7 (by position 0.8/0.7/...; accepted=FILE); draft_s=SECONDS "
        "or model=NAME, else n-grams at no cost",
        metavar="K,ACCEPTANCE",
        kind=DRAFTS,
        otherwise="a token at a time",
        identity=MEANT,
        title="drafts {}",
    )
    replicas: int = option(
        1,
        LOAD,
        "Equal machines behind a router, each with its own --gpus",
        metavar="N",
        kind=WHOLE,
        least=1,
        most=MAX_REPLICAS,
        title="{} replicas",
        bound=False,
        workload=True,
    )
    router: str | None = option(
        None,
        LOAD,
        "Which replica a request goes to",
        metavar="NAME|FILE",
        lists=_routers,
        otherwise="round_robin",
        identity=MEANT,
    )
    slo: dict[str, dict[str, float]] = option(
        {},
        LOAD,
        "What requests are promised, 'ttft_s <= 2s, tpot_s <= 200ms'; or a YAML with limits by task",
        metavar="LIMITS|FILE",
        kind=LIMITS,
        otherwise="nothing",
        title="SLO {}",
        axis=False,
        bound=False,
        workload=True,
    )

    sim_simulator: str | None = option(
        None,
        SIMULATION,
        "Simulate by SimPy events, where what shares a memory does so at every instant",
        dotted=True,
        flags=("--simpy",),
        flag_value=SIMPY,
        metavar="core|simpy",
        choices=(CORE, SIMPY),
        otherwise="core, and simpy where lanes slow one another in ways that arithmetic does not know",
        identity=MEANT,
        bound=False,
    )
    sim_contention: bool = option(
        True,
        SIMULATION,
        "Whether what runs at once shares the bandwidth of memory",
        dotted=True,
        metavar="on|off",
        kind=SWITCH,
        bound=False,
        title="contention {}",
        decides=False,
    )
    sim_energy: str | None = option(
        None,
        SIMULATION,
        "Count joules: of the GPUs, or of CPU, RAM and drive too, by the profile's watts",
        dotted=True,
        choices=("gpu", "machine"),
        otherwise="none",
        bound=False,
        title="energy of the {}",
        decides=False,
    )
    sim_hit: str = option(
        "gate",
        SIMULATION,
        "What is a hit: gate, slot, cached or token",
        dotted=True,
        choices=tuple(HITS),
        title="hits by {}",
        bound=False,
        decides=False,
    )

    def __post_init__(self) -> None:
        """One form for what may be written in several."""
        put = msgspec.structs.force_setattr
        if (folded := self.precision.lower()) != self.precision:  # files are called Q4_K_M
            put(self, "precision", folded)
        if self.cache is not None:
            put(self, "cache", CACHE.take(self.cache, "--cache"))
        for row in OPTIONS.with_terms:
            said = getattr(self, row.field)
            if said is not None and ":" in said:
                said, terms = OPTIONS.terms_in(said, row)
                put(self, row.field, said)
                for term, value in terms.items():
                    if getattr(self, term.field) not in (term.default, value):
                        raise BadInput(f"{term.name}, got it twice: one value each; keep one of them")
                    put(self, term.field, value)

    @property
    def together(self) -> int:
        """Neighbours in the order of arrival of which any may share iterations."""
        return self.batch * self.replicas if self.batch > 1 else 1

    @property
    def capacity(self) -> Capacity | None:
        """The room for experts that was asked for; None: all VRAM left."""
        return None if self.cache is None else capacity_of(self.cache)

    @property
    def overrides(self) -> Overrides:
        """What was set of the policy and of profiles, by what it belongs to. Raises BadInput for a CPU said twice."""
        found = grouped(self.set)
        if self.cpu is not None:
            if any(key == "cpu" for key in found.hw):
                raise BadInput("--cpu, got it beside --set hw.cpu: one CPU; leave one of them out")
            found.hw["cpu"] = self.cpu
        return found

    @property
    def several(self) -> Several:
        """How its GPUs work together, all but where experts live. Raises BadInput for a way that cannot be read."""
        way = way_of(self.parallel)
        return Several(self.gpus, self.gpus_dispatch, self.gpus_host_bandwidth, way.name, way.shares)


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run is kept, and what of it; no part of what it is."""

    out: str | None = option(
        None, OUTPUT, "Write configuration, result and tables; missing folders are made", metavar="DIR"
    )
    out_spans: bool = option(
        False,
        OUTPUT,
        "Write what every lane did, too; some hundred rows a token",
        dotted=True,
        metavar="on|off",
        kind=SWITCH,
    )
    timeline: str | None = option(
        None,
        OUTPUT,
        "Write the lanes as trace events for Perfetto: of 20 iterations, or FILE:from=2.5s:iterations=40",
        metavar="FILE",
    )
    timeline_from: str = option(
        "0",
        OUTPUT,
        "The first iteration of a timeline, or when that is under way: 120, or 2.5s",
        dotted=True,
        metavar="N|TIME",
    )
    timeline_iterations: int = option(
        20, OUTPUT, "How many iterations a timeline covers", dotted=True, metavar="N", kind=WHOLE, least=1
    )


class Table:
    """The rows of a class of options, found by name."""

    def __init__(self, cls: type[msgspec.Struct] = RunSpec) -> None:
        self.cls = cls
        self.rows = rows(cls)
        self.by_field = {row.field: row for row in self.rows}
        self.by_name = {row.name: row for row in self.rows} | {row.key: row for row in self.rows}
        self.prefixes = {row.name.partition(".")[0] for row in self.rows}

    @cached_property
    def axes(self) -> tuple[Option, ...]:
        """What may vary in a sweep, beside the policy."""
        return tuple(row for row in self.rows if row.axis)

    @cached_property
    def with_terms(self) -> tuple[Option, ...]:
        """Options whose value is text that may carry others as terms: those called `drive.*` with `drive`."""
        return tuple(row for row in self.rows if type(row.kind) is Kind and self.terms_of(row))

    def terms_of(self, row: Option) -> dict[str, Option]:
        """The rows that are terms of one, by the word of the term."""
        start = f"{row.key}."
        return {one.name.removeprefix(start): one for one in self.rows if one.name.startswith(start)}

    def terms_in(self, text: str, row: Option) -> tuple[str, dict[Option, Any]]:
        """`gen4x4:reads=buffered` as the value and its terms, parted at `:WORD=` of known words alone, so that a colon
        of a path is none. Raises BadInput."""
        known = self.terms_of(row)
        value, *parts = re.split(rf":(?=(?:{'|'.join(known)})=)", text)
        unknown = re.search(r":([a-z_]{2,})=", value)
        if unknown:
            raise BadInput(f"{row.said}, got {unknown[1]!r}: no such term; {did_you_mean(unknown[1], known)}")
        found: dict[Option, Any] = {}
        for part in parts:
            word, _, said = part.partition("=")
            if known[word] in found:
                raise BadInput(f"{row.said}, got {word} twice: one value each; keep one of them")
            found[known[word]] = known[word].kind.read(said, f"{row.said} {value}:{word}")
        return value, found

    def row(self, name: str, what: str = "") -> Option:
        """The row of a name: dotted, or bare for `run.*`. Raises BadInput for a name that went, or that never was."""
        if (row := self.by_name.get(name) or self.by_field.get(name)) is not None:
            return row
        refuse_old(name, f"{what or name}, got {name!r}" if what else name)
        raise BadInput(f"{what or 'option'}, got {name!r}: no such option of a run; {did_you_mean(name, self.keys())}")

    def keys(self) -> list[str]:
        """All names, as files have them."""
        return [row.key for row in self.rows]

    def values(self, given: Mapping[str, Any], where: str = "") -> dict[str, Any]:
        """Named values as fields: names as files or Python have them, values as text or data.

        Raises:
            BadInput: an unknown name, one given twice (also by `set`), or a value that is none.
        """
        found: dict[str, Any] = {}
        within = f"{where}: " if where else ""
        for name, value in given.items():
            if name == "set":
                continue
            row = self.row(name, where)
            if row.field in found:
                raise BadInput(f"{within}{row.name}, got it twice: one value each; keep one of them")
            self._put(found, row, value, f"{within}{name}")
        if given.get("set") is not None:
            set_ = SETTINGS.take(given["set"], f"{within}set")
            for key in [key for key in set_ if self.names(key)]:
                if (row := self.row(key)).field in found:
                    raise BadInput(f"{within}set, got {key!r} beside {row.key}: one value each; keep one of them")
                self._put(found, row, set_.pop(key), f"{within}--set {key}")
            found["set"] = set_
        return found

    def settings(self, items: Iterable[str], what: str = "--set", bare: bool = False) -> dict[str, Any]:
        """`NAME=VALUE` texts as a mapping: an option's value as text, which its row reads; any other's as YAML.

        Args:
            bare: whether a bare name is an option, too.
        """
        given = list(items)
        found = parse_set(given, what)
        for key, _, text in (item.partition("=") for item in given):
            name = key.strip()
            if name in self.by_name and (bare or "." in name):
                found[name] = None if text.strip() == "null" else text.strip()
        return found

    def _put(self, found: dict[str, Any], row: Option, data: Any, what: str) -> None:
        """A value, and its terms."""
        value = None if data is None else row.kind.take(data, what)
        terms: dict[str, Any] = {}
        if isinstance(value, str) and row in self.with_terms:
            value, own = self.terms_in(value, row)
            terms = {term.field: said for term, said in own.items()}
        for field in terms:
            if field in found:
                raise BadInput(f"{self.by_field[field].name}, got it twice: one value each; keep one of them")
        found |= {row.field: value, **terms}

    def names(self, key: str) -> bool:
        """Whether a key of `set` names an option, which only a dotted one does. Raises BadInput for one that went, or
        that is misspelt."""
        prefix, dot, rest = key.partition(".")
        if not dot or prefix in PROFILES:
            return False
        if prefix in OLD_GROUPS:
            raise BadInput(f"--set, got {key!r}: no such name any more; write {OLD_GROUPS[prefix]}.{rest}")
        if key not in self.by_name and prefix in self.prefixes:
            raise BadInput(f"--set, got {key!r}: no such option; {did_you_mean(key, [row.name for row in self.rows])}")
        return key in self.by_name

    def spec(self, given: Mapping[str, Any], where: str = "") -> Any:
        """The run that named values ask for. Raises BadInput."""
        return to_struct(self.values(given, where), self.cls, where or "run")


def rows(cls: type[msgspec.Struct] = RunSpec) -> tuple[Option, ...]:
    """The rows of a class, in its order, each with its field and default."""
    found = []
    for field in msgspec.structs.fields(cls):
        left_out = field.default_factory
        value, said = (left_out.value, left_out.row) if isinstance(left_out, Default) else (None, REQUIRED[field.name])
        own = {"field": field.name, "default": value, "name": field.name.replace("_", ".", 1)}
        if not said.dotted:
            flags = (f"--{field.name.replace('_', '-')}", *said.flags)
            own |= {"name": f"run.{field.name}", "flags": flags}
        found.append(msgspec.structs.replace(said, **own))
    return tuple(found)


OPTIONS = Table(RunSpec)
OUTPUTS = Table(Output)


def unusual(spec: RunSpec) -> list[tuple[Option, Any]]:
    """Options whose value is not the default, in the order of the table, with it."""
    return [(row, value) for row in OPTIONS.rows if (value := getattr(spec, row.field)) != row.default]


def spec_of(given: Mapping[str, Any], where: str = "") -> RunSpec:
    """The run that named values ask for: names as files or Python have them, values as text or data.

    Raises:
        BadInput: naming what is wrong, and how to write it.
    """
    spec: RunSpec = OPTIONS.spec(given, where)
    return spec


def option_meant(key: str, value: Any) -> str:
    """What to write for a bare key of `set` that is an option without its group, or was one; empty where it is none."""
    name, _, example = OLD_NAMES.get(key, key).partition("=")
    found = [row for row in OPTIONS.rows if name in (row.name, row.key)]
    found += [row for row in OPTIONS.rows if row.name.rpartition(".")[2] == name]
    if not found:
        return ""
    row = found[0]
    said = example or (row.show(value) if value is None or (row.kind is SWITCH and isinstance(value, bool)) else value)
    dotted = f"--set {row.name}={said}"
    return f"write {row.flags[0]} {said} or {dotted}" if row.flags and row.flag_value is None else f"write {dotted}"
