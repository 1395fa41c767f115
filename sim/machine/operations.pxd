cimport cython
from sim.machine.stream cimport Stream
from sim.machine.meter cimport Meter, Seconds
from sim.machine.price cimport Launch, Operation, Price
from sim.machine.shared_memory cimport GpuMemory

@cython.final
cdef class Places:
    cdef readonly list operations
    cdef readonly int n
    cdef public int n_met
    cdef double[::1] costs_s
    cdef long long[::1] n_used
    @cython.locals(at=int)
    cdef put(self, int place, Operation operation)
    @cython.locals(place=int, operation=Operation)
    cdef void tell(self) noexcept
    cdef forget(self)

@cython.final
cdef class Operations:
    cdef readonly GpuMemory memory
    cdef Seconds _seconds
    cdef Meter _lengths
    cdef readonly Places members, blocks
    cdef Meter _prices
    cdef list _used
    cdef int _n_used
    @cython.locals(operation=Operation)
    cdef Operation of(self, Price price, Launch launch)
    cdef reprice(self, Operation operation, Price price)
    @cython.locals(operation=Operation, duration_s=double)
    cdef Operation used_on(self, Stream stream, Price price, Launch launch)
    cdef void use(self, Operation operation) noexcept
    cdef meet(self, Operation operation)
    @cython.locals(operation=Operation, at=int)
    cdef void tell(self) noexcept
    cdef spend(self, list spent_s)
    cdef bint are_many(self) noexcept
    cdef forget(self)
