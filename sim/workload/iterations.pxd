cimport cython

@cython.final
cdef class Range:
    cdef readonly object request
    cdef readonly int start_row, stop_row, context, n_rejected
    cdef readonly str phase
    cdef readonly bint puts_out
    cdef tuple _fields(self)

@cython.final
cdef class Block:
    cdef readonly int first_row, last_row, n_rows, width
    cdef readonly long long[::1] ids

@cython.final
cdef class Row:
    cdef readonly Block block
    cdef readonly int at, top_k
    cpdef list layer(self, int layer)

cdef class Iteration:
    cdef readonly int index, n_tokens, n_out, number
    cdef readonly list ranges
    cdef readonly str phase, counted
    cdef readonly object _trace
    cdef readonly Row token
    cdef list _counts, _rows
    cdef object _ids
    @cython.locals(n_tokens=int, n_prompts=int, n_out=int, n_rows=int, r=Range)
    cdef _count(self)
    @cython.locals(row=Row, at=int, i=int)
    cpdef dict chosen(self, int layer)

@cython.final
cdef class Feed:
    cdef object _trace
    cdef int _top_k
    cdef dict _blocks
    @cython.locals(only=Range, row=int, block=Block)
    cpdef Row row(self, list ranges)
    @cython.locals(block=Block)
    cpdef Block rest(self, object request, int row)
    @cython.locals(row=int, end=int, block=Block)
    cdef Block _read(self, Range only)
