// The product at the bottom of everything: a few rows times a panel of COLUMNS columns, kept in registers.
//
// A format says what a word of the product is (one float, or a pair of bfloat16) and how one step accumulates it.
// An output element is always the same sequence of steps over its inner dimension, whatever rows stand beside it:
// that is what makes a token's result independent of the batch.
#pragma once

#include "simd.h"

namespace blockcast {

struct Float64 {
  using Real = double;
  using Word = double;
  static constexpr int PER_WORD = 1;
  static constexpr int MAX_ROWS = 4;
  template <class V>
  static V step(V sum, V b, double a) {
    return sum + b * a;
  }
  static Word pack(const Real* v) { return *v; }
};

struct Float32 {
  using Real = float;
  using Word = float;
  static constexpr int PER_WORD = 1;
  static constexpr int MAX_ROWS = REGISTER_BYTES == LINE ? 8 : 6;
  template <class V>
  static V step(V sum, V b, float a) {
    return sum + b * a;
  }
  static Word pack(const Real* v) { return *v; }
};

struct Bfloat16 {
  using Real = float;
  using Word = uint32_t;  // two consecutive elements of the inner dimension, the first in the low half
  static constexpr int PER_WORD = 2;
  static constexpr int MAX_ROWS = REGISTER_BYTES == LINE ? 8 : 4;
  template <class Sum, class Pairs>
  static Sum step(Sum sum, Pairs b, uint32_t a) {
#if defined(__AVX512BF16__)
    const __m512i pairs = _mm512_set1_epi32(int(a));
    return Sum(_mm512_dpbf16_ps(__m512(sum), (__m512bh)__m512i(b), (__m512bh)pairs));
#else
    sum += bits_as<Sum>(b << 16) * bits_as<float>(a << 16);
    return sum + bits_as<Sum>(b & 0xffff0000u) * bits_as<float>(a & 0xffff0000u);
#endif
  }
  static Word pack(const Real* v) { return round_bf16(v[0]) | uint32_t(round_bf16(v[1])) << 16; }
};

template <class Format>
constexpr int REGISTERS = COLUMNS / LANES_OF<typename Format::Real>;

template <class Format>
constexpr int words_for(int elements) {
  return (elements + Format::PER_WORD - 1) / Format::PER_WORD;
}

template <class Format, int ROWS>
using Sums = Vec<typename Format::Real>[ROWS][REGISTERS<Format>];

// The same for LINES cache lines of columns, whose sums stay in registers: row r's begin at sums + r * COLUMNS.
template <class Format, int ROWS, int LINES>
inline __attribute__((always_inline)) void multiply_strip(const typename Format::Word* a, int64_t a_stride,
                                                          const typename Format::Word* b, int64_t b_stride, int words,
                                                          const char* ahead, typename Format::Real* sums) {
  using Real = typename Format::Real;
  using Word = typename Format::Word;
  constexpr int WIDE = LINES * LINE / REGISTER_BYTES, STEP = REGISTER_BYTES / sizeof(Word);
  Register<Real> held[ROWS][WIDE];
  for (int r = 0; r < ROWS; ++r) {
    for (int c = 0; c < WIDE; ++c) held[r][c] = load_register(sums + r * COLUMNS + c * STEP);
  }
  for (int k = 0; k < words; ++k) {
    Register<Word> columns[WIDE];
    for (int c = 0; c < WIDE; ++c) columns[c] = load_register(b + k * b_stride + c * STEP);
    if (ahead) {
      for (int line = 0; line < LINES; ++line) __builtin_prefetch(ahead + (k * REGISTERS<Format> + line) * LINE);
    }
    for (int r = 0; r < ROWS; ++r) {
      const auto scalar = a[r * a_stride + k];
      for (int c = 0; c < WIDE; ++c) held[r][c] = Format::step(held[r][c], columns[c], scalar);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int c = 0; c < WIDE; ++c) store_register(sums + r * COLUMNS + c * STEP, held[r][c]);
  }
}

// sums[r][:] += a[r][k] * b[k][:] for k in [0, words). Row r of a starts at a + r * a_stride, row k of b at
// b + k * b_stride. ahead: data to fetch meanwhile (as many bytes as b has), or null.
template <class Format, int ROWS>
inline __attribute__((always_inline)) void multiply_tile(const typename Format::Word* a, int64_t a_stride,
                                                         const typename Format::Word* b, int64_t b_stride, int words,
                                                         const char* ahead, Sums<Format, ROWS>& sums) {
  if constexpr (REGISTER_BYTES == LINE) {
    constexpr int WIDTH = LANES_OF<typename Format::Word>;
    for (int k = 0; k < words; ++k) {
      Vec<typename Format::Word> columns[REGISTERS<Format>];
      for (int c = 0; c < REGISTERS<Format>; ++c) columns[c] = load(b + k * b_stride + c * WIDTH);
      if (ahead) {
        for (int c = 0; c < REGISTERS<Format>; ++c) __builtin_prefetch(ahead + (k * REGISTERS<Format> + c) * LINE);
      }
      for (int r = 0; r < ROWS; ++r) {
        const auto scalar = a[r * a_stride + k];
        for (int c = 0; c < REGISTERS<Format>; ++c) sums[r][c] = Format::step(sums[r][c], columns[c], scalar);
      }
    }
  } else {  // sixteen registers hold the sums of few rows, or of few columns
    constexpr int LINES = ROWS <= 3 && Format::PER_WORD == 1 ? 2 : 1;
    for (int line = 0; line < REGISTERS<Format>; line += LINES) {
      multiply_strip<Format, ROWS, LINES>(a, a_stride, b + line * LANES_OF<typename Format::Word>, b_stride, words,
                                          ahead ? ahead + line * LINE : nullptr,
                                          reinterpret_cast<typename Format::Real*>(&sums[0][line]));
    }
  }
}

// Calls work(row, constant) over [0, rows) in near-equal steps of at most MAX rows; constant() is the step's size.
template <int ROWS>
struct Constant {
  static constexpr int value = ROWS;
};

template <int MAX, class Work>
inline void with_rows(int rows, Work& work, int first) {
  if constexpr (MAX > 0) {
    if (rows == MAX) {
      work(first, Constant<MAX>{});
    } else {
      with_rows<MAX - 1>(rows, work, first);
    }
  }
}

template <int MAX, class Work>
inline void in_row_steps(int rows, Work work) {
  const int steps = (rows + MAX - 1) / MAX;
  for (int step = 0; step < steps; ++step) {
    const int first = int64_t(rows) * step / steps, after = int64_t(rows) * (step + 1) / steps;
    with_rows<MAX>(after - first, work, first);
  }
}

}  // namespace blockcast
