// Kernels for decoding on a CPU, which is memory-bound: each parameter token is read once, in
// memory order, by one thread. `library.py` builds and loads this file.
//
// Rows, weights and sums are fp32. Parameter tokens are fp32, bf16, int8 or 4-bit numbers, the last
// two multiplied in integers by `quantized.h`; the KV cache is fp32 or bf16. Each thread alternates between
// two streams, the first and the second half of its share, a whole token at a time. More streams or
// smaller pieces halve the memory bandwidth; a single stream is 10 % slower. `rows.h` has the
// products of several rows.

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

struct Tokens {
  const void *keys, *values;               // [n, d_in], [n, d_out]
  const void *key_scales, *value_scales;   // of quantized tokens
  long n, d_in, d_out;
  float scale;
};

struct Norm {
  const void *weight, *bias;  // [width] in fp32 or bf16, or none
  float eps;
  int is_rms, is_half;
};

struct Block {
  Norm attention_norm, ffn_norm;
  Tokens q, k, v, o, ffn;
  void *cached_keys, *cached_values;  // [rows, kv_heads, capacity, head_dim]
};

struct Shape {
  long width, heads, kv_heads, head_dim, rotary_dim;
  float scaling;
  int is_parallel, is_half;  // is_half: eager mode would round to bf16
};

enum Kind { F32, BF16, I8 };  // in the order of KINDS

struct Matrix {
  const void *rows;     // [n, width]
  const float *scales;  // [n], of int8
  long n, width;
  int kind;
};

// What is before and after the blocks. Learned positions are optional.
struct Ends {
  Matrix embedding, positions, head;
  Norm norm;
};

// One new token of every row. With `ids` the embedding, final norm and head are computed too.
struct Step {
  long rows, length, capacity;      // length: tokens cached
  const int64_t *ids, *positions;   // [rows]
  long offset;                      // added to the positions
  const int64_t *starts;            // [rows], the first token that a row attends to, or none
  const float *cos, *sin;           // [positions, rotary_dim]
  float *hidden;                    // [rows, width]
  float *logits;                    // [rows, vocabulary]
  int64_t *best;                    // [rows], the ids of the largest logits, or none
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
    for (long i = mine.start; i < mine.stop; i++) scores[i] *= normal_by_tanh(scores[i]).below;
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

static inline float at(const void *vector, long i, int is_half) {
  return is_half ? wide(((const BFloat16 *)vector)[i]) : ((const float *)vector)[i];
}

// Layer norm or RMS norm of x [rows, width] -> out; every thread computes all of it.
static void normalize(const float *x, long rows, long width, const Norm &by, float *out) {
  for (; rows > 0; rows--, x += width, out += width) {
    float mean = 0, square = 0;
    if (!by.is_rms) {
#pragma omp simd reduction(+ : mean)
      for (long j = 0; j < width; j++) mean += x[j];
      mean /= width;
    }
#pragma omp simd reduction(+ : square)
    for (long j = 0; j < width; j++) square += (x[j] - mean) * (x[j] - mean);
    float factor = 1 / std::sqrt(square / width + by.eps);
    for (long j = 0; j < width; j++) out[j] = (x[j] - mean) * factor;
    if (by.weight)
      for (long j = 0; j < width; j++) out[j] *= at(by.weight, j, by.is_half);
    if (by.bias)
      for (long j = 0; j < width; j++) out[j] += at(by.bias, j, by.is_half);
  }
}

// Channel i is paired with channel i + dim / 2, as in positions.py.
static void rotate(float *head, const float *cos, const float *sin, long dim) {
  for (long i = 0, j = dim / 2; j < dim; i++, j++) {
    float first = head[i], second = head[j];
    head[i] = first * cos[i] - second * sin[i];
    head[j] = second * cos[j] + first * sin[j];
  }
}

static void rotate_for(long row, float *head, const Step &step, const Shape &shape) {
  long at = (step.positions[row] + step.offset) * shape.rotary_dim;
  if (shape.rotary_dim) rotate(head, step.cos + at, step.sin + at, shape.rotary_dim);
}

// Attention of this thread's queries [rows, heads, head_dim] over the KV cache -> out, of the same
// shape. `weights` is this thread's memory for a weight per cached token.
template <typename C>
static void attend_context(const float *queries, const Block &block, const Shape &shape,
                           const Step &step, float *weights, float *out) {
  Range mine = my_share(step.rows * shape.heads);
  long length = step.length + 1, size = shape.head_dim, group = shape.heads / shape.kv_heads;
  for (long h = mine.start; h < mine.stop; h++) {
    long start = step.starts ? step.starts[h / shape.heads] : 0;
    long from = h / group * step.capacity * size;
    const C *keys = (const C *)block.cached_keys + from;
    const C *values = (const C *)block.cached_values + from;
    float *head = out + h * size, top = -INFINITY;
    double total = 0;
    for (long t = start; t < length; t++) {
      weights[t] = shape.scaling * dot(queries + h * size, keys + t * size, size);
      top = std::fmax(top, weights[t]);
    }
    for (long t = start; t < length; t++) total += weights[t] = std::exp(weights[t] - top);
    float share = (float)(1 / total);
    for (long j = 0; j < size; j++) head[j] = 0;
    for (long t = start; t < length; t++) add(head, weights[t] * share, values + t * size, size);
  }
}

// Rotates this thread's new keys [rows, kv_heads, head_dim] and appends keys and values to the KV
// cache.
template <typename C>
static void append_to_cache(float *keys, const float *values, const Block &block,
                            const Shape &shape, const Step &step) {
  Range mine = my_share(step.rows * shape.kv_heads);
  long size = shape.head_dim;
  for (long h = mine.start; h < mine.stop; h++) {
    rotate_for(h / shape.kv_heads, keys + h * size, step, shape);
    long at = (h * step.capacity + step.length) * size;
    for (long j = 0; j < size; j++) {
      put(keys[h * size + j], (C *)block.cached_keys + at + j);
      put(values[h * size + j], (C *)block.cached_values + at + j);
    }
  }
}

// Runs the new tokens, hidden [rows, width], through all blocks. `normed` is this thread's memory
// of that shape, `weights` for a weight per cached token; `shared` belongs to all threads.
template <typename T, typename C>
static void decode(const Block *blocks, long count, const Shape &shape, const Step &step, Rule by,
                   float *normed, float *weights, float *shared, Work work) {
  long rows = step.rows, width = shape.width, inner = rows * shape.heads * shape.head_dim,
       kv = rows * shape.kv_heads * shape.head_dim;
  float *hidden = step.hidden, *queries = shared, *keys = queries + inner, *values = keys + kv,
        *attended = values + kv, *out = attended + inner;
  Range part = my_share(rows * width), heads = my_share(rows * shape.heads);
  for (const Block *block = blocks; block < blocks + count; block++) {
    normalize(hidden, rows, width, block->attention_norm, normed);
    const Tokens *qkv[] = {&block->q, &block->k, &block->v};
    float *found[] = {queries, keys, values};
    attend_tokens<T>(normed, rows, qkv, found, 3, by, work);
    for (long h = heads.start; h < heads.stop; h++)
      rotate_for(h / shape.heads, queries + h * shape.head_dim, step, shape);
    append_to_cache<C>(keys, values, *block, shape, step);
    wait_for_all();
    attend_context<C>(queries, *block, shape, step, weights, attended);
    wait_for_all();
    const Tokens *o[] = {&block->o}, *ffn[] = {&block->ffn};
    attend_tokens<T>(attended, rows, o, &out, 1, by, work);
    if (shape.is_parallel) {  // both branches read the same input
      normalize(hidden, rows, width, block->ffn_norm, normed);
      wait_for_all();
    }
    for (long j = part.start; j < part.stop; j++) hidden[j] += out[j];
    wait_for_all();
    if (!shape.is_parallel) normalize(hidden, rows, width, block->ffn_norm, normed);
    attend_tokens<T>(normed, rows, ffn, &out, 1, by, work);
    for (long j = part.start; j < part.stop; j++) hidden[j] += out[j];
    wait_for_all();
  }
}

static float element(const Matrix &matrix, long row, long column, int is_half) {
  long at = row * matrix.width + column;
  if (matrix.kind == F32) return ((const float *)matrix.rows)[at];
  if (matrix.kind == BF16) return wide(((const BFloat16 *)matrix.rows)[at]);
  float scale = rounded(matrix.scales[row], is_half);
  return rounded((float)((const int8_t *)matrix.rows)[at] * scale, is_half);
}

// This thread's part of the embeddings of the new tokens.
static void embed(const Ends &ends, const Shape &shape, const Step &step) {
  Range mine = my_share(shape.width);
  for (long r = 0; r < step.rows; r++)
    for (long j = mine.start; j < mine.stop; j++) {
      float found = element(ends.embedding, step.ids[r], j, shape.is_half);
      if (ends.positions.rows)
        found += element(ends.positions, step.positions[r] + step.offset, j, shape.is_half);
      step.hidden[r * shape.width + j] = rounded(found, shape.is_half);
    }
}

// The first largest logit of this thread's rows, as `argmax` finds it: nan is the largest.
static void choose(const float *logits, const Step &step, long n) {
  Range mine = my_share(step.rows);
  for (long r = mine.start; r < mine.stop; r++) {
    const float *row = logits + r * n;
    float top = -INFINITY;
    int has_nan = 0;
#pragma omp simd reduction(max : top) reduction(| : has_nan)
    for (long i = 0; i < n; i++) {
      top = row[i] > top ? row[i] : top;
      has_nan |= row[i] != row[i];
    }
    long i = 0;
    while (i < n - 1 && !(has_nan ? row[i] != row[i] : row[i] == top)) i++;
    step.best[r] = i;
  }
}

// Final norm and output head. In bf16 eager mode rounds after each.
static void predict(const Ends &ends, const Shape &shape, const Step &step, float *normed) {
  long n = ends.head.n, width = shape.width;
  for (long j = 0; shape.is_half && j < step.rows * width; j++)
    normed[j] = rounded(step.hidden[j], 1);
  normalize(shape.is_half ? normed : step.hidden, step.rows, width, ends.norm, normed);
  for (long j = 0; shape.is_half && j < step.rows * width; j++) normed[j] = rounded(normed[j], 1);
  const void *rows = ends.head.rows;
  const float *scales = ends.head.scales;
  if (ends.head.kind == F32)
    score(normed, step.rows, width, (const float *)rows, scales, n, step.logits);
  else if (ends.head.kind == BF16)
    score(normed, step.rows, width, (const BFloat16 *)rows, scales, n, step.logits);
  else
    score(normed, step.rows, width, (const int8_t *)rows, scales, n, step.logits);
  Range mine = my_share(n);
  for (long r = 0; shape.is_half && r < step.rows; r++)
    for (long i = mine.start; i < mine.stop; i++)
      step.logits[r * n + i] = rounded(step.logits[r * n + i], 1);
  wait_for_all();
  if (step.best) choose(step.logits, step, n);
}

// Whether the new tokens and their positions have embeddings.
static bool in_range(const Ends &ends, const Step &step) {
  for (long r = 0; r < step.rows; r++) {
    long position = step.positions[r] + step.offset;
    if (step.ids[r] < 0 || step.ids[r] >= ends.embedding.n) return false;
    if (ends.positions.rows && (position < 0 || position >= ends.positions.n)) return false;
  }
  return true;
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
  /* Returns 0, with nothing changed, if an id or position has no embedding. */                    \
  extern "C" int decode_##NAME(const Block *blocks, long count, const Shape *shape,                \
                               const Ends *ends, const Step *step, Rule by, int is_half_cache,     \
                               float *scratch, Work work, int threads) {                           \
    if (step->ids && !in_range(*ends, *step)) return 0;                                            \
    long private_size = step->rows * shape->width + step->length + 1;                              \
    _Pragma("omp parallel num_threads(threads)") {                                                 \
      float *normed = scratch + omp_get_thread_num() * private_size;                               \
      float *weights = normed + step->rows * shape->width;                                         \
      float *shared = scratch + omp_get_num_threads() * private_size;                              \
      if (step->ids) {                                                                             \
        embed(*ends, *shape, *step);                                                               \
        wait_for_all();                                                                            \
      }                                                                                            \
      if (is_half_cache)                                                                           \
        decode<T, BFloat16>(blocks, count, *shape, *step, by, normed, weights, shared, work);      \
      else                                                                                         \
        decode<T, float>(blocks, count, *shape, *step, by, normed, weights, shared, work);         \
      if (step->ids) predict(*ends, *shape, *step, normed);                                        \
    }                                                                                              \
    return 1;                                                                                      \
  }

EXPORT(float, f32)
EXPORT(BFloat16, bf16)
EXPORT(int8_t, i8)
EXPORT(Nibbles, i4)
