// Warpgroup matrix products: a queue for each warpgroup, in order, carried out some time after all its threads issued.
#pragma once

#include <memory>

#include "machine.h"

namespace emulation {

struct Accumulator {
  int columns = 0;
  std::array<float*, kWarpgroup> registers{};  // of each thread; null until it has handed them over
  std::vector<float> values;                   // (64, columns)
  int products = 0;                            // not carried out yet
};

struct Product {
  bool bfloat16 = false;
  uint64_t a = 0, b = 0;                                // shared-memory operands; `a` unused if in registers
  std::array<const uint32_t*, kWarpgroup> a_registers{};  // null: A is in shared memory
  bool transposed_a = false, transposed_b = false, accumulate = false;
  int issued = 0;  // threads
  std::shared_ptr<Accumulator> accumulator;
};

struct TensorCores {
  std::deque<Product> queue;  // products from number `first` on
  uint64_t first = 0;
  uint64_t last_due = 0;
  std::vector<std::shared_ptr<Accumulator>> active;
};

// Called by every thread of the warpgroup.
void issue_product(int columns, float* accumulator, const uint32_t* a_registers, const Product& product);
void commit_products();
void wait_for_products(int pending_groups);
void fence_products();

}  // namespace emulation
