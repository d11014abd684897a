// The standard normal distribution, of which GELU is made, in a form that compilers vectorize.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

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

// GELU's tanh approximation of these: (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)), and its derivative.
static inline Normal normal_by_tanh(float x) {
  float y = 1.5957691216f * (x + 0.044715f * x * x * x);
  float e = exp_of_minus(std::fabs(y)), above = 1 / (1 + e);
  return {(y > 0 ? 1 : e) * above, 1.5957691216f * (1 + 0.134145f * x * x) * e * above * above};
}
