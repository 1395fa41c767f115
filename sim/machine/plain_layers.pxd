cimport cython
from sim.machine.blocks cimport Blocks
from sim.machine.copy_queue cimport CopyQueue
from sim.machine.experts cimport Experts
from sim.machine.kernel_group cimport Group
from sim.machine.host cimport Host
from sim.machine.stream cimport Stream
from sim.machine.links cimport Links
from sim.machine.runs cimport Runs
from sim.machine.operations cimport Places
from sim.machine.simulated cimport SimulatedMachine
from sim.machine.turn cimport Turn

cdef int _GPU, _H2D, _HOST, _KINDS

@cython.locals(host=Host, stream=Stream, links=Links, blocks=Blocks, experts=Experts, queue=CopyQueue, group=Group,
               members=Places, row=Places, block=int, place=int, costs=int, slowed_s=double, more_s=double, now_s=double,
               free_s=double, link_s=double, launched_s=double, waited_s=double, starved_s=double, joins=bint,
               launch_s=double, sync_s=double, n_copies=int, layer=int, gate_s=double, start_s=double,
               last_s=double, n_here=int, n_coming=int, at=int, arrived_s=double, copied_s=double,
               runs=Runs, since_s=double, gate_since_s=double)
cpdef bint plain_layers(SimulatedMachine machine, int first, int n, long long[::1] here, long long[::1] coming,
                        Turn turn) except -1
