"""Interrupt a command at random moments of its whole life, as often as one likes, and say what came of it.

python tests/interrupt_hunt.py real|calibrate|compare|record|run N [SEED]: put load on the machine beside it. Prints one
line for each way of ending, and everything that is not `interrupted` with 130 (or a result that was there already).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
START_S = 0.06  # until then Python itself starts


def command(what: str, folder: Path) -> list[str]:
    from cli_help import mixtral_shaped

    if what == "real":
        from real_world import tiny_setup

        setup = tiny_setup(folder, "lru", 8, trace={"outputs": 200})
        setup.close()
        return [
            "run",
            "--policy",
            "lru",
            "--hw",
            "rtx3090",
            "--real=cpu",
            "--cache",
            "8experts",
            "--model",
            setup.spec.model or "",
            "--trace",
            setup.spec.trace or "",
            "--json",
        ]
    if what == "calibrate":
        return ["calibrate", "--device", "cpu", "--model", "cpu-small", "--out", str(folder), "--minutes", "0.05"]
    if what == "record":
        return [
            "record",
            "mixtral-8x7b-small",
            "--out",
            str(folder / "t.safetensors"),
            "--prompt-tokens",
            "12",
            "--output-tokens",
            "24",
            "--requests",
            "6",
            "--overwrite",
        ]
    trace = str(mixtral_shaped(folder, n_requests=2, prompt=5, outputs=300))
    if what == "run":
        return [
            "run",
            "--policy",
            "lru",
            "--hw",
            "rtx3090",
            "--trace",
            trace,
            "--out",
            str(folder / "out"),
            "--overwrite",
        ]
    named = [word for name in ("fifo", "lru", "lfu", "fine_moe") for word in ("--policy", name)]
    return ["compare", *named, "--hw", "rtx3090", "--trace", trace, "--workers", "2"]


def hunt(what: str, times: int, seed: int) -> list[str]:
    """Reports of whatever ended otherwise than it should."""
    drawn, ways, wrong = random.Random(seed), Counter[str](), []
    with tempfile.TemporaryDirectory() as name:
        words = [sys.executable, "-m", "sim", *command(what, Path(name))]
        whole_s = 0.0
        for n in range(times + 1):
            began_s, hit = time.monotonic(), False
            process = subprocess.Popen(words, stdout=-1, stderr=-1, text=True, cwd=ROOT, start_new_session=True)
            try:
                process.wait(drawn.uniform(START_S, whole_s) if n else None)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGINT)
                hit = True
            try:
                _, said = process.communicate(timeout=120)
            except subprocess.TimeoutExpired:
                process.kill()
                said = f"hangs: {process.communicate()[1]}"
            if not n:  # the first run is left alone, and says how long there is
                assert process.returncode == 0, said
                whole_s = time.monotonic() - began_s
                continue
            last = (said.strip().splitlines() or [""])[-1][:60]
            ways[f"{process.returncode} {last if hit else 'was over already'}"] += 1
            if process.returncode not in (0, 130) or any(word in said for word in ("Traceback", "ignored in", "hangs")):
                wrong.append(f"status {process.returncode}: {said}")
    for way, n in ways.most_common():
        sys.stdout.write(f"{n:5} {way}\n")
    return wrong


if __name__ == "__main__":
    found = hunt(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    sys.stdout.write("".join(f"---\n{text}\n" for text in found) + f"{len(found)} wrong\n")
    sys.exit(1 if found else 0)
