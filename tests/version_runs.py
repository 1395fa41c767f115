"""Every policy on one trace, as one JSON object: for `test_same_bits.py`.

By "policy batch gpus": the result without `wall_s`, or the message of a policy that cannot run there.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from untaught import UNTAUGHT

from sim.base.errors import MoesimError
from sim.base.json import finite
from sim.options import RunSpec
from sim.policy.registry import policies
from sim.run import execute, prepare

SHAPES = ((1, 1), (2, 1), (1, 2), (2, 2))  # batch, GPUs


def runs(trace: str) -> dict[str, Any]:
    """Results by "policy batch gpus"."""
    found: dict[str, Any] = {}
    model = None
    for name in policies():
        for batch, gpus in SHAPES:
            # A card with room for half of the experts, so that there is something to decide.
            spec = RunSpec(
                policy=name, hw="a6000", trace=trace, model=model, batch=batch, gpus=gpus, set=UNTAUGHT.get(name, {})
            )
            try:
                setup = prepare(spec)
                model = setup.model.id
                result = execute(setup).result
                setup.close()
            except MoesimError as error:
                found[f"{name} {batch} {gpus}"] = str(error)
            else:
                result.wall_s = 0.0
                found[f"{name} {batch} {gpus}"] = result.to_dict()
    return dict(finite(found))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(runs(sys.argv[1])))
