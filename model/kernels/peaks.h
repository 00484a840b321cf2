// What a decision needs of a row of logits: where its maximum is, and its log-sum-exp. Two passes over a row that fits
// the second-level cache, instead of PyTorch's five over all rows.
#pragma once

#include "simd.h"
#include "team.h"

namespace blockcast {

inline float largest(const float* row, int64_t width) {
  Vec<float> best = fill(-std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) best = larger(load(row + i), best);
  float out = max_lanes(best);
  for (; i < width; ++i) out = row[i] > out ? row[i] : out;
  return out;
}

// Sum of e^(x - top), always in the same order. A NaN makes it NaN; so do rows of nothing but -inf, and +inf.
inline float sum_of_exponentials(const float* row, int64_t width, float top) {
  Vec<float> sum{};
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) sum += exponential(load(row + i) - top);
  float out = sum_lanes(sum);
  for (; i < width; ++i) out += std::exp(row[i] - top);
  return out;
}

// The first index of the maximum; 0 where there is none (NaN only).
inline int64_t first_of(const float* row, int64_t width, float top) {
  for (int64_t i = 0; i < width; ++i) {
    if (row[i] == top) return i;
  }
  return 0;
}

inline void peaks(const float* logits, int64_t rows, int64_t width, int64_t* token, float* normaliser, int threads) {
  Team::run(rows == 1 ? 1 : threads, [&](Team& team) {
    team.each(rows, [&](int64_t i, int64_t) {
      const float* row = logits + i * width;
      const float top = largest(row, width);
      token[i] = first_of(row, width, top);
      normaliser[i] = top + std::log(sum_of_exponentials(row, width, top));
    });
  });
}

}  // namespace blockcast
