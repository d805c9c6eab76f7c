// Elementary functions of the row kernels, the same on CPU and GPU.
//
// In float they are polynomials without branches or calls, so that loops over them vectorise. The
// coefficients are minimax fits of this project; the approximation errors (relative) are 2.6e-9 for
// the exponential and 3.0e-8 for the logarithm, below the rounding of float32. Terms are added in
// pairs (Estrin's scheme), for shorter chains of instructions that wait for each other. Products and
// sums are left to the compiler to fuse, for processors without FMA.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define ROWS_INLINE __host__ __device__ __forceinline__
#else
#define ROWS_INLINE inline __attribute__((always_inline))
#endif

namespace rows {

ROWS_INLINE float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

ROWS_INLINE uint32_t bits_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

struct Bfloat16 {
  uint16_t bits;
};

ROWS_INLINE float from_bfloat16(Bfloat16 value) {
  return float_of(static_cast<uint32_t>(value.bits) << 16);
}

// To nearest, ties to even.
ROWS_INLINE Bfloat16 to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<uint16_t>(value != value ? 0x7fc0u : rounded)};
}

template <class Real>
struct Exponential {
  Real exp, expm1;
};

// e^x and e^x - 1 for x up to about 80; below -87.7 they are 0 and -1. NaN stays NaN.
ROWS_INLINE Exponential<float> exponential(float x) {
  const float lowest = -88.0f;  // has the exponent -127, whose power is written as 0
  const float log2_e = 1.44269504f;
  const float round = 12583039.0f;  // 1.5 * 2^23 rounds to whole numbers; 127 biases exponents
  const float clamped = lowest > x ? lowest : x;
  const float shifted = clamped * log2_e + round;
  const float r = clamped * log2_e - (shifted - round);
  const float power = float_of(bits_of(shifted) << 23);
  const float r2 = r * r, scaled = r * power;
  const float p0 = 2.40226528e-01f * r + 6.93147215e-01f;
  const float p2 = 9.61769297e-03f * r + 5.55031055e-02f;
  const float p4 = 1.55946782e-04f * r + 1.34066439e-03f;
  const float p = (p4 * r2 + p2) * r2 + p0;  // (2^r - 1) / r
  return {p * scaled + power, p * scaled + (power - 1.0f)};
}

ROWS_INLINE Exponential<double> exponential(double x) { return {::exp(x), ::expm1(x)}; }

template <class Real>
ROWS_INLINE Real exponent(Real x) {
  return exponential(x).exp;
}

// log(1 + y) for 0 <= y <= 1.
ROWS_INLINE float log1p_of(float y) {
  const float y2 = y * y, y4 = y2 * y2;
  const float p0 = -4.99994931e-01f * y + 9.99999970e-01f;
  const float p2 = -2.48429821e-01f * y + 3.33190968e-01f;
  const float p4 = -1.36632453e-01f * y + 1.91060064e-01f;
  const float p6 = -2.95052373e-02f * y + 7.82259478e-02f;
  return y * ((5.23269411e-03f * y4 + (p6 * y2 + p4)) * y4 + (p2 * y2 + p0));
}

ROWS_INLINE double log1p_of(double y) { return ::log1p(y); }

}  // namespace rows
