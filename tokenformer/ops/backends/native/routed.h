// Routed Pattention of a few rows, included by `decode.cpp`: every row chooses some groups of the
// tokens, and only those are read.
//
// First `route` scores the groups, adds up the norms and chooses. Then each thread takes a share of
// the groups that any row has chosen, and lists their tokens row by row. These lists are read as
// `pattention.h` reads all tokens: in two streams, a whole token at a time. With several rows, the
// tokens of CACHED_BYTES are read for all of them before the next, so they come from memory once.

#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "pattention.h"

static const long CACHED_BYTES = 1 << 19;
static const long PACKED_ROWS = 64;  // as in score_norm.py
static const int MOST_JOINT = 3;  // Pattentions that are computed together: q, k and v

// Of what `work.scores` holds for each row.
static long scores_per_row(const Tokens &tokens) {
  return tokens.routing.size ? tokens.routing.router.n : tokens.n;
}

static float row_product(const Matrix &matrix, long row, const float *x) {
  long at = row * matrix.width;
  if (matrix.kind == F32) return dot(x, (const float *)matrix.rows + at, matrix.width);
  if (matrix.kind == BF16) return dot(x, (const BFloat16 *)matrix.rows + at, matrix.width);
  return dot(x, (const int8_t *)matrix.rows + at, matrix.width) * matrix.scales[row];
}

// Numbers in an upper matrix [rows, width] without the zeros left of its diagonal blocks.
static long packed_size(long rows, long width) {
  long size = 0;
  for (long i = 0; i < rows; i++) size += width - i / PACKED_ROWS * PACKED_ROWS;
  return size;
}

// Rows of unit mean square, as in `router.py`.
static const float *normalized(const float *x, long rows, long width) {
  static thread_local std::vector<float> held;
  held.resize(rows * width);
  for (long r = 0; r < rows; r++) {
    float square = 0;
#pragma omp simd reduction(+ : square)
    for (long j = 0; j < width; j++) square += x[r * width + j] * x[r * width + j];
    float factor = 1 / std::sqrt(square / width + 1.1920929e-7f);
    for (long j = 0; j < width; j++) held[r * width + j] = x[r * width + j] * factor;
  }
  return held.data();
}

// This thread's part of the squared norms of all scores -> totals [rows].
static void add_up_norms(const float *x, long rows, const Routing &by, float *totals) {
  if (by.norms) {
    for (long r = 0; r < rows; r++)
      totals[r] = omp_get_thread_num() ? 0 : by.norms[r] * by.norms[r];
    return;
  }
  for (long r = 0; r < rows; r++) totals[r] = 0;
  long width = by.root.width, at = 0;
  Range mine = my_share(packed_size(by.root.n, width));
  for (long i = 0; i < by.root.n && at < mine.stop; i++) {
    long from = i / PACKED_ROWS * PACKED_ROWS, count = width - from;
    for (long r = 0; r < rows && at >= mine.start; r++) {
      const float *row = x + r * width + from;
      float found = by.root.kind == F32 ? dot(row, (const float *)by.root.rows + at, count)
                                        : dot(row, (const BFloat16 *)by.root.rows + at, count);
      totals[r] += found * found;
    }
    at += count;
  }
}

// The groups with the largest scores in ascending order -> chosen. Of equal scores the first are
// taken, as in `router.py`, and numbers are compared by their bits, so that NaN have an order.
static void choose(const float *scores, const Matrix &bias, long groups, long k, int *chosen) {
  static thread_local std::vector<int32_t> order, sorted;
  order.resize(groups);
  for (long g = 0; g < groups; g++) {
    float score = scores[g] + element(bias, 0, g, 0) + 0.0f;  // without negative zeros
    int32_t bits;
    std::memcpy(&bits, &score, sizeof bits);
    order[g] = bits ^ (bits >> 31 & 0x7fffffff);
  }
  if (!k) return;
  sorted = order;
  std::nth_element(sorted.begin(), sorted.begin() + k - 1, sorted.end(), std::greater<int32_t>());
  int32_t last = sorted[k - 1];
  for (long g = 0; g < groups; g++) k -= order[g] > last;  // the rest are equal to the last
  for (long g = 0; g < groups; g++)
    if (order[g] > last || (order[g] == last && k-- > 0)) *chosen++ = (int)g;
}

static bool has_gates(const Routing &by) { return by.is_gated || by.gates; }

// The gates of a row's chosen groups -> gates [active].
static void gate(const float *scores, const Routing &by, long r, const int *chosen, float *gates) {
  for (long j = 0; by.is_gated && j < by.active; j++) gates[j] = 2 / (1 + std::exp(-scores[chosen[j]]));
  for (long j = 0; by.gates && j < by.active; j++) gates[j] = by.gates[r * by.active + j];
}

// Chooses the groups of all rows -> work.chosen and work.gates, and adds up the norms of all scores,
// where they are used -> this thread's work.totals.
static void route(const float *x, long rows, const Tokens *const *of, int count, Work work) {
  float *scores = work.scores, *totals = work.totals + omp_get_thread_num() * count * rows;
  const float *unit = nullptr;
  for (int p = 0; p < count; p++) {
    const Tokens &tokens = *of[p];
    const Routing &by = tokens.routing;
    long groups = by.router.n, d = tokens.d_in;
    Range mine = my_share(groups);
    if (groups && !unit) unit = normalized(x, rows, d);
    in_two_streams(mine, [&](long g) {
      for (long r = 0; r < rows; r++)
        scores[r * groups + g] = row_product(by.router, g, unit + r * d);
    });
    if (by.root.rows || by.norms) add_up_norms(x, rows, by, totals + p * rows);
    scores += rows * scores_per_row(tokens);
  }
  wait_for_all();
  scores = work.scores;
  int *chosen = work.chosen;
  float *gates = work.gates;
  for (int p = 0; p < count; p++) {
    const Routing &by = of[p]->routing;
    Range mine = my_share(rows);
    for (long r = mine.start; r < mine.stop; r++) {
      if (by.router.n)
        choose(scores + r * by.router.n, by.bias, by.router.n, by.active, chosen + r * by.active);
      for (long j = 0; by.groups && j < by.active; j++)
        chosen[r * by.active + j] = (int)by.groups[r * by.active + j];
      gate(scores + r * by.router.n, by, r, chosen + r * by.active, gates + r * by.active);
    }
    scores += rows * scores_per_row(*of[p]);
    chosen += rows * by.active;
    gates += rows * by.active;
  }
  wait_for_all();
}

// Rows as the kernels for tokens of type T read them, and the type of the tokens' scales.
struct PlainRows {
  const float *x;
  void round(const float *rows, long, long) { x = rows; }
};

template <typename T>
struct Reading {
  typedef PlainRows Rows;
  typedef void Scale;
  static long token_bytes(long width) { return width * sizeof(T); }
  static long scale_bytes(long) { return 0; }
};
template <>
struct Reading<int8_t> {
  typedef IntRows Rows;
  typedef float Scale;
  static long token_bytes(long width) { return width; }
  static long scale_bytes(long) { return sizeof(float); }
};
template <>
struct Reading<Nibbles> {
  typedef ByteRows Rows;
  typedef uint16_t Scale;
  static long token_bytes(long width) { return round_up(width, 8 * GROUP) / 2; }
  static long scale_bytes(long width) { return round_up(width, 8 * GROUP) / GROUP * 2; }
};

template <typename T>
static float token_score(const PlainRows &x, long r, long width, const T *tokens, const void *,
                         long i) {
  return dot(x.x + r * width, tokens + i * width, width);
}

// weights [count] times the listed tokens, added to sums [width].
template <typename T>
static void mix_listed(const float *weights, Listed at, const T *tokens, const void *, long width,
                       float *sums) {
  long half = at.count / 2, last = at.count - 1;
  for (long i = 0; i < half; i++) {
    at.prefetch(tokens, width * sizeof(T), i);
    at.prefetch(tokens, width * sizeof(T), i + half);
    add_two(sums, weights[i], tokens + at(i) * width, weights[i + half],
            tokens + at(i + half) * width, width);
  }
  if (at.count % 2) add(sums, weights[last], tokens + at(last) * width, width);
}

static void mix_listed(const float *weights, Listed at, const int8_t *tokens, const float *scales,
                       long width, float *sums) {
  mix_tokens(weights, 1, at.count, tokens, scales, width, 0, at.count, sums, at);
}

static void mix_listed(const float *weights, Listed at, const Nibbles *tokens,
                       const uint16_t *scales, long width, float *sums) {
  mix_tokens(weights, 1, at.count, tokens, scales, width, 0, at.count, sums, at);
}

// The tokens of this thread's share that the rows attend to.
struct Chosen {
  std::vector<int> tokens;    // ascending, row after row
  std::vector<float> scores;  // of these tokens, later their weights
  std::vector<float> gates;   // of these tokens, if they have any
  std::vector<long> starts;   // [rows + 1], where each row begins

  Range count(long r) const { return {0, starts[r + 1] - starts[r]}; }

  // Takes a share of the groups chosen [rows, active] by any row, with their gates.
  void take_share(const int *chosen, const float *of_groups, long rows, const Tokens &of) {
    bool gated = has_gates(of.routing);
    long size = of.routing.size, active = of.routing.active, groups = (of.n + size - 1) / size;
    static thread_local std::vector<int> visited;
    visited.assign(chosen, chosen + rows * active);
    if (rows > 1) {
      std::sort(visited.begin(), visited.end());
      visited.erase(std::unique(visited.begin(), visited.end()), visited.end());
    }
    long visits = visited.size();
    Range share = my_share(visits);
    long first = share.start < visits ? visited[share.start] : groups;
    long last = share.stop < visits ? visited[share.stop] : groups;
    tokens.clear();
    gates.clear();
    starts.assign(1, 0);
    for (long r = 0; r < rows; r++, chosen += active, of_groups += active) {
      for (long j = 0; j < active; j++) {
        long start = chosen[j] * size, stop = start + size < of.n ? start + size : of.n;
        if (chosen[j] < first || chosen[j] >= last) continue;
        for (long i = start; i < stop; i++) tokens.push_back((int)i);
        if (gated) gates.resize(tokens.size(), of_groups[j]);
      }
      starts.push_back(tokens.size());
    }
    scores.resize(tokens.size());
  }

  // Calls f(row, start, stop) for parts of the lists: those of all rows in the same `together`
  // tokens, a whole number of groups, before the next.
  template <typename F>
  void in_parts(long together, F f) const {
    long rows = starts.size() - 1;
    if (rows == 1) return f(0, 0, starts[1]);
    std::vector<long> at(starts.begin(), starts.end() - 1);
    for (long limit = together, left = tokens.size(); left > 0; limit += together)
      for (long r = 0; r < rows; r++) {
        long start = at[r], stop = start;
        while (stop < starts[r + 1] && tokens[stop] < limit) stop++;
        if (start < stop) f(r, start, stop);
        at[r] = stop;
        left -= stop - start;
      }
  }
};

// The tokens that fit into CACHED_BYTES, in whole groups.
template <typename T>
static long cached_tokens(long width, long size) {
  return round_up(CACHED_BYTES / Reading<T>::token_bytes(width) + 1, size);
}

// The scores and norms of this thread's share of the chosen tokens.
template <typename T>
static void begin_chosen(const float *x, long rows, const Tokens &of, Rule by, const int *chosen,
                         const float *gates, Chosen &mine, float *totals, float *tops) {
  static thread_local typename Reading<T>::Rows numbers;
  numbers.round(x, rows, of.d_in);
  mine.take_share(chosen, gates, rows, of);
  long token_bytes = Reading<T>::token_bytes(of.d_in), scale_bytes = Reading<T>::scale_bytes(of.d_in);
  const T *keys = (const T *)of.keys;
  auto scales = (const typename Reading<T>::Scale *)of.key_scales;
  mine.in_parts(cached_tokens<T>(of.d_in, of.routing.size), [&](long r, long start, long stop) {
    Listed at = {&mine.tokens[start], stop - start};
    in_two_streams({0, at.count}, [&](long i) {
      at.prefetch(keys, token_bytes, i);
      at.prefetch(scales, scale_bytes, i);
      mine.scores[start + i] = token_score(numbers, r, of.d_in, keys, scales, at(i));
    });
  });
  if (of.routing.root.rows || of.routing.norms) return;  // the norm is known
  for (long r = 0; r < rows; r++)
    totals[r] = begin_weights(mine.scores.data() + mine.starts[r], mine.count(r), by, tops + r);
}

// The weights of this thread's chosen tokens, and their sum over the values -> sums [rows, d_out].
template <typename T>
static void end_chosen(const Tokens &of, Rule by, Chosen &mine, const float *totals,
                       const float *tops, long stride, float *sums) {
  const T *values = (const T *)of.values;
  auto scales = (const typename Reading<T>::Scale *)of.value_scales;
  for (long r = 0; r + 1 < (long)mine.starts.size(); r++)
    end_weights(mine.scores.data() + mine.starts[r], mine.count(r), by, of.scale, totals + r, tops + r,
                stride);
  for (size_t i = 0; i < mine.gates.size(); i++) mine.scores[i] *= mine.gates[i];
  mine.in_parts(cached_tokens<T>(of.d_out, of.routing.size), [&](long r, long start, long stop) {
    Listed at = {&mine.tokens[start], stop - start};
    mix_listed(&mine.scores[start], at, values, scales, of.d_out, sums + r * of.d_out);
  });
}
