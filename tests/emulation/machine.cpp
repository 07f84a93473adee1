// The fibers, their order, and what threads of a block share. Compiled apart from the kernels, so that to them every
// call here may read and write whatever memory it has been given the address of.
#include "machine.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "device.h"
#include "tensor_cores.h"

// Leaves this stack and continues on another, which was left the same way. (swapcontext does more: two system calls.)
extern "C" void switch_stack(void** left, void* next);
asm(R"(
.text
.globl switch_stack
.type switch_stack, @function
switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size switch_stack, .-switch_stack
)");

// What kernels declare as their dynamic shared memory. Never touched: they use addresses.
uint8_t memory[16];
namespace flashsdpa {
uint8_t memory[16];
}

namespace emulation {
namespace {

constexpr size_t kStackBytes = 128 * 1024;
constexpr uint32_t kSharedLimit = 227 * 1024;

struct Fiber {
  void* top = nullptr;  // of its stack, where the registers that a call preserves are kept while it does not run
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
};

struct Machine {
  uint32_t processors = 3;
  uint64_t random = 0x9e3779b97f4a7c15u;
  uint64_t round = 0;
  std::vector<Pending> pending;
  std::vector<std::unique_ptr<Block>> blocks;  // that run
  std::vector<std::shared_ptr<Grid>> grids;     // that have not ended, in the order of their launch
  std::vector<std::unique_ptr<Fiber>> idle;
  Thread* running = nullptr;
  void* scheduler = nullptr;  // the top of its stack while a fiber runs
  std::string failure;
};
Machine machine;

void leave_fiber() { switch_stack(&static_cast<Fiber*>(machine.running->fiber)->top, machine.scheduler); }

void fiber_main() {
  machine.running->block->grid->kernel();
  machine.running->done = true;
  leave_fiber();
}

std::string where(const Thread& thread) {
  return "block " + std::to_string(thread.block->index.x) + ", thread " + std::to_string(thread.index);
}

void run(Thread& thread) {
  machine.running = &thread;
  threadIdx = {static_cast<uint32_t>(thread.index), 0, 0};
  blockIdx = thread.block->index;
  gridDim = thread.block->grid->size;
  blockDim = thread.block->grid->block;
  thread.ready = nullptr;
  switch_stack(&machine.scheduler, static_cast<Fiber*>(thread.fiber)->top);
  machine.running = nullptr;
}

std::unique_ptr<Block> start_block(const std::shared_ptr<Grid>& grid, uint32_t number) {
  const Index size = grid->size;
  const uint32_t threads = grid->block.x, shared_bytes = grid->shared_bytes;
  auto block = std::make_unique<Block>();
  block->grid = grid;
  ++grid->running;
  block->index = {number % size.x, number / size.x % size.y, number / size.x / size.y};
  block->shared.assign(shared_bytes, 0xff);  // NaN in every 16-bit and 32-bit float
  block->unfenced.assign((kSharedBase + shared_bytes) / 16 + 1, 0);
  block->threads.resize(threads);
  block->warps.resize((threads + kWarp - 1) / kWarp);
  for (uint32_t group = 0; group < (threads + kWarpgroup - 1) / kWarpgroup; ++group) {
    block->tensor_cores.push_back(std::make_shared<TensorCores>());
  }
  for (uint32_t t = 0; t < threads; ++t) {
    Thread& thread = block->threads[t];
    if (machine.idle.empty()) machine.idle.push_back(std::make_unique<Fiber>());
    Fiber* fiber = machine.idle.back().release();
    machine.idle.pop_back();
    // As if fiber_main had been called, its return address missing, and had been left at once: six registers, its address.
    auto* top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(fiber->stack.get() + kStackBytes) & ~uintptr_t{63});
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(&fiber_main);
    fiber->top = top - 6;
    std::fill_n(static_cast<void**>(fiber->top), 6, nullptr);
    thread.block = block.get();
    thread.index = static_cast<int>(t);
    thread.fiber = fiber;
    thread.open_stores = std::make_shared<int>(0);
  }
  return block;
}

void end_block(Block& block) {
  --block.grid->running;
  if (!block.triggered) --block.grid->silent;
  for (Thread& thread : block.threads) machine.idle.emplace_back(static_cast<Fiber*>(thread.fiber));
}

// Runs every lane of a warp that can run; whether any did. Now and then the warp rests for some rounds, so that every
// other one gets far ahead of it.
bool run_warp(Block& block, size_t w, bool* resting) {
  Warp& warp = block.warps[w];
  if (warp.rest > 0) {
    --warp.rest;
    *resting = true;
    return false;
  }
  bool ran = false;
  for (size_t t = w * kWarp; t < std::min((w + 1) * kWarp, block.threads.size()); ++t) {
    Thread& thread = block.threads[t];
    if (thread.done || (thread.ready && !thread.ready(thread.ready_argument))) continue;
    run(thread);
    ran = true;
    if (!machine.failure.empty()) return true;
  }
  if (ran && random_number() % 32 == 0) warp.rest = static_cast<int>(random_number() % 64);
  return ran;
}

bool run_due() {
  bool ran = false;
  for (size_t i = 0; i < machine.pending.size();) {
    if (machine.pending[i].due > machine.round) {
      ++i;
      continue;
    }
    const auto act = std::move(machine.pending[i].act);
    machine.pending.erase(machine.pending.begin() + static_cast<std::ptrdiff_t>(i));
    act();
    ran = true;
    if (!machine.failure.empty()) return true;
  }
  return ran;
}

std::string deadlock() {
  std::string text = "deadlock:";
  for (const auto& block : machine.blocks) {
    for (const Thread& thread : block->threads) {
      if (thread.done || thread.index % kWarp > 1) continue;  // lane 0 often differs from the others, which are alike
      text += "\n  " + where(thread) + " waits for " + thread.waits_for + " " + std::to_string(thread.waits_for_number);
    }
  }
  return text;
}

// One round: all that is due, then all warps of all blocks in a random order.
void run_round(std::vector<std::pair<Block*, size_t>>& warps) {
  bool ran = run_due(), resting = false;
  if (!machine.failure.empty()) return;
  for (size_t i = warps.size(); i > 1; --i) std::swap(warps[i - 1], warps[random_number() % i]);
  for (const auto& [block, w] : warps) {
    ran |= run_warp(*block, w, &resting);
    if (!machine.failure.empty()) return;
  }
  ++machine.round;
  if (ran || resting) return;
  if (machine.pending.empty()) {
    machine.failure = deadlock();
    return;
  }
  uint64_t next = UINT64_MAX;
  for (const Pending& p : machine.pending) next = std::min(next, p.due);
  machine.round = std::max(machine.round, next);
}

bool finished(const Block& block) {
  return std::all_of(block.threads.begin(), block.threads.end(), [](const Thread& t) { return t.done; });
}

}  // namespace

void fail(const std::string& what) {
  machine.failure = (machine.running ? where(*machine.running) + ": " : std::string()) + what;
  if (machine.running) leave_fiber();
  throw std::runtime_error(machine.failure);  // in the copy engine or the tensor cores, which have no thread
}

Thread& current() { return *machine.running; }

uint32_t random_number() {
  machine.random ^= machine.random << 13;
  machine.random ^= machine.random >> 7;
  machine.random ^= machine.random << 17;
  return static_cast<uint32_t>(machine.random >> 32);
}

void suspend(bool (*ready)(void*), void* argument, const char* what, uint64_t number) {
  Thread& thread = current();
  thread.ready = ready;
  thread.ready_argument = argument;
  thread.waits_for = what;
  thread.waits_for_number = number;
  leave_fiber();
}

void yield() {
  const uint64_t now = machine.round;
  const auto later = [now] { return machine.round > now; };
  wait_until(later, "the next round");
}

uint64_t schedule(std::function<void()> act, uint64_t not_before) {
  const uint64_t delay = random_number() % 2 ? 0 : random_number() % 48;
  const uint64_t due = std::max(machine.round + delay, not_before);
  machine.pending.push_back({due, std::move(act)});
  return due;
}

uint8_t* shared_bytes(Block& block, uint32_t address, uint32_t bytes, bool asynchronous) {
  if (address < kSharedBase || address + bytes > kSharedBase + block.shared.size()) {
    fail("shared memory address " + std::to_string(address) + " is outside the block's");
  }
  if (asynchronous) {
    for (uint32_t chunk = address / 16; chunk <= (address + bytes - 1) / 16; ++chunk) {
      if (block.unfenced[chunk]) fail("the asynchronous proxy meets an unfenced ordinary write at " + std::to_string(chunk * 16));
    }
  }
  return block.shared.data() + (address - kSharedBase);
}

void wrote_shared(uint32_t address, uint32_t bytes) {
  Thread& thread = current();
  for (uint32_t chunk = address / 16; chunk <= (address + bytes - 1) / 16; ++chunk) {
    if (!thread.dirty.empty() && thread.dirty.back() == chunk) continue;
    ++thread.block->unfenced[chunk];
    thread.dirty.push_back(chunk);
  }
}

void fence_proxy() {
  Thread& thread = current();
  for (uint32_t chunk : thread.dirty) --thread.block->unfenced[chunk];
  thread.dirty.clear();
}

const std::array<uint64_t, kWarp>& gather(uint32_t mask, uint64_t value) {
  Thread& thread = current();
  Warp& warp = thread.block->warps[static_cast<size_t>(thread.index / kWarp)];
  const uint64_t mine = warp.exchanges;
  if (warp.arrived == 0) warp.mask = mask;
  if (warp.mask != mask) fail("lanes of a warp meet in operations with different masks");
  auto& values = warp.values[mine % 2];
  values[static_cast<size_t>(thread.index % kWarp)] = value;
  if (++warp.arrived == static_cast<uint32_t>(__builtin_popcount(mask))) {
    warp.arrived = 0;
    ++warp.exchanges;
  } else {
    wait_until([&] { return warp.exchanges != mine; }, "the other lanes of its warp");
  }
  return values;
}

uint64_t exchange(uint32_t mask, uint64_t value, int source) { return gather(mask, value)[static_cast<size_t>(source)]; }

void barrier_arrive(int id, int threads) {
  NamedBarrier& barrier = current().block->barriers.at(static_cast<size_t>(id));
  if (barrier.arrived == 0) barrier.threads = threads;
  if (barrier.threads != threads) fail("named barrier " + std::to_string(id) + " is used with different counts");
  if (++barrier.arrived == barrier.threads) {
    barrier.arrived = 0;
    ++barrier.completed;
  }
}

void barrier_sync(int id, int threads) {
  NamedBarrier& barrier = current().block->barriers.at(static_cast<size_t>(id));
  const uint64_t mine = barrier.completed;
  barrier_arrive(id, threads);
  wait_until([&] { return barrier.completed != mine; }, "named barrier", static_cast<uint64_t>(id));
}

MBarrier& mbarrier(Block& block, uint32_t address) {
  const auto found = block.mbarriers.find(address);
  if (found == block.mbarriers.end()) fail("no mbarrier was initialised at " + std::to_string(address));
  return found->second;
}

void mbarrier_arrived(Block& block, uint32_t address, uint32_t arrivals, int64_t bytes) {
  MBarrier& barrier = mbarrier(block, address);
  if (arrivals > barrier.missing) fail("too many arrivals at the mbarrier at " + std::to_string(address));
  barrier.missing -= arrivals;
  barrier.bytes += bytes;
  if (barrier.missing == 0 && barrier.bytes == 0) {
    ++barrier.completed;
    barrier.missing = barrier.expected;
  }
}

namespace {

// Starts blocks, at most as many of each grid as there are processors, and ends those that are done. Whether any did.
bool change_blocks() {
  const auto done = [](const std::unique_ptr<Block>& b) {
    if (!finished(*b)) return false;
    end_block(*b);
    return true;
  };
  const size_t before = machine.blocks.size();
  // Not while something asynchronous of theirs is still to happen.
  if (machine.pending.empty()) std::erase_if(machine.blocks, done);
  bool changed = machine.blocks.size() != before;
  for (const auto& grid : machine.grids) {
    while (grid->running < machine.processors && !grid->waiting.empty()) {
      // Blocks start nearly in order, as on the hardware, which promises none.
      const size_t choice = grid->waiting.size() - 1 - random_number() % std::min<size_t>(3, grid->waiting.size());
      machine.blocks.push_back(start_block(grid, grid->waiting[choice]));
      grid->waiting.erase(grid->waiting.begin() + static_cast<std::ptrdiff_t>(choice));
      changed = true;
    }
  }
  return changed;
}

template <typename Enough>
void run_until(Enough enough) {
  std::vector<std::pair<Block*, size_t>> warps;
  while (machine.failure.empty()) {
    const bool changed = change_blocks();
    if (enough()) break;
    if (changed || warps.empty()) {
      warps.clear();
      for (const auto& b : machine.blocks) {
        for (size_t w = 0; w < b->warps.size(); ++w) warps.emplace_back(b.get(), w);
      }
    }
    try {
      run_round(warps);
    } catch (const std::runtime_error&) {
    }
  }
  std::erase_if(machine.grids, [](const auto& grid) { return grid->ended(); });
  if (machine.failure.empty()) return;
  machine.blocks.clear();  // the stacks of its fibers are lost
  machine.pending.clear();
  machine.grids.clear();
}

void run_all() {
  run_until([] { return machine.blocks.empty(); });
}

}  // namespace

void run_grid(Index size, Index block, uint32_t shared_bytes, std::function<void()> kernel, bool behind) {
  machine.failure.clear();
  if (shared_bytes > kSharedLimit || block.x == 0 || block.x > 1024 || size.x == 0) {
    machine.failure = "invalid launch configuration";
    return;
  }
  if (!behind) run_all();
  if (!machine.failure.empty()) return;
  const uint32_t blocks = size.x * size.y * size.z;
  const auto grid = std::make_shared<Grid>(Grid{.size = size, .block = block, .shared_bytes = shared_bytes, .kernel = std::move(kernel)});
  for (uint32_t b = blocks; b > 0; --b) grid->waiting.push_back(b - 1);
  grid->silent = blocks;
  if (!machine.grids.empty()) grid->before = machine.grids.back();
  machine.grids.push_back(grid);
  run_until([&] { return grid->silent == 0; });
}

void launch_dependents() {
  Block& block = *current().block;
  if (!block.triggered) --block.grid->silent;
  block.triggered = true;
}

void wait_for_grid_before() {
  const Grid* before = current().block->grid->before.get();
  wait_until([&] { return !before || before->ended(); }, "the grid before");
}

thread_local bool has_context = false;

}  // namespace emulation

// --- the runtime ------------------------------------------------------------------------------------------------------

#include <cuda_runtime_api.h>

extern "C" __attribute__((visibility("default"))) void emulator_configure(uint64_t seed, uint32_t processors) {
  emulation::machine.random = seed * 2 + 0x9e3779b97f4a7c15u;
  emulation::machine.processors = processors;
}

// The last grid may have let the next one start, and there is none.
extern "C" __attribute__((visibility("default"))) void emulator_finish() { emulation::run_all(); }

cudaError_t cudaGetLastError() { return emulation::machine.failure.empty() ? cudaSuccess : cudaErrorLaunchFailure; }
const char* cudaGetErrorString(cudaError_t) { return emulation::machine.failure.c_str(); }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) {
  emulation::has_context = true;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor   ? 9
           : attribute == cudaDevAttrComputeCapabilityMinor ? 0
                                                            : static_cast<int>(emulation::machine.processors);
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** data, size_t bytes) {
  *data = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  emulation::run_all();
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  emulation::run_all();
  return cudaGetLastError();
}
cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  emulation::run_all();
  std::memset(data, value, bytes);
  return cudaSuccess;
}
