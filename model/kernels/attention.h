// Attention of packed queries over a paged cache, one online softmax a query and head.
//
// Keys are walked in tiles of COLUMNS positions anchored at position 0, so the order of every sum is a matter of the
// query's position alone: not of the piece it came in, of its neighbours, of the page size, nor of the thread count.
// A work unit is up to UNIT_TOKENS queries of a piece with all query heads of one key head: a tile of keys is
// transposed once and multiplied with all of them.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "gemm.h"

namespace blockcast {

constexpr int UNIT_TOKENS = 16;     // at most
constexpr int UNIT_TOKENS_MIN = 4;  // where smaller units share the work evenly, down to this

struct Piece {  // as in the pieces tensor, int64 [P, 6]
  int64_t offset, count, position, visible, span, page_begin;
};

struct Unit {  // queries [first, first + count) of the packed tokens, standing at `position`
  int64_t first, count, position, visible, span;
  const int64_t* pages;
};

// What a call knows beside its queries. Storage index of position p: pages[p / page_size] * page_size + p % page_size.
struct Layout {
  const int64_t* pieces;  // [piece_count][6]
  const int64_t* page_table;
  const int64_t* where;  // [tokens]
  int64_t piece_count, page_count, tokens, page_size, slots;
};

struct Heads {
  int query, key, width;  // query heads, key heads, width of a head
  int group() const { return query / key; }
};

inline int64_t visible_end(const Unit& unit, int64_t position) {
  return std::min(unit.visible, (position / unit.span + 1) * unit.span);
}
inline int64_t visible_begin(int64_t position, int64_t window) {
  return window < 0 ? 0 : std::max<int64_t>(0, position - window + 1);
}

// Tokens of a unit: fewer where there is too little work to share it evenly between the threads otherwise.
inline int64_t unit_tokens(const Layout& layout, int key_heads, int threads) {
  int64_t size = UNIT_TOKENS;
  for (; size > UNIT_TOKENS_MIN; size /= 2) {
    int64_t items = 0;
    for (int64_t i = 0; i < layout.piece_count; ++i) {
      const int64_t count = reinterpret_cast<const Piece*>(layout.pieces)[i].count;
      items += (count + size - 1) / size * key_heads;
    }
    if (threads < 2 || items % threads == 0 || items > 4 * threads) break;
  }
  return size;
}

constexpr int64_t FAR = int64_t(1) << 40;  // no position or span reaches it, so their sums cannot overflow

// Cuts the pieces into units; false where a piece or a page lies outside its tensor.
inline bool make_units(const Layout& layout, int key_heads, int threads, std::vector<Unit>& units) {
  units.clear();
  const int64_t size = unit_tokens(layout, key_heads, threads);
  for (int64_t i = 0; i < layout.piece_count; ++i) {
    const Piece& piece = reinterpret_cast<const Piece*>(layout.pieces)[i];
    if (piece.offset < 0 || piece.count < 1 || piece.offset > layout.tokens - piece.count) return false;
    if (piece.position < 0 || piece.position > FAR || piece.span < 1 || piece.span > FAR || piece.visible < 1) {
      return false;
    }
    if (piece.page_begin < 0 || piece.page_begin > layout.page_count) return false;
    const int64_t* pages = layout.page_table + piece.page_begin;
    const Unit whole{piece.offset, piece.count, piece.position, piece.visible, piece.span, pages};
    const int64_t used = (visible_end(whole, piece.position + piece.count - 1) - 1) / layout.page_size + 1;
    if (used > layout.page_count - piece.page_begin) return false;
    for (int64_t p = 0; p < used; ++p) {
      if (pages[p] < 0 || pages[p] >= layout.slots / layout.page_size) return false;
    }
    for (int64_t t = 0; t < piece.count; t += size) {
      const int64_t count = std::min(size, piece.count - t);
      units.push_back({piece.offset + t, count, piece.position + t, piece.visible, piece.span, pages});
    }
  }
  return true;
}

// Storage of one layer: [slots, key heads, width], token-major.
template <class Stored>
struct Cache {
  const Stored* keys;
  const Stored* values;
};

// One thread's workspace. Rows are queries by head; `words` counts words of the format.
template <class Format>
struct Workspace {
  using Real = typename Format::Real;
  using Word = typename Format::Word;
  int rows, key_words, value_columns;
  std::vector<Word> query, keys, values, weights;
  std::vector<Real> sums, most;
  std::vector<Real> total;  // by lane, added up at the end

  Workspace(int rows, int width)
      : rows(rows),
        key_words(divide_up(words_for<Format>(width), LANES) * LANES),
        value_columns(divide_up(width, COLUMNS) * COLUMNS),
        query(size_t(rows) * key_words),
        keys(size_t(key_words) * COLUMNS),
        values(size_t(words_for<Format>(COLUMNS)) * value_columns),
        weights(size_t(rows) * words_for<Format>(COLUMNS)),
        sums(size_t(rows) * value_columns),
        most(rows),
        total(size_t(rows) * LANES_OF<Real>) {}
};

// ---------------------------------------------------------------------------------------------------- tiles

// Element [i] of a stored row as the format's arithmetic sees it; `row` null stands for zeros.
template <class Real, class Stored>
inline Real element(const Stored* row, int i) {
  return row ? Real(to_real(row[i])) : Real(0);
}

// Elements [begin, end) of a row as words, zeros behind them.
template <class Format, class Stored>
inline void row_words(const Stored* row, int width, int words, typename Format::Word* out) {
  for (int w = 0; w < words; ++w) {
    typename Format::Real pair[2] = {0, 0};
    for (int i = 0; i < Format::PER_WORD; ++i) {
      const int at = w * Format::PER_WORD + i;
      if (at < width) pair[i] = element<typename Format::Real>(row, at);
    }
    out[w] = Format::pack(pair);
  }
}

// A row of queries as words, zeros behind it.
template <class Format, class Query>
inline void query_words(const Query* row, int width, int words, typename Format::Word* out) {
  int i = 0;
  if constexpr (std::is_same_v<Query, float>) {
    using Element = std::conditional_t<Format::PER_WORD == 2, bf16, float>;
    for (; i + LANES <= width; i += LANES) store_floats(reinterpret_cast<Element*>(out) + i, load(row + i));
  }
  row_words<Format>(row + i, width - i, words - i / Format::PER_WORD, out + i / Format::PER_WORD);
}

// LANES 32-bit words of a row from word `first` on, as they stand in the cache where that is their format.
template <class Format, class Stored>
inline Vec<uint32_t> key_lanes(const Stored* row, int width, int first) {
  if (!row) return Vec<uint32_t>{};
  if ((first + LANES) * Format::PER_WORD <= width) {
    if constexpr (Format::PER_WORD == 2) {
      if constexpr (sizeof(Stored) == 2) return load(reinterpret_cast<const uint32_t*>(row) + first);
    } else {
      return bits_as<Vec<uint32_t>>(load_floats(row + first));
    }
  }
  typename Format::Word words[LANES];
  row_words<Format>(row + first * Format::PER_WORD, width - first * Format::PER_WORD, LANES, words);
  return load(reinterpret_cast<const uint32_t*>(words));
}

// keys[word][position] of a tile; rows[j] null where the position is not visible.
template <class Format, class Stored>
void load_keys(const Stored* const rows[COLUMNS], int width, Workspace<Format>& work) {
  using Word = typename Format::Word;
  if constexpr (sizeof(Word) == 4) {
    for (int first = 0; first < work.key_words; first += LANES) {
      auto* out = reinterpret_cast<uint32_t*>(work.keys.data()) + first * COLUMNS;
      if constexpr (REGISTER_BYTES < LINE) {
        for (int j = 0; j < COLUMNS; ++j) {
          const Vec<uint32_t> lanes = key_lanes<Format>(rows[j], width, first);
          for (int w = 0; w < LANES; ++w) out[w * COLUMNS + j] = lanes[w];
        }
        continue;
      }
      for (int half = 0; half < COLUMNS; half += LANES) {
        Vec<uint32_t> block[LANES];
        for (int j = 0; j < LANES; ++j) block[j] = key_lanes<Format>(rows[half + j], width, first);
        transpose(block);
        for (int w = 0; w < LANES; ++w) store(out + w * COLUMNS + half, block[w]);
      }
    }
  } else {
    for (int j = 0; j < COLUMNS; ++j) {
      for (int i = 0; i < width; ++i) work.keys[i * COLUMNS + j] = element<typename Format::Real>(rows[j], i);
    }
  }
}

// values[word of positions][column]: with pairs, two neighbouring positions make a word.
template <class Format, class Stored>
void load_values(const Stored* const rows[COLUMNS], int width, Workspace<Format>& work) {
  for (int j = 0; j < COLUMNS; j += Format::PER_WORD) {
    typename Format::Word* out = work.values.data() + int64_t(j / Format::PER_WORD) * work.value_columns;
    const Stored *even = rows[j], *odd = rows[j + Format::PER_WORD - 1];
    int i = 0;
    if constexpr (sizeof(Stored) == 2 && Format::PER_WORD == 2) {
      for (; i + LANES <= width; i += LANES) {
        const Vec<uint32_t> low = even ? widen(even + i) : Vec<uint32_t>{};
        store(out + i, odd ? low | widen(odd + i) << 16 : low);
      }
    }
    for (; i < width; ++i) {
      typename Format::Real pair[2] = {element<typename Format::Real>(even, i), 0};
      if constexpr (Format::PER_WORD == 2) pair[1] = element<float>(odd, i);
      out[i] = Format::pack(pair);
    }
  }
}

// ---------------------------------------------------------------------------------------------------- softmax

// Hides scores outside [begin, end) (tile-relative) of one row, after scaling.
template <class Real, int N>
inline void scale_and_hide(Vec<Real> (&scores)[N], Real scale, int64_t begin, int64_t end) {
  for (int c = 0; c < N; ++c) scores[c] *= scale;
  if (begin <= 0 && end >= COLUMNS) return;
  using Index = std::conditional_t<sizeof(Real) == 4, int32_t, int64_t>;
  Vec<Index> key;
  for (int i = 0; i < LANES_OF<Real>; ++i) key[i] = i;
  const Index from = Index(std::max<int64_t>(begin, 0)), to = Index(std::min<int64_t>(std::max<int64_t>(end, 0), COLUMNS));
  for (int c = 0; c < N; ++c) {
    scores[c] = (key < from) | (key >= to) ? fill(-std::numeric_limits<Real>::infinity()) : scores[c];
    key += LANES_OF<Real>;
  }
}

// Folds one row's scores into its running softmax: weights out, older sums shrunk where the maximum grew.
template <class Format, int N>
inline void fold_row(Vec<typename Format::Real> (&scores)[N], int row, Workspace<Format>& work) {
  using Real = typename Format::Real;
  Vec<Real> most = scores[0];
  for (int c = 1; c < N; ++c) most = larger(most, scores[c]);
  const Real before = work.most[row], now = std::max(before, max_lanes(most));
  typename Format::Word* out = work.weights.data() + row * words_for<Format>(COLUMNS);
  if (now == -std::numeric_limits<Real>::infinity()) {  // nothing visible so far
    std::fill(out, out + words_for<Format>(COLUMNS), typename Format::Word(0));
    return;
  }
  Vec<Real> sum{};
  for (int c = 0; c < N; ++c) {
    scores[c] = exponential(scores[c] - now);
    sum += scores[c];
    if constexpr (Format::PER_WORD == 2) {
      store_floats(reinterpret_cast<bf16*>(out) + c * LANES, scores[c]);
    } else {
      store(reinterpret_cast<Real*>(out) + c * LANES_OF<Real>, scores[c]);
    }
  }
  Real* total = work.total.data() + row * LANES_OF<Real>;
  if (now != before) {
    const Real shrink = std::exp(before - now);
    store(total, load(total) * shrink);
    Real* sums = work.sums.data() + int64_t(row) * work.value_columns;
    for (int i = 0; i < work.value_columns; i += LANES_OF<Real>) store(sums + i, load(sums + i) * shrink);
    work.most[row] = now;
  }
  store(total, load(total) + sum);
}

// ---------------------------------------------------------------------------------------------------- a unit

template <class Format>
struct Masking {  // of a unit's rows; row = token * group + head
  const Unit& unit;
  int group;
  int64_t window;
  typename Format::Real scale;
};

template <class Format>
void attend_tile(const Masking<Format>& mask, int64_t tile, int rows, Workspace<Format>& work) {
  using Real = typename Format::Real;
  constexpr int STEP = Format::MAX_ROWS;
  in_row_steps<STEP>(rows, [&](int first, auto constant) {
    constexpr int ROWS = decltype(constant)::value;
    Sums<Format, ROWS> scores = {};
    multiply_tile<Format, ROWS>(work.query.data() + int64_t(first) * work.key_words, work.key_words, work.keys.data(),
                                COLUMNS, work.key_words, nullptr, scores);
    for (int r = 0; r < ROWS; ++r) {
      const int64_t position = mask.unit.position + (first + r) / mask.group;
      scale_and_hide(scores[r], mask.scale, visible_begin(position, mask.window) - tile,
                     visible_end(mask.unit, position) - tile);
      fold_row<Format>(scores[r], first + r, work);
    }
  });
  constexpr int WORDS = words_for<Format>(COLUMNS);
  in_row_steps<STEP>(rows, [&](int first, auto constant) {
    constexpr int ROWS = decltype(constant)::value;
    const int64_t stride = work.value_columns;
    for (int column = 0; column < stride; column += COLUMNS) {
      Sums<Format, ROWS> sums;
      Real* at = work.sums.data() + first * stride + column;
      for (int r = 0; r < ROWS; ++r) {
        for (int c = 0; c < REGISTERS<Format>; ++c) sums[r][c] = load(at + r * stride + c * LANES_OF<Real>);
      }
      multiply_tile<Format, ROWS>(work.weights.data() + int64_t(first) * WORDS, WORDS, work.values.data() + column,
                                  stride, WORDS, nullptr, sums);
      for (int r = 0; r < ROWS; ++r) {
        for (int c = 0; c < REGISTERS<Format>; ++c) store(at + r * stride + c * LANES_OF<Real>, sums[r][c]);
      }
    }
  });
}

template <class To, class From>
inline To convert_to(From value) {
  if constexpr (std::is_same_v<To, bf16>) {
    return round_bf16(float(value));
  } else {
    return To(value);
  }
}

// A head's queries: element [t][h][d] at data + t * token_stride + h * width + d. Results are laid out alike.
template <class Query>
struct Rows {
  Query* data;
  int64_t token_stride;
};

// All query heads of key head `head`, for the unit's queries.
template <class Format, class Stored, class Query, class Out>
void attend_unit(const Unit& unit, int head, const Layout& layout, const Heads& heads, const Cache<Stored>& cache,
                 Rows<const Query> query, Rows<Out> out, double scale, int64_t window, Workspace<Format>& work) {
  const int group = heads.group(), rows = int(unit.count) * group, width = heads.width;
  for (int r = 0; r < rows; ++r) {
    const Query* from = query.data + (unit.first + r / group) * query.token_stride + (head * group + r % group) * width;
    query_words<Format>(from, width, work.key_words, work.query.data() + int64_t(r) * work.key_words);
    work.most[r] = -std::numeric_limits<typename Format::Real>::infinity();
  }
  std::fill(work.sums.begin(), work.sums.end(), 0);
  std::fill(work.total.begin(), work.total.end(), 0);
  const int64_t begin = visible_begin(unit.position, window);
  const int64_t end = visible_end(unit, unit.position + unit.count - 1);
  const Masking<Format> mask{unit, group, window, typename Format::Real(scale)};
  for (int64_t tile = begin / COLUMNS * COLUMNS; tile < end; tile += COLUMNS) {
    const Stored *keys[COLUMNS], *values[COLUMNS];
    int64_t page = tile / layout.page_size, within = tile % layout.page_size;
    for (int j = 0; j < COLUMNS; ++j) {
      const bool seen = tile + j >= begin && tile + j < end;
      const int64_t slot = seen ? unit.pages[page] * layout.page_size + within : 0;
      keys[j] = seen ? cache.keys + (slot * heads.key + head) * width : nullptr;
      values[j] = seen ? cache.values + (slot * heads.key + head) * width : nullptr;
      if (++within == layout.page_size) within = 0, ++page;
    }
    load_keys<Format>(keys, width, work);
    load_values<Format>(values, width, work);
    attend_tile(mask, tile, rows, work);
  }
  for (int r = 0; r < rows; ++r) {
    Out* to = out.data + (unit.first + r / group) * out.token_stride + (head * group + r % group) * width;
    const auto* sums = work.sums.data() + int64_t(r) * work.value_columns;
    const auto total = sum_lanes(load(work.total.data() + r * LANES_OF<typename Format::Real>));
    for (int i = 0; i < width; ++i) to[i] = convert_to<Out>(sums[i] / total);
  }
}

// Attention of one layer by the whole team.
template <class Format, class Stored, class Query, class Out>
void attend(Team& team, const std::vector<Unit>& units, const Layout& layout, const Heads& heads,
            const Cache<Stored>& cache, Rows<const Query> query, Rows<Out> out, double scale, int64_t window,
            Workspace<Format>& work) {
  team.each(int64_t(units.size()) * heads.key, [&](int64_t item, int64_t) {
    attend_unit<Format>(units[item / heads.key], int(item % heads.key), layout, heads, cache, query, out, scale, window,
                        work);
  });
}

// Stores one token's row [key heads * width] of keys or values at its storage slot.
template <class Stored>
void write_row(const float* from, int64_t slot, int64_t elements, Stored* cache) {
  Stored* to = cache + slot * elements;
  int64_t i = 0;
  for (; i + LANES <= elements; i += LANES) store_floats(to + i, load(from + i));
  for (; i < elements; ++i) to[i] = convert_to<Stored>(from[i]);
}

}  // namespace blockcast
