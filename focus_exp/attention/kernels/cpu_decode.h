// A decode step, or a few: queries read the keys and values of a cache in place. Part of cpu_sparse.cpp.
//
// A task is a stretch of keys of one key/value head: it lists the keys that a query reads, by one integer a key, and
// meets them in chunks, whose keys and values are fetched one chunk ahead: rows that are far apart would wait for memory.
// The softmax states of all stretches are merged at the end. Stretches depend on the number of keys alone, so the result
// does not depend on the threads.

enum { STRETCH = 2048, QUERIES = 64 };
constexpr int64_t SERIAL = 1 << 18;  // numbers read, below which other threads take longer to wake than to help

// The keys before `end` that a query may see: of the visible ones the sinks are before `far`, the window is from `near` on.
struct Bounds { int64_t far, near, end; };

Bounds find_bounds(const bool* visible, int64_t end, int64_t before, int64_t window, int64_t sinks) {
  int64_t sinks_left = std::max<int64_t>(0, sinks - before), window_left = window + 1;
  if (!visible) return {std::min(sinks_left, end), std::max<int64_t>(0, end - window_left), end};
  int64_t far = 0, near = end;
  for (; far < end && sinks_left > 0; far++) sinks_left -= visible[far];
  for (; near > 0 && window_left > 0; near--) window_left -= visible[near - 1];
  return {far, near, end};
}

struct CachedProblem {
  Source q, k, v;
  int64_t B, H, G, Y, T, S, W, share, dk, dv, window, sinks;
  Tensor key_groups, query_groups, visible, before;
  const float* sink_logits;
  Scores scores;
  const Isa* isa;

  const bool* visible_to(int64_t b, int64_t t) const {
    if (!visible.defined()) return nullptr;
    return visible.const_data_ptr<bool>() + (visible.size(0) > 1 ? b : 0) * visible.stride(0) + (visible.size(1) > 1 ? t : 0) * visible.stride(1);
  }
  Bounds bounds(int64_t b, int64_t t) const {
    int64_t first = 0;
    if (before.defined()) first = before.const_data_ptr<int32_t>()[(before.size(0) > 1 ? b : 0) * T + t];
    return find_bounds(visible_to(b, t), S - T + t + 1, first, window, sinks);
  }
  const int32_t* groups(const Tensor& x, int64_t b, int64_t g) const {
    return x.const_data_ptr<int32_t>() + b * x.stride(0) + (Y > 1 ? g : 0) * x.stride(1);
  }
};

template <class SK, class SV>
void attend_stretches(const CachedProblem& p, void (*decode)(const Scores&, Rows<float>&, int, const Cached<SK, SV>&, const int32_t*, int64_t), Tensor& out) {
  const int64_t stretches = std::max<int64_t>(1, (p.S + STRETCH - 1) / STRETCH), heads = p.B * p.G, row = p.dv + 2;
  const int64_t block = std::min<int64_t>(QUERIES, p.T);
  Buffer<float> states(heads * stretches * block * p.share * row);  // acc [dv], sum and top
  struct Scratch {
    Buffer<float> q, sum;
    Buffer<int32_t> index;
  };
  auto make = [&] {
    auto s = std::make_unique<Scratch>();
    s->q.reset(p.share * p.dk);
    s->sum.reset(p.share * 16);
    s->index.reset(STRETCH + 16);
    return s;
  };
  void* out_data = out.mutable_data_ptr();
  for (int64_t t0 = 0; t0 < p.T; t0 += block) {
    const int64_t t1 = std::min(p.T, t0 + block);
    auto work = [&](int64_t task, Scratch& w) {
      const int64_t x = task / stretches, b = x / p.G, g = x % p.G, from = task % stretches * STRETCH, to = std::min<int64_t>(p.S, from + STRETCH);
      const int32_t *has = p.groups(p.key_groups, b, g), *wanted = p.groups(p.query_groups, b, g);
      const Cached<SK, SV> cached{static_cast<const SK*>(p.k.data) + b * p.k.batch + g * p.k.head, static_cast<const SV*>(p.v.data) + b * p.v.batch + g * p.v.head,
                                  p.k.token, p.v.token, p.k.size, p.v.size};
      for (int64_t t = t0; t < t1; t++) {
        float* state = states.data + (task * block + t - t0) * p.share * row;
        float *acc = state, *sum = state + p.share * p.dv, *top = sum + p.share;
        std::fill_n(acc, p.share * p.dv, 0.f);
        w.sum.zero(p.share * 16);
        std::fill_n(top, p.share, LOWEST);
        const bool* seen = p.visible_to(b, t);
        const Bounds at = p.bounds(b, t);
        const int64_t end = std::min(to, at.end), near = std::max(from, std::max(at.near, at.far));
        int64_t n = p.isa->list_keys(has, p.W, nullptr, seen, from, std::min(end, at.far), w.index.data, 0);
        n = p.isa->list_keys(has, p.W, wanted + t * p.W, seen, std::max(from, at.far), std::min(end, at.near), w.index.data, n);
        n = p.isa->list_keys(has, p.W, nullptr, seen, near, end, w.index.data, n);
        for (int64_t r = 0; n && r < p.share; r++) p.q.read(b, g * p.share + r, t, w.q.data + r * p.dk, p.dk);
        for (int64_t r = 0; n && r < p.share; r += ROWS) {
          Rows<float> rows{w.q.data + r * p.dk, acc + r * p.dv, w.sum.data + r * 16, top + r, p.dk, p.dv, DECODED};
          decode(p.scores, rows, int(std::min<int64_t>(ROWS, p.share - r)), cached, w.index.data, n);
        }
        for (int64_t r = 0; r < p.share; r++) {
          sum[r] = 0;
          for (int i = 0; i < 16; i++) sum[r] += w.sum.data[r * 16 + i];
        }
      }
    };
    const int64_t tasks = heads * stretches;
    if ((t1 - t0) * heads * p.S * (p.dk + p.dv) / 4 < SERIAL) {
      auto scratch = make();
      for (int64_t task = 0; task < tasks; task++) work(task, *scratch);
    } else {
      for_tasks(tasks, make, work);
    }
    for (int64_t i = 0; i < heads * (t1 - t0) * p.share; i++) {
      const int64_t r = i % p.share, t = i / p.share % (t1 - t0), x = i / p.share / (t1 - t0), b = x / p.G, h = x % p.G * p.share + r;
      auto state = [&](int64_t stretch) { return states.data + ((x * stretches + stretch) * block + t) * p.share * row; };
      float most = p.sink_logits ? p.sink_logits[b * p.H + h] * LOG2E : LOWEST, total = 0, sums[MAX_HEAD] = {};
      for (int64_t j = 0; j < stretches; j++) most = std::max(most, state(j)[p.share * (p.dv + 1) + r]);
      if (p.sink_logits) total = std::exp2(p.sink_logits[b * p.H + h] * LOG2E - most);  // one more key, without a value
      for (int64_t j = 0; j < stretches; j++) {
        const float* from = state(j);
        const float scale = std::exp2(from[p.share * (p.dv + 1) + r] - most), sum = from[p.share * p.dv + r];
        if (sum == 0) continue;
        total += sum * scale;
        for (int64_t d = 0; d < p.dv; d++) sums[d] += from[r * p.dv + d] * scale;
      }
      for (int64_t d = 0; d < p.dv; d++) sums[d] = total > 0 ? sums[d] / total : total;  // of no key 0, of NaN NaN
      const int64_t to = ((b * p.T + t0 + t) * p.H + h) * p.v.size;
      if (p.q.half) round_to(static_cast<bf16*>(out_data) + to, sums, p.v.size);
      else round_to(static_cast<float*>(out_data) + to, sums, p.v.size);
    }
  }
}

// Output [B, T, H, Dv] of queries [B, H, T, D], the last T tokens of the keys and values [B, G, S, D], in place.
//
// A query sees the keys j <= S - T + t that are visible [B or 1, T or 1, S]. Of these it reads the last window + 1, the
// first sinks - before[b, t] [B or 1, T], and those whose groups key_groups [B, Y, S, W] have a bit of its query_groups
// [B, Y, T, W], for Y = 1 or G. sink_logits [B, H] float.
Tensor attend_cached(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_groups, const Tensor& query_groups, const optional<Tensor>& visible,
                     const optional<Tensor>& before, const optional<Tensor>& sink_logits, int64_t window, int64_t sinks, double scaling, double softcap) {
  CachedProblem p;
  p.q = Source(q);
  p.k = Source(k);
  p.v = Source(v);
  p.B = q.size(0), p.H = q.size(1), p.T = q.size(2), p.G = k.size(1), p.S = k.size(2), p.share = p.H / p.G;
  p.Y = key_groups.size(1), p.W = key_groups.size(3), p.dk = padded(q.size(3)), p.dv = padded(v.size(3)), p.window = window, p.sinks = sinks;
  TORCH_CHECK(p.H % p.G == 0 && p.T <= p.S && v.size(1) == p.G && v.size(2) == p.S && k.size(0) == p.B && v.size(0) == p.B && k.size(3) == q.size(3), "q, k and v must have matching sizes");
  TORCH_CHECK(p.dk <= MAX_HEAD && p.dv <= MAX_HEAD, "head sizes must be <= ", int(MAX_HEAD));
  TORCH_CHECK((p.Y == 1 || p.Y == p.G) && key_groups.size(0) == p.B && key_groups.size(2) == p.S, "key_groups must be [B, 1 or G, S, W]");
  TORCH_CHECK(query_groups.size(0) == p.B && query_groups.size(1) == p.Y && query_groups.size(2) == p.T && query_groups.size(3) == p.W, "query_groups must be [B, Y, T, W]");
  auto is_dense = [](const Tensor& x) { return x.stride(3) == 1 && x.stride(2) == x.size(3); };
  p.key_groups = is_dense(key_groups) ? key_groups : key_groups.contiguous();
  p.query_groups = is_dense(query_groups) ? query_groups : query_groups.contiguous();
  if (visible) p.visible = visible->stride(2) == 1 ? *visible : visible->contiguous();
  if (before) p.before = before->contiguous();
  Tensor logits = sink_logits ? sink_logits->contiguous() : Tensor();
  p.sink_logits = sink_logits ? logits.const_data_ptr<float>() : nullptr;
  const float scale = float(scaling);
  p.scores = softcap > 0 ? Scores{scale / float(softcap), float(softcap) * LOG2E} : Scores{scale * LOG2E, 0.f};
  p.isa = chosen->isa;
  Tensor out = at::empty({p.B, p.T, p.H, v.size(3)}, q.options());
  if (p.k.half) attend_stretches<bf16, bf16>(p, p.isa->decode_bf16, out);
  else if (p.v.half) attend_stretches<float, bf16>(p, p.isa->decode_mixed, out);
  else attend_stretches<float, float>(p, p.isa->decode, out);
  return out;
}
