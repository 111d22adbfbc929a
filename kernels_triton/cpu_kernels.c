// What a step does on a CPU, in one pass each: norms, gates, rope with the write of keys and values, attention,
// products.
//
// Compiled by native.py on the machine that runs it, once a dtype: `real` is bfloat16 with -DBF16, else float32. Sums
// and products are in float32, rounded once to what goes out. Strides are in elements, named array_axis; references:
// ops.py.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef BF16
typedef uint16_t real;

static inline float up(real x) {
    union { uint32_t i; float f; } u = {(uint32_t)x << 16};
    return u.f;
}

static inline real down(float x) {
    union { float f; uint32_t i; } u = {x};
    uint32_t nan = (u.i & 0x7fffffff) > 0x7f800000;
    return nan ? (u.i >> 16) | 64 : (u.i + 0x7fff + ((u.i >> 16) & 1)) >> 16;
}
#else
typedef float real;

static inline float up(real x) { return x; }
static inline real down(float x) { return x; }
#endif

#define INLINE static inline __attribute__((always_inline))
// less than this is done before a second thread has been woken
#define FEW 16384

// e^x to 2 ulp, without a call, so that loops over it are vectorised; 0 below -87, and infinite above 88
static inline float exponential(float x) {
    float low = x > -87.0f ? x : -87.0f, bounded = low < 88.0f ? low : 88.0f;
    float n = rintf(bounded * 1.44269504f);
    float r = fmaf(n, -0.693359375f, bounded);
    r = fmaf(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = fmaf(p, r, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    union { int32_t i; float f; } power = {((int32_t)n + 127) << 23};
    float y = fmaf(p, r * r, r + 1.0f) * power.f;
    y = x > 88.0f ? INFINITY : y;
    return x > -87.0f ? y : x != x ? x : 0.0f;
}

static inline float gated(float gate, float upper) { return gate / (1.0f + exponential(-gate)) * upper; }

INLINE void norm_row(const real *x, const real *scale, float eps, int64_t size, real *out) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += up(x[i]) * up(x[i]);
    float factor = 1.0f / sqrtf(sum / size + eps);
#pragma omp simd
    for (int64_t i = 0; i < size; i++) out[i] = down(up(x[i]) * factor * up(scale[i]));
}

// x / sqrt(mean x^2 + eps) * scale of each row of x [rows, size]
void rms_norm(
    const real *x, int64_t x_r, const real *scale, float eps, real *out, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > FEW)
    for (int64_t r = 0; r < rows; r++) norm_row(x + r * x_r, scale, eps, size, out + r * size);
}

// silu(gate) * up, of x [rows, 2, size]
void gate_up(const real *x, real *out, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > FEW)
    for (int64_t r = 0; r < rows; r++) {
        const real *gate = x + 2 * r * size, *upper = gate + size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) out[r * size + i] = down(gated(up(gate[i]), up(upper[i])));
    }
}

INLINE void turn(const real *x, const float *cos, const float *sin, int64_t half, real *out) {
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float a = up(x[i]), b = up(x[i + half]);
        out[i] = down(a * cos[i] - b * sin[i]);
        out[i + half] = down(b * cos[i] + a * sin[i]);
    }
}

// q [T, K, G, D] turned into q_out; k turned and v put into the pools at each token's block and offset
void rope_write(
    const real *q, const real *k, const real *v, const float *cos, const float *sin, const int32_t *blocks,
    const int32_t *offsets, real *q_out, real *k_pool, real *v_pool, int64_t tokens, int64_t heads, int64_t group,
    int64_t dim, int64_t v_dim, int64_t q_t, int64_t q_k, int64_t q_g, int64_t k_t, int64_t k_k, int64_t v_t,
    int64_t v_k, int64_t kp_n, int64_t kp_p, int64_t kp_k, int64_t vp_n, int64_t vp_p, int64_t vp_k, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * heads * group * dim > FEW)
    for (int64_t t = 0; t < tokens; t++) {
        const float *c = cos + t * dim / 2, *s = sin + t * dim / 2;
        for (int64_t h = 0; h < heads; h++) {
            for (int64_t g = 0; g < group; g++)
                turn(q + t * q_t + h * q_k + g * q_g, c, s, dim / 2, q_out + ((t * heads + h) * group + g) * dim);
            real *key = k_pool + blocks[t] * kp_n + offsets[t] * kp_p + h * kp_k;
            real *value = v_pool + blocks[t] * vp_n + offsets[t] * vp_p + h * vp_k;
            turn(k + t * k_t + h * k_k, c, s, dim / 2, key);
            memcpy(value, v + t * v_t + h * v_k, v_dim * sizeof(real));
        }
    }
}

typedef struct {
    const real *k, *v;
    int64_t k_n, k_p, k_k, v_n, v_p, v_k, block_size;
} Pools;

#define LANES 16
#define MOST_DIM 256
// queries whose sums stay in registers, of up to so many lanes each
#define TOGETHER(vectors) ((vectors) <= 4 ? 4 : 2)

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef real reals __attribute__((vector_size(sizeof(real) * LANES)));

INLINE lanes wide(const real *x) {
    reals r;
    memcpy(&r, x, sizeof(r));
#ifdef BF16
    return (lanes)(__builtin_convertvector(r, words) << 16);
#else
    return r;
#endif
}

INLINE float total(lanes x) {
    x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return x[0] + x[1];
}

// `count` queries of one token and kv head over the keys first .. end of its sequence; heads of vectors * LANES. Both
// are constants where this is inlined for common sizes. `score`: count * (end - first) floats
INLINE void attend_some(
    const int vectors, const int count, const real *q, const Pools *p, const int32_t *table, int64_t h, int64_t first,
    int64_t end, float scale, real *out, float *score) {
    const int64_t size = p->block_size, span = end - first;
    lanes query[4][MOST_DIM / LANES], sum[4][MOST_DIM / LANES];
    for (int g = 0; g < count; g++)
        for (int i = 0; i < vectors; i++) {
            query[g][i] = wide(q + (g * vectors + i) * LANES) * scale;
            sum[g][i] = (lanes){0};
        }
    for (int64_t m = first; m < end;) {
        const int64_t block = m / size, stop = (block + 1) * size < end ? (block + 1) * size : end;
        const real *key = p->k + table[block] * p->k_n + (m - block * size) * p->k_p + h * p->k_k;
        for (; m < stop; m++, key += p->k_p) {
            for (int g = 0; g < count; g++) {
                lanes dot = query[g][0] * wide(key);
                for (int i = 1; i < vectors; i++) dot += query[g][i] * wide(key + i * LANES);
                score[g * span + m - first] = total(dot);
            }
        }
    }
    for (int g = 0; g < count; g++) {
        float *s = score + g * span, most = s[0], mass = 0;
#pragma omp simd reduction(max : most)
        for (int64_t m = 0; m < span; m++) most = s[m] > most ? s[m] : most;
#pragma omp simd reduction(+ : mass)
        for (int64_t m = 0; m < span; m++) mass += s[m] = exponential(s[m] - most);
        float factor = 1.0f / mass;
#pragma omp simd
        for (int64_t m = 0; m < span; m++) s[m] *= factor;
    }
    for (int64_t m = first; m < end;) {
        const int64_t block = m / size, stop = (block + 1) * size < end ? (block + 1) * size : end;
        const real *value = p->v + table[block] * p->v_n + (m - block * size) * p->v_p + h * p->v_k;
        for (; m < stop; m++, value += p->v_p)
            for (int i = 0; i < vectors; i++) {
                lanes v = wide(value + i * LANES);
                for (int g = 0; g < count; g++) sum[g][i] += v * score[g * span + m - first];
            }
    }
    for (int g = 0; g < count; g++)
        for (int i = 0; i < vectors; i++)
            for (int c = 0; c < LANES; c++) out[(g * vectors + i) * LANES + c] = down(sum[g][i][c]);
}

// Causal attention of sequences of up to `most` queries over their blocks; rows of others are left as they are, and
// those of padding become 0. q and out [T, K, G, D]; `window` keys of a query are seen.
void attend(
    const real *q, const real *k, const real *v, const int32_t *starts, const int32_t *lengths, const int32_t *tables,
    real *out, int64_t tokens, int64_t seqs, int64_t tables_s, int64_t most, int64_t heads, int64_t group, int64_t dim,
    int64_t block_size, int64_t k_n, int64_t k_p, int64_t k_k, int64_t v_n, int64_t v_p, int64_t v_k, int64_t window,
    float scale, int threads) {
    Pools pools = {k, v, k_n, k_p, k_k, v_n, v_p, v_k, block_size};
    int64_t longest = 0, work = 0, size = group * dim;
    for (int64_t s = 0; s < seqs; s++) {
        int64_t count = starts[s + 1] - starts[s];
        if (count > most || count == 0) continue;
        longest = lengths[s] > longest ? lengths[s] : longest;
        work += count * lengths[s] * heads * size;
    }
    memset(out + starts[seqs] * heads * size, 0, (tokens - starts[seqs]) * heads * size * sizeof(real));
#pragma omp parallel num_threads(threads) if (work > FEW)
    {
        float *score = malloc(4 * longest * sizeof(float));
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t s = 0; s < seqs; s++)
            for (int64_t h = 0; h < heads; h++) {
                if (starts[s + 1] - starts[s] > most) continue;
                for (int64_t t = starts[s]; t < starts[s + 1]; t++) {
                    int64_t end = lengths[s] - starts[s + 1] + t + 1, first = end > window ? end - window : 0;
                    for (int64_t g = 0, count; g < group; g += count) {
                        int64_t at = ((t * heads + h) * group + g) * dim, vectors = dim / LANES;
                        count = TOGETHER(vectors) < group - g ? TOGETHER(vectors) : group - g;
#define ATTEND(vectors, count) \
    attend_some(vectors, count, q + at, &pools, tables + s * tables_s, h, first, end, scale, out + at, score)
                        if (dim == 64 && count == 4) ATTEND(4, 4);
                        else if (dim == 64 && count == 3) ATTEND(4, 3);
                        else if (dim == 64 && count == 2) ATTEND(4, 2);
                        else if (dim == 128 && count == 2) ATTEND(8, 2);
                        else ATTEND(vectors, count);
                    }
                }
            }
        free(score);
    }
}

// Weights of products lie in tiles of TILE columns, [tile, depth, column]; in bfloat16 two of a column's rows lie
// together.
#define TILE 32

#if defined(__AVX512BF16__) && defined(BF16) && !defined(__AMX_BF16__)
#include <immintrin.h>
// on Zen 4 a product of 32 numbers takes four times as long as one of 16
#define PRODUCTS 1
#define ROWS 6
#define PAIR 2
#define WIDTH 8
typedef __m256 sums;
typedef __m256i values;
#define zeros _mm256_setzero_ps
#define load(p) _mm256_loadu_si256((const __m256i *)(p))
#define mac(sum, x, w) _mm256_dpbf16_ps(sum, (__m256bh)(x), (__m256bh)(w))
#define store _mm256_storeu_ps

static inline values spread(const real *x) {
    int32_t both;
    memcpy(&both, x, 4);
    return _mm256_set1_epi32(both);
}
#elif defined(__AVX512F__) && !defined(BF16)
#include <immintrin.h>
#define PRODUCTS 1
#define ROWS 12
#define PAIR 1
#define WIDTH 16
typedef __m512 sums;
typedef __m512 values;
#define zeros _mm512_setzero_ps
#define load _mm512_loadu_ps
#define mac(sum, x, w) _mm512_fmadd_ps(x, w, sum)
#define store _mm512_storeu_ps

static inline values spread(const real *x) { return _mm512_set1_ps(*x); }
#else
#define PRODUCTS 0
#endif

int has_products(void) { return PRODUCTS; }

#if PRODUCTS
#define VECTORS (TILE / WIDTH)

// a matrix [depth, columns] of any strides, laid out in tiles; columns beyond are 0
void pack(const real *matrix, int64_t m_k, int64_t m_n, real *tiles, int64_t depth, int64_t columns, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t j = 0; j < (columns + TILE - 1) / TILE; j++)
        for (int64_t k = 0; k < depth; k += PAIR)
            for (int64_t c = 0; c < TILE; c++)
                for (int64_t p = 0; p < PAIR; p++) {
                    int64_t n = j * TILE + c;
                    tiles[(j * depth + k) * TILE + c * PAIR + p] = n < columns ? matrix[(k + p) * m_k + n * m_n] : 0;
                }
}

// out [count, depth]: columns of the matrix; false, and nothing done, if one is none of them
int look_up(
    const real *tiles, const int32_t *ids, real *out, int64_t count, int64_t depth, int64_t columns, int threads) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= columns) return 0;
#pragma omp parallel for num_threads(threads) if (count * depth > FEW)
    for (int64_t i = 0; i < count; i++) {
        const real *column = tiles + ids[i] / TILE * depth * TILE + ids[i] % TILE * PAIR;
        for (int64_t k = 0; k < depth; k += PAIR, column += TILE * PAIR)
            memcpy(out + i * depth + k, column, PAIR * sizeof(real));
    }
    return 1;
}

// What a product asks for while it works: `step` bytes of memory for each PAIR of a tile's rows, 0 for none.
typedef struct {
    const char *from;
    int64_t step;
} Ahead;

// out [rows, TILE] = x [rows, depth] times a tile; `rows` is a constant where this is inlined: sums stay in registers
INLINE void tile_of(
    const int rows, const real *x, int64_t x_r, const real *w, int64_t depth, float *out, Ahead ahead) {
    sums sum[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) sum[r][v] = zeros();
    for (int64_t k = 0; k < depth; k += PAIR, w += PAIR * TILE, ahead.from += ahead.step) {
        if (ahead.step) __builtin_prefetch(ahead.from);
        values column[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) column[v] = load(w + v * WIDTH * PAIR);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            values row = spread(x + r * x_r + k);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sum[r][v] = mac(sum[r][v], row, column[v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) store(out + r * TILE + v * WIDTH, sum[r][v]);
}

static void tile_product(
    int rows, const real *x, int64_t x_r, const real *w, int64_t depth, float *out, Ahead ahead) {
#define CASE(n) \
    case n: tile_of(n, x, x_r, w, depth, out, ahead); break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if ROWS > 6
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}

// The part of the tile behind `tile` that is asked for in one of `parts` passes over `tile`: the first pass over a tile
// waits for memory, and the others leave it idle. Of few passes the first is most, and asking is in its way; of many,
// little.
static Ahead next_tile(const real *tile, int64_t depth, int64_t part, int64_t parts) {
    const int64_t step = parts >= 4 && parts <= 16 ? (PAIR * TILE * sizeof(real) + parts - 1) / parts : 0;
    return (Ahead){(const char *)(tile + depth * TILE) + depth / PAIR * step * part, step};
}

// out [rows, columns] = x times the weight w. With `scale` each row of x goes through rms_norm first; with `gate` w has
// columns gates and then as many ups, whole tiles; with `add` that is added.
// Each number is summed in the same order whatever `rows` is.
void product(
    const real *x, int64_t x_r, const real *w, const real *scale, float eps, const real *add, real *out, int64_t rows,
    int64_t depth, int64_t columns, int gate, int threads) {
    real *normed = NULL;
    if (scale) {
        normed = malloc(rows * depth * sizeof(real));
        rms_norm(x, x_r, scale, eps, normed, rows, depth, threads);
        x = normed, x_r = depth;
    }
    int64_t tiles = (columns + TILE - 1) / TILE, parts = (rows + ROWS - 1) / ROWS;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t j = 0; j < tiles; j++) {
        float y[ROWS * TILE], upper[ROWS * TILE];
        int64_t width = columns - j * TILE < TILE ? columns - j * TILE : TILE;
        for (int64_t part = 0; part < parts; part++) {
            int64_t from = rows * part / parts, count = rows * (part + 1) / parts - from;
            const real *tile = w + j * depth * TILE, *up_tile = tile + tiles * depth * TILE;
            tile_product(count, x + from * x_r, x_r, tile, depth, y, next_tile(tile, depth, part, parts));
            if (gate) {
                tile_product(count, x + from * x_r, x_r, up_tile, depth, upper, next_tile(up_tile, depth, part, parts));
#pragma omp simd
                for (int64_t i = 0; i < count * TILE; i++) y[i] = gated(y[i], upper[i]);
            }
            for (int64_t r = 0; r < count; r++) {
                int64_t at = (from + r) * columns + j * TILE;
                for (int64_t c = 0; add && c < width; c++) y[r * TILE + c] += up(add[at + c]);
                for (int64_t c = 0; c < width; c++) out[at + c] = down(y[r * TILE + c]);
            }
        }
    }
    free(normed);
}
#endif
