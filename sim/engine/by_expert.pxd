cimport cython
from sim.policy.pieces cimport Piece

cdef int _MISS, _CAPACITY, _EVICTED_UNUSED, _WRONG_PREDICTION, _TOO_LATE, _EVICT_PIECE, _HELD

@cython.final
cdef class ByExpert:
    cdef readonly int n_layers, n_experts, n_rows, stride, first
    cdef public int spoken
    cdef readonly long long pass_n
    cdef readonly bint predicts
    cdef readonly long long[::1] n, left_in
    cdef long long[::1] wanted_for, predicted_for
    cpdef begin(self, int phase, unsigned char[::1] here)
    @cython.locals(column=int, row=int)
    cpdef void hold(self, unsigned char[::1] here, int sign) noexcept
    cpdef long long total(self, int column, int phase, int row) noexcept
    @cython.locals(at=int, found=cython.longlong, expert=int)
    cpdef long long of_layer(self, int column, int phase, int layer) noexcept
    cpdef void add(self, int column, Piece piece, long long n) noexcept
    cpdef void more(self, int column, int row, long long n) noexcept
    @cython.locals(at=int)
    cpdef take_in(self, ByExpert other)
    @cython.locals(left=cython.longlong)
    cdef int why(self, int layer, int row) noexcept
    @cython.locals(layer=int, aim=cython.longlong)
    cdef void predicted(self, Piece piece) noexcept
    cdef void evicted(self, Piece piece) noexcept
    cdef void gone(self, Piece piece) noexcept
