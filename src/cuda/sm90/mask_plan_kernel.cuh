// Builds the mask plan (mask_plan.h) on the device, in two kernels on one stream:
//
//   flashsdpa_mask_plan_sm90        reads the mask once, writes its bits, classifies each granule and writes its entry (0
//                                   if empty) where a full list would have it, in its row and in its column;
//   flashsdpa_mask_plan_lists_sm90  one warp per list: closes the gaps in place, zeroes the rest, counts.
//
// The first kernel bounds the time: it moves the mask, the second a thousandth of it. Its CTA reads a strip
// of 64 lines of 512 bytes, 8 lines a warp, all of a warp's loads in flight at once. "Lines" and "elements
// along a line" stand for whichever axes the mask has in memory: a transposed mask is read along its queries,
// and only the places where classes and bits are written know.
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
  int64_t plan_words, bits_offset, bits_stride;
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

// 8 bytes of elements at a time.
template <DType kType>
struct Packed {
  using Bits = typename MaskElement<kType>::Bits;
  static constexpr int kElements = 8 / sizeof(Bits), kElementBits = 8 * sizeof(Bits);
  static constexpr Bits kOnes = static_cast<Bits>(~Bits{0});
  static constexpr uint64_t kSplat = ~uint64_t{0} / kOnes;  // bits * kSplat is one element, repeated
  static constexpr uint64_t kTopBits = kSplat << (kElementBits - 1);

  // The top bit of each element that is not zero.
  FLASHSDPA_HOST_DEVICE static uint64_t nonzero(uint64_t x) { return (((x & ~kTopBits) + ~kTopBits) | x) & kTopBits; }
  // Top bits to the low kElements bits, the first element lowest.
  FLASHSDPA_HOST_DEVICE static uint32_t gather(uint64_t tops) {
    const uint64_t ones = tops >> (kElementBits - 1);
    if constexpr (kElements == 8) return static_cast<uint32_t>(ones * 0x0102040810204080u >> 56);
    if constexpr (kElements == 4) return static_cast<uint32_t>(ones | ones >> 15 | ones >> 30 | ones >> 45) & 0xf;
    if constexpr (kElements == 2) return static_cast<uint32_t>(ones | ones >> 31) & 3;
    return static_cast<uint32_t>(ones);
  }
  // The top bits of the first `count` elements.
  FLASHSDPA_HOST_DEVICE static uint64_t first(int64_t count) {
    return count >= kElements ? kTopBits : count <= 0 ? 0 : kTopBits & ((uint64_t{1} << count * kElementBits) - 1);
  }
  FLASHSDPA_HOST_DEVICE static uint64_t kept(uint64_t packed) { return nonzero(packed ^ kSplat * MaskElement<kType>::kRemoved); }
};

// What has been seen of a granule, each true if nonzero: some element keeps its score, removes it, or adds a value to it.
template <DType kType>
struct Seen {
  using P = Packed<kType>;
  uint64_t kept = 0, removed = 0, shifted = 0;

  // Returns which of the elements keep their score, a bit each. `there`: the top bits of those that exist.
  FLASHSDPA_HOST_DEVICE uint32_t add(uint64_t packed, uint64_t there = P::kTopBits) {
    const uint64_t tops = P::kept(packed) & there;
    kept |= tops;
    removed |= ~tops & there;
    // +0 and -0 add nothing; of the rest, what is no -inf adds.
    if constexpr (kType != DType::kBool) shifted |= P::nonzero(packed & ~P::kTopBits) & tops;
    return P::gather(tops);
  }
};

FLASHSDPA_HOST_DEVICE inline GranuleClass granule_class(bool kept, bool removed, bool shifted) {
  return shifted ? kMixed : !removed ? kFull : kept ? kBits : kEmpty;
}

// The entry of a granule in a full list; 0 stands for an empty granule.
__device__ inline int32_t plan_entry(int64_t granule, GranuleClass granule_class) {
  return granule_class == kEmpty ? 0 : static_cast<int32_t>(granule << 2 | granule_class);
}

// Each lane's lowest kCount bits, those of neighbouring lanes put together; whole in every (32 / kCount)-th lane.
template <int kCount>
__device__ inline uint32_t join_lanes(uint32_t bits) {
#pragma unroll
  for (int width = kCount, lanes = 1; width < 32; width *= 2, lanes *= 2) {
    bits |= __shfl_down_sync(kAllLanes, bits, lanes) << width;
  }
  return bits;
}

// Where a CTA leaves the bits of its strip, in words of 32 elements along a line. Along keys that is the plan. Along
// queries it is shared memory, from where each warp turns blocks of 32 x 32 bits around.
template <int kWords>
struct StripBits {
  const MaskPlanArgs& args;
  uint32_t* plan_bits;  // of this (batch, head)
  int64_t first_line;   // of the granule
  int64_t first_word;   // of the strip, along the lines
  uint32_t (*turned)[kWords + 1];  // 64 lines; the odd length keeps a column of it in different banks

  __device__ void put(int line, int word, uint32_t bits) const {
    const int64_t w = first_word + word;
    if (args.along_queries) {
      turned[line][word] = bits;
    } else if (first_line + line < args.lines && w < 2 * args.cols) {
      plan_bits[(first_line + line) * args.bits_stride + w] = bits;
    }
  }

  // Of masks along queries; after a barrier. Lines are keys: the two words of each query that this granule of keys is.
  __device__ void turn(int warp, int lane) const {
    for (int block = warp; block < 2 * kWords; block += kPlanWarps) {
      const int half = block % 2, word = block / 2;  // of the keys; of the queries
      const int64_t query = (first_word + word) * 32 + lane;
      // One key stands for all.
      const bool there = args.lines == 1 || first_line + 32 * half + lane < args.lines;
      const uint32_t queries = there ? turned[args.lines == 1 ? 0 : 32 * half + lane][word] : 0;
      uint32_t mine = 0;
#pragma unroll
      for (int q = 0; q < 32; ++q) {
        const uint32_t keys = __ballot_sync(kAllLanes, queries >> q & 1);
        if (lane == q) mine = keys;
      }
      if (query < args.along) plan_bits[query * args.bits_stride + first_line / 32 + half] = mine;
    }
  }
};

// Grid: one CTA per (batch, head, granule of lines, strip along them), strips innermost.
template <DType kType, Access kAccess>
__global__ void __launch_bounds__(kPlanThreads)
    flashsdpa_mask_plan_sm90(const __grid_constant__ MaskPlanArgs args) {
  using Bits = typename MaskElement<kType>::Bits;
  constexpr int kVector = kVectorBytes / sizeof(Bits);
  constexpr int kStrip = kAccess == Access::kVector ? kWarpSize * kVector : kGranule;  // elements
  constexpr int kStripGranules = kStrip / kGranule, kStripWords = kStrip / 32;
  constexpr int kGranuleLanes = kWarpSize / kStripGranules;  // neighbouring lanes hold one granule

  __shared__ uint32_t s_kept[kPlanWarps], s_removed[kPlanWarps], s_shifted[kPlanWarps];  // bit per lane
  __shared__ uint32_t s_turned[kGranule][kStripWords + 1];

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
  int32_t* plan = args.plan + plan_index * args.plan_words;
  const StripBits<kStripWords> out{args, reinterpret_cast<uint32_t*>(plan + args.bits_offset), line_granule * kGranule,
                                   along0 / 32, s_turned};
  // Past the end the last line is read again, which changes no class.
  auto line = [&](int i) { return mask + min(line0 + i * kPlanWarps, args.lines - 1) * args.stride_line; };

  Seen<kType> seen;
  if constexpr (kAccess == Access::kVector) {
    constexpr int kHalf = Packed<kType>::kElements;
    const int64_t begin = along0 + lane * kVector, there = args.along - begin;
    ulonglong2 packed[kLinesPerWarp];
    if (there >= kVector) {
#pragma unroll
      for (int i = 0; i < kLinesPerWarp; ++i) {
        packed[i] = __ldg(reinterpret_cast<const ulonglong2*>(line(i) + begin));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kLinesPerWarp; ++i) {
        packed[i] = {0, 0};
#pragma unroll 1
        for (int e = 0; e < there; ++e) {
          const uint64_t element = static_cast<uint64_t>(__ldg(line(i) + begin + e)) << e % kHalf * (64 / kHalf);
          (e < kHalf ? packed[i].x : packed[i].y) |= element;
        }
      }
    }
    const uint64_t first = Packed<kType>::first(there), second = Packed<kType>::first(there - kHalf);
#pragma unroll
    for (int i = 0; i < kLinesPerWarp; ++i) {
      const uint32_t word = join_lanes<kVector>(seen.add(packed[i].x, first) | seen.add(packed[i].y, second) << kHalf);
      if (lane % (32 / kVector) == 0) out.put(warp + i * kPlanWarps, lane / (32 / kVector), word);
    }
  } else if (args.lines > 0) {
    uint64_t element[kLinesPerWarp][2];
    // One key stands for all.
    const auto place = [&](int half) { return args.along == 1 ? 0 : along0 + half * 32 + lane; };
    const auto there = [&](int half) { return place(half) < args.along; };
#pragma unroll
    for (int i = 0; i < kLinesPerWarp; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        element[i][half] = there(half) ? __ldg(line(i) + place(half) * args.stride_along) : Bits{0};
      }
    }
#pragma unroll
    for (int i = 0; i < kLinesPerWarp; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t word = __ballot_sync(kAllLanes, seen.add(element[i][half], Packed<kType>::first(there(half))));
        if (lane == 0) out.put(warp + i * kPlanWarps, half, word);
      }
    }
  }

  const uint32_t kept = __ballot_sync(kAllLanes, seen.kept != 0);
  const uint32_t removed = __ballot_sync(kAllLanes, seen.removed != 0);
  const uint32_t shifted = __ballot_sync(kAllLanes, seen.shifted != 0);
  if (lane == 0) {
    s_kept[warp] = kept;
    s_removed[warp] = removed;
    s_shifted[warp] = shifted;
  }
  __syncthreads();
  if (args.along_queries) out.turn(warp, lane);

  if (strip == 0 && line_granule == 0 && threadIdx.x < kPlanHeader) {
    plan[threadIdx.x] = threadIdx.x == 0 ? kPlanVersion : 0;  // the counts are summed by the second kernel
  }
  const int64_t along_granule = static_cast<int64_t>(strip) * kStripGranules + threadIdx.x;
  if (threadIdx.x >= kStripGranules || along_granule * kGranule >= args.along) return;
  uint32_t any_kept = 0, any_removed = 0, any_shifted = 0;
  for (int w = 0; w < kPlanWarps; ++w) {
    any_kept |= s_kept[w];
    any_removed |= s_removed[w];
    any_shifted |= s_shifted[w];
  }
  const uint32_t lanes = kAllLanes >> (kWarpSize - kGranuleLanes) << (threadIdx.x * kGranuleLanes);
  const GranuleClass kind = granule_class(any_kept & lanes, any_removed & lanes, any_shifted & lanes);
  const int64_t row = args.along_queries ? along_granule : line_granule;
  const int64_t col = args.along_queries ? line_granule : along_granule;
  plan[plan_row_offset(row, args.cols) + 1 + col] = plan_entry(col, kind);
  plan[plan_col_offset(col, args.rows, args.cols) + 1 + row] = plan_entry(row, kind);
}

// Grid: one warp per list, the rows and then the columns of each plan. `queries`: of the mask.
static __global__ void __launch_bounds__(kPlanThreads)
    flashsdpa_mask_plan_lists_sm90(const __grid_constant__ MaskPlanArgs args, int64_t plan_count, int64_t queries) {
  constexpr int kUnroll = 8;  // loads of a warp in flight: one round serves lists of up to 256 granules
  const int lane = threadIdx.x % kWarpSize;
  const int64_t rows = args.rows, cols = args.cols;
  const int64_t list = static_cast<int64_t>(blockIdx.x) * kPlanWarps + threadIdx.x / kWarpSize;
  const int64_t plan_index = list / (rows + cols), index = list % (rows + cols);
  if (plan_index >= plan_count) return;
  int32_t* plan = args.plan + plan_index * args.plan_words;
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
  if (is_row && cols % 2) {  // the word of each query that makes their number even
    for (int64_t q = index * kGranule + lane; q < min((index + 1) * kGranule, queries); q += kWarpSize) {
      *reinterpret_cast<int64_t*>(plan + args.bits_offset + q * args.bits_stride + 2 * cols) = 0;
    }
  }
  if (index == 0 && lane < args.bits_offset - plan_col_offset(cols, rows, cols)) {
    plan[plan_col_offset(cols, rows, cols) + lane] = 0;
  }
  if (lane != 0) return;
  words[0] = count;
  if (is_row) {
    atomicAdd(plan + 1 + kEmpty, length - count);
    atomicAdd(plan + 1 + kFull, full);
    atomicAdd(plan + 1 + kMixed, count - full);
  }
}

}  // namespace flashsdpa
