// Scratch of one worker, and work items handed out one at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "../params.h"

namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE {

// A bump allocator over one 64-byte aligned block, measured first (null base) and then carved.
class Arena {
 public:
  explicit Arena(char* base = nullptr) : base_(base) {}
  template <typename T>
  T* take(int64_t count) {
    T* p = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    return p;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};
using Block = std::unique_ptr<char, FreeDeleter>;
inline Block allocate(int64_t bytes) {
  return Block(static_cast<char*>(std::aligned_alloc(64, size_t((bytes + 64 + 63) / 64 * 64))));
}

// This thread's scratch of at least `bytes`, kept from call to call: its contents are whatever the last call left.
inline char* thread_scratch(int64_t bytes) {
  thread_local Block block;
  thread_local int64_t capacity = 0;
  if (capacity < bytes) block = allocate(bytes), capacity = bytes;
  return block.get();
}

// Runs work(item, worker) for every item in [0, items), handed out in ascending order to as many workers as pay off.
template <typename Work>
void for_each_item(const ThreadPool* pool, int64_t items, int max_workers, const Work& work) {
  int workers = pool && pool->run ? pool->threads : 1;
  if (workers > max_workers) workers = max_workers;
  if (workers > items) workers = int(items);
  if (workers <= 1) {
    for (int64_t i = 0; i < items; ++i) work(i, 0);
    return;
  }
  struct Context {
    const Work* work;
    std::atomic<int64_t> next;
    int64_t items;
  } context{&work, {0}, items};
  pool->run(
      workers,
      [](void* raw, int worker) {
        auto* c = static_cast<Context*>(raw);
        for (int64_t i; (i = c->next.fetch_add(1, std::memory_order_relaxed)) < c->items;) (*c->work)(i, worker);
      },
      &context);
}

}  // namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE
