"""How large the project is, and how long the way from a command to its first layer: what a reader has to hold in mind.

    python tools/count.py [--since REVISION] [--json]

- Lines: every line of the product's sources, of its YAML apart, and of the tests.
- Options: of each verb that has any, without --help.
- Functions: those of ours with a name of their own that a plain run enters, once each, before the first layer of a
  token is served and after the last one; with their files. The source runs, not what is compiled of it, and what
  modules call while they are imported is left out.
- Files touched since a revision, working tree included: what one change, an option say, had to edit.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("sim", "policies", "calibrate", "traces", "reports", "moesim", "hwprofiles", "tools", "hatch_build.py")
SOURCES = {".py", ".pxd", ".pyx", ".c", ".js"}
LAYERS = ("sim/core/driver.py", ("CoreEngine.run_layers", "CoreEngine.stride"))
"""File and names of what serves the layers of one iteration, or of several."""
PLAIN_RUN = ("--policy", "lru", "--hw", "rtx3090", "--requests", "1")


def lines(root: Path, tops: Iterable[str], suffixes: set[str]) -> int:
    """Lines of all files of these kinds below these places."""
    paths = (path for top in tops for path in ((root / top).rglob("*") if (root / top).is_dir() else [root / top]))
    return sum(path.read_bytes().count(b"\n") for path in paths if path.suffix in suffixes)


def options() -> dict[str, int]:
    """Verb, with its own verbs after it, -> options beside --help."""
    from sim.cli.verbs import moesim

    def of(command: click.Command, name: str, context: click.Context) -> Iterator[tuple[str, int]]:
        own = sum(isinstance(one, click.Option) for one in command.params)
        if own:
            yield name or "moesim", own
        if isinstance(command, click.Group):
            for verb in command.list_commands(context):
                below = command.get_command(context, verb)
                if below is not None:
                    yield from of(below, f"{name} {verb}".strip(), context)

    return dict(of(moesim, "", click.Context(moesim)))


class Entered:
    """What a profiler is told of: functions of ours before the first call of `layers`, and after the last one ended."""

    def __init__(self, root: Path, layers: tuple[str, tuple[str, ...]]) -> None:
        # An environment that lies in the checkout, as README makes one, holds the libraries' sources, too.
        self._ours = tuple(f"{root / top}{'' if top.endswith('.py') else os.sep}" for top in PRODUCT)
        self._file, self._layers = str(root / layers[0]), layers[1]
        self.before: set[CodeType] = set()
        self.after: set[CodeType] = set()
        self.served = 0
        self._importing = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return"):
            return
        if code.co_name == "<module>":
            self._importing += 1 if event == "call" else -1
        elif code.co_filename == self._file and code.co_qualname in self._layers:
            self.served += event == "call"
            self.after.clear()
        elif event == "call" and not self._importing and self._is_ours(code):
            (self.after if self.served else self.before).add(code)

    def _is_ours(self, code: CodeType) -> bool:
        # A comprehension is part of its function, and the body of a class no function.
        is_function = code.co_flags & 1 and not code.co_name.startswith("<")
        return bool(is_function) and code.co_filename.startswith(self._ours)


def told(codes: Iterable[CodeType], root: Path) -> list[str]:
    """`file:function`, sorted."""
    return sorted(f"{Path(code.co_filename).relative_to(root).as_posix()}:{code.co_qualname}" for code in codes)


def _child() -> None:
    """Run the plain run under the profiler; what was entered is the last line on standard error."""
    entered = Entered(ROOT, LAYERS)
    sys.setprofile(entered)
    try:
        from moesim.commands import simulate

        simulate(PLAIN_RUN)
    finally:
        sys.setprofile(None)
        found = {"served": entered.served, "before": told(entered.before, ROOT), "after": told(entered.after, ROOT)}
        sys.stderr.write(f"\n{json.dumps(found)}")


def entered() -> dict[str, list[str]]:
    """`before` and `after`: functions of a plain run as `file:function`."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "MOESIM_PURE": "1", "PYTHONPATH": path}
    child = [sys.executable, "-c", "from tools import count; count._child()"]
    done = subprocess.run(child, env=env, capture_output=True, text=True, check=False)  # noqa: S603 - our own words
    if done.returncode:
        raise click.ClickException(f"the plain run failed: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stderr.splitlines()[-1])
    if not found["served"]:
        raise click.ClickException(
            f"no layer was served by {' or '.join(LAYERS[1])} of {LAYERS[0]}: name in LAYERS what serves them"
        )
    return {name: found[name] for name in ("before", "after")}


def touched(since: str) -> list[str]:
    """Files that differ from a revision, new ones too."""

    def git(*words: str) -> list[str]:
        return subprocess.run(  # noqa: S603 - our own words
            ["git", *words],  # noqa: S607 - wherever git lies
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()

    return sorted({*git("diff", "--name-only", since), *git("ls-files", "--others", "--exclude-standard")})


def count() -> dict[str, Any]:
    """Everything but what a change touched."""
    build, found = runpy.run_path(str(ROOT / "hatch_build.py")), entered()
    return {
        "product_lines": lines(ROOT, PRODUCT, SOURCES),
        "yaml_lines": lines(ROOT, PRODUCT, {".yaml"}),
        "test_lines": lines(ROOT, ["tests"], {".py"}),
        "options": options(),
        "compiled_modules": len(build["binaries"](ROOT)),
        "functions": found,
    }


def _files(functions: list[str]) -> int:
    return len({name.partition(":")[0] for name in functions})


@click.command(help=__doc__)
@click.option("--since", metavar="REVISION", help="Say also which files differ from it.")
@click.option("--json", "as_json", is_flag=True, help="Every option and function by its name.")
def main(since: str | None, as_json: bool) -> None:
    """Print the counts."""
    found = count() | ({"touched": touched(since)} if since else {})
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    most = sorted(found["options"].items(), key=lambda one: -one[1])
    rows = [
        ("product lines", f"{found['product_lines']:,}, and {found['yaml_lines']:,} of YAML"),
        ("test lines", f"{found['test_lines']:,}"),
        ("modules compiled", f"{found['compiled_modules']}"),
        ("options", f"{sum(found['options'].values())}: " + ", ".join(f"{verb} {n}" for verb, n in most)),
        *(
            (f"functions {when} layer", f"{len(names)} in {_files(names)} files")
            for when, names in zip(("before the first", "after the last"), found["functions"].values(), strict=True)
        ),
    ]
    if since:
        rows.append(("files touched", f"{len(found['touched'])}: {', '.join(found['touched'])}"))
    for name, text in rows:
        click.echo(f"{name:<34}{text}")


if __name__ == "__main__":
    main()
