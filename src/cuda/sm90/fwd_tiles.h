// Compile-time shape of the forward kernel for each head-dim class: tiles, stages, registers, shared memory.
//
// A class (kDim of q and k, kDimV of v and out) carries every smaller pair: columns past the tensor read as zero.
#pragma once

#include "../../ptx/warpgroup.cuh"
#include "fwd_args.h"

namespace flashsdpa {

constexpr int kElementBytes = 2;
constexpr int kBoxColumns = 64;  // a row of a box is 128 bytes, the width of the swizzle
constexpr int kBoxRowBytes = kBoxColumns * kElementBytes;
constexpr int kTileSlots = 2;      // tiles on their way from the producer to the consumers
constexpr int kTileSlotBytes = 32;
constexpr int kWalkSlots = 4;      // masked: blocks on their way from the walker to the loader
constexpr int kMaxSharedBytes = 227 * 1024;

struct FwdChoice {
  int block_n;
  int stages;    // of K, and of V
  bool own_out;  // the output is staged in shared memory of its own, not in Q's: Q of the next tile may load meanwhile
};

// Measured (NOTES.md). Three consumers have 160 registers each, two have 232. One consumer waits for memory: about 128
// KB of K and V on their way, in blocks no larger than its softmax needs to keep up.
// Masked tiles have key blocks of whole granules, and those with values leave room for them.
constexpr FwdChoice fwd_choice(int dim, int dim_v, int consumers, Masks masks) {
  if (consumers == 1) {
    return {.block_n = dim <= 64 ? 128 : 64, .stages = dim <= 128 ? 4 : 2, .own_out = true};
  }
  if (masks == Masks::kValues && dim > 64) return {.block_n = dim <= 128 ? 128 : 64, .stages = 2, .own_out = false};
  if (dim <= 64) return {.block_n = consumers == 3 ? 112 : 128, .stages = 2, .own_out = true};
  if (dim <= 96) return {.block_n = 96, .stages = 2, .own_out = true};
  if (dim <= 128) return {.block_n = 128, .stages = 2, .own_out = true};
  if (dim <= 192) return {.block_n = dim_v <= 128 ? 128 : 112, .stages = 2, .own_out = false};
  return {.block_n = 64, .stages = 2, .own_out = false};
}

// kConsumerGroups: warpgroups that compute; a tile is 64 rows of each. kFewQueries: rows may be (query, head) pairs,
// and keys may be split (FwdFew); else rows are queries. With masks, blocks of keys come from a mask plan (fwd_blocks.cuh).
// kWithTerms: scores may have a soft cap, slopes and sinks, and weights be dropped (fwd_terms.cuh); these kernels do without a
// mask plan too, where there is no mask.
template <int kDimClass, int kDimVClass, int kConsumerGroups, bool kFewQueries, Masks kMasks, bool kWithTerms = false>
struct FwdTile {
  static constexpr FwdChoice kChoice = fwd_choice(kDimClass, kDimVClass, kConsumerGroups, kMasks);
  static constexpr int kDim = kDimClass, kDimV = kDimVClass;
  static constexpr int kConsumers = kConsumerGroups;
  static constexpr bool kFew = kFewQueries, kTerms = kWithTerms;
  static constexpr bool kMasked = kMasks != Masks::kNone, kValues = kMasks == Masks::kValues;
  static_assert(kValues || !kTerms);
  static constexpr int kBlockM = kConsumers * kConsumerRows, kBlockN = kChoice.block_n;
  static constexpr int kStages = kChoice.stages;
  static constexpr bool kOwnOut = kChoice.own_out;
  // Masked: a block is taken up while its products run, or, where O leaves no registers for both, before.
  static constexpr bool kTakeUnderProducts = kDimV <= 128;
  static constexpr int kThreads = (1 + kConsumers) * ptx::kWarpgroupThreads;

  // The roles share what the block has at launch, equal parts of the register file of 64 K in steps of 8 a thread; a role that
  // asks for more waits for ever. Two roles have 255 each from the start.
  static constexpr bool kHandOver = kConsumers > 1;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kMasked ? 56 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kMasked ? 224 : 232;
  static constexpr int kLaunchRegisters = 64 * 1024 / kThreads / 8 * 8 * (1 + kConsumers);
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= kLaunchRegisters || !kHandOver);

  // Boxes of 64 columns; the last one of class 96 is half used.
  static constexpr int kBoxes = (kDim + kBoxColumns - 1) / kBoxColumns;
  static constexpr int kBoxesV = (kDimV + kBoxColumns - 1) / kBoxColumns;
  static constexpr int kQueryBoxBytes = kConsumerRows * kBoxRowBytes, kKeyBoxBytes = kBlockN * kBoxRowBytes;
  static constexpr int kQBytes = kBoxes * kQueryBoxBytes, kOutBytes = kBoxesV * kQueryBoxBytes;  // of one consumer
  static constexpr int kKBytes = kBoxes * kKeyBoxBytes, kVBytes = kBoxesV * kKeyBoxBytes;        // of one stage
  static_assert(kKeyBoxBytes % 1024 == 0, "the swizzle repeats every 1024 bytes");
  static_assert(kOwnOut || kOutBytes <= kQBytes);

  // Shared memory, from a base aligned to 1024 bytes.
  static constexpr int kQOffset = 0;
  static constexpr int kKOffset = kQOffset + kConsumers * kQBytes;
  static constexpr int kVOffset = kKOffset + kStages * kKBytes;
  static constexpr int kOwnOutOffset = kVOffset + kStages * kVBytes;
  static constexpr int kOutOffset = kOwnOut ? kOwnOutOffset : kQOffset;
  static constexpr int kOutStride = kOwnOut ? kOutBytes : kQBytes;
  // What a mask says of blocks on their way, of one consumer: one of float32 values, or two of bits.
  static constexpr int kMaskOffset = kOwnOutOffset + (kOwnOut ? kConsumers * kOutBytes : 0);
  static constexpr int kMaskBytes = kValues ? kConsumerRows * kBlockN * 4 : kMasked ? 2 * kConsumerRows * kBlockN / 8 : 0;
  static constexpr int kBarrierOffset = kMaskOffset + kConsumers * kMaskBytes;
  static constexpr int kBarriers = 2 * kConsumers + 4 * kStages + 2 * kTileSlots + (kMasked ? 2 * kWalkSlots : 0);
  static constexpr int kTileOffset = (kBarrierOffset + kBarriers * 8 + 15) / 16 * 16;
  static constexpr int kTileBlockOffset = 24;  // in a slot, after FwdWork: masked, the word of the tile's first block
  static constexpr int kWalkOffset = kTileOffset + kTileSlots * kTileSlotBytes;
  static constexpr int kBlockOffset = kWalkOffset + (kMasked ? kWalkSlots * kTileSlotBytes : 0);  // masked: a word with each stage of K
  static constexpr int kStreamOffset = kBlockOffset + (kMasked ? kStages * 4 : 0);
  static constexpr int kStreamBytes = kTerms ? ptx::kWarpgroupThreads * 4 : 0;  // of one consumer: dropout's random bits
  static constexpr int kSharedBytes = kStreamOffset + kConsumers * kStreamBytes + 1024;  // 1024: to align the base
  static_assert(kSharedBytes <= kMaxSharedBytes);
};

}  // namespace flashsdpa
