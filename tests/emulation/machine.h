// A machine that runs our Hopper kernels on a CPU, for tests: every CUDA thread is a fiber, all in one thread of the
// operating system, in an order drawn from a seed. What the hardware does asynchronously (bulk copies, warpgroup
// products) happens here at a random later moment: sources are read and results appear only then, and accumulators
// hold NaN meanwhile, so code that signals too early or looks too early computes something wrong.
//
// It fails, with a text that says where, on deadlock, on addresses outside the block's shared memory, on a barrier that
// gets more arrivals than it counts, and where ordinary writes of shared memory meet the asynchronous proxy unfenced.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace emulation {

constexpr int kWarp = 32, kWarpgroup = 128;
// Where dynamic shared memory starts: a multiple of 16 and no more, as kernels may expect.
constexpr uint32_t kSharedBase = 0x410;

struct Index {
  uint32_t x = 0, y = 0, z = 0;
};

// What an asynchronous unit will do at round `due`.
struct Pending {
  uint64_t due;
  std::function<void()> act;
};

struct MBarrier {
  uint32_t expected = 0, missing = 0;
  int64_t bytes = 0;
  uint32_t completed = 0;  // phases
  bool fenced = false;     // visible to the copy engine
};

struct NamedBarrier {
  int threads = 0, arrived = 0;
  uint64_t completed = 0;
};

struct Warp {
  uint32_t mask = 0, arrived = 0;
  uint64_t exchanges = 0;
  std::array<std::array<uint64_t, kWarp>, 2> values;  // of this exchange and the one before
  std::array<std::array<std::array<uint32_t, 6>, kWarp>, 2> operands;  // of products of one warp, likewise
  int rest = 0;                                       // rounds in which it does not run
};

struct TensorCores;  // of one warpgroup
struct Block;

// A launch. One `behind` another starts once all blocks of that have said so (triggered) or have ended.
struct Grid {
  Index size, block;
  uint32_t shared_bytes;
  std::function<void()> kernel;
  std::shared_ptr<Grid> before;   // null: nothing to wait for
  std::vector<uint32_t> waiting;  // numbers of blocks that have not started
  uint32_t running = 0, silent = 0;  // blocks; those that have neither triggered nor ended
  bool ended() const { return waiting.empty() && running == 0; }
};

struct Thread {
  Block* block = nullptr;
  int index = 0;
  void* fiber = nullptr;
  bool done = false;
  bool (*ready)(void*) = nullptr;  // null: may run
  void* ready_argument = nullptr;
  const char* waits_for = "";
  uint64_t waits_for_number = 0;
  std::vector<uint32_t> dirty;  // 16-byte chunks of shared memory with ordinary writes since the last proxy fence
  // Bulk stores: how many of each committed group have not read their memory yet, and those of the open group.
  std::deque<std::shared_ptr<int>> store_groups;
  std::shared_ptr<int> open_stores;
  // Warpgroup products
  uint64_t products = 0;                 // issued
  std::vector<uint64_t> product_groups;  // products issued at each commit
  bool products_fenced = false;
};

struct Block {
  std::shared_ptr<Grid> grid;
  bool triggered = false;
  Index index;
  std::vector<uint8_t> shared;
  std::vector<uint16_t> unfenced;  // ordinary writes of each 16-byte chunk that no proxy fence has covered
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<std::shared_ptr<TensorCores>> tensor_cores;
  std::array<NamedBarrier, 16> barriers;
  std::unordered_map<uint32_t, MBarrier> mbarriers;
};

[[noreturn]] void fail(const std::string& what);
Thread& current();
uint32_t random_number();

// Suspends the current thread until ready() holds.
void suspend(bool (*ready)(void*), void* argument, const char* what, uint64_t number);
template <typename Ready>
void wait_until(Ready ready, const char* what, uint64_t number = 0) {
  if (!ready()) suspend([](void* r) { return (*static_cast<Ready*>(r))(); }, &ready, what, number);
}
void yield();  // lets the others run once

// At a random later round; at once in half of the cases. `not_before`: the round of an operation that comes first.
uint64_t schedule(std::function<void()> act, uint64_t not_before = 0);

// Shared memory by address. `asynchronous`: for the copy engine or the tensor cores, which need fenced writes.
uint8_t* shared_bytes(Block& block, uint32_t address, uint32_t bytes, bool asynchronous);
void wrote_shared(uint32_t address, uint32_t bytes);  // by the current thread, ordinarily
void fence_proxy();

// All lanes of `mask` give a value; each gets the one of lane `source`, or all of them.
uint64_t exchange(uint32_t mask, uint64_t value, int source);
const std::array<uint64_t, kWarp>& gather(uint32_t mask, uint64_t value);

void barrier_arrive(int id, int threads);
void barrier_sync(int id, int threads);

MBarrier& mbarrier(Block& block, uint32_t address);
void mbarrier_arrived(Block& block, uint32_t address, uint32_t arrivals, int64_t bytes);

// A CUDA context is current in this thread of the operating system; the driver's calls ask for one.
extern thread_local bool has_context;

// Runs a grid until it has ended or the next one may start beside it; one that is not `behind` starts when all have ended.
void run_grid(Index size, Index block, uint32_t shared_bytes, std::function<void()> kernel, bool behind);
void launch_dependents();
void wait_for_grid_before();

}  // namespace emulation
