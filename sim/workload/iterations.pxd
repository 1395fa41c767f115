cimport cython
@cython.final
cdef class Block:
    cdef readonly int first_row, n_rows, width
    cdef readonly long long[::1] ids

@cython.final
cdef class Row:
    cdef readonly Block block
    cdef readonly int at, top_k
    cpdef list layer(self, int layer)

cdef class Iteration:
    cdef readonly int index, n_tokens
    cdef readonly list ranges
    cdef readonly str phase
    cdef readonly object _trace
    cdef readonly Row token
    cdef list _counts, _rows
