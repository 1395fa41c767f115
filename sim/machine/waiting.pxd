cimport cython

cdef int _H2D, _HOST, _PREFETCH, _KINDS

@cython.final
cdef class Waiting:
    cdef readonly int n_layers
    cdef double[::1] waited_s
    cdef int first, row
    cpdef void begin(self, bint decodes) noexcept
    cpdef void enter(self, int layer) noexcept
    cpdef void leave(self) noexcept
    cpdef void idle(self, int cause, bint speculative, double gap_s) noexcept
    @cython.locals(at=int)
    cpdef void before(self, int layer, int expert, int cause, bint speculative, double gap_s) noexcept
