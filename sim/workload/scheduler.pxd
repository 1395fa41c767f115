cdef class Scheduler:
    cdef readonly object waiting, profiled
    cdef bint _open_loop
    cdef object _to_come
