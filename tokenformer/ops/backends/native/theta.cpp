// Norm, scale and GELU of the scores of `l2_gelu` in one pass over each row, and its derivative in
// one pass, both vectorized by the compiler. Between two matrix products of a narrow layer these
// passes would otherwise cost as much as the products. `library.py` builds and loads this.

#include <cmath>
#include <cstdint>
#include <cstring>

static const float TINY = 1.0842022e-19f;  // as in theta.py: a row with a smaller norm counts as zero

// exp(-y) for y >= 0, with a relative error of about 1e-7.
static inline float exp_of_minus(float y) {
  y = y < 87 ? y : 87;
  float k = std::rint(y * -1.44269504f);
  // The remainder, with ln 2 in two parts whose first has trailing zeros.
  float r = -y - k * 0.693359375f + k * 2.12194440e-4f;
  float p = 1 / 5040.0f;
  p = p * r + 1 / 720.0f;
  p = p * r + 1 / 120.0f;
  p = p * r + 1 / 24.0f;
  p = p * r + 1 / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1;
  p = p * r + 1;
  int32_t bits = ((int32_t)k + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

struct Normal {
  float below, density;  // of the standard normal distribution
};

// P(N < x) and the density at x, from one exponential: P(N > |x|) = exp(-x^2 / 2) R(1 / (1 + 0.3
// |x|)), R a polynomial of degree 8 fitted to 1.5e-7 of its value everywhere.
static inline Normal normal(float x) {
  float e = exp_of_minus(0.5f * x * x);
  float u = 1 / (1 + 0.3f * std::fabs(x));
  float r = 0.03568132594227791f;
  r = r * u - 0.15723039209842682f;
  r = r * u + 0.2064005583524704f;
  r = r * u - 0.05372694507241249f;
  r = r * u + 0.12858451902866364f;
  r = r * u + 0.0999065563082695f;
  r = r * u + 0.12075506895780563f;
  r = r * u + 0.11962922662496567f;
  float tail = e * (r * u);
  return {x > 0 ? 1 - tail : tail, 0.3989422804f * e};
}

// scores [rows, n] -> weights [rows, n] = gelu(f scores) and stats [rows, 2] = (f, norm), with f =
// root / (norm + eps); f is 0 and the norm infinite for a zero row.
extern "C" void l2_gelu_forward_f32(const float *scores, long rows, long n, float root, float eps,
                                float *weights, float *stats, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long r = 0; r < rows; r++) {
    const float *a = scores + r * n;
    float *w = weights + r * n, total = 0;
#pragma omp simd reduction(+ : total)
    for (long i = 0; i < n; i++) total += a[i] * a[i];
    float norm = std::sqrt(total);
    if (norm < TINY) norm = INFINITY;
    float f = root / (norm + eps);
    stats[2 * r] = f, stats[2 * r + 1] = norm;
#pragma omp simd
    for (long i = 0; i < n; i++) {
      float x = f * a[i];
      w[i] = x * normal(x).below;
    }
  }
}

// grad [rows, n] of the weights becomes that of the scores; weights are filled, and sums [rows] with
// the gradient of f.
extern "C" void l2_gelu_backward_f32(const float *scores, const float *stats, long rows, long n,
                                 float root, float *grad, float *weights, float *sums,
                                 int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long r = 0; r < rows; r++) {
    const float *a = scores + r * n;
    float *g = grad + r * n, *w = weights + r * n, f = stats[2 * r], total = 0;
#pragma omp simd reduction(+ : total)
    for (long i = 0; i < n; i++) {
      float x = f * a[i];
      Normal at = normal(x);
      w[i] = x * at.below;
      g[i] *= at.below + x * at.density;
      total += g[i] * a[i];
    }
    sums[r] = total;
    float shrink = total * f * f / (root * stats[2 * r + 1]);
#pragma omp simd
    for (long i = 0; i < n; i++) g[i] = f * g[i] - shrink * a[i];
  }
}
