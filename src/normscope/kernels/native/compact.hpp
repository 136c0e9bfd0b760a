// What counts of neighbours, side by side.
#pragma once
#include <array>
#include <cstdint>
#include <cstring>

#include "vec.hpp"

namespace ns {

constexpr int64_t kAhead = 2048;  // bytes that are sent for before they are read
constexpr int64_t kOverrun = 16;  // elements beyond its result that `compact` may write

#if defined(__AVX2__) && !defined(__AVX512BW__)
// For each choice among eight values, where those that are chosen come from.
using Choices = std::array<std::array<int32_t, 8>, 256>;
constexpr Choices make_choices() {
  Choices all{};
  for (int bits = 0; bits < 256; ++bits)
    for (int from = 0, to = 0; from < 8; ++from)
      if (bits >> from & 1) all[std::size_t(bits)][std::size_t(to++)] = from;
  return all;
}
inline constexpr Choices kChoices = make_choices();
#endif

// Copies those of n elements whose byte is 1, the others leave no gap; how many they are.
template <class T>
inline int64_t compact(const T *x, const uint8_t *valid, int64_t n, T *out) {
  int64_t i = 0, found = 0;
#if defined(__AVX512BW__)
  for (; i < n; i += 16) {
    const __mmask16 there = n - i < 16 ? __mmask16((1u << (n - i)) - 1) : __mmask16(-1);
    const __m128i bytes = _mm_maskz_loadu_epi8(there, valid + i);
    const __mmask16 bits = _mm_test_epi8_mask(bytes, bytes);
    __builtin_prefetch((const char *)(x + i) + kAhead);
    if (bits == __mmask16(-1)) {  // the usual case of long stretches
      std::memcpy(static_cast<void *>(out + found), x + i, 16 * sizeof(T));
    } else if constexpr (sizeof(T) == 4) {
      const __m512i v = _mm512_maskz_loadu_epi32(there, x + i);
      _mm512_storeu_si512(out + found, _mm512_maskz_compress_epi32(bits, v));
    } else if constexpr (sizeof(T) == 2) {
      const __m512i v = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, x + i));
      _mm256_storeu_si256((__m256i *)(out + found), _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(bits, v)));
    } else {
      const __mmask8 low = __mmask8(bits), high = __mmask8(bits >> 8);
      const __m512i a = _mm512_maskz_loadu_epi64(__mmask8(there), x + i);
      const __m512i b = _mm512_maskz_loadu_epi64(__mmask8(there >> 8), x + i + 8);
      _mm512_storeu_si512(out + found, _mm512_maskz_compress_epi64(low, a));
      _mm512_storeu_si512(out + found + __builtin_popcount(low), _mm512_maskz_compress_epi64(high, b));
    }
    found += __builtin_popcount(bits);
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(T) <= 4) {
    for (; i + 8 <= n; i += 8) {
      const __m128i bytes = _mm_loadl_epi64((const __m128i *)(valid + i));
      const int bits = _mm_movemask_epi8(_mm_cmpgt_epi8(bytes, _mm_setzero_si128()));
      __builtin_prefetch((const char *)(x + i) + kAhead);
      const __m256i from = _mm256_loadu_si256((const __m256i *)kChoices[std::size_t(bits)].data());
      if constexpr (sizeof(T) == 4) {
        const __m256i v = _mm256_loadu_si256((const __m256i *)(x + i));
        _mm256_storeu_si256((__m256i *)(out + found), _mm256_permutevar8x32_epi32(v, from));
      } else {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(x + i)));
        const __m256i v = _mm256_permutevar8x32_epi32(wide, from);
        _mm_storeu_si128((__m128i *)(out + found),
                         _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
      }
      found += __builtin_popcount(unsigned(bits));
    }
  }
#endif
  for (; i < n; ++i) out[found] = x[i], found += valid[i];
  return found;
}

}  // namespace ns
