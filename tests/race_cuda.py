"""A stand-in for `torch.cuda` that finds races: streams and host threads as actors of a happens-before graph.

Operations run at once, on CPU tensors, when they are launched. What is checked is not their result but whether anything
orders them: every actor has a vector clock, a stream joins the clock of the thread that launches on it and of events it
waits for, a thread joins the clock of an event it has synchronised with, and locks, queues and host events of the lanes
pass clocks between threads. Two accesses to overlapping bytes of which one writes must be ordered by these alone.

Events are over as late as the rules allow: `query` says no until the asking thread's clock holds the event. So nothing
passes because the device happened to be quick.

Also checked: waits for events never recorded, timing of events not known to be over, memory used on a stream it was not
allocated on and not kept for, copies that block the host or go through pageable memory where they should not.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from types import SimpleNamespace

import torch
from one_card import OneCard
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Clock = dict[str, int]
HOST, DEVICE, PINNED = "host", "device", "pinned"
HOST_READS = ("tolist", "numpy", "item")


def join(mine: Clock, other: Clock) -> None:
    for actor, count in other.items():
        if count > mine.get(actor, 0):
            mine[actor] = count


class Race(AssertionError):
    """Two accesses that nothing orders, or an operation that a device would not carry out as meant."""


class RaceDevice(OneCard):
    """`torch.cuda` for `CudaDevice`. `skip(stream, event)` lets a test lose a wait on purpose."""

    def __init__(self, skip=lambda waiting, event: False, skip_sync=lambda event: False) -> None:
        self.skip, self.skip_sync = skip, skip_sync
        self.lock = threading.RLock()
        self.found: list[str] = []
        self.n_waits = self.n_accesses = 0
        self.local = threading.local()
        self.threads: dict[str, Clock] = {}
        self.streams: list[Stream] = []
        self.default = Stream(self, "default")
        self.kinds: dict[int, str] = {}  # storage -> where it lies
        self.owner: dict[int, str] = {}  # device storage -> stream it was allocated on
        self.kept_for: dict[int, set[str]] = defaultdict(set)
        self.accesses: dict[int, dict[tuple, tuple[int, str]]] = defaultdict(dict)
        self.alive: dict[int, object] = {}  # nothing is freed: an address then means one tensor alone
        self.strict = False
        device = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing
                self.stamp: tuple[str, int] | None = None
                self.clock: Clock = {}
                self.lane = ""

            def record(self, stream) -> None:
                with device.lock:
                    stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
                    join(stream.clock, device.mine())
                    self.clock, self.lane = dict(stream.clock), stream.name
                    self.stamp = (stream.name, stream.clock[stream.name])

            def query(self) -> bool:
                assert self.stamp is not None, "asking an event that was never recorded"
                return device.mine().get(self.stamp[0], 0) >= self.stamp[1]

            def synchronize(self) -> None:
                assert self.stamp is not None, "waiting for an event that was never recorded"
                if not device.skip_sync(self):
                    with device.lock:
                        join(device.mine(), self.clock)

            def elapsed_time(self, end) -> float:
                for event in (self, end):
                    if not event.query() and not device.skip_sync(event):
                        raise Race("elapsed_time of events that are not known to be over")
                return 0.0

        self.Event = Event

    # -- what the lanes call ----------------------------------------------------------------------------------------

    def Stream(self, device: int):
        self.streams.append(Stream(self, ("compute", "up", "down")[len(self.streams)]))
        return self.streams[-1]

    def get_device_properties(self, index: int):
        return SimpleNamespace(name="Race detector")

    def current_stream(self):
        stack = getattr(self.local, "streams", None)
        return stack[-1] if stack else self.default

    @contextmanager
    def stream(self, lane):
        stack = self.local.__dict__.setdefault("streams", [])
        stack.append(lane)
        try:
            with ExitStack() as modes:
                if not getattr(self.local, "watched", False):  # a thread of the lanes' own
                    self.local.watched = True
                    modes.callback(lambda: setattr(self.local, "watched", False))
                    modes.enter_context(Watch(self))
                yield
        finally:
            stack.pop()

    def synchronize(self) -> None:
        with self.lock:
            for stream in (*self.streams, self.default):
                join(self.mine(), stream.clock)

    def empty_cache(self) -> None:
        pass

    def keep(self, tensor, stream) -> None:
        self.kept_for[storage_of(tensor)].add(stream.name)

    # -- bookkeeping ------------------------------------------------------------------------------------------------

    def mine(self) -> Clock:
        """The calling thread's clock."""
        name = threading.current_thread().name
        if name not in self.threads:
            with self.lock:
                self.threads.setdefault(name, {name: 1})
        return self.threads[name]

    def fail(self, text: str) -> None:
        self.found.append(text)
        raise Race(text)

    def actor(self, touches_device: bool):
        """Who carries out what the calling thread launches now."""
        stack = getattr(self.local, "streams", None)
        if stack:
            return stack[-1]
        return self.default if touches_device else None

    def operation(self, what: str, reads, writes, made=()) -> None:
        """Check one operation and enter it into the graph."""
        with self.lock:
            touched = [*reads, *writes]
            stream = self.actor(any(self.kinds.get(storage_of(t)) == DEVICE for t in touched))
            clock = self.mine()
            if stream is None:
                name = threading.current_thread().name
            else:
                name = stream.name
                join(stream.clock, clock)
                clock = stream.clock
            clock[name] = clock.get(name, 0) + 1
            for tensor in made:
                key = storage_of(tensor)
                if key not in self.alive:
                    self.alive[key] = tensor.untyped_storage()
                    self.kinds[key] = HOST if stream is None else DEVICE
                    self.owner[key] = name
            for tensor, is_write in (*((t, False) for t in reads), *((t, True) for t in writes)):
                self._access(what, name, clock, tensor, is_write)
            if stream is self.default and not getattr(self.local, "streams", None):
                join(self.mine(), clock)  # placing experts and reading rows: blocking copies

    def _access(self, what: str, name: str, clock: Clock, tensor, is_write: bool) -> None:
        if tensor.numel() == 0:
            return
        self.n_accesses += 1
        key = storage_of(tensor)
        self.alive.setdefault(key, tensor.untyped_storage())
        lanes = [stream.name for stream in self.streams]
        if self.kinds.get(key) == DEVICE and name in lanes and name not in (self.owner[key], *self.kept_for[key]):
            self.fail(f"{what} on {name}: memory of {self.owner[key]}'s that was not kept for {name}")
        size = tensor.element_size()
        start = tensor.storage_offset() * size
        stop = start + size * (1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)))
        before = self.accesses[key]
        for (a, b, actor, wrote), (count, earlier) in before.items():
            if a < stop and start < b and (wrote or is_write) and actor != name and clock.get(actor, 0) < count:
                self.fail(
                    f"{what} on {name} {'writes' if is_write else 'reads'} what {earlier} on {actor} "
                    f"{'writes' if wrote else 'reads'}; nothing orders them"
                )
        before[start, stop, name, is_write] = (clock[name], what)


class Stream:
    """Its clock, and the order that comes with it."""

    def __init__(self, device: RaceDevice, name: str) -> None:
        self.device, self.name, self.clock = device, name, {}

    def wait_event(self, event) -> None:
        assert event.stamp is not None, "a stream that waits for an event not recorded yet does not wait at all"
        self.device.n_waits += 1
        if not self.device.skip(self, event):
            with self.device.lock:
                join(self.clock, event.clock)

    def synchronize(self) -> None:
        with self.device.lock:
            join(self.device.mine(), self.clock)


def storage_of(tensor) -> int:
    return tensor.untyped_storage()._cdata


class Watch(TorchDispatchMode):
    """Tells a device what every operation of this thread reads and writes."""

    def __init__(self, device: RaceDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        reads, writes, given = [], [], [*args, *kwargs.values()]
        arguments = func._schema.arguments
        named = {a.name: a for a in arguments}
        pairs = [*zip(arguments, args, strict=False), *((named[k], v) for k, v in kwargs.items())]
        view = False
        for argument, value in pairs:
            alias = argument.alias_info
            for tensor in tensors(value):
                if alias is not None and alias.is_write:
                    writes.append(tensor)
                elif alias is not None:
                    view = True
                else:
                    reads.append(tensor)
        if view and not writes:
            return out
        name = str(func).removeprefix("aten.")
        mine = {storage_of(t) for t in tensors(given)}
        made = [t for t in tensors(out) if storage_of(t) not in mine]
        fresh = [] if name.startswith(("empty", "new_empty")) else made
        if name.startswith("copy_"):
            self._copy(name, writes[0], reads[0], bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False)))
        self.device.operation(name, reads, [*writes, *fresh], made)
        return out

    def _copy(self, name: str, target, source, non_blocking: bool) -> None:
        """What a copy between host and device needs, so that it neither blocks the host nor goes astray."""
        device = self.device
        if not device.strict or not getattr(device.local, "streams", None):
            return
        kinds = [device.kinds.get(storage_of(t), HOST) for t in (target, source)]
        if (kinds[0] == DEVICE) == (kinds[1] == DEVICE):
            return
        host = target if kinds[1] == DEVICE else source
        if not non_blocking:
            device.fail(f"{name}: a blocking copy on a stream")
        if PINNED not in kinds:
            device.fail(f"{name}: {host.nbytes} bytes of pageable host memory")
        if not (target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype):
            device.fail(f"{name}: strided or of two types, so it goes through pageable memory")


class HostReads(TorchFunctionMode):
    """Reads of tensors by the host's own code, which no operation shows."""

    def __init__(self, device: RaceDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in HOST_READS:
            with self.device.lock:
                clock, name = self.device.mine(), threading.current_thread().name
                clock[name] += 1
                self.device._access(func.__name__, name, clock, args[0], False)
        return func(*args, **(kwargs or {}))


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


# -- what passes clocks between the lanes' threads --------------------------------------------------------------------


def threading_of(device: RaceDevice):
    """Condition, queue and host event that carry clocks, for `monkeypatch` to put in place of the plain ones."""

    class ClockedCondition(threading.Condition):
        def __init__(self, lock) -> None:
            super().__init__(lock)
            self.clock: Clock = {}

        def __enter__(self):
            answer = super().__enter__()
            join(device.mine(), self.clock)
            return answer

        def __exit__(self, *why):
            join(self.clock, device.mine())
            return super().__exit__(*why)

        def wait(self, timeout=None):
            join(self.clock, device.mine())
            answer = super().wait(timeout)
            join(device.mine(), self.clock)
            return answer

    class ClockedQueue:
        def __init__(self) -> None:
            self.inner: SimpleQueue = SimpleQueue()

        def put(self, item) -> None:
            self.inner.put((item, dict(device.mine())))

        def get(self):
            device.local.watched = True  # the pool's thread: watched for good
            if not hasattr(device.local, "mode"):
                device.local.mode = Watch(device)
                device.local.mode.__enter__()
            item, clock = self.inner.get()
            join(device.mine(), clock)
            if item is None:
                device.local.mode.__exit__(None, None, None)
            return item

    class ClockedMark:
        def __init__(self) -> None:
            self.event, self.clock = threading.Event(), {}
            self.at_s, self.then = 0.0, lambda: None

        def set(self) -> None:
            self.clock = dict(device.mine())
            self.at_s = time.perf_counter()
            self.event.set()
            self.then()

        def query(self) -> bool:
            if self.event.is_set():
                join(device.mine(), self.clock)
            return self.event.is_set()

        def synchronize(self) -> None:
            self.event.wait()
            join(device.mine(), self.clock)

    return ClockedCondition, ClockedQueue, ClockedMark
