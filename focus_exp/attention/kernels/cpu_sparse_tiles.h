// Vector code of cpu_sparse.cpp, which includes this file once per instruction set, inside a namespace of its own.
// LANES: floats in a vector; VECTORS: vectors of a register tile. Vectors are those of GCC and clang, so that the
// same loops serve AVX-512, AVX2, SSE and NEON; FOCUS_AVX (512, 2 or 0) and FOCUS_BF16_DOT mark what has instructions.

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

static inline vec load(const float* p) { vec x; std::memcpy(&x, p, sizeof x); return x; }
static inline void store(float* p, vec x) { std::memcpy(p, &x, sizeof x); }
static inline void round_vec(float* p, vec x) { store(p, x); }
static inline void round_vec(bf16* p, vec x) {
#if FOCUS_BF16_DOT
  __m256bh y = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(static_cast<void*>(p), &y, sizeof y);
#else
  float copy[LANES];
  store(copy, x);
  round_to(p, copy, LANES);
#endif
}
static inline vec splat(float x) { return x - vec{}; }
static inline ivec bits_of(vec x) { ivec y; std::memcpy(&y, &x, sizeof y); return y; }
static inline vec floats_of(ivec x) { vec y; std::memcpy(&y, &x, sizeof y); return y; }

static inline float largest(vec x) {
  float most = x[0];
  for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
  return most;
}

// Whether all lanes are <= y; NaN is not.
static inline bool all_below(vec x, float y) {
#if FOCUS_AVX == 512
  return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(y), _CMP_LE_OQ) == 0xFFFF;
#elif FOCUS_AVX == 2
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_set1_ps(y), _CMP_LE_OQ)) == 0xFF;
#else
  ivec below = x <= y;
  int32_t all = below[0];
  for (int i = 1; i < LANES; i++) all &= below[i];
  return all;
#endif
}

// 2^x for x <= 127, relative error 2e-7; below 2^-126 that or less, so that a caller masks what must be 0. NaN stays NaN.
static inline vec exp2(vec x) {
#if FOCUS_AVX == 512
  vec n = (vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = x - n;
#else
  const vec magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to a whole number, held in the low bits
  x = x < -126.f ? splat(-126.f) : x;
  vec shifted = x + magic, f = x - (shifted - magic);
#endif
  vec p = splat(1.535336188e-4f);
  p = p * f + 1.339887440e-3f;
  p = p * f + 9.618437357e-3f;
  p = p * f + 5.550332471e-2f;
  p = p * f + 2.402264791e-1f;
  p = p * f + 6.931472028e-1f;
  p = p * f + 1.0f;
#if FOCUS_AVX == 512
  return (vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  return floats_of(bits_of(p) + ((bits_of(shifted) - bits_of(magic)) << 23));
#endif
}

static inline vec tanh(vec x) {
  vec e = exp2((x < -20.f ? splat(-20.f) : x > 20.f ? splat(20.f) : x) * (2 * LOG2E));
  vec y = (e - 1.f) / (e + 1.f);
  return x != x ? x : y;
}

// acc + a * b for floats, and acc + a0 * b0 + a1 * b1 for pairs of bf16
static inline vec multiply(vec acc, const float* a, const float* b) { return acc + *a * load(b); }
static inline vec multiply(vec acc, const bf16* a, const bf16* b) {
#if FOCUS_BF16_DOT
  int32_t pair;
  std::memcpy(&pair, a, 4);
  return (vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)_mm512_loadu_si512(b));
#else
  ivec pairs;
  std::memcpy(&pairs, b, sizeof pairs);
  return acc + float(a[0]) * floats_of(pairs << 16) + float(a[1]) * floats_of(pairs & int32_t(0xFFFF0000));
#endif
}

// c[r][w] += sum_i a[r][i * step] * b[i][w] for R rows and N vectors of columns from w on. Columns lie in blocks of 16:
// column w of row i is b[w / 16 * block + i * row + w % 16] (of bf16: pairs of rows, so that i counts pairs).
template <class E, int R, int N>
static inline void tile(const E* const* a, int64_t step, const E* b, int64_t row, int64_t block, int64_t n, float* const* c, int64_t w) {
  constexpr int P = Pair<E>::size;
  vec acc[R][N];
  const E* at[N];
  for (int v = 0; v < N; v++) at[v] = b + (w + v * LANES) / 16 * block + (w + v * LANES) % 16 * P;
  for (int r = 0; r < R; r++)
    for (int v = 0; v < N; v++) acc[r][v] = load(c[r] + w + v * LANES);
  for (int64_t i = 0; i < n; i++)
    for (int r = 0; r < R; r++)
      for (int v = 0; v < N; v++) acc[r][v] = multiply(acc[r][v], a[r] + i * step, at[v] + i * row);
  for (int r = 0; r < R; r++)
    for (int v = 0; v < N; v++) store(c[r] + w + v * LANES, acc[r][v]);
}

template <class E, int R>
static inline void tile_row(const E* const* a, int64_t step, const E* b, int64_t row, int64_t block, int64_t n, float* const* c, int64_t width) {
  int64_t w = 0;
  for (; w + VECTORS * LANES <= width; w += VECTORS * LANES) tile<E, R, VECTORS>(a, step, b, row, block, n, c, w);
  for (; w + 2 * LANES <= width; w += 2 * LANES) tile<E, R, 2>(a, step, b, row, block, n, c, w);
  for (; w < width; w += LANES) tile<E, R, 1>(a, step, b, row, block, n, c, w);
}

// The product above for m rows of c and all `width` columns, a multiple of 16.
template <class E>
static void multiply_add(const E* const* a, int64_t step, int m, const E* b, int64_t row, int64_t block, int64_t n, float* const* c, int64_t width) {
  int r = 0;
  for (; r + 6 <= m; r += 6) tile_row<E, 6>(a + r, step, b, row, block, n, c + r, width);
  if (r + 3 <= m) { tile_row<E, 3>(a + r, step, b, row, block, n, c + r, width); r += 3; }
  if (r + 2 <= m) { tile_row<E, 2>(a + r, step, b, row, block, n, c + r, width); r += 2; }
  if (r < m) tile_row<E, 1>(a + r, step, b, row, block, n, c + r, width);
}

// Scores of products q . k, LOWEST outside lo <= j < hi; slope: their derivative by scaling * (q . k).
static inline vec score(vec s, const Scores& f, int j, int lo, int hi, bool masked, vec* slope) {
  s = s * f.scale;
  if (slope) *slope = splat(1.f);
  if (f.cap) {
    vec t = tanh(s);
    if (slope) *slope = 1.f - t * t;
    s = t * f.cap;
  }
  if (!masked) return s;
  ivec index;
  std::memcpy(&index, IOTA, sizeof index);
  ivec seen = (index >= lo - j) & (index < hi - j);
  return floats_of((bits_of(s) & seen) | (bits_of(splat(LOWEST)) & ~seen));
}

// Products s [keys] of a row become scores; returns the largest of each lane.
static inline vec score_row(float* s, const Scores& f, int keys, int lo, int hi, bool masked) {
  vec most = splat(LOWEST);
  for (int j = 0; j < keys; j += LANES) {
    vec y = score(load(s + j), f, j, lo, hi, masked, nullptr);
    store(s + j, y);
    most = y > most ? y : most;
  }
  return most;
}

// Scores s [keys] of a row become p = exp2(s - top) and enter its state.
template <class E, class P>
static inline void update_softmax(Rows<E>& x, int64_t row, const float* s, P* p, int keys, vec most, bool masked) {
  float *sums = x.sum + row * 16, *acc = x.acc + row * x.dv, top = x.top[row];
  if (!all_below(most, top + SLACK)) {  // rescale only where a score passes the largest so far by much
    float m = largest(most), alpha = top == LOWEST ? 0.f : std::exp2(top - m);
    x.top[row] = top = m;
    for (int64_t d = 0; d < x.dv; d += LANES) store(acc + d, load(acc + d) * alpha);
    store(sums, load(sums) * alpha);
  }
  vec total = load(sums);
  for (int j = 0; j < keys; j += LANES) {
    vec y = load(s + j), e = exp2(y - top);
    if (masked) e = floats_of(bits_of(e) & ~(y == splat(LOWEST)));
    total += e;
    round_vec(p + j, e);
  }
  store(sums, total);
}

// n <= ROWS rows meet `keys` keys of a chunk, a multiple of 16; lo, hi: those that a row sees.
template <class E>
static void attend_chunk(const Scores& f, Rows<E>& x, const int* row, const int* lo, const int* hi, int n, const E* k, const E* v, int keys, bool masked) {
  constexpr int P = Pair<E>::size;
  alignas(64) float s[ROWS][CHUNK];
  alignas(64) E rounded[P == 2 ? ROWS : 1][CHUNK];
  const E* q[ROWS];
  float *to[ROWS], *acc[ROWS];
  for (int r = 0; r < n; r++) {
    q[r] = x.q + int64_t(row[r]) * x.dk;
    to[r] = s[r];
    acc[r] = x.acc + int64_t(row[r]) * x.dv;
    std::memset(s[r], 0, keys * sizeof(float));
  }
  multiply_add<E>(q, P, n, k, 16 * P, 16 * x.dk, x.dk / P, to, keys);
  const E* p[ROWS];
  for (int r = 0; r < n; r++) {
    E* probabilities;
    if constexpr (P == 2) probabilities = rounded[r];
    else probabilities = s[r];
    vec most = score_row(s[r], f, keys, lo[r], hi[r], masked);
    update_softmax(x, row[r], s[r], probabilities, keys, most, masked);
    p[r] = probabilities;
  }
  multiply_add<E>(p, P, n, v, x.dv * P, 16 * P, keys / P, acc, x.dv);
}

// n rows meet blocks of 16 keys; a chunk of keys stays in the L1 cache meanwhile.
template <class E>
static void attend(const Scores& f, Rows<E>& x, const int* row, const int* lo, const int* hi, int n, const E* k, const E* v, int blocks) {
  const int size = x.chunk / 16;
  for (int first = 0; first < blocks; first += size) {
    int count = std::min(size, blocks - first), begin = first * 16, end = begin + count * 16;
    const E *ck = k + int64_t(begin) * x.dk, *cv = v + int64_t(begin) * x.dv;
    for (int r0 = 0; r0 < n; r0 += ROWS) {
      int m = std::min(int(ROWS), n - r0), low[ROWS], high[ROWS], most = 0;
      bool any = false, all = true;
      for (int r = 0; r < m; r++) {
        low[r] = std::max(0, lo[r0 + r] - begin);
        high[r] = std::min(hi[r0 + r], end) - begin;
        any |= high[r] > low[r];
        all &= low[r] == 0 && hi[r0 + r] >= end;
        most = std::max(most, high[r]);
      }
      if (any) attend_chunk<E>(f, x, row + r0, low, high, m, ck, cv, (most + 15) / 16 * 16, !all);
    }
  }
}

// The gradients that rows and keys give to each other; `from` holds the rows' inputs, copied to be neighbours.
static void backward_chunk(const Scores& f, const Gradients& x, const int* row, const int* lo, const int* hi, int n, const Keys& keys, int first, int count, bool masked, bool gated) {
  alignas(64) float s[ROWS][CHUNK], dp[ROWS][CHUNK];
  const float *q[ROWS], *dout[ROWS], *ds[ROWS];
  float *to_s[ROWS], *to_dp[ROWS], *dq[ROWS], *da[ROWS];
  for (int r = 0; r < n; r++) {
    int64_t at = row[r];
    std::memcpy(x.q_rows + r * x.dk, x.q + at * x.dk, x.dk * sizeof(float));
    std::memcpy(x.dout_rows + r * x.dv, x.dout + at * x.dv, x.dv * sizeof(float));
    q[r] = x.q_rows + r * x.dk;
    dout[r] = x.dout_rows + r * x.dv;
    to_s[r] = s[r]; to_dp[r] = dp[r]; ds[r] = dp[r];
    dq[r] = x.dq + at * x.dk;
    std::memset(s[r], 0, count * sizeof(float));
    std::memset(dp[r], 0, count * sizeof(float));
  }
  int64_t b = first / 16;
  multiply_add<float>(q, 1, n, keys.kt + b * 16 * x.dk, 16, 16 * x.dk, x.dk, to_s, count);
  multiply_add<float>(dout, 1, n, keys.vt + b * 16 * x.dv, 16, 16 * x.dv, x.dv, to_dp, count);
  for (int r = 0; r < n; r++) {
    float lse = x.lse[row[r]], delta = x.delta[row[r]];
    for (int j = 0; j < count; j += LANES) {
      vec slope, y = score(load(s[r] + j), f, j, lo[r], hi[r], masked, &slope), e = exp2(y - lse);
      if (masked) e = floats_of(bits_of(e) & ~(y == splat(LOWEST)));
      store(s[r] + j, e);
      store(dp[r] + j, e * (load(dp[r] + j) - delta) * slope);
    }
  }
  multiply_add<float>(ds, 1, n, keys.k + first * x.dk, x.dk, 16, count, dq, x.dk);
  const float *columns[CHUNK], *weights[CHUNK];
  float *dk[CHUNK], *dv[CHUNK];
  for (int j = 0; j < count; j++) {
    columns[j] = &dp[0][j];
    weights[j] = &s[0][j];
    dk[j] = keys.dk + (first + j) * x.dk;
    dv[j] = keys.dv + (first + j) * x.dv;
  }
  multiply_add<float>(columns, CHUNK, count, x.q_rows, x.dk, 16, n, dk, x.dk);
  multiply_add<float>(weights, CHUNK, count, x.dout_rows, x.dv, 16, n, dv, x.dv);
  if (!gated) return;
  for (int r = 0; r < n; r++) {
    std::memcpy(x.gate_rows + r * x.groups, x.gate + int64_t(row[r]) * x.groups, x.groups * sizeof(float));
    da[r] = x.dgate + int64_t(row[r]) * x.groups;
  }
  multiply_add<float>(ds, 1, n, keys.gate + first * x.groups, x.groups, 16, count, da, x.groups);
  for (int j = 0; j < count; j++) dk[j] = keys.dgate + (first + j) * x.groups;
  multiply_add<float>(columns, CHUNK, count, x.gate_rows, x.groups, 16, n, dk, x.groups);
}

static void backward(const Scores& f, const Gradients& x, const int* row, const int* lo, const int* hi, int n, const Keys& keys, int from, int blocks, bool gated) {
  for (int first = from; first < from + blocks * 16; first += CHUNK) {
    int end = std::min(first + CHUNK, from + blocks * 16);
    for (int r0 = 0; r0 < n; r0 += ROWS) {
      int m = std::min(int(ROWS), n - r0), low[ROWS], high[ROWS], most = 0;
      bool any = false, all = true;
      for (int r = 0; r < m; r++) {
        low[r] = std::max(0, from + lo[r0 + r] - first);
        high[r] = std::min(from + hi[r0 + r], end) - first;
        any |= high[r] > low[r];
        all &= low[r] == 0 && high[r] == end - first;
        most = std::max(most, high[r]);
      }
      if (any) backward_chunk(f, x, row + r0, low, high, m, keys, first, (most + 15) / 16 * 16, !all, gated);
    }
  }
}

// Sums of four vectors, as neighbours.
static inline void sum4(const vec* x, float* to) {
  typedef float quad __attribute__((vector_size(16)));
  quad a[4];
  for (int i = 0; i < 4; i++) {
    float lanes[LANES];
    store(lanes, x[i]);
    std::memcpy(&a[i], lanes, 16);
    for (int l = 4; l < LANES; l += 4) {
      quad more;
      std::memcpy(&more, lanes + l, 16);
      a[i] += more;
    }
  }
  quad total = quad{a[0][0], a[1][0], a[2][0], a[3][0]} + quad{a[0][1], a[1][1], a[2][1], a[3][1]} +
               quad{a[0][2], a[1][2], a[2][2], a[3][2]} + quad{a[0][3], a[1][3], a[2][3], a[3][3]};
  std::memcpy(to, &total, 16);
}

// y += x w for m <= ROUTED rows of x [n], as neighbours, and w packed [columns / 16][n][16].
static void multiply_rows(const float* x, int m, int64_t n, const float* w, int64_t columns, float* y) {
  constexpr int64_t PANEL = 64;  // columns that stay in the L2 cache
  const float* rows[ROUTED];
  float* to[ROUTED];
  for (int64_t c = 0; c < columns; c += PANEL) {
    for (int r = 0; r < m; r++) { rows[r] = x + r * n; to[r] = y + r * columns + c; }
    multiply_add<float>(rows, 1, m, w + c * n, 16, 16 * n, n, to, std::min(PANEL, columns - c));
  }
}

// log sum_i exp(x[i] - most)
static float log_sum_exp(const float* x, int64_t n, float most) {
  vec total{};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) total += exp2((load(x + i) - most) * LOG2E);
  float sum = 0;
  for (int l = 0; l < LANES; l++) sum += total[l];
  for (; i < n; i++) sum += std::exp(x[i] - most);
  return std::log(sum);
}

// LANES numbers of a cache as floats.
static inline vec widen(const float* p) { return load(p); }
static inline vec widen(const bf16* p) {
  typedef uint16_t halves __attribute__((vector_size(LANES * 2)));
  typedef uint32_t words __attribute__((vector_size(LANES * 4)));
  halves x;
  std::memcpy(&x, static_cast<const void*>(p), sizeof x);
  return floats_of((ivec)(__builtin_convertvector(x, words) << 16));
}

template <class S> static inline void fetch(const S* row, int64_t size) {
  const char* at = reinterpret_cast<const char*>(row);
  for (int64_t b = 0; b < size * int64_t(sizeof(S)); b += 64) __builtin_prefetch(at + b, 0, 1);
}

// s[r][j] = products of R rows of q [dk] and `count` keys, a multiple of 4; rows `ahead` of size `next` are fetched meanwhile.
template <class S, int R, class V>
static inline void score_keys(const float* q, int64_t dk, const S* const* keys, int count, float (*s)[CHUNK], const V* const* ahead, int64_t next) {
  for (int j = 0; j < count; j += 4) {
    for (int i = 0; i < 4; i++) fetch(ahead[j + i], next);
    vec a[R][4] = {};
    for (int64_t d = 0; d < dk; d += LANES) {
      vec key[4];
      for (int i = 0; i < 4; i++) key[i] = widen(keys[j + i] + d);
      for (int r = 0; r < R; r++)
        for (int i = 0; i < 4; i++) a[r][i] += load(q + r * dk + d) * key[i];
    }
    for (int r = 0; r < R; r++) sum4(a[r], s[r] + j);
  }
}

// acc[r] += sum_j p[r][j] * values[j] for R rows and N vectors of columns from w on.
template <class V, int R, int N, class S>
static inline void add_columns(const float (*p)[CHUNK], const V* const* values, int count, float* acc, int64_t dv, int64_t w, const S* const* ahead, int64_t next) {
  vec a[R][N];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < N; i++) a[r][i] = load(acc + r * dv + w + i * LANES);
  for (int j = 0; j < count; j++) {
    fetch(ahead[j], next);
    vec value[N];
    for (int i = 0; i < N; i++) value[i] = widen(values[j] + w + i * LANES);
    for (int r = 0; r < R; r++)
      for (int i = 0; i < N; i++) a[r][i] += p[r][j] * value[i];
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < N; i++) store(acc + r * dv + w + i * LANES, a[r][i]);
}

template <class V, int R, class S>
static inline void add_values(const float (*p)[CHUNK], const V* const* values, int count, float* acc, int64_t dv, const S* const* ahead, int64_t next) {
  int64_t w = 0;
  for (; w + VECTORS * LANES <= dv; w += VECTORS * LANES) add_columns<V, R, VECTORS>(p, values, count, acc, dv, w, ahead, w ? 0 : next);
  for (; w < dv; w += LANES) add_columns<V, R, 1>(p, values, count, acc, dv, w, ahead, w ? 0 : next);
}

// Rows of a cache whose size is no multiple of 16, copied with zeros behind.
template <class S>
static void copy_rows(const S** rows, int count, int64_t size, int64_t room, S* copy) {
  for (int j = 0; j < count; j++) {
    std::memcpy(static_cast<void*>(copy + j * room), static_cast<const void*>(rows[j]), size * sizeof(S));
    std::memset(static_cast<void*>(copy + j * room + size), 0, (room - size) * sizeof(S));
    rows[j] = copy + j * room;
  }
}

// One query of m <= ROWS heads meets the n keys and values at `index`, where a cache has them. They may be far apart, so
// that those AHEAD of a chunk are fetched meanwhile: keys while keys are scored, values while values are added. They go to
// the L2 cache: the few misses that an L1 cache can wait for would stop the loads.
template <class S, class V>
static void decode(const Scores& f, Rows<float>& x, int m, const Cached<S, V>& c, const int32_t* index, int64_t n) {
  alignas(64) float s[ROWS][CHUNK];
  alignas(64) S key_copy[CHUNK * MAX_HEAD];
  alignas(64) V value_copy[CHUNK * MAX_HEAD];
  const S *keys[CHUNK], *next_keys[CHUNK];
  const V *values[CHUNK], *next_values[CHUNK];
  auto key = [&](int64_t i) { return c.k + index[std::min(i, n - 1)] * c.k_stride; };
  auto value = [&](int64_t i) { return c.v + index[std::min(i, n - 1)] * c.v_stride; };
  for (int j = 0; j < AHEAD; j++) fetch(key(j), c.dk);
  for (int j = 0; j < AHEAD; j++) fetch(value(j), c.dv);
  for (int64_t first = 0; first < n; first += x.chunk) {
    const int count = int(std::min<int64_t>(x.chunk, n - first)), room = (count + 15) / 16 * 16;
    for (int j = 0; j < x.chunk; j++) {
      keys[j] = key(first + j), next_keys[j] = key(first + j + AHEAD);
      values[j] = value(first + j), next_values[j] = value(first + j + AHEAD);
    }
    if (c.dk < x.dk) copy_rows(keys, room, c.dk, x.dk, key_copy);
    for (int r = 0; r < m;) {
      const float* q = x.q + r * x.dk;
      const int64_t next = r ? 0 : c.dk;
      if (r + 4 <= m && LANES == 16) { score_keys<S, 4>(q, x.dk, keys, room, s + r, next_keys, next); r += 4; }
      else if (r + 3 <= m) { score_keys<S, 3>(q, x.dk, keys, room, s + r, next_keys, next); r += 3; }
      else if (r + 2 <= m) { score_keys<S, 2>(q, x.dk, keys, room, s + r, next_keys, next); r += 2; }
      else { score_keys<S, 1>(q, x.dk, keys, room, s + r, next_keys, next); r++; }
    }
    for (int r = 0; r < m; r++) {
      vec most = score_row(s[r], f, room, 0, count, true);
      update_softmax(x, r, s[r], s[r], room, most, true);
    }
    if (c.dv < x.dv) copy_rows(values, count, c.dv, x.dv, value_copy);
    for (int r = 0; r < m;) {
      float* acc = x.acc + r * x.dv;
      const int64_t next = r ? 0 : c.dv;
      if (r + 4 <= m && LANES == 16) { add_values<V, 4>(s + r, values, count, acc, x.dv, next_values, next); r += 4; }
      else if (r + 3 <= m) { add_values<V, 3>(s + r, values, count, acc, x.dv, next_values, next); r += 3; }
      else if (r + 2 <= m) { add_values<V, 2>(s + r, values, count, acc, x.dv, next_values, next); r += 2; }
      else { add_values<V, 1>(s + r, values, count, acc, x.dv, next_values, next); r++; }
    }
  }
}

// Append the places j of [first, last) that are visible and, where `query` is given, whose groups meet it.
static int64_t list_keys(const int32_t* groups, int64_t words, const int32_t* query, const bool* visible, int64_t first, int64_t last, int32_t* index, int64_t n) {
  int64_t j = first;
#if FOCUS_AVX == 512
  if (words == 1 || !query) {
    const __m512i asked = _mm512_set1_epi32(query ? *query : 0);
    __m512i place = _mm512_add_epi32(_mm512_set1_epi32(int32_t(first)), _mm512_loadu_si512(IOTA));
    for (; j + 16 <= last; j += 16, place = _mm512_add_epi32(place, _mm512_set1_epi32(16))) {
      __mmask16 keep = query ? _mm512_test_epi32_mask(_mm512_loadu_si512(groups + j), asked) : __mmask16(0xFFFF);
      if (visible) {
        __m128i seen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(visible + j));
        keep &= _mm_test_epi8_mask(seen, seen);
      }
      _mm512_storeu_si512(index + n, _mm512_maskz_compress_epi32(keep, place));
      n += __builtin_popcount(keep);
    }
  }
#endif
  for (; j < last; j++) {  // without a branch, which would be guessed wrong
    int32_t meets = !query;
    for (int64_t w = 0; query && w < words; w++) meets |= groups[j * words + w] & query[w];
    index[n] = int32_t(j);
    n += (meets != 0) & (!visible || visible[j]);
  }
  return n;
}

static const Isa isa = {
    attend<float>,
#if FOCUS_BF16_DOT || defined(FOCUS_BF16_EMULATED)
    attend<bf16>,
#else
    nullptr,
#endif
    backward, decode<float, float>, decode<bf16, bf16>, decode<float, bf16>, list_keys, multiply_rows, log_sum_exp,
};
