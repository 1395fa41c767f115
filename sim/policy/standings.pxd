cimport cython

@cython.locals(n=cython.Py_ssize_t, n_layers=cython.Py_ssize_t, top_k=cython.Py_ssize_t, n_experts=cython.Py_ssize_t,
               layer=cython.Py_ssize_t, token=cython.Py_ssize_t, expert=cython.Py_ssize_t, other=cython.Py_ssize_t,
               at=cython.Py_ssize_t, k=cython.Py_ssize_t, key=cython.longlong, score=double, later=bint,
               n_later=cython.Py_ssize_t, order='long long[::1]', place='long long[::1]', rank='long long[::1]', counts=bint, told=bint)
cdef _follow(
    long long[:, ::1] by_expert, long long[:, ::1] uses, long long[::1] n_tokens, const long long[::1] of_uses,
    long long unit, const long long[:, :, ::1] ids, const double[:, :, ::1] foretold, const unsigned char[:, ::1] known,
    long long[:, ::1] by_place, long long[:, ::1] by_forecast, long long[:, :, ::1] by_both, long long[:, ::1] room)
