cimport cython
from sim.engine.residency cimport Residency
from sim.policy.pieces cimport Piece

cdef int _MISS, _CAPACITY, _EVICTED_UNUSED, _WRONG_PREDICTION, _TOO_LATE, _EVICT_PIECE, _HELD, _AGAIN

@cython.final
cdef class ByExpert:
    cdef readonly int n_layers, n_experts, n_rows, stride
    cdef public int first
    cdef public int spoken
    cdef readonly long long pass_n
    cdef readonly bint predicts
    cdef readonly long long[::1] n
    cdef long long[::1] wanted_for, predicted_for
    cpdef begin(self, int phase, Residency residency)
    @cython.locals(again=int, row=int)
    cpdef end(self, Residency residency)
    @cython.locals(column=int, row=int)
    cdef void _hold(self, Residency residency, int sign) noexcept
    cpdef void add(self, int column, Piece piece, long long n) noexcept
    cpdef void more(self, int column, int row, long long n) noexcept
    @cython.locals(at=int)
    cpdef take_in(self, ByExpert other)
    cdef int why(self, int layer, int row, long long left) noexcept
    @cython.locals(layer=int, aim=cython.longlong)
    cdef void predicted(self, Piece piece) noexcept
    cdef void evicted(self, Piece piece) noexcept
