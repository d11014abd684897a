// Rotary positions in one pass; torch takes seven operations and as many again in the backward pass.
// `library.py` builds and loads this.

#include <cstdint>
#include <cstring>

// Rotates the first `dim` channels of heads x [batch, length, heads, size] -> out. cos and sin are
// [batch, length, dim], `angles_wide` numbers apart for two batches (0: all share them). Channel i
// is paired with channel i + dim / 2, as in positions.py; `sign` is -1 for the inverse rotation.
extern "C" void rotary(const float *x, float *out, int64_t batch, int64_t length, int64_t heads,
                       int64_t size, int64_t dim, const float *cos, const float *sin,
                       int64_t angles_wide, float sign, int threads) {
#pragma omp parallel for num_threads(threads) collapse(2) schedule(static)
  for (int64_t b = 0; b < batch; b++)
    for (int64_t t = 0; t < length; t++) {
      const float *c = cos + b * angles_wide + t * dim, *s = sin + b * angles_wide + t * dim;
      const float *from = x + (b * length + t) * heads * size;
      float *to = out + (b * length + t) * heads * size;
      std::memcpy(to, from, heads * size * sizeof(float));
      int64_t half = dim / 2;
      for (int64_t h = 0; h < heads; h++, from += size, to += size)
#pragma omp simd
        for (int64_t i = 0; i < half; i++) {
          to[i] = from[i] * c[i] - sign * from[i + half] * s[i];
          to[i + half] = from[i + half] * c[i + half] + sign * from[i] * s[i + half];
        }
    }
}
