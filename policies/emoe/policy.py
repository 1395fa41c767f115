"""eMoE (arXiv 2503.06823): a predicted subset of experts per layer, refreshed every few dozen prompts.

Source: arXiv 2503.06823, "eMoE: Task-aware Memory Efficient Mixture-of-Experts-Based (MoE) Model Inference". No public
code. Sections and equations are cited at each step. Its request scheduler (section 3.5) is not part of this.

What is not on the GPU is not fetched: its tokens go to the next-ranked expert that is (lossy). The trace fixes what the
gates say, so that what rerouting does to later layers and tokens is outside the replay (open loop).

Two readings of when experts are loaded are both in the text (`reload`). Section 3.3: a prompt that is not the p-th is
processed "using the experts already loaded on the GPU without invoking the predictor". Section 3.4: the loader runs
"each time one or more new input requests are scheduled", which at batch 1 is every request, with the prediction last
made. The default is section 3.3's: sections 1 and 2.2 repeat it ("periodically loads and reuses experts"), and Figures
12 and 16 agree with it alone (docs/emoe.md).

Left open by the text, and settled so: before the first prompt the loader runs once, with what the store split tells
(the text has all experts there until the predictor is first invoked: `first=all`); at an invocation equation 2 counts
the requests that run or are to be scheduled then, so at batch 1 the p-th prompt's task decides for the p - 1 prompts
after it; a layer nobody is sensitive in keeps
its experts; where fewer than k experts are resident, what is left over of a token's choice is dropped. Several GPUs:
each keeps the best of those that live on it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from policies.common.placement import asked_by_layer, each_layer, homes
from policies.emoe.predict import (
    Counts,
    Transformer,
    counts_of_request,
    digits,
    find,
    frequencies,
    published_s,
    read,
)
from policies.emoe.tasks import Recogniser, by_tokens, choose, expected_tokens, insensitive_layers, profiled, reroute
from sim.policy import (
    SURROGATE,
    Assignment,
    BadInput,
    Evict,
    Gate,
    Piece,
    Policy,
    Predict,
    Prefetch,
    RequestInfo,
    RunGpu,
    Steps,
    StoreSplit,
    Surrogate,
    Ticket,
    View,
    param,
)

PREDICTOR_BYTES = 2 * 108_000_000  # 0.108 B parameters (Table 2), 16 bits: 0.24 % of Mixtral-8x7B (section 3.2.2)
LARGEST_SHARE = 0.013  # section 3.2.2: 0.24 % to 1.3 % of the MoE model; smaller models take a smaller predictor


class Emoe(Policy):
    """Predicts which experts prompts of each task will use, loads the best L of each layer, and reroutes the rest."""

    name = "emoe"
    title = "eMoE: experts predicted by task"
    source = "arXiv 2503.06823"
    traits = frozenset({"lossy"})
    needs = frozenset({"experts", "scores", "tasks"})
    predictor: str = param(
        "trained",
        "trained: the bundled XLNet of the traced model (section 3.2.2); a file that `moesim train emoe` wrote; "
        "frequency, a running count per task (not published); or surrogate:SHARE, a labelled stand-in that names "
        "this share of a prompt's k most used experts (1: perfect)",
        file=True,
    )
    form: str = param(
        "A", "eMoE-A: all layers at once from the previous prompt; eMoE-L: layer by layer (section 3.2.2)", ("A", "L")
    )
    p: int = param(
        40,
        "prompts between invocations of the predictor (section 3.3); 1 is eMoE-E (section 5.4)",
        within=(1, 1_000_000),
    )
    reload: str = param(
        "invocation",
        "when experts are loaded: at an invocation of the predictor, and nothing between two (section 3.3: other "
        'prompts use "the experts already loaded"), or at every request that is scheduled, by the prediction last '
        "made (section 3.4)",
        ("invocation", "request"),
    )
    experts_per_layer: int | None = param(
        None,
        "L: experts kept per layer (section 3.4, set by the user); left out: what the budget holds",
        within=(1, 4096),
    )
    kept_frac: float | None = param(
        None,
        "L as a share of a layer's experts, rounded: most of the paper's figures keep 0.6; experts_per_layer, where "
        "given, goes first",
        within=(0.0, 1.0),
    )
    selection: str = param(
        "predicted",
        "predicted, or random: L experts at random, drawn anew every p prompts (the baseline of section 5.4)",
        ("predicted", "random"),
    )
    first: str = param(
        "predicted",
        "on the GPU until the predictor is first invoked: the loader's choice from the store split, or all experts "
        "the budget holds (section 3.3: all)",
        ("predicted", "all"),
    )
    task_aware: bool = param(
        True,
        "weigh experts by the tasks that run and are sensitive (section 3.4); false: by all tasks alike (the "
        "task-agnostic loading of Figure 13)",
    )
    threshold: float = param(
        0.85, "similarity above which a layer's random routing does not matter (section 3.4)", within=(-1.0, 1.0)
    )
    sensitivity: str = param(
        "measured",
        "measured: what the predictor's file says of the traced model; or a JSON file of a profile of your own "
        '(section 3.4), task -> layers, from the input on, whose routing does not matter to it: {"chat": 12}',
        file=True,
    )
    invocation: str = param(
        "waited",
        "waited: everything waits for the predictor, whose experts serve the p-th prompt (section 3.3); aside: it is "
        "a process of its own (section 4), nothing waits, and the experts it names are loaded when the next request "
        'is dispatched (section 3.4: "in the next dispatching of the inference requests")',
        ("waited", "aside"),
    )
    classifier: str = param(
        "label",
        "a prompt's task: `label`, the trace's, or `keywords`, profiled on the store split and counted in the "
        "prompt's tokens (section 3.2.1; needs token_ids)",
    )
    task_accuracy: float = param(
        1.0,
        "share of requests whose task is recognised, the others are taken for another one (section 5.6.1, Figure 19)",
        within=(0.0, 1.0),
    )
    predict_s: float | None = param(
        None,
        "seconds per invocation, beside the copies; left out: published seconds less those of its copies, which they "
        "include: eMoE-A 0.334, eMoE-L 4.211 for 32 layers; on OpenMoE 0.381 and 1.387 (section 5.7)",
        within=(0.0, 3600.0),
    )
    memory_bytes: int | None = param(
        None,
        "GPU memory of the predictor; published: 0.108 B parameters (Table 2), 16 bits each, at most 1.3 % of the "
        "experts (section 3.2.2)",
        within=(0, 2**40),
    )
    seed: int = param(0, "for random selection and mistaken tasks", within=(0, 2**63 - 1))

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        if self.classifier not in ("label", "keywords"):
            raise BadInput(f"parameter emoe.classifier, got {self.classifier!r}: write label or keywords")
        if self.classifier == "keywords":
            self.needs = self.needs | {"token_ids"}
        # A model predicts, so its time and memory are charged; a surrogate stands for one.
        self._is_trained = self.selection == "predicted" and self.predictor != "frequency"
        self._is_drawn = self._is_trained and self.predictor.startswith(SURROGATE)
        if self._is_drawn:
            self.labels = (SURROGATE,)

    # -- before the run ---------------------------------------------------------------------------------------------

    def min_experts(self, view: View) -> int:
        least = min(view.top_k, self.experts_per_layer or self._share(view) or view.top_k)
        gpus = range(view.n_gpus)
        return max(sum(asked_by_layer(least, gpu, view)) for gpu in gpus)

    def fits_smaller(self, view: View) -> str:
        one = max(sum(asked_by_layer(1, gpu, view)) for gpu in range(view.n_gpus))
        if one <= min(view.capacity_of(gpu) for gpu in range(view.n_gpus)):
            return "keep one expert of each layer, --set experts_per_layer=1"
        return ""

    def _share(self, view: View) -> int:
        """L where it is given as a share of a layer's experts; 0 where it is not."""
        return 0 if self.kept_frac is None else max(1, round(self.kept_frac * view.n_experts))

    def predictor_bytes(self, view: View) -> int:
        if not self._is_trained:
            return 0
        if self.memory_bytes is not None:
            return int(self.memory_bytes)
        return min(PREDICTOR_BYTES, int(LARGEST_SHARE * view.n_layers * view.n_experts * view.expert_bytes))

    def bind(self, view: View) -> None:
        self.settings["memory_bytes"] = self.predictor_bytes(view)
        self._said: tuple[Ticket, ...] | None = None  # a prediction that ran aside and has not been loaded
        if self.predict_s is None:
            told_s = published_s(self.form, view.model_name, view.n_layers)
            self.settings["predict_s"] = told_s if self._is_trained else 0.0
        gpus = range(view.n_gpus)
        self._quota = [each_layer(view.capacity_of(gpu), gpu, view) for gpu in gpus]
        room = min(sum(self._quota[gpu] for gpu in {*row}) for row in homes(view).tolist())  # of every layer
        per_layer = self.experts_per_layer or self._share(view) or min(room, view.n_experts)
        self._per_layer = self.settings["experts_per_layer"] = int(per_layer)
        if self._per_layer > max(room, view.top_k):
            raise BadInput(
                f"parameter emoe.experts_per_layer, got {self._per_layer}: the expert budget holds "
                f"{room} per layer; lower it, or raise the budget"
            )
        self._chance = random.Random(self.seed)  # noqa: S311 - reproducible, not secret
        self._resident: list[set[int]] = [set() for _ in range(view.n_layers)]
        self._loading: list[tuple[Ticket, ...]] = [()] * view.n_layers  # the last copies into each layer
        self._running: dict[int, RequestInfo] = {}
        self._task: dict[int, int] = {}
        self._counts: dict[int, Counts] = {}  # tokens per (layer, expert) of the requests that run
        self._index = 0
        self._n = dict.fromkeys(("invocations", "loaded", "right_tasks", "foretold", "right"), 0)

    def learn(self, store: StoreSplit) -> None:
        """Profiles (section 3.4) and the past (section 3.2.2) from the store split; the trained predictor's file."""
        trace = store.trace
        self._trace = trace
        self._tasks = tuple(trace.header.tasks)
        shape = (trace.n_layers, trace.n_experts)
        self._known = np.zeros((len(self._tasks), *shape), dtype=np.int64)
        self._past: Counts = np.zeros(shape, dtype=np.int64)
        outputs: list[list[int]] = [[] for _ in self._tasks]
        for r in store.requests:
            self._past = counts_of_request(trace, r)
            self._known[self._tasks.index(r.task)] += self._past
            outputs[self._tasks.index(r.task)].append(r.outputs)
        every = [n for lengths in outputs for n in lengths]
        self._expected_outputs = [round(sum(n) / len(n)) if n else 0 for n in (own or every for own in outputs)]
        own = self._is_trained and not self._is_drawn
        self._transformer = self._trained(shape) if own else None
        if self._is_drawn:
            self._surrogate = Surrogate(self.predictor, trace.top_k, trace.n_experts, self.seed)
        self._sensitive = np.ones((len(self._tasks), trace.n_layers), dtype=bool)
        if self.sensitivity != "measured":
            for at, n_insensitive in enumerate(profiled(Path(self.sensitivity), self._tasks, trace.n_layers)):
                self._sensitive[at, :n_insensitive] = False
        elif self._transformer is not None and self._transformer.similarity is not None and self.task_aware:
            for at, task in enumerate(self._tasks):
                measured = self._transformer.similarity[self._transformer.tasks.index(task)] / 10_000
                self._sensitive[at] = ~insensitive_layers(measured, self.threshold)
        self._recogniser = Recogniser(store, self.classifier == "keywords", self.task_accuracy, self._chance)

    def _trained(self, shape: tuple[int, int]) -> Transformer:
        model = self._trace.header.model
        path = find(model) if self.predictor == "trained" else Path(self.predictor)
        if path is None:
            raise BadInput(
                f"policy emoe, got a trace of {model!r}: no predictor is bundled for that model; train one with "
                f"`moesim train emoe --trace {self._trace.path} --out FILE` and name it with --predictor FILE, or take "
                "--predictor frequency"
            )
        return read(path, *shape, self._trace.top_k, self._tasks)

    def initial(self, view: View) -> Iterable[Piece]:
        """What the loader chooses before anybody asked: every task counts alike."""
        self._shares = self._predict(view)
        n = view.n_experts if self.first == "all" else self._per_layer
        for layer, expected in enumerate(self._shares.sum(axis=0)):
            self._resident[layer] = self._choose(layer, n, expected, view)
            for expert in sorted(self._resident[layer]):
                yield view.piece(layer, expert)

    # -- periodic invocation (section 3.3) --------------------------------------------------------------------------

    def request_start(self, request: RequestInfo, view: View) -> Steps:
        task = self._recogniser.task_of(request)
        self._running[request.index], self._task[request.index] = request, task
        self._n["right_tasks"] += self._tasks[task] == request.task
        due = self._index % self.p == 0 and (self._index > 0 or self._is_drawn)
        if due:
            self._shares = self._foreseen(request, task, view) if self._is_drawn else self._predict(view)
            self._n["invocations"] += 1
        said, self._said = self._said, None
        now = due and self.invocation == "waited"
        loads = (now or said is not None or self.reload == "request") and (
            self.first == "predicted" or self._index >= self.p
        )
        if due:
            self._said = None if now else ()
            invocation_s = self._invocation_s(view)
            if invocation_s > 0.0:
                ticket = yield Predict(invocation_s, "side", blocking=now)
                self._said = None if now else (ticket,)
        self._index += 1
        self._past = self._counts[request.index] = np.zeros_like(self._past)
        if loads:
            yield from self._load(view, said or ())

    def _invocation_s(self, view: View) -> float:
        """What the predictor takes beside the copies: published seconds include those (section 5.7)."""
        told_s = float(self.settings["predict_s"] or 0.0)
        if self.predict_s is not None or not told_s:
            return told_s
        gpu_of, copy_s = homes(view).tolist(), view.prices.load_s()
        for layer, _, chosen in self._changes(view):
            new = [gpu_of[layer][expert] for expert in chosen - self._resident[layer]]
            told_s -= max(map(new.count, new), default=0) * copy_s  # links side by side, a layer after the other
        return max(0.0, told_s)

    def _predict(self, view: View) -> Counts:
        """f of section 3.4 by task, [tasks, L, E]."""
        shape = (len(self._tasks), view.n_layers, view.n_experts)
        if self.selection == "random":
            drawn = [self._chance.getrandbits(16) + 1 for _ in range(view.n_layers * view.n_experts)]
            return np.broadcast_to(np.array(drawn).reshape(1, *shape[1:]), shape)
        if self._transformer is None:
            return frequencies(self._known)
        of = self._transformer.tasks.index
        return np.stack([self._transformer.predict(self.form, self._past, of(task)) for task in self._tasks])

    def _foreseen(self, request: RequestInfo, task: int, view: View) -> Counts:
        """A surrogate's answer: the prompt's own shares, of which it takes some experts for others."""
        counts = counts_of_request(self._trace, request)
        found = self._shares.copy()
        for layer, (own, ranked) in enumerate(zip(frequencies(counts), digits(counts, view.n_experts), strict=True)):
            named = self._surrogate.name(request.first_row, layer, ranked[: view.top_k].tolist())
            order = named + [expert for expert in ranked.tolist() if expert not in named]
            found[task, layer, order] = own[ranked]
            found[task, layer, named] += 1  # who is named comes before its equals
        return found

    # -- task-aware loading (section 3.4) ---------------------------------------------------------------------------

    def _expected(self) -> Counts:
        """Equation 2 summed over task types, [L, E]."""
        if not self.task_aware or self.selection == "random":
            return np.asarray(self._shares.sum(axis=0))
        total = np.zeros(self._shares.shape[1:], dtype=np.int64)
        for task in sorted(set(self._task.values())):
            own = [self._running[index] for index, of in self._task.items() if of == task]
            total += expected_tokens(
                sum(r.prompt_len for r in own),
                len(own),
                self._expected_outputs[task],
                self._sensitive[task],
                self._shares[task],
            )
        return total

    def _choose(self, layer: int, n: int, expected: Counts, view: View) -> set[int]:
        return choose(expected, n, lambda expert: view.piece(layer, expert).gpu, self._quota)

    def _changes(self, view: View) -> Iterator[tuple[int, Counts, set[int]]]:
        """Layers whose routing somebody minds, expected tokens, and the experts that are to be there."""
        for layer, expected in enumerate(self._expected()):
            if expected.any():
                yield layer, expected, self._choose(layer, self._per_layer, expected, view)

    def _load(self, view: View, before: tuple[Ticket, ...]) -> Steps:
        """Section 4: asynchronous copies, those of a layer once the copies of the layer before are complete, the first
        ones after `before`."""
        for layer, expected, chosen in self._changes(view):
            yield [Evict(view.piece(layer, expert)) for expert in sorted(self._resident[layer] - chosen)]
            tickets: tuple[Ticket, ...] = ()
            for expert in by_tokens(chosen - self._resident[layer], expected):
                tickets = (*tickets, (yield Prefetch(view.piece(layer, expert), 0.0, before)))
            self._n["loaded"] += len(tickets)
            self._resident[layer] = chosen
            if tickets:
                before = self._loading[layer] = tickets

    # -- serving ----------------------------------------------------------------------------------------------------

    def assign(self, gate: Gate, view: View) -> Assignment | None:
        self._observe(gate)
        resident = self._resident[gate.layer]
        if resident.issuperset(gate.needs):
            return None
        routed = reroute(gate.scores, gate.ids, resident)
        return Assignment(routed)  # the engine applies the weights that the model would give them

    def gate_done(self, gate: Gate, view: View) -> Steps:
        """Section 4: a layer waits for its own loading, all of it, and for no other layer's."""
        yield [RunGpu(expert, self._loading[gate.layer]) for expert in gate.needs]

    def _observe(self, gate: Gate) -> None:
        """What the gates choose is the past that the next prediction starts from, whether it could be had or not."""
        ranges = gate.iteration.ranges
        if len(ranges) == 1:
            row = self._counts[ranges[0].request.index][gate.layer]
            for expert, n in gate.needs.items():
                row[expert] += n
            return
        at, ids = 0, gate.ids
        for r in ranges:
            n = r.stop_row - r.start_row
            counts = np.bincount(ids[at : at + n].ravel(), minlength=self._past.shape[1])
            self._counts[r.request.index][gate.layer] += counts
            at += n

    def request_end(self, request: RequestInfo, view: View) -> None:
        counts, task = self._counts.pop(request.index), self._task.pop(request.index)
        del self._running[request.index]
        self._known[task] += counts
        truth, said = digits(counts, view.top_k), digits(self._shares[task], view.top_k)
        self._n["right"] += int((truth[:, :, None] == said[:, None, :]).any(axis=2).sum())
        self._n["foretold"] += truth.size

    def stats(self) -> dict[str, float]:
        """right_frac: of a request's k most used experts by layer, those among the k foretold; tasks_right_frac: of
        requests, those whose task was recognised; loaded_per_request: experts copied.
        """
        n, requests = self._n, max(self._index, 1)
        return {
            "invocations": n["invocations"],
            "loaded_per_request": n["loaded"] / requests,
            "right_frac": n["right"] / n["foretold"] if n["foretold"] else 0.0,
            "tasks_right_frac": n["right_tasks"] / requests,
        }
