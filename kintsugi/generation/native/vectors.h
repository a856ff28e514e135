// Vectors of floats of the CPU's width, and the operations of `kernels.cpp` on them.

#pragma once

#include <stdint.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
#if HALF
typedef uint16_t real;
#else
typedef float real;
#endif

static inline vec all(float x) { return x - (vec){0}; }
static inline vec load(const float *at) { return *(const vec *)at; }
static inline eight square(const float *at) { return *(const eight *)at * *(const eight *)at; }
static inline void store(float *at, vec x) { *(vec *)at = x; }

static inline vec widened(const uint16_t *at) { return (vec)(__builtin_convertvector(*(const halves *)at, bits) << 16); }
static inline bits narrowed(vec x) {                       // Round to nearest, ties to even; NaN stays NaN.
  bits b = (bits)x;
  bits r = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
  return x == x ? r : (b >> 16) | 0x40;
}

#if HALF
static inline vec get(const real *at) { return widened(at); }
static inline void put(real *at, vec x) { *(halves *)at = __builtin_convertvector(narrowed(x), halves); }
static inline void put(float *at, vec x) { store(at, x); }
static inline void put_one(real *at, float x) { *at = (uint16_t)narrowed(all(x))[0]; }
static inline vec rounded(vec x) { return (vec)(narrowed(x) << 16); }
#else
static inline vec get(const real *at) { return load(at); }
static inline void put(real *at, vec x) { store(at, x); }
static inline void put_one(real *at, float x) { *at = x; }
static inline vec rounded(vec x) { return x; }
#endif

static inline float sum_of(vec x) {
  float total = 0;
  for (int lane = 0; lane < LANES; lane++) total += x[lane];
  return total;
}

// The same, but by adding halves until one entry is left.
static inline float folded(vec x) {
  for (int half = LANES / 2; half > 0; half /= 2) {
    ints other;
    for (int lane = 0; lane < LANES; lane++) other[lane] = lane ^ half;
    x += __builtin_shuffle(x, other);
  }
  return x[0];
}

// e^x for x ≤ 0, within 2 units in the last place: 2^n times a polynomial.
static inline vec exponential(vec x) {
  const vec shift = all(12582912.0f);                      // 1.5 × 2^23: its last bits are those of a rounded integer.
  const vec y = x < -87.0f ? all(-87.0f) : x;
  const vec shifted = y * 1.44269504088896341f + shift;
  const vec n = shifted - shift;
  const vec r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
  vec p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  p = p * (vec)(((ints)shifted + (127 - 0x4B400000)) << 23);
  return x < -87.0f ? all(0) : p;
}

// Exponential of the attention's softmax. In bfloat16 this is the trainer's own approximation, within 6e-5 (Malossi et al.
// 2015): a better one would round differently at every twentieth key.
static inline vec share_of(vec x) {
#if HALF
  const vec least = all(-87.336540f), inside = x >= least ? x <= 0.0f ? x : all(0) : least;
  const vec y = inside * 1.44269502162933349609375f;
  vec below = __builtin_convertvector(__builtin_convertvector(y, ints), vec);
  below = below > y ? below - 1.0f : below;
  const vec f = y - below;
  vec p = f * -0.079204240219773236f + -0.22433836478672356f;
  p = f * p + 0.30354260500649682f;
  p = f * p + 0.00010703434948458272f;
  const vec e = (vec)__builtin_convertvector((y - p) * 8388608.0f + 1065353216.0f, ints);
  return x < least ? all(0) : x == x ? e : x;
#else
  return exponential(x);
#endif
}
