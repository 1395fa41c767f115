cimport cython
from sim.engine.by_expert cimport ByExpert
from sim.engine.counts cimport PrefetchTally, Tally
from sim.engine.flying cimport Flying
from sim.engine.pending_experts cimport PendingExperts
from sim.engine.prefetch_queue cimport PrefetchQueue
from sim.engine.residency cimport Residency
from sim.engine.rooms cimport Rooms
from sim.engine.victims cimport Victims
from sim.machine.protocol cimport Machine
from sim.machine.runs cimport lane_of
from sim.policy.pieces cimport Piece
from sim.policy.tickets cimport Ticket, ends_at
from sim.policy.wishes cimport Wishes

cdef int _DEMAND_WHOLE, _DEMAND, _SPECULATIVE, _DEMANDED, _PREFETCHED, _H2D

@cython.final
cdef class Copies:
    cdef readonly object policy
    cdef public object log
    cdef public object view
    cdef readonly Machine machine
    cdef readonly Residency residency
    cdef readonly PendingExperts pending
    cdef readonly Tally tally
    cdef PrefetchTally prefetched
    cdef ByExpert by_expert
    cdef readonly PrefetchQueue queue
    cdef readonly Rooms rooms
    cdef readonly Victims victims
    cdef readonly bint timing, tells_evicted, tells_placed, tells_copied, polls
    cdef object obey, _victim, _evicted, _copy_done
    cdef readonly Flying flying
    cdef readonly int depth
    cdef double checked_s, quiet_s
    cpdef take_hooks(self)
    cpdef needs_timing(self, str what)
    cpdef evict(self, Piece piece)
    cdef _take_off(self, Piece piece)
    @cython.locals(index=int, busy=Ticket, busy_s=double)
    cdef _left(self, Piece piece, double now_s)
    @cython.locals(arrival=Ticket)
    cdef bint _never_came(self, Piece piece) except -1
    @cython.locals(residency=Residency, index=int, busy=Ticket, copied=Ticket, busy_s=double, readers=tuple)
    cdef _give_after(self, Piece piece, double now_s)
    cdef Piece _checked(self, object named)
    @cython.locals(rooms=Rooms, waits=tuple, ticket=Ticket)
    cdef _demand_after(self, Piece piece, tuple after)
    @cython.locals(residency=Residency, index=int, busy=Ticket, busy_s=double)
    cpdef Ticket write_back(self, Piece piece, tuple after=*)
    @cython.locals(ready_s=double, waits=tuple)
    cdef _withdrawn(self, Piece piece)
    @cython.locals(index=int, victim=Piece)
    cdef bint _make_room(self, Piece piece, bint speculative, list gone, double now_s) except -1
    cdef _tell_of(self, Piece piece, str why)
    cdef needs_queue(self, str what)
    cdef _begin_anew(self, object up_to_layer)
    cpdef Ticket fetch(self, Piece piece, tuple after=*, bint asked=*)
    @cython.locals(arrival=Ticket)
    cpdef promote(self, Piece piece)
    @cython.locals(now_s=double)
    cpdef bint demand(self, Piece piece, tuple after=*) except -1
    cpdef Ticket prefetch(self, Piece piece, double priority=*, tuple after=*)
    cpdef requeue(self, object wanted, object up_to_layer=*)
    cpdef requeue_from(self, Wishes wishes, int start, int stop, int fresh, tuple after, object up_to_layer, int most)
    @cython.locals(rooms=Rooms, machine=Machine, ticket=Ticket, ready_s=double, room_waits=tuple, gone=list, now_s=double,
                   quiet_s=double)
    cdef Ticket _hand_over(self, Piece piece, tuple after)
    @cython.locals(queue=PrefetchQueue, flying=Flying, full=bint, now_s=double, link=int, piece=Piece)
    cpdef pump(self)
    @cython.locals(arrival=Ticket)
    cpdef bint arrived(self, Piece piece) except -1
    @cython.locals(n=int)
    cpdef int n_arrived(self, object pieces) except -1
    cpdef poll(self)
    @cython.locals(machine=Machine, flying=Flying, now_s=double, quiet_s=double, link=int, index=int, after=int,
                   ticket=Ticket, end_s=double)
    cdef _forget_ended(self)
    @cython.locals(residency=Residency, index=int, arrival=Ticket)
    cpdef cancel(self, Piece piece)
    cpdef drop_queue(self, object up_to_layer)
    @cython.locals(flying=Flying, last=int, link=int, index=int, after=int, piece=Piece, aimed=bint)
    cdef _withdraw(self, object up_to_layer)
