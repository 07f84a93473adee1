// Launches the two mask-plan kernels: chooses how the mask is walked from its strides, nothing else.
#include <algorithm>

#include "../common/status.h"
#include "../launchers.h"
#include "launch_behind.h"
#include "mask_plan_kernel.cuh"

namespace flashsdpa {
namespace {

// A plan entry holds the granule index above two bits of class.
constexpr int64_t kMaxGranules = int64_t{1} << 29;

int64_t ceil_div(int64_t n, int64_t d) { return (n + d - 1) / d; }

Access access_of(const MaskPlanArgs& args, int64_t element_bytes) {
  if (args.stride_along != 1) return Access::kElement;
  const int64_t steps = args.stride_batch | args.stride_head | args.stride_line | args.along;
  const int64_t address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(args.mask));
  if ((address | steps * element_bytes) % kVectorBytes == 0) return Access::kVector;
  return element_bytes < 4 ? Access::kWords : Access::kElement;  // of 4 bytes and more, elements are coalesced loads as good
}

template <DType kType>
const char* launch_classify(MaskPlanArgs args, cudaStream_t stream) {
  constexpr int64_t kBytes = sizeof(typename MaskElement<kType>::Bits);
  const Access access = access_of(args, kBytes);
  const int64_t strip = access == Access::kElement ? kGranule : kWarpSize * kVectorBytes / kBytes;
  const int64_t line_granules = std::max<int64_t>(1, plan_granules(args.lines));
  const int64_t strips = std::max<int64_t>(1, ceil_div(args.along, strip));
  const int64_t blocks = args.plans * line_granules * strips;
  if (std::max(args.rows, args.cols) >= kMaxGranules || blocks > INT32_MAX) {
    return "attn_mask is too large for flashsdpa_mask_plan_sm90 (2^31 blocks of 64 lines); split the batch";
  }
  args.line_granules = Divisor(static_cast<uint32_t>(line_granules));
  args.strips = Divisor(static_cast<uint32_t>(strips));
  const dim3 grid(static_cast<unsigned>(blocks));
  const auto start = [&](auto* kernel) { kernel<<<grid, kPlanThreads, 0, stream>>>(args); };
  if (access == Access::kVector) {
    start(flashsdpa_mask_plan_sm90<kType, Access::kVector>);
  } else if (access == Access::kElement) {
    start(flashsdpa_mask_plan_sm90<kType, Access::kElement>);
  } else if constexpr (kBytes < 4) {
    start(flashsdpa_mask_plan_sm90<kType, Access::kWords>);
  }
  return error_text(cudaGetLastError());
}

const char* launch_lists(const MaskPlanArgs& args, cudaStream_t stream) {
  const int64_t blocks = ceil_div(args.plans * (args.rows + args.cols), kPlanWarps);
  if (blocks == 0) return nullptr;
  if (blocks > INT32_MAX) {
    return "attn_mask has too many granule rows for flashsdpa_mask_plan_lists_sm90 (2^34); split the batch";
  }
  return launch_behind(flashsdpa_mask_plan_lists_sm90, static_cast<uint32_t>(blocks), kPlanThreads, 0, stream, args);
}

// Lines run along the axis with the smaller stride, if it is not a broadcast one.
bool runs_along_queries(const MaskView& mask) {
  const int64_t query = mask.stride[2], key = mask.stride[3];
  return mask.size[2] > 1 && (key == 0 || (query != 0 && query < key));
}

}  // namespace

const char* launch_mask_plan_sm90(const void* params, const Launch& launch) {
  const MaskPlanParams& p = *static_cast<const MaskPlanParams*>(params);
  const MaskView& mask = p.mask;
  MaskPlanArgs args{};
  args.plans = mask.size[0] * mask.size[1];
  if (args.plans == 0) return nullptr;
  CurrentDevice device;
  if (const char* reason = find_sm90_device(&device)) return reason;

  args.mask = mask.data;
  args.along_queries = runs_along_queries(mask);
  const int along = args.along_queries ? 2 : 3, line = args.along_queries ? 3 : 2;
  args.stride_batch = mask.stride[0];
  args.stride_head = mask.stride[1];
  args.stride_line = mask.stride[line];
  args.stride_along = mask.stride[along];
  args.lines = mask.size[line];
  args.along = args.lines == 0 ? 0 : mask.size[along];
  args.heads = Divisor(static_cast<uint32_t>(std::min<int64_t>(mask.size[1], INT32_MAX)));  // more are refused
  args.plan = p.plan;
  args.plan_words = plan_words(mask.size[2], mask.size[3]);
  args.rows = plan_granules(mask.size[2]);
  args.cols = plan_granules(mask.size[3]);
  args.bits_offset = plan_bits_offset(args.rows, args.cols);
  args.bits_stride = static_cast<uint32_t>(plan_bits_stride(args.cols));

  const cudaStream_t stream = static_cast<cudaStream_t>(launch.stream);
  constexpr decltype(&launch_classify<DType::kBool>) kClassify[kDTypeCount] = {
      // in the order of DType
      launch_classify<DType::kFloat32>, launch_classify<DType::kBFloat16>, launch_classify<DType::kFloat16>,
      launch_classify<DType::kFloat64>, launch_classify<DType::kBool>,
  };
  const char* error = kClassify[static_cast<int>(mask.dtype)](args, stream);
  return error ? error : launch_lists(args, stream);
}

}  // namespace flashsdpa
