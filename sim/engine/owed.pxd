cdef class Owed:
    cdef public int layer
    cdef long long[::1] tokens, order, asked
    cdef readonly int n, n_left, n_experts
    cpdef void begin(self)
    cpdef void add(self, int expert, int n_tokens)
    cpdef void settle(self, int expert)
    cpdef list experts(self)
    cpdef long long owes(self, int layer, int expert)
