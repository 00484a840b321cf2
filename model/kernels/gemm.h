// Linear layers over packed weights: 32 output columns a panel, the inner dimension running through the panel in the
// order it is used, so a product reads its weights as one stream. Three formats: float32, bfloat16 and int8.
//
// int8: weights are whole numbers in [-127, 127] with a scale per column and group of 32 inputs, stored plus 128;
// inputs are quantised per token and group. A group is summed exactly in int32 (four products a step), the 128 is taken
// back through the sum of the token's inputs, and the groups are added up in float32 in order.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <vector>

#include "team.h"
#include "tile.h"

namespace blockcast {

constexpr int GROUP = 32;
constexpr int STRETCH = 96;     // words of the inner dimension that are summed by themselves
constexpr int ROW_BLOCK = 120;  // rows that one work item takes through a panel

struct Int8 {
  using Real = float;
#if defined(__AVX512VNNI__)
  static constexpr int MAX_ROWS = 6;
#else
  static constexpr int MAX_ROWS = 4;
#endif
};

struct Int8Group {  // one group of one panel
  bf16 scale[COLUMNS];
  uint8_t weight[GROUP / 4][COLUMNS][4];
};

constexpr size_t HUGE_PAGE = size_t(2) << 20;

// Zeroed memory on 2 MiB pages where the system has them: a stream over 4 KiB pages runs at about half the speed.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes) {
    const size_t unit = bytes >= HUGE_PAGE ? HUGE_PAGE : 64;
    const size_t whole = (bytes + unit - 1) / unit * unit;
    data_ = static_cast<char*>(std::aligned_alloc(unit, whole ? whole : unit));
    if (!data_) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    if (unit == HUGE_PAGE) madvise(data_, whole, MADV_HUGEPAGE);
#endif
    std::memset(data_, 0, whole);
  }
  Buffer(Buffer&& other) noexcept : data_(other.data_) { other.data_ = nullptr; }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~Buffer() { std::free(data_); }

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  char* data_ = nullptr;
};

inline int divide_up(int64_t a, int64_t b) { return int((a + b - 1) / b); }

// A packed weight [outputs, inputs]; bias holds zeros where the layer has none.
struct Linear {
  int outputs = 0, inputs = 0, panels = 0;
  size_t panel_bytes = 0;
  Buffer weight;
  std::vector<float> bias;

  const char* panel(int64_t index) const { return weight.as<char>() + index * panel_bytes; }
};

// Inputs of a product in its format. Row r: values at data + r * stride; int8 also has a scale and -128 * sum a group.
struct Encoded {
  char* data = nullptr;
  size_t stride = 0;
  float* scale = nullptr;
  int32_t* offset = nullptr;
  int groups = 0;

  template <class T>
  T* row(int64_t r) const {
    return reinterpret_cast<T*>(data + r * stride);
  }
};

// ---------------------------------------------------------------------------------------------------- packing

template <class Format>
void pack_panel(const float* weight, int rows, int inputs, char* out) {
  auto* words = reinterpret_cast<typename Format::Word*>(out);
  for (int k = 0; k < words_for<Format>(inputs); ++k) {
    for (int c = 0; c < rows; ++c) {
      float pair[2] = {0, 0};
      for (int i = 0; i < Format::PER_WORD && k * Format::PER_WORD + i < inputs; ++i) {
        pair[i] = weight[int64_t(c) * inputs + k * Format::PER_WORD + i];
      }
      words[k * COLUMNS + c] = Format::pack(pair);
    }
  }
}

inline void pack_group(const float* weight, int count, int column, Int8Group& out) {
  float most = 0, poison = 0;  // poison: NaN where a weight is not finite
  for (int i = 0; i < count; ++i) {
    most = std::max(most, std::fabs(weight[i]));
    poison += weight[i] * 0.0f;
  }
  out.scale[column] = round_bf16(most / 127 + poison);
  const float scale = to_float(out.scale[column]);
  for (int i = 0; i < GROUP; ++i) {
    const float value = i < count && scale > 0 ? std::nearbyint(weight[i] / scale) : 0.0f;
    out.weight[i / 4][column][i % 4] = uint8_t(int(std::fmin(std::fmax(value, -127.0f), 127.0f)) + 128);
  }
}

template <>
inline void pack_panel<Int8>(const float* weight, int rows, int inputs, char* out) {
  auto* groups = reinterpret_cast<Int8Group*>(out);
  for (int g = 0; g < divide_up(inputs, GROUP); ++g) {
    const int count = inputs - g * GROUP < GROUP ? inputs - g * GROUP : GROUP;
    for (int c = 0; c < rows; ++c) pack_group(weight + int64_t(c) * inputs + g * GROUP, count, c, groups[g]);
  }
}

template <class Format>
size_t panel_size(int inputs) {
  return size_t(words_for<Format>(inputs)) * COLUMNS * sizeof(typename Format::Word);
}
template <>
inline size_t panel_size<Int8>(int inputs) {
  return divide_up(inputs, GROUP) * sizeof(Int8Group);
}

// weight [outputs, inputs] and bias [outputs] (or null), float32, row-major.
template <class Format>
Linear pack_linear(const float* weight, const float* bias, int outputs, int inputs) {
  Linear out;
  out.outputs = outputs;
  out.inputs = inputs;
  out.panels = divide_up(outputs, COLUMNS);
  out.panel_bytes = panel_size<Format>(inputs);
  out.weight = Buffer(out.panels * out.panel_bytes);
  out.bias.assign(size_t(out.panels) * COLUMNS, 0.0f);
  if (bias) std::memcpy(out.bias.data(), bias, sizeof(float) * outputs);
  for (int p = 0; p < out.panels; ++p) {
    const int rows = outputs - p * COLUMNS < COLUMNS ? outputs - p * COLUMNS : COLUMNS;
    pack_panel<Format>(weight + int64_t(p) * COLUMNS * inputs, rows, inputs, const_cast<char*>(out.panel(p)));
  }
  return out;
}

// ---------------------------------------------------------------------------------------------------- inputs

template <class Format>
size_t encoded_bytes(int inputs) {
  return size_t(words_for<Format>(inputs)) * sizeof(typename Format::Word);
}
template <>
inline size_t encoded_bytes<Int8>(int inputs) {
  return size_t(divide_up(inputs, GROUP)) * GROUP;
}

// Writes x [inputs] as row r. x is readable, zero, up to the next multiple of GROUP.
template <class Format>
void encode(const float* x, int inputs, const Encoded& out, int64_t r);

template <>
inline void encode<Float32>(const float* x, int inputs, const Encoded& out, int64_t r) {
  std::memcpy(out.row<float>(r), x, sizeof(float) * inputs);
}

template <>
inline void encode<Bfloat16>(const float* x, int inputs, const Encoded& out, int64_t r) {
  bf16* to = out.row<bf16>(r);
  int i = 0;
  for (; i + LANES <= inputs; i += LANES) store_floats(to + i, load(x + i));
  for (; i < words_for<Bfloat16>(inputs) * 2; ++i) to[i] = i < inputs ? round_bf16(x[i]) : 0;
}

inline void encode_group(const float* x, int8_t* to, float& scale, int32_t& offset) {
  Vec<float> most{}, poison{};  // poison: 0, or NaN where an input is not finite, so that no NaN is lost here
  for (int i = 0; i < GROUP; i += LANES) {
    most = larger(most, absolute(load(x + i)));
    poison += load(x + i) * 0.0f;
  }
  const float amplitude = max_lanes(most);
  scale = amplitude / 127 + sum_lanes(poison);
  const Vec<float> inverse = fill(amplitude > 0 ? 127 / amplitude : 0.0f);
  const Vec<float> magic = fill(12582912.0f);
  Vec<int32_t> sum{};
  typedef int8_t Int8x16 __attribute__((vector_size(16), aligned(1), may_alias));
  for (int i = 0; i < GROUP; i += LANES) {
    const Vec<int32_t> whole = bits_as<Vec<int32_t>>(load(x + i) * inverse + magic) - bits_as<Vec<int32_t>>(magic);
    sum += whole;
    *reinterpret_cast<Int8x16*>(to + i) = __builtin_convertvector(whole, Int8x16);
  }
  offset = -128 * sum_lanes(sum);
}

template <>
inline void encode<Int8>(const float* x, int, const Encoded& out, int64_t r) {
  for (int g = 0; g < out.groups; ++g) {
    encode_group(x + g * GROUP, out.row<int8_t>(r) + g * GROUP, out.scale[r * out.groups + g],
                 out.offset[r * out.groups + g]);
  }
}

// ---------------------------------------------------------------------------------------------------- products

// Data to fetch into the cache during a product, or null: as many bytes as the panel has. The steps that take a panel
// share the fetching, step `step` of `steps` does every steps-th part: memory then works throughout.
struct Ahead {
  const char* data;
  int step, steps;

  bool of(int part) const { return data && part % steps == step; }
};

// Summed in stretches of STRETCH words: on SmolLM2, float32, that takes the logits' error (against float64) from 1.5
// times PyTorch's to 0.7 times.
template <class Format, int ROWS>
inline void multiply_panel(const Linear& w, const char* panel, const Ahead& ahead, const Encoded& x, int64_t first,
                           Vec<float> (&sums)[ROWS][2]) {
  using Word = typename Format::Word;
  const int words = words_for<Format>(w.inputs);
  for (int k = 0; k < words; k += STRETCH) {
    const int64_t skipped = int64_t(k) * COLUMNS * sizeof(Word);
    Vec<float> part[ROWS][2] = {};
    multiply_tile<Format, ROWS>(x.row<Word>(first) + k, x.stride / sizeof(Word),
                                reinterpret_cast<const Word*>(panel + skipped), COLUMNS, std::min(STRETCH, words - k),
                                ahead.of(k / STRETCH) ? ahead.data + skipped : nullptr, part);
    for (int r = 0; r < ROWS; ++r) {
      for (int c = 0; c < 2; ++c) sums[r][c] += part[r][c];
    }
  }
}

#if defined(__AVX2__) && !defined(__AVX512VNNI__)

// One group, LANES columns at a time. AVX2 multiplies unsigned by signed bytes and adds neighbours in 16 bits, which
// holds two products of 127 * 127 and no 255 * 127: the weights' signs go to the inputs.
template <int ROWS>
inline __attribute__((always_inline)) void multiply_group(const Int8Group& group, int g, const char* fetch,
                                                          const Encoded& x, int64_t first,
                                                          Vec<float> (&sums)[ROWS][2]) {
  constexpr int WIDE = LINE / 32, EIGHT = 8;  // registers of a line, columns of a register
  const __m256i ones = _mm256_set1_epi16(1), shift = _mm256_set1_epi8(char(0x80));
  for (int half = 0; half < 2; ++half) {
    __m256i whole[ROWS][WIDE];
    for (int r = 0; r < ROWS; ++r) {
      for (int c = 0; c < WIDE; ++c) whole[r][c] = _mm256_setzero_si256();
    }
    for (int k = 0; k < GROUP / 4; ++k) {
      if (fetch) __builtin_prefetch(fetch + (2 * k + half) * LINE, 0, 2);
      for (int c = 0; c < WIDE; ++c) {
        const auto* at = reinterpret_cast<const __m256i*>(&group.weight[k][half * LANES + c * EIGHT]);
        const __m256i weight = _mm256_xor_si256(_mm256_loadu_si256(at), shift), size = _mm256_abs_epi8(weight);
        for (int r = 0; r < ROWS; ++r) {
          int32_t quad;
          std::memcpy(&quad, x.row<int8_t>(first + r) + g * GROUP + k * 4, 4);
          const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(_mm256_set1_epi32(quad), weight));
          whole[r][c] = _mm256_add_epi32(whole[r][c], _mm256_madd_epi16(pairs, ones));
        }
      }
    }
    for (int c = 0; c < WIDE; ++c) {
      const int column = half * LANES + c * EIGHT;
      const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(group.scale + column));
      const __m256 scales = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
      for (int r = 0; r < ROWS; ++r) {
        float* sum = reinterpret_cast<float*>(&sums[r][0]) + column;
        const __m256 product = _mm256_cvtepi32_ps(whole[r][c]);
        _mm256_storeu_ps(sum, _mm256_loadu_ps(sum) + product * (scales * x.scale[(first + r) * x.groups + g]));
      }
    }
  }
}

template <int ROWS>
inline __attribute__((always_inline)) void multiply_int8(const Linear& w, const char* panel, const Ahead& ahead,
                                                         const Encoded& x, int64_t first, Vec<float> (&sums)[ROWS][2]) {
  const auto* group = reinterpret_cast<const Int8Group*>(panel);
  for (int g = 0; g < divide_up(w.inputs, GROUP); ++g, ++group) {
    const char* fetch = ahead.of(g) ? ahead.data + g * sizeof(Int8Group) : nullptr;
    if (fetch) __builtin_prefetch(fetch + sizeof(Int8Group) - LINE, 0, 2);
    multiply_group<ROWS>(*group, g, fetch, x, first, sums);
  }
}

#else

inline Vec<int32_t> dot4(Vec<int32_t> sum, const uint8_t (*weight)[4], const int8_t* x) {
#if defined(__AVX512VNNI__)
  int32_t quad;
  std::memcpy(&quad, x, 4);
  return Vec<int32_t>(_mm512_dpbusd_epi32(__m512i(sum), _mm512_loadu_si512(weight), _mm512_set1_epi32(quad)));
#else
  for (int i = 0; i < 4; ++i) {
    for (int c = 0; c < LANES; ++c) sum[c] += int32_t(weight[c][i]) * x[i];
  }
  return sum;
#endif
}

template <int ROWS>
inline __attribute__((always_inline)) void multiply_int8(const Linear& w, const char* panel, const Ahead& ahead,
                                                         const Encoded& x, int64_t first, Vec<float> (&sums)[ROWS][2]) {
  const auto* group = reinterpret_cast<const Int8Group*>(panel);
  for (int g = 0; g < divide_up(w.inputs, GROUP); ++g, ++group) {
    Vec<int32_t> whole[ROWS][2];
    for (int r = 0; r < ROWS; ++r) whole[r][0] = whole[r][1] = fill(x.offset[(first + r) * x.groups + g]);
    const char* fetch = ahead.of(g) ? ahead.data + g * sizeof(Int8Group) : nullptr;
    if (fetch) __builtin_prefetch(fetch + sizeof(Int8Group) - 64, 0, 2);
    for (int k = 0; k < GROUP / 4; ++k) {
      if (fetch) {
        __builtin_prefetch(fetch + k * 2 * 64, 0, 2);
        __builtin_prefetch(fetch + k * 2 * 64 + 64, 0, 2);
      }
      for (int r = 0; r < ROWS; ++r) {
        const int8_t* quad = x.row<int8_t>(first + r) + g * GROUP + k * 4;
        whole[r][0] = dot4(whole[r][0], &group->weight[k][0], quad);
        whole[r][1] = dot4(whole[r][1], &group->weight[k][LANES], quad);
      }
    }
    const Vec<float> low = load_floats(group->scale), high = load_floats(group->scale + LANES);
    for (int r = 0; r < ROWS; ++r) {
      const float scale = x.scale[(first + r) * x.groups + g];
      sums[r][0] += __builtin_convertvector(whole[r][0], Vec<float>) * (low * scale);
      sums[r][1] += __builtin_convertvector(whole[r][1], Vec<float>) * (high * scale);
    }
  }
}

#endif

// finish(row, panel, low, high) takes the 32 results of each row and panel (bias added), on some thread of the team.
template <class Format, class Finish>
void multiply(Team& team, const Linear& w, const Encoded& x, int rows, Finish finish) {
  const int blocks = divide_up(rows, ROW_BLOCK);
  team.each(int64_t(w.panels) * blocks, [&](int64_t item, int64_t after) {
    const int64_t panel = item / blocks, next = after / blocks;
    const int begin = int(item % blocks) * ROW_BLOCK, end = begin + ROW_BLOCK < rows ? begin + ROW_BLOCK : rows;
    const char* ahead = next != panel && next < w.panels ? w.panel(next) : nullptr;
    Ahead fetch{ahead, -1, divide_up(end - begin, Format::MAX_ROWS)};
    in_row_steps<Format::MAX_ROWS>(end - begin, [&](int first, auto constant) {
      constexpr int ROWS = decltype(constant)::value;
      ++fetch.step;
      Vec<float> sums[ROWS][2] = {};
      if constexpr (std::is_same_v<Format, Int8>) {
        multiply_int8<ROWS>(w, w.panel(panel), fetch, x, begin + first, sums);
      } else {
        multiply_panel<Format, ROWS>(w, w.panel(panel), fetch, x, begin + first, sums);
      }
      const float* bias = w.bias.data() + panel * COLUMNS;
      for (int r = 0; r < ROWS; ++r) {
        finish(begin + first + r, panel, sums[r][0] + load(bias), sums[r][1] + load(bias + LANES));
      }
    });
  });
}

}  // namespace blockcast
