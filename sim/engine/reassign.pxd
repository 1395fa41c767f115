cimport cython
from sim.engine.counts cimport Loss
from sim.workload.gate cimport Gate, gate_of

cpdef Gate reassign(object engine, Gate gate)
cdef list _of_one(Gate gate)
cdef list _ids(object engine, Gate gate, object answer)
@cython.locals(n_kept=int)
cpdef dict needs_of_token(object engine, list ids)
@cython.locals(mass_before=double, mass_kept=double, scores=list, loss=Loss, expert=int, score=double, scale=double)
cpdef bint count_token(object engine, Gate gate, list chosen, list after) except -1
