"""Scripts for lanes, as `simpy_oracle` describes them: legal, of whole seconds, drawn by hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

OPS = (
    *["copy"] * 5,
    *["run"] * 3,
    *["block"] * 2,
    *["promote"] * 2,
    *["sync"] * 2,
    "cpu",
    "join",
    "cancel",
    "look",
    "host",
)


@st.composite
def scripts(draw: Any, gpus: int) -> list[tuple[Any, ...]]:
    """Legal scripts of whole seconds, so that ties are common and every sum is exact."""
    seconds, some = st.integers(0, 4).map(float), st.integers(1, 6).map(float)
    gpu = st.integers(0, gpus - 1)
    launch_cpu_s = draw(seconds)  # one for the whole script: a machine asks for it once
    script: list[tuple[Any, ...]] = []
    kinds: list[str] = []
    for _ in range(draw(st.integers(1, 14))):
        op = draw(st.sampled_from(OPS))
        copies = [t for t, kind in enumerate(kinds) if kind == "copy"]
        if op == "host":
            script.append((op, draw(some)))
            continue
        if op in ("run", "block"):
            first, more = draw(seconds), draw(seconds)
            if op == "block":
                script.append((op, first, first + more, draw(seconds)))
            else:
                some_of = [t for t, kind in enumerate(kinds) if kind != "gone"]
                after = draw(st.lists(st.sampled_from(some_of), max_size=2)) if some_of else []
                script.append((op, draw(gpu), first, first + more, draw(some), after))
        elif op == "copy":
            after = draw(st.lists(st.sampled_from(range(len(kinds))), max_size=2)) if kinds else []
            script.append((op, draw(gpu), draw(seconds), draw(some), draw(st.booleans()), after))
        elif op == "cpu":
            script.append((op, launch_cpu_s, draw(some), draw(some), draw(some)))
        else:
            pool = {"cancel": copies, "promote": copies, "look": copies}
            choice = pool.get(op, list(range(len(kinds))))
            if choice:
                ticket = draw(st.sampled_from(choice))
                if op == "cancel":  # who waits for it goes on; nobody may begin to afterwards
                    kinds[ticket] = "gone"
                if op in ("sync", "join") and kinds[ticket] == "gone":
                    continue
                script.append((op, ticket))
            continue
        kinds.append(op)
    return script
