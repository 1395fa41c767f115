cimport cython

cdef int _H2D, _HOST, _PREFETCH, _KINDS

@cython.final
cdef class Waiting:
    cdef readonly int n_layers, n_rows
    cdef readonly double[::1] waited_s
    cdef readonly int first, row
    cpdef void begin(self, int phase) noexcept
    cpdef void enter(self, int layer) noexcept
    cpdef void leave(self) noexcept
    cpdef int row_of(self, int layer, int expert, int cause) noexcept
    cpdef void charge(self, int at, int cause, bint speculative, double gap_s) noexcept
    @cython.locals(at=int)
    cpdef take_in(self, Waiting other)
    cpdef void wait(self, int layer, int expert, int cause, bint speculative, double gap_s) noexcept
