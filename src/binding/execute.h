// From tensors to a launched kernel: views, bands, stream or thread pool, and the span the profiler shows.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "call.h"
#include "kernel_table.h"
#include "params.h"

namespace flashsdpa {

// Executions of flashsdpa::forward since the start (or the last reset), compiled graphs included.
inline std::atomic<int64_t> routed_calls{0};

// Key `diagonal` stands under query 0: bands and slopes are counted from there.
int64_t diagonal(const Options& o, int64_t seq_q, int64_t seq_k);
Band band(const Options& o, int64_t seq_q, int64_t seq_k);

// Whether flashsdpa has to read a copy of `t` (its columns are not contiguous in memory).
bool needs_copy(const Tensor& t);

// What the forward kernel `entry` would do with the call; null where the entry says it all. Reads no tensor.
std::optional<KernelDetail> detail_of(const KernelEntry& entry, const Call& call);
// Whether the forward kernel `entry` takes the call's mask only with a plan, which the op then makes where none is given.
bool needs_plan(const KernelEntry& entry, const Call& call);

}  // namespace flashsdpa
