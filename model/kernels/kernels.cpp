// The C interface of the kernels; the Python side (build.py, fused.py) calls it through ctypes.
//
// Functions that can fail return a status: 0 fine, 1 an index lies outside its tensor, 2 out of memory.
#include "forward.h"
#include "peaks.h"

using namespace blockcast;

namespace {

enum Status { FINE = 0, OUT_OF_RANGE = 1, OUT_OF_MEMORY = 2 };

bool all_within(const int64_t* values, int64_t count, int64_t limit) {
  return std::all_of(values, values + count, [limit](int64_t v) { return v >= 0 && v < limit; });
}

template <class Format, class Element>
int paged_attention(const Element* query, const Element* keys, const Element* values, Element* out,
                    const Layout& layout, const Heads& heads, double scale, int64_t window, int threads) {
  std::vector<Unit> units;
  if (!make_units(layout, heads.key, threads, units)) return OUT_OF_RANGE;
  const int64_t stride = int64_t(heads.query) * heads.width;
  Team::run(threads, [&](Team& team) {
    Workspace<Format> work(UNIT_TOKENS * heads.group(), heads.width);
    attend<Format>(team, units, layout, heads, Cache<Element>{keys, values}, Rows<const Element>{query, stride},
                   Rows<Element>{out, stride}, scale, window, work);
  });
  return FINE;
}

template <class Work>
void with_format(int format, Work work) {
  if (format == 0) {
    work(Float32{});
  } else if (format == 1) {
    work(Bfloat16{});
  } else {
    work(Int8{});
  }
}

template <class Work>
int guarded(Work work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return OUT_OF_MEMORY;
  }
}

}  // namespace

extern "C" {

// 1: AVX-512, 2: its int8 products, 4: its bfloat16 products, 8: threads.
int blockcast_features() {
  int found = 0;
#if defined(__AVX512F__)
  found |= 1;
#endif
#if defined(__AVX512VNNI__)
  found |= 2;
#endif
#if defined(__AVX512BF16__)
  found |= 4;
#endif
#if defined(_OPENMP)
  found |= 8;
#endif
  return found;
}

// dtype: 0 float32, 1 bfloat16, 2 float64, of query, keys, values and out alike.
int blockcast_paged_attention(int dtype, const void* query, const void* keys, const void* values, void* out,
                              const Layout* layout, int query_heads, int key_heads, int width, double scale,
                              int64_t window, int threads) {
  const Heads heads{query_heads, key_heads, width};
  const auto run = [&](auto format, auto element) {
    using Element = decltype(element);
    return paged_attention<decltype(format)>(static_cast<const Element*>(query), static_cast<const Element*>(keys),
                                             static_cast<const Element*>(values), static_cast<Element*>(out), *layout,
                                             heads, scale, window, threads);
  };
  return guarded([&]() -> int {
    if (dtype == 0) return run(Float32{}, float{});
    if (dtype == 1) return run(Bfloat16{}, bf16{});
    return run(Float64{}, double{});
  });
}

// token [rows] and normaliser [rows] of logits [rows, width], float32.
void blockcast_peaks(const float* logits, int64_t rows, int64_t width, int64_t* token, float* normaliser, int threads) {
  peaks(logits, rows, width, token, normaliser, threads);
}

// A model without layers. Null: out of memory.
void* blockcast_model_new(const Shape* shape) {
  auto* m = new (std::nothrow) Model();
  if (!m) return nullptr;
  m->shape = *shape;
  m->inverse_frequency.assign(shape->inverse_frequency, shape->inverse_frequency + shape->width / 2);
  return m;
}

int blockcast_model_add_layer(void* model, const LayerWeights* weights) {
  return guarded([&]() -> int {
    auto* m = static_cast<Model*>(model);
    with_format(m->shape.format, [&](auto format) { pack_layer<decltype(format)>(*m, *weights); });
    return FINE;
  });
}

// norm [hidden] and head [vocab, hidden], float32, bias [vocab] or null; copied.
int blockcast_model_set_head(void* model, const float* norm, const float* head, const float* bias) {
  return guarded([&]() -> int {
    auto* m = static_cast<Model*>(model);
    m->norm_out.assign(norm, norm + m->shape.hidden);
    with_format(m->shape.format, [&](auto format) {
      m->head = pack_linear<decltype(format)>(head, bias, m->shape.vocab, m->shape.hidden);
    });
    return FINE;
  });
}

void blockcast_model_free(void* model) { delete static_cast<Model*>(model); }

int blockcast_forward(void* model, const Call* call) {
  return guarded([&]() -> int {
    auto* m = static_cast<Model*>(model);
    const Layout& layout = call->layout;
    const std::lock_guard<std::mutex> held(m->lock);
    if (!make_units(layout, m->shape.key_heads, call->threads, m->units) ||
        !all_within(call->ids, layout.tokens, m->shape.vocab) ||
        !all_within(layout.where, layout.tokens, layout.slots) ||
        (call->modulation && !all_within(call->time_of, layout.tokens, call->times)) || !all_within(call->read, call->reads, layout.tokens)) {
      return OUT_OF_RANGE;
    }
    m->reserve(std::max(layout.tokens, call->reads));
    with_format(m->shape.format, [&](auto format) { run_forward<decltype(format)>(*m, *call); });
    return FINE;
  });
}
}
