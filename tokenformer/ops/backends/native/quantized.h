// Integer kernels for quantized tokens, included by `decode.cpp`.
//
// Rows and weights are rounded to int16 with a scale each; their products with the tokens' numbers
// are summed in int32. Processors multiply and add pairs of int16 in one instruction, so an int16
// costs no more than an int8, and its rounding error is 1/256 of that of int8 tokens.
//
// The library is compiled for the processor it runs on (its cache is keyed by it), so instructions
// are chosen when it is compiled: VNNI, AVX2, or those that the compiler finds for the plain loops.
// -DPORTABLE selects the loops.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX2__) && !defined(PORTABLE)
#include <immintrin.h>
#define USE_AVX2
#endif

static const long GROUP = 32;
static const long LINE_BYTES = 64;
static const long AHEAD_TOKENS = 8;  // to prefetch from a list
static const long PAIRS = 64;  // of tokens whose weights are rounded with one scale
static const long MIXED_ROWS = 8;  // with more, their sums do not fit into the L1 cache
static const long PRODUCTS = 512;  // of an int16 and an int8, which an int32 can sum

// The tokens of a layer in order, which hardware prefetches, or those of a list [count], where it
// does not know the next: without prefetching, groups of 32 are read at two thirds of the speed.
struct InOrder {
  long operator()(long i) const { return i; }
  void prefetch(const void *, long, long) const {}
};

struct Listed {
  const int *list;
  long count;
  long operator()(long i) const { return list[i]; }
  // GCC removes calls of functions that only prefetch, unless they are inlined first.
  __attribute__((always_inline)) void prefetch(const void *tokens, long bytes, long i) const {
    if (i + AHEAD_TOKENS >= count) return;
    const char *next = (const char *)tokens + list[i + AHEAD_TOKENS] * bytes;
    for (long at = 0; at < bytes; at += LINE_BYTES) __builtin_prefetch(next + at);
  }
};

static long round_up(long count, long multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

// Rounds numbers to int8 or int16 -> `to`, followed by zeros up to `padded`. Returns the scale: NaN
// if a number is not finite.
template <typename I>
static float round_to(const float *numbers, long count, I *to, long padded) {
  const float LARGEST = sizeof(I) == 1 ? 127 : 32767;
  float top = 0, bad = 0;
#pragma omp simd reduction(max : top) reduction(+ : bad)
  for (long j = 0; j < count; j++) {
    float size = std::fabs(numbers[j]);
    top = size > top ? size : top;
    bad += numbers[j] * 0;
  }
  float scale = top / LARGEST + bad, factor = scale > 0 ? 1 / scale : 0;
  if (!(factor < INFINITY)) factor = 0;
  for (long j = 0; j < count; j++) to[j] = (I)(int)std::nearbyint(numbers[j] * factor);
  for (long j = count; j < padded; j++) to[j] = 0;
  return scale;
}

// The rows x [rows, width] as int16, and their scales. Every thread rounds all of them for itself.
struct IntRows {
  long stride;
  std::vector<int16_t> numbers;  // [rows, stride]
  std::vector<float> scales;     // [rows]

  void round(const float *x, long rows, long width) {
    stride = round_up(width, 32);
    numbers.resize(rows * stride);
    scales.resize(rows);
    for (long r = 0; r < rows; r++)
      scales[r] = round_to(x + r * width, width, &numbers[r * stride], stride);
  }
};

#ifdef USE_AVX2
static inline __m256i load(const void *from) { return _mm256_loadu_si256((const __m256i *)from); }

static inline __m256i widen(const void *from) {  // 16 int8 to int16
  return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
}

// sums [8], int32, plus the products of 8 pairs of int16.
static inline __m256i add_products(__m256i sums, __m256i a, __m256i b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm256_dpwssd_epi32(sums, a, b);
#elif defined(__AVXVNNI__)
  return _mm256_dpwssd_avx_epi32(sums, a, b);
#else
  return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
#endif
}

static inline float total_of(__m256 lanes) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// x [R, width], `stride` apart, times one token.
template <int R>
static void dots(const int16_t *x, long stride, const int8_t *token, long width, float *found) {
  __m256 totals[R];
  for (int r = 0; r < R; r++) totals[r] = _mm256_setzero_ps();
  for (long start = 0; start < width; start += 8 * PRODUCTS) {
    long left = width - start < 8 * PRODUCTS ? width - start : 8 * PRODUCTS, j = 0;
    __m256i even[R], odd[R];
    for (int r = 0; r < R; r++) even[r] = odd[r] = _mm256_setzero_si256();
    auto add = [&](const int8_t *from, const int16_t *row) {
      __m256i first = widen(from), second = widen(from + 16);
      for (int r = 0; r < R; r++) {
        even[r] = add_products(even[r], first, load(row + r * stride));
        odd[r] = add_products(odd[r], second, load(row + r * stride + 16));
      }
    };
    for (; j + 32 <= left; j += 32) add(token + start + j, x + start + j);
    if (j < left) {
      int8_t rest[32] = {};
      std::memcpy(rest, token + start + j, left - j);
      add(rest, x + start + j);
    }
    for (int r = 0; r < R; r++)
      totals[r] = _mm256_add_ps(totals[r], _mm256_add_ps(_mm256_cvtepi32_ps(even[r]),
                                                         _mm256_cvtepi32_ps(odd[r])));
  }
  for (int r = 0; r < R; r++) found[r] = total_of(totals[r]);
}
#else
template <int R>
static void dots(const int16_t *x, long stride, const int8_t *token, long width, float *found) {
  for (int r = 0; r < R; r++) {
    found[r] = 0;
    for (long start = 0; start < width; start += PRODUCTS) {
      long stop = start + PRODUCTS < width ? start + PRODUCTS : width;
      int sum = 0;
      for (long j = start; j < stop; j++) sum += x[r * stride + j] * token[j];
      found[r] += (float)sum;
    }
  }
}
#endif

// The scores of token `i` for all rows.
static void score_token(const IntRows &x, long rows, long width, const int8_t *tokens,
                        const float *scales, long i, long n, float *scores) {
  const int8_t *token = tokens + i * width;
  for (long r = 0; r < rows; r += 4) {
    const int16_t *some = &x.numbers[r * x.stride];
    float found[4];
    switch (rows - r) {
      case 1: dots<1>(some, x.stride, token, width, found); break;
      case 2: dots<2>(some, x.stride, token, width, found); break;
      case 3: dots<3>(some, x.stride, token, width, found); break;
      default: dots<4>(some, x.stride, token, width, found);
    }
    for (long k = r; k < rows && k < r + 4; k++)
      scores[k * n + i] = found[k - r] * x.scales[k] * scales[i];
  }
}

static float token_score(const IntRows &x, long r, long width, const int8_t *tokens,
                         const float *scales, long i) {
  float found;
  dots<1>(&x.numbers[r * x.stride], x.stride, tokens + i * width, width, &found);
  return found * x.scales[r] * scales[i];
}

// weights [rows, 2] times two tokens, added to sums [rows, width].
static void add_pair(const int16_t *weights, const int8_t *first, const int8_t *second, long rows,
                     long width, int *sums) {
  long j = 0;
#ifdef USE_AVX2
  for (; j + 16 <= width; j += 16) {
    __m128i a = _mm_loadu_si128((const __m128i *)(first + j));
    __m128i b = _mm_loadu_si128((const __m128i *)(second + j));
    __m256i low = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b));
    __m256i high = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b));
    for (long r = 0; r < rows; r++) {
      int both;
      std::memcpy(&both, weights + 2 * r, sizeof both);
      __m256i weight = _mm256_set1_epi32(both), *to = (__m256i *)(sums + r * width + j);
      _mm256_storeu_si256(to, add_products(load(to), weight, low));
      _mm256_storeu_si256(to + 1, add_products(load(to + 1), weight, high));
    }
  }
#endif
  for (long r = 0; r < rows; r++)
    for (long k = j; k < width; k++)
      sums[r * width + k] += weights[2 * r] * first[k] + weights[2 * r + 1] * second[k];
}

// weights [rows, n] times the tokens at(start) to at(stop - 1), added to sums [rows, width]. Each of
// the first half is added together with one of the second half, so that memory is read in two
// streams.
template <typename At>
static void mix_tokens(const float *weights, long rows, long n, const int8_t *tokens,
                       const float *scales, long width, long start, long stop, float *sums, At at) {
  static thread_local std::vector<int> held;
  held.assign(rows * width, 0);
  int *found = held.data();
  long half = (stop - start + 1) / 2;
  for (long first = start; first < start + half; first += PAIRS) {
    long count = start + half - first < PAIRS ? start + half - first : PAIRS;
    long second = first + half, others = stop - second < count ? stop - second : count;
    int16_t numbers[PAIRS][2 * MIXED_ROWS];
    float steps[MIXED_ROWS];
    for (long r = 0; r < rows; r++) {
      const float *row = weights + r * n;
      float scaled[2 * PAIRS] = {};
      int16_t rounded[2 * PAIRS];
      for (long k = 0; k < count; k++) scaled[k] = row[first + k] * scales[at(first + k)];
      for (long k = 0; k < others; k++)
        scaled[PAIRS + k] = row[second + k] * scales[at(second + k)];
      steps[r] = round_to(scaled, 2 * PAIRS, rounded, 2 * PAIRS);
      for (long k = 0; k < count; k++) {
        numbers[k][2 * r] = rounded[k];
        numbers[k][2 * r + 1] = rounded[PAIRS + k];
      }
    }
    for (long k = 0; k < count; k++) {
      at.prefetch(tokens, width, first + k);
      at.prefetch(tokens, width, second + k);
      const int8_t *one = tokens + at(first + k) * width;
      const int8_t *other = k < others ? tokens + at(second + k) * width : one;
      add_pair(numbers[k], one, other, rows, width, found);
    }
    for (long r = 0; r < rows; r++)
      for (long j = r * width; j < (r + 1) * width; j++) {
        sums[j] += steps[r] * (float)found[j];
        found[j] = 0;
      }
  }
}

// 4-bit numbers of 8 groups: 32 inputs of a key each, or one column of 32 values each. A byte holds
// numbers 8 m + k and 8 m + 4 + k of group g, from 0 to 15 for -8 to 7, so that 32 bytes times
// int8 are sums of four for every group. Groups have a bf16 scale:
//   keys    [n, d_in / 256] and scales [n, d_in / 32]
//   values  [n / 32, d_out / 8] and scales [n / 32, d_out]
// with all quotients rounded up. Rows and weights are rounded to int8 by group, as their error is
// 1/16 of that of the numbers.
struct Nibbles {
  uint8_t bytes[4][8][4];  // m, g, k
};

static const int OFFSET = 8;
static const long AHEAD = 32;  // blocks to prefetch; a single stream is a quarter slower without

// Rows for 4-bit keys, in their order.
struct ByteRows {
  long blocks;
  std::vector<int8_t> numbers;  // [rows, blocks, 8 parts, 8 groups, 4]
  std::vector<int> offsets;     // [rows, blocks, 8 groups]: what the OFFSET of the keys adds
  std::vector<float> scales;    // [rows, blocks, 8 groups]

  void round(const float *x, long rows, long width) {
    blocks = round_up(width, 8 * GROUP) / (8 * GROUP);
    numbers.assign(rows * blocks * 8 * GROUP, 0);
    offsets.assign(rows * blocks * 8, 0);
    scales.assign(rows * blocks * 8, 0);
    for (long r = 0; r < rows; r++)
      for (long g = 0; g * GROUP < width; g++) {
        int8_t rounded[GROUP];
        long at = r * blocks * 8 + g, left = width - g * GROUP, count = left < GROUP ? left : GROUP;
        scales[at] = round_to(x + r * width + g * GROUP, count, rounded, GROUP);
        for (long p = 0; p < GROUP; p++) offsets[at] += OFFSET * rounded[p];
        int8_t *to = &numbers[(r * blocks + g / 8) * 8 * GROUP + g % 8 * 4];
        for (long part = 0; part < 8; part++) std::memcpy(to + 32 * part, rounded + 4 * part, 4);
      }
  }
};

static inline float from_bf16(uint16_t scale) {
  uint32_t bits = (uint32_t)scale << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

#ifdef USE_AVX2
static inline void unpack(const Nibbles *from, __m256i *parts) {
  const __m256i mask = _mm256_set1_epi8(15);
  for (int m = 0; m < 4; m++) {
    __m256i bytes = load(from->bytes[m]);
    parts[2 * m] = _mm256_and_si256(bytes, mask);
    parts[2 * m + 1] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask);
  }
}

// The sums of 8 groups: `parts` times 8 vectors of int8.
template <typename F>
static inline __m256i group_sums(const __m256i *parts, F factor) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  __m256i sums = _mm256_setzero_si256();
  for (int k = 0; k < 8; k++) sums = _mm256_dpbusd_epi32(sums, parts[k], factor(k));
  return sums;
#elif defined(__AVXVNNI__)
  __m256i sums = _mm256_setzero_si256();
  for (int k = 0; k < 8; k++) sums = _mm256_dpbusd_avx_epi32(sums, parts[k], factor(k));
  return sums;
#else
  // 8 pairs of products are at most 8 * 2 * 15 * 127, which an int16 can hold.
  __m256i sums = _mm256_maddubs_epi16(parts[0], factor(0));
  for (int k = 1; k < 8; k++)
    sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(parts[k], factor(k)));
  return _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
#endif
}

static inline __m256 eight_scales(const uint16_t *scales) {
  __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)scales));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

template <int R>
static void dots(const ByteRows &x, long r, const Nibbles *token, const uint16_t *scales,
                 float *found) {
  __m256 totals[R];
  for (int k = 0; k < R; k++) totals[k] = _mm256_setzero_ps();
  for (long b = 0; b < x.blocks; b++) {
    __m256i parts[8];
    unpack(token + b, parts);
    __m256 scale = eight_scales(scales + 8 * b);
    for (int k = 0; k < R; k++) {
      long at = (r + k) * x.blocks + b;
      const int8_t *row = &x.numbers[at * 8 * GROUP];
      __m256i sums = group_sums(parts, [&](int part) { return load(row + 32 * part); });
      sums = _mm256_sub_epi32(sums, load(&x.offsets[8 * at]));
      __m256 step = _mm256_mul_ps(scale, _mm256_loadu_ps(&x.scales[8 * at]));
      totals[k] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), step, totals[k]);
    }
  }
  for (int k = 0; k < R; k++) found[k] = total_of(totals[k]);
}

// weights [rows, GROUP] times 8 columns of GROUP tokens, added to sums [rows, stride].
static inline void add_columns(const int8_t *weights, const int *offsets, const float *steps,
                               long rows, const Nibbles *tokens, const uint16_t *scales,
                               float *sums, long stride) {
  __m256i parts[8];
  unpack(tokens, parts);
  __m256 scale = eight_scales(scales);
  for (long r = 0; r < rows; r++) {
    __m256i found = group_sums(parts, [&](int part) {
      int four;
      std::memcpy(&four, weights + r * GROUP + 4 * part, sizeof four);
      return _mm256_set1_epi32(four);
    });
    found = _mm256_sub_epi32(found, _mm256_set1_epi32(offsets[r]));
    __m256 step = _mm256_mul_ps(scale, _mm256_set1_ps(steps[r]));
    float *to = sums + r * stride;
    _mm256_storeu_ps(to, _mm256_fmadd_ps(_mm256_cvtepi32_ps(found), step, _mm256_loadu_ps(to)));
  }
}
#else
static inline int number_at(const Nibbles &from, long g, long p) {
  return (from.bytes[p / 8][g][p % 4] >> (p % 8 / 4 * 4) & 15) - OFFSET;
}

template <int R>
static void dots(const ByteRows &x, long r, const Nibbles *token, const uint16_t *scales,
                 float *found) {
  for (int k = 0; k < R; k++) {
    found[k] = 0;
    for (long b = 0; b < x.blocks; b++) {
      long at = (r + k) * x.blocks + b;
      for (long g = 0; g < 8; g++) {
        int sum = 0;
        for (long p = 0; p < GROUP; p++)
          sum += x.numbers[at * 8 * GROUP + p / 4 * 32 + g * 4 + p % 4] * number_at(token[b], g, p);
        found[k] += (float)sum * (from_bf16(scales[8 * b + g]) * x.scales[8 * at + g]);
      }
    }
  }
}

static inline void add_columns(const int8_t *weights, const int *, const float *steps, long rows,
                               const Nibbles *tokens, const uint16_t *scales, float *sums,
                               long stride) {
  for (long r = 0; r < rows; r++)
    for (long g = 0; g < 8; g++) {
      int sum = 0;
      for (long p = 0; p < GROUP; p++) sum += weights[r * GROUP + p] * number_at(*tokens, g, p);
      sums[r * stride + g] += (float)sum * (from_bf16(scales[g]) * steps[r]);
    }
}
#endif

static void score_token(const ByteRows &x, long rows, long, const Nibbles *tokens,
                        const uint16_t *scales, long i, long n, float *scores) {
  const Nibbles *token = tokens + i * x.blocks;
  scales += i * x.blocks * 8;
  for (long r = 0; r < rows; r += 4) {
    float found[4];
    switch (rows - r) {
      case 1: dots<1>(x, r, token, scales, found); break;
      case 2: dots<2>(x, r, token, scales, found); break;
      case 3: dots<3>(x, r, token, scales, found); break;
      default: dots<4>(x, r, token, scales, found);
    }
    for (long k = r; k < rows && k < r + 4; k++) scores[k * n + i] = found[k - r];
  }
}

static float token_score(const ByteRows &x, long r, long, const Nibbles *tokens,
                         const uint16_t *scales, long i) {
  float found;
  dots<1>(x, r, tokens + i * x.blocks, scales + i * x.blocks * 8, &found);
  return found;
}

// As above; the tokens come in whole groups, but for the last of a layer.
template <typename At>
static void mix_tokens(const float *weights, long rows, long n, const Nibbles *tokens,
                       const uint16_t *scales, long width, long start, long stop, float *sums,
                       At place) {
  static thread_local std::vector<float> held;
  long padded = round_up(width, 8);
  held.assign(rows * padded, 0);
  float *found = held.data();
  for (long first = start; first < stop; first += GROUP) {
    long count = stop - first < GROUP ? stop - first : GROUP;
    long at = place(first) / GROUP * padded;
    int8_t numbers[MIXED_ROWS * GROUP];
    int offsets[MIXED_ROWS] = {};
    float steps[MIXED_ROWS];
    for (long r = 0; r < rows; r++) {
      steps[r] = round_to(weights + r * n + first, count, numbers + r * GROUP, GROUP);
      for (long p = 0; p < GROUP; p++) offsets[r] += OFFSET * numbers[r * GROUP + p];
    }
    for (long j = 0; j < padded; j += 8) {
      const Nibbles *block = tokens + (at + j) / 8;
      __builtin_prefetch(block + AHEAD);  // two cache lines
      __builtin_prefetch(block[AHEAD].bytes[2]);
      add_columns(numbers, offsets, steps, rows, block, scales + at + j, found + j, padded);
    }
  }
  for (long r = 0; r < rows; r++)
    for (long j = 0; j < width; j++) sums[r * width + j] += found[r * padded + j];
}
