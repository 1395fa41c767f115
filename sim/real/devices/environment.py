"""What was measured on: processor, memory, versions, and through NVML the card's state and what may have disturbed it.

Nothing that names the machine or its user (no host name, serial number or path) is recorded.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

# NVML clocksEventReasons bits that mean "slower than this card can be"; idle and application clocks are not among them.
THROTTLE_BITS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile")


def machine() -> dict[str, Any]:
    """Processor, cores usable by this process, caches, memory and versions."""
    info = _read("/proc/cpuinfo")
    fields = dict(_pairs(info.split("\n\n")[0])) if info else {}
    flags = set(fields.get("flags", "").split())
    return {
        "cpu": fields.get("model name", platform.processor() or platform.machine()),
        "cores": {"logical": len(usable_cores()), "physical": physical_cores()},
        "llc_bytes": llc_bytes(),
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in flags],
        "memory_bytes": host_memory_bytes(),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip() or "unknown",
        "os": platform.system(),
        "kernel": platform.release(),
        "arch": platform.machine(),
        "python": platform.python_version(),
        "load_1min": _load(),
        "versions": {name: _version(name) for name in ("torch", "numpy", "scipy")},
    }


def usable_cores() -> list[int]:
    """Logical cores this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def physical_cores() -> int:
    """Distinct cores among the usable ones; siblings of one core count once."""
    base = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    siblings = {_read(base.format(core)).strip() or str(core) for core in usable_cores()}
    return max(1, min(len(siblings), cpu_quota()))


def cpu_quota() -> int:
    """Whole cores that the control group's quota allows; a container may see many cores and be given few."""
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        return max(1, int(quota) // max(1, int(period)))
    old_quota = _read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").strip()
    old_period = _read("/sys/fs/cgroup/cpu/cpu.cfs_period_us").strip()
    if old_quota.isdigit() and old_period.isdigit():
        return max(1, int(old_quota) // max(1, int(old_period)))
    return 1 << 16


def llc_bytes() -> int:
    """Last-level cache of core 0; 64 MiB when the system does not say."""
    sizes = [_read(f"/sys/devices/system/cpu/cpu0/cache/index{i}/size").strip() for i in range(5)]
    units = {"K": 1024, "M": 1024**2}
    known = [int(text[:-1]) * units[text[-1]] for text in sizes if text and text[-1] in units]
    return max(known, default=64 * 1024**2)


def host_memory_bytes() -> int:
    """Memory this process may use: the smaller of the machine's and its control group's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 << 30
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() else total


def free_host_bytes() -> int:
    """Memory a new allocation may take: what the kernel calls available, within the control group's limit."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    free = int(found[1]) * 1024 if found else host_memory_bytes() // 2
    limit, used = (_read(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        free = min(free, max(0, int(limit) - int(used)))
    return free


class Nvml:
    """Readings of one GPU; `open` answers None where nvidia-ml-py or the driver is missing."""

    def __init__(self, api: Any, handle: Any) -> None:
        self._api, self._handle = api, handle

    @staticmethod
    def open(index: int, uuid: str | None = None) -> Nvml | None:
        """By UUID where torch knows it: NVML ignores CUDA_VISIBLE_DEVICES and counts all cards."""
        try:
            api = importlib.import_module("pynvml")
            api.nvmlInit()
            if uuid:
                try:
                    name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
                    return Nvml(api, api.nvmlDeviceGetHandleByUUID(name))
                except Exception:  # a partition or an old driver: fall back to the index
                    return Nvml(api, api.nvmlDeviceGetHandleByIndex(index))
            return Nvml(api, api.nvmlDeviceGetHandleByIndex(index))
        except Exception:  # no module, no driver, no permission: optional by design
            return None

    def card(self) -> dict[str, Any]:
        """What does not change: name, driver, memory, greatest link and clocks, power limit."""
        api, h = self._api, self._handle
        return _collect(
            {
                "name": lambda: _text(api.nvmlDeviceGetName(h)),
                "driver": lambda: _text(api.nvmlSystemGetDriverVersion()),
                "memory_bytes": lambda: int(api.nvmlDeviceGetMemoryInfo(h).total),
                "pcie_gen_max": lambda: api.nvmlDeviceGetMaxPcieLinkGeneration(h),
                "pcie_width_max": lambda: api.nvmlDeviceGetMaxPcieLinkWidth(h),
                "sm_mhz_max": lambda: api.nvmlDeviceGetMaxClockInfo(h, api.NVML_CLOCK_SM),
                "memory_mhz_max": lambda: api.nvmlDeviceGetMaxClockInfo(h, api.NVML_CLOCK_MEM),
                "power_limit_w": lambda: api.nvmlDeviceGetPowerManagementLimit(h) / 1000,
                "ecc": lambda: bool(api.nvmlDeviceGetEccMode(h)[0]),
            }
        )

    def now(self) -> dict[str, Any]:
        """What changes: clocks, link, temperature, power, throttle reasons, other processes on the card."""
        api, h = self._api, self._handle
        return _collect(
            {
                "sm_mhz": lambda: api.nvmlDeviceGetClockInfo(h, api.NVML_CLOCK_SM),
                "memory_mhz": lambda: api.nvmlDeviceGetClockInfo(h, api.NVML_CLOCK_MEM),
                "pcie_gen": lambda: api.nvmlDeviceGetCurrPcieLinkGeneration(h),
                "pcie_width": lambda: api.nvmlDeviceGetCurrPcieLinkWidth(h),
                "temperature_c": lambda: api.nvmlDeviceGetTemperature(h, api.NVML_TEMPERATURE_GPU),
                "power_w": lambda: api.nvmlDeviceGetPowerUsage(h) / 1000,
                "throttle": lambda: throttle_reasons(int(_throttle_query(api)(h))),
                # One of them is this process, whose number a container translates: compare counts, not numbers.
                "other_processes": lambda: max(0, len(api.nvmlDeviceGetComputeRunningProcesses(h)) - 1),
                "utilisation_percent": lambda: int(api.nvmlDeviceGetUtilizationRates(h).gpu),
                "memory_used_bytes": lambda: int(api.nvmlDeviceGetMemoryInfo(h).used),
            }
        )


def throttle_reasons(bits: int) -> list[str]:
    """Names of the reasons set in NVML's bit mask."""
    return [name for bit, name in THROTTLE_BITS.items() if bits & bit]


def warnings(card: Mapping[str, Any], readings: Iterable[Mapping[str, Any]]) -> list[str]:
    """What in the readings casts doubt on the figures, each with what to do about it."""
    found: dict[str, str] = {}
    for reading in readings:
        for reason in reading.get("throttle") or []:
            found.setdefault(
                reason,
                f"throttled ({reason}), first seen {reading['when']}: cool the card or raise its "
                "power limit, then repeat",
            )
        if (others := reading.get("other_processes") or 0) > 0:
            found.setdefault(
                "busy", f"{others} other processes on the card, first seen {reading['when']}: close them, then repeat"
            )
        if reading.get("when") == "copying":
            for part in ("gen", "width"):
                got, most = reading.get(f"pcie_{part}"), card.get(f"pcie_{part}_max")
                if isinstance(got, int) and isinstance(most, int) and got < most:
                    found.setdefault(
                        part,
                        f"PCIe {part} {got} of {most} under load: the slot or platform limits the "
                        "link; figures hold for this machine only",
                    )
    return list(found.values())


def _collect(getters: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Each value, or None where this driver or partition does not support the query."""
    values: dict[str, Any] = {}
    for name, get in getters.items():
        try:
            values[name] = get()
        except Exception:
            values[name] = None
    return values


_BF16_CHECK = "import torch; a = torch.ones(512, 512, dtype=torch.bfloat16); [x @ a for x in (a, a[:1], a[:16])]"
_NO_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}


def bf16_on_cpu() -> str:
    """Whether bf16 products run on this CPU: `native`, `no_amx` (this process is told to avoid it) or `none`.

    Some virtual machines announce AMX and then kill the process that uses it, so another process tries first.
    """
    for answer, extra in (("native", {}), ("no_amx", _NO_AMX)):
        command = [sys.executable, "-c", _BF16_CHECK]
        try:
            done = subprocess.run(command, env={**os.environ, **extra}, capture_output=True, timeout=60, check=False)  # noqa: S603
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            os.environ.update(extra)  # read by oneDNN at its first use, which is still to come
            return answer
    return "none"


def _throttle_query(api: Any) -> Any:
    """Renamed in 2023; old drivers' bindings know only the first name, new ones may drop it."""
    old = getattr(api, "nvmlDeviceGetCurrentClocksThrottleReasons", None)
    return old or api.nvmlDeviceGetCurrentClocksEventReasons


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _pairs(text: str) -> Iterable[tuple[str, str]]:
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            yield name.strip(), value.strip()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None
