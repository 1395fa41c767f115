"""What makes a run: click's options of the rows of `sim.options`, and the run that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.base.errors import BadInput
from sim.cli.unique_options import Grouped
from sim.options import OPTIONS, Option, RunSpec, Table

if TYPE_CHECKING:
    from sim.run import Setup

SEVERAL, NUMBERS = "A,B,...", "A,B | FROM:TO:STEP"


class Value(click.ParamType[Any]):
    """The value of a row, read as the row says."""

    def __init__(self, row: Option) -> None:
        self.row, self.name = row, row.metavar

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self.row.kind.read(value, self.row.said) if isinstance(value, str) else value


class RowOption(Grouped):
    """The option of a row, whose help lists what there is only where somebody asks for it."""

    def __init__(self, decls: list[str], row: Option, axis: bool = False, **attrs: Any) -> None:
        self.row = row
        if row.flag_value is not None:
            attrs["flag_value"] = row.flag_value
        elif axis:
            attrs |= {"multiple": True, "metavar": NUMBERS if row.kind.ranged else SEVERAL}
        else:
            attrs |= {"metavar": row.metavar, "type": Value(row)}
        super().__init__(decls, group=row.group, top=row.top, **attrs)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        row = self.row
        listed = f": {', '.join(row.lists())}, or ./mine.py" if row.lists else ""
        usual = f"; default: {row.shown_default}" if row.shown_default else ""
        self.help = f"{row.help}{listed}{usual}."
        return super().get_help_record(ctx)


def option_of(row: Option, axis: bool = False) -> Callable[..., Any]:
    """A row's option as a decorator. axis: it takes several values, which `sim.studies.sweep.values` reads."""
    return click.option(*row.flags, row.field, cls=RowOption, row=row, axis=axis)


def setting(axis: bool = False) -> Callable[..., Any]:
    """`--set`, which takes all rows of the table, and what is no option of a run."""
    row = OPTIONS.by_field["set"]
    metavar = "NAME=A,B" if axis else row.metavar
    text = f"{'Values of any' if axis else 'Any'}{row.help.removeprefix('Any')}."
    return click.option("--set", "settings", cls=Grouped, group=row.group, multiple=True, metavar=metavar, help=text)


def run_options(
    axis: bool = False, without: Collection[str] = ("policy",), table: Table = OPTIONS
) -> Callable[..., Any]:
    """Give a command the options of a run, in the order of the table.

    Args:
        axis: with several values each, where they may vary. without: fields whose options the command has not, or has
            in a form of its own.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for row in reversed(table.rows):
            if row.field == "set":
                command = setting(axis)(command)
            elif row.flags and row.field not in without:
                command = option_of(row, axis and row.axis)(command)
        return command

    return decorate


spec_options = run_options()


def specify(given: dict[str, Any], settings: tuple[str, ...], config: Path | None) -> tuple[RunSpec, dict[str, Any]]:
    """The run the command line asks for, over a saved configuration where one is named.

    Args:
        given: values by field, None where an option was not given. settings: of `--set`.

    Returns:
        The specification, and the saved configuration's `resolved` block.

    Raises:
        BadInput: an unreadable configuration, a malformed `--set`, a value given in two ways, or no policy or hardware
            named.
    """
    from sim.base.files import to_struct

    fields: dict[str, Any] = {}
    meant: dict[str, Any] = {}
    if config is not None:
        from sim.setup.config_file import read_spec

        fields, meant = read_spec(config)
    typed = stated(given, settings)
    if settings or {"pcie", "cpu"} & typed.keys():
        meant = {}  # what the command line changes on purpose needs no warning
    fields = {**fields, **typed, "set": {**fields.get("set", {}), **typed.get("set", {})}}
    require_names(fields)
    return to_struct(fields, RunSpec, "--set" if config is None else f"{config} and command line"), meant


def stated(given: dict[str, Any], settings: tuple[str, ...]) -> dict[str, Any]:
    """Fields that options, `--set` and the words behind the policy's name give. Raises BadInput."""
    from sim.setup.naming import called

    typed = {name: value for name, value in given.items() if value is not None}
    policy = typed.pop("policy", None)
    found = OPTIONS.values({**typed, "set": OPTIONS.settings(settings)})
    if isinstance(policy, str):
        found = called(policy, found)
    elif policy is not None:
        found["policy"] = policy  # refused with the other fields
    return {name: value for name, value in found.items() if name != "set" or value}


def tell_drawing(spec: RunSpec) -> None:
    """Say on standard error that a trace is drawn before anything runs, where one has to be: it takes a while, once."""
    from sim.setup.prepare import to_draw

    name = to_draw(spec)
    if name is not None:
        click.echo(f"drawing the trace {name}: it takes up to some minutes, and is kept for the next time", err=True)


def require_names(fields: dict[str, Any]) -> None:
    """Neither policy nor hardware has a default: which one is meant decides everything."""
    missing = []
    if "policy" not in fields:
        from sim.policy.registry import policies

        missing.append(f"--policy, got none: name what to replay ({', '.join(policies())})")
    if "hw" not in fields:
        missing.append("--hw, got none: name the GPU (rtx3090, rtx4090, a100-80g-sxm ...; `moesim hw` lists all)")
    if missing:
        raise BadInput("; ".join(missing) + "; e.g. simulate --policy fine_moe --hw rtx3090")


def warn_if_changed(setup: Setup, meant: dict[str, Any], config: Path | None) -> None:
    """Say so when what a saved configuration names is no longer what it was saved with."""
    if config is None:
        return
    now = setup.resolved()
    before, digests = meant.get("params_sha256"), now.get("params_sha256", {})
    for name, sha256 in before.items() if isinstance(before, dict) else ():
        if digests.get(name, sha256) != sha256:
            path = now["params"][name]
            click.echo(f"note: {config}: {name} {path} has changed since this was saved; figures may differ", err=True)
    for what in ("policy", "trace", "hw", "model", "engine"):
        key = f"{what}_sha256"
        if meant.get(what) == now[what] and meant.get(key) != now.get(key):
            click.echo(
                f"note: {config}: {what} {now[what]} has changed since this was saved; figures may differ", err=True
            )
