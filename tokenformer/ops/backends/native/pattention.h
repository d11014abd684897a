// Pattention of a few rows, included by `decode.cpp`. It is memory-bound: each parameter token is
// read once, in memory order, by one thread.
//
// Rows, weights and sums are fp32. Parameter tokens are fp32, bf16, int8 or 4-bit numbers, the last
// two multiplied in integers by `quantized.h`. Each thread alternates between two streams, the first
// and the second half of its share, a whole token at a time. More streams or smaller pieces halve
// the memory bandwidth; a single stream is 10 % slower. `rows.h` has the products of several rows,
// `routed.h` Pattention over some of the tokens.

#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "normal.h"
#include "quantized.h"
#include "rows.h"

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_num_threads() { return 1; }
static int omp_get_thread_num() { return 0; }
#endif

enum Theta { L2_GELU, GELU_L2, L1_GELU, SOFTMAX };  // in the order of THETAS

// library.py mirrors these structs field by field.
struct Rule {
  int theta, is_tanh;
  float eps;
};

enum Kind { F32, BF16, I8 };  // in the order of KINDS

struct Matrix {
  const void *rows;     // [n, width]
  const float *scales;  // [n], of int8
  long n, width;
  int kind;
};

// Which tokens a row attends to: all of them if `size` is 0.
struct Routing {
  long size, active;      // tokens per group; groups that a row attends to
  Matrix router, bias;    // [groups, d_in], multiplied with the normalized row, and [1, groups]
  int is_gated;           // whether twice the sigmoid of a group's score is its gate; or else 1
  const int64_t *groups;  // or the groups themselves, [rows, active] in ascending order
  const float *gates;     // of these groups, [rows, active]; none if they are 1
  Matrix root;            // [m, d_in], upper, packed: times a row it has the norm of all scores
  const float *norms;     // or these norms, [rows]; with neither, the norm is of the chosen tokens
  Matrix shift;           // [1, d_out], added to the output, or none
};

struct Tokens {
  const void *keys, *values;               // [n, d_in], [n, d_out]
  const void *key_scales, *value_scales;   // of quantized tokens
  long n, d_in, d_out;
  float scale;
  Routing routing;
};

// Buffers that the threads share while they compute several Pattentions of one input.
struct Work {
  float *scores;  // [rows, all tokens], or groups of those that are routed
  float *totals;  // [threads, most Pattentions * rows]
  float *tops;    // [threads, most Pattentions * rows]
  float *sums;    // [threads, rows, all outputs]
  int *chosen;    // [rows, all active groups]
  float *gates;   // [rows, all active groups], factors of the weights of their tokens
};

static inline void put(float a, float *to) { *to = a; }
static inline void put(float a, BFloat16 *to) {  // to the nearest, ties to even
  union {
    float number;
    uint32_t bits;
  } pun = {a};
  to->bits = std::isnan(a) ? 0x7fc0 : (pun.bits + 0x7fff + (pun.bits >> 16 & 1)) >> 16;
}

static inline float rounded(float a, int is_half) {
  BFloat16 half;
  put(a, &half);
  return is_half ? wide(half) : a;
}

static float element(const Matrix &matrix, long row, long column, int is_half) {
  long at = row * matrix.width + column;
  if (matrix.kind == F32) return ((const float *)matrix.rows)[at];
  if (matrix.kind == BF16) return wide(((const BFloat16 *)matrix.rows)[at]);
  float scale = rounded(matrix.scales[row], is_half);
  return rounded((float)((const int8_t *)matrix.rows)[at] * scale, is_half);
}

struct Range {
  long start, stop;
};

// The part of n that is this thread's; it starts at a multiple of `unit`.
static Range my_share(long n, long unit = 1) {
  long units = round_up(n, unit) / unit, threads = omp_get_num_threads();
  long each = (units + threads - 1) / threads * unit;
  Range mine = {omp_get_thread_num() * each, omp_get_thread_num() * each + each};
  if (mine.start > n) mine.start = n;
  if (mine.stop > n) mine.stop = n;
  return mine;
}

// Calls f(i) for a range, for one of its first and one of its second half in turn.
template <typename F>
static inline void in_two_streams(Range of, F f) {
  long half = (of.stop - of.start + 1) / 2;
  for (long first = of.start; first < of.start + half; first++)
    for (long i = first; i < of.stop; i += half) f(i);
}

// Tokens that one thread takes together: values of 4 bits share scales.
template <typename T>
static constexpr long shared_by() {
  return std::is_same<T, Nibbles>::value ? GROUP : 1;
}

// Below, every thread of a parallel region calls the same functions.
static void wait_for_all() {
#pragma omp barrier
}

template <typename T>
static float dot(const float *a, const T *b, long width) {
  const int SUMS = 64;  // independent ones: an addition has a latency of four cycles
  float sums[SUMS] = {}, total = 0;
  long j = 0;
  for (; j + SUMS <= width; j += SUMS) {
#pragma omp simd
    for (int k = 0; k < SUMS; k++) sums[k] += a[j + k] * wide(b[j + k]);
  }
#pragma omp simd reduction(+ : total)
  for (int k = 0; k < SUMS; k++) total += sums[k];
  for (; j < width; j++) total += a[j] * wide(b[j]);
  return total;
}

template <typename T>
static void add(float *sum, float weight, const T *token, long width) {
#pragma omp simd
  for (long j = 0; j < width; j++) sum[j] += weight * wide(token[j]);
}

template <typename T>
static void add_two(float *sum, float weight, const T *token, float other_weight, const T *other,
                    long width) {
#pragma omp simd
  for (long j = 0; j < width; j++)
    sum[j] += weight * wide(token[j]) + other_weight * wide(other[j]);
}

// x [rows, width] times this thread's tokens [n, width], transposed -> scores [rows, n].
template <typename T>
static void score(const float *x, long rows, long width, const T *tokens, const void *, long n,
                  float *scores) {
  Range mine = my_share(n);
  if (rows > 1) return score_rows(x, rows, width, tokens, mine.start, mine.stop, n, scores);
  in_two_streams(mine, [&](long i) { scores[i] = dot(x, tokens + i * width, width); });
}

template <typename Rows, typename T, typename S>
static void score_integers(const float *x, long rows, long width, const T *tokens, const S *scales,
                           long n, float *scores) {
  static thread_local Rows numbers;
  numbers.round(x, rows, width);
  in_two_streams(my_share(n, shared_by<T>()), [&](long i) {
    score_token(numbers, rows, width, tokens, scales, i, n, scores);
  });
}

static void score(const float *x, long rows, long width, const int8_t *tokens, const void *scales,
                  long n, float *scores) {
  score_integers<IntRows>(x, rows, width, tokens, (const float *)scales, n, scores);
}

static void score(const float *x, long rows, long width, const Nibbles *tokens, const void *scales,
                  long n, float *scores) {
  score_integers<ByteRows>(x, rows, width, tokens, (const uint16_t *)scales, n, scores);
}

// weights [rows, n] times this thread's tokens [n, width], added to sums [rows, width].
template <typename T>
static void mix(const float *weights, long rows, long n, const T *tokens, const void *, long width,
                float *sums) {
  Range mine = my_share(n);
  // Two or three fp32 rows read faster in two streams.
  if (rows > (sizeof(T) == 4 ? 3 : 1))
    return mix_rows(weights, rows, n, tokens, mine.start, mine.stop, width, sums);
  long half = (mine.stop - mine.start) / 2;
  for (long i = mine.start; i < mine.start + half; i++)
    for (long r = 0; r < rows; r++) {
      const float *row = weights + r * n;
      add_two(sums + r * width, row[i], tokens + i * width, row[i + half],
              tokens + (i + half) * width, width);
    }
  for (long i = mine.start + 2 * half; i < mine.stop; i++)  // the last of an odd number
    for (long r = 0; r < rows; r++)
      add(sums + r * width, weights[r * n + i], tokens + i * width, width);
}

template <typename T, typename S>
static void mix_integers(const float *weights, long rows, long n, const T *tokens, const S *scales,
                         long width, float *sums) {
  Range mine = my_share(n, shared_by<T>());
  for (long r = 0; r < rows; r += MIXED_ROWS)
    mix_tokens(weights + r * n, rows - r < MIXED_ROWS ? rows - r : MIXED_ROWS, n, tokens, scales,
               width, mine.start, mine.stop, sums + r * width, InOrder());
}

static void mix(const float *weights, long rows, long n, const int8_t *tokens, const void *scales,
                long width, float *sums) {
  mix_integers(weights, rows, n, tokens, (const float *)scales, width, sums);
}

static void mix(const float *weights, long rows, long n, const Nibbles *tokens, const void *scales,
                long width, float *sums) {
  mix_integers(weights, rows, n, tokens, (const uint16_t *)scales, width, sums);
}

// For scores that are not scaled yet; after scaling, `normal.h` is faster.
static float gelu(float a, int is_tanh) {
  if (is_tanh) return 0.5f * a * (1 + std::tanh(0.7978845608f * (a + 0.044715f * a * a * a)));
  return 0.5f * a * (1 + std::erf(a * 0.7071067812f));  // underflows where torch's does
}

// Returns this thread's part of a row's norm. `gelu_l2` and `softmax` also turn the scores into
// weights, up to a factor; `top` is the largest score, for softmax.
static float begin_weights(float *scores, Range mine, Rule by, float *top) {
  float total = 0;
  *top = -INFINITY;
  if (by.theta == GELU_L2)
    for (long i = mine.start; i < mine.stop; i++) scores[i] = gelu(scores[i], by.is_tanh);
  if (by.theta == GELU_L2 || by.theta == L2_GELU) {
#pragma omp simd reduction(+ : total)
    for (long i = mine.start; i < mine.stop; i++) total += scores[i] * scores[i];
  } else if (by.theta == L1_GELU) {
#pragma omp simd reduction(+ : total)
    for (long i = mine.start; i < mine.stop; i++) total += std::fabs(scores[i]);
  } else {
    double sum = 0;  // a sequential fp32 sum would lose digits
    for (long i = mine.start; i < mine.stop; i++) *top = std::fmax(*top, scores[i]);
    for (long i = mine.start; i < mine.stop; i++) sum += scores[i] = std::exp(scores[i] - *top);
    total = (float)sum;
  }
  return total;
}

// Finishes the weights of this thread's tokens from the totals and tops of all threads, `stride`
// apart.
static void end_weights(float *scores, Range mine, Rule by, float scale, const float *totals,
                        const float *tops, long stride) {
  int threads = omp_get_num_threads(), me = omp_get_thread_num();
  float total = 0, factor;
  if (by.theta == SOFTMAX) {
    float top = -INFINITY;
    for (int t = 0; t < threads; t++) top = std::fmax(top, tops[t * stride]);
    for (int t = 0; t < threads; t++) total += totals[t * stride] * std::exp(tops[t * stride] - top);
    factor = scale / total * std::exp(tops[me * stride] - top);
  } else {
    for (int t = 0; t < threads; t++) total += totals[t * stride];
    float norm = by.theta == L1_GELU ? total : std::sqrt(total);
    float root = by.theta == L1_GELU ? scale : std::sqrt(scale);
    factor = norm < 1.0842022e-19f ? 0 : root / (norm + by.eps);  // zero rows as in theta.py
  }
  for (long i = mine.start; i < mine.stop; i++) scores[i] *= factor;
  if (by.theta == GELU_L2 || by.theta == SOFTMAX) return;
  if (by.is_tanh) {
#pragma omp simd
    for (long i = mine.start; i < mine.stop; i++) scores[i] *= normal_by_tanh(scores[i]).below;
  } else {
#pragma omp simd
    for (long i = mine.start; i < mine.stop; i++) scores[i] *= normal(scores[i]).below;
  }
}
