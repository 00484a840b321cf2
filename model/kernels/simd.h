// Vectors of 64 bytes, written with the compiler's vector extensions: a register with AVX-512. Elsewhere the compiler
// lowers them to several (AVX2, NEON) that pass through memory, which is good enough but for products and transposition:
// those work on `Register`s, as wide as the machine's. Only dot products are intrinsics.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace blockcast {

using bf16 = uint16_t;  // the upper half of a float32

template <class Real>
struct VectorOf {
  typedef Real type __attribute__((vector_size(64)));
  typedef Real unaligned __attribute__((vector_size(64), aligned(sizeof(Real)), may_alias));
};
template <class Real>
using Vec = typename VectorOf<Real>::type;
typedef bf16 Bf16x16 __attribute__((vector_size(32), aligned(2), may_alias));

#if defined(__AVX512F__)
constexpr int REGISTER_BYTES = 64;
#elif defined(__AVX__)
constexpr int REGISTER_BYTES = 32;
#else
constexpr int REGISTER_BYTES = 16;
#endif
template <class Word>
struct RegisterOf {
  typedef Word type __attribute__((vector_size(REGISTER_BYTES)));
  typedef Word unaligned __attribute__((vector_size(REGISTER_BYTES), aligned(sizeof(Word)), may_alias));
};
template <class Word>
using Register = typename RegisterOf<Word>::type;

constexpr int LINE = 64;      // bytes of a cache line, and of a Vec
constexpr int LANES = 16;     // 32-bit lanes of a Vec
constexpr int COLUMNS = 32;   // columns of a weight panel, and keys of an attention tile

template <class Real>
constexpr int LANES_OF = 64 / sizeof(Real);

template <class Real>
inline Vec<Real> load(const Real* p) {
  return *reinterpret_cast<const typename VectorOf<Real>::unaligned*>(p);
}

template <class Real>
inline void store(Real* p, Vec<Real> v) {
  *reinterpret_cast<typename VectorOf<Real>::unaligned*>(p) = v;
}

template <class Word>
inline Register<Word> load_register(const Word* p) {
  return *reinterpret_cast<const typename RegisterOf<Word>::unaligned*>(p);
}

template <class Word>
inline void store_register(Word* p, Register<Word> v) {
  *reinterpret_cast<typename RegisterOf<Word>::unaligned*>(p) = v;
}

template <class Real>
inline Vec<Real> fill(Real value) {
  return value - Vec<Real>{};
}

template <class To, class From>
inline To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  std::memcpy(&out, &value, sizeof(To));
  return out;
}

inline float to_float(bf16 value) { return bits_as<float>(uint32_t(value) << 16); }
inline float to_real(bf16 value) { return to_float(value); }
inline float to_real(float value) { return value; }
inline double to_real(double value) { return value; }

inline Vec<uint32_t> widen(const bf16* p) {
  return __builtin_convertvector(*reinterpret_cast<const Bf16x16*>(p), Vec<uint32_t>);
}

inline Vec<float> load_floats(const bf16* p) { return bits_as<Vec<float>>(widen(p) << 16); }
inline Vec<float> load_floats(const float* p) { return load(p); }

// Round to nearest even; a NaN stays one.
inline bf16 round_bf16(float value) {
  const uint32_t bits = bits_as<uint32_t>(value);
  if (value != value) return bf16(bits >> 16 | 0x40);
  return bf16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline void store_floats(bf16* p, Vec<float> v) {
#if defined(__AVX512BF16__)
  const auto rounded = _mm512_cvtneps_pbh(__m512(v));
  std::memcpy(p, &rounded, sizeof(rounded));
#else
  const Vec<uint32_t> bits = bits_as<Vec<uint32_t>>(v);
  const Vec<uint32_t> even = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const Vec<uint32_t> out = v != v ? (bits >> 16 | 0x40) : even;
  *reinterpret_cast<Bf16x16*>(p) = __builtin_convertvector(out, Bf16x16);
#endif
}
inline void store_floats(float* p, Vec<float> v) { store(p, v); }

// One step of the Eklundh transposition: swap the off-diagonal S x S corners of a and b.
template <unsigned S, size_t... C>
inline void swap_corners(Vec<uint32_t>& a, Vec<uint32_t>& b, std::index_sequence<C...>) {
  const Vec<uint32_t> first = __builtin_shufflevector(a, b, int(C & S ? LANES + C - S : C)...);
  b = __builtin_shufflevector(a, b, int(C & S ? LANES + C : C + S)...);
  a = first;
}

template <unsigned S>
inline void swap_all(Vec<uint32_t> rows[LANES]) {
  for (unsigned i = 0; i < LANES; ++i) {
    if (!(i & S)) swap_corners<S>(rows[i], rows[i + S], std::make_index_sequence<LANES>());
  }
}

inline void transpose(Vec<uint32_t> rows[LANES]) {
  swap_all<1>(rows);
  swap_all<2>(rows);
  swap_all<4>(rows);
  swap_all<8>(rows);
}

// Sum and maximum over lanes, always folded in the same order.
template <class V>
using LaneOf = std::decay_t<decltype(V{}[0])>;

template <class V, class Real = LaneOf<V>>
inline Real sum_lanes(V v) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<Real, float>) return _mm512_reduce_add_ps(__m512(v));
  if constexpr (std::is_same_v<Real, int32_t>) return _mm512_reduce_add_epi32(__m512i(v));
#endif
  Real lanes[LANES_OF<Real>];
  store(lanes, v);
  for (int half = LANES_OF<Real> / 2; half; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

template <class V, class Real = LaneOf<V>>
inline Real max_lanes(V v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Real) == 4) return _mm512_reduce_max_ps(__m512(v));
#endif
  Real best = v[0];
  for (int i = 1; i < LANES_OF<Real>; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

template <class V>
inline V larger(V a, V b) {
  return a > b ? a : b;
}

inline Vec<float> absolute(Vec<float> v) { return bits_as<Vec<float>>(bits_as<Vec<uint32_t>>(v) & 0x7fffffffu); }

inline Vec<float> exponential_of_rest(Vec<float> r) {  // e^r for |r| <= log(2) / 2
  Vec<float> p = fill(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * (r * r) + r + 1.0f;
}

// e^x to about one unit in the last place: x = n log 2 + r, a polynomial in r, n added to the exponent. Exactly 0 far
// below, so that a hidden score has no weight; a NaN stays one.
inline Vec<float> exponential(Vec<float> x) {
#if defined(__AVX512F__)
  const Vec<float> clamped = Vec<float>(_mm512_max_ps(__m512(fill(-110.0f)), __m512(x)));
  const Vec<float> n = Vec<float>(_mm512_roundscale_ps(__m512(clamped * 1.44269504088896341f), 0));
#else
  const Vec<float> magic = fill(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec<float> low = x < fill(-87.0f) ? fill(-87.0f) : x;
  const Vec<float> clamped = low > fill(88.0f) ? fill(88.0f) : low;
  const Vec<float> shifted = clamped * 1.44269504088896341f + magic;
  const Vec<float> n = shifted - magic;
#endif
  Vec<float> r = clamped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  const Vec<float> p = exponential_of_rest(r);
#if defined(__AVX512F__)
  return Vec<float>(_mm512_scalef_ps(__m512(p), __m512(n)));
#else
  const Vec<int32_t> exponent = bits_as<Vec<int32_t>>(shifted) << 23;  // the low bits of `shifted` are n
  const Vec<float> out = bits_as<Vec<float>>(bits_as<Vec<int32_t>>(p) + exponent);
  const Vec<float> kept = x < fill(-87.0f) ? Vec<float>{} : out;
  return x != x ? x : kept;
#endif
}

inline Vec<double> exponential(Vec<double> x) {
  Vec<double> out;
  for (int i = 0; i < 8; ++i) out[i] = std::exp(x[i]);
  return out;
}

}  // namespace blockcast
