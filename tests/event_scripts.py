"""Scripts of `simpy_oracle` on the machine on SimPy events; tests compare what the two show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
from easy_numbers import figure, hardware
from simpy_oracle import Observed

from sim.machine.events.bill import TERMS, WAYS
from sim.machine.events.machine import EventMachine
from sim.machine.figures import Figures
from sim.machine.memory_law import Sharing
from sim.machine.price import Launch, Price
from sim.machine.protocol import DEMAND, SPECULATIVE
from sim.machine.several import ALONE
from sim.policy.pieces import Piece
from sim.policy.tickets import Ticket
from sim.profiles.hardware import Contention


class Knobs(SimpleNamespace):
    """Stands for `Cost` and its `copies`: every price is what the script says."""

    several = ALONE
    drive = None

    n_dense_before = (0,) * 9  # before each of eight layers, and after the last

    @property
    def copies(self) -> Knobs:
        return self

    def h2d_s(self, n_bytes: float) -> float:
        """Activations say their seconds; a piece, whose bytes are whole, the number of its copy."""
        return n_bytes if isinstance(n_bytes, float) else float(self.seconds_of[n_bytes])

    def expert_s(self, n_bytes: int, frac: float) -> float:
        return self.h2d_s(n_bytes)

    def d2h_s(self, seconds: float) -> float:
        return self.down_s

    def p2p_s(self, n_bytes: int) -> float:
        return 0.0

    def activation_bytes(self, n_tokens: int) -> float:
        return self.up_s

    def expert(self, n_tokens: int, precision: str, frac: float, kernels_frac: float) -> Price:
        return Price(self.seconds, 0)

    def expert_cpu(self, n_tokens: int) -> Price:
        return Price(self.seconds, 0)

    expert_cpu_joined = expert_cpu


def launch(first: float, whole: float) -> Launch:
    made = Launch(4, 0.0, 0.0)  # four kernels: the last one takes a quarter of the time
    made.first_s, made.all_s = first, whole
    return made


def replay(script: list[tuple[Any, ...]], two: bool, terms: dict[str, float]) -> tuple[Observed, EventMachine]:
    """The script with these terms of contention."""
    seen = Observed()

    def spans(lane: str, *rest: Any) -> None:
        start, end = rest[-2:]
        if lane != "host":
            name = lane if lane[-1].isdigit() or lane in ("d2h", "cpu") else f"{lane}0"
            seen.spans.append((name, start, end))

    contention = Contention(**{term: figure(terms.get(term, 0.0)) for term in (*TERMS, *WAYS)})
    link = SimpleNamespace(h2d_bytes_per_s=1.0, d2h_bytes_per_s=1.0, shared_bytes_per_s=1.0)
    hw = msgspec.structs.replace(hardware(), contention=contention)
    cost = Knobs(
        figures=SimpleNamespace(entries=[()] * 16),
        launches=SimpleNamespace(grouped=False, sync_s=0.0, copy_s=0.0, hybrid_layer_s=0.0, calls=lambda frac: 1),
        q_predictor={"assumed": 0},
        up_s=0.0,
        gpu_of=[0, 0],
        hw=hw,
        sharing=Sharing(hw, link, ALONE, Figures(), True),  # type: ignore[arg-type]
    )
    machine = EventMachine(cost, 2 if two else 1, spans)  # type: ignore[arg-type]
    cost.seconds_of = []
    tickets: list[Ticket] = []
    for op, *rest in script:
        if op == "host":
            machine.predict(rest[0], "host", False, "assumed")
        elif op == "run":
            gpu, first, whole, cost.seconds, after = rest
            cost.launches.expert = launch(first, whole)
            piece = Piece(0, 0, 0.0, 1.0, "bf16", gpu, 0, 0)
            tickets.append(machine.expert(piece, 1, 0.0, tuple(tickets[t] for t in after), ()))
        elif op == "block":
            first, whole, seconds = rest
            cost.launches.gate, machine._gate_price = launch(first, whole), Price(seconds, 0)
            tickets.append(machine.gate(0))
            machine._gate = None  # the way to a second GPU is not part of these scripts
        elif op == "copy":
            gpu, cost.launches.copy_s, seconds, demand, after = rest
            cost.seconds_of.append(seconds)
            piece = Piece(0, 0, 0.0, 1.0, "bf16", gpu, len(cost.seconds_of) - 1, 0)
            priority = DEMAND if demand else SPECULATIVE
            tickets.append(machine.copy(piece, priority, 0.0, tuple(tickets[t] for t in after)))
        elif op == "cpu":
            cost.launches.cpu_s, cost.down_s, cost.seconds, cost.up_s = rest
            tickets.append(machine.cpu_expert(0, 0, 1))
        elif op == "join":
            machine.join(tickets[rest[0]])
        elif op == "sync":
            machine.sync(tickets[rest[0]])
        elif op == "promote":
            machine.promote(tickets[rest[0]])
        elif op == "cancel":
            seen.answers.append(("cancel", machine.cancel(tickets[rest[0]])))
        elif op == "look":
            ticket = tickets[rest[0]]
            seen.answers.append(("look", machine.ended(ticket) and not getattr(ticket, "cancelled", False)))
    seen.host_s = machine.now_s
    machine.drain()
    assert not any(stream.under_way for stream in machine.streams)
    assert not any(link.queue for link in machine.h2d)
    seen.ends = [None if getattr(t, "cancelled", False) else t.end_s for t in tickets]
    seen.spans.sort()
    return seen, machine
