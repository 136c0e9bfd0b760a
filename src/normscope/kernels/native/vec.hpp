// Vectors: two registers of compute values at a time ("a pack"), loaded from and stored to every dtype.
//
// A pack is 32 elements computed in float, 16 in double. For bfloat16 the two halves hold the even and the odd
// elements, so that widening is a shift and a mask and nothing crosses lanes; `kSplit` says so, and `lane_order` puts
// per-element arrays (weights) into the same order.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__F16C__) || defined(__AVX512F__) || defined(__SSE2__)
#include <immintrin.h>
#endif

namespace ns {

using f32x16 = float __attribute__((vector_size(64)));
using f64x8 = double __attribute__((vector_size(64)));
using i32x16 = int32_t __attribute__((vector_size(64)));
using u32x16 = uint32_t __attribute__((vector_size(64)));
using u16x16 = uint16_t __attribute__((vector_size(32)));
using u8x8 = uint8_t __attribute__((vector_size(8)));
using u8x16 = uint8_t __attribute__((vector_size(16)));
using i64x8 = int64_t __attribute__((vector_size(64)));

#define NS_INLINE inline __attribute__((always_inline))

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class V>
NS_INLINE V load_raw(const void *p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
NS_INLINE void store_raw(void *p, V v) {
  std::memcpy(p, &v, sizeof v);
}

// Streaming store of 64 aligned bytes, past the caches; a plain one where the machine has none.
template <class V>
NS_INLINE void store_stream(void *p, V v) {
  static_assert(sizeof(V) == 64);
#if defined(__AVX512F__)
  _mm512_stream_si512((__m512i *)p, (__m512i)v);
#elif defined(__AVX__)
  __m256i half[2];
  std::memcpy(half, &v, 64);
  _mm256_stream_si256((__m256i *)p, half[0]);
  _mm256_stream_si256((__m256i *)p + 1, half[1]);
#elif defined(__SSE2__)
  __m128i part[4];
  std::memcpy(part, &v, 64);
  for (int i = 0; i < 4; ++i) _mm_stream_si128((__m128i *)p + i, part[i]);
#else
  store_raw(p, v);
#endif
}
NS_INLINE void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Half types: single values -------------------------------------------------------------------------------------------

NS_INLINE float widen(BFloat16 h) {
  const uint32_t u = uint32_t(h.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
NS_INLINE BFloat16 narrow_bf16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return {uint16_t((u >> 16) | 0x40)};  // NaN stays NaN
  return {uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}
NS_INLINE float widen(Float16 h) {
  const uint32_t sign = uint32_t(h.bits & 0x8000) << 16, body = h.bits & 0x7fff;
  float f;
  if (body >= 0x7c00) {  // Inf, NaN
    const uint32_t u = sign | 0x7f800000 | (body & 0x3ff) << 13;
    std::memcpy(&f, &u, 4);
    return f;
  }
  // Exponent moved by a product, which also makes float16's subnormals right.
  const uint32_t u = body << 13;
  std::memcpy(&f, &u, 4);
  f *= 0x1p112f;
  return sign ? -f : f;
}
NS_INLINE Float16 narrow_f16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  const uint16_t sign = uint16_t(u >> 16) & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000) return {uint16_t(sign | 0x7e00)};
  if (u >= 0x477ff000) return {uint16_t(sign | 0x7c00)};  // rounds to 65520 or above: Inf
  if (u < 0x38800000) {                                   // subnormal in float16: let the adder round
    float g;
    std::memcpy(&g, &u, 4);
    g += 0.5f;
    uint32_t v;
    std::memcpy(&v, &g, 4);
    return {uint16_t(sign | (v - 0x3f000000))};
  }
  u += 0xfff + ((u >> 13) & 1);
  return {uint16_t(sign | ((u - 0x38000000) >> 13))};
}

// Packs -----------------------------------------------------------------------------------------------------------------

// What is computed in, and how T is read and written. n below kPack reads and writes only n elements; lanes beyond
// hold `fill`.
template <class T>
struct Lanes;

template <class C, class V>
struct Pack {
  V a, b;
};

template <class C, class V>
NS_INLINE Pack<C, V> operator+(Pack<C, V> l, Pack<C, V> r) {
  return {l.a + r.a, l.b + r.b};
}
template <class C, class V>
NS_INLINE Pack<C, V> operator-(Pack<C, V> l, Pack<C, V> r) {
  return {l.a - r.a, l.b - r.b};
}
template <class C, class V>
NS_INLINE Pack<C, V> operator*(Pack<C, V> l, Pack<C, V> r) {
  return {l.a * r.a, l.b * r.b};
}
template <class C, class V>
NS_INLINE Pack<C, V> multiply_add(Pack<C, V> l, Pack<C, V> r, Pack<C, V> to) {
  return {l.a * r.a + to.a, l.b * r.b + to.b};
}

// The same, fused wherever the machine can: `multiply_add` is so as the compiler sees fit at each place.
NS_INLINE f32x16 fused(f32x16 l, f32x16 r, f32x16 to) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_fmadd_ps((__m512)l, (__m512)r, (__m512)to);
#elif defined(__FMA__)
  __m256 a[2], b[2], c[2];
  std::memcpy(a, &l, 64), std::memcpy(b, &r, 64), std::memcpy(c, &to, 64);
  for (int i = 0; i < 2; ++i) c[i] = _mm256_fmadd_ps(a[i], b[i], c[i]);
  std::memcpy(&to, c, 64);
  return to;
#else
  return l * r + to;
#endif
}
NS_INLINE f64x8 fused(f64x8 l, f64x8 r, f64x8 to) {
#if defined(__AVX512F__)
  return (f64x8)_mm512_fmadd_pd((__m512d)l, (__m512d)r, (__m512d)to);
#elif defined(__FMA__)
  __m256d a[2], b[2], c[2];
  std::memcpy(a, &l, 64), std::memcpy(b, &r, 64), std::memcpy(c, &to, 64);
  for (int i = 0; i < 2; ++i) c[i] = _mm256_fmadd_pd(a[i], b[i], c[i]);
  std::memcpy(&to, c, 64);
  return to;
#else
  return l * r + to;
#endif
}
template <class C, class V>
NS_INLINE Pack<C, V> fused(Pack<C, V> l, Pack<C, V> r, Pack<C, V> to) {
  return {fused(l.a, r.a, to.a), fused(l.b, r.b, to.b)};
}

// n bytes below 128, in pieces of fixed sizes: a call of memcpy would take longer than the rest.
NS_INLINE void copy_few(void *to, const void *from, int n) {
  char *t = (char *)to;
  const char *f = (const char *)from;
  if (n & 64) std::memcpy(t, f, 64), t += 64, f += 64;
  if (n & 32) std::memcpy(t, f, 32), t += 32, f += 32;
  if (n & 16) std::memcpy(t, f, 16), t += 16, f += 16;
  if (n & 8) std::memcpy(t, f, 8), t += 8, f += 8;
  if (n & 4) std::memcpy(t, f, 4), t += 4, f += 4;
  if (n & 2) std::memcpy(t, f, 2);
}

#if defined(__AVX512BW__)
NS_INLINE uint32_t first_bits(int n) { return uint32_t((uint64_t(1) << n) - 1); }
#endif

template <class Self, class T, class C_, class V_, bool Split>
struct LanesBase {
  using C = C_;
  using V = V_;
  using P = Pack<C, V>;
  static constexpr int kWide = sizeof(V) / sizeof(C);
  static constexpr int kPack = 2 * kWide;
  static constexpr bool kSplit = Split;

  static NS_INLINE P load_part(const T *p, int n, C fill) {
    alignas(64) T buffer[kPack];
#if defined(__AVX512BW__)
    const uint32_t m = first_bits(n);
    if constexpr (sizeof(T) == 2) {
      store_raw(buffer, _mm512_maskz_loadu_epi16(m, p));
    } else if constexpr (sizeof(T) == 4) {
      store_raw(buffer, _mm512_maskz_loadu_epi32(__mmask16(m), p));
      store_raw(buffer + kWide, _mm512_maskz_loadu_epi32(__mmask16(m >> 16), p + kWide));
    } else {
      store_raw(buffer, _mm512_maskz_loadu_epi64(__mmask8(m), p));
      store_raw(buffer + kWide, _mm512_maskz_loadu_epi64(__mmask8(m >> 8), p + kWide));
    }
#else
    std::memset((void *)buffer, 0, sizeof buffer);
    copy_few(buffer, p, n * int(sizeof(T)));
#endif
    P r = Self::load(buffer);
    using I = std::conditional_t<sizeof(C) == 4, i32x16, i64x8>;
    I at_a{}, at_b{};
    for (int i = 0; i < kWide; ++i) {
      at_a[i] = Split ? 2 * i : i;
      at_b[i] = Split ? 2 * i + 1 : kWide + i;
    }
    const V f = fill - V{};
    r.a = at_a < n ? r.a : f;
    r.b = at_b < n ? r.b : f;
    return r;
  }
  static NS_INLINE void store_part(T *p, P v, int n) {
    alignas(64) T buffer[kPack];
    Self::store(buffer, v);
#if defined(__AVX512BW__)
    const uint32_t m = first_bits(n);
    if constexpr (sizeof(T) == 2) {
      _mm512_mask_storeu_epi16(p, m, load_raw<__m512i>(buffer));
    } else if constexpr (sizeof(T) == 4) {
      _mm512_mask_storeu_epi32(p, __mmask16(m), load_raw<__m512i>(buffer));
      _mm512_mask_storeu_epi32(p + kWide, __mmask16(m >> 16), load_raw<__m512i>(buffer + kWide));
    } else {
      _mm512_mask_storeu_epi64(p, __mmask8(m), load_raw<__m512i>(buffer));
      _mm512_mask_storeu_epi64(p + kWide, __mmask8(m >> 8), load_raw<__m512i>(buffer + kWide));
    }
#else
    copy_few(p, buffer, n * int(sizeof(T)));
#endif
  }
};

template <>
struct Lanes<float> : LanesBase<Lanes<float>, float, float, f32x16, false> {
  static constexpr bool kStreams = true;
  static NS_INLINE P load(const float *p) { return {load_raw<V>(p), load_raw<V>(p + 16)}; }
  static NS_INLINE void store(float *p, P v) { store_raw(p, v.a), store_raw(p + 16, v.b); }
  static NS_INLINE void stream(float *p, P v) { store_stream(p, v.a), store_stream(p + 16, v.b); }
  static NS_INLINE P round(P v) { return v; }
  static NS_INLINE float value(float v) { return v; }
  static NS_INLINE float make(float v) { return v; }
};

template <>
struct Lanes<double> : LanesBase<Lanes<double>, double, double, f64x8, false> {
  static constexpr bool kStreams = true;
  static NS_INLINE P load(const double *p) { return {load_raw<V>(p), load_raw<V>(p + 8)}; }
  static NS_INLINE void store(double *p, P v) { store_raw(p, v.a), store_raw(p + 8, v.b); }
  static NS_INLINE void stream(double *p, P v) { store_stream(p, v.a), store_stream(p + 8, v.b); }
  static NS_INLINE P round(P v) { return v; }
  static NS_INLINE double value(double v) { return v; }
  static NS_INLINE double make(double v) { return v; }
};

template <>
struct Lanes<BFloat16> : LanesBase<Lanes<BFloat16>, BFloat16, float, f32x16, true> {
  static constexpr bool kStreams = true;
  static NS_INLINE P load(const BFloat16 *p) {
    const u32x16 u = load_raw<u32x16>(p);
    return {(f32x16)(u << 16), (f32x16)(u & 0xffff0000u)};
  }
  // The upper half of each lane holds the rounded value, the lower half is to be dropped. A NaN that comes of arithmetic
  // has its highest bit in the upper half.
  static NS_INLINE u32x16 rounded(f32x16 v) {
#if defined(__AVX512F__)
    const __m512i bits = (__m512i)v;
    const __mmask16 number = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_ORD_Q);
    const __mmask16 odd = _mm512_mask_test_epi32_mask(number, bits, _mm512_set1_epi32(0x10000));
    const __m512i even_up = _mm512_mask_add_epi32(bits, number, bits, _mm512_set1_epi32(0x7fff));
    return (u32x16)_mm512_mask_add_epi32(even_up, odd, bits, _mm512_set1_epi32(0x8000));
#else
    const u32x16 u = (u32x16)v;
    const u32x16 r = u + 0x7fffu + ((u >> 16) & 1u);
    return v == v ? r : (u | 0x400000u);
#endif
  }
  static NS_INLINE u32x16 join(P v) { return (rounded(v.a) >> 16) | (rounded(v.b) & 0xffff0000u); }
  static NS_INLINE void store(BFloat16 *p, P v) { store_raw(p, join(v)); }
  static NS_INLINE void stream(BFloat16 *p, P v) { store_stream(p, join(v)); }
  static NS_INLINE P round(P v) {
    return {(f32x16)(rounded(v.a) & 0xffff0000u), (f32x16)(rounded(v.b) & 0xffff0000u)};
  }
  static NS_INLINE float value(BFloat16 v) { return widen(v); }
  static NS_INLINE BFloat16 make(float v) { return narrow_bf16(v); }
};

template <>
struct Lanes<Float16> : LanesBase<Lanes<Float16>, Float16, float, f32x16, false> {
  static constexpr bool kStreams = true;
  static NS_INLINE f32x16 wide(const Float16 *p) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps(load_raw<__m256i>(p));
#elif defined(__F16C__)
    f32x16 v;
    const __m256 lo = _mm256_cvtph_ps(load_raw<__m128i>(p)), hi = _mm256_cvtph_ps(load_raw<__m128i>(p + 8));
    std::memcpy(&v, &lo, 32), std::memcpy((char *)&v + 32, &hi, 32);
    return v;
#else
    return wide_by_one(p);
#endif
  }
  static NS_INLINE u16x16 tight(f32x16 v) {
#if defined(__AVX512F__)
    return (u16x16)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
    __m256 lo, hi;
    std::memcpy(&lo, &v, 32), std::memcpy(&hi, (const char *)&v + 32, 32);
    u16x16 r;
    const __m128i a = _mm256_cvtps_ph(lo, 0), b = _mm256_cvtps_ph(hi, 0);
    std::memcpy(&r, &a, 16), std::memcpy((char *)&r + 16, &b, 16);
    return r;
#else
    return tight_by_one(v);
#endif
  }
  // One copy of each, where the machine has no instruction for it: inlined they take longest of all to compile.
  [[gnu::noinline]] static f32x16 wide_by_one(const Float16 *p) {
    f32x16 v;
    for (int i = 0; i < 16; ++i) v[i] = widen(p[i]);
    return v;
  }
  [[gnu::noinline]] static u16x16 tight_by_one(f32x16 v) {
    u16x16 r;
    for (int i = 0; i < 16; ++i) r[i] = narrow_f16(v[i]).bits;
    return r;
  }
  static NS_INLINE P load(const Float16 *p) { return {wide(p), wide(p + 16)}; }
  static NS_INLINE void store(Float16 *p, P v) { store_raw(p, tight(v.a)), store_raw(p + 16, tight(v.b)); }
  static NS_INLINE void stream(Float16 *p, P v) {
    u32x16 both;
    const u16x16 a = tight(v.a), b = tight(v.b);
    std::memcpy(&both, &a, 32), std::memcpy((char *)&both + 32, &b, 32);
    store_stream(p, both);
  }
  static NS_INLINE P round(P v) {
    alignas(64) Float16 buffer[32];
    store(buffer, v);
    return load(buffer);
  }
  static NS_INLINE float value(Float16 v) { return widen(v); }
  static NS_INLINE Float16 make(float v) { return narrow_f16(v); }
};

// Where element i of a block of kPack stands once loaded, counting lanes of `a` then of `b`.
template <class T>
NS_INLINE int lane_of(int i) {
  using L = Lanes<T>;
  return L::kSplit ? (i & 1) * L::kWide + (i >> 1) : i;
}

// Sums over lanes in a fixed order, by halves: a chain of additions would take several times as long.
NS_INLINE double sum_lanes(f64x8 v) {
  using f64x4 = double __attribute__((vector_size(32)));
  f64x4 half[2];
  std::memcpy(half, &v, 64);
  const f64x4 t = half[0] + half[1];
  return (t[0] + t[2]) + (t[1] + t[3]);
}
NS_INLINE double sum_lanes(f32x16 v) {
  using f32x8 = float __attribute__((vector_size(32)));
  f32x8 half[2];
  std::memcpy(half, &v, 64);
  return sum_lanes(__builtin_convertvector(half[0], f64x8) + __builtin_convertvector(half[1], f64x8));
}

}  // namespace ns
