cimport cython
from sim.machine.blocks cimport Blocks
from sim.machine.copies cimport Copy
from sim.machine.copy_queue cimport CopyQueue
from sim.machine.runs cimport Paths, Runs
from sim.machine.cpu_pool cimport CpuPool
from sim.machine.experts cimport Experts
from sim.machine.host cimport Host
from sim.machine.lanes cimport SerialLane
from sim.machine.stream cimport Launched, Stream
from sim.machine.links cimport Links
from sim.machine.operations cimport Operations
from sim.machine.peers cimport Peers
from sim.machine.price cimport Operation
from sim.machine.protocol cimport Machine
from sim.machine.transfers cimport Transfers
from sim.machine.turn cimport Turn
from sim.machine.waiting cimport Waiting
from sim.policy.pieces cimport Piece
from sim.policy.tickets cimport Ticket, ends_at
from sim.workload.iterations cimport Iteration

cdef int _H2D

@cython.final
cdef class SimulatedMachine(Machine):
    cdef readonly object cost
    cdef readonly list streams, h2d, serial, gpu_s, side_s
    cdef readonly Stream stream
    cdef readonly SerialLane side
    cdef readonly Host host
    cdef readonly Links links
    cdef readonly Operations operations
    cdef readonly Blocks blocks
    cdef readonly Experts experts
    cdef readonly Peers peers
    cdef readonly CpuPool pool
    cdef readonly Transfers transfers
    cdef dict _predicted_by
    cdef double _kernel_s
    cdef readonly Paths paths
    cdef bint _links_per_stream, _shares
    @cython.locals(links=Links, pool=CpuPool, stream=Stream, queue=CopyQueue)
    cdef _look_at_lanes(self)
