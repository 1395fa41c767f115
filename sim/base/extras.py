"""Libraries that come with an extra: whatever needs one says the one command that brings it.

A plain install simulates, compares and checks; `pyproject.toml` says what each extra adds.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from sim.base.errors import BadInput

EXTRAS = {
    "pandas": "tables",
    "pyarrow": "tables",
    "scipy": "fit",
    "distributed": "cluster",
    "torch": "torch",
    "transformers": "torch",
    "kaleido": "images",
}
"""The extra that each library comes with."""


def need(what: str, *libraries: str) -> None:
    """Find out whether libraries are installed, before work is done that needs them; none is imported.

    Args:
        what: the verb, option or attribute that needs them, as the user wrote it.

    Raises:
        BadInput: one is missing; the message ends in the command that installs it.
    """
    for library in libraries:
        if sys.modules[library] is None if library in sys.modules else find_spec(library) is None:
            extra = EXTRAS[library]
            raise BadInput(
                f"{what}, got no {library}: it comes with the extra `{extra}`; pip install 'moe-offload-sim[{extra}]'"
            )
