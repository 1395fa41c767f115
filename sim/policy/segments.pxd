cimport cython
from sim.policy.decisions cimport Fetch
from sim.policy.pieces cimport Piece

@cython.final
cdef class Segment:
    cdef readonly int expert, gpu
    cdef readonly tuple slices
    cdef readonly long long n_bytes
    cdef readonly list copies_s, fetch, prefetch, evict
    cdef readonly object run
    cdef readonly bint held
    cdef bint settled, ready, begun
    cpdef hold(self, bint held)

@cython.final
cdef class SplitExpert:
    cdef readonly Segment top, bottom
    cdef readonly list segments, absent
    cdef readonly int n_slices, n_held
    @cython.locals(one=Segment, asked=Fetch, n_absent=cython.Py_ssize_t)
    cpdef look(self, object view)
    @cython.locals(one=Segment, n_bytes=cython.longlong)
    cpdef long long missing_bytes(self) noexcept

@cython.final
cdef class Buffer:
    cdef readonly list said, room
    @cython.locals(gpu=int)
    cpdef begin(self, object view, list kept_bytes)
    cpdef bint fits(self, SplitExpert split, int gpu) except -1
    cpdef leave(self, Segment segment)
    cpdef wait(self, SplitExpert split)
    @cython.locals(one=Segment)
    cpdef demand(self, SplitExpert split)
    @cython.locals(one=Segment, split=SplitExpert, taken=list)
    cpdef list ahead(self, dict splits, list order, int gpu, double window_s)
    cdef _take(self, Segment segment, list copies)
    @cython.locals(one=Segment)
    cpdef run_ready(self, SplitExpert split)
    @cython.locals(one=Segment)
    cpdef run(self, SplitExpert split, object whole, bint keeps_top)

@cython.locals(found=int, expert=int)
cpdef int lowest(list keys, dict experts, dict but_for) except -2
