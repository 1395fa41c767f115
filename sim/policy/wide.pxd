# What the searches and the engine's `victims` leave to C. Several numbers at a time: the AVX2 of x86-64 where this very
# processor has it, asked when a search is made. All sums are of whole numbers and exact, so that their order, and who
# adds, changes no bit; cosines are two products in the order in which they form them. Elsewhere they run their
# own loops.

from libc.math cimport sqrt

cdef extern from *:
    """
    #include <stddef.h>
    static inline ptrdiff_t moesim_next_at_most(const long long* indices, const double* values, ptrdiff_t at,
                                                ptrdiff_t n, double most) {
        while (at < n && values[indices[at]] > most) at++;
        return at;
    }
    #if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
    #include <immintrin.h>
    #define MOESIM_AVX2 static __attribute__((target("avx2"), unused))
    static int moesim_is_wide(void) { return __builtin_cpu_supports("avx2") != 0; }

    /* Four sums each of the dots so far in d0, d1: their cosines, and in each of eight lanes the largest, first met. */
    #define MOESIM_TAKE \\
        _mm256_storeu_pd(dots + i, d0); \\
        _mm256_storeu_pd(dots + i + 4, d1); \\
        d0 = _mm256_mul_pd(d0, _mm256_loadu_pd(norms + i)); \\
        d1 = _mm256_mul_pd(d1, _mm256_loadu_pd(norms + i + 4)); \\
        MOESIM_MOST
    #define MOESIM_BEGIN \\
        const __m256d eight = _mm256_set1_pd(8.0); \\
        __m256d here = _mm256_setzero_pd(), at0 = here, at1 = here; \\
        __m256d most0 = _mm256_set1_pd(-__builtin_inf()), most1 = most0; \\
        ptrdiff_t i;

    /* Of the eight lanes and of what is left behind them, from i on, the first largest. */
    MOESIM_AVX2 int moesim_first(__m256d most0, __m256d most1, __m256d at0, __m256d at1, const double* left,
                                 ptrdiff_t i, ptrdiff_t n) {
        double most[8], at[8], best;
        ptrdiff_t found;
        int lane;
        _mm256_storeu_pd(most, most0);
        _mm256_storeu_pd(most + 4, most1);
        _mm256_storeu_pd(at, at0);
        _mm256_storeu_pd(at + 4, at1);
        best = most[0];
        found = (ptrdiff_t)at[0];
        for (lane = 1; lane < 8; lane++) {
            ptrdiff_t place = (ptrdiff_t)at[lane] + lane;
            if (most[lane] > best || (most[lane] == best && place < found)) {
                best = most[lane];
                found = place;
            }
        }
        for (; i < n; i++, left++)
            if (*left > best) {
                best = *left;
                found = i;
            }
        return (int)found;
    }
    #define MOESIM_MOST \\
        at0 = _mm256_blendv_pd(at0, here, _mm256_cmp_pd(d0, most0, _CMP_GT_OQ)); \\
        at1 = _mm256_blendv_pd(at1, here, _mm256_cmp_pd(d1, most1, _CMP_GT_OQ)); \\
        most0 = _mm256_max_pd(d0, most0); \\
        most1 = _mm256_max_pd(d1, most1); \\
        here = _mm256_add_pd(here, eight);

    /* Where share * one + rest * other is largest first. */
    MOESIM_AVX2 int moesim_most_of_both(const double* one, const double* other, double share, double rest,
                                        ptrdiff_t n) {
        const __m256d shares = _mm256_set1_pd(share), rests = _mm256_set1_pd(rest);
        double left[8];
        ptrdiff_t at;
        MOESIM_BEGIN
        for (i = 0; i + 8 <= n; i += 8) {
            const __m256d d0 = _mm256_add_pd(_mm256_mul_pd(shares, _mm256_loadu_pd(one + i)),
                                             _mm256_mul_pd(rests, _mm256_loadu_pd(other + i)));
            const __m256d d1 = _mm256_add_pd(_mm256_mul_pd(shares, _mm256_loadu_pd(one + i + 4)),
                                             _mm256_mul_pd(rests, _mm256_loadu_pd(other + i + 4)));
            MOESIM_MOST
        }
        for (at = i; at < n; at++)
            left[at - i] = share * one[at] + rest * other[at];
        return moesim_first(most0, most1, at0, at1, left, i, n);
    }
    MOESIM_AVX2 int moesim_first_largest(const double* values, ptrdiff_t n) {
        MOESIM_BEGIN
        for (i = 0; i + 8 <= n; i += 8) {
            const __m256d d0 = _mm256_loadu_pd(values + i), d1 = _mm256_loadu_pd(values + i + 4);
            MOESIM_MOST
        }
        return moesim_first(most0, most1, at0, at1, values + i, i, n);
    }

    /* A layer of n paths as four pairs of numbers each, less 32768. A product of two 16-bit numbers takes 32 bits, and
       so do the sums, from whatever they begin with and modulo 2**32: less 2**31 they are signed. */
    MOESIM_AVX2 int moesim_add_pairs(const short* pairs, ptrdiff_t step, const double* row, double* dots,
                                     const double* norms, ptrdiff_t n) {
        const __m256d half = _mm256_set1_pd(2147483648.0);
        unsigned total = 0, low[4], top[4];
        __m256i begin, a, b, c, d, e, f, g, h;
        int at, split = 0;
        MOESIM_BEGIN
        for (at = 0; at < 4; at++) {
            /* Beyond 15 bits a number is the sum of two. */
            const unsigned x = (unsigned)row[2 * at], y = (unsigned)row[2 * at + 1];
            low[at] = (x > 32767 ? 32767 : x) | (y > 32767 ? 32767 : y) << 16;
            top[at] = (x > 32767 ? x - 32767 : 0) | (y > 32767 ? y - 32767 : 0) << 16;
            split |= top[at] != 0;
            total += x + y;
        }
        begin = _mm256_set1_epi32((int)(total * 32768u + 2147483648u));
        a = _mm256_set1_epi32((int)low[0]); b = _mm256_set1_epi32((int)low[1]);
        c = _mm256_set1_epi32((int)low[2]); d = _mm256_set1_epi32((int)low[3]);
        e = _mm256_set1_epi32((int)top[0]); f = _mm256_set1_epi32((int)top[1]);
        g = _mm256_set1_epi32((int)top[2]); h = _mm256_set1_epi32((int)top[3]);
        for (i = 0; i + 8 <= n; i += 8) {
            __m256d d0, d1;
            const short* p = pairs + 2 * i;
            const __m256i one = _mm256_loadu_si256((const __m256i*)p);
            const __m256i two = _mm256_loadu_si256((const __m256i*)(p + 2 * step));
            const __m256i three = _mm256_loadu_si256((const __m256i*)(p + 4 * step));
            const __m256i four = _mm256_loadu_si256((const __m256i*)(p + 6 * step));
            __m256i s = _mm256_add_epi32(begin, _mm256_madd_epi16(a, one)), t = _mm256_madd_epi16(b, two);
            s = _mm256_add_epi32(s, _mm256_madd_epi16(c, three));
            t = _mm256_add_epi32(t, _mm256_madd_epi16(d, four));
            if (split) {
                s = _mm256_add_epi32(s, _mm256_madd_epi16(e, one));
                t = _mm256_add_epi32(t, _mm256_madd_epi16(f, two));
                s = _mm256_add_epi32(s, _mm256_madd_epi16(g, three));
                t = _mm256_add_epi32(t, _mm256_madd_epi16(h, four));
            }
            s = _mm256_add_epi32(s, t);
            d0 = _mm256_add_pd(_mm256_cvtepi32_pd(_mm256_castsi256_si128(s)), half);
            d1 = _mm256_add_pd(_mm256_cvtepi32_pd(_mm256_extracti128_si256(s, 1)), half);
            d0 = _mm256_add_pd(d0, _mm256_loadu_pd(dots + i));
            d1 = _mm256_add_pd(d1, _mm256_loadu_pd(dots + i + 4));
            MOESIM_TAKE
        }
        {
            double left[8];
            ptrdiff_t rest;
            for (rest = i; rest < n; rest++) {
                for (at = 0; at < 8; at++)
                    dots[rest] += row[at] * (pairs[(at / 2 * step + rest) * 2 + at % 2] + 32768.0);
                left[rest - i] = dots[rest] * norms[rest];
            }
            return moesim_first(most0, most1, at0, at1, left, i, n);
        }
    }

    /* Dot products of a vector with n stored ones, each `step` numbers of 12 bits: 32 bits hold 512 products. */
    MOESIM_AVX2 void moesim_dots(const short* stored, ptrdiff_t step, const short* vector, double* dots, ptrdiff_t n) {
        ptrdiff_t i, first, at;
        i = 0;
        if (step <= 512)
            for (; i + 4 <= n; i += 4, stored += 4 * step) {
                __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
                for (at = 0; at < step; at += 16) {
                    const __m256i v = _mm256_loadu_si256((const __m256i*)(vector + at));
                    const short* s = stored + at;
                    a = _mm256_add_epi32(a, _mm256_madd_epi16(v, _mm256_loadu_si256((const __m256i*)s)));
                    b = _mm256_add_epi32(b, _mm256_madd_epi16(v, _mm256_loadu_si256((const __m256i*)(s + step))));
                    c = _mm256_add_epi32(c, _mm256_madd_epi16(v, _mm256_loadu_si256((const __m256i*)(s + 2 * step))));
                    d = _mm256_add_epi32(d, _mm256_madd_epi16(v, _mm256_loadu_si256((const __m256i*)(s + 3 * step))));
                }
                a = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
                _mm256_storeu_pd(dots + i, _mm256_cvtepi32_pd(
                    _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1))));
            }
        for (; i < n; i++, stored += step) {
            double dot = 0.0;
            for (first = 0; first < step; first += 512) {
                const ptrdiff_t stop = first + 512 < step ? first + 512 : step;
                __m256i sums = _mm256_setzero_si256();
                __m128i half;
                for (at = first; at < stop; at += 16)
                    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(
                        _mm256_loadu_si256((const __m256i*)(stored + at)),
                        _mm256_loadu_si256((const __m256i*)(vector + at))));
                half = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
                half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
                half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1));
                dot += (double)_mm_cvtsi128_si32(half);
            }
            dots[i] = dot;
        }
    }
    #else
    static int moesim_is_wide(void) { return 0; }
    #define moesim_add_pairs(pairs, step, row, dots, norms, n) 0
    #define moesim_dots(stored, step, vector, dots, n)
    #define moesim_most_of_both(one, other, share, rest, n) 0
    #define moesim_first_largest(values, n) 0
    #endif
    """
    bint moesim_is_wide() noexcept
    Py_ssize_t moesim_next_at_most(const long long*, const double*, Py_ssize_t, Py_ssize_t, double) noexcept
    int moesim_add_pairs(const short*, Py_ssize_t, const double*, double*, const double*, Py_ssize_t) noexcept
    int moesim_most_of_both(const double*, const double*, double, double, Py_ssize_t) noexcept
    int moesim_first_largest(const double*, Py_ssize_t) noexcept
    void moesim_dots(const short*, Py_ssize_t, const short*, double*, Py_ssize_t) noexcept

# What `math.sqrt` says, without its call.
cdef inline double root(double square) noexcept:
    return sqrt(square)

# From place `at` on the first of n indices whose value is not above `most`; n where there is none.
cdef inline int next_at_most(const long long[::1] indices, const double[::1] values, int at, int n, double most) noexcept:
    return <int>moesim_next_at_most(&indices[0], &values[0], at, n, most)

# Whether rows of eight can be compared as pairs: whole numbers below 65535 whose squares add up to less than 2**32.
cdef inline bint fits_pairs(const double[:, ::1] rows) noexcept:
    cdef Py_ssize_t layer, at
    cdef double square, value
    for layer in range(rows.shape[0]):
        square = 0.0
        for at in range(8):
            value = rows[layer, at]
            if not 0.0 <= value < 65535.0 or value != <double><int>value:
                return False
            square += value * value
        if square >= 4294967296.0:
            return False
    return True

# A path of such rows in its slot.
cdef inline void put_pairs(short[:, :, :, ::1] pairs, int slot, const double[:, ::1] rows) noexcept:
    cdef Py_ssize_t layer, at
    for layer in range(rows.shape[0]):
        for at in range(8):
            pairs[layer, at // 2, slot, at % 2] = <short>(rows[layer, at] - 32768.0)

# The products of a layer's eight numbers with those of n paths join the dots; where the cosine is largest first.
cdef inline int add_pairs(const short[:, :, :, ::1] pairs, int layer, const double[:, ::1] rows, double[::1] dots,
                          double[:, ::1] norms, int n) noexcept:
    return moesim_add_pairs(&pairs[layer, 0, 0, 0], pairs.shape[2], &rows[layer, 0], &dots[0], &norms[layer, 0], n)

# Where share x one + (1 - share) x other is largest first; and where the largest of n numbers stands first.
cdef inline int most_of_both(const double[::1] one, const double[::1] other, double share) noexcept:
    return moesim_most_of_both(&one[0], &other[0], share, 1.0 - share, one.shape[0])

cdef inline int first_largest(const double[::1] values, int n) noexcept:
    return moesim_first_largest(&values[0], n)

cdef inline void short_dots(const short[:, ::1] stored, const short[::1] vector, double[::1] dots, int n) noexcept:
    moesim_dots(&stored[0, 0], stored.shape[1], &vector[0], &dots[0], n)

# The same numbers in 16 bits.
cdef inline void as_shorts(const double[::1] values, short[::1] room) noexcept:
    cdef Py_ssize_t at
    for at in range(values.shape[0]):
        room[at] = <short>values[at]
