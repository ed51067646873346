// Hard-routed and full causal attention on a CPU: prefill with logsumexp, its backward, and a decode step.
//
// A task is a block of neighbouring queries of one key/value head. Its rows (query x heads that share the keys) keep
// their softmax state in the L2 cache while they meet the window, the sinks and the keys of the groups that they read,
// packed once by (groups, time); so nothing is masked but the ends, and no partial results are merged.
// Online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867; lazy rescaling as in FlashAttention-4.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/BFloat16.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#if defined(__x86_64__) || defined(_M_X64)
#define FOCUS_X86 1
#include <immintrin.h>
#endif

namespace {

using bf16 = c10::BFloat16;
using at::Tensor;
using std::optional;

enum { ROWS = 24, CHUNK = 64, PACK = 32, ROUTED = 48, MAX_HEAD = 256, MAX_GROUPS = 64 };
constexpr float LOWEST = -1e30f;  // score of a pair that is not seen
constexpr float SLACK = 6.f;      // scores may pass the running maximum by 2^6 before the state is rescaled
constexpr float UNSET = std::numeric_limits<float>::max();  // a router's threshold before its fit
constexpr float LOG2E = 1.44269504f, LN2 = 0.69314718f;
constexpr int64_t STATE_BYTES = 256 << 10;  // of a task's rows: half of a common L2 cache
enum { DECODED = 32, AHEAD = 128 };         // keys of a cache that are met at a time, and fetched ahead
constexpr int64_t CHUNK_BYTES = 32 << 10;   // of a chunk's keys and values: a common L1 cache

template <class E> struct Pair { enum { size = 1 }; };
template <> struct Pair<bf16> { enum { size = 2 }; };

// Convert n floats, rounding to nearest, ties to even: without a branch, so that compilers make vectors of it.
inline void round_to(float* to, const float* from, int64_t n) { std::memcpy(to, from, n * sizeof(float)); }
inline void round_to(bf16* to, const float* from, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits;
    std::memcpy(&bits, from + i, 4);
    to[i] = bf16(uint16_t(from[i] != from[i] ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16), bf16::from_bits());
  }
}

// score = scale * (q . k) in units of ln 2, or cap * tanh(scale * (q . k)) where cap is not 0
struct Scores { float scale, cap; };

// Softmax state of a task's rows: queries q [n, dk], sums acc [n, dv] and sum [n, 16], largest score top [n].
template <class E> struct Rows {
  E* q;
  float *acc, *sum, *top;
  int64_t dk, dv;
  int chunk;
};

// What the rows of a task have for the backward, and room for ROWS of them as neighbours.
struct Gradients {
  const float *q, *dout, *lse, *delta, *gate;
  float *dq, *dgate, *q_rows, *dout_rows, *gate_rows;
  int64_t dk, dv, groups;
};

// Keys of the backward: packed kt, vt [n / 16, size, 16], and as rows k, gate with their gradients.
struct Keys {
  const float *kt, *vt, *k, *gate;
  float *dk, *dv, *dgate;
};

// Keys and values of one head of a cache, one token after the other.
template <class S, class V> struct Cached {
  const S* k;
  const V* v;
  int64_t k_stride, v_stride, dk, dv;
};

struct Isa {
  void (*attend)(const Scores&, Rows<float>&, const int*, const int*, const int*, int, const float*, const float*, int);
  void (*attend_bf16)(const Scores&, Rows<bf16>&, const int*, const int*, const int*, int, const bf16*, const bf16*, int);
  void (*backward)(const Scores&, const Gradients&, const int*, const int*, const int*, int, const Keys&, int, int, bool);
  void (*decode)(const Scores&, Rows<float>&, int, const Cached<float, float>&, const int32_t*, int64_t);
  void (*decode_bf16)(const Scores&, Rows<float>&, int, const Cached<bf16, bf16>&, const int32_t*, int64_t);
  void (*decode_mixed)(const Scores&, Rows<float>&, int, const Cached<float, bf16>&, const int32_t*, int64_t);
  int64_t (*list_keys)(const int32_t*, int64_t, const int32_t*, const bool*, int64_t, int64_t, int32_t*, int64_t);
  void (*multiply_rows)(const float*, int, int64_t, const float*, int64_t, float*);
  float (*log_sum_exp)(const float*, int64_t, float);
};

constexpr int32_t IOTA[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

#define FOCUS_BF16_DOT 0
#define FOCUS_AVX 0
#define LANES 4
#define VECTORS 2
namespace plain {
#include "cpu_sparse_tiles.h"
}
#undef LANES
#undef VECTORS

#ifdef FOCUS_X86
#undef FOCUS_AVX
#define FOCUS_AVX 2
#define LANES 8
#define VECTORS 2
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
#include "cpu_sparse_tiles.h"
}
#undef LANES
#undef VECTORS
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#endif
#undef FOCUS_AVX
#define FOCUS_AVX 512
#define LANES 16
#define VECTORS 4
namespace avx512 {
#include "cpu_sparse_tiles.h"
}
#undef FOCUS_BF16_DOT
#define FOCUS_BF16_DOT 1
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#endif
namespace avx512_bf16 {
#include "cpu_sparse_tiles.h"
}
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef FOCUS_BF16_DOT
#define FOCUS_BF16_DOT 0
#undef FOCUS_AVX
#define FOCUS_AVX 0
// AVX-512's tiles in portable code, bf16 pairs included, so that they are tested where the processor has no AVX-512
#define FOCUS_BF16_EMULATED 1
namespace emulated {
#include "cpu_sparse_tiles.h"
}
#undef LANES
#undef VECTORS
#endif

struct NamedIsa { const char* name; const Isa* isa; bool (*serves)(); };

const NamedIsa ISAS[] = {
#ifdef FOCUS_X86
    {"avx512_bf16", &avx512_bf16::isa, [] { return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vl"); }},
    {"avx512", &avx512::isa, [] { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"); }},
    {"avx2", &avx2::isa, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
    {"emulated", &emulated::isa, [] { return false; }},
#endif
    {"plain", &plain::isa, [] { return true; }},
};

const NamedIsa& best_isa() {
  for (const auto& x : ISAS) if (x.serves()) return x;
  return ISAS[sizeof(ISAS) / sizeof(ISAS[0]) - 1];
}

const NamedIsa* chosen = &best_isa();

// Select the instruction set by name, "" for the best one; return the name of the one that is used from here on.
std::string use_isa(const std::string& name) {
  const NamedIsa* found = name.empty() ? &best_isa() : nullptr;
  for (const auto& x : ISAS)
    if (name == x.name && (x.serves() || name == "emulated")) found = &x;
  TORCH_CHECK_VALUE(found, "isa must be one that this processor has (got ", name, ")");
  chosen = found;
  return found->name;
}

template <class X> struct Buffer {
  X* data = nullptr;
  Buffer() = default;
  explicit Buffer(int64_t n) { reset(n); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data); }
  void reset(int64_t n) {
    std::free(data);
    data = static_cast<X*>(std::aligned_alloc(64, (n * sizeof(X) + 127) / 64 * 64));
    if (!data) throw std::bad_alloc();
  }
  void zero(int64_t n) { std::memset(static_cast<void*>(data), 0, n * sizeof(X)); }
};

// Run work(task, scratch) for all tasks, the next one by whoever is free; each thread has one scratch space.
template <class Make, class Work> void for_tasks(int64_t tasks, Make make, Work work) {
  std::atomic<int64_t> next{0};
  int64_t threads = std::min<int64_t>(at::get_num_threads(), tasks);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (; begin < end && next < tasks; begin++) {
      auto scratch = make();
      for (int64_t task = next++; task < tasks; task = next++) work(task, *scratch);
    }
  });
}

struct Source {
  const void* data;
  bool half;
  int64_t batch, head, token, heads, size;

  Source() = default;
  Source(const Tensor& x)  // [B, heads, T, size]
      : data(x.const_data_ptr()), half(x.scalar_type() == at::kBFloat16), batch(x.stride(0)), head(x.stride(1)),
        token(x.stride(2)), heads(x.size(1)), size(x.size(3)) {
    TORCH_CHECK(x.stride(3) == 1, "the last dimension must be contiguous");
  }
  // one token's vector, as floats or bf16, with zeros up to `room`
  template <class E> void read(int64_t b, int64_t h, int64_t t, E* to, int64_t room) const {
    int64_t at = b * batch + h * head + t * token;
    if (!half) round_to(to, static_cast<const float*>(data) + at, size);
    else if constexpr (Pair<E>::size == 2) std::memcpy(static_cast<void*>(to), static_cast<const bf16*>(data) + at, size * sizeof(E));
    else for (int64_t d = 0; d < size; d++) to[d] = static_cast<const bf16*>(data)[at + d];
    for (int64_t d = size; d < room; d++) to[d] = E(0.f);
  }
};

// Transpose 4 x 4 words of 32 bits, which are floats or pairs of bf16; strides are counted in E.
template <class E> inline void transpose4(const E* from, int64_t from_row, E* to, int64_t to_row) {
  typedef int32_t words __attribute__((vector_size(16)));
  words x[4], y[4];
  for (int i = 0; i < 4; i++) std::memcpy(&x[i], static_cast<const void*>(from + i * from_row), 16);
  for (int i = 0; i < 4; i++) y[i] = words{x[0][i], x[1][i], x[2][i], x[3][i]};
  for (int i = 0; i < 4; i++) std::memcpy(static_cast<void*>(to + i * to_row), &y[i], 16);
}

int64_t padded(int64_t size) { return (size + 15) / 16 * 16; }

uint64_t bits_of(const bool* x, int64_t groups) {
  uint64_t bits = 0;
  for (int64_t g = 0; g < groups; g++) bits |= uint64_t(x[g]) << g;
  return bits;
}

// Keys in blocks of 16: all in the order of time, then those beyond the sinks in the order of (set of groups, time).
// Kinds: the sets that keys have; of kind j the tokens are order[offset[j]] to order[offset[j + 1]], in blocks from
// block[j] on. reads [n]: the groups that queries read. Of full attention the only kind is all keys in the order of time.
struct Layout {
  std::vector<uint64_t> bits, reads;
  std::vector<int> order, offset, block;

  int kinds() const { return int(bits.size()); }
  bool is_full() const { return block[0] == 0; }
  int64_t keys() const { return int64_t(block.back()) * 16; }
  int end_before(int kind, int64_t token) const {  // number of the kind's keys before a token
    auto first = order.begin() + offset[kind], last = order.begin() + offset[kind + 1];
    return int(std::lower_bound(first, last, int(token)) - first);
  }
};

struct Problem {
  int64_t B, H, G, T, Y, share, dk, dv, groups;  // Y: heads with groups of their own; dk, dv: padded head sizes
  int64_t window, sinks, reach, rows;            // reach: a query sees keys at a smaller distance; rows: queries of a task
  Scores scores;
  Source q, k, v;
  std::vector<int64_t> begin, end;  // the tokens of each sequence that are no padding
  std::vector<Layout> layouts;      // [B * Y]
  const Isa* isa;

  Problem(const Tensor& q_, const Tensor& k_, const Tensor& v_, const optional<Tensor>& query_groups, const optional<Tensor>& key_groups,
          const optional<Tensor>& valid, int64_t window_, int64_t sinks_, int64_t reach_, double scaling, double softcap)
      : B(q_.size(0)), H(q_.size(1)), G(k_.size(1)), T(q_.size(2)), Y(1), share(H / G), dk(padded(q_.size(3))), dv(padded(v_.size(3))),
        groups(0), window(std::min(window_, reach_ - 1)), sinks(sinks_), reach(std::min(reach_, T)), q(q_), k(k_), v(v_), isa(chosen->isa) {
    TORCH_CHECK(q_.device().is_cpu() && k_.device().is_cpu() && v_.device().is_cpu(), "tensors must be on the CPU");
    TORCH_CHECK(q_.scalar_type() == at::kFloat || q_.scalar_type() == at::kBFloat16, "q must be float32 or bfloat16");
    TORCH_CHECK(k_.scalar_type() == q_.scalar_type() && v_.scalar_type() == q_.scalar_type(), "q, k and v must have one dtype");
    TORCH_CHECK(G > 0 && H % G == 0 && v_.size(1) == G && k_.size(0) == B && v_.size(0) == B, "q, k and v must have matching heads");
    TORCH_CHECK(k_.size(2) == T && v_.size(2) == T && k_.size(3) == q_.size(3), "keys must be those of the queries' tokens");
    TORCH_CHECK(dk <= MAX_HEAD && dv <= MAX_HEAD, "head sizes must be <= ", int(MAX_HEAD));
    float scale = float(scaling);
    scores = softcap > 0 ? Scores{scale / float(softcap), float(softcap) * LOG2E} : Scores{scale * LOG2E, 0.f};
    begin.assign(B, 0);
    end.assign(B, T);
    if (valid) {
      TORCH_CHECK(valid->dim() == 2 && valid->size(0) == B && valid->size(1) == T, "valid must be [B, T]");
      auto x = valid->accessor<bool, 2>();
      for (int64_t b = 0; b < B; b++) {
        while (begin[b] < T && !x[b][begin[b]]) begin[b]++;
        for (end[b] = begin[b]; end[b] < T && x[b][end[b]];) end[b]++;
        for (int64_t t = end[b]; t < T; t++) TORCH_CHECK(!x[b][t], "valid must have no padding between tokens");
      }
    }
    int64_t bytes = 4 * (dk + dv + 20);
    rows = std::clamp<int64_t>(STATE_BYTES / bytes / share / 16 * 16, 16, 512);
    if (key_groups) {
      Y = key_groups->size(1);
      groups = key_groups->size(3);
      TORCH_CHECK(groups <= MAX_GROUPS && (Y == 1 || Y == G), "groups must be <= ", int(MAX_GROUPS), ", for all heads or each key/value head");
    }
    layouts.resize(B * Y);
    at::parallel_for(0, B * Y, 1, [&](int64_t first, int64_t last) {
      for (int64_t y = first; y < last; y++) key_groups ? arrange(y, *query_groups, *key_groups) : arrange_full(y);
    });
  }

  int64_t tokens(int64_t b) const { return end[b] - begin[b]; }
  const Layout& layout(int64_t b, int64_t g) const { return layouts[b * Y + (Y == 1 ? 0 : g)]; }

  // Full attention: one kind of key that all queries read; the window is the part with a mask.
  void arrange_full(int64_t b) {
    Layout& x = layouts[b];
    int64_t n = tokens(b);
    x.bits = {1};
    x.reads.assign(n, 1);
    x.order.resize(n);
    for (int64_t t = 0; t < n; t++) x.order[t] = int(t);
    x.offset = {0, int(n)};
    x.block = {0, int((n + 15) / 16)};
  }

  void arrange(int64_t y, const Tensor& query_groups, const Tensor& key_groups) {
    Layout& x = layouts[y];
    int64_t b = y / Y, n = tokens(b), at = (y * T + begin[b]) * groups;
    const bool *reads = query_groups.const_data_ptr<bool>() + at, *has = key_groups.const_data_ptr<bool>() + at;
    x.reads.resize(n);
    for (int64_t t = 0; t < n; t++) x.reads[t] = bits_of(reads + t * groups, groups);
    std::unordered_map<uint64_t, int> kinds;
    std::vector<int> kind(n, -1), counts;
    uint64_t last = 0;
    int number = -1;
    for (int64_t t = sinks; t < n; t++) {
      uint64_t bits = bits_of(has + t * groups, groups);
      if (!bits) continue;
      if (bits != last) {
        auto [entry, added] = kinds.try_emplace(bits, x.kinds());
        if (added) { x.bits.push_back(bits); counts.push_back(0); }
        last = bits;
        number = entry->second;
      }
      kind[t] = number;
      counts[number]++;
    }
    x.offset.assign(1, 0);
    x.block.assign(1, std::max(1, int((n + 15) / 16)));
    for (int count : counts) {
      x.offset.push_back(x.offset.back() + count);
      x.block.push_back(x.block.back() + (count + 15) / 16);
    }
    std::vector<int> next(x.offset.begin(), x.offset.end() - 1);
    x.order.resize(x.offset.back());
    for (int64_t t = sinks; t < n; t++) if (kind[t] >= 0) x.order[next[kind[t]]++] = int(t);
  }

  // Pack 16 keys: [dk / P][16][P]; values: [16 / P][dv][P]. P: numbers that one multiplication takes.
  template <class E> void pack_block(int64_t b, int64_t g, const int* tokens, int n, E* pk, E* pv) const {
    constexpr int P = Pair<E>::size;
    alignas(64) E rows[16][MAX_HEAD];
    for (int j = 0; j < n; j++) k.read(b, g, begin[b] + tokens[j], rows[j], dk);
    for (int j = n; j < 16; j++) std::fill_n(rows[j], dk, E(0.f));
    for (int j = 0; j < 16; j += 4)
      for (int64_t d = 0; d < dk; d += 4 * P) transpose4(rows[j] + d, MAX_HEAD, pk + d * 16 + j * P, 16 * P);
    if (P == 1) {
      for (int j = 0; j < n; j++) v.read(b, g, begin[b] + tokens[j], pv + j * dv, dv);
      std::fill_n(pv + n * dv, (16 - n) * dv, E(0.f));
      return;
    }
    for (int j = 0; j < n; j++) v.read(b, g, begin[b] + tokens[j], rows[j], dv);
    for (int j = n; j < 16; j++) std::fill_n(rows[j], dv, E(0.f));
    for (int j = 0; j < 16; j += 2)
      for (int64_t d = 0; d < dv; d++) {
        pv[(j / 2 * dv + d) * 2] = rows[j][d];
        pv[(j / 2 * dv + d) * 2 + 1] = rows[j + 1][d];
      }
  }

  // Pack a head's blocks first to last.
  template <class E> void pack(int64_t b, int64_t g, const Layout& x, int first, int last, E* pk, E* pv) const {
    int kind = 0, n = int(tokens(b)), in_time = (n + 15) / 16, time[16];
    for (int i = first; i < last; i++) {
      const int* picks = time;
      int j = i * 16, count = std::min(16, n - j);
      if (i < in_time) {
        for (int l = 0; l < 16; l++) time[l] = j + l;
      } else {
        while (kind < x.kinds() && i >= x.block[kind + 1]) kind++;
        if (kind == x.kinds() || i < x.block[kind]) continue;
        j = x.offset[kind] + (i - x.block[kind]) * 16;
        picks = &x.order[j];
        count = std::min(16, x.offset[kind + 1] - j);
      }
      pack_block(b, g, picks, count, pk + int64_t(i) * 16 * dk, pv + int64_t(i) * 16 * dv);
    }
  }
};

// The rows of a task that meet some keys: their numbers, and the keys lo <= j < hi that each sees.
struct Meeting {
  std::vector<int> row, lo, hi;
  int n = 0;
  explicit Meeting(int64_t rows) : row(rows), lo(rows), hi(rows) {}
  void add(int64_t query, int64_t share, int64_t low, int64_t high) {
    for (int64_t h = 0; h < share; h++, n++) {
      row[n] = int(query * share + h);
      lo[n] = int(low);
      hi[n] = int(high);
    }
  }
};

// Call meet(first key of the head's layout, blocks, has a gate) for all keys that queries s0 to s1 see, each time after
// the meeting was filled. Tokens are counted from the first of the sequence.
template <class Meet> void visit(const Problem& p, const Layout& x, int64_t s0, int64_t s1, Meeting& m, Meet meet) {
  for (int64_t i0 = s0; i0 < s1; i0 += 16) {
    int64_t i1 = std::min(s1, i0 + 16), first = std::max<int64_t>(0, i0 - p.window) / 16 * 16;
    m.n = 0;
    for (int64_t i = i0; i < i1; i++) m.add(i - s0, p.share, std::max<int64_t>(0, i - p.window) - first, i + 1 - first);
    meet(first, (i1 - first + 15) / 16, false);
  }
  if (p.sinks && s1 - 1 > p.window) {
    m.n = 0;
    for (int64_t i = std::max(s0, p.window + 1); i < std::min(s1, p.sinks + p.reach - 1); i++)
      m.add(i - s0, p.share, std::max<int64_t>(0, i - p.reach + 1), std::min(p.sinks, i - p.window));
    if (m.n) meet(0, (m.hi[m.n - 1] + 15) / 16, false);
  }
  for (int j = 0; j < x.kinds(); j++) {
    m.n = 0;
    const int *tokens = &x.order[x.offset[j]], count = x.offset[j + 1] - x.offset[j];
    int gone = x.end_before(j, s0 - p.reach + 1), seen = x.end_before(j, s0 - p.window), first = 0;
    for (int64_t i = std::max(s0, p.window + 1); i < s1; i++) {
      while (gone < count && tokens[gone] <= i - p.reach) gone++;
      while (seen < count && tokens[seen] < i - p.window) seen++;
      if (gone >= seen || !(x.reads[i] & x.bits[j])) continue;
      if (!m.n) first = gone / 16 * 16;
      m.add(i - s0, p.share, gone - first, seen - first);
    }
    if (m.n) meet(int64_t(x.block[j]) * 16 + first, (m.hi[m.n - 1] + 15) / 16, true);
  }
}

template <class E> struct Scratch {
  Buffer<E> q;
  Buffer<float> acc, sum, top;
  Meeting meeting;
  Scratch(const Problem& p)
      : q(p.rows * p.share * p.dk), acc(p.rows * p.share * p.dv), sum(p.rows * p.share * 16), top(p.rows * p.share), meeting(p.rows * p.share) {}
};

template <class E, class Function>
void forward(const Problem& p, Function attend, const float* sink_logits, Tensor& out, Tensor& lse) {
  const int64_t heads = p.B * p.G, blocks = (p.T + p.rows - 1) / p.rows;
  std::vector<int64_t> at(heads + 1, 0);
  for (int64_t x = 0; x < heads; x++) at[x + 1] = at[x] + p.layout(x / p.G, x % p.G).keys();
  Buffer<E> pk(at[heads] * p.dk + 1), pv(at[heads] * p.dv + 1);
  struct Nothing {};
  std::vector<std::pair<int64_t, int>> packs;  // head, first block
  for (int64_t x = 0; x < heads; x++)
    for (int64_t i = 0; i < at[x + 1] - at[x]; i += 16 * PACK) packs.emplace_back(x, int(i / 16));
  for_tasks(int64_t(packs.size()), [] { return std::make_unique<Nothing>(); }, [&](int64_t task, Nothing&) {
    auto [x, first] = packs[task];
    int last = std::min(first + int(PACK), int((at[x + 1] - at[x]) / 16));
    p.pack(x / p.G, x % p.G, p.layout(x / p.G, x % p.G), first, last, pk.data + at[x] * p.dk, pv.data + at[x] * p.dv);
  });
  void* out_data = out.mutable_data_ptr();
  float* lse_data = lse.mutable_data_ptr<float>();
  const int chunk = int(std::clamp<int64_t>(CHUNK_BYTES / int64_t(sizeof(E)) / (p.dk + p.dv) / 16 * 16, 16, CHUNK));
  for_tasks(heads * blocks, [&] { return std::make_unique<Scratch<E>>(p); }, [&](int64_t task, Scratch<E>& w) {
    int64_t x = task % heads, b = x / p.G, g = x % p.G, s0 = (blocks - 1 - task / heads) * p.rows, s1 = std::min(p.tokens(b), s0 + p.rows);
    if (s0 >= s1) return;
    const Layout& layout = p.layout(b, g);
    const int64_t rows = (s1 - s0) * p.share;
    Rows<E> state{w.q.data, w.acc.data, w.sum.data, w.top.data, p.dk, p.dv, chunk};
    Meeting& m = w.meeting;
    w.acc.zero(rows * p.dv);
    w.sum.zero(rows * 16);
    for (int64_t r = 0; r < rows; r++) {
      int64_t h = g * p.share + r % p.share;
      p.q.read(b, h, p.begin[b] + s0 + r / p.share, w.q.data + r * p.dk, p.dk);
      w.top.data[r] = LOWEST;
      if (sink_logits) {  // one more key, without a value
        w.top.data[r] = sink_logits[h] * LOG2E;
        w.sum.data[r * 16] = 1.f;
      }
    }
    auto meet = [&](int64_t first, int64_t count, bool) {
      const int64_t from = at[x] + first;
      attend(p.scores, state, m.row.data(), m.lo.data(), m.hi.data(), m.n, pk.data + from * p.dk, pv.data + from * p.dv, int(count));
    };
    visit(p, layout, s0, s1, m, meet);
    const int64_t size = p.v.size;
    for (int64_t r = 0; r < rows; r++) {
      int64_t h = g * p.share + r % p.share, t = p.begin[b] + s0 + r / p.share, to = ((b * p.T + t) * p.H + h) * size;
      float total = 0, *acc = w.acc.data + r * p.dv;
      for (int i = 0; i < 16; i++) total += w.sum.data[r * 16 + i];
      for (int64_t d = 0; d < size; d++) acc[d] /= total;
      if (p.q.half) round_to(static_cast<bf16*>(out_data) + to, acc, size);
      else round_to(static_cast<float*>(out_data) + to, acc, size);
      lse_data[(b * p.H + h) * p.T + t] = (w.top.data[r] + std::log2(total)) * LN2;
    }
  });
}

// Output [B, T, H, Dv] and natural logsumexp [B, H, T] of q [B, H, T, D], k and v [B, G, T, D]; zeros and -inf at padding.
// query_groups, key_groups [B, 1 or G, T, K] bool, None for full attention; valid [B, T] bool, false at padding,
// of which there is none between tokens. query_gates, key_gates and slope matter to gradients alone, see attend_backward.
// A query i sees no key j with i - j >= reach, sinks or not.
std::tuple<Tensor, Tensor> attend(const Tensor& q, const Tensor& k, const Tensor& v, const optional<Tensor>& query_groups, const optional<Tensor>& key_groups,
                                  const optional<Tensor>& valid, const optional<Tensor>& sink_logits, const optional<Tensor>& query_gates, const optional<Tensor>& key_gates, int64_t window,
                                  int64_t sinks, int64_t reach, double scaling, double softcap, double) {
  Problem p(q, k, v, query_groups, key_groups, valid, window, sinks, reach, scaling, softcap);
  Tensor out = valid ? at::zeros({p.B, p.T, p.H, v.size(3)}, q.options()) : at::empty({p.B, p.T, p.H, v.size(3)}, q.options());
  Tensor lse = at::empty({p.B, p.H, p.T}, q.options().dtype(at::kFloat));
  if (valid) lse.fill_(-INFINITY);
  const float* logits = sink_logits ? sink_logits->const_data_ptr<float>() : nullptr;
  if (p.q.half && p.isa->attend_bf16) forward<bf16>(p, p.isa->attend_bf16, logits, out, lse);
  else forward<float>(p, p.isa->attend, logits, out, lse);
  return {out, lse};
}

// Rows of the backward: inputs and gradients of a task's queries.
struct BackwardScratch {
  Buffer<float> q, dout, lse, delta, gate, dq, dgate, q_rows, dout_rows, gate_rows;
  Meeting meeting;
  BackwardScratch(const Problem& p, int64_t groups)
      : q(p.rows * p.share * p.dk), dout(p.rows * p.share * p.dv), lse(p.rows * p.share), delta(p.rows * p.share), gate(p.rows * p.share * groups + 1),
        dq(p.rows * p.share * p.dk), dgate(p.rows * p.share * groups + 1), q_rows(ROWS * p.dk), dout_rows(ROWS * p.dv),
        gate_rows(ROWS * groups + 1), meeting(p.rows * p.share) {}
};

// Gradients of q [B, T, H, D], k, v [B, T, G, D], and of query_gates and key_gates [B, G, T, K] where these are given: the soft
// assignments [B, 1 or G, T, K] of queries and keys, whose product a straight-through gate adds to the distant scores.
// All are float32. A key's gradient is summed over `shards` of the queries in a fixed order.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attend_backward(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse, const optional<Tensor>& query_groups,
    const optional<Tensor>& key_groups, const optional<Tensor>& valid, const optional<Tensor>& query_gates, const optional<Tensor>& key_gates, int64_t window,
    int64_t sinks, int64_t reach, double scaling, double softcap) {
  Problem p(q, k, v, query_groups, key_groups, valid, window, sinks, reach, scaling, softcap);
  const bool gated = query_gates && key_gates;
  const int64_t heads = p.B * p.G, groups = gated ? padded(p.groups) : 0, blocks = (p.T + p.rows - 1) / p.rows;
  const int64_t shards = std::clamp<int64_t>((2 * at::get_num_threads() + heads - 1) / std::max<int64_t>(heads, 1), 1, std::min<int64_t>(blocks, 4));
  auto floats = q.options().dtype(at::kFloat);
  Tensor dq = at::zeros({p.B, p.T, p.H, p.q.size}, floats), dk = at::zeros({p.B, p.T, p.G, p.q.size}, floats), dv = at::zeros({p.B, p.T, p.G, p.v.size}, floats);
  Tensor dquery_gates = at::zeros({p.B, p.G, p.T, gated ? p.groups : 0}, floats), dkey_gates = at::zeros_like(dquery_gates);
  Source grads(dout.transpose(1, 2)), outs(out.transpose(1, 2)), ask, answer;
  if (gated) {
    ask = Source(*query_gates);
    answer = Source(*key_gates);
  }
  const float* lse_data = lse.const_data_ptr<float>();
  float *dq_data = dq.mutable_data_ptr<float>(), *dk_data = dk.mutable_data_ptr<float>(), *dv_data = dv.mutable_data_ptr<float>();
  float *dquery_data = dquery_gates.mutable_data_ptr<float>(), *dkey_data = dkey_gates.mutable_data_ptr<float>();

  // of every head all keys in the order of time, then those of each kind
  std::vector<int64_t> at(heads + 1, 0);
  for (int64_t x = 0; x < heads; x++) at[x + 1] = at[x] + p.layout(x / p.G, x % p.G).keys();
  Buffer<float> kt(at[heads] * p.dk + 1), vt(at[heads] * p.dv + 1), rows(at[heads] * p.dk + 1), gate(at[heads] * groups + 1);
  Buffer<float> dkeys(shards * at[heads] * p.dk + 1), dvalues(shards * at[heads] * p.dv + 1), dgate(shards * at[heads] * groups + 1);
  auto token_at = [&](int64_t x, auto visit_token) {  // visit_token(place among the packed keys, token) of all keys of a head
    int64_t b = x / p.G, n = p.tokens(b);
    const Layout& layout = p.layout(b, x % p.G);
    for (int64_t t = 0; t < n; t++) visit_token(at[x] + t, t);
    if (layout.is_full()) return;
    for (int j = 0; j < layout.kinds(); j++)
      for (int i = layout.offset[j]; i < layout.offset[j + 1]; i++)
        visit_token(at[x] + int64_t(layout.block[j]) * 16 + i - layout.offset[j], int64_t(layout.order[i]));
  };
  struct Nothing {};
  auto nothing = [] { return std::make_unique<Nothing>(); };
  for_tasks(heads, nothing, [&](int64_t x, Nothing&) {
    int64_t b = x / p.G, g = x % p.G, size = at[x + 1] - at[x];
    std::fill_n(kt.data + at[x] * p.dk, size * p.dk, 0.f);
    std::fill_n(vt.data + at[x] * p.dv, size * p.dv, 0.f);
    std::fill_n(rows.data + at[x] * p.dk, size * p.dk, 0.f);
    std::fill_n(gate.data + at[x] * groups, size * groups, 0.f);
    token_at(x, [&](int64_t to, int64_t t) {
      float value[MAX_HEAD], *key = rows.data + to * p.dk;
      p.k.read(b, g, p.begin[b] + t, key, p.dk);
      p.v.read(b, g, p.begin[b] + t, value, p.dv);
      int64_t block = at[x] + (to - at[x]) / 16 * 16, lane = (to - at[x]) % 16;
      for (int64_t d = 0; d < p.dk; d++) kt.data[block * p.dk + d * 16 + lane] = key[d];
      for (int64_t d = 0; d < p.dv; d++) vt.data[block * p.dv + d * 16 + lane] = value[d];
      if (gated) answer.read(b, p.Y == 1 ? 0 : g, p.begin[b] + t, gate.data + to * groups, groups);
    });
  });

  auto make = [&] { return std::make_unique<BackwardScratch>(p, groups); };
  for_tasks(heads * shards, make, [&](int64_t task, BackwardScratch& w) {
    const int64_t x = task % heads, shard = task / heads, b = x / p.G, g = x % p.G, from = shard * at[heads] + at[x], size = at[x + 1] - at[x];
    const Layout& layout = p.layout(b, g);
    Keys keys{kt.data + at[x] * p.dk, vt.data + at[x] * p.dv, rows.data + at[x] * p.dk, gate.data + at[x] * groups,
              dkeys.data + from * p.dk, dvalues.data + from * p.dv, dgate.data + from * groups};
    std::fill_n(keys.dk, size * p.dk, 0.f);
    std::fill_n(keys.dv, size * p.dv, 0.f);
    std::fill_n(keys.dgate, size * groups, 0.f);
    Gradients r{w.q.data, w.dout.data, w.lse.data, w.delta.data, w.gate.data, w.dq.data, w.dgate.data, w.q_rows.data, w.dout_rows.data, w.gate_rows.data, p.dk, p.dv, groups};
    for (int64_t block = shard; block < blocks; block += shards) {
      const int64_t s0 = block * p.rows, s1 = std::min(p.tokens(b), s0 + p.rows), count = (s1 - s0) * p.share;
      if (s0 >= s1) break;
      w.dq.zero(count * p.dk);
      w.dgate.zero(count * groups);
      for (int64_t i = 0; i < count; i++) {
        int64_t h = g * p.share + i % p.share, t = p.begin[b] + s0 + i / p.share;
        float o[MAX_HEAD], *grad = w.dout.data + i * p.dv, delta = 0;
        p.q.read(b, h, t, w.q.data + i * p.dk, p.dk);
        grads.read(b, h, t, grad, p.dv);
        outs.read(b, h, t, o, p.dv);
        for (int64_t d = 0; d < p.dv; d++) delta += o[d] * grad[d];
        w.delta.data[i] = delta;
        w.lse.data[i] = lse_data[(b * p.H + h) * p.T + t] * LOG2E;
        if (gated) ask.read(b, p.Y == 1 ? 0 : g, t, w.gate.data + i * groups, groups);
      }
      Meeting& m = w.meeting;
      auto meet = [&](int64_t first, int64_t blocks_of_keys, bool with_gate) {
        p.isa->backward(p.scores, r, m.row.data(), m.lo.data(), m.hi.data(), m.n, keys, int(first), int(blocks_of_keys), gated && with_gate);
      };
      visit(p, layout, s0, s1, m, meet);
      for (int64_t i = 0; i < count; i++) {
        int64_t h = g * p.share + i % p.share, t = p.begin[b] + s0 + i / p.share;
        float* to = dq_data + ((b * p.T + t) * p.H + h) * p.q.size;
        for (int64_t d = 0; d < p.q.size; d++) to[d] = w.dq.data[i * p.dk + d] * float(scaling);
        if (!gated) continue;
        float* ga = dquery_data + ((b * p.G + g) * p.T + t) * p.groups;
        for (int64_t d = 0; d < p.groups; d++) ga[d] += w.dgate.data[i * groups + d];
      }
    }
  });
  for_tasks(heads, nothing, [&](int64_t x, Nothing&) {
    int64_t b = x / p.G, g = x % p.G;
    for (int64_t shard = 0; shard < shards; shard++)
      token_at(x, [&](int64_t place, int64_t token) {
        int64_t from = shard * at[heads] + place, t = p.begin[b] + token;
        float* to = dk_data + ((b * p.T + t) * p.G + g) * p.q.size;
        for (int64_t d = 0; d < p.q.size; d++) to[d] += dkeys.data[from * p.dk + d] * float(scaling);
        to = dv_data + ((b * p.T + t) * p.G + g) * p.v.size;
        for (int64_t d = 0; d < p.v.size; d++) to[d] += dvalues.data[from * p.dv + d];
        if (!gated) return;
        to = dkey_data + ((b * p.G + g) * p.T + t) * p.groups;
        for (int64_t d = 0; d < p.groups; d++) to[d] += dgate.data[from * groups + d];
      });
  });
  return {dq, dk, dv, dquery_gates, dkey_gates};
}

#include "cpu_decode.h"

// Set the k largest of x [n], ties to the lowest index.
void choose_largest(const float* x, int64_t n, int64_t k, bool* chosen) {
  std::fill_n(chosen, n, false);
  for (; k > 0; k--) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; i++) if (!chosen[i] && (best < 0 || x[i] > x[best])) best = i;
    chosen[best] = true;
  }
}

// Groups [B, n, T, K] that tokens h [B, T, E] read as queries and are in as keys. weight holds the columns of queries and
// keys [n, 2, K] and of a query's log importance [n], packed in blocks of 16 columns [columns / 16, E, 16]. A group's score
// is its log probability plus the query's log importance, less penalty [B, T] where given; a query of head i reads the
// groups above limits[i], or where that is UNSET the top_k[i] largest, ties to the lowest index. All but h is float32:
// products with two bf16 for each weight, which are as accurate, take as long.
std::tuple<Tensor, Tensor> route(const Tensor& h, const Tensor& weight, const Tensor& bias, const Tensor& importance_bias, const Tensor& limits,
                                 const Tensor& top_k, const optional<Tensor>& penalty) {
  const int64_t B = h.size(0), T = h.size(1), E = h.size(2), n = bias.size(0), K = bias.size(2), N = B * T;
  const int64_t last = n * 2 * K, columns = padded(last + n);
  TORCH_CHECK(h.scalar_type() == at::kFloat || h.scalar_type() == at::kBFloat16, "h must be float32 or bfloat16");
  TORCH_CHECK(K <= MAX_GROUPS, "groups must be <= ", int(MAX_GROUPS));
  for (const Tensor& x : {weight, bias, importance_bias, limits}) TORCH_CHECK(x.is_contiguous() && x.device().is_cpu(), "the router must be contiguous, on the CPU");
  TORCH_CHECK(weight.numel() == columns * E && importance_bias.size(0) == n && limits.size(0) == n && top_k.size(0) == n,
              "the router's tensors must have matching sizes");
  const Isa& isa = *chosen->isa;
  Buffer<float> start(columns);
  start.zero(columns);
  std::copy_n(bias.const_data_ptr<float>(), last, start.data);
  std::copy_n(importance_bias.const_data_ptr<float>(), n, start.data + last);
  const Tensor tokens = h.contiguous();
  const Source source(tokens.view({1, 1, N, E}));
  Tensor reads = at::empty({B, n, T, K}, h.options().dtype(at::kBool)), members = at::empty({B, n, T, K}, reads.options());
  bool *reads_data = reads.mutable_data_ptr<bool>(), *members_data = members.mutable_data_ptr<bool>();
  const float* least = limits.const_data_ptr<float>();
  const int32_t* largest = top_k.const_data_ptr<int32_t>();
  const float* less = penalty ? penalty->const_data_ptr<float>() : nullptr;
  struct Scratch { Buffer<float> x, y; };
  for_tasks((N + ROUTED - 1) / ROUTED, [&] { auto s = std::make_unique<Scratch>(); s->x.reset(ROUTED * E); s->y.reset(ROUTED * columns); return s; }, [&](int64_t task, Scratch& s) {
    const int64_t first = task * ROUTED;
    const int m = int(std::min<int64_t>(ROUTED, N - first));
    for (int r = 0; r < m; r++) {
      source.read(0, 0, first + r, s.x.data + r * E, E);
      std::copy_n(start.data, columns, s.y.data + r * columns);
    }
    isa.multiply_rows(s.x.data, m, E, weight.const_data_ptr<float>(), columns, s.y.data);
    for (int64_t r = 0; r < m * n; r++) {
      const int64_t token = first + r / n, head = r % n, to = ((token / T * n + head) * T + token % T) * K;
      const float *row = s.y.data + r / n * columns, *y = row + head * 2 * K;
      choose_largest(y + K, K, 1, members_data + to);
      float scores[MAX_GROUPS], most = y[0];
      for (int64_t i = 1; i < K; i++) most = std::max(most, y[i]);
      const float added = row[last + head] - most - isa.log_sum_exp(y, K, most) - (less ? less[token] : 0.f);
      for (int64_t i = 0; i < K; i++) scores[i] = y[i] + added;
      if (least[head] == UNSET) choose_largest(scores, K, largest[head], reads_data + to);
      else for (int64_t i = 0; i < K; i++) reads_data[to + i] = scores[i] > least[head];
    }
  });
  return {reads, members};
}

}  // namespace

TORCH_LIBRARY(focus_exp, m) {
  m.def("use_isa(str name) -> str", &use_isa);
  m.def("attend(Tensor q, Tensor k, Tensor v, Tensor? query_groups, Tensor? key_groups, Tensor? valid, Tensor? sink_logits, Tensor? query_gates, Tensor? key_gates, int window, int sinks, int reach, float scaling, float softcap, float slope) -> (Tensor, Tensor)");
  m.def("attend_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? query_groups, Tensor? key_groups, Tensor? valid, Tensor? query_gates, Tensor? key_gates, int window, int sinks, int reach, float scaling, float softcap) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("route(Tensor h, Tensor weight, Tensor bias, Tensor importance_bias, Tensor limits, Tensor top_k, Tensor? penalty) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(focus_exp, CPU, m) {
  m.impl("attend", &attend);
  m.impl("attend_backward", &attend_backward);
  m.impl("attend_cached", &attend_cached);
  m.impl("route", &route);
}
