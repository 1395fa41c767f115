cimport cython
from sim.machine.meter cimport Meter, Seconds
from sim.machine.price cimport Operation
from sim.machine.lanes cimport cause_of
from sim.machine.runs cimport Paths, Runs
from sim.machine.waiting cimport Waiting
from sim.policy.tickets cimport Ticket

cdef int _H2D, _HOST, _KEPT, _N_RESOURCES

@cython.final
cdef class Launched(Ticket):
    cdef public object op
    cdef public int layer, expert, n_tokens, length, row, link
    cdef public double first_s, last_s, duration_s, arrived_s, slowed_s, more_s, tail_s
    cdef public tuple after

@cython.final
cdef class Stream:
    cdef readonly object name
    cdef readonly Runs runs
    cdef public int link
    cdef public bint looks_down
    cdef public double free_s
    cdef double[::1] gaps_s
    cdef readonly Seconds seconds
    @cython.locals(parts_s=list)
    cpdef list parts(self)
    cdef readonly int blame
    cdef readonly bint blames_prefetch
    cdef readonly Waiting waiting
    cdef readonly object pending
    cdef readonly int n_pending
    cdef public tuple joined
    cdef Launched launch(self, object op, int layer, int expert, int n_tokens, Operation operation, double host_s,
                         double launched_s, double arrived_s, tuple after)
    cpdef join(self, Ticket ticket)
    @cython.locals(ticket=Ticket)
    cpdef Ticket newest(self)
    cdef public object spans
    @cython.locals(ticket=Ticket, start_s=double, cause=int, lane=int, known=bint, work=Launched)
    cpdef Launched run(self, object op, int layer, int expert, int n_tokens, double first_s, double last_s,
                       double duration_s, int length, double arrived_s, tuple after, double slowed_s=*,
                       double more_s=*, double tail_s=*)
    @cython.locals(free_s=double, gap_s=double, end_s=double, prefetched=bint)
    cpdef place(self, object op, int layer, int expert, int n_tokens, double start_s, int cause, double first_s,
                     double last_s, double duration_s, int length, double arrived_s, tuple after, double slowed_s,
                     double more_s, double tail_s, int lane)
    cdef public double copied_s, written_s, slowed_s, owed_s
    cdef public bint remembers
    cdef double[::1] noted
    cdef long long n_noted
    cdef double beside(self, double start_s, double end_s, double slowed_s, double more_s) noexcept
    @cython.locals(at=int)
    cdef void note(self, double start_s, double end_s, double slowed_s, double more_s) noexcept
    @cython.locals(at=int, before=int, began_s=double, ended_s=double, added_s=double, both_s=double)
    cpdef void copies(self, double start_s, double end_s, bint back) noexcept
    @cython.locals(free_s=double)
    cdef void pay(self) except *
    cdef double[::1] waited_s
    cdef int first_row, row
    cdef double charged_host_s, charged_h2d_s
    cdef void charge(self) noexcept
    @cython.locals(at=int)
    cdef void _wait(self, int layer, int expert, int cause, bint speculative, double gap_s) noexcept
    @cython.locals(at=int, resource=int, own=int)
    cdef void _wait_down(self, int layer, int expert, int cause, bint speculative, double time_s, int lane) except *
    cdef void begin(self, int phase) noexcept
    cdef void enter(self, int layer) noexcept
    cdef void leave(self) noexcept
    @cython.locals(ticket=Ticket, ready_s=double)
    cdef double late_s(self, double start_s, int cause, double first_s, double arrived_s, tuple after) noexcept
    @cython.locals(ticket=Ticket, work=Launched, start_s=double, cause=int, lane=int, row=int)
    cpdef bint progress(self) except -1
    cpdef void idle_until(self, double time_s, int cause, bint speculative=*, int lane=*) except *

@cython.locals(ticket=Ticket)
cdef bint _for_a_prefetch(double start_s, tuple after) noexcept

@cython.locals(stream=Stream)
cpdef void progress(list streams)
