// Pattention with `l2_gelu` for training: products, norm, scale and GELU of a block of rows follow
// each other while the scores are in cache, and all threads work through one parallel region. A
// narrow layer otherwise spends as long on the passes between its products, and on starting and
// stopping threads, as on the products. `library.py` builds and loads this.
//
// Several layers of one input, such as q, k and v, are computed together: their keys follow each
// other in memory, so that their scores are one product. Products are those of the BLAS that torch
// uses, called by each thread for its own rows.

#include <cmath>
#include <cstdint>

#include "normal.h"

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_num_threads() { return 1; }
static int omp_get_thread_num() { return 0; }
#endif

// Integers are passed as 64 bits, so that a BLAS may read 32 or 64 of them.
typedef void (*Gemm)(const char *, const char *, const int64_t *, const int64_t *, const int64_t *,
                     const float *, const float *, const int64_t *, const float *, const int64_t *,
                     const float *, float *, const int64_t *);

static const float TINY = 1.0842022e-19f;  // as in theta.py: a row with a smaller norm counts as zero

struct Range {
  int64_t start, stop;
};

// A thread's part of `count`, in multiples of `step`.
static Range my_share(int64_t count, int64_t step) {
  int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
  int64_t pieces = (count + step - 1) / step, each = (pieces + threads - 1) / threads * step;
  int64_t start = me * each < count ? me * each : count;
  return {start, start + each < count ? start + each : count};
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// The three forms of a product of row-major matrices; `wide` is the distance of two rows of c or of
// a where it is larger than their width. BLAS has columns first, so it gets the factors in reverse.
struct Product {
  Gemm gemm;

  // a [m, k] times b [n, k], transposed -> c [m, n]
  void by_transposed(const float *a, const float *b, float *c, int64_t wide, int64_t m, int64_t n,
                     int64_t k) const {
    float one = 1, zero = 0;
    if (m) gemm("T", "N", &n, &m, &k, &one, b, &k, a, &k, &zero, c, &wide);
  }

  // a [m, k] times b [k, n] -> c [m, n]
  void plain(const float *a, int64_t wide, const float *b, float *c, int64_t m, int64_t n,
             int64_t k) const {
    float one = 1, zero = 0;
    if (m) gemm("N", "N", &n, &m, &k, &one, b, &n, a, &wide, &zero, c, &n);
  }

  // a [k, m], transposed, times b [k, n], added to beta c [m, n]
  void transposed(const float *a, int64_t wide, const float *b, float *c, int64_t m, int64_t n,
                  int64_t k, float beta) const {
    float one = 1;
    if (m) gemm("N", "T", &n, &m, &k, &one, b, &n, a, &wide, &beta, c, &n);
  }
};

// library.py mirrors these structs.
struct Group {
  const float *values;  // [n, d_out]
  float *out;           // [rows, d_out]
  const float *grad;    // [rows, d_out], of out
  float *dvalues;       // [n, d_out]
  int64_t n, d_out;
  float root, eps;
  int is_tanh;          // GELU by its tanh approximation
};

struct Layers {
  Gemm gemm;
  const float *x, *keys;             // [rows, d_in], [n, d_in], n of all groups
  float *scores, *stats;             // [rows, n] or none, [rows, count, 2]
  int64_t rows, d_in, n;
  int64_t block_rows;                // rows of a thread between two products
  int count, threads;
  Group groups[3];
};

template <int is_tanh>
static inline Normal gelu_parts(float x) {
  return is_tanh ? normal_by_tanh(x) : normal(x);
}

// scores [rows, n], rows `wide` apart, -> weights = gelu(f scores) and stats (f, norm) of each row,
// with f = root / (norm + eps); f is 0 and the norm infinite for a zero row. Scores and weights may
// be the same memory.
template <int is_tanh>
static void fill_weights(const float *scores, float *weights, int64_t wide, int64_t rows,
                         const Group &group, float *stats, int64_t stats_wide) {
  for (int64_t r = 0; r < rows; r++) {
    const float *a = scores + r * wide;
    float *w = weights + r * wide, total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < group.n; i++) total += a[i] * a[i];
    float norm = std::sqrt(total);
    if (norm < TINY) norm = INFINITY;
    float f = group.root / (norm + group.eps);
    stats[r * stats_wide] = f, stats[r * stats_wide + 1] = norm;
#pragma omp simd
    for (int64_t i = 0; i < group.n; i++) {
      float x = f * a[i];
      w[i] = x * gelu_parts<is_tanh>(x).below;
    }
  }
}

// grad [rows, n] of the weights becomes that of the scores; weights are filled, and sums with the
// gradients of the rows' f.
template <int is_tanh>
static void backward_weights(const float *scores, float *grad, float *weights, int64_t wide,
                             int64_t rows, const Group &group, const float *stats,
                             int64_t stats_wide, float *sums, int64_t sums_wide) {
  for (int64_t r = 0; r < rows; r++) {
    const float *a = scores + r * wide;
    float *g = grad + r * wide, *w = weights + r * wide, f = stats[r * stats_wide], total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < group.n; i++) {
      float x = f * a[i];
      Normal at = gelu_parts<is_tanh>(x);
      w[i] = x * at.below;
      g[i] *= at.below + x * at.density;
      total += g[i] * a[i];
    }
    sums[r * sums_wide] = total;
    float shrink = total * f * f / (group.root * stats[r * stats_wide + 1]);
#pragma omp simd
    for (int64_t i = 0; i < group.n; i++) g[i] = f * g[i] - shrink * a[i];
  }
}

extern "C" int has_openmp() {
#ifdef _OPENMP
  return 1;
#else
  return 0;
#endif
}

// Fills `out` of every group, stats, and scores where they are kept. `scratch` is [threads,
// block_rows, n].
extern "C" void fused_forward(const Layers *layers, float *scratch) {
  const Layers &l = *layers;
  Product product = {l.gemm};
#pragma omp parallel num_threads(l.threads)
  {
    Range mine = my_share(l.rows, 8);
    float *weights = scratch + omp_get_thread_num() * l.block_rows * l.n;
    for (int64_t first = mine.start; first < mine.stop; first += l.block_rows) {
      int64_t count = smaller(l.block_rows, mine.stop - first), token = 0;
      float *scores = l.scores ? l.scores + first * l.n : weights;
      product.by_transposed(l.x + first * l.d_in, l.keys, scores, l.n, count, l.n, l.d_in);
      for (int g = 0; g < l.count; g++) {
        const Group &group = l.groups[g];
        auto fill = group.is_tanh ? fill_weights<1> : fill_weights<0>;
        fill(scores + token, weights + token, l.n, count, group,
             l.stats + 2 * (first * l.count + g), 2 * l.count);
        product.plain(weights + token, l.n, group.values, group.out + first * group.d_out, count,
                      group.d_out, group.n);
        token += group.n;
      }
    }
  }
}

// Fills dx [rows, d_in], dkeys [n, d_in], dvalues of every group, and sums [rows, count], the
// gradients of the rows' factors. `dscores` and `weights` are [most_rows, n]: so many rows
// contribute to one product for dkeys and dvalues, whose rows the threads divide among themselves.
extern "C" void fused_backward(const Layers *layers, int64_t most_rows, float *dscores,
                               float *weights, float *dx, float *dkeys, float *sums) {
  const Layers &l = *layers;
  Product product = {l.gemm};
#pragma omp parallel num_threads(l.threads)
  for (int64_t part = 0; part < l.rows; part += most_rows) {
    int64_t rows = smaller(most_rows, l.rows - part);
    Range mine = my_share(rows, 8);
    for (int64_t first = mine.start; first < mine.stop; first += l.block_rows) {
      int64_t count = smaller(l.block_rows, mine.stop - first), row = part + first, token = 0;
      for (int g = 0; g < l.count; g++) {
        const Group &group = l.groups[g];
        float *block = dscores + first * l.n + token;
        product.by_transposed(group.grad + row * group.d_out, group.values, block, l.n, count,
                              group.n, group.d_out);
        auto backward = group.is_tanh ? backward_weights<1> : backward_weights<0>;
        backward(l.scores + row * l.n + token, block, weights + first * l.n + token, l.n, count,
                 group, l.stats + 2 * (row * l.count + g), 2 * l.count, sums + row * l.count + g,
                 l.count);
        token += group.n;
      }
      product.plain(dscores + first * l.n, l.n, l.keys, dx + row * l.d_in, count, l.d_in, l.n);
    }
#pragma omp barrier
    float beta = part ? 1 : 0;
    Range tokens = my_share(l.n, 16);
    product.transposed(dscores + tokens.start, l.n, l.x + part * l.d_in,
                       dkeys + tokens.start * l.d_in, tokens.stop - tokens.start, l.d_in, rows,
                       beta);
    int64_t token = 0;
    for (int g = 0; g < l.count; g++) {
      const Group &group = l.groups[g];
      tokens = my_share(group.n, 16);
      product.transposed(weights + token + tokens.start, l.n, group.grad + part * group.d_out,
                         group.dvalues + tokens.start * group.d_out, tokens.stop - tokens.start,
                         group.d_out, rows, beta);
      token += group.n;
    }
#pragma omp barrier
  }
}
