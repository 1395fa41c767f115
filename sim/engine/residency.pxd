cimport cython
from sim.machine.runs cimport lane_of
from sim.machine.turn cimport Turn
from sim.policy.pieces cimport Piece, Pieces
from sim.policy.tickets cimport Ticket, ends_at

cdef int _H2D

cdef struct known:  # a `Row`
    double arrived_s, busy_s
    long long came, left_in, n_ran, n_again
    int origin, unused, prev, next

@cython.final
cdef class Residency:
    cdef readonly Pieces pieces
    cdef readonly int n_gpus, n_known, n_parts
    cdef readonly bint divided
    cdef public long long[::1] budget_bytes, used_bytes, peak_bytes, layer_budget, layer_used
    cdef object _flags, _rows
    cdef unsigned char[::1] here
    cdef known[::1] rows
    cdef long long n_came
    cdef bint ticketed
    cdef readonly list arrival, busy
    cdef readonly dict read_back, room_after
    cdef readonly bint tells
    cdef list _parts, _told
    @cython.locals(one=Piece, index=int)
    cpdef Piece known(self, object piece)
    cpdef bint holds(self, Piece piece) noexcept
    cpdef object flags(self)
    cpdef long long budget(self, int gpu)
    cpdef long long free_bytes(self, int gpu)
    cpdef long long room_of(self, int layer) noexcept
    @cython.locals(index=int)
    cpdef list resident_pieces(self)
    @cython.locals(ticket=Ticket)
    cpdef Ticket arrival_of(self, int index)
    @cython.locals(piece=Piece)
    cpdef Ticket copied_at(self, int index)
    @cython.locals(ticket=Ticket)
    cpdef Ticket told_of(self, int index)
    @cython.locals(part=Piece, mine=list, found=list)
    cpdef list parts(self, Piece whole, object precision=*)
    @cython.locals(parts=list)
    cpdef list sufficient(self, Piece whole, object precision=*, object done=*)
    @cython.locals(gpu=int, at=int)
    cpdef bint fits(self, Piece piece) noexcept
    @cython.locals(index=int, gpu=int, whole=int, used_bytes=cython.longlong, mine=list)
    cpdef add(self, Piece piece, Ticket arrival, double arrived_s, int origin)
    @cython.locals(index=int, gpu=int, mine=list, at=int)
    cpdef remove(self, Piece piece)
    cdef void gone(self, Piece piece, long long pass_n) noexcept
    cdef long long[::1] counts
    cpdef count_in(self, long long[::1] counts)
    @cython.locals(index=cython.Py_ssize_t, at=cython.Py_ssize_t, left=cython.longlong, n_came=cython.longlong)
    cpdef void come(self, Turn turn, int start, int stop, bint ran, int column, int further, long long pass_n) noexcept
    @cython.locals(index=cython.Py_ssize_t, at=cython.Py_ssize_t)
    cpdef void leave(self, Turn turn, int start, int stop, long long pass_n) noexcept
    cdef _grow(self)

@cython.locals(at=double, part=Piece)
cdef bint _in_a_row(list parts, Piece whole)
@cython.locals(found=list, part=Piece, before=Piece, at=cython.Py_ssize_t, last=cython.Py_ssize_t)
cdef list _by_start(list parts)
@cython.locals(at=double, part=Piece)
cdef bint _leaves_a_gap(list parts)
@cython.locals(piece=Piece)
cpdef list tiling(object parts, object done, double at=*)
@cython.locals(at=double, one=Piece)
cpdef bint side_by_side(object slices, Piece whole)
