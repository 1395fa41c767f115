"""The lanes of a run: what serves one operation at a time. Tables of results, timelines and devices derive from here.

A lane's times are arithmetic in `sim.machine`, processes in `sim.machine.events`, streams and threads in
`sim.real.devices`.
"""

from __future__ import annotations

from typing import NamedTuple


class Lane(NamedTuple):
    """One lane.

    Attributes:
        name: in spans, timelines and utilisation. thing: in sentences.
        block: of the hardware profile, which prices it. probe: of `calibrate`, which measures that block.
        share: the key under which results give the part of GPU 0's time that waited for it; None: no key of its own.
        resource: what `bottleneck.resource` calls it. doing: what GPU 0 does meanwhile, in words.
        on_device: a real device has it, as a stream, a copy engine or a pool of threads.
        always: every run has it; of others only results of runs that have it tell.
    """

    name: str
    thing: str
    block: str
    probe: str
    share: str | None = None
    resource: str = ""
    doing: str = ""
    on_device: bool = False
    always: bool = True


LANES = (
    Lane("gpu", "the GPU", "gpu", "expert", "gpu", "gpu", "computing", on_device=True),
    Lane("h2d", "the copy link", "h2d", "copy", "copy", "copy link", "waiting for copies", on_device=True),
    Lane("d2h", "the link back", "d2h", "copy", on_device=True),
    Lane("host", "the host", "host", "host", "host", "host", "waiting for the host's launches and reads"),
    Lane("cpu", "the CPU", "cpu", "cpu_expert", "cpu", "cpu", "waiting for experts on the CPU", on_device=True),
    Lane("predictor", "the predictor", "gpu", "expert", "predictor", "predictor", "waiting for predictions"),
    Lane("nvme", "the drive", "drive", "copy", "drive", "drive", "waiting for reads from the drive", always=False),
)
WAITED_FOR = {lane.share: lane for lane in LANES if lane.share}  # in the order of `sim.machine.lanes.CAUSES`
ALWAYS = tuple(share for share, lane in WAITED_FOR.items() if lane.always)
ON_DEVICE = tuple(lane.name for lane in LANES if lane.on_device)

# Causes: what a waiting compute stream waits for. Indices into the parts of its time line.
GPU, H2D, HOST, CPU, SIDE, NVME, IDLE = range(7)

# Resources: what the critical path of a run is charged to. Causes, and the links that no stream waits for directly.
BACK, PEER = 7, 8
RESOURCES = ("gpu", "h2d", "host", "cpu", "predictor", "nvme", "idle", "d2h", "p2p")

# Lanes by number, each with its resource: those of GPU 0 and of the machine, then stream and link of each further GPU.
# `WIRE` is the way to another GPU on which nothing queues.
PEER_OUT, PEER_IN, WIRE, N_SHARED = 8, 9, 10, 11
ATTENDED = (GPU, H2D, HOST, CPU, SIDE, NVME, IDLE, BACK, PEER, PEER, GPU)

# What shares of `bottleneck` are called -> the resource's index, and the lane in words.
CHARGED = {share: (cause, lane) for cause, (share, lane) in enumerate(WAITED_FOR.items())}
CHARGED["back"] = BACK, Lane("d2h", "the link back", "d2h", "copy", "back", "link back", "waiting for copies back")
CHARGED["peer"] = (
    PEER,
    Lane("p2p", "the link between GPUs", "p2p", "copy", "peer", "peer link", "waiting for transfers between GPUs"),
)
