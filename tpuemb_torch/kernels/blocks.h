// Blocks of eight float32, and sums of rows; put before the other files.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX2__) && defined(__FMA__)
#define AVX2 1
#include <immintrin.h>
#endif

namespace {

constexpr int WIDTH = 8;
typedef float Block __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Mask __attribute__((vector_size(4 * WIDTH)));

inline Block broadcast(float x) { return Block{x, x, x, x, x, x, x, x}; }

const Block zero = broadcast(0.0f), one = broadcast(1.0f);

#ifdef AVX2
inline Block multiply_add(Block a, Block b, Block c) { return Block(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c))); }
#else
inline Block multiply_add(Block a, Block b, Block c) {
  for (int k = 0; k < WIDTH; k++) c[k] = std::fma(a[k], b[k], c[k]);
  return c;
}
#endif

inline Block load(const float* p) {
  Block x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline void store(float* p, Block x) { std::memcpy(p, &x, sizeof x); }

template <bool WRITE> inline void prefetch(const float* p, int64_t count) {
  const char* begin = reinterpret_cast<const char*>(p);
  const char* end = reinterpret_cast<const char*>(p + count);
  for (; begin < end; begin += 64) __builtin_prefetch(begin, WRITE, 3);
}

constexpr int64_t TILE = 64;  // columns summed at a time, in registers
constexpr int64_t SMALL = 1 << 17;  // elements that one thread is done with before others have started
constexpr int64_t AHEAD = 12;  // rows fetched ahead

// Sums of rows, each times a gain, in their order: `row(i)` is the address of row i, `gain(i)` its gain.  Rows before
// `last` may be fetched ahead.  As in torch's embedding_bag, the product with a gain is not rounded before it is added.
template <int BLOCKS, bool WEIGHTED, class Row, class Gain>
inline void sum_blocks(Row row, Gain gain, int64_t begin, int64_t end, int64_t last, int64_t column, float* out) {
  Block total[BLOCKS];
  for (int b = 0; b < BLOCKS; b++) total[b] = zero;
  for (int64_t i = begin; i < end; i++) {
    if (i + AHEAD < last) prefetch<false>(row(i + AHEAD) + column, WIDTH * BLOCKS);
    const float* from = row(i) + column;
    if (WEIGHTED) {
      const Block factor = broadcast(gain(i));
      for (int b = 0; b < BLOCKS; b++) total[b] = multiply_add(factor, load(from + WIDTH * b), total[b]);
    } else {
      for (int b = 0; b < BLOCKS; b++) total[b] += load(from + WIDTH * b);
    }
  }
  for (int b = 0; b < BLOCKS; b++) store(out + WIDTH * b, total[b]);
}

// The columns that do not fill a block.
template <bool WEIGHTED, class Row, class Gain>
inline void sum_rest(Row row, Gain gain, int64_t begin, int64_t end, int64_t column, int64_t count, float* out) {
  float total[WIDTH] = {};
  for (int64_t i = begin; i < end; i++) {
    const float* from = row(i) + column;
    for (int64_t k = 0; k < count; k++) total[k] = WEIGHTED ? std::fma(gain(i), from[k], total[k]) : total[k] + from[k];
  }
  std::memcpy(out, total, 4 * count);
}

// Sums of at most TILE columns.
template <bool WEIGHTED, class Row, class Gain>
inline void sum_columns(Row row, Gain gain, int64_t begin, int64_t end, int64_t last, int64_t column, int64_t width, float* out) {
  int64_t done = 0;
  if (width == 64) return sum_blocks<8, WEIGHTED>(row, gain, begin, end, last, column, out);
  if (width - done >= 32) sum_blocks<4, WEIGHTED>(row, gain, begin, end, last, column + done, out + done), done += 32;
  if (width - done >= 16) sum_blocks<2, WEIGHTED>(row, gain, begin, end, last, column + done, out + done), done += 16;
  if (width - done >= 8) sum_blocks<1, WEIGHTED>(row, gain, begin, end, last, column + done, out + done), done += 8;
  if (width > done) sum_rest<WEIGHTED>(row, gain, begin, end, column + done, width - done, out + done);
}

}  // namespace
