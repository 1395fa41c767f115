"""Races on a CUDA device, looked for without one: every byte that two lanes touch is ordered by events and waits."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch")

from grids import few_each_time  # noqa: E402
from race_cuda import DEVICE, PINNED, HostReads, Race, RaceDevice, Watch, storage_of, threading_of  # noqa: E402
from real_world import tiny_setup  # noqa: E402

from sim.real.devices import lanes as real_lanes  # noqa: E402
from sim.real.devices import threads  # noqa: E402
from sim.real.devices.cuda import CudaDevice  # noqa: E402
from sim.real.devices.lanes import Lanes  # noqa: E402
from sim.real.devices.work import COMPUTE, D2H, H2D, Work  # noqa: E402
from sim.real.machine.store import DeviceStore, copy_runs  # noqa: E402
from sim.real.run import measure  # noqa: E402
from sim.real.weights.random_weights import random_weights  # noqa: E402


class ZeroedOnTheDefaultStream:
    """torch, whose `zeros` are a kernel on the default stream, as they are on a device."""

    def __init__(self, device: RaceDevice) -> None:
        self._device = device

    def zeros(self, *shape, **kinds):
        with self._device.stream(self._device.default):
            return torch.zeros(*shape, **kinds)

    def __getattr__(self, name):
        return getattr(torch, name)


class WatchedDevice(CudaDevice):
    """Tells the detector where memory lies."""

    def __init__(self, device: RaceDevice) -> None:
        self.race = device
        super().__init__("cuda:0", cuda=device, place="cpu")
        self._memory._torch = ZeroedOnTheDefaultStream(device)
        on_device, on_host = self.on_device, self.on_host
        self.on_device = lambda n: self._told(on_device(n), DEVICE)  # type: ignore[method-assign]
        self.on_host = lambda n: self._told(on_host(n), PINNED)  # type: ignore[method-assign]
        self._memory.on_host = self.on_host  # type: ignore[method-assign]

    def _told(self, tensor, kind):
        key = storage_of(tensor)
        self.race.alive[key], self.race.kinds[key] = tensor.untyped_storage(), kind
        if kind == DEVICE:
            self.race.owner[key] = "default"
        return tensor


def raced(monkeypatch, tmp_path, policy, experts=8, device=None, **fields):
    """A whole run under the detector; its device, for what was found."""
    device = device or RaceDevice()
    condition, jobs, mark = threading_of(device)
    monkeypatch.setattr(real_lanes, "Condition", condition)
    monkeypatch.setattr(threads, "SimpleQueue", jobs)
    monkeypatch.setattr(real_lanes, "HostMark", mark)
    monkeypatch.setattr(threads, "HostMark", mark)
    setup = tiny_setup(tmp_path, policy, experts, trace={"n_requests": 4, "prompt": 4, "outputs": 4}, **fields)
    device.local.watched = True
    try:
        with Watch(device), HostReads(device):
            lanes = Lanes(WatchedDevice(device))
            try:
                weights = random_weights(setup.model, "fp32", lanes.device, 0, 1 << 30)
                restart = lanes.restart_clock

                def begun() -> None:
                    restart()
                    device.strict = True

                monkeypatch.setattr(lanes, "restart_clock", begun)
                done = measure(setup, lanes, weights)
                device.strict = False
            finally:
                lanes.close()
    finally:
        setup.close()
    return device, done


POLICIES = [
    "lru",
    "belady",
    "perfect_prefetch",
    "fine_moe",
    "moe_infinity",
    "pregated",
    "moepic",
    "mixtral_offloading",
    "promoe",
    "llama_cpp",
    "hobbit",
    "fiddler",
    "hybrimoe",
    "ktransformers",
    "daop",
]


@pytest.mark.parametrize(
    "policy", few_each_time(POLICIES, ("lru", "moepic", "mixtral_offloading", "hobbit", "hybrimoe"))
)
def test_every_shared_byte_is_ordered(monkeypatch, tmp_path, policy):
    device, done = raced(monkeypatch, tmp_path, policy)
    assert not done.fault
    assert device.n_accesses > 1000


@pytest.mark.parametrize("policy", ["lru", "fiddler", "mixtral_offloading"])
def test_batches_shared_experts_and_dense_layers_too(monkeypatch, tmp_path, policy):
    _, done = raced(monkeypatch, tmp_path, policy, batch=3, shared=True, dense=True)
    assert not done.fault and done.result.decode_tokens > 0


def between(waiting: str, done: str):
    """Lose every wait of one stream for events of another."""
    return lambda stream, event: stream.name == waiting and event.lane == done


LOST = {
    "a wait for a copy": ("lru", 8, {"skip": between("compute", "up")}, r"on compute reads what copy_\S* on up writes"),
    "a wait for who reads a room": (
        "lru",
        2,
        {"skip": between("up", "compute")},
        r"on up writes what \S+ on compute reads",
    ),
    "a wait for a choice": (
        "lru",
        8,
        {"skip_sync": lambda event: event.lane == "compute"},
        r"tolist on MainThread reads what copy_\S* on compute writes",
    ),
    "a wait for the rows of an expert on the CPU": (
        "llama_cpp",
        8,
        {"skip_sync": lambda event: event.lane == "down"},
        r"on lane-cpu reads what copy_\S* on down writes",
    ),
}


@pytest.mark.parametrize("what", LOST)
def test_the_detector_sees_what_is_lost(monkeypatch, tmp_path, what):
    policy, experts, skips, said = LOST[what]
    scope = {"set": {"scope": "global"}} if experts == 2 else {}
    with pytest.raises(Race, match=said):
        raced(monkeypatch, tmp_path, policy, experts, RaceDevice(**skips), **scope)


def test_the_detector_sees_memory_that_nobody_kept(monkeypatch, tmp_path):
    keep = RaceDevice.keep
    monkeypatch.setattr(
        RaceDevice, "keep", lambda self, tensor, stream: None if stream.name == "down" else keep(self, tensor, stream)
    )
    with pytest.raises(Race, match="memory of compute's that was not kept for down"):
        raced(monkeypatch, tmp_path, "llama_cpp")


def test_the_detector_sees_a_machine_that_forgets_readers(monkeypatch, tmp_path):
    """A write-back reads room that a demand copy then fills; both the store and the engine forget who reads."""
    from sim.real.machine.arena import Arena
    from sim.real.machine.copies import Copies

    give, up = Arena.give, Copies.up
    monkeypatch.setattr(Arena, "give", lambda self, block, hazards: give(self, block, []))
    monkeypatch.setattr(Copies, "up", lambda self, piece, priority, after: up(self, piece, priority, ()))
    with pytest.raises(Race, match="on up writes what"):
        raced(monkeypatch, tmp_path, "mixtral_offloading")


def test_the_detector_sees_room_that_is_still_being_zeroed(monkeypatch, tmp_path):
    monkeypatch.setattr(RaceDevice, "synchronize", lambda self: None)
    monkeypatch.setattr("race_cuda.Stream.synchronize", lambda self: None)
    device = RaceDevice()
    device.local.watched = True
    with Watch(device):
        lanes = Lanes(WatchedDevice(device))
        try:
            room, home = lanes.device.on_device(64), lanes.device.on_host(64)
            with pytest.raises(Race, match=r"copy_\S* on up writes what zeros\S* on default writes"):
                lanes.submit(Work(H2D, "demand", lambda: room.copy_(home, non_blocking=True)))
        finally:
            lanes.close()


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda n: torch.empty(n, dtype=torch.int32), "pageable"),
        (lambda n: None, "two types"),
    ],
)
def test_the_detector_sees_copies_that_block(make, what):
    device = RaceDevice()
    device.strict = True
    device.local.watched = True
    with Watch(device):
        lanes = Lanes(WatchedDevice(device))
        try:
            host = make(16)
            host = lanes.device.on_host(16).view(torch.int32)[::2] if host is None else host
            room = lanes.device.on_device(host.numel() * 4).view(torch.int32)
            with pytest.raises(Race, match=what):
                lanes.submit(Work(D2H, "read", lambda: host.copy_(room, non_blocking=True)))
        finally:
            lanes.close()


def test_readers_on_two_lanes_are_both_waited_for():
    """What ran last on a piece does not stand for a write-back before it on another lane."""
    device = RaceDevice()
    device.local.watched = True
    with Watch(device):
        lanes = Lanes(WatchedDevice(device))
        try:
            room, home, other = lanes.device.on_device(64), lanes.device.on_host(64), lanes.device.on_host(64)
            back = Work(D2H, "write_back", lambda: home.copy_(room, non_blocking=True))
            run = Work(COMPUTE, "expert", lambda: room.sum())
            for work in (back, run):
                lanes.submit(work)
            with pytest.raises(Race, match=r"copy_\S* on up writes what copy_\S* on down reads"):
                lanes.submit(Work(H2D, "demand", lambda: room.copy_(other, non_blocking=True), (run,)))
        finally:
            lanes.close()


@pytest.mark.parametrize("rooms", [1, 2])
@pytest.mark.parametrize("readers", [("run",), ("back",), ("back", "run"), ()])
def test_room_waits_for_whoever_still_reads_it_and_a_copy_for_its_source(tmp_path, readers, rooms):
    """Without the engine's own waits: an expert leaves the only room to another one, or comes back into the next."""
    device = RaceDevice()
    device.local.watched = True
    setup = tiny_setup(tmp_path, "lru", 4)
    with Watch(device):
        lanes = Lanes(WatchedDevice(device))
        try:
            weights = random_weights(setup.model, "fp32", lanes.device, 0, 1 << 30)
            for raw in weights.form("fp32", lanes.device).buffers:
                device.kinds[storage_of(raw)] = PINNED
            size = setup.model.expert_bytes("fp32")
            store = DeviceStore(weights, lanes, [rooms * size])
            piece, other = setup.pieces.whole[0][0], setup.pieces.whole[0][1]
            lanes.restart_clock()

            def bring(wanted) -> list:
                block = store.room(wanted)
                ends = store.ends(wanted, block)
                work = Work(H2D, "demand", partial(copy_runs, ends), tuple(store.hazards(wanted, block)))
                store.blocks[wanted] = (block, work)
                lanes.submit(work)
                return ends

            for _ in range(3):
                ends = bring(piece)
                for name in readers:
                    after = (store.blocks[piece][1],)
                    if name == "run":
                        store.last_use[piece] = Work(COMPUTE, "expert", lambda ends=ends: ends[0][1].sum(), after)
                        lanes.submit(store.last_use[piece])
                    else:
                        back = [(b, a) for a, b in ends]
                        work = Work(D2H, "write_back", partial(copy_runs, back), after)
                        store.copying_down(piece, work)
                        lanes.submit(work)
                store.release(piece)
                if rooms == 1:
                    bring(other)
                    store.release(other)
            lanes.settle()
            assert not device.found
        finally:
            lanes.close()
            setup.close()
