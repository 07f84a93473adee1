// Builds the mask plan (mask_plan.h) on the device, in two kernels on one stream:
//
//   flashsdpa_mask_plan_sm90        reads the mask once, classifies each granule and writes its entry (0 if
//                                   empty) where a full list would have it, in its row and in its column;
//   flashsdpa_mask_plan_lists_sm90  one warp per list: closes the gaps in place, zeroes the rest, counts.
//
// The first kernel bounds the time: it moves the mask, the second a thousandth of it. Its CTA reads a strip
// of 64 lines of 512 bytes, 8 lines a warp, all of a warp's loads in flight at once. "Lines" and "elements
// along a line" stand for whichever axes the mask has in memory: a transposed mask is read along its queries,
// and only the place where a class is written knows.
#pragma once

#include <cstdint>

#include "../../mask_plan.h"
#include "../../params.h"

namespace flashsdpa {

constexpr int kWarpSize = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kPlanWarps = 8;  // per CTA, both kernels
constexpr int kPlanThreads = kPlanWarps * kWarpSize;
constexpr int kLinesPerWarp = kGranule / kPlanWarps;
constexpr int kVectorBytes = 16;

enum class Access {
  kElement,  // any strides: a lane loads single elements
  kVector,   // unit stride along a line and lines aligned to 16 bytes: a lane loads 16 bytes
};

struct MaskPlanArgs {
  const void* mask;
  int64_t stride_batch, stride_head, stride_line, stride_along;  // in elements
  int64_t lines, along;            // sizes; along is 0 if the mask has no element
  uint32_t heads;                  // of the mask: 1 where it broadcasts
  uint32_t line_granules, strips;  // of one (batch, head), each at least 1
  bool along_queries;              // a line runs over queries, not keys
  int32_t* plan;                   // (batch, heads, plan_words)
  int64_t plan_words;
  int64_t rows, cols;  // granules over queries and over keys
};

// An element as raw bits. kRemoved is the pattern of -inf; a bool is removed by being zero.
template <typename Unsigned, Unsigned kPattern>
struct ElementBits {
  using Bits = Unsigned;
  static constexpr Bits kRemoved = kPattern;
};
template <DType kType>
struct MaskElement;
template <>
struct MaskElement<DType::kBool> : ElementBits<uint8_t, 0> {};
template <>
struct MaskElement<DType::kBFloat16> : ElementBits<uint16_t, 0xff80> {};
template <>
struct MaskElement<DType::kFloat16> : ElementBits<uint16_t, 0xfc00> {};
template <>
struct MaskElement<DType::kFloat32> : ElementBits<uint32_t, 0xff800000> {};
template <>
struct MaskElement<DType::kFloat64> : ElementBits<uint64_t, 0xfff0000000000000> {};

// What has been seen of a granule: nonzero `kept` if some element does not remove its score, nonzero
// `touched` if some element does something to it (removes it or adds a bias). 8 bytes of elements at a time.
template <DType kType>
struct Seen {
  using Bits = typename MaskElement<kType>::Bits;
  static constexpr Bits kOnes = static_cast<Bits>(~Bits{0});
  static constexpr uint64_t kSplat = ~uint64_t{0} / kOnes;  // bits * kSplat is one element, repeated
  static constexpr uint64_t kTopBits = kSplat << (8 * sizeof(Bits) - 1);

  uint64_t kept = 0, touched = 0;

  FLASHSDPA_HOST_DEVICE void add(uint64_t packed) {
    if constexpr (kType == DType::kBool) {
      kept |= packed;
      touched |= (packed - kSplat) & ~packed & kTopBits;  // nonzero exactly if some byte is zero
    } else {
      kept |= packed ^ (kSplat * MaskElement<kType>::kRemoved);
      touched |= packed & ~kTopBits;  // +0 and -0 add nothing
    }
  }
};

// The entry of a granule in a full list; 0 stands for an empty granule.
__device__ inline int32_t plan_entry(int64_t granule, GranuleClass granule_class) {
  return granule_class == kEmpty ? 0 : static_cast<int32_t>(granule << 2 | granule_class);
}

// Grid: one CTA per (batch, head, granule of lines, strip along them), strips innermost.
template <DType kType, Access kAccess>
__global__ void __launch_bounds__(kPlanThreads)
    flashsdpa_mask_plan_sm90(const __grid_constant__ MaskPlanArgs args) {
  using Bits = typename MaskElement<kType>::Bits;
  constexpr int kVector = kVectorBytes / sizeof(Bits);
  constexpr int kStrip = kAccess == Access::kVector ? kWarpSize * kVector : kGranule;  // elements
  constexpr int kStripGranules = kStrip / kGranule;
  constexpr int kGranuleLanes = kWarpSize / kStripGranules;  // neighbouring lanes hold one granule

  __shared__ uint32_t s_kept[kPlanWarps], s_touched[kPlanWarps];  // bit per lane

  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  uint32_t rest = blockIdx.x;
  const uint32_t strip = rest % args.strips;
  rest /= args.strips;
  const uint32_t line_granule = rest % args.line_granules;
  const int64_t plan_index = rest / args.line_granules;
  const int64_t batch = plan_index / args.heads, head = plan_index % args.heads;

  const int64_t line0 = line_granule * kGranule + warp;
  const int64_t along0 = static_cast<int64_t>(strip) * kStrip;
  const Bits* mask =
      static_cast<const Bits*>(args.mask) + batch * args.stride_batch + head * args.stride_head;
  // Past the end the last line is read again, which changes no class.
  auto line = [&](int i) { return mask + min(line0 + i * kPlanWarps, args.lines - 1) * args.stride_line; };

  Seen<kType> seen;
  auto see_elements = [&](int64_t begin, int64_t end, int step) {
    for (int64_t j = begin; j < end; j += step) {
#pragma unroll
      for (int i = 0; i < kLinesPerWarp; ++i) {
        seen.add(__ldg(line(i) + j * args.stride_along) * Seen<kType>::kSplat);
      }
    }
  };
  if constexpr (kAccess == Access::kVector) {
    const int64_t begin = along0 + lane * kVector;
    if (begin + kVector <= args.along) {
      ulonglong2 packed[kLinesPerWarp];
#pragma unroll
      for (int i = 0; i < kLinesPerWarp; ++i) {
        packed[i] = __ldg(reinterpret_cast<const ulonglong2*>(line(i) + begin));
      }
#pragma unroll
      for (int i = 0; i < kLinesPerWarp; ++i) {
        seen.add(packed[i].x);
        seen.add(packed[i].y);
      }
    } else {
      see_elements(begin, args.along, 1);
    }
  } else {
    see_elements(along0 + lane, min(along0 + kGranule, args.along), kWarpSize);
  }

  const uint32_t kept = __ballot_sync(kAllLanes, seen.kept != 0);
  const uint32_t touched = __ballot_sync(kAllLanes, seen.touched != 0);
  if (lane == 0) {
    s_kept[warp] = kept;
    s_touched[warp] = touched;
  }
  __syncthreads();

  int32_t* plan = args.plan + plan_index * args.plan_words;
  if (strip == 0 && line_granule == 0 && threadIdx.x < kPlanHeader) {
    plan[threadIdx.x] = threadIdx.x == 0 ? kPlanVersion : 0;  // the counts are summed by the second kernel
  }
  const int64_t along_granule = static_cast<int64_t>(strip) * kStripGranules + threadIdx.x;
  if (threadIdx.x >= kStripGranules || along_granule * kGranule >= args.along) return;
  uint32_t any_kept = 0, any_touched = 0;
  for (int w = 0; w < kPlanWarps; ++w) {
    any_kept |= s_kept[w];
    any_touched |= s_touched[w];
  }
  const uint32_t lanes = kAllLanes >> (kWarpSize - kGranuleLanes) << (threadIdx.x * kGranuleLanes);
  const GranuleClass granule_class = !(any_kept & lanes) ? kEmpty : !(any_touched & lanes) ? kFull : kMixed;
  const int64_t row = args.along_queries ? along_granule : line_granule;
  const int64_t col = args.along_queries ? line_granule : along_granule;
  plan[plan_row_offset(row, args.cols) + 1 + col] = plan_entry(col, granule_class);
  plan[plan_col_offset(col, args.rows, args.cols) + 1 + row] = plan_entry(row, granule_class);
}

// Grid: one warp per list, the rows and then the columns of each plan.
static __global__ void __launch_bounds__(kPlanThreads)
    flashsdpa_mask_plan_lists_sm90(int32_t* plans, int64_t plan_count, int64_t plan_words, int64_t rows,
                                   int64_t cols) {
  constexpr int kUnroll = 8;  // loads of a warp in flight: one round serves lists of up to 256 granules
  const int lane = threadIdx.x % kWarpSize;
  const int64_t list = static_cast<int64_t>(blockIdx.x) * kPlanWarps + threadIdx.x / kWarpSize;
  const int64_t plan_index = list / (rows + cols), index = list % (rows + cols);
  if (plan_index >= plan_count) return;
  int32_t* plan = plans + plan_index * plan_words;
  const bool is_row = index < rows;
  const int length = static_cast<int>(is_row ? cols : rows);
  int32_t* words = plan + (is_row ? plan_row_offset(index, cols) : plan_col_offset(index - rows, rows, cols));
  int32_t* entries = words + 1;

  int count = 0, full = 0;
  for (int begin = 0; begin < length; begin += kUnroll * kWarpSize) {
    int32_t entry[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = begin + u * kWarpSize + lane;
      entry[u] = i < length ? entries[i] : 0;
    }
    __syncwarp();  // all of the chunk is read before a word of it is written; writes never run ahead of reads
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t present = __ballot_sync(kAllLanes, entry[u] != 0);
      const uint32_t before = present & ((1u << lane) - 1);
      if (entry[u] != 0) entries[count + __popc(before)] = entry[u];
      count += __popc(present);
      full += __popc(__ballot_sync(kAllLanes, (entry[u] & 3) == kFull));
    }
  }
  for (int i = count + lane; i < length; i += kWarpSize) entries[i] = 0;
  if (lane != 0) return;
  words[0] = count;
  if (is_row) {
    atomicAdd(plan + 1 + kEmpty, length - count);
    atomicAdd(plan + 1 + kFull, full);
    atomicAdd(plan + 1 + kMixed, count - full);
  }
}

}  // namespace flashsdpa
