cimport cython
from sim.machine.copies cimport Copy, copy_of
from sim.machine.copy_queue cimport CopyQueue
from sim.machine.host cimport Host
from sim.machine.lanes cimport SerialLane
from sim.machine.stream cimport Stream
from sim.machine.links cimport Links
from sim.machine.turn cimport Turn
from sim.policy.pieces cimport Piece
from sim.policy.tickets cimport Ticket

cdef int _DEMAND, _HOST

@cython.final
cdef class Transfers:
    cdef object _cost
    cdef Host _host
    cdef Stream _stream
    cdef Links _links
    cdef CopyQueue _first
    cdef SerialLane _down
    cdef readonly double launch_s
    cdef readonly int calls
    cdef list _copies, _part_launches
    cdef readonly long long back_bytes, kv_out_bytes, kv_in_bytes, n_kv_out
    cdef readonly double ends_s, kv_out_s
    @cython.locals(queue=CopyQueue, host=Host, now_s=double, start_s=double)
    cdef bint demand(self, Piece piece, double ready_s) except -1
    @cython.locals(queue=CopyQueue, host=Host, now_s=double, free_s=double, copy_s=double, launch_s=double,
                   launched=double, shares=bint, told=bint, slows_until_s=double, begun_s=double, start_s=double,
                   idle=bint, at=cython.Py_ssize_t)
    cdef bint demand_turn(self, Turn turn) except -1
    @cython.locals(host=Host, links=Links, now_s=double, queue=CopyQueue, duration_s=double, length=int, copy=Copy,
                   parts_differ=bint, n_bytes=cython.longlong)
    cdef Copy copy(self, Piece piece, int priority, double ready_s, tuple after)
    @cython.locals(host=Host, launch_s=double, calls=int, index=int, known=tuple)
    cdef _launch(self, Piece piece)
    @cython.locals(launch=tuple, of_index=list)
    cdef tuple _part_launch(self, Piece piece)
    @cython.locals(of_index=list, index=int, timed=tuple)
    cdef _time(self, Piece piece, CopyQueue queue)
    @cython.locals(queue=CopyQueue, host=Host, seconds=double, length=int, copy=Copy, link=CopyQueue)
    cdef Copy copy_back(self, Piece piece, double ready_s, tuple after)
    @cython.locals(queue=CopyQueue, host=Host, seconds=double, length=int, demanded=bint, read=Copy)
    cdef Copy read(self, int layer, int expert, long long n_bytes, int priority)
    @cython.locals(links=Links, queue=CopyQueue, host=Host, n_bytes=cython.longlong, seconds=double, length=int,
                   copy=Copy)
    cdef move_kv(self, int n_pages, long long page_bytes, bint down)
