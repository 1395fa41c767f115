cimport cython

cpdef object reassign(object engine, object gate)
cdef list _of_one(object gate)
cdef list _ids(object engine, object gate, object answer)
cpdef dict needs_of_token(object engine, list ids)
@cython.locals(mass_before=double, mass_kept=double, scores=list)
cpdef bint count_token(object engine, object gate, list chosen, list after)
