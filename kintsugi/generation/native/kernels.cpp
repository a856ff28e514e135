// Forward pass of a decoder over a few rows, each a token of some sequence, on one core.
//
// Every row goes through the same instructions whatever else is in the batch: the inputs of a product are summed in a fixed
// order, and attention reads only a row's own keys. So a row's bits depend only on its token, its position and the KV cache
// before it, and it makes no difference whether a token is prefilled or decoded.
//
// Compiled for one shape of attention head: HEAD_DIM (entries), HEAD_SIZE (HEAD_DIM rounded up to whole vectors), QUERIES
// (query heads of one kv head that are computed together) and HALF (weights and KV cache are bfloat16, and so is everything
// that the trainer stores between two operations). `library.py` declares the same structures.
//
// In bfloat16 every sum that is rounded is computed in the trainer's order, which is torch's: another order rounds one entry
// in ten thousand differently, and after thirty layers most entries differ.

#include "vectors.h"

#include <math.h>
#include <stdint.h>
#include <string.h>
#if HALF && defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#define ROWS (LANES == 8 ? 4 : 8)
#define PANEL (2 * LANES)
#define PAGE 16
#define BLOCK 128
#define SPAN 512                                           // Keys per softmax block of the trainer's attention.
#define RUN 192                                            // Values that it sums together.
#define LARGEST_SHARE (1 - 0x1p-52)
#define PARTS (HEAD_SIZE / LANES)

struct Layer {
  const real *qkv, *output, *gate_up, *down;
  const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;  // Null if absent.
  const float *first_norm, *second_norm, *query_norm, *key_norm;   // The last two: null if absent.
};

struct Model {
  int64_t num_layers, num_heads, num_kv_heads;
  int64_t hidden, inner, vocabulary, heads;                // Widths, rounded up to panels; `heads`: query, key and value.
  int64_t true_hidden;                                     // `hidden` before rounding up.
  int64_t num_pages;                                       // Pages of the KV cache.
  float epsilon, scale;
  const Layer *layers;
  const real *embedding, *to_vocabulary;
  const float *last_norm;
  const float *turns;                                      // [positions, 2, HEAD_SIZE]: cosine, signed sine.
  real *pages;                                             // [layers, pages, kv heads, 2, PAGE × HEAD_SIZE].
};

struct Work {                                              // Buffers of one row each; the number of rows is a multiple of ROWS.
  float *hidden, *heads, *gate_up;
  real *normed, *attended, *activated;                     // Inputs of products.
};

// Contribution of DEPTH inputs of a row to a vector of outputs; `x` points to those inputs.
#if HALF
#define DEPTH 2
struct Factor {
  uint32_t pair;
  explicit Factor(const real *x) { memcpy(&pair, x, sizeof pair); }
  vec add(vec sum, const real *w) const {
#if defined(__AVX512BF16__)
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)pair), (__m512bh)_mm512_loadu_si512(w));
#else
    bits pairs;
    memcpy(&pairs, w, sizeof pairs);
    const bits factor = pair - (bits){0};
    sum += (vec)(factor << 16) * (vec)(pairs << 16);
    return sum + (vec)(factor & 0xffff0000u) * (vec)(pairs & 0xffff0000u);
#endif
  }
};
#else
#define DEPTH 1
struct Factor {
  vec factor;
  explicit Factor(const real *x) : factor(all(*x)) {}
  vec add(vec sum, const real *w) const { return sum + factor * load(w); }
};
#endif

// In bfloat16 the trainer's products (oneDNN) sum this many inputs at a time, then add the partial sums.
static inline int64_t summed_at_once(int64_t inputs) { return !HALF ? inputs : inputs <= 1024 ? 512 : 1024; }

// ROWS × PANEL entries of x · w + bias. `w` is one panel: [inputs / DEPTH, PANEL, DEPTH].
template <bool ROUNDS>
static inline void tile(const real *__restrict__ x, int64_t inputs, const real *__restrict__ w, const float *bias,
                        float *__restrict__ y, int64_t outputs, bool adds) {
  vec totals[ROWS][2];
  for (int row = 0; row < ROWS; row++)
    for (int half = 0; half < 2; half++) totals[row][half] = bias ? load(bias + half * LANES) : all(0);
  const int64_t run = ROUNDS ? summed_at_once(inputs) : inputs;
  for (int64_t start = 0; start < inputs; start += run) {
    const int64_t end = start + run < inputs ? start + run : inputs;
    vec sums[ROWS][2];
    for (int row = 0; row < ROWS; row++) sums[row][0] = sums[row][1] = all(0);
#pragma GCC unroll 4
    for (int64_t i = start; i < end; i += DEPTH) {
#pragma GCC unroll 8
      for (int row = 0; row < ROWS; row++) {
        const Factor factor(x + row * inputs + i);
        sums[row][0] = factor.add(sums[row][0], w + i * PANEL);
        sums[row][1] = factor.add(sums[row][1], w + i * PANEL + LANES * DEPTH);
      }
    }
    for (int row = 0; row < ROWS; row++)
      for (int half = 0; half < 2; half++) totals[row][half] += sums[row][half];
  }
  for (int row = 0; row < ROWS; row++)
    for (int half = 0; half < 2; half++) {
      vec sum = ROUNDS ? rounded(totals[row][half]) : totals[row][half];
      float *at = y + row * outputs + half * LANES;
      store(at, adds ? rounded(sum + load(at)) : sum);
    }
}

// y = x · w + bias, or y += x · w + bias. `w` is [outputs / PANEL, inputs / DEPTH, PANEL, DEPTH].
template <bool ROUNDS>
static void product(int64_t rows, const real *x, int64_t inputs, const real *w, const float *bias, float *y,
                    int64_t outputs, bool adds) {
  for (int64_t column = 0; column < outputs; column += PANEL)
    for (int64_t row = 0; row < rows; row += ROWS)
      tile<ROUNDS>(x + row * inputs, inputs, w + column * inputs, bias ? bias + column : bias,
                   y + row * outputs + column, outputs, adds);
}

// Sum in torch's order, independent of the CPU: vectors of eight, four partial sums in parallel, of sixteen vectors each
// before they are added to a total; then the four totals, then the remainder, then the lanes. (Beyond 8 Ki entries torch
// nests the totals once more.)
static inline float sum_of_squares(const float *x, int64_t size) {
  const int64_t eights = size / 8 * 8, fours = size / 32 * 32;
  eight totals[4] = {};
  for (int64_t start = 0; start < fours; start += 512) {
    eight sums[4] = {};
    for (int64_t i = start; i < start + 512 && i < fours; i += 32)
      for (int k = 0; k < 4; k++) sums[k] += square(x + i + 8 * k);
    for (int k = 0; k < 4; k++) totals[k] += sums[k];
  }
  for (int64_t i = fours; i < eights; i += 8) totals[0] += square(x + i);
  const eight total = totals[0] + totals[1] + totals[2] + totals[3];
  float sum = 0;
  for (int64_t i = eights; i < size; i++) sum += x[i] * x[i];
  for (int lane = 0; lane < 8; lane++) sum += total[lane];
  return sum;
}

template <typename Out>
static inline void norm(const float *x, int64_t size, int64_t true_size, float epsilon, const float *weight, Out *y) {
  const float factor = 1.0f / __builtin_sqrtf(sum_of_squares(x, true_size) / (float)true_size + epsilon);
  for (int64_t i = 0; i < size; i += LANES) put(y + i, rounded(load(x + i) * factor * load(weight + i)));
}

static void norm_rows(int64_t rows, const Model *model, const float *weight, const Work *work) {
  for (int64_t row = 0; row < rows; row++)
    norm(work->hidden + row * model->hidden, model->hidden, model->true_hidden, model->epsilon, weight,
         work->normed + row * model->hidden);
}

// Rotary embedding: entries half a head apart are one pair.
static inline void turn(float *head, const float *turns) {
  const int half = HEAD_DIM / 2;
  float other[HEAD_SIZE] = {};
  memcpy(other, head + half, half * sizeof *head);
  memcpy(other + half, head, half * sizeof *head);
  for (int i = 0; i < HEAD_SIZE; i += LANES) {
    const vec kept = rounded(load(head + i) * load(turns + i));
    store(head + i, rounded(kept + load(other + i) * load(turns + HEAD_SIZE + i)));
  }
}

// Normalise and rotate a row's query and key, and store its key and value in the KV cache; keys of a page are transposed.
// Not inlined: prefill and decode share one copy, because another copy might be rounded differently.
__attribute__((noinline)) static void place(const Model *model, const Layer *layer, real *pages, float *heads, int64_t position, int64_t target) {
  const int64_t num_heads = model->num_heads, num_kv_heads = model->num_kv_heads;
  for (int64_t head = 0; head < num_heads + num_kv_heads; head++) {
    float *at = heads + head * HEAD_SIZE;
    const float *weight = head < num_heads ? layer->query_norm : layer->key_norm;
    if (weight) norm(at, HEAD_SIZE, HEAD_DIM, model->epsilon, weight, at);
    turn(at, model->turns + position * 2 * HEAD_SIZE);
  }
  for (int64_t kv = 0; kv < num_kv_heads; kv++) {
    real *keys = pages + ((target / PAGE) * num_kv_heads + kv) * 2 * PAGE * HEAD_SIZE, *values = keys + PAGE * HEAD_SIZE;
    const float *key = heads + (num_heads + kv) * HEAD_SIZE, *value = key + num_kv_heads * HEAD_SIZE;
    for (int i = 0; i < HEAD_SIZE; i++) put_one(keys + i * PAGE + target % PAGE, key[i]);
    for (int part = 0; part < PARTS; part++)
      put(values + (target % PAGE) * HEAD_SIZE + part * LANES, load(value + part * LANES));
  }
}

// Scores of the first `count` keys of a page for QUERIES queries; the other keys are masked.
static inline void score(const real *keys, int64_t count, float scale, const float *query, float *scores, vec *peaks) {
  ints lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  for (int start = 0; start < PAGE; start += LANES) {
    vec sums[QUERIES][2];
    for (int q = 0; q < QUERIES; q++) sums[q][0] = sums[q][1] = all(0);
#pragma GCC unroll 8
    for (int i = 0; i < HEAD_SIZE; i += 2) {
      const vec even = get(keys + i * PAGE + start), odd = get(keys + (i + 1) * PAGE + start);
      // Two sums would be faster; the trainer uses one.
      for (int q = 0; q < QUERIES; q++) {
        sums[q][0] += all(query[q * HEAD_SIZE + i]) * even;
        sums[q][HALF ? 0 : 1] += all(query[q * HEAD_SIZE + i + 1]) * odd;
      }
    }
    for (int q = 0; q < QUERIES; q++) {
      const vec sum = HALF ? sums[q][0] : sums[q][0] + sums[q][1];
      const vec score = lane < (int32_t)count - start ? sum * scale : all(-__builtin_inff());
      peaks[q] = peaks[q] >= score ? peaks[q] : score;
      store(scores + q * SPAN + start, score);
    }
  }
}

// Turn `count` scores into softmax weights relative to the larger of `peak` and their own peak, which is returned.
static inline float share_out(float *scores, int64_t count, vec peaks, float peak, float *sum) {
  for (int i = 0; i < LANES; i++) peak = peak >= peaks[i] ? peak : peaks[i];
  vec even = all(0), odd = all(0);
  for (int64_t start = 0; start < count; start += LANES) {
    const vec share = share_of(load(scores + start) - peak);
    start / LANES % 2 == 0 ? even += share : odd += share;
    store(scores + start, rounded(share));
  }
  *sum = folded(even + odd);
  return peak;
}

// Add `count` values, multiplied by their softmax weights, to the output of QUERIES queries.
static inline void mix(const real *pages, int64_t page_stride, const int64_t *table, int64_t count, const float *shares,
                       vec (*mixed)[PARTS]) {
  for (int64_t start = 0; start < count; start += RUN) {
    vec sums[QUERIES][PARTS] = {};
    for (int64_t page = start; page < start + RUN && page < count; page += PAGE) {
      const real *values = pages + table[page / PAGE] * page_stride + PAGE * HEAD_SIZE;
      const int64_t end = count - page < PAGE ? count - page : PAGE;
      for (int64_t i = 0; i < end; i++)
        for (int part = 0; part < PARTS; part++) {
          const vec value = get(values + i * HEAD_SIZE + part * LANES);
          for (int q = 0; q < QUERIES; q++) sums[q][part] += all(shares[q * SPAN + page + i]) * value;
        }
    }
    for (int q = 0; q < QUERIES; q++)
      for (int part = 0; part < PARTS; part++) mixed[q][part] += sums[q][part];
  }
}

// Attention of QUERIES queries of one kv head over the first `count` keys of a sequence. As in the trainer, the weights of
// a span are relative to the largest score so far, and earlier spans are rescaled.
static void attend(const real *pages, int64_t page_stride, const int64_t *table, int64_t count, float scale,
                   const float *query, real *out) {
  float scores[QUERIES * SPAN], peaks[QUERIES], sums[QUERIES];
  vec mixed[QUERIES][PARTS] = {};
  for (int q = 0; q < QUERIES; q++) peaks[q] = -__builtin_inff(), sums[q] = 0;
  for (int64_t first = 0; first < count; first += SPAN, table += SPAN / PAGE) {
    const int64_t some = count - first < SPAN ? count - first : SPAN;
    vec found[QUERIES];
    for (int q = 0; q < QUERIES; q++) found[q] = all(-__builtin_inff());
    for (int64_t start = 0; start < some; start += PAGE) {
      const real *keys = pages + table[start / PAGE] * page_stride;
      // The values are read next, which the hardware prefetcher does not predict.
      for (int at = 0; at < PAGE * HEAD_SIZE; at += 64 / (int)sizeof(real)) __builtin_prefetch(keys + PAGE * HEAD_SIZE + at);
      if (start + PAGE < some) {
        const real *next = pages + table[start / PAGE + 1] * page_stride;
        for (int at = 0; at < PAGE * HEAD_SIZE; at += 64 / (int)sizeof(real)) __builtin_prefetch(next + at);
      }
      score(keys, some - start, scale, query, scores + start, found);
    }
    for (int q = 0; q < QUERIES; q++) {
      float sum;
      const float peak = share_out(scores + q * SPAN, some, found[q], peaks[q], &sum);
      const float kept = first == 0 ? 0 : expf(peaks[q] - peak);
      sums[q] = sum + kept * sums[q];
      peaks[q] = peak;
      for (int part = 0; part < PARTS; part++) mixed[q][part] *= kept;
    }
    mix(pages, page_stride, table, some, scores, mixed);
  }
  for (int q = 0; q < QUERIES; q++)
    for (int part = 0; part < PARTS; part++)
      put(out + q * HEAD_SIZE + part * LANES, mixed[q][part] * (1.0f / sums[q]));
}

static void attend_rows(int64_t rows, const Model *model, const Layer *layer, real *pages, const int64_t *positions,
                        const int64_t *targets, const int64_t *tables, int64_t table_size, const Work *work) {
  const int64_t num_heads = model->num_heads, num_kv_heads = model->num_kv_heads;
  const int64_t per_row = model->heads, group = num_heads / num_kv_heads;
  const int64_t page_stride = num_kv_heads * 2 * PAGE * HEAD_SIZE;
  // Rows may be tokens of one sequence; later ones attend to earlier ones.
  for (int64_t row = 0; row < rows; row++)
    place(model, layer, pages, work->heads + row * per_row, positions[row], targets[row]);
  for (int64_t row = 0; row < rows; row++)
    for (int64_t head = 0; head < num_heads; head += QUERIES)
      attend(pages + head / group * 2 * PAGE * HEAD_SIZE, page_stride, tables + row * table_size, positions[row] + 1,
             model->scale, work->heads + row * per_row + head * HEAD_SIZE,
             work->attended + (row * num_heads + head) * HEAD_SIZE);
}

static void activate(int64_t rows, const Model *model, const Work *work) {
  for (int64_t row = 0; row < rows; row++) {
    const float *gate = work->gate_up + row * 2 * model->inner, *up = gate + model->inner;
    for (int64_t i = 0; i < model->inner; i += LANES) {
      const vec x = load(gate + i), magnitude = x < 0 ? x : -x, e = exponential(magnitude);
      const vec sigmoid = (x < 0 ? e : all(1.0f)) / (e + 1.0f);
      put(work->activated + row * model->inner + i, rounded(x * sigmoid) * load(up + i));
    }
  }
}

// A row of logits as vectors; padding after the vocabulary has no probability.
struct Logits {
  const float *row;
  int64_t size;
  float divisor;
  vec at(int64_t start) const {
    if (start + LANES <= size) return load(row + start) / divisor;
    vec x = all(-__builtin_inff());
    for (int64_t i = 0; start + i < size; i++) x[i] = row[start + i] / divisor;
    return x;
  }
};

static float peak_of(const Logits &logits) {
  vec peaks = logits.at(0);
  for (int64_t i = LANES; i < logits.size; i += LANES) {
    const vec x = logits.at(i);
    peaks = peaks >= x ? peaks : x;
  }
  float peak = peaks[0];
  for (int i = 1; i < LANES; i++) peak = peak >= peaks[i] ? peak : peaks[i];
  return peak;
}

// Sum of e^(logit - peak), and of each block of the vocabulary.
static double weigh(const Logits &logits, float peak, float *masses) {
  double total = 0;
  for (int64_t start = 0; start < logits.size; start += BLOCK) {
    vec sums = all(0);
    for (int64_t i = start; i < start + BLOCK && i < logits.size; i += LANES) sums += exponential(logits.at(i) - peak);
    total += masses[start / BLOCK] = sum_of(sums);
  }
  return total;
}

// Token at which the cumulative weight passes `uniform` of the total: first its block, then its position in the block. A
// block's mass is rounded; the position is found at the same fraction of the block's own sum.
static int64_t invert(const Logits &logits, float peak, const float *masses, double total, double uniform) {
  const double wanted = uniform * total;
  const int64_t last = (logits.size - 1) / BLOCK;
  double before = 0;
  int64_t block = 0;
  while (block < last && before + masses[block] <= wanted) before += masses[block++];
  double share = (wanted - before) / masses[block];
  share = share < LARGEST_SHARE ? share : LARGEST_SHARE;
  float weights[BLOCK];
  double inside = 0;
  for (int64_t i = 0; i < BLOCK; i += LANES) {
    const int64_t start = block * BLOCK + i;
    store(weights + i, start < logits.size ? exponential(logits.at(start) - peak) : all(0));
  }
  for (int i = 0; i < BLOCK; i++) inside += weights[i];
  double passed = 0;
  for (int64_t i = 0; i < BLOCK; i++) {
    passed += weights[i];
    if (passed > share * inside) return block * BLOCK + i;
  }
  return logits.size - 1;
}

static int64_t likeliest(const Logits &logits, float peak) {
  for (int64_t i = 0; i < logits.size; i++)
    if (logits.row[i] / logits.divisor == peak) return i;
  return logits.size - 1;
}

// Number `counter` of a SplitMix64 stream as a float64 in [0, 1), see `rng.py`.
static double uniform_of(uint64_t key, uint64_t counter) {
  uint64_t mixed = key + (counter + 1) * 0x9E3779B97F4A7C15u;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
  mixed ^= mixed >> 31;
  return (double)(mixed >> 12) * 0x1p-52;
}

extern "C" {

int64_t panel(void) { return PANEL; }
int64_t rows_at_once(void) { return ROWS; }

// Write keys and values of `rows` tokens to `targets` (page × PAGE + offset) and, unless `logits` is null, compute their
// logits, [rows rounded up, vocabulary]. Without logits, operations that only the logits need are skipped.
void forward(const Model *model, const Work *work, int64_t rows, const int64_t *tokens, const int64_t *positions,
             const int64_t *targets, const int64_t *tables, int64_t table_size, float *logits) {
  const int64_t padded = (rows + ROWS - 1) / ROWS * ROWS, hidden = model->hidden;
  const int64_t queries = model->num_heads * HEAD_SIZE, heads = model->heads;
  const int64_t page_values = model->num_kv_heads * 2 * PAGE * HEAD_SIZE;
  for (int64_t row = 0; row < rows; row++) {
    const real *from = model->embedding + tokens[row] * hidden;
    for (int64_t i = 0; i < hidden; i += LANES) store(work->hidden + row * hidden + i, get(from + i));
  }
  for (int64_t number = 0; number < model->num_layers; number++) {
    const Layer *layer = model->layers + number;
    norm_rows(rows, model, layer->first_norm, work);
    product<true>(padded, work->normed, hidden, layer->qkv, layer->qkv_bias, work->heads, heads, false);
    real *pages = model->pages + number * model->num_pages * page_values;
    if (!logits && number == model->num_layers - 1) {
      for (int64_t row = 0; row < rows; row++)
        place(model, layer, pages, work->heads + row * heads, positions[row], targets[row]);
      return;
    }
    attend_rows(rows, model, layer, pages, positions, targets, tables, table_size, work);
    product<true>(padded, work->attended, queries, layer->output, layer->output_bias, work->hidden, hidden, true);
    norm_rows(rows, model, layer->second_norm, work);
    product<true>(padded, work->normed, hidden, layer->gate_up, layer->gate_up_bias, work->gate_up, 2 * model->inner,
                  false);
    activate(rows, model, work);
    product<true>(padded, work->activated, model->inner, layer->down, layer->down_bias, work->hidden, hidden, true);
  }
  norm_rows(rows, model, model->last_norm, work);
  product<false>(padded, work->normed, hidden, model->to_vocabulary, nullptr, logits, model->vocabulary, false);
}

// Draw a token for each row of `logits` [rows, stride]; also its log-probability and the normalizer at the row's
// temperature. Temperature 0 takes the most likely token and counts as 1 for these. Row i is drawn from row
// `processed_index[i]` of `processed` [rows, size] if that is not negative. `masses` has room for every block.
void draw(int64_t rows, int64_t size, int64_t stride, const float *logits, const float *processed, const int64_t *processed_index,
          const float *temperatures, const int64_t *keys, const int64_t *counters, float *masses, int64_t *tokens,
          float *logprobs, float *normalizers) {
  for (int64_t row = 0; row < rows; row++) {
    const float temperature = temperatures[row];
    const Logits own = {logits + row * stride, size, temperature == 0 ? 1.0f : temperature};
    float peak = peak_of(own);
    double total = weigh(own, peak, masses);
    normalizers[row] = (float)log(total) + peak;
    Logits source = own;
    if (processed_index[row] >= 0) {
      source = {processed + processed_index[row] * size, size, 1.0f};
      peak = peak_of(source);
      total = weigh(source, peak, masses);
    }
    const double uniform = uniform_of((uint64_t)keys[row], (uint64_t)counters[row]);
    tokens[row] = temperature == 0 ? likeliest(source, peak) : invert(source, peak, masses, total, uniform);
    logprobs[row] = own.row[tokens[row]] / own.divisor - normalizers[row];
  }
}
}
