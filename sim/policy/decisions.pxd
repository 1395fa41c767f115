cimport cython

cdef class Record:
    cpdef tuple values(self)

@cython.final
@cython.no_gc
cdef class Fetch(Record):
    cdef readonly object piece, after

@cython.final
@cython.no_gc
cdef class Prefetch(Record):
    cdef readonly object piece, priority, after

@cython.final
cdef class Requeue(Record):
    cdef readonly object wanted, up_to_layer

@cython.final
cdef class RequeueFrom(Record):
    cdef readonly object wishes, start, stop, fresh, after, up_to_layer, most

@cython.final
cdef class Foresee(Record):
    cdef readonly object outlook, layer, predict

@cython.final
cdef class Cancel(Record):
    cdef readonly object piece

@cython.final
cdef class DropQueue(Record):
    cdef readonly object up_to_layer

@cython.final
@cython.no_gc
cdef class RunGpu(Record):
    cdef readonly object expert, after, joined

@cython.final
@cython.no_gc
cdef class RunPart(Record):
    cdef readonly object piece, after, slices

@cython.final
@cython.no_gc
cdef class RunCpu(Record):
    cdef readonly object expert, join_layer

@cython.final
cdef class RunCpuAhead(Record):
    cdef readonly object layer, expert, n_tokens

@cython.final
cdef class Serve(Record):
    pass

@cython.final
@cython.no_gc
cdef class Evict(Record):
    cdef readonly object piece

@cython.final
cdef class WriteBack(Record):
    cdef readonly object piece, after

@cython.final
@cython.no_gc
cdef class Wait(Record):
    cdef readonly object tickets

@cython.final
@cython.no_gc
cdef class Predict(Record):
    cdef readonly object duration_s, lane, blocking, basis
