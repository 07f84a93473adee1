// Plain structs handed to kernels. No torch, no CUDA, no Python here.
//
// Conventions: M = queries, N = keys everywhere. Strides are in elements, in axis order (batch, head, row, column).
// A stride of 0 is a broadcast axis, read in place. `scale` is the caller's, already resolved from the caller's D.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flashsdpa {

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3, kBool = 4 };
constexpr int kDTypeCount = 5;

inline int64_t dtype_size(DType t) {
  switch (t) {
    case DType::kFloat64: return 8;
    case DType::kFloat32: return 4;
    case DType::kBool: return 1;
    default: return 2;
  }
}

struct View {
  void* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};
};

struct ConstView {
  const void* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};
};

// The mask, (batch|1, heads_q|1, seq_q|1, seq_k|1): bool (true takes part) or an additive bias. `size` keeps the 1s.
struct MaskView {
  const void* data = nullptr;  // null: no mask, or one that its plan alone describes: which scores are kept
  DType dtype = DType::kBool;
  int64_t size[4] = {1, 1, 1, 1};
  int64_t stride[4] = {0, 0, 0, 0};  // 0 where size is 1
};

// The mask plan (mask_plan.h): int32 (mask batch|1, mask heads|1, words), contiguous.
struct PlanView {
  const int32_t* data = nullptr;  // null: every granule of the mask counts as mixed
  int64_t stride_batch = 0;       // in words; 0 where the mask broadcasts
  int64_t stride_head = 0;
};

// Key j takes part for query i when i + lo <= j <= i + hi. Causal, both alignments, and windows are such bands.
struct Band {
  static constexpr int64_t kOpen = INT64_MAX / 4;
  int64_t lo = -kOpen;
  int64_t hi = kOpen;
  bool open() const { return lo == -kOpen && hi == kOpen; }
};

// A number for each (batch, query head).
struct HeadView {
  const float* data = nullptr;  // null: not given
  int64_t stride_batch = 0;     // 0 where all batches share them
  int64_t stride_head = 0;
  float at(int64_t batch, int64_t head) const { return data[batch * stride_batch + head * stride_head]; }
};

// Weights are dropped behind the softmax, those that dropout.h says; the log-sum-exp knows nothing of it.
struct Dropout {
  const int64_t* seed = nullptr;  // null: no dropout; in the memory of the kernel's device, as the offset
  const int64_t* offset = nullptr;
  uint32_t kept = 1 << 16;  // of 2^16 weights; 0: none
  double rescale = 1.0;     // of the kept weights: 2^16 / kept, so that their mean is what it was; 0 where kept is
};

// How a CPU kernel gets its threads: the caller's pool. run() calls task(context, worker) once for each worker in
// [0, workers), each on its own thread where the pool allows, and returns when all are done.
struct ThreadPool {
  int threads = 1;
  void (*run)(int workers, void (*task)(void* context, int worker), void* context) = nullptr;
};

struct Problem {
  int64_t batch = 0, heads_q = 0, heads_kv = 0, seq_q = 0, seq_k = 0;
  int64_t dim = 0;    // of q and k
  int64_t dim_v = 0;  // of v and out
  DType dtype = DType::kFloat32;
  double scale = 1.0;
  Band band;
  MaskView mask;
  PlanView plan;
  double softcap = 0.0;  // above 0: scaled scores become softcap * tanh(score / softcap), before slopes and mask
  HeadView slopes;       // ALiBi: what is taken off a score for each key between query + diagonal and key
  int64_t diagonal = 0;
  Dropout dropout;
  HeadView sinks;  // a logit more in each row's softmax, without a value; lse has it too
  // The same bits for a sequence in any batch: what they depend on is chosen for planned_batch() sequences.
  bool batch_invariant = false;
  bool allow_tf32 = false;  // CUDA, float32: operands of products may be rounded to TF32, as torch allows its own matmul
};

inline int64_t planned_batch(const Problem& p) { return p.batch_invariant ? std::min<int64_t>(p.batch, 1) : p.batch; }

inline bool has_mask(const Problem& p) { return p.mask.data || p.plan.data; }
// One that keeps or removes scores, as a plan alone does.
inline bool has_bool_mask(const Problem& p) { return has_mask(p) && (p.mask.dtype == DType::kBool || !p.mask.data); }

struct ForwardParams {
  Problem problem;
  ConstView q;  // (batch, heads_q, seq_q, dim), last stride 1
  ConstView k;  // (batch, heads_kv, seq_k, dim), last stride 1
  ConstView v;  // (batch, heads_kv, seq_k, dim_v), last stride 1
  View out;     // (batch, heads_q, seq_q, dim_v), last stride 1
  void* lse;    // (batch, heads_q, seq_q) contiguous, natural log; float32, float64 for float64 inputs
  int32_t* counter = nullptr;  // CUDA: 4 bytes of scratch, any content; null: tiles are not handed out dynamically
  // CUDA: the entry's scratch_bytes, 16-byte aligned, any content; null: the keys of a tile are not split among blocks.
  void* scratch = nullptr;
};

struct BackwardParams {
  Problem problem;
  ConstView grad_out;    // as out, any strides (0 too) but the last, which is 1 or 0
  const void* grad_lse;  // (batch, heads_q, seq_q) contiguous, the type of lse; null: no gradient
  ConstView q, k, v, out;
  const void* lse;
  View dq, dk, dv;  // the layout of q, k, v; last stride 1; all three null, or all three given
  void* dmask;      // contiguous, mask.size; CPU: accumulation type (float32, float64), zeroed; CUDA: mask.dtype, any content; null: not wanted
  float* dsinks = nullptr;  // (heads_q) contiguous, any content; null: not wanted
  bool deterministic = false;  // the same call gives the same bits; CPU kernels always do
  void* scratch = nullptr;     // CUDA: KernelEntry::scratch_bytes of it, aligned to 256, any content
};

struct MaskPlanParams {
  MaskView mask;
  int32_t* plan;  // (mask.size[0], mask.size[1], plan_words(mask.size[2], mask.size[3])) contiguous
};

}  // namespace flashsdpa
