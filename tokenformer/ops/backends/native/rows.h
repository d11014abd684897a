// Products of several rows with fp32 or bf16 tokens. Each token is read from memory once and used
// for all rows.
//
// Tiles of 4 rows times 2 or 3 tokens, or 2 vectors of columns, are summed in registers; larger ones
// do not fit in the 16 of AVX2. A tile reads several tokens side by side, which hardware prefetching follows badly, so the next
// tokens are prefetched in memory order.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

struct BFloat16 {
  uint16_t bits;
};

static inline float wide(float a) { return a; }
static inline float wide(int8_t a) { return a; }
static inline float wide(BFloat16 a) {
  union {
    uint32_t bits;
    float number;
  } pun = {(uint32_t)a.bits << 16};
  return pun.number;
}

static const int LANES = 8, TILE_ROWS = 4, TILE_COLUMNS = 2;
static const long MIXED_TOKENS = 8;  // tokens that `mix_rows` adds before it stores the sums
static const long UNPACK_ROWS = 8;  // with more, bf16 tokens are unpacked once for all tiles

typedef float Lanes __attribute__((vector_size(4 * LANES)));

static inline Lanes load(const float *from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

static inline Lanes load(const BFloat16 *from) {
  typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
  typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  Words words = __builtin_convertvector(halves, Words) << 16;
  Lanes lanes;
  std::memcpy(&lanes, &words, sizeof lanes);
  return lanes;
}

// Loads into a register. GCC would load again in each multiplication, and a core has as many loads
// as multiplications in a cycle.
template <typename T>
static inline Lanes load_once(const T *from) {
  Lanes lanes = load(from);
#ifdef __AVX__
  asm("" : "+x"(lanes));
#endif
  return lanes;
}

static inline void store(Lanes lanes, float *to) { std::memcpy(to, &lanes, sizeof lanes); }

static inline float sum_of(Lanes lanes) {
  float part[LANES];
  store(lanes, part);
  return ((part[0] + part[4]) + (part[1] + part[5])) + ((part[2] + part[6]) + (part[3] + part[7]));
}

#define UNROLL _Pragma("GCC unroll 4")
#define ONCE _Pragma("GCC unroll 1")  // unrolled, the sums would not fit in registers

// Unpacks [count, width], whose rows are `stride` apart.
template <typename T>
static inline void unpack(const T *from, long count, long width, long stride, float *to) {
  for (long i = 0; i < count; i++, from += stride, to += width) {
    long j = 0;
    for (; j + LANES <= width; j += LANES) store(load(from + j), to + j);
    for (; j < width; j++) to[j] = wide(from[j]);
  }
}

// x [R, width] times tokens [N, width], transposed -> scores [R, N], whose rows are n apart. Also
// prefetches the lines `from` to `to` of every N from `next` on.
template <int R, int N, typename T>
static inline void score_tile(const float *x, long width, const T *tokens, long n, float *scores,
                              const char *next, int from, int to) {
  const long line = LINE_BYTES / sizeof(T);
  Lanes sums[R][N] = {};
  long j = 0;
  for (; j + line <= width; j += line, next += N * LINE_BYTES) {
    for (int i = from; i < to; i++) __builtin_prefetch(next + i * LINE_BYTES);
    ONCE for (long k = j; k < j + line; k += LANES) {
      Lanes token[N];
      UNROLL for (int i = 0; i < N; i++) token[i] = load_once(tokens + i * width + k);
      UNROLL for (int r = 0; r < R; r++) {
        Lanes row = load_once(x + r * width + k);
        UNROLL for (int i = 0; i < N; i++) sums[r][i] += row * token[i];
      }
    }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < N; i++) {
    float sum = sum_of(sums[r][i]);
    for (long k = j; k < width; k++) sum += x[r * width + k] * wide(tokens[i * width + k]);
    scores[r * n + i] = sum;
  }
}

template <int N, typename T>
static inline void score_tokens(const float *x, long rows, long width, const T *tokens, long n,
                                float *scores, bool prefetches) {
  const char *next = (const char *)(tokens + 2 * N * width);
  const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, lines = prefetches ? N : 0;
  for (int tile = 0; tile < tiles; tile++) {
    const int from = lines * tile / tiles, to = lines * (tile + 1) / tiles;
    const long left = rows - tile * TILE_ROWS;
    const float *row = x + tile * TILE_ROWS * width;
    float *out = scores + tile * TILE_ROWS * n;
    if (left >= 4)
      score_tile<4, N>(row, width, tokens, n, out, next, from, to);
    else if (left == 3)
      score_tile<3, N>(row, width, tokens, n, out, next, from, to);
    else if (left == 2)
      score_tile<2, N>(row, width, tokens, n, out, next, from, to);
    else
      score_tile<1, N>(row, width, tokens, n, out, next, from, to);
  }
}

// x [rows, width] times tokens [start, stop), transposed -> scores [rows, n].
template <typename T>
static void score_rows(const float *x, long rows, long width, const T *tokens, long start,
                       long stop, long n, float *scores) {
  const int tile = 3, packed_tile = sizeof(T) == 4 ? 3 : 2;  // unpacking takes registers
  long i = start;
  if (!std::is_same_v<T, float> && rows > UNPACK_ROWS) {
    std::vector<float> unpacked(tile * width);
    for (; i + tile <= stop; i += tile) {
      unpack(tokens + i * width, tile, width, width, unpacked.data());
      score_tokens<tile>(x, rows, width, unpacked.data(), n, scores + i, false);
    }
  }
  for (; i + packed_tile <= stop; i += packed_tile)
    score_tokens<packed_tile>(x, rows, width, tokens + i * width, n, scores + i, true);
  for (; i < stop; i++) score_tokens<1>(x, rows, width, tokens + i * width, n, scores + i, true);
}

// weights [R, count] times C vectors of columns of tokens [count, stride], added to sums.
template <int R, int C, typename T>
static inline void mix_tile(const float *weights, long n, const T *tokens, long count, long stride,
                            long width, float *sums) {
  Lanes sum[R][C];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++)
    sum[r][c] = load(sums + r * width + c * LANES);
  for (long i = 0; i < count; i++) {
    Lanes token[C];
    UNROLL for (int c = 0; c < C; c++) token[c] = load_once(tokens + i * stride + c * LANES);
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++)
      sum[r][c] += weights[r * n + i] * token[c];
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++)
    store(sum[r][c], sums + r * width + c * LANES);
}

template <int C, typename T>
static inline void mix_columns(const float *weights, long rows, long n, const T *tokens, long count,
                               long stride, long width, float *sums) {
  long r = 0;
  for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
    mix_tile<TILE_ROWS, C>(weights + r * n, n, tokens, count, stride, width, sums + r * width);
  weights += r * n, sums += r * width;
  if (rows - r == 3) mix_tile<3, C>(weights, n, tokens, count, stride, width, sums);
  if (rows - r == 2) mix_tile<2, C>(weights, n, tokens, count, stride, width, sums);
  if (rows - r == 1) mix_tile<1, C>(weights, n, tokens, count, stride, width, sums);
}

// weights [rows, n] times tokens [start, stop), added to sums [rows, width].
template <typename T>
static void mix_rows(const float *weights, long rows, long n, const T *tokens, long start,
                     long stop, long width, float *sums) {
  const long step = TILE_COLUMNS * LANES;
  float unpacked[MIXED_TOKENS * step];
  for (long i = start; i < stop; i += MIXED_TOKENS) {
    const long count = stop - i < MIXED_TOKENS ? stop - i : MIXED_TOKENS;
    const T *here = tokens + i * width;
    const char *next = (const char *)(here + count * width);
    const char *end = (const char *)(tokens + stop * width);
    long j = 0;
    for (; j + step <= width; j += step) {
      const char *until = next + sizeof(T) * MIXED_TOKENS * step;
      for (; next < until && next < end; next += LINE_BYTES) __builtin_prefetch(next);
      if (!std::is_same_v<T, float> && rows > UNPACK_ROWS) {
        unpack(here + j, count, step, width, unpacked);
        mix_columns<TILE_COLUMNS>(weights + i, rows, n, unpacked, count, step, width, sums + j);
      } else {
        mix_columns<TILE_COLUMNS>(weights + i, rows, n, here + j, count, width, width, sums + j);
      }
    }
    for (; j + LANES <= width; j += LANES)
      mix_columns<1>(weights + i, rows, n, here + j, count, width, width, sums + j);
    for (; j < width; j++)
      for (long r = 0; r < rows; r++)
        for (long k = 0; k < count; k++)
          sums[r * width + j] += weights[r * n + i + k] * wide(here[k * width + j]);
  }
}
