"""A command whose options are given once each (of two values the last would win in silence), listed by group."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container
from typing import Any

import click

from sim.base.errors import BadInput
from sim.base.renamed import FLAGS, GONE
from sim.base.renamed import OPTIONS as OLD_NAMES
from sim.cli.output_place import OutputFolder

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
MOST_USED, OTHERS = "Most used", "Options"


class Grouped(click.Option):
    """An option with a heading of its own in `--help`. top: listed among the most used."""

    def __init__(self, decls: list[str], group: str = "", top: bool = False, **attrs: Any) -> None:
        super().__init__(decls, **attrs)
        self.group, self.top = group, top


class UniqueOptions(click.Command):
    """Refuses an option given twice, unless it is one to repeat (`multiple`) or a flag; and one that went, by the name
    of today.

    Args:
        no_say: what to do about options of a run that this command has not.
    """

    def __init__(self, *args: Any, no_say: str = "", **kwargs: Any) -> None:
        kwargs["context_settings"] = {**CONTEXT, **(kwargs.get("context_settings") or {})}
        super().__init__(*args, **kwargs)
        self.no_say = no_say

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        except click.NoSuchOption as error:
            refuse_old_flag(error.option_name, {name for param in self.params for name in param.opts})
            if self.no_say and is_of_runs(error.option_name):
                raise BadInput(f"{error.option_name}: no option of moesim {ctx.info_name}; {self.no_say}") from None
            raise
        for param, n in Counter(order).items():
            if n > 1 and isinstance(param, click.Option) and not (param.multiple or param.is_flag):
                raise BadInput(f"{param.opts[0]}, got it {'twice' if n == 2 else f'{n} times'}: {_remedy(param)}")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        grouped = any(isinstance(param, Grouped) for param in self.params)
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                group = (MOST_USED if param.top else param.group) if isinstance(param, Grouped) else OTHERS
                sections.setdefault(group, []).append(record)
        order = [MOST_USED, *(name for name in sections if name not in (MOST_USED, OTHERS)), OTHERS]
        for name in order if grouped else sections:
            if name in sections:
                with formatter.section(name):
                    formatter.write_dl(sections[name])


def is_of_runs(flag: str) -> bool:
    """Whether an option is one of a run."""
    from sim.options import OPTIONS

    return any(flag in row.flags for row in OPTIONS.rows)


def refuse_old_flag(flag: str, known: Container[str]) -> None:
    """Raises BadInput, with what to type today, for an option that went.

    Args:
        known: options of the command, one of which it has to be.
    """
    name = flag.removeprefix("--").replace("-", "_")
    if name in GONE:
        raise BadInput(f"{flag}: no such option any more; {GONE[name]}")
    now = FLAGS.get(flag)
    if now is not None and not now.startswith("moesim") and re.split(r"[ =]", now)[0] not in known:
        return
    if now is None:
        from sim.base.kinds import written
        from sim.options import OPTIONS

        named = OLD_NAMES.get(name)
        if named is None:
            return
        name, _, value = named.partition("=")
        row = OPTIONS.by_name[name]
        now = written(row.said, value or row.metavar)
    raise BadInput(f"{flag}: no such option any more; write {now}")


def _remedy(param: click.Option) -> str:
    if param.opts[0] == "--policy":
        return "one run has one policy; keep one, or rank several with moesim compare"
    return "one value per option; keep one of them"


def policies_option(metavar: str, text: str) -> Callable[[Any], Any]:
    """`--policy`, to be repeated, as `policies`."""
    return click.option("--policy", "policies", multiple=True, metavar=metavar, help=text)


def workers_option(text: str) -> Callable[[Any], Any]:
    """`--workers N`."""
    return click.option("--workers", type=click.IntRange(min=1), metavar="N", help=text)


def out_option(text: str) -> Callable[[Any], Any]:
    """`--out DIR`."""
    return click.option("--out", type=OutputFolder(), metavar="DIR", help=text)


def json_option(command: Any) -> Any:
    """`--json`, as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")(command)
