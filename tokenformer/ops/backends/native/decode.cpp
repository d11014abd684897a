// Decoding on a CPU: Pattention layers of a few rows, and one token of all sequences through a whole
// model in one call. `library.py` builds and loads this file. The KV cache is fp32 or bf16.

#include <cmath>
#include <cstdint>

#include "pattention.h"
#include "routed.h"

// library.py mirrors these structs, and those of `pattention.h`, field by field.
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

// Computes the Pattentions `of[0..count)` of x [rows, d_in] -> outs[0..count), each [rows, d_out].
template <typename T>
static void attend_tokens(const float *x, long rows, const Tokens *const *of, float *const *outs,
                          int count, Rule by, Work work) {
  static thread_local Chosen chosen[MOST_JOINT];
  int me = omp_get_thread_num(), threads = omp_get_num_threads();
  float *scores = work.scores, *totals = work.totals + me * count * rows,
        *tops = work.tops + me * count * rows;
  const int *groups = work.chosen;
  const float *gates = work.gates;
  long outputs = 0, is_routed = 0;
  for (int p = 0; p < count; p++) {
    outputs += rows * of[p]->d_out;
    is_routed |= of[p]->routing.size;
  }
  if (is_routed) route(x, rows, of, count, work);
  for (int p = 0; p < count; p++, totals += rows, tops += rows) {
    const Tokens &tokens = *of[p];
    if (tokens.routing.size) {
      begin_chosen<T>(x, rows, tokens, by, groups, gates, chosen[p], totals, tops);
    } else {
      score(x, rows, tokens.d_in, (const T *)tokens.keys, tokens.key_scales, tokens.n, scores);
      for (long r = 0; r < rows; r++)
        totals[r] = begin_weights(scores + r * tokens.n, my_share(tokens.n, shared_by<T>()), by,
                                  tops + r);
    }
    scores += rows * scores_per_row(tokens);
    groups += rows * tokens.routing.active;
    gates += rows * tokens.routing.active;
  }
  wait_for_all();
  float *mine = work.sums + me * outputs;
  for (long j = 0; j < outputs; j++) mine[j] = 0;
  scores = work.scores, totals = work.totals, tops = work.tops;  // of all threads
  for (int p = 0; p < count; p++, totals += rows, tops += rows) {
    const Tokens &tokens = *of[p];
    if (tokens.routing.size) {
      end_chosen<T>(tokens, by, chosen[p], totals, tops, count * rows, mine);
    } else {
      Range some = my_share(tokens.n, shared_by<T>());
      for (long r = 0; r < rows; r++)
        end_weights(scores + r * tokens.n, some, by, tokens.scale, totals + r, tops + r,
                    count * rows);
      mix(scores, rows, tokens.n, (const T *)tokens.values, tokens.value_scales, tokens.d_out,
          mine);
    }
    mine += rows * tokens.d_out;
    scores += rows * scores_per_row(tokens);
  }
  wait_for_all();
  const float *sums = work.sums;
  for (int p = 0; p < count; p++) {
    const Matrix &shift = of[p]->routing.shift;
    Range some = my_share(rows * of[p]->d_out);
    for (long i = some.start; i < some.stop; i++) {
      float total = shift.rows ? element(shift, 0, i % shift.width, 0) : 0;
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
