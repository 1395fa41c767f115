"""The trained small model under every policy, anew: `python -m tools.validation.rerun_generation`, some minutes.

It routes itself, 16 tokens of one request under each policy, with room for half of its experts (for all of them where a
policy needs more room, as its predictor is larger than this model's experts, or as it keeps whole layers). Lossless
policies come first. No times are taken, so the machine may be busy.
"""

from __future__ import annotations

from pathlib import Path

import click

CHECKPOINT = "mixtral-8x7b-small"
EXPERTS, OUTPUTS = 128, 16


def command() -> None:
    """Speak, keep, print the table anew in docs/validate.md."""
    from sim.base.errors import DoesNotFit
    from sim.base.files import write_json
    from sim.base.tables import IN_A_PIPE
    from sim.options import RunSpec
    from sim.policy.registry import policies
    from sim.real.generate import generated
    from sim.real.validate_text import kept_text
    from sim.run import assemble, prepare
    from tools.validation.remeasure import HERE, refresh
    from traces.record.load import named

    folder, specs = Path(named(CHECKPOINT)), []
    for name in sorted(policies(), key=lambda name: "lossy" in policies()[name].traits):
        for experts in (EXPERTS, None):
            spec = RunSpec(
                policy=name, hw="rtx3090", model=str(folder), precision="fp32", requests=1, cache=f"{experts}experts"
            )
            try:
                setup = prepare(spec)
                try:
                    assemble(setup)
                finally:
                    setup.close()
            except DoesNotFit:
                continue
            specs.append(spec)
            break
        else:
            raise click.ClickException(f"{name} does not fit, however much room it has")
    data = generated(specs, folder, "cpu", OUTPUTS)
    write_json(HERE / f"{CHECKPOINT}.json", data)
    table, page = kept_text([data], IN_A_PIPE), HERE.parents[1] / "docs" / "validate.md"
    if page.is_file():
        refresh(page, table, CHECKPOINT)
    click.echo(table)
    if data["wrong"]:
        raise click.ClickException("; ".join(data["wrong"]))


if __name__ == "__main__":
    command()
