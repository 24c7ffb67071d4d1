// Vectors of T, N lanes wide, through the compiler's vector extensions: loads and stores that convert from and to the
// storage type, and the N x N transposition. Nothing here knows convolutions.
//
// Everything lives in an unnamed namespace: this file is compiled once per instruction set, and the linker must not
// merge the AVX-512 copy of a function with the baseline's.
#pragma once

#include <stdint.h>
#include <string.h>

#include <array>
#include <type_traits>
#include <utility>

#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

// In front of a loop over an array of vectors: unrolled, these stay in registers.
#define UNROLL _Pragma("GCC unroll 32")

namespace {

#if defined(CONVGRAD_VECTOR_BYTES)  // tests: any width runs on any processor, if slowly
constexpr int kVectorBytes = CONVGRAD_VECTOR_BYTES;
#elif defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class T, int N>
struct VectorOf {
  typedef T type __attribute__((vector_size(sizeof(T) * N)));
};
template <class T, int N>
using Vec = typename VectorOf<T, N>::type;

// Integers of the width of T: masks and lane numbers.
template <class T>
using LaneInteger = typename std::conditional<sizeof(T) == 8, int64_t, int32_t>::type;
template <class T, int N>
using Mask = Vec<LaneInteger<T>, N>;

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

template <class To, class From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast changes the size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// ---- conversions of 16-bit storage ------------------------------------------------------------------------------

// True if a load converts in an instruction or two: then kernels may read a pixel as often as they need it.
template <class S>
constexpr bool kCheapToLoad = true;
#if !defined(__AVX2__)
template <>
constexpr bool kCheapToLoad<bfloat16> = false;
#endif
#if !defined(__F16C__)
template <>
constexpr bool kCheapToLoad<float16> = false;
#endif

template <int N>
inline Vec<float, N> widen(Vec<uint16_t, N> h, bfloat16) {
#if defined(__AVX2__)  // GCC needs five instructions
  if constexpr (N == 8) {  // both halves of the register get all elements, and each takes its own
    const __m256i upper = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,  //
                                           -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
    return (Vec<float, N>)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bit_cast<__m128i>(h)), upper);
  }
#endif
#if defined(__AVX512F__)
  if constexpr (N == 16) return (Vec<float, N>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bit_cast<__m256i>(h)), 16);
#endif
  return bit_cast<Vec<float, N>>(__builtin_convertvector(h, Vec<uint32_t, N>) << 16);
}

// Round to nearest even. A NaN stays one: it came from storage of 16 bits or from the processor, so that the bits that
// are rounded off are zeros and nothing is carried into the others.
template <int N>
inline Vec<uint16_t, N> narrow(Vec<float, N> v, bfloat16) {
  typedef Vec<uint32_t, N> U;
  const U u = bit_cast<U>(v);
  const U rounded = u + 0x7fffu + ((u >> 16) & 1u);
#if defined(__AVX2__)
  if constexpr (N == 8) {  // the upper halves of the elements, which GCC masks once more before it packs them
    const __m256i upper = _mm256_setr_epi8(2, 3, 6, 7, 10, 11, 14, 15, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                           2, 3, 6, 7, 10, 11, 14, 15, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i h = _mm256_shuffle_epi8((__m256i)rounded, upper);
    return bit_cast<Vec<uint16_t, N>>(_mm_unpacklo_epi64(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1)));
  }
#endif
  return __builtin_convertvector(rounded >> 16, Vec<uint16_t, N>);
}

// Exponent and mantissa move up by 13 bits; the multiplication by 2^112 rebases the exponent and normalizes
// subnormals in one go. Infinities and NaNs get the full exponent back.
template <int N>
inline Vec<float, N> widen(Vec<uint16_t, N> h, float16) {
#if defined(__F16C__)
  if constexpr (N == 8) return (Vec<float, N>)_mm256_cvtph_ps(bit_cast<__m128i>(h));
#if defined(__AVX512F__)
  if constexpr (N == 16) return (Vec<float, N>)_mm512_cvtph_ps(bit_cast<__m256i>(h));
#endif
#endif
  typedef Vec<uint32_t, N> U;
  const U u = __builtin_convertvector(h, U);
  const U special = bit_cast<U>((u & 0x7c00u) == 0x7c00u);
  const Vec<float, N> scaled = bit_cast<Vec<float, N>>((u & 0x7fffu) << 13) * 0x1p112f;
  return bit_cast<Vec<float, N>>(bit_cast<U>(scaled) | (special & 0x7f800000u) | ((u & 0x8000u) << 16));
}

// Round to nearest even. Results below 2^-14 are subnormal: adding 0.5 lets the processor round them at 2^-24.
template <int N>
inline Vec<uint16_t, N> narrow(Vec<float, N> v, float16) {
#if defined(__F16C__)
  if constexpr (N == 8) return bit_cast<Vec<uint16_t, N>>(_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#if defined(__AVX512F__)
  if constexpr (N == 16) return bit_cast<Vec<uint16_t, N>>(_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#endif
#endif
  typedef Vec<uint32_t, N> U;
  const U u = bit_cast<U>(v);
  const U sign = (u >> 16) & 0x8000u;
  const U magnitude = u & 0x7fffffffu;
  const U normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const U small = bit_cast<U>(bit_cast<Vec<float, N>>(magnitude) + 0.5f) - 0x3f000000u;
  const U is_small = bit_cast<U>(magnitude < 0x38800000u);
  const U is_huge = bit_cast<U>(magnitude >= 0x47800000u);
  const U is_nan = bit_cast<U>(magnitude > 0x7f800000u);
  U h = (small & is_small) | (normal & ~is_small);
  h = (h & ~is_huge) | (0x7c00u & is_huge);
  h = (h & ~is_nan) | ((0x7e00u | ((magnitude >> 13) & 0x3ffu)) & is_nan);
  return __builtin_convertvector(h | sign, Vec<uint16_t, N>);
}

// ---- loads and stores ---------------------------------------------------------------------------------------------

// N elements of the storage type S, as a vector of the arithmetic type T.
template <class T, int N, class S>
inline Vec<T, N> load(const S* from) {
  if constexpr (sizeof(S) == sizeof(T)) {
    Vec<T, N> v;
    memcpy(&v, from, sizeof(v));
    return v;
  } else {
    Vec<uint16_t, N> h;
    memcpy(&h, from, sizeof(h));
    return widen<N>(h, S{});
  }
}

template <class T, int N, class S>
inline void store(S* to, Vec<T, N> v) {
  if constexpr (sizeof(S) == sizeof(T)) {
    memcpy(to, &v, sizeof(v));
  } else {
    const Vec<uint16_t, N> h = narrow<N>(v, S{});
    memcpy(to, &h, sizeof(h));
  }
}

// True if one instruction loads or stores some of the lanes.
#if defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr bool kMasks = true;
#else
constexpr bool kMasks = false;
#endif

// The first `live` lanes only; the others read as zero and are not written.
template <class T, int N, class S>
inline Vec<T, N> load_first(const S* from, int64_t live) {
  if (live >= N) return load<T, N>(from);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const uint32_t mask = (1u << live) - 1;
  if constexpr (sizeof(S) == 8 && N == 8) return (Vec<T, N>)_mm512_maskz_loadu_pd(mask, from);
  if constexpr (sizeof(S) == 4 && N == 16) return (Vec<T, N>)_mm512_maskz_loadu_ps(mask, from);
  if constexpr (sizeof(S) == 2 && N == 16)
    return widen<N>(bit_cast<Vec<uint16_t, N>>(_mm256_maskz_loadu_epi16(mask, from)), S{});
#endif
  S buffer[N] = {};
  memcpy(buffer, from, sizeof(S) * static_cast<size_t>(live));
  return load<T, N>(buffer);
}

// Stores fewer than N lanes: halves, quarters ... of the vector.
template <class U, int N>
inline void store_part(void* to, Vec<U, N> v, int64_t live) {
  if constexpr (N > 1) {
    Vec<U, N / 2> half;
    memcpy(&half, &v, sizeof(half));
    if (live >= N / 2) {
      memcpy(to, &half, sizeof(half));
      memcpy(&half, reinterpret_cast<char*>(&v) + sizeof(half), sizeof(half));
      to = static_cast<char*>(to) + sizeof(half), live -= N / 2;
    }
    store_part<U, N / 2>(to, half, live);
  }
}
template <class T, int N, class S>
inline void store_first(S* to, Vec<T, N> v, int64_t live) {
  if (live >= N) return store<T, N>(to, v);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const uint32_t mask = (1u << live) - 1;
  if constexpr (sizeof(S) == 8 && N == 8) return _mm512_mask_storeu_pd(to, mask, (__m512d)v);
  if constexpr (sizeof(S) == 4 && N == 16) return _mm512_mask_storeu_ps(to, mask, (__m512)v);
  if constexpr (sizeof(S) == 2 && N == 16)
    return _mm256_mask_storeu_epi16(to, mask, bit_cast<__m256i>(narrow<N>(v, S{})));
#endif
  if constexpr (sizeof(S) == sizeof(T)) {
    store_part<T, N>(to, v, live);
  } else {  // in halves, GCC would not keep the sums of depthwise kernels in registers
    S buffer[N];
    store<T, N>(buffer, v);
    memcpy(to, buffer, sizeof(S) * static_cast<size_t>(live));
  }
}

// One element, through the same conversions as a vector's lanes.
template <class T, class S>
inline T load_one(const S* from) {
  if constexpr (sizeof(S) == sizeof(T)) {
    return *reinterpret_cast<const T*>(from);
  } else {
    if constexpr (std::is_same<S, bfloat16>::value) return bit_cast<float>(uint32_t(from->bits) << 16);
#if defined(__F16C__)
    if constexpr (std::is_same<S, float16>::value) return _cvtsh_ss(from->bits);
#endif
    return widen<4>(Vec<uint16_t, 4>{from->bits, 0, 0, 0}, S{})[0];
  }
}

template <class T, class S>
inline void store_one(S* to, T value) {
  if constexpr (sizeof(S) == sizeof(T)) {
    *reinterpret_cast<T*>(to) = value;
  } else {
    if constexpr (std::is_same<S, bfloat16>::value) {
      const uint32_t u = bit_cast<uint32_t>(value);
      return void(to->bits = uint16_t((u + 0x7fffu + (u >> 16 & 1)) >> 16));
    }
#if defined(__F16C__)
    if constexpr (std::is_same<S, float16>::value) return void(to->bits = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
#endif
    to->bits = narrow<4>(Vec<float, 4>{value, 0, 0, 0}, S{})[0];
  }
}

template <class T, int N>
inline Vec<T, N> masked(Vec<T, N> v, Mask<T, N> mask) {
  return bit_cast<Vec<T, N>>(bit_cast<Mask<T, N>>(v) & mask);
}

template <class T, int N>
inline Mask<T, N> first_lanes(int64_t count) {
  Mask<T, N> lane = {};
  for (int l = 0; l < N; ++l) lane[l] = l;
  return lane < static_cast<LaneInteger<T>>(count);
}

// ---- functions compiled for each of several sizes -----------------------------------------------------------------

template <class Make, int... I>
constexpr auto make_all(Make make, std::integer_sequence<int, I...>) {
  return std::array{make(std::integral_constant<int, I>())...};
}
// make(0), ... make(M - 1), to which these numbers are constants.
template <int M, class Make>
constexpr auto make_all(Make make) {
  return make_all(make, std::make_integer_sequence<int, M>());
}

// ---- transposition ------------------------------------------------------------------------------------------------

// The lanes I... of two vectors that follow one another.
template <int... I, class V>
inline V shuffle(V a, V b) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, Vec<LaneInteger<decltype(a[0] + a[0])>, int(sizeof...(I))>{I...});
#endif
}

// One step of the recursive transposition: rows i and i + B exchange their off-diagonal blocks of size B.
template <int B, bool Second, class V, int... I>
inline V exchange(V a, V b, std::integer_sequence<int, I...>) {
  constexpr int n = static_cast<int>(sizeof...(I));
  if constexpr (Second) return shuffle<((I & B) ? I + n : I + B)...>(a, b);
  return shuffle<((I & B) ? I - B + n : I)...>(a, b);
}

template <class T, int N, int B = N / 2>
inline void transpose(Vec<T, N>* rows) {
  constexpr auto lanes = std::make_integer_sequence<int, N>();
  UNROLL for (int i = 0; i < N; ++i) {
    if (i & B) continue;
    const Vec<T, N> a = rows[i], b = rows[i + B];
    rows[i] = exchange<B, false>(a, b, lanes);
    rows[i + B] = exchange<B, true>(a, b, lanes);
  }
  if constexpr (B > 1) transpose<T, N, B / 2>(rows);
}
// get(0), ... get(N - 1) are the rows of a square; put(l, column) for each of its columns.
template <class T, int N, class Get, class Put>
__attribute__((always_inline)) inline void transpose(const Get& get, const Put& put) {
  Vec<T, N> square[N];
  UNROLL for (int l = 0; l < N; ++l) square[l] = get(l);
  transpose<T, N>(square);
  UNROLL for (int l = 0; l < N; ++l) put(l, square[l]);
}

// Return their argument, but the compiler no longer knows where it came from. Otherwise it keeps a pointer for every
// row or kernel element, more than there are registers, and loads a vector again for each multiply-add.
template <class T>
inline const T* opaque(const T* pointer) {
  asm("" : "+r"(pointer));
  return pointer;
}
template <class V>
inline V opaque(V vector) {
#if defined(__x86_64__) && !defined(CONVGRAD_VECTOR_BYTES)
  asm("" : "+v"(vector));
#elif defined(__aarch64__) && !defined(CONVGRAD_VECTOR_BYTES)
  asm("" : "+w"(vector));
#endif
  return vector;
}

}  // namespace
