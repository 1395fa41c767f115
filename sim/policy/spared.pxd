cimport cython

cdef unsigned char _FREE, _NOT_FOR_PREFETCH, _LAST

@cython.final
cdef class Spared:
    cdef unsigned char[::1] bar
    cdef int n_experts
    cdef list shielded, aimed
    @cython.locals(first=int, expert=int)
    cpdef shield(self, int layer, object experts)
    cpdef unshield(self)
    @cython.locals(first=int, expert=int)
    cpdef aim(self, int layer, object experts)
