cimport cython
from sim.workload.iterations cimport Block

@cython.final
cdef class PendingExperts:
    cdef public int layer
    cdef long long[::1] tokens, order, asked
    cdef readonly int n, n_left, n_experts
    cdef readonly long long n_tokens
    cpdef void begin(self) noexcept
    cpdef void add(self, int expert, int n_tokens) noexcept
    @cython.locals(i=cython.Py_ssize_t, expert=cython.Py_ssize_t)
    cpdef void add_row(self, Block block, int at, int n) noexcept
    cpdef void settle(self, int expert) noexcept
    cpdef object tokens_by_expert(self)
    cpdef list experts(self)
    cpdef long long tokens_of(self, int layer, int expert) noexcept
