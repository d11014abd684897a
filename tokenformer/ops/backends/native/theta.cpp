// Norm, scale and GELU of the scores of `l2_gelu` in one pass over each row, and its derivative in
// one pass, both vectorized by the compiler. Between two matrix products of a narrow layer these
// passes would otherwise cost as much as the products. `library.py` builds and loads this.

#include <cmath>

#include "normal.h"

static const float TINY = 1.0842022e-19f;  // as in theta.py: a row with a smaller norm counts as zero

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
