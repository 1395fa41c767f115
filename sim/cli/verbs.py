"""The verbs of `moesim`, and what becomes of errors. Verbs are imported only when called."""

from __future__ import annotations

import codecs
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from sim import __version__
from sim.base.errors import BadInput, DoesNotFit, MoesimError, did_you_mean, one_line

# Before numpy is imported: a replay's products are small, and threads that wait for one another only slow them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

READER_GONE = 141  # as a shell reports SIGPIPE
FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}

# Verb -> (module under sim.cli, one-line help shown by `moesim --help` without importing the module).
VERBS: dict[str, tuple[str, str]] = {
    "run": ("run", "Replay a routing trace under a policy on a described GPU (same as `simulate`)."),
    "calibrate": ("calibrate", "Measure this machine and write its hardware profile."),
    "validate": ("validate", "Simulate and really run: how far the prediction is from the truth, and where."),
    "report": ("report", "One HTML page, or figures for a paper, of runs, a comparison, sweep, plan or validation."),
    "compare": ("compare", "Rank several policies on the same trace, GPU and memory."),
    "sweep": ("sweep", "Replay a grid of runs: policies, GPUs, budgets and what else varies, as one table."),
    "curve": ("curve", "Hit rate over capacity: plain caches of every size, from one pass over a trace."),
    "plan": ("plan", "Find the cheapest GPU and policy that reach a goal, and what the others lack."),
    "explain": ("explain", "A measurement beside prediction and bound: which input of the machine is off."),
    "timeline": ("timeline", "Draw kept runs below one another in one file for Perfetto."),
    "saturate": ("saturate", "Find the highest rate of requests that policies serve, and at which they keep an SLO."),
    "check": ("check", "Hold runs to a baseline file: exit 1 when a hit rate drops or a time grows."),
    "diff": ("diff", "Two runs beside each other: where the time went, and the first decision that differs."),
    "policies": ("policies", "List policies, or show one with its parameters, sources and needs."),
    "schedulers": ("schedulers", "List schedulers, or show one with its source and what it needs."),
    "routers": ("routers", "List routers of several replicas, or show one with its source and rule."),
    "models": ("models", "List MoE models, or show one's bytes per expert, token and KV entry."),
    "hw": ("hw", "List hardware profiles, or show one with the source of every figure."),
    "train": ("train", "Train a policy's predictor on a trace's training split."),
    "traces": ("traces", "List, inspect and check routing traces."),
    "record": ("record", "Record the routing of a Hugging Face MoE model."),
    "reproduce": ("reproduce", "Published figures beside simulated ones, misses included."),
    "bench": ("bench", "Time commands and replays as ratios to bare imports and bare SimPy."),
    "conformance": ("conformance", "Run every conformance check that applies to a policy, or to a scheduler."),
}


class Verbs(click.Group):
    """A group whose commands live in `sim.cli.<module>.command` and are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"sim.cli.{VERBS[name][0]}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in VERBS:
            raise click.UsageError(f"verb, got {args[0]!r}: no such command; {did_you_mean(args[0], VERBS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])


@click.command(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="moesim")
def moesim() -> None:
    """What would this MoE offloading policy cost, in time, memory and PCIe traffic, on that GPU?"""


def with_way_out(error: click.ClickException, name: str) -> str:
    """What click says, and where to read on where it leaves that out; of some errors it names no command."""
    said = error.format_message()
    if isinstance(error, click.UsageError) and not {";", "?"} & set(said):
        said = f"{said.removesuffix('.')}; see {name if error.ctx is None else error.ctx.command_path} --help"
    return one_line(
        " ".join(line.strip() for line in said.splitlines())
    )  # it quotes what it was given, whatever its length


def in_its_letters(error: UnicodeError) -> tuple[str, int]:
    """What stands for characters that an output has no letters for: a rule's dash, else the escape that JSON has."""
    assert isinstance(error, UnicodeEncodeError)
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    codes = [int.from_bytes(units[i : i + 2]) for i in range(0, len(units), 2)]
    return "".join("-" if code == ord("─") else f"\\u{code:04x}" for code in codes), error.end


def any_letters(stream: object) -> None:
    """Let an output in a narrow encoding (Latin-1, Windows' code pages) take everything that is printed."""
    if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
        codecs.register_error("in_its_letters", in_its_letters)
        stream.reconfigure(errors="in_its_letters")


def must_be_text(words: Sequence[str]) -> None:
    """Refuse words that no output could repeat: Python keeps bytes that are no UTF-8 as halves of characters.

    Raises:
        BadInput: the first such word; or the folder is one, which results name.
    """
    said = [(f"word {at}", word, "type it anew, or rename the file") for at, word in enumerate(words, 1)]
    with suppress(OSError):  # the folder was removed
        said.append(("the folder this runs in", str(Path.cwd()), "run it in another, or rename it"))
    for what, word, way_out in said:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise BadInput(f"{what}, got {word!r}: bytes that are no UTF-8; {way_out}") from None


def guarded(command: click.Command, args: Sequence[str] | None, name: str) -> None:
    """Run a click command; turn the errors people cause into one line on stderr and exit 2 (or 1)."""
    stdout = sys.stdout
    any_letters(stdout)
    try:
        must_be_text(sys.argv[1:] if args is None else args)
        status = command.main(args=None if args is None else list(args), prog_name=name, standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except SystemExit:
        if sys.stdout is not stdout:
            # So click answers a reader that has gone (`| head`), with status 1; but 1 says that a check failed.
            sys.exit(READER_GONE)
        raise
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        help_only = type(error).__name__ == "NoArgsIsHelpError"  # a group by itself; click before 8.2 prints and exits
        click.echo(error.format_message() if help_only else f"error: {with_way_out(error, name)}", err=True)
        sys.exit(error.exit_code)
    except MoesimError as error:
        if isinstance(error, DoesNotFit) and error.sizes:
            from sim.results.text import memory_lines

            for line in memory_lines(error.sizes):
                click.echo(line, err=True)
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is not None:  # the file's fault or the folder's, whatever was to be done with it
            where = one_line(str(error.filename))
            click.echo(f"error: {where}: {error.strerror}; check the path, or choose another", err=True)
            sys.exit(2)
        if error.errno not in FULL:
            raise
        click.echo(f"error: {error.strerror}: the output is not complete; make room, or name another place", err=True)
        with suppress(OSError, ValueError):  # else what is still buffered fails once more at exit, with a traceback
            os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
        sys.exit(2)
