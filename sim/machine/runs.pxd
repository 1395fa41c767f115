cimport cython

cdef int _GPU, _H2D, _HOST, _IDLE, _N_SHARED, _N_RESOURCES

cpdef int lane_of(int lane, int gpu) noexcept
cpdef bint is_stream(int lane) noexcept

@cython.final
cdef class Runs:
    cdef readonly Paths paths
    cdef readonly int number
    @cython.locals(paths=Paths, n=int, at=int)
    cpdef bint begin(self, double since_s, int lane) except -1
    @cython.locals(paths=Paths)
    cpdef double began_s(self)

@cython.final
cdef class Paths:
    cdef readonly list lanes
    cdef int n_streams, n_lanes, room
    cdef double[::1] since_s, base_s, lag_s, kept_s, charged_s
    cdef readonly double[::1] busy_until_s
    cdef long long[::1] after, resources, n, based, at, kept
    cpdef Runs of(self, int lane, int gpu)
    cpdef int stream_of(self, int gpu)
    cpdef lags(self, int lane, double lag_s)
    @cython.locals(lane=int, at=int, room=int)
    cdef grow(self)
    @cython.locals(at=int, first=int, until_s=double, since_s=double)
    cdef void _walk(self, int lane, double time_s, double from_s) noexcept
    cpdef double[::1] charge(self, int lane, double time_s, double from_s)
    @cython.locals(lane=int, at=int)
    cpdef double[::1] settle(self, double now_s)
    @cython.locals(at=int, first=int, own=int, resource=int)
    cdef void _keep(self, int lane, double now_s) noexcept
    @cython.locals(at=int, first=int, own=int, resource=int)
    cdef void _forget(self, int lane, int kept) noexcept
