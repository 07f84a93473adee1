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
#include "../../ptx/grid.cuh"
#include "mask_plan_lane.cuh"

namespace flashsdpa {

constexpr int kPlanWarps = kGranule / kLinesPerWarp;  // per CTA, both kernels
constexpr int kPlanThreads = kPlanWarps * kWarpSize;

enum class Access {
  kElement,  // any strides: a lane loads single elements
  kVector,   // unit stride along a line, lines aligned to 16 bytes and a multiple of them long: a lane loads 16 bytes
  kWords,    // elements of one or two bytes, unit stride, any alignment: a lane loads the words its 16 bytes lie in
};

// Divides numbers below 2^31 by what the host knows: a multiplication and a shift. 2^shift is at least 2^31 * divisor, so the
// rounding of the factor adds less than 1 / divisor to any quotient.
struct Divisor {
  uint32_t divisor = 1, factor = 1u << 31, shift = 31;
  Divisor() = default;
  explicit Divisor(uint32_t divisor) : divisor(divisor) {
    while (uint64_t{1} << (shift - 31) < divisor) ++shift;
    factor = static_cast<uint32_t>(((uint64_t{1} << shift) + divisor - 1) / divisor);
  }
  // Returns the quotient and leaves the remainder.
  __device__ uint32_t split(uint32_t* number) const {
    const uint32_t quotient = static_cast<uint32_t>(static_cast<uint64_t>(*number) * factor >> shift);
    *number -= quotient * divisor;
    return quotient;
  }
};

struct MaskPlanArgs {
  const void* mask;
  int64_t stride_batch, stride_head, stride_line, stride_along;  // in elements
  int64_t lines, along;            // sizes; along is 0 if the mask has no element
  Divisor heads;                   // of the mask: 1 where it broadcasts
  Divisor line_granules, strips;   // of one (batch, head), each at least 1
  bool along_queries;              // a line runs over queries, not keys
  int32_t* plan;                   // (batch, heads, plan_words)
  int64_t plans;                   // batch * heads
  int64_t plan_words, bits_offset;
  uint32_t bits_stride;
  int64_t rows, cols;  // granules over queries and over keys
};

// CTAs of the first kernel on a processor, by the registers of what is in flight.
template <DType kType, Access kAccess>
constexpr int plan_blocks() {
  constexpr int kSize = sizeof(typename MaskElement<kType>::Bits);
  if (kAccess == Access::kVector) return kSize < 4 ? 5 : 6;
  return kAccess == Access::kWords || kSize == 8 ? 4 : 5;
}

// What has been seen of a granule, each true if nonzero: some element keeps its score, removes it, or adds a value to it.
struct Seen {
  uint32_t kept = 0, removed = 0, shifted = 0;
};

FLASHSDPA_HOST_DEVICE inline GranuleClass granule_class(bool kept, bool removed, bool shifted) {
  return shifted ? kMixed : !removed ? kFull : kept ? kBits : kEmpty;
}

// The entry of a granule in a full list; 0 stands for an empty granule.
__device__ inline int32_t plan_entry(int64_t granule, GranuleClass granule_class) {
  return granule_class == kEmpty ? 0 : static_cast<int32_t>(granule << 2 | granule_class);
}

// The strip of a CTA: 64 lines, kWords words of 32 elements along each. Its bits go to the plan where lines are queries; where
// they are keys, to shared memory, from where each warp turns blocks of 32 x 32 bits around.
template <int kWords>
struct Strip {
  const MaskPlanArgs& args;
  uint32_t* plan_bits;             // of this (batch, head)
  uint32_t (*turned)[kWords + 1];  // 64 lines; the odd length keeps a column of it in different banks
  int64_t first_line, first_word;
  int lines, words, elements;      // that exist: words of the plan, elements of the mask
  uint32_t* line_bits;             // of the first line, from the first word on

  __device__ Strip(const MaskPlanArgs& args, int32_t* plan, uint32_t (*turned)[kWords + 1], int64_t line_granule, int64_t strip)
      : args(args), plan_bits(reinterpret_cast<uint32_t*>(plan + args.bits_offset)), turned(turned),
        first_line(line_granule * kGranule), first_word(strip * kWords),
        lines(static_cast<int>(min(args.lines - first_line, kGranule))),
        words(static_cast<int>(min(2 * args.cols - first_word, int64_t{kWords}))),
        elements(static_cast<int>(min(args.along - 32 * first_word, int64_t{32 * kWords}))),
        line_bits(plan_bits + first_line * args.bits_stride + first_word) {}

  // The same word of lines `step` apart, from `line` on.
  template <int kCount>
  __device__ void put(int line, int step, int word, const uint32_t (&bits)[kCount]) const {
    if (args.along_queries) {
#pragma unroll
      for (int r = 0; r < kCount; ++r) turned[line + r * step][word] = bits[r];
    } else if (word < words) {
      uint32_t* to = line_bits + static_cast<uint64_t>(static_cast<uint32_t>(line)) * args.bits_stride + word;
#pragma unroll
      for (int r = 0; r < kCount; ++r) {
        if (line + r * step < lines) to[r * step * static_cast<int64_t>(args.bits_stride)] = bits[r];
      }
    }
  }

  // From the line before to where `line` is read: past the end the last line is read again, which changes no class.
  template <typename Bits>
  __device__ void next(int line, const Bits*& from) const {
    if (line < lines) from += args.stride_line;
  }

  // Of masks along queries; after a barrier. Lines are keys: the two words of each query that this granule of keys is.
  __device__ void turn(int warp, int lane) const {
    for (int block = warp; block < 2 * kWords; block += kPlanWarps) {
      const int half = block % 2, word = block / 2;  // of the keys; of the queries
      const int64_t query = (first_word + word) * 32 + lane;
      // One key stands for all.
      const bool there = args.lines == 1 || 32 * half + lane < lines;
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

// What a lane has seen of a warp's lines, the first of which is `line`, and the strip's part of it `from`. The bits are put.
template <DType kType, Access kAccess, int kStripWords>
__device__ Seen see_vectors(const Strip<kStripWords>& strip, const typename LaneBits<kType>::Bits* from, int line, int lane) {
  using Lane = LaneBits<kType>;
  constexpr int kVector = Lane::kVector, kFields = Lane::kFields, kPerWord = kVector / 4;
  from += lane * kVector;
  const int count = strip.elements - lane * kVector;
  uint32_t x[kLinesPerWarp][4] = {};
  if constexpr (kAccess == Access::kVector) {
    if (count > 0) {
#pragma unroll
      for (int i = 0; i < kLinesPerWarp; ++i, strip.next(line + i, from)) load_vector(from, x[i]);
    }
  } else if ((strip.first_word > 0 || lane > 0) && count >= kVector + kPerWord) {  // all words within the line
#pragma unroll
    for (int i = 0; i < kLinesPerWarp; ++i, strip.next(line + i, from)) load_words(from, x[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kLinesPerWarp; ++i, strip.next(line + i, from)) load_elements(from, count, x[i]);
  }
  Lane bits;
#pragma unroll
  for (int i = 0; i < kLinesPerWarp; ++i) bits.add(i, x[i]);

  uint32_t fields[Lane::kWords];
  bits.kept(fields);
  const uint32_t existing = Lane::existing(count);
  Seen seen{0, 0, bits.any_shifted()};
#pragma unroll
  for (int r = 0; r < Lane::kWords; ++r) {
    seen.removed |= ~fields[r] & existing;
    fields[r] &= existing;
    seen.kept |= fields[r];
  }
  Lane::exchange(fields, lane);
  const int field = lane % kFields;
  if (field < kLinesPerWarp) strip.put(line + field, kFields, lane / kFields, fields);
  return seen;
}

// The same by elements, kGranule of them a line; one key stands for all.
template <DType kType>
__device__ Seen see_elements(const Strip<2>& strip, const typename MaskElement<kType>::Bits* from, int line, int lane) {
  using Element = MaskElement<kType>;
  using Bits = typename Element::Bits;
  const bool one = strip.args.along == 1;
  bool exists[2];
  int64_t place[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    exists[half] = one || half * 32 + lane < strip.elements;
    place[half] = one ? 0 : (half * 32 + lane) * strip.args.stride_along;
  }
  Bits element[kLinesPerWarp][2];
#pragma unroll
  for (int i = 0; i < kLinesPerWarp; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) element[i][half] = exists[half] ? __ldg(from + place[half]) : Bits{0};
    strip.next(line + i + 1, from);
  }
  Seen seen;
  uint32_t mine[1] = {};  // lane 2 * i + half has a word
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t all = __ballot_sync(kAllLanes, exists[half]);
#pragma unroll
    for (int i = 0; i < kLinesPerWarp; ++i) {
      const bool kept = element[i][half] != Element::kRemoved;
      const uint32_t word = __ballot_sync(kAllLanes, kept) & all;
      if (lane == 2 * i + half) mine[0] = word;
      seen.kept |= word;
      seen.removed |= word ^ all;
      // +0 and -0 add nothing; of the rest, what is no -inf adds.
      if (kType != DType::kBool && kept && (element[i][half] & Element::kMagnitude) != 0) seen.shifted = 1;
    }
  }
  if (lane < 2 * kLinesPerWarp) strip.put(line + lane / 2, 0, lane % 2, mine);
  return seen;
}

// Grid: one CTA per (batch, head, granule of lines, strip along them), strips innermost.
template <DType kType, Access kAccess>
__global__ void __launch_bounds__(kPlanThreads, plan_blocks<kType, kAccess>())
    flashsdpa_mask_plan_sm90(const __grid_constant__ MaskPlanArgs args) {
  using Bits = typename MaskElement<kType>::Bits;
  constexpr int kStrip = kAccess == Access::kElement ? kGranule : kWarpSize * LaneBits<kType>::kVector;  // elements
  constexpr int kStripGranules = kStrip / kGranule, kStripWords = kStrip / 32;
  constexpr int kGranuleLanes = kWarpSize / kStripGranules;  // neighbouring lanes hold one granule

  __shared__ uint32_t s_kept[kPlanWarps], s_removed[kPlanWarps], s_shifted[kPlanWarps];  // bit per lane
  __shared__ uint32_t s_turned[kGranule][kStripWords + 1];

  ptx::launch_dependents();  // the lists kernel waits for the end of this one
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  uint32_t strip_index = blockIdx.x;
  uint32_t line_granule = args.strips.split(&strip_index);
  const uint32_t plan_index = args.line_granules.split(&line_granule);
  uint32_t head = plan_index;
  const uint32_t batch = args.heads.split(&head);

  int32_t* plan = args.plan + plan_index * args.plan_words;
  const Strip<kStripWords> strip(args, plan, s_turned, line_granule, strip_index);
  const int line = warp * kLinesPerWarp;
  const Bits* from = static_cast<const Bits*>(args.mask) + batch * args.stride_batch + head * args.stride_head +
                     (strip.first_line + min(line, strip.lines - 1)) * args.stride_line +
                     static_cast<int64_t>(strip_index) * kStrip * args.stride_along;

  Seen seen;
  if constexpr (kAccess != Access::kElement) {
    seen = see_vectors<kType, kAccess>(strip, from, line, lane);
  } else if (args.lines > 0) {
    seen = see_elements<kType>(strip, from, line, lane);
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
  if (args.along_queries) strip.turn(warp, lane);

  if (strip_index == 0 && line_granule == 0 && threadIdx.x < kPlanHeader) {
    plan[threadIdx.x] = threadIdx.x == 0 ? kPlanVersion : 0;  // the counts are summed by the second kernel
  }
  const int64_t along_granule = static_cast<int64_t>(strip_index) * kStripGranules + threadIdx.x;
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

// Grid: one warp per list, the rows and then the columns of each plan. Launched behind the first kernel.
static __global__ void __launch_bounds__(kPlanThreads)
    flashsdpa_mask_plan_lists_sm90(const __grid_constant__ MaskPlanArgs args) {
  constexpr int kUnroll = 8;  // loads of a warp in flight: one round serves lists of up to 256 granules
  const int lane = threadIdx.x % kWarpSize;
  const int64_t rows = args.rows, cols = args.cols;
  const int64_t list = static_cast<int64_t>(blockIdx.x) * kPlanWarps + threadIdx.x / kWarpSize;
  const int64_t plan_index = list / (rows + cols), index = list % (rows + cols);
  if (plan_index >= args.plans) return;
  int32_t* plan = args.plan + plan_index * args.plan_words;
  const bool is_row = index < rows;
  const int length = static_cast<int>(is_row ? cols : rows);
  int32_t* words = plan + (is_row ? plan_row_offset(index, cols) : plan_col_offset(index - rows, rows, cols));
  int32_t* entries = words + 1;

  ptx::wait_for_grid_before();
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
  const int64_t queries = args.along_queries ? args.along : args.lines;
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
