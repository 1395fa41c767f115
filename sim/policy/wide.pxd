# What `search` does several numbers at a time, in C: the AVX2 of x86-64 where this very processor has it, asked when a
# search is made. All sums are of whole numbers and exact, so that their order, and who adds, changes no bit; cosines
# are two products in the order in which `search` forms them. Elsewhere `search` runs its own loops.

cdef extern from *:
    """
    #include <stddef.h>
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
        at0 = _mm256_blendv_pd(at0, here, _mm256_cmp_pd(d0, most0, _CMP_GT_OQ)); \\
        at1 = _mm256_blendv_pd(at1, here, _mm256_cmp_pd(d1, most1, _CMP_GT_OQ)); \\
        most0 = _mm256_max_pd(d0, most0); \\
        most1 = _mm256_max_pd(d1, most1); \\
        here = _mm256_add_pd(here, eight);
    #define MOESIM_BEGIN \\
        const __m256d eight = _mm256_set1_pd(8.0); \\
        __m256d here = _mm256_setzero_pd(), at0 = here, at1 = here; \\
        __m256d most0 = _mm256_set1_pd(-__builtin_inf()), most1 = most0; \\
        ptrdiff_t i;

    /* Of the eight lanes and of what is left behind them the first largest. */
    MOESIM_AVX2 int moesim_first(__m256d most0, __m256d most1, __m256d at0, __m256d at1,
                                 const double* dots, const double* norms, ptrdiff_t i, ptrdiff_t n) {
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
        for (; i < n; i++)
            if (dots[i] * norms[i] > best) {
                best = dots[i] * norms[i];
                found = i;
            }
        return (int)found;
    }

    MOESIM_AVX2 int moesim_add_singles(const float* paths, ptrdiff_t step, const double* row, double* dots,
                                       const double* norms, ptrdiff_t n) {
        const float *a = paths, *b = a + step, *c = b + step, *d = c + step;
        const float *e = d + step, *f = e + step, *g = f + step, *h = g + step;
        const __m256 va = _mm256_set1_ps((float)row[0]), vb = _mm256_set1_ps((float)row[1]);
        const __m256 vc = _mm256_set1_ps((float)row[2]), vd = _mm256_set1_ps((float)row[3]);
        const __m256 ve = _mm256_set1_ps((float)row[4]), vf = _mm256_set1_ps((float)row[5]);
        const __m256 vg = _mm256_set1_ps((float)row[6]), vh = _mm256_set1_ps((float)row[7]);
        MOESIM_BEGIN
        for (i = 0; i + 8 <= n; i += 8) {
            __m256d d0, d1;
            __m256 s = _mm256_mul_ps(va, _mm256_loadu_ps(a + i)), t = _mm256_mul_ps(vb, _mm256_loadu_ps(b + i));
            s = _mm256_add_ps(s, _mm256_mul_ps(vc, _mm256_loadu_ps(c + i)));
            t = _mm256_add_ps(t, _mm256_mul_ps(vd, _mm256_loadu_ps(d + i)));
            s = _mm256_add_ps(s, _mm256_mul_ps(ve, _mm256_loadu_ps(e + i)));
            t = _mm256_add_ps(t, _mm256_mul_ps(vf, _mm256_loadu_ps(f + i)));
            s = _mm256_add_ps(s, _mm256_mul_ps(vg, _mm256_loadu_ps(g + i)));
            t = _mm256_add_ps(t, _mm256_mul_ps(vh, _mm256_loadu_ps(h + i)));
            s = _mm256_add_ps(s, t);
            d0 = _mm256_add_pd(_mm256_loadu_pd(dots + i), _mm256_cvtps_pd(_mm256_castps256_ps128(s)));
            d1 = _mm256_add_pd(_mm256_loadu_pd(dots + i + 4), _mm256_cvtps_pd(_mm256_extractf128_ps(s, 1)));
            MOESIM_TAKE
        }
        for (step = i; step < n; step++)
            dots[step] += row[0] * a[step] + row[1] * b[step] + row[2] * c[step] + row[3] * d[step]
                        + row[4] * e[step] + row[5] * f[step] + row[6] * g[step] + row[7] * h[step];
        return moesim_first(most0, most1, at0, at1, dots, norms, i, n);
    }

    MOESIM_AVX2 int moesim_add_doubles(const double* paths, ptrdiff_t step, const double* row, double* dots,
                                       const double* norms, ptrdiff_t n) {
        int at;
        MOESIM_BEGIN
        for (i = 0; i + 8 <= n; i += 8) {
            const double* p = paths + i;
            __m256d d0 = _mm256_loadu_pd(dots + i), d1 = _mm256_loadu_pd(dots + i + 4);
            for (at = 0; at < 8; at++, p += step) {
                const __m256d v = _mm256_broadcast_sd(row + at);
                d0 = _mm256_add_pd(d0, _mm256_mul_pd(v, _mm256_loadu_pd(p)));
                d1 = _mm256_add_pd(d1, _mm256_mul_pd(v, _mm256_loadu_pd(p + 4)));
            }
            MOESIM_TAKE
        }
        {
            ptrdiff_t rest;
            for (rest = i; rest < n; rest++)
                for (at = 0; at < 8; at++) dots[rest] += row[at] * paths[at * step + rest];
        }
        return moesim_first(most0, most1, at0, at1, dots, norms, i, n);
    }

    /* Dot products of a vector with n stored ones, each `step` numbers of 12 bits: 32 bits hold 512 products. */
    MOESIM_AVX2 void moesim_dots(const short* stored, ptrdiff_t step, const short* vector, double* dots, ptrdiff_t n) {
        ptrdiff_t i, first, at;
        for (i = 0; i < n; i++, stored += step) {
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
    #define moesim_add_singles(paths, step, row, dots, norms, n) 0
    #define moesim_add_doubles(paths, step, row, dots, norms, n) 0
    #define moesim_dots(stored, step, vector, dots, n)
    #endif
    """
    bint moesim_is_wide() noexcept
    int moesim_add_singles(const float*, Py_ssize_t, const double*, double*, const double*, Py_ssize_t) noexcept
    int moesim_add_doubles(const double*, Py_ssize_t, const double*, double*, const double*, Py_ssize_t) noexcept
    void moesim_dots(const short*, Py_ssize_t, const short*, double*, Py_ssize_t) noexcept

# The products of a layer's eight numbers with those of n paths join the dots; where the cosine is largest first.
cdef inline int add_singles(float[:, :, ::1] paths, int layer, const double[:, ::1] rows, double[::1] dots,
                            double[:, ::1] norms, int n) noexcept:
    return moesim_add_singles(&paths[layer, 0, 0], paths.shape[2], &rows[layer, 0], &dots[0], &norms[layer, 0], n)

cdef inline int add_doubles(double[:, :, ::1] paths, int layer, const double[:, ::1] rows, double[::1] dots,
                            double[:, ::1] norms, int n) noexcept:
    return moesim_add_doubles(&paths[layer, 0, 0], paths.shape[2], &rows[layer, 0], &dots[0], &norms[layer, 0], n)

cdef inline void short_dots(const short[:, ::1] stored, const short[::1] vector, double[::1] dots, int n) noexcept:
    moesim_dots(&stored[0, 0], stored.shape[1], &vector[0], &dots[0], n)

# The same numbers in 16 bits.
cdef inline void as_shorts(const double[::1] values, short[::1] room) noexcept:
    cdef Py_ssize_t at
    for at in range(values.shape[0]):
        room[at] = <short>values[at]
