// The lookup, and what a step needs to know about its ids: their rows in the group's buffer, the bag of each, and their
// sorted order.

namespace {

// The part of [0, n) of one thread.
int64_t bound(int64_t n, int64_t part, int64_t parts) { return n / parts * part + std::min(part, n % parts); }

int64_t parts_of(int64_t n, int64_t threads) { return n < SMALL / 4 ? 1 : threads; }

}  // namespace

// Adds to each id the first row of its feature's table.  `bounds`: where each feature's ids begin, and n.
extern "C" void tpuemb_add_first_rows(const int64_t* ids, const int64_t* bounds, const int64_t* first_rows,
                                      int64_t features, int64_t threads, int64_t* result) {
  const int64_t n = bounds[features], parts = parts_of(n, threads);
#pragma omp parallel for num_threads(parts) if (parts > 1)
  for (int64_t part = 0; part < parts; part++) {
    const int64_t end = bound(n, part + 1, parts);
    int64_t i = bound(n, part, parts);
    int64_t f = std::upper_bound(bounds, bounds + features + 1, i) - bounds - 1;
    for (; i < end; f++)
      for (const int64_t last = std::min(end, bounds[f + 1]), first_row = first_rows[f]; i < last; i++)
        result[i] = ids[i] + first_row;
  }
}

// The row of the gradient of each id: bag (feature f, sample b) is row b * features + f.
extern "C" void tpuemb_bags(const int64_t* offsets, int64_t features, int64_t batch, int64_t threads, int64_t* result) {
  const int64_t bags = features * batch, parts = parts_of(offsets[bags] - offsets[0], threads);
#pragma omp parallel for num_threads(parts) if (parts > 1)
  for (int64_t part = 0; part < parts; part++)
    for (int64_t bag = bound(bags, part, parts); bag < bound(bags, part + 1, parts); bag++) {
      const int64_t row = bag % batch * features + bag / batch;
      for (int64_t i = offsets[bag]; i < offsets[bag + 1]; i++) result[i] = row;
    }
}

// Stable radix sort of (id, position) pairs, and the runs of equal ids.
//
// ids: [n], 0 <= id < limit <= 2^32, n < 2^32.  scratch: [2 n].  rows [n] and starts [n + 1] are filled as far as there
// are distinct ids, whose number is returned; order: [n].
extern "C" int64_t tpuemb_sort(const int64_t* ids, int64_t n, int64_t limit, int64_t threads, uint64_t* scratch,
                               int64_t* rows, int64_t* starts, int64_t* order) {
  constexpr int MOST = 11;  // bits of a digit: its counters fit the first-level cache
  const int64_t parts = parts_of(n, threads);
  int bits = 1;
  while (bits < 32 && (int64_t(1) << bits) < limit) bits++;
  const int passes = (bits + MOST - 1) / MOST, width = (bits + passes - 1) / passes;
  const int64_t digits = int64_t(1) << width;
  std::vector<int64_t> counts(parts * digits), distinct(parts + 1);
  uint64_t *from = scratch, *to = scratch + n;
#pragma omp parallel for num_threads(parts) if (parts > 1)
  for (int64_t part = 0; part < parts; part++)
    for (int64_t i = bound(n, part, parts); i < bound(n, part + 1, parts); i++) from[i] = uint64_t(ids[i]) << 32 | uint64_t(i);
  for (int pass = 0; pass < passes; pass++) {
    const int shift = 32 + pass * width;
    const uint64_t mask = digits - 1;
#pragma omp parallel for num_threads(parts) if (parts > 1)
    for (int64_t part = 0; part < parts; part++) {
      int64_t* count = &counts[part * digits];
      std::fill(count, count + digits, 0);
      for (int64_t i = bound(n, part, parts); i < bound(n, part + 1, parts); i++) count[from[i] >> shift & mask]++;
    }
    int64_t total = 0;
    for (int64_t digit = 0; digit < digits; digit++)
      for (int64_t part = 0; part < parts; part++) {
        const int64_t count = counts[part * digits + digit];
        counts[part * digits + digit] = total;
        total += count;
      }
#pragma omp parallel for num_threads(parts) if (parts > 1)
    for (int64_t part = 0; part < parts; part++) {
      int64_t* next = &counts[part * digits];
      for (int64_t i = bound(n, part, parts); i < bound(n, part + 1, parts); i++) to[next[from[i] >> shift & mask]++] = from[i];
    }
    std::swap(from, to);
  }
  auto begins = [from](int64_t i) { return i == 0 || from[i] >> 32 != from[i - 1] >> 32; };
#pragma omp parallel for num_threads(parts) if (parts > 1)
  for (int64_t part = 0; part < parts; part++) {
    int64_t count = 0;
    for (int64_t i = bound(n, part, parts); i < bound(n, part + 1, parts); i++) count += begins(i);
    distinct[part + 1] = count;
  }
  for (int64_t part = 0; part < parts; part++) distinct[part + 1] += distinct[part];
#pragma omp parallel for num_threads(parts) if (parts > 1)
  for (int64_t part = 0; part < parts; part++) {
    int64_t place = distinct[part];
    for (int64_t i = bound(n, part, parts); i < bound(n, part + 1, parts); i++) {
      order[i] = int64_t(from[i] & 0xffffffff);
      if (begins(i)) {
        rows[place] = int64_t(from[i] >> 32);
        starts[place++] = i;
      }
    }
  }
  starts[distinct[parts]] = n;
  return distinct[parts];
}

namespace {

template <bool WEIGHTED>
void bags(const int64_t* ids, const int64_t* offsets, const float* gains, const float* weights, int64_t dim,
          int64_t features, int64_t batch, int64_t first, int64_t end, float* result) {
  const auto row = [=](int64_t i) { return weights + ids[i] * dim; };
  const auto gain = [=](int64_t i) { return gains[i]; };
  int64_t feature = first / std::max<int64_t>(batch, 1), sample = first - feature * batch;
  for (int64_t bag = first; bag < end; bag++, sample++) {
    if (sample == batch) sample = 0, feature++;
    float* out = result + (sample * features + feature) * dim;
    for (int64_t column = 0; column < dim; column += TILE)
      sum_columns<WEIGHTED>(row, gain, offsets[bag], offsets[bag + 1], offsets[end], column, std::min(TILE, dim - column),
                            out + column);
  }
}

}  // namespace

// Weighted sums of rows: bag (feature f, sample b) is row b * features + f of the result.  Returns how many of the ids
// are not below `rows`; bags of the parts where there are some are left out.
extern "C" int64_t tpuemb_look_up(const int64_t* ids, const int64_t* offsets, const float* gains, const float* weights,
                                  int64_t rows, int64_t dim, int64_t features, int64_t batch, int64_t threads,
                                  float* result) {
  const int64_t count = features * batch;
  int64_t outside = 0;
  const int64_t parts = threads == 1 || offsets[count] * dim < SMALL ? 1 : std::min(8 * threads, std::max<int64_t>(count, 1));
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (parts > 1) reduction(+ : outside)
  for (int64_t part = 0; part < parts; part++) {
    const int64_t first = bound(count, part, parts), end = bound(count, part + 1, parts);
    int64_t found = 0;
    for (int64_t i = offsets[first]; i < offsets[end]; i++) found += uint64_t(ids[i]) >= uint64_t(rows);
    outside += found;
    if (found) continue;
    if (gains)
      bags<true>(ids, offsets, gains, weights, dim, features, batch, first, end, result);
    else
      bags<false>(ids, offsets, gains, weights, dim, features, batch, first, end, result);
  }
  return outside;
}
