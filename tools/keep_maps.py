"""Write the expert maps that FineMoE learns of the bundled traces, for `policies/data`: `python tools/keep_maps.py`.

To be run again where a bundled trace changes, or FineMoE's store: a file of another origin is left unread, and
`tests/test_policy_fine_moe.py` says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import policies
from policies.fine_moe.tracks import KEPT
from sim.options import RunSpec
from sim.policy import keep
from sim.run import assemble, prepare, training_split
from traces.format.bundled import bundled_traces


def main() -> None:
    folder = Path(policies.__file__).parent / "data"
    for name in bundled_traces():
        file = folder / f"{name}{KEPT}"
        file.unlink(missing_ok=True)  # else it would be learned from itself
        setup = prepare(RunSpec(policy="fine_moe", hw="h200", trace=name))
        try:
            assemble(setup)
            policy: Any = setup.policy
            maps = policy._track
            keep(file, maps.origin(training_split(setup, policy)), maps.store.kept())
        finally:
            setup.close()


if __name__ == "__main__":
    main()
