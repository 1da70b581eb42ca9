// The fused update of a table group: sums the gradients of each distinct row and steps the row, in one pass.
//
// FORMULA is replaced and STATES, NUMBERS and CONSTANTS are defined before compilation: the translated formula of an
// update rule, its number of weights and slots, of step numbers and of constants.

namespace {

// One function of torch's vectorized math library, or of the C library element by element.
#if defined(AVX2) && defined(TPUEMB_SLEEF)
extern "C" __m256 Sleef_expf8_u10(__m256), Sleef_logf8_u10(__m256), Sleef_tanhf8_u10(__m256);
extern "C" __m256 Sleef_powf8_u10(__m256, __m256);
inline Block exponential(Block x) { return Block(Sleef_expf8_u10(__m256(x))); }
inline Block logarithm(Block x) { return Block(Sleef_logf8_u10(__m256(x))); }
inline Block hyperbolic_tangent(Block x) { return Block(Sleef_tanhf8_u10(__m256(x))); }
inline Block power(Block x, Block y) { return Block(Sleef_powf8_u10(__m256(x), __m256(y))); }
#else
template <class F> inline Block each(Block x, F f) {
  for (int k = 0; k < WIDTH; k++) x[k] = f(x[k]);
  return x;
}
inline Block exponential(Block x) { return each(x, [](float v) { return std::exp(v); }); }
inline Block logarithm(Block x) { return each(x, [](float v) { return std::log(v); }); }
inline Block hyperbolic_tangent(Block x) { return each(x, [](float v) { return std::tanh(v); }); }
inline Block power(Block x, Block y) {
  for (int k = 0; k < WIDTH; k++) x[k] = std::pow(x[k], y[k]);
  return x;
}
#endif

#ifdef AVX2
inline Block root(Block x) { return Block(_mm256_sqrt_ps(__m256(x))); }
#else
inline Block root(Block x) {
  for (int k = 0; k < WIDTH; k++) x[k] = std::sqrt(x[k]);
  return x;
}
#endif

inline Block absolute(Block x) { return Block(Mask(x) & 0x7fffffff); }
inline Block sign(Block x) { return (x > zero ? one : zero) - (x < zero ? one : zero); }
// NaN in either operand is NaN in the result.
inline Block maximum(Block a, Block b) { return (a != a) ? a : (b != b) ? b : (a > b) ? a : b; }
inline Block minimum(Block a, Block b) { return (a != a) ? a : (b != b) ? b : (a < b) ? a : b; }
inline Block at_least(Block x, Block low) { return low > x ? low : x; }
inline Block at_most(Block x, Block high) { return high < x ? high : x; }

struct Step {
  const int64_t* rows;        // [distinct], ascending
  const int64_t* starts;      // [distinct + 1], where each row's ids begin in `order`
  const int64_t* order;       // [n], position in the lookup
  const int64_t* bag;         // [n], by position: row of `gradient`
  const float* gains;         // [n], by position, or null
  const float* gradient;      // [bags, dim]
  const int64_t* row_starts;  // [tables + 1]
  const float* numbers;       // [NUMBERS, tables]
  const float* constants;
  float* const* states;       // STATES buffers, [buffer rows, dim]
  int64_t distinct, buffer_rows, dim, tables, sweep, threads;
};

constexpr int64_t AHEAD_ROWS = 4;

inline void apply(float* const* at, const float* gradient_at, const Block* number, const Block* constant) {
  /*FORMULA*/
}

inline void step_row(const Step& s, int64_t row, int64_t begin, int64_t end, const Block* number, const Block* constant) {
  const auto from = [&s](int64_t i) { return s.gradient + s.bag[s.order[i]] * s.dim; };
  const auto gain = [&s](int64_t i) { return s.gains[s.order[i]]; };
  const int64_t last = s.starts[s.distinct];
  alignas(32) float gradient[TILE] = {};
  for (int64_t column = 0; column < s.dim; column += TILE) {
    const int64_t width = s.dim - column < TILE ? s.dim - column : TILE;
    if (s.gains)
      sum_columns<true>(from, gain, begin, end, last, column, width, gradient);
    else
      sum_columns<false>(from, gain, begin, end, last, column, width, gradient);
    float* at[STATES];
    for (int i = 0; i < STATES; i++) at[i] = s.states[i] + row * s.dim + column;
    int64_t k = 0;
    for (; k + WIDTH <= width; k += WIDTH) {
      apply(at, gradient + k, number, constant);
      for (int i = 0; i < STATES; i++) at[i] += WIDTH;
    }
    if (k < width) {
      alignas(32) float rest[STATES][WIDTH] = {};
      float* padded[STATES];
      for (int i = 0; i < STATES; i++) {
        padded[i] = rest[i];
        std::memcpy(rest[i], at[i], 4 * (width - k));
      }
      apply(padded, gradient + k, number, constant);
      for (int i = 0; i < STATES; i++) std::memcpy(at[i], rest[i], 4 * (width - k));
    }
  }
}

// The first of `count` items from where the cost, ids and a constant for each item, reaches a share of the total.
int64_t item_at(const Step& s, int64_t count, int64_t part, int64_t parts) {
  if (part == parts) return count;
  if (s.sweep) return count / parts * part + count % parts * part / parts;
  const int64_t goal = (s.starts[count] + 4 * count) / parts * part;
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (s.starts[middle] + 4 * middle < goal)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

void run(const Step& s, int64_t first, int64_t last) {
  Block constant[CONSTANTS + 1], number[NUMBERS + 1];
  for (int i = 0; i < CONSTANTS; i++) constant[i] = broadcast(s.constants[i]);
  int64_t table = -1, table_end = 0;
  int64_t next = 0;  // of the distinct rows, in a sweep
  if (s.sweep)
    next = std::lower_bound(s.rows, s.rows + s.distinct, first) - s.rows;
  for (int64_t item = first; item < last; item++) {
    int64_t row = item, begin = 0, end = 0;
    if (!s.sweep) {
      row = s.rows[item], begin = s.starts[item], end = s.starts[item + 1];
      if (item + AHEAD_ROWS < last)
        for (int i = 0; i < STATES; i++) prefetch<true>(s.states[i] + s.rows[item + AHEAD_ROWS] * s.dim, s.dim);
    } else if (next < s.distinct && s.rows[next] == row) {
      begin = s.starts[next], end = s.starts[next + 1], next++;
    }
    if (row >= table_end) {
      while (row >= table_end) table_end = s.row_starts[++table + 1];
      for (int i = 0; i < NUMBERS; i++) number[i] = broadcast(s.numbers[i * s.tables + table]);
    }
    step_row(s, row, begin, end, number, constant);
  }
}

}  // namespace

extern "C" void tpuemb_step(const Step* step) {
  const Step s = *step;
  const int64_t count = s.sweep ? s.buffer_rows : s.distinct;
  const int64_t work = s.dim * (count + s.starts[s.distinct]);
  const int64_t parts = s.threads == 1 || count < 64 || work < SMALL ? 1 : 8 * s.threads;
#pragma omp parallel for schedule(dynamic) num_threads(s.threads) if (parts > 1)
  for (int64_t part = 0; part < parts; part++) run(s, item_at(s, count, part, parts), item_at(s, count, part + 1, parts));
}
