// Which tiles a block of the float32 kernels visits, and what band and mask say of their scores.
//
// A block owns rows of scores (queries; keys for dK and dV) and goes through tiles of the other axis in ascending order. Its
// rows are whole granules of the mask plan; a tile is part of one.
#pragma once

#include "fwd_softmax.cuh"
#include "plan_lists.cuh"

namespace flashsdpa {

__device__ inline const int32_t* f32_plan(const FwdMask& mask, int batch, int head) {
  return mask.plan + batch * mask.plan_batch + head * mask.plan_head;
}

// The plan's lists of the granules that own a block's rows, read from the front to the end.
template <bool kRowsAreKeys, int kOwn>
class F32PlanWalk {
 public:
  static constexpr int kNone = INT32_MAX;

  // granule: the block's first.
  __device__ void start(const FwdMask& mask, const int32_t* plan, int granule) {
    whole_ = (kRowsAreKeys ? mask.queries : mask.keys) == 1;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int own = min(granule + i, (kRowsAreKeys ? mask.cols : mask.rows) - 1);
      const int32_t* list =
          plan + (kRowsAreKeys ? plan_col_offset<int64_t>(own, mask.rows, mask.cols) : plan_row_offset(own, mask.cols));
      left_[i] = __ldg(list);
      entries_[i] = list + 1;
    }
  }
  // The first granule from n on of which something is left; n does not fall.
  __device__ int next(int n) {
    int found = kNone;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (whole_) {
        if (left_[i]) found = n;
        continue;
      }
      while (left_[i] && __ldg(entries_[i]) >> 2 < n) ++entries_[i], --left_[i];
      if (left_[i]) found = min(found, __ldg(entries_[i]) >> 2);
    }
    return found;
  }
  // The classes of granule n, two bits each; next(n) was n.
  __device__ int classes(int n) const {
    int all = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (!left_[i]) continue;
      const int entry = __ldg(entries_[i]);
      if (whole_ || entry >> 2 == n) all |= (entry & 3) << 2 * i;
    }
    return all;
  }

 private:
  const int32_t* entries_[kOwn];
  int left_[kOwn];
  bool whole_;  // the mask has one granule along the other axis, which speaks for all
};

// Tiles of kN from `first` up to `end`, those that the plan leaves to a block of kRows.
template <bool kRowsAreKeys, int kRows, int kN>
class F32Tiles {
 public:
  int at;       // the tile's first query or key
  int classes;  // of its granules

  // own: the first of the block's rows.
  __device__ F32Tiles(const F32Args& args, int batch, int head, int own) : masked_(args.mask.plan != nullptr) {
    const int last = min(own + kRows, kRowsAreKeys ? args.seq_k : args.seq_q) - 1;
    const int first = max(kRowsAreKeys ? own - args.band_hi : own + args.band_lo, 0);
    end_ = kRowsAreKeys ? min(last - args.band_lo, args.seq_q - 1) + 1 : min(last + args.band_hi, args.seq_k - 1) + 1;
    if (masked_) walk_.start(args.mask, f32_plan(args.mask, batch, head), own / int(kGranule));
    seek(first / kN * kN);
  }
  __device__ bool more() const { return at < end_; }
  __device__ void advance() { seek(at + kN); }

 private:
  __device__ void seek(int from) {
    at = from;
    classes = kFull | kFull << 2;
    if (!masked_ || from >= end_) return;
    const int granule = from / int(kGranule), found = walk_.next(granule);
    if (found > granule) at = found == Walk::kNone ? end_ : found * int(kGranule);
    if (at < end_) classes = walk_.classes(found);
  }

  static_assert(kRows % kGranule == 0 && kGranule % kN == 0);
  using Walk = F32PlanWalk<kRowsAreKeys, kRows / int(kGranule)>;

  Walk walk_;
  int end_;
  bool masked_;
};

// From products to scores: scaled; what takes no part is -inf. For one warp, in the layout of accumulators.
template <bool kRowsAreKeys, int kM, int kN>
struct F32Scores {
  int lane;
  int row;         // the warp's first query, or key
  int own;         // which of the block's granules that is in
  int batch, head;

  // first: the block's first row, of which `warp` has the 16 kM at its place.
  __device__ F32Scores(int batch, int head, int first, int warp, int lane)
      : lane(lane), row(first + warp * 16 * kM), own(warp * 16 * kM / int(kGranule)), batch(batch), head(head) {}

  // A lane's rows and columns, and their places in the tile but for the lane's part.
  static constexpr int kRows = 2 * kM, kColumns = kN / 4;
  static constexpr int kQueries = kRowsAreKeys ? kColumns : kRows, kKeys = kRowsAreKeys ? kRows : kColumns;
  __device__ static constexpr int row_place(int i) { return 8 * i; }
  __device__ static constexpr int column_place(int i) { return 8 * (i / 2) + i % 2; }

  // act(score, of_query(query), key)
  template <typename OfQuery, typename Act>
  __device__ void for_each(float (&s)[kM][kN / 8][4], int column, const OfQuery& of_query, const Act& act) const {
    const int lane_row = row + lane / 4, lane_column = column + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      const auto known = of_query(kRowsAreKeys ? lane_column + column_place(i) : lane_row + row_place(i));
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        const int r = kRowsAreKeys ? j : i, c = kRowsAreKeys ? i : j;
        act(s[r / 2][c / 2][r % 2 * 2 + c % 2], known, kRowsAreKeys ? lane_row + row_place(j) : lane_column + column_place(j));
      }
    }
  }

  // Whether band and ends leave out scores of rows [row, row + 16 kM) and columns [column, column + kN).
  __device__ bool cut(const F32Args& args, int column) const {
    const int query = kRowsAreKeys ? column : row, key = kRowsAreKeys ? row : column;
    const int queries = kRowsAreKeys ? kN : 16 * kM, keys = kRowsAreKeys ? 16 * kM : kN;
    return key < query + queries - 1 + args.band_lo || key + keys - 1 > query + args.band_hi || key + keys > args.seq_k;
  }

  __device__ void apply(const F32Args& args, float (&s)[kM][kN / 8][4], int column, int classes) const {
    const auto itself = [](int query) { return query; };
    for_each(s, column, itself, [&](float& score, int, int) { score = ptx::multiply(score, args.scale); });
    remove(args, s, column, classes);
  }

  // What mask and band make of scores that are scaled.
  __device__ void remove(const F32Args& args, float (&s)[kM][kN / 8][4], int column, int classes) const {
    const auto itself = [](int query) { return query; };
    const int kind = classes >> 2 * own & 3;
    if (kind == kMixed || kind == kBits) {
      apply_mask(args.mask, s, column, kind == kMixed && args.mask.values);
    } else if (kind == kEmpty) {
      for_each(s, column, itself, [&](float& score, int, int) { score = kMinusInfinity; });
    }
    if (cut(args, column)) {
      for_each(s, column, itself, [&](float& score, int query, int key) {
        if (key < query + args.band_lo || key > query + args.band_hi || key >= args.seq_k) score = kMinusInfinity;
      });
    }
  }

 private:
  __device__ void apply_mask(const FwdMask& mask, float (&s)[kM][kN / 8][4], int column, bool has_values) const {
    const int32_t* bits = f32_plan(mask, batch, head) + mask.bits_offset;
    const float* values = static_cast<const float*>(mask.values) + batch * mask.stride_batch + head * mask.stride_head;
    struct OfQuery {
      const int32_t* bits;
      const float* values;
    };
    const auto of_query = [&](int query) {
      __syncwarp();  // the loads of one query at a time: there are no registers for more
      const int q = min(query, mask.queries - 1);
      return OfQuery{bits + q * mask.bits_stride, has_values ? values + q * mask.stride_query : nullptr};
    };
    for_each(s, column, of_query, [&](float& score, const OfQuery& query, int key) {
      const int k = min(key, mask.keys - 1);
      if (query.values) score = ptx::subtract(score, -__ldg(query.values + k * mask.stride_key));
      if (!(uint32_t(__ldg(query.bits + k / 32)) >> k % 32 & 1)) score = kMinusInfinity;
    });
  }
};

}  // namespace flashsdpa
