// Elementary functions of the row kernels, the same on CPU and GPU.
//
// In float they are polynomials without branches or calls, so that loops over them vectorise. The
// coefficients are minimax fits of this project; the approximation errors (relative) are 3.4e-9 for
// the exponential and 9e-10 for the logarithm, below the rounding of float32. Products and sums are
// left to the compiler to fuse, for processors without FMA.
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

constexpr float LN2_HIGH = 0.693359375f;  // few bits: its product with an exponent is exact
constexpr float LN2_LOW = -2.12194440e-4f;

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

// condition ? yes : no, without the branches that keep a loop from being vectorised.
ROWS_INLINE float choose(bool condition, float yes, float no) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return float_of((bits_of(yes) & mask) | (bits_of(no) & ~mask));
}

ROWS_INLINE double choose(bool condition, double yes, double no) { return condition ? yes : no; }

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
  const float lowest = -88.0f;       // has the exponent -127, whose power is written as 0
  const float round = 12582912.0f;  // 1.5 * 2^23 rounds to whole numbers
  const float clamped = x < lowest ? lowest : x;
  const float shifted = clamped * 1.44269504f + round;
  const float n = shifted - round;
  const float r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
  float p = 1.395171931e-03f;
  p = p * r + 8.369598207e-03f;
  p = p * r + 4.166618725e-02f;
  p = p * r + 1.666651289e-01f;
  p = p * r + 5.000000101e-01f;
  p = p * r * r + r;  // e^r - 1
  const float power = float_of((bits_of(shifted) + 127u) << 23);
  return {p * power + power, p * power + (power - 1.0f)};
}

ROWS_INLINE Exponential<double> exponential(double x) { return {::exp(x), ::expm1(x)}; }

template <class Real>
ROWS_INLINE Real exponent(Real x) {
  return exponential(x).exp;
}

// log(1 + y) for -1 < y <= 0; exactly 0 for 0.
ROWS_INLINE float log1p_of(float y) {
  const uint32_t bits = bits_of(1.0f + y);
  const int32_t e = static_cast<int32_t>(bits - 0x3f3504f3u) >> 23;  // 0 from sqrt(1/2) on
  const float m = float_of(bits - (static_cast<uint32_t>(e) << 23));
  const float f = e == 0 ? y : m - 1.0f;
  const float s = f / (2.0f + f);  // log(1 + f) = 2 artanh(s)
  const float w = s * s;
  float p = 2.989865509e-01f;
  p = p * w + 3.997661232e-01f;
  p = p * w + 6.666678322e-01f;
  const float n = static_cast<float>(e);
  return n * LN2_HIGH + (n * LN2_LOW + (f - s * (f - w * p)));
}

ROWS_INLINE double log1p_of(double y) { return ::log1p(y); }

}  // namespace rows
