// The decoder's forward in one call: embedding, layers, final norm and LM head, for Llama-shaped models.
//
// Everything between the products is float32. A layer is ten phases of the team (see team.h):
//   norm | qkv | rotate and write the cache | attention | encode | output += | norm | gate, up | encode | down +=
#pragma once

#include <mutex>

#include "attention.h"

namespace blockcast {

struct Shape {
  int32_t hidden, heads, key_heads, width, inner, vocab, format, embedding_bf16;  // format: 0 float32, 1 bf16, 2 int8
  float epsilon, rotary_scale;
  const void* embedding;        // [vocab, hidden], kept by the caller
  const float* inverse_frequency;  // [width / 2], copied
};

// Weights of a layer, float32, copied. Null: no such bias or norm. window: -1 for none.
struct LayerWeights {
  const float *norm_in, *norm_mid, *qkv, *qkv_bias, *query_norm, *key_norm, *output, *output_bias, *gate_up,
      *gate_up_bias, *down, *down_bias;  // gate_up: rows interleaved, 16 of gate, 16 of up, ...
  int64_t window;
};

struct Layer {
  std::vector<float> norm_in, norm_mid, query_norm, key_norm;
  Linear qkv, output, gate_up, down;
  int64_t window;
};

struct Call {
  Layout layout;
  const int64_t *ids, *positions, *read;
  int64_t reads;
  const void *const *keys, *const *values;  // a layer's storage each
  float* logits;                            // [reads, vocab]
  // Null, or shift, scale and gate of every sublayer, two a layer: [2 * layers, times, 3, hidden up to whole GROUPs].
  const float* modulation;
  const int64_t* time_of;  // [tokens], which of the times a token has
  int64_t times;
  int32_t cache_bf16, threads;
};

enum Part { SHIFT, SCALE, GATE };

struct Model {
  Shape shape;
  std::vector<float> inverse_frequency, norm_out;
  std::vector<Layer> layers;
  Linear head;
  std::mutex lock;  // the workspace is shared: one forward at a time
  std::vector<Unit> units;
  int64_t capacity = 0;
  Buffer hidden, mixed, inner, angles, encoded, scales, offsets;

  Heads heads() const { return {shape.heads, shape.key_heads, shape.width}; }
  int64_t hidden_stride() const { return divide_up(shape.hidden, GROUP) * GROUP; }
  int64_t mixed_stride() const {  // queries, keys and values of a token; then, in place of queries, attention's result
    return divide_up((shape.heads + 2 * shape.key_heads) * shape.width, GROUP) * GROUP + GROUP;
  }
  int64_t inner_stride() const { return divide_up(shape.inner, GROUP) * GROUP; }
  int64_t widest() const { return std::max({hidden_stride(), mixed_stride(), inner_stride()}); }
  void reserve(int64_t tokens);
};

inline void Model::reserve(int64_t tokens) {
  if (tokens <= capacity) return;
  capacity = divide_up(tokens, 64) * 64;
  hidden = Buffer(capacity * hidden_stride() * sizeof(float));
  mixed = Buffer(2 * capacity * mixed_stride() * sizeof(float));
  inner = Buffer(capacity * inner_stride() * sizeof(float));
  angles = Buffer(capacity * shape.width * sizeof(float));
  encoded = Buffer(capacity * widest() * sizeof(float));
  scales = Buffer(capacity * widest() / GROUP * sizeof(float));
  offsets = Buffer(capacity * widest() / GROUP * sizeof(int32_t));
}

// The buffer of encoded inputs, for products over `width` elements.
template <class Format>
Encoded inputs_of(const Model& m, int width) {
  const size_t stride = (encoded_bytes<Format>(width) + 63) / 64 * 64;
  return {m.encoded.as<char>(), stride, m.scales.as<float>(), m.offsets.as<int32_t>(), divide_up(width, GROUP)};
}

// ---------------------------------------------------------------------------------------------------- small parts

// out = x / rms(x) * weight; both readable to a multiple of LANES, x zero there. In place allowed.
inline void rms_norm(const float* x, const float* weight, int width, float epsilon, float* out) {
  Vec<float> squares{};
  int i = 0;
  for (; i + LANES <= width; i += LANES) squares += load(x + i) * load(x + i);
  float sum = sum_lanes(squares);
  for (; i < width; ++i) sum += x[i] * x[i];
  const float inverse = 1.0f / std::sqrt(sum / width + epsilon);
  for (i = 0; i + LANES <= width; i += LANES) store(out + i, load(x + i) * inverse * load(weight + i));
  for (; i < width; ++i) out[i] = x[i] * inverse * weight[i];
}

inline Vec<float> silu(Vec<float> v) { return v / (exponential(-v) + 1.0f); }

inline void embed(const Model& m, int64_t id, float* out) {
  const int64_t at = id * m.shape.hidden;
  for (int i = 0; i < m.shape.hidden; ++i) {
    out[i] = m.shape.embedding_bf16 ? to_float(static_cast<const bf16*>(m.shape.embedding)[at + i])
                                    : static_cast<const float*>(m.shape.embedding)[at + i];
  }
}

// cos and sin [width / 2] each of a position.
inline void fill_angles(const Model& m, int64_t position, float* out) {
  const int half = m.shape.width / 2;
  for (int i = 0; i < half; ++i) {
    const float angle = float(position) * m.inverse_frequency[i];
    out[i] = std::cos(angle) * m.shape.rotary_scale;
    out[half + i] = std::sin(angle) * m.shape.rotary_scale;
  }
}

// Rotates one head in place: halves (a, b) become (a cos - b sin, b cos + a sin).
inline void rotate(float* x, const float* angles, int width) {
  const int half = width / 2;
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = x[half + i], cosine = angles[i], sine = angles[half + i];
    x[i] = a * cosine - b * sine;
    x[half + i] = b * cosine + a * sine;
  }
}

// Norms (where the model has them) and rotates a token's queries and keys, then writes keys and values to the cache.
template <class Stored>
void place_token(const Model& m, const Layer& layer, float* mixed, const float* angles, int64_t slot,
                 const Cache<Stored>& cache) {
  const Shape& s = m.shape;
  for (int h = 0; h < s.heads + s.key_heads; ++h) {
    const auto& norm = h < s.heads ? layer.query_norm : layer.key_norm;
    float* x = mixed + h * s.width;
    if (!norm.empty()) rms_norm(x, norm.data(), s.width, s.epsilon, x);
    rotate(x, angles, s.width);
  }
  const int64_t elements = int64_t(s.key_heads) * s.width;
  write_row(mixed + int64_t(s.heads) * s.width, slot, elements, const_cast<Stored*>(cache.keys));
  write_row(mixed + int64_t(s.heads) * s.width + elements, slot, elements, const_cast<Stored*>(cache.values));
}

// ---------------------------------------------------------------------------------------------------- the forward

template <class Format, class Stored>
struct Forward {
  using Attention = std::conditional_t<sizeof(Stored) == 2, Bfloat16, Float32>;

  Team& team;
  const Model& m;
  const Call& call;
  const int tokens = int(call.layout.tokens);
  float* hidden = m.hidden.as<float>();
  float* mixed = m.mixed.as<float>();  // [tokens] queries, keys, values
  float* attended = mixed + m.capacity * m.mixed_stride();
  float* inner = m.inner.as<float>();
  float* angles = m.angles.as<float>();
  Workspace<Attention> work{UNIT_TOKENS * m.heads().group(), m.shape.width};

  void start() {
    team.each(tokens, [&](int64_t t, int64_t) {
      embed(m, call.ids[t], hidden + t * m.hidden_stride());
      fill_angles(m, call.positions[t], angles + t * m.shape.width);
    });
  }

  const float* modulation(int sublayer, int64_t token, Part part) const {
    return call.modulation + ((sublayer * call.times + call.time_of[token]) * 3 + part) * m.hidden_stride();
  }

  // normed = normed * (1 + scale) + shift, as the token's time says; both zero behind the hidden width.
  void modulate(int sublayer, int64_t token, float* normed) const {
    const float *shift = modulation(sublayer, token, SHIFT), *scale = modulation(sublayer, token, SCALE);
    for (int64_t i = 0; i < m.hidden_stride(); i += LANES) {
      store(normed + i, load(normed + i) * (load(scale + i) + 1.0f) + load(shift + i));
    }
  }

  // Norm of rows row_of(i), encoded as inputs i of a product over the hidden width. sublayer -1: never modulated.
  template <class RowOf>
  Encoded norm_rows(int64_t rows, const std::vector<float>& weight, RowOf row_of, int sublayer = -1) {
    const Encoded out = inputs_of<Format>(m, m.shape.hidden);
    std::vector<float> normed(m.hidden_stride());
    team.each(rows, [&](int64_t i, int64_t) {
      rms_norm(hidden + row_of(i) * m.hidden_stride(), weight.data(), m.shape.hidden, m.shape.epsilon, normed.data());
      if (call.modulation && sublayer >= 0) modulate(sublayer, row_of(i), normed.data());
      encode<Format>(normed.data(), m.shape.hidden, out, i);
    });
    return out;
  }

  Encoded norm(const std::vector<float>& weight, int sublayer) {
    return norm_rows(tokens, weight, [](int64_t i) { return i; }, sublayer);
  }

  Encoded encode_rows(const float* from, int64_t stride, int width) {
    const Encoded out = inputs_of<Format>(m, width);
    team.each(tokens, [&](int64_t t, int64_t) { encode<Format>(from + t * stride, width, out, t); });
    return out;
  }

  void add_product(const Linear& w, const Encoded& x, int sublayer) {
    multiply<Format>(team, w, x, tokens, [&](int64_t row, int64_t panel, Vec<float> low, Vec<float> high) {
      float* to = hidden + row * m.hidden_stride() + panel * COLUMNS;
      if (call.modulation) {
        const float* gate = modulation(sublayer, row, GATE) + panel * COLUMNS;
        low *= load(gate);
        high *= load(gate + LANES);
      }
      store(to, load(to) + low);
      store(to + LANES, load(to + LANES) + high);
    });
  }

  void mix_tokens(const Layer& layer, const Cache<Stored>& cache, int sublayer) {
    const Encoded x = norm(layer.norm_in, sublayer);
    const int64_t stride = m.mixed_stride();
    multiply<Format>(team, layer.qkv, x, tokens, [&](int64_t row, int64_t panel, Vec<float> low, Vec<float> high) {
      store(mixed + row * stride + panel * COLUMNS, low);
      store(mixed + row * stride + panel * COLUMNS + LANES, high);
    });
    team.each(tokens, [&](int64_t t, int64_t) {
      place_token(m, layer, mixed + t * stride, angles + t * m.shape.width, call.layout.where[t], cache);
    });
    attend<Attention>(team, m.units, call.layout, m.heads(), cache, Rows<const float>{mixed, stride},
                      Rows<float>{attended, stride}, 1.0 / std::sqrt(double(m.shape.width)), layer.window, work);
    add_product(layer.output, encode_rows(attended, stride, m.shape.heads * m.shape.width), sublayer);
  }

  void mix_channels(const Layer& layer, int sublayer) {
    const Encoded x = norm(layer.norm_mid, sublayer);
    multiply<Format>(team, layer.gate_up, x, tokens, [&](int64_t row, int64_t panel, Vec<float> gate, Vec<float> up) {
      store(inner + row * m.inner_stride() + panel * LANES, silu(gate) * up);
    });
    add_product(layer.down, encode_rows(inner, m.inner_stride(), m.shape.inner), sublayer);
  }

  void write_logits() {
    const Encoded x = norm_rows(call.reads, m.norm_out, [&](int64_t i) { return call.read[i]; });
    multiply<Format>(team, m.head, x, int(call.reads), [&](int64_t row, int64_t panel, Vec<float> low, Vec<float> high) {
      float* to = call.logits + row * m.shape.vocab + panel * COLUMNS;
      if ((panel + 1) * COLUMNS <= m.shape.vocab) {
        store(to, low);
        store(to + LANES, high);
      } else {
        float both[COLUMNS];
        store(both, low);
        store(both + LANES, high);
        std::memcpy(to, both, sizeof(float) * (m.shape.vocab - panel * COLUMNS));
      }
    });
  }

  void run() {
    start();
    for (size_t i = 0; i < m.layers.size(); ++i) {
      const Cache<Stored> cache{static_cast<const Stored*>(call.keys[i]), static_cast<const Stored*>(call.values[i])};
      mix_tokens(m.layers[i], cache, int(2 * i));
      mix_channels(m.layers[i], int(2 * i + 1));
    }
    write_logits();
  }
};

template <class Format>
void run_forward(const Model& m, const Call& call) {
  Team::run(call.threads, [&](Team& team) {
    if (call.cache_bf16) {
      Forward<Format, bf16>{team, m, call}.run();
    } else {
      Forward<Format, float>{team, m, call}.run();
    }
  });
}

template <class Format>
void pack_layer(Model& m, const LayerWeights& w) {
  const Shape& s = m.shape;
  const auto copy = [](const float* from, int count) {
    return from ? std::vector<float>(from, from + count) : std::vector<float>();
  };
  const int mixed = (s.heads + 2 * s.key_heads) * s.width, attended = s.heads * s.width;
  Layer layer;
  layer.norm_in = copy(w.norm_in, s.hidden);
  layer.norm_mid = copy(w.norm_mid, s.hidden);
  layer.query_norm = copy(w.query_norm, s.width);
  layer.key_norm = copy(w.key_norm, s.width);
  layer.qkv = pack_linear<Format>(w.qkv, w.qkv_bias, mixed, s.hidden);
  layer.output = pack_linear<Format>(w.output, w.output_bias, s.hidden, attended);
  layer.gate_up = pack_linear<Format>(w.gate_up, w.gate_up_bias, divide_up(s.inner, LANES) * COLUMNS, s.hidden);
  layer.down = pack_linear<Format>(w.down, w.down_bias, s.hidden, s.inner);
  layer.window = w.window;
  m.layers.push_back(std::move(layer));
}

}  // namespace blockcast
