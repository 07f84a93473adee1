#include "tensor_cores.h"

#include <cmath>
#include <cstring>

#include "half.h"

namespace emulation {
namespace {

constexpr int kRows = 64, kDepth = 16;

// The shared-memory operand of the manual: start, leading and stride offsets in units of 16 bytes, swizzle mode.
struct Operand {
  uint32_t start, leading, stride, swizzle;
  explicit Operand(uint64_t word)
      : start(static_cast<uint32_t>(word & 0x3fff) * 16),
        leading(static_cast<uint32_t>(word >> 16 & 0x3fff) * 16),
        stride(static_cast<uint32_t>(word >> 32 & 0x3fff) * 16),
        swizzle(static_cast<uint32_t>(word >> 62)) {
    if (swizzle != 1) fail("a wgmma operand without the 128-byte swizzle, which is all that is emulated");
  }
  // Eight elements: K-major, of row `line` at depth 8 * chunk; else rows 8 * chunk .. at depth `line`.
  uint32_t chunk_address(int line, int chunk, bool transposed) const {
    const uint32_t l = static_cast<uint32_t>(line), c = static_cast<uint32_t>(chunk);
    const uint32_t linear = transposed ? start + c / 8 * leading + c % 8 * 16 + l / 8 * stride + l % 8 * 128
                                       : start + c * 16 + l / 8 * stride + l % 8 * 128;
    return linear ^ (linear >> 7 & 7) * 16;
  }
};

// (rows, 16) of an operand, as floats.
void read_operand(Block& block, uint64_t word, int rows, bool transposed, bool bfloat16, float* out) {
  const Operand operand(word);
  const int lines = transposed ? kDepth : rows, chunks = (transposed ? rows : kDepth) / 8;
  for (int line = 0; line < lines; ++line) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
      uint16_t bits[8];
      std::memcpy(bits, shared_bytes(block, operand.chunk_address(line, chunk, transposed), 16, true), 16);
      for (int e = 0; e < 8; ++e) {
        const int row = transposed ? chunk * 8 + e : line, depth = transposed ? line : chunk * 8 + e;
        out[row * kDepth + depth] = to_float(bits[e], bfloat16);
      }
    }
  }
}

int row_of(int thread, int i) { return thread / kWarp * 16 + thread % kWarp / 4 + 8 * (i / 2 % 2); }
int column_of(int thread, int i) { return 8 * (i / 4) + 2 * (thread % 4) + i % 2; }

// A in registers: element i of 8 (two a register) of a lane lies where accumulator i of 16 columns does.
void read_registers(const Product& product, float* out) {
  for (int t = 0; t < kWarpgroup; ++t) {
    for (int i = 0; i < 8; ++i) {
      const uint32_t word = product.a_registers[static_cast<size_t>(t)][i / 2];
      out[row_of(t, i) * kDepth + column_of(t, i)] =
          to_float(static_cast<uint16_t>(i % 2 ? word >> 16 : word & 0xffff), product.bfloat16);
    }
  }
}

void multiply(Block& block, const Product& product) {
  Accumulator& d = *product.accumulator;
  static thread_local float a[kRows * kDepth], b[256 * kDepth], b_rows[256 * kDepth];
  if (product.a_registers[0]) {
    read_registers(product, a);
  } else {
    read_operand(block, product.a, kRows, product.transposed_a, product.bfloat16, a);
  }
  read_operand(block, product.b, d.columns, product.transposed_b, product.bfloat16, b);
  for (int n = 0; n < d.columns; ++n) {
    for (int k = 0; k < kDepth; ++k) b_rows[k * d.columns + n] = b[n * kDepth + k];
  }
  if (!product.accumulate) std::fill(d.values.begin(), d.values.end(), 0.f);
  for (int m = 0; m < kRows; ++m) {
    float* row = d.values.data() + m * d.columns;
    for (int k = 0; k < kDepth; ++k) {
      const float factor = a[m * kDepth + k];
      const float* line = b_rows + k * d.columns;
      for (int n = 0; n < d.columns; ++n) row[n] += factor * line[n];
    }
  }
}

void give_back(Accumulator& d) {
  for (int t = 0; t < kWarpgroup; ++t) {
    for (int i = 0; i < d.columns / 2; ++i) {
      d.registers[static_cast<size_t>(t)][i] = d.values[static_cast<size_t>(row_of(t, i) * d.columns + column_of(t, i))];
    }
  }
}

void carry_out_next(Block& block, TensorCores& cores) {
  const Product product = std::move(cores.queue.front());
  cores.queue.pop_front();
  ++cores.first;
  multiply(block, product);
  if (--product.accumulator->products > 0) return;
  give_back(*product.accumulator);
  std::erase(cores.active, product.accumulator);
}

TensorCores& tensor_cores() {
  const Thread& thread = current();
  return *thread.block->tensor_cores[static_cast<size_t>(thread.index / kWarpgroup)];
}

std::shared_ptr<Accumulator> find_accumulator(TensorCores& cores, size_t t, const float* registers, int columns) {
  for (const auto& d : cores.active) {
    if (d->registers[t] == registers) return d;
  }
  auto d = std::make_shared<Accumulator>();
  d->columns = columns;
  d->values.resize(static_cast<size_t>(kRows * columns));
  cores.active.push_back(d);
  return d;
}

// From here on the registers are the tensor cores': whoever looks at them before the wait sees NaN.
void take_registers(Accumulator& d, int thread, float* registers) {
  float*& mine = d.registers[static_cast<size_t>(thread)];
  if (mine == registers) return;
  if (mine) fail("threads of a warpgroup issue products in different orders");
  mine = registers;
  for (int i = 0; i < d.columns / 2; ++i) {
    d.values[static_cast<size_t>(row_of(thread, i) * d.columns + column_of(thread, i))] = registers[i];
    registers[i] = NAN;
  }
}

}  // namespace

void issue_product(int columns, float* accumulator, const uint32_t* a_registers, const Product& product) {
  Thread& thread = current();
  if (!thread.products_fenced) fail("a warpgroup product without a fence since the last wait");
  TensorCores& cores = tensor_cores();
  const int t = thread.index % kWarpgroup;
  const size_t place = static_cast<size_t>(thread.products++ - cores.first);
  if (place == cores.queue.size()) {
    cores.queue.push_back(product);
    cores.queue.back().accumulator = find_accumulator(cores, static_cast<size_t>(t), accumulator, columns);
    ++cores.queue.back().accumulator->products;
  }
  Product& shared = cores.queue[place];
  if (shared.a != product.a || shared.b != product.b || shared.accumulate != product.accumulate ||
      shared.accumulator->columns != columns) {
    fail("threads of a warpgroup issue different products");
  }
  take_registers(*shared.accumulator, t, accumulator);
  shared.a_registers[static_cast<size_t>(t)] = a_registers;
  if (++shared.issued < kWarpgroup) return;
  Block* block = thread.block;
  cores.last_due = schedule([block, &cores] { carry_out_next(*block, cores); }, cores.last_due);
}

void commit_products() { current().product_groups.push_back(current().products); }

void wait_for_products(int pending_groups) {
  Thread& thread = current();
  thread.products_fenced = false;
  const auto& groups = thread.product_groups;
  if (groups.empty() || groups.back() != thread.products) fail("a wait for products that were not committed");
  if (groups.size() <= static_cast<size_t>(pending_groups)) return;
  const uint64_t until = groups[groups.size() - 1 - static_cast<size_t>(pending_groups)];
  TensorCores& cores = tensor_cores();
  wait_until([&] { return cores.first >= until; }, "warpgroup products up to number", until);
}

void fence_products() { current().products_fenced = true; }

}  // namespace emulation
