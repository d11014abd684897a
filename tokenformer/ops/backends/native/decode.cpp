// Kernels for decoding on a CPU, which is memory-bound: each parameter token is read once, in
// memory order, by one thread. `library.py` builds and loads this file.
//
// Rows, weights and sums are fp32. Parameter tokens are fp32, bf16, or int8 with a scale each, which
// `quantized.h` multiplies in integers; the KV cache is fp32 or bf16. Each thread alternates between
// two streams, the first and the second half of its share, a whole token at a time. More streams or
// smaller pieces halve the memory bandwidth; a single stream is 10 % slower.

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "normal.h"
#include "quantized.h"

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

struct Tokens {
  const void *keys, *values;               // [n, d_in], [n, d_out]
  const void *key_scales, *value_scales;   // of quantized tokens
  long n, d_in, d_out;
  float scale;
};

struct Norm {
  const float *weight, *bias;  // [width], or none
  float eps;
  int is_rms;
};

struct Block {
  Norm attention_norm, ffn_norm;
  Tokens q, k, v, o, ffn;
  void *cached_keys, *cached_values;  // [kv_heads, capacity, head_dim]
};

struct Shape {
  long width, heads, kv_heads, head_dim, rotary_dim, length, capacity;  // length: tokens cached
  float scaling;
  int is_parallel;
};

struct BFloat16 {
  uint16_t bits;
};

static inline float wide(float a) { return a; }
static inline float wide(BFloat16 a) {
  union {
    uint32_t bits;
    float number;
  } pun = {(uint32_t)a.bits << 16};
  return pun.number;
}

static inline void put(float a, float *to) { *to = a; }
static inline void put(float a, BFloat16 *to) {  // to the nearest, ties to even
  union {
    float number;
    uint32_t bits;
  } pun = {a};
  to->bits = std::isnan(a) ? 0x7fc0 : (pun.bits + 0x7fff + (pun.bits >> 16 & 1)) >> 16;
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
  const int LANES = 64;  // independent sums: an addition has a latency of four cycles
  float lanes[LANES] = {}, total = 0;
  long j = 0;
  for (; j + LANES <= width; j += LANES) {
#pragma omp simd
    for (int k = 0; k < LANES; k++) lanes[k] += a[j + k] * wide(b[j + k]);
  }
#pragma omp simd reduction(+ : total)
  for (int k = 0; k < LANES; k++) total += lanes[k];
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
  long half = (mine.stop - mine.start + 1) / 2;
  for (long first = mine.start; first < mine.start + half; first++)
    for (long i = first; i < mine.stop; i += half)
      for (long r = 0; r < rows; r++)
        scores[r * n + i] = dot(x + r * width, tokens + i * width, width);
}

template <typename Rows, typename T, typename S>
static void score_integers(const float *x, long rows, long width, const T *tokens, const S *scales,
                           long n, float *scores) {
  static thread_local Rows numbers;
  numbers.round(x, rows, width);
  Range mine = my_share(n, shared_by<T>());
  long half = (mine.stop - mine.start + 1) / 2;
  for (long first = mine.start; first < mine.start + half; first++)
    for (long i = first; i < mine.stop; i += half)
      score_token(numbers, rows, width, tokens, scales, i, n, scores);
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
               width, mine.start, mine.stop, sums + r * width);
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
    for (long i = mine.start; i < mine.stop; i++) scores[i] *= below_by_tanh(scores[i]);
  } else {
#pragma omp simd
    for (long i = mine.start; i < mine.stop; i++) scores[i] *= normal(scores[i]).below;
  }
}

// Buffers that the threads share while they compute several Pattentions of one input.
struct Work {
  float *scores;  // [rows, all tokens]
  float *totals;  // [threads, most Pattentions * rows]
  float *tops;    // [threads, most Pattentions * rows]
  float *sums;    // [threads, rows, all outputs]
};

// Computes the Pattentions `of[0..count)` of x [rows, d_in] -> outs[0..count), each [rows, d_out].
template <typename T>
static void attend_tokens(const float *x, long rows, const Tokens *const *of, float *const *outs,
                          int count, Rule by, Work work) {
  int me = omp_get_thread_num(), threads = omp_get_num_threads();
  float *scores = work.scores, *totals = work.totals + me * count * rows,
        *tops = work.tops + me * count * rows;
  for (int p = 0; p < count; p++) {
    const Tokens &tokens = *of[p];
    score(x, rows, tokens.d_in, (const T *)tokens.keys, tokens.key_scales, tokens.n, scores);
    for (long r = 0; r < rows; r++)
      totals[p * rows + r] =
          begin_weights(scores + r * tokens.n, my_share(tokens.n, shared_by<T>()), by,
                        tops + p * rows + r);
    scores += rows * tokens.n;
  }
  wait_for_all();
  long outputs = 0;
  for (int p = 0; p < count; p++) outputs += rows * of[p]->d_out;
  float *mine = work.sums + me * outputs;
  for (long j = 0; j < outputs; j++) mine[j] = 0;
  scores = work.scores;
  for (int p = 0; p < count; p++) {
    const Tokens &tokens = *of[p];
    Range some = my_share(tokens.n, shared_by<T>());
    for (long r = 0; r < rows; r++)
      end_weights(scores + r * tokens.n, some, by, tokens.scale, work.totals + p * rows + r,
                  work.tops + p * rows + r, count * rows);
    mix(scores, rows, tokens.n, (const T *)tokens.values, tokens.value_scales, tokens.d_out, mine);
    mine += rows * tokens.d_out;
    scores += rows * tokens.n;
  }
  wait_for_all();
  const float *sums = work.sums;
  for (int p = 0; p < count; p++) {
    Range some = my_share(rows * of[p]->d_out);
    for (long i = some.start; i < some.stop; i++) {
      float total = 0;
      for (int t = 0; t < threads; t++) total += sums[t * outputs + i];
      outs[p][i] = total;
    }
    sums += rows * of[p]->d_out;
  }
  wait_for_all();
}

// Layer norm or RMS norm of x -> out; every thread computes all of it.
static void normalize(const float *x, long width, Norm by, float *out) {
  float mean = 0, square = 0;
  if (!by.is_rms) {
#pragma omp simd reduction(+ : mean)
    for (long j = 0; j < width; j++) mean += x[j];
    mean /= width;
  }
#pragma omp simd reduction(+ : square)
  for (long j = 0; j < width; j++) square += (x[j] - mean) * (x[j] - mean);
  float factor = 1 / std::sqrt(square / width + by.eps);
  for (long j = 0; j < width; j++)
    out[j] = (x[j] - mean) * factor * (by.weight ? by.weight[j] : 1) + (by.bias ? by.bias[j] : 0);
}

// Channel i is paired with channel i + dim / 2, as in positions.py.
static void rotate(float *head, const float *cos, const float *sin, long dim) {
  for (long i = 0, j = dim / 2; j < dim; i++, j++) {
    float first = head[i], second = head[j];
    head[i] = first * cos[i] - second * sin[i];
    head[j] = second * cos[j] + first * sin[j];
  }
}

// Attention of this thread's heads of one query over the KV cache -> out [heads, head_dim].
template <typename C>
static void attend_context(const float *queries, const Block &block, const Shape &shape,
                           float *scores, float *out) {
  Range mine = my_share(shape.heads);
  long length = shape.length + 1, size = shape.head_dim;
  for (long h = mine.start; h < mine.stop; h++) {
    long from = h / (shape.heads / shape.kv_heads) * shape.capacity * size;
    const C *keys = (const C *)block.cached_keys + from;
    const C *values = (const C *)block.cached_values + from;
    float *weights = scores + h * length, *head = out + h * size, top = -INFINITY;
    double total = 0;
    for (long t = 0; t < length; t++) {
      weights[t] = shape.scaling * dot(queries + h * size, keys + t * size, size);
      top = std::fmax(top, weights[t]);
    }
    for (long t = 0; t < length; t++) total += weights[t] = std::exp(weights[t] - top);
    float share = (float)(1 / total);
    for (long j = 0; j < size; j++) head[j] = 0;
    for (long t = 0; t < length; t++) add(head, weights[t] * share, values + t * size, size);
  }
}

// Rotates the new keys of this thread's heads and appends keys and values to the KV cache.
template <typename C>
static void append_to_cache(float *keys, const float *values, const float *cos, const float *sin,
                     const Block &block, const Shape &shape) {
  Range mine = my_share(shape.kv_heads);
  long size = shape.head_dim;
  for (long h = mine.start; h < mine.stop; h++) {
    rotate(keys + h * size, cos, sin, shape.rotary_dim);
    long at = (h * shape.capacity + shape.length) * size;
    for (long j = 0; j < size; j++) {
      put(keys[h * size + j], (C *)block.cached_keys + at + j);
      put(values[h * size + j], (C *)block.cached_values + at + j);
    }
  }
}

// Runs the new token, hidden [width], through all blocks.
template <typename T, typename C>
static void decode(float *hidden, const Block *blocks, long count, const Shape &shape, Rule by,
                 const float *cos, const float *sin, float *scratch, Work work) {
  long width = shape.width, inner = shape.heads * shape.head_dim,
       kv = shape.kv_heads * shape.head_dim;
  float *normed = scratch, *queries = normed + omp_get_num_threads() * width,
        *keys = queries + inner, *values = keys + kv, *attended = values + kv,
        *out = attended + inner, *scores = out + width;
  normed += omp_get_thread_num() * width;  // this thread's row; the rest is shared
  Range part = my_share(width), heads = my_share(shape.heads);
  for (const Block *block = blocks; block < blocks + count; block++) {
    normalize(hidden, width, block->attention_norm, normed);
    const Tokens *qkv[] = {&block->q, &block->k, &block->v};
    float *found[] = {queries, keys, values};
    attend_tokens<T>(normed, 1, qkv, found, 3, by, work);
    for (long h = heads.start; h < heads.stop; h++)
      rotate(queries + h * shape.head_dim, cos, sin, shape.rotary_dim);
    append_to_cache<C>(keys, values, cos, sin, *block, shape);
    wait_for_all();
    attend_context<C>(queries, *block, shape, scores, attended);
    wait_for_all();
    const Tokens *o[] = {&block->o}, *ffn[] = {&block->ffn};
    attend_tokens<T>(attended, 1, o, &out, 1, by, work);
    if (shape.is_parallel) {  // both branches read the same input
      normalize(hidden, width, block->ffn_norm, normed);
      wait_for_all();
    }
    for (long j = part.start; j < part.stop; j++) hidden[j] += out[j];
    wait_for_all();
    if (!shape.is_parallel) normalize(hidden, width, block->ffn_norm, normed);
    attend_tokens<T>(normed, 1, ffn, &out, 1, by, work);
    for (long j = part.start; j < part.stop; j++) hidden[j] += out[j];
    wait_for_all();
  }
}

#define EXPORT(T, NAME)                                                                            \
  extern "C" void linear_##NAME(const float *x, long rows, long d_in, const T *weight,             \
                                const void *scales, long n, float *out, int threads) {             \
    _Pragma("omp parallel num_threads(threads)")                                                   \
        score(x, rows, d_in, weight, scales, n, out);                                              \
  }                                                                                                \
                                                                                                   \
  extern "C" void pattention_##NAME(const float *x, long rows, const Tokens *tokens, Rule by,      \
                                    Work work, float *out, int threads) {                          \
    _Pragma("omp parallel num_threads(threads)")                                                   \
        attend_tokens<T>(x, rows, &tokens, &out, 1, by, work);                                     \
  }                                                                                                \
                                                                                                   \
  extern "C" void decode_##NAME(float *hidden, const Block *blocks, long count, const Shape *shape,\
                                Rule by, const float *cos, const float *sin, int is_half,          \
                                float *scratch, Work work, int threads) {                          \
    _Pragma("omp parallel num_threads(threads)") {                                                 \
      if (is_half)                                                                                 \
        decode<T, BFloat16>(hidden, blocks, count, *shape, by, cos, sin, scratch, work);           \
      else                                                                                         \
        decode<T, float>(hidden, blocks, count, *shape, by, cos, sin, scratch, work);              \
    }                                                                                              \
  }

EXPORT(float, f32)
EXPORT(BFloat16, bf16)
EXPORT(int8_t, i8)
EXPORT(Nibbles, i4)
