cimport cython

@cython.locals(last=int, instant=int, step=Py_ssize_t, use=Py_ssize_t, start=Py_ssize_t, stop=Py_ssize_t)
cpdef keep(long long[::1] ids, long long[::1] stops, long long[::1] since, int[::1] before, int room, bint working, unsigned char[::1] found)
