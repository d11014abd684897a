// Routed pattention of a few rows: reads only the tokens of the groups that each row has chosen.
// Theta is computed between the two passes, by the caller. `library.py` builds and loads this.

#include <cstdint>
#include <cstring>

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num() { return 0; }
static int omp_get_num_threads() { return 1; }
#endif

#include "rows.h"

// A row and one of its groups.
struct Pair {
  int64_t row, start, stop, first;  // tokens [start, stop); `first` number of their scores
  Pair(const int64_t *groups, int64_t pair, int64_t k, int64_t size, int64_t n)
      : row(pair / k), start(groups[pair] * size),
        stop(start + size < n ? start + size : n), first(pair * size) {}
};

// x [rows, d] and groups [rows, k] -> scores [rows, k * size] of keys [n, d].
template <typename T>
static void score_groups(const float *x, int64_t rows, int64_t d, const int64_t *groups, int64_t k,
                         int64_t size, const T *keys, int64_t n, float *scores, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < rows * k; i++) {
    const Pair pair(groups, i, k, size, n);
    score_rows(x + pair.row * d, 1, d, keys + pair.start * d, 0, pair.stop - pair.start, n,
               scores + pair.first);
  }
}

// weights [rows, k * size] and values [n, d] -> out [rows, d]; `sums` holds [threads, rows, d].
template <typename T>
static void mix_groups(const float *weights, int64_t rows, int64_t d, const int64_t *groups,
                       int64_t k, int64_t size, const T *values, int64_t n, float *sums, float *out,
                       int threads) {
#pragma omp parallel num_threads(threads)
  {
    const int count = omp_get_num_threads(), me = omp_get_thread_num();
    float *own = sums + me * rows * d;
    std::memset(own, 0, rows * d * sizeof(float));
    for (int64_t i = rows * k * me / count; i < rows * k * (me + 1) / count; i++) {
      const Pair pair(groups, i, k, size, n);
      mix_rows(weights + pair.first, 1, n, values + pair.start * d, 0, pair.stop - pair.start, d,
               own + pair.row * d);
    }
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t j = 0; j < rows * d; j++) {
      float total = 0;
      for (int t = 0; t < count; t++) total += sums[t * rows * d + j];
      out[j] = total;
    }
  }
}

#define FUNCTIONS(suffix, T)                                                                       \
  extern "C" void routed_scores_##suffix(const float *x, int64_t rows, int64_t d,                  \
                                         const int64_t *groups, int64_t k, int64_t size,           \
                                         const void *keys, int64_t n, float *scores, int threads) { \
    score_groups(x, rows, d, groups, k, size, (const T *)keys, n, scores, threads);                \
  }                                                                                                \
  extern "C" void routed_sum_##suffix(const float *weights, int64_t rows, int64_t d,               \
                                      const int64_t *groups, int64_t k, int64_t size,              \
                                      const void *values, int64_t n, float *sums, float *out,      \
                                      int threads) {                                               \
    mix_groups(weights, rows, d, groups, k, size, (const T *)values, n, sums, out, threads);       \
  }

FUNCTIONS(f32, float)
FUNCTIONS(bf16, BFloat16)
