// flashsdpa_mask_plan_cpu: one pass over the mask as given (broadcast axes unexpanded), one item per row of granules.
#pragma once

#include "forward.h"

namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE {

// A boolean mask as a bias: 0 where it is true, -inf where it is false.
struct Bool {
  uint8_t value;
};
inline float widen(Bool x) { return x.value ? 0.0f : kNegInf<float>; }

// What a granule holds: scores removed (False, -inf), left alone (True, 0), shifted by a bias.
struct Seen {
  bool removed = false, neutral = false, shifted = false;
  template <typename M>
  void add(M x) {
    const auto bias = widen(x);
    const bool gone = bias == -std::numeric_limits<decltype(bias)>::infinity(), zero = bias == 0;
    removed |= gone;
    neutral |= zero;
    shifted |= !gone && !zero;
  }
  void join(const Seen& other) {
    removed |= other.removed;
    neutral |= other.neutral;
    shifted |= other.shifted;
  }
  int granule_class() const { return shifted ? kMixed : !removed ? kFull : neutral ? kBits : kEmpty; }
};

// One contiguous row of a granule; returns how many elements were looked at, a multiple of the vector.
inline int64_t see_vectors(const Bool* row, int64_t cols, Seen& seen) {
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  typedef int8_t Mask __attribute__((vector_size(16)));
  Mask zero{}, nonzero{};
  int64_t c = 0;
  for (; c + 16 <= cols; c += 16) {
    Bytes x;
    std::memcpy(&x, row + c, sizeof x);
    zero |= x == 0;
    nonzero |= x != 0;
  }
  seen.removed |= any(zero);
  seen.neutral |= any(nonzero);
  return c;
}
template <typename M>
inline int64_t see_vectors(const M* row, int64_t cols, Seen& seen) {
  using T = decltype(widen(M{}));
  IntVec<T> gone{}, zero{}, rest{};
  int64_t c = 0;
  for (; c + kLanes<T> <= cols; c += kLanes<T>) {
    const Vec<T> x = widen_vector(row + c);
    const IntVec<T> is_gone = x == kNegInf<T>, is_zero = x == T(0);
    gone |= is_gone;
    zero |= is_zero;
    rest |= ~(is_gone | is_zero);
  }
  seen.removed |= any(gone);
  seen.neutral |= any(zero);
  seen.shifted |= any(rest);
  return c;
}

// Which of the first `cols` elements (up to 64) of a row keep their score, a bit each.
inline uint64_t kept_bits(const Bool* row, int cols, int64_t step) {
  uint64_t bits = 0;
  int c = 0;
  for (; step == 1 && c + 8 <= cols; c += 8) {
    uint64_t bytes;
    std::memcpy(&bytes, row + c, 8);
    constexpr uint64_t kLow = 0x7f7f7f7f7f7f7f7f;  // a carry into the top bit of each byte that is not zero
    const uint64_t ones = (((bytes & kLow) + kLow) | bytes) >> 7 & 0x0101010101010101;
    bits |= (ones * 0x0102040810204080 >> 56) << c;  // byte i to bit i
  }
  for (; c < cols; ++c) bits |= uint64_t(row[c * step].value != 0) << c;
  return bits;
}
template <typename M>
inline uint64_t kept_bits(const M* row, int cols, int64_t step) {
  uint64_t bits = 0;
  for (int c = 0; c < cols; ++c) {
    const auto bias = widen(row[c * step]);
    bits |= uint64_t(bias != -std::numeric_limits<decltype(bias)>::infinity()) << c;
  }
  return bits;
}

// The class of a granule; row r's bits to bits[r * bits_stride]. `all`: the bits of a row that keeps every score.
template <typename M>
inline int see_granule(const M* first, int rows, int cols, int64_t row_stride, int64_t col_stride, uint64_t all,
                       uint64_t* bits, int64_t bits_stride) {
  Seen seen;
  for (int r = 0; r < rows; ++r) {
    const M* row = first + r * row_stride;
    Seen here;
    int64_t c = col_stride == 1 ? see_vectors(row, cols, here) : 0;
    for (; c < cols; ++c) here.add(row[c * col_stride]);
    const bool some = here.neutral || here.shifted;
    bits[r * bits_stride] = !here.removed ? all : !some ? 0 : kept_bits(row, cols, col_stride);
    seen.join(here);
  }
  return seen.granule_class();
}

template <typename M>
void classify_row(const MaskPlanParams& a, int64_t plane, int64_t row, int32_t* words) {
  const MaskView& m = a.mask;
  const int64_t cols = plan_granules(m.size[3]), first = row * kGranule, bits_stride = plan_bits_stride(cols) / 2;
  const int rows = int(std::min<int64_t>(kGranule, m.size[2] - first));
  const M* base = static_cast<const M*>(m.data) + plane / m.size[1] * m.stride[0] + plane % m.size[1] * m.stride[1] +
                  first * m.stride[2];
  int32_t* list = words + plan_row_offset(row, cols);
  // 64-bit words at a multiple of 16 bytes from a plan that torch aligns to 16 or more
  auto* bits = reinterpret_cast<uint64_t*>(words + plan_bits_offset(plan_granules(m.size[2]), cols)) + first * bits_stride;
  int32_t count = 0;
  for (int64_t c = 0; c < cols; ++c) {
    const int width = int(std::min<int64_t>(kGranule, m.size[3] - c * kGranule));
    const uint64_t all = m.size[3] == 1 || width == kGranule ? ~uint64_t{0} : (uint64_t{1} << width) - 1;
    const int kind = see_granule(base + c * kGranule * m.stride[3], rows, width, m.stride[2], m.stride[3], all, bits + c,
                                 bits_stride);
    if (kind != kEmpty) list[++count] = int32_t(c << 2 | kind);
  }
  list[0] = count;
  for (int64_t c = count; c < cols; ++c) list[1 + c] = 0;
  for (int r = 0; cols % 2 && r < rows; ++r) bits[r * bits_stride + cols] = 0;
}

// The transposed lists and the counts, from the row lists.
inline void finish_plane(int64_t rows, int64_t cols, int32_t* words) {
  int32_t full = 0, partial = 0;
  int32_t* columns = words + plan_col_offset<int64_t>(0, rows, cols);
  std::memset(columns, 0, sizeof(int32_t) * cols * (1 + rows));
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t* list = words + plan_row_offset(r, cols);
    for (int32_t i = 1; i <= list[0]; ++i) {
      int32_t* column = columns + (list[i] >> 2) * (1 + rows);
      column[++column[0]] = int32_t(r << 2 | (list[i] & 3));
      (list[i] & 3) == kFull ? ++full : ++partial;
    }
  }
  std::fill(words + plan_col_offset(cols, rows, cols), words + plan_bits_offset(rows, cols), 0);
  words[0] = kPlanVersion;
  words[1] = int32_t(rows * cols) - full - partial;
  words[2] = full;
  words[3] = partial;
}

inline const char* mask_plan(const void* params, const Launch& launch) {
  const auto& a = *static_cast<const MaskPlanParams*>(params);
  const MaskView& m = a.mask;
  const int64_t planes = m.size[0] * m.size[1], rows = plan_granules(m.size[2]), cols = plan_granules(m.size[3]);
  const int64_t stride = plan_words(m.size[2], m.size[3]);
  const int workers = int(std::clamp(double(planes) * m.size[2] * m.size[3] / 262144, 1.0, 4096.0));
  for_each_item(launch.pool, planes * rows, workers, [&](int64_t item, int) {
    const int64_t plane = item / rows, row = item % rows;
    int32_t* words = a.plan + plane * stride;
    switch (m.dtype) {
      case DType::kBool: classify_row<Bool>(a, plane, row, words); break;
      case DType::kFloat32: classify_row<float>(a, plane, row, words); break;
      case DType::kBFloat16: classify_row<BFloat16>(a, plane, row, words); break;
      case DType::kFloat16: classify_row<Float16>(a, plane, row, words); break;
      case DType::kFloat64: classify_row<double>(a, plane, row, words); break;
    }
  });
  for_each_item(launch.pool, planes, 1, [&](int64_t plane, int) { finish_plane(rows, cols, a.plan + plane * stride); });
  return nullptr;
}

}  // namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE
