"""A command whose options are given once each: of two values the last would win in silence."""

from __future__ import annotations

from collections import Counter

import click

from sim.base.errors import BadInput


class UniqueOptions(click.Command):
    """Refuses an option given twice, unless it is one to repeat (`multiple`) or a flag."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for param, n in Counter(order).items():
            if n > 1 and isinstance(param, click.Option) and not (param.multiple or param.is_flag):
                raise BadInput(f"{param.opts[0]}, got it {'twice' if n == 2 else f'{n} times'}: {_remedy(param)}")
        return super().parse_args(ctx, args)


def _remedy(param: click.Option) -> str:
    if param.opts[0] == "--policy":
        return "one run has one policy; keep one, or rank several with moesim compare"
    return "one value per option; keep one of them"
