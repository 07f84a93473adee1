// Compile-time shape of the backward kernel for each head-dim class: tiles, stages, registers, shared memory.
//
// Up to 128 columns a consumer warpgroup owns 64 keys (`kByKeys`): scores, dK and dV of these keys are its own, P and dS
// stay in its registers. Beyond, dK and dV of 64 keys would not fit its registers, and it owns columns instead:
// consumers share the keys of the scores, and P and dS go through shared memory.
#pragma once

#include "bwd_args.h"
#include "fwd_tiles.h"
#include "ring.cuh"

namespace flashsdpa {

// Bytes of an additive mask's values that a warp asks for and reads at a time (by keys).
constexpr int kBwdValuesPart = 1024;

struct BwdChoice {
  int block_m, block_n, consumers;
  int stages;           // of Q
  int stages_grad_out;  // of dO
};

// Masked tiles are whole granules of 64 x 64; a key block of one granule fits two consumers of 32 keys.
constexpr BwdChoice bwd_choice(int dim, int dim_v, Masks masks) {
  if (masks != Masks::kNone && dim > 128) return {.block_m = 64, .block_n = 64, .consumers = 2, .stages = 2, .stages_grad_out = 2};
  if (dim <= 64) return {.block_m = 128, .block_n = 128, .consumers = 2, .stages = 2, .stages_grad_out = 2};
  if (dim <= 128) return {.block_m = 64, .block_n = 128, .consumers = 2, .stages = 2, .stages_grad_out = 2};
  if (dim <= 192) return {.block_m = 64, .block_n = 96, .consumers = 3, .stages = 2, .stages_grad_out = dim_v <= 128 ? 2 : 1};
  return {.block_m = 64, .block_n = 80, .consumers = 2, .stages = 2, .stages_grad_out = 1};
}

// With masks blocks of queries come from a mask plan (bwd_blocks.cuh). kWithTerms: scores have a soft cap, slopes or dropout, and
// there may be no mask (bwd_terms.cuh).
template <int kDimClass, int kDimVClass, Masks kMasks = Masks::kNone, bool kWithTerms = false>
struct BwdTile {
  static constexpr BwdChoice kChoice = bwd_choice(kDimClass, kDimVClass, kMasks);
  static constexpr int kDim = kDimClass, kDimV = kDimVClass;
  static constexpr int kBlockM = kChoice.block_m, kBlockN = kChoice.block_n;
  static constexpr int kConsumers = kChoice.consumers;
  static constexpr int kStages = kChoice.stages, kStagesGradOut = kChoice.stages_grad_out;
  static constexpr bool kByKeys = kDim <= 128, kTerms = kWithTerms;
  static constexpr bool kMasked = kMasks != Masks::kNone, kValues = kMasks == Masks::kValues;
  static_assert(kValues || !kTerms);
  static_assert(!kByKeys || kBlockN == kConsumers * kConsumerRows);

  // The last two warps of the producer warpgroup load. The others see to dQ: each adds one consumer's; or, where there is
  // no room to stage it and consumers add their own, one keeps the turns of a fixed order.
  static constexpr int kThreads = (1 + kConsumers) * ptx::kWarpgroupThreads;
  static constexpr bool kStaged = kByKeys || kConsumers == 3;
  static constexpr int kAdders = kStaged ? kConsumers : 1;  // warps
  static constexpr int kLoaders = (kWarpsPerGroup - (kAdders > 2 ? kAdders : 2)) * ptx::kWarpLanes;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kMasked ? 56 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kMasked ? 224 : 232;
  // What the block has at launch, in steps of 8 a thread; a role that asks for more waits for ever.
  static constexpr int kLaunchRegisters = 64 * 1024 / kThreads / 8 * 8 * (1 + kConsumers);
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= kLaunchRegisters);

  // Boxes of 64 columns; the last one of class 96 is half used.
  static constexpr int kBoxes = (kDim + kBoxColumns - 1) / kBoxColumns;
  static constexpr int kBoxesV = (kDimV + kBoxColumns - 1) / kBoxColumns;
  static constexpr int kQueryBoxBytes = kBlockM * kBoxRowBytes, kKeyBoxBytes = kBlockN * kBoxRowBytes;
  static constexpr int kQBytes = kBoxes * kQueryBoxBytes, kGradOutBytes = kBoxesV * kQueryBoxBytes;  // of one stage
  static constexpr int kKBytes = kBoxes * kKeyBoxBytes, kVBytes = kBoxesV * kKeyBoxBytes;
  static_assert(kQueryBoxBytes % 1024 == 0 && kKeyBoxBytes % 1024 == 0, "the swizzle repeats every 1024 bytes");
  // One buffer of P or dS: boxes of kBlockN keys x 64 queries (by keys), or of kBlockM queries x 64 keys.
  static constexpr int kScoreBytes =
      kByKeys ? kBlockM / kBoxColumns * kKeyBoxBytes : (kBlockN + kBoxColumns - 1) / kBoxColumns * kQueryBoxBytes;
  // One consumer's share of dQ on its way to the adders; the second one's of class 96 is shorter.
  static constexpr int kPieceBytes = kBwdPieceFloats * int(sizeof(float));
  // By keys Q and dO are freed before the other consumer's dS is there. With values at 64 columns that spilled.
  static constexpr bool kFreeEarly = kByKeys && (kDim > 64 || !kValues || kTerms);
  // With a mask a piece is freed in two parts: the consumer lays down the first of the next while the second is read.
  static constexpr int kPieceParts = kFreeEarly && kMasked ? 2 : 1;
  static constexpr int kDqFloats = kBlockM * kDim;  // of one query block in the scratch memory

  // Shared memory, from a base aligned to 1024 bytes. By keys: K twice, so that the next tile's is there when a tile ends; two buffers
  // of dS, then dQ. When a tile is done dV takes the place of dS, and dK that of its own K, so that neither waits for the last
  // dQ to be added. With values there is no room for that, and dV and dK take the place of dS and dQ. By columns: one buffer of P and
  // one of dS; dV and dK take the place of V and K.
  static constexpr bool kKeysAhead = kByKeys && !kValues;
  static constexpr int kStagesK = kKeysAhead ? 2 : 1;
  static constexpr int kKOffset = 0;
  static constexpr int kVOffset = kKOffset + kStagesK * kKBytes;
  static constexpr int kQOffset = kVOffset + kVBytes;
  static constexpr int kGradOutOffset = kQOffset + kStages * kQBytes;
  static constexpr int kScoreOffset = kGradOutOffset + kStagesGradOut * kGradOutBytes;
  static constexpr int kPieceOffset = kScoreOffset + 2 * kScoreBytes;
  static constexpr int kPiecesEnd = kPieceOffset + (kStaged ? kConsumers * kPieceBytes : 0);
  // Values of an additive mask, of one warp: by columns a block of them, also of float32; by keys the same at 128 columns, and three
  // quarters of a block of 16-bit values at 64, where there is no room for more.
  static constexpr int kValuesBytes = !kValues ? 0 : !kByKeys ? 2048 : kDim <= 64 ? 3 * kBwdValuesPart : 4 * kBwdValuesPart;
  // By keys: whether there are registers to add them while dV and dK of the block before are under way.
  static constexpr bool kValuesUnderSums = kValues && !kTerms && kDim > 64;
  // Beyond 64 columns those of 16 bits lie in boxes of 64 keys instead, in stages that are filled with those of Q where TMA can.
  static constexpr bool kValuesWithQ = kValues && kDim > 64;
  static constexpr int kValuesBoxBytes = kBlockM * kBoxRowBytes, kValuesBoxes = kBlockN / kBoxColumns;
  static_assert(!kValuesWithQ || kStages * kValuesBoxes * kValuesBoxBytes == kConsumers * kWarpsPerGroup * kValuesBytes);
  static constexpr int kValuesOffset = kPiecesEnd;
  static_assert(!kValues || kValuesOffset % 1024 == 0);
  static constexpr int kStatsOffset = kValuesOffset + kConsumers * kWarpsPerGroup * kValuesBytes;
  static constexpr int kDvOffset = kByKeys ? kScoreOffset : kVOffset;
  static constexpr int kDkOffset = kByKeys && !kKeysAhead ? kScoreOffset + kVBytes : kKOffset;  // of the first stage of K
  static_assert(!kByKeys || (kKeysAhead ? kDvOffset + kVBytes <= kPieceOffset : kDkOffset + kKBytes <= kPiecesEnd));
  static constexpr int kStatsFloats = kBwdStats * kBlockM + kBwdFlags, kStatsBytes = kStatsFloats * int(sizeof(float));
  // A slot for each stage: see bwd_visit_word. Of a mask, more of them: the adders read them too, behind the consumers. What
  // an adder reads is at most four blocks behind what the loader writes.
  static constexpr int kVisits = kMasked ? 8 : kStages;
  static constexpr int kVisitOffset = kStatsOffset + kStages * kStatsBytes;
  static constexpr int kBarrierOffset = kVisitOffset + kVisits * 8;
  static constexpr int kBarriers = 2 + 2 * kStagesK + 2 * kStages + 2 * kStagesGradOut + 4 + 3 + 6 + 2 * kTileSlots;
  static constexpr int kTileOffset = (kBarrierOffset + kBarriers * 8 + 15) / 16 * 16;
  static constexpr int kStreamOffset = kTileOffset + kTileSlots * kTileSlotBytes;
  static constexpr int kStreamBytes = kTerms ? 16 : 0;  // of one stage of Q: dropout's random bits
  static constexpr int kSharedBytes = kStreamOffset + kStages * kStreamBytes + 1024;  // 1024: to align the base
  static_assert(kStatsBytes % 16 == 0 && kStatsOffset % 16 == 0 && kSharedBytes <= kMaxSharedBytes);
};

}  // namespace flashsdpa
