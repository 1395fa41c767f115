"""Compile the modules of `sim` that have a .pxd beside them, where that can be done; the same results without.

hatchling calls `Compiled` while it builds a wheel or an editable install. A working tree is compiled again in place by

    python hatch_build.py            # needs Cython, setuptools and a C compiler

Either all modules are compiled or none: a compiled class can only be extended and read by compiled modules. Without
Cython, a compiler or Python's headers, or with MOESIM_PURE=1, the plain modules run. A wheel of a tree that is compiled
in place already, by this Python and since its last change, takes what lies there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # in place only
    BuildHookInterface = object  # type: ignore[assignment, misc]

ROOT = Path(__file__).resolve().parent
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "cdivision": True,
    "initializedcheck": False,
    "infer_types": True,
    "annotation_typing": False,
    "binding": True,
    "show_performance_hints": False,
}
# The same bits from every compiler, and as plain Python gives them: no fused multiply-add, no algebra on floats.
FLAGS = ("-O2", "-ffp-contract=off", "-fno-fast-math", "-g0", "-w")
FLAGS_MSVC = ("/O2", "/fp:precise")
# Loops over thousands of numbers: several at a time (-O3), where that changes none.
SEARCHES = ("sim.policy.likeness", "sim.policy.path_search", "sim.policy.standings", "sim.policy.vector_search")


class Compiled(BuildHookInterface):
    """The build hook: adds the compiled modules to a wheel, or puts them beside their sources for an editable one."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._folder = tempfile.mkdtemp(prefix="moesim-build-")
        root = Path(self.root)
        if self.target_name != "wheel" or os.environ.get("MOESIM_PURE"):
            return
        into = root if version != "editable" and is_compiled(root) else Path(self._folder)
        if into != root:
            command = [sys.executable, str(Path(__file__).resolve()), "--root", str(root), "--into", self._folder]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")  # noqa: S603 - this very file
            if done.returncode:
                why = (done.stderr.strip() or "no reason given").splitlines()[-1]
                self.app.display_info(f"not compiled ({why}): the plain modules give the same results, slower")
                return
        built = {str(path): path.relative_to(into).as_posix() for path in modules_in(into)}
        if not built:
            return
        if version == "editable":
            put_in_place(root, into)
            return
        build_data["force_include"].update(built)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def modules_in(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "sim").rglob("*") if path.suffix in (".so", ".pyd"))


def is_compiled(root: Path) -> bool:
    """Whether every module lies compiled beside its source, by this Python, and nothing of it has changed since."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    found = [(root / source).with_suffix(suffix) for source in sources(root)]
    if not found or sorted(found) != modules_in(root):
        return False
    changed_ns = [path.stat().st_mtime_ns for path in (Path(__file__), *(root / "sim").rglob("*.pxd"))]
    changed_ns += [(root / source).stat().st_mtime_ns for source in sources(root)]
    return max(changed_ns) <= min(path.stat().st_mtime_ns for path in found)


def put_in_place(root: Path, folder: Path) -> None:
    """Replace what was compiled before by what has been compiled now."""
    for path in modules_in(root):
        path.unlink()
    for source in sources(root):
        for path in modules_in(folder):
            if path.relative_to(folder).parent == source.parent and path.name.split(".")[0] == source.stem:
                shutil.copy(path, root / path.relative_to(folder))


def sources(root: Path) -> list[Path]:
    """Modules with a .pxd beside them."""
    found = (path.with_suffix(".py") for path in sorted((root / "sim").rglob("*.pxd")))
    return [path.relative_to(root) for path in found if path.exists()]


def build(root: Path, folder: Path, scratch: Path) -> None:
    """Compile every source into `folder`, in the layout of the packages; raises whatever goes wrong.

    What lies in `folder` and `scratch` from the last time is used again where its sources have not changed since.
    """
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    class BuildExt(build_ext):
        def build_extensions(self) -> None:
            flags = FLAGS_MSVC if self.compiler.compiler_type == "msvc" else FLAGS
            for extension in self.extensions:
                extension.extra_compile_args = list(flags)
                if flags is FLAGS and extension.name in SEARCHES:
                    extension.extra_compile_args.append("-O3")
            super().build_extensions()

    os.chdir(root)
    found = [Extension(".".join(path.with_suffix("").parts), [path.as_posix()]) for path in sources(root)]
    if not found:
        return
    n_cores = os.cpu_count() or 1
    modules = cythonize(
        found, build_dir=str(scratch), compiler_directives=DIRECTIVES, nthreads=min(n_cores, len(found)), quiet=True
    )
    command = BuildExt(Distribution({"name": "sim", "packages": [], "ext_modules": modules}))
    command.build_lib, command.build_temp, command.parallel = str(folder), str(scratch), n_cores
    command.ensure_finalized()
    command.run()


def reason(error: Exception) -> str:
    """In a few words; `python hatch_build.py` says all."""
    if isinstance(error, ImportError):
        return f"no {error.name}"
    return "no working C compiler" if "distutils" in type(error).__module__ else f"{type(error).__name__} in Cython"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile sim's typed modules in place.")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout; default: this one")
    parser.add_argument("--into", type=Path, help="a folder for what is built, instead of in place")
    parser.add_argument("--force", action="store_true", help="compile what has not changed, too")
    told = parser.parse_args()
    root = told.root.resolve()
    if told.into is not None:
        with tempfile.TemporaryDirectory(prefix="moesim-c-") as scratch:
            try:
                build(root, told.into.resolve(), Path(scratch))
            except Exception as error:  # whatever it is: the package is whole without
                sys.exit(reason(error))
        return
    folder, scratch = root / "build" / "compiled", root / "build" / "c"
    for kept in (folder, scratch) if told.force else ():
        shutil.rmtree(kept, ignore_errors=True)
    build(root, folder, scratch)
    put_in_place(root, folder)
    sys.stderr.write(f"compiled {len(modules_in(root))} of {len(sources(root))} modules\n")


if __name__ == "__main__":
    main()
