cimport cython
from sim.machine.kernel_group cimport Group
from sim.machine.host cimport Host
from sim.machine.stream cimport Stream
from sim.machine.operations cimport Operations, Places
from sim.machine.runs cimport Runs
from sim.machine.price cimport Launch, Operation, Price
from sim.machine.turn cimport Turn
from sim.policy.pieces cimport Piece
from sim.policy.tickets cimport Ticket

cdef int _H2D, _HOST

@cython.final
cdef class Experts:
    cdef object _cost
    cdef Host _host
    cdef Stream _stream
    cdef Operations _operations
    cdef readonly Places members
    cdef readonly bint grouped
    cdef readonly str precision
    cdef list _groups, _of_one_token
    cdef readonly Group group
    cdef bint _alone
    cdef dict _by_size, _in_groups
    cdef Operation _leader
    cdef forget(self)
    @cython.locals(group=Group)
    cdef void close(self) noexcept
    @cython.locals(group=Group)
    cdef Operation operation(self, Piece piece, int n_tokens, double arrived_s, tuple after)
    @cython.locals(of_index=list, index=int, operation=Operation)
    cdef Operation _by_itself(self, Piece piece, int n_tokens)
    @cython.locals(operation=Operation)
    cdef Operation _of_size(self, Piece piece, int n_tokens)
    @cython.locals(group=Group, joins=bint, plain=bint, ticket=Ticket, last=Operation)
    cdef Operation _join(self, Piece piece, int n_tokens, double arrived_s, tuple after)
    cdef Operation _lead(self)
    cdef Operation _member(self, Operation last)
    @cython.locals(operation=Operation)
    cdef Operation _place(self, Launch launch, object priced)
    @cython.locals(members=Places, last=Operation)
    cdef meet(self, int place)
    @cython.locals(frac=double, by_kind=dict, found=tuple, joined=Operation)
    cdef Operation _of_share(self, Group group, double slack_s, Piece piece, int n_tokens)
    @cython.locals(stream=Stream, host=Host, group=Group, members=Places, place=cython.Py_ssize_t,
                   costs=cython.Py_ssize_t, told=bint, ran=bint, begins=bint, n=cython.Py_ssize_t, at=cython.Py_ssize_t,
                   now_s=double, free_s=double, slowed_s=double, more_s=double, launched_s=double, waited_s=double,
                   starved_s=double, arrived_s=double, host_s=double, start_s=double, end_s=double, last_s=double,
                   copied_s=double, runs=Runs)
    cdef bint run_turn(self, Turn turn) except -1
