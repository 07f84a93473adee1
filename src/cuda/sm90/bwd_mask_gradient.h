// The gradient of an additive mask: what the host gives its kernel, and the kernel's compile-time shape.
#pragma once

#include <cuda_runtime_api.h>

#include "../../mask_plan.h"
#include "bwd_mask_share.h"
#include "bwd_tiles.h"

namespace flashsdpa {

// A tile is a block of the gradient; its visits are the (batch, head, block of queries, block of keys) that are summed in
// it: all along the axes in which the mask has size 1, one along the others. Parts share the visits of a tile.
struct BwdMaskArgs {
  BwdArgs bwd;        // with values in its mask; of dk, dv, dq and turns nothing is read
  void* grad;         // (batch|1, heads_q|1, seq_q|1, seq_k|1) contiguous, of mask.dtype, 16-byte aligned; every element is written
  float* sum;         // the same in float32: the parts of a tile that are done, any content before; not used by one part
  uint32_t* turns;    // of each tile, how many parts are done; 0 at the start
  uint32_t* counter;  // units taken, 0 at the start: a unit is one part of one tile
  int32_t tiles, parts;
  int32_t grad_heads, tiles_m, tiles_n;        // tiles are numbered (batch, head, queries, keys)
  int32_t batches, heads, blocks_m, blocks_n;  // of the visits of one tile
};

// The blocks of queries that BwdArgs::stats and the tensor maps are made for are those of the backward kernel (kPieces of
// them a tile); the mask's values, in float32, take the shared memory that the backward kernel has for dS and dQ.
template <int kDimClass, int kDimVClass, bool kWithTerms = false>
struct BwdMaskTile {
  using Base = BwdTile<kDimClass, kDimVClass, Masks::kValues, kWithTerms>;
  static constexpr bool kTerms = kWithTerms;
  static constexpr int kDim = kDimClass, kDimV = kDimVClass;
  static constexpr int kConsumers = 2, kBlockM = kConsumers * kConsumerRows, kBlockN = Base::kBlockN;
  static constexpr int kPieceRows = Base::kBlockM, kPieces = kBlockM / kPieceRows;
  static_assert(kBlockM % kPieceRows == 0 && kPieceRows % kConsumerRows == 0 && kBlockN % kGranule == 0);
  // At 128 columns K alone has room for a second, and comes while the visit before is under way.
  static constexpr int kStages = kDim <= 64 ? 2 : 1, kStagesK = kDim <= 128 ? 2 : 1;
  static constexpr int kVisits = 4;  // slots

  static constexpr int kThreads = (1 + kConsumers) * ptx::kWarpgroupThreads;
  static constexpr int kLoaders = Base::kLoaders;
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 64 * 1024 / kThreads / 8 * 8 * (1 + kConsumers));

  // Of one stage. Q and dO: piece after piece, each in boxes of 64 columns.
  static constexpr int kBoxes = Base::kBoxes, kBoxesV = Base::kBoxesV;
  static constexpr int kQueryBoxBytes = Base::kQueryBoxBytes, kKeyBoxBytes = Base::kKeyBoxBytes;
  static constexpr int kQPieceBytes = Base::kQBytes, kGradOutPieceBytes = Base::kGradOutBytes;
  static constexpr int kQBytes = kPieces * kQPieceBytes, kGradOutBytes = kPieces * kGradOutPieceBytes;
  static constexpr int kKBytes = Base::kKBytes, kVBytes = Base::kVBytes;
  static constexpr int kStatsFloats = Base::kStatsFloats, kStatsBytes = Base::kStatsBytes;  // of a piece

  // Shared memory, from a base aligned to 1024 bytes.
  static constexpr int kQOffset = 0;
  static constexpr int kKOffset = kQOffset + kStages * kQBytes;
  static constexpr int kGradOutOffset = kKOffset + kStagesK * kKBytes;
  static constexpr int kVOffset = kGradOutOffset + kStages * kGradOutBytes;
  // Values: those of 16 bits that TMA reaches in two stages, for two tiles; else each lane's own, as floats. With terms at 64 columns
  // there are no registers for both.
  static constexpr bool kValuesByTma = !kTerms || kDim > 64;
  static constexpr int kValuesStages = 2, kValuesBytes = kBlockM * kBlockN * kElementBytes;
  static constexpr int kValuesOffset = kVOffset + kStages * kVBytes;
  static_assert(kValuesOffset % 1024 == 0);
  static constexpr int kStatsOffset = kValuesOffset + kBlockM * kBlockN * int(sizeof(float));
  static constexpr int kSlotStream = 24, kSlotBytes = kTerms ? 48 : 16;  // with terms dropout's random bits from kSlotStream on
  static constexpr int kSlotOffset = kStatsOffset + kStages * kPieces * kStatsBytes;
  static constexpr int kUnitOffset = kSlotOffset + kVisits * kSlotBytes;
  static constexpr int kBarrierOffset = kUnitOffset + 8;
  static constexpr int kBarriers = 6 * kStages + 2 * kStagesK + 2 * kVisits + 2 * kValuesStages;
  static constexpr int kSharedBytes = kBarrierOffset + kBarriers * 8 + 1024;  // 1024: to align the base
  static_assert(kStatsBytes % 16 == 0 && kStatsOffset % 16 == 0 && kSharedBytes <= kMaxSharedBytes);
};

// One head-dim class, both dtypes.
struct BwdMaskInstance {
  int block_m, block_n;
  // `blocks` thread blocks of the current device share the units. Null, or an error text.
  const char* (*launch_bfloat16)(const BwdMaskArgs& args, uint32_t blocks, int device, cudaStream_t stream);
  const char* (*launch_float16)(const BwdMaskArgs& args, uint32_t blocks, int device, cudaStream_t stream);
};

extern const BwdMaskInstance kBwdMaskD64, kBwdMaskD128, kBwdMaskD256;
extern const BwdMaskInstance kBwdMaskTermsD64, kBwdMaskTermsD128, kBwdMaskTermsD256;  // with terms

// How the work on a problem with an additive mask is shared out among so many processors.
struct BwdMaskPlan : BwdMaskShare {
  const BwdMaskInstance* instance;
  int64_t scratch_bytes;
};
BwdMaskPlan bwd_plan_mask(const Problem& p, int processors);

// Behind flashsdpa_bwd_pre_sm90, into BackwardParams::dmask. `scratch`: aligned to 256.
const char* bwd_launch_mask(const BackwardParams& b, const BwdMaskPlan& plan, const BwdArgs& bwd, void* scratch, int device,
                            int processors, cudaStream_t stream);

}  // namespace flashsdpa
