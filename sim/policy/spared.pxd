cimport cython

cdef unsigned char _FREE, _NOT_FOR_PREFETCH, _LAST

@cython.final
cdef class Spared:
    cdef unsigned char[::1] bar
    cdef list shielded, aimed
    @cython.locals(expert=int)
    cpdef shield(self, int first, object experts)
    cpdef unshield(self)
    @cython.locals(expert=int)
    cpdef aim(self, int first, object experts)
