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
static const long PAIRS = 64;  // of tokens whose weights are rounded with one scale
static const long MIXED_ROWS = 8;  // with more, their sums do not fit into the L1 cache
static const long PRODUCTS = 512;  // of an int16 and an int8, which an int32 can sum

static long round_up(long count, long multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

// Rounds numbers to int16 -> `to`, followed by zeros up to `padded`. Returns the scale: NaN if a
// number is not finite.
static float round_to_int16(const float *numbers, long count, int16_t *to, long padded) {
  float top = 0, bad = 0;
#pragma omp simd reduction(max : top) reduction(+ : bad)
  for (long j = 0; j < count; j++) {
    float size = std::fabs(numbers[j]);
    top = size > top ? size : top;
    bad += numbers[j] * 0;
  }
  float scale = top / 32767 + bad, factor = scale > 0 ? 1 / scale : 0;
  if (!(factor < INFINITY)) factor = 0;
  for (long j = 0; j < count; j++) to[j] = (int16_t)(int)std::nearbyint(numbers[j] * factor);
  for (long j = count; j < padded; j++) to[j] = 0;
  return scale;
}

// The rows x [rows, width] as int16, and their scales. Every thread rounds all of them for itself.
struct IntRows {
  long stride;
  std::vector<int16_t> numbers;  // [rows, stride]
  std::vector<float> scales;     // [rows]

  void round(const float *x, long rows, long width) {
    stride = round_up(width, GROUP);
    numbers.resize(rows * stride);
    scales.resize(rows);
    for (long r = 0; r < rows; r++)
      scales[r] = round_to_int16(x + r * width, width, &numbers[r * stride], stride);
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

// weights [rows, n] times the tokens [start, stop), added to sums [rows, width]. Each token of the
// first half is added together with one of the second half, so that memory is read in two streams.
static void mix_tokens(const float *weights, long rows, long n, const int8_t *tokens,
                       const float *scales, long width, long start, long stop, float *sums) {
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
      for (long k = 0; k < count; k++) scaled[k] = row[first + k] * scales[first + k];
      for (long k = 0; k < others; k++) scaled[PAIRS + k] = row[second + k] * scales[second + k];
      steps[r] = round_to_int16(scaled, 2 * PAIRS, rounded, 2 * PAIRS);
      for (long k = 0; k < count; k++) {
        numbers[k][2 * r] = rounded[k];
        numbers[k][2 * r + 1] = rounded[PAIRS + k];
      }
    }
    for (long k = 0; k < count; k++) {
      const int8_t *one = tokens + (first + k) * width;
      add_pair(numbers[k], one, k < others ? one + half * width : one, rows, width, found);
    }
    for (long r = 0; r < rows; r++)
      for (long j = r * width; j < (r + 1) * width; j++) {
        sums[j] += steps[r] * (float)found[j];
        found[j] = 0;
      }
  }
}
