#include "selection.h"

#include <ATen/Context.h>
#include <ATen/ThreadLocalPythonObjects.h>

#include <array>
#include <atomic>
#include <mutex>

namespace flashsdpa {

namespace {

std::atomic<Selection> process_default{Selection{}};
static_assert(std::atomic<Selection>::is_always_lock_free);

std::atomic<bool> strict_seen{false};

// Append-only: readers take no lock. Tokens are interned by what they select and torch's backends, so few exist.
struct Token {
  const void* object;
  Selection selection;  // scoped is false for the empty token
};
constexpr int kMaxTokens = 3 * 2 * 2 * 32 + 1;
std::array<Token, kMaxTokens> tokens;
std::atomic<int> token_count{0};
std::mutex token_mutex;

void add_token(const void* object, const Selection& selection) {
  std::lock_guard<std::mutex> lock(token_mutex);
  const int count = token_count.load(std::memory_order_relaxed);
  for (int i = 0; i < count; ++i)
    if (tokens[i].object == object) return;
  TORCH_CHECK(count < kMaxTokens, "flashsdpa: too many scope tokens; intern them");
  tokens[count] = {object, selection};
  token_count.store(count + 1, std::memory_order_release);
}

// The backends of sdpa_kernel(), in the order of the bits of `torch_backends`.
constexpr const char* kTorchBackends[] = {"flash", "efficient", "cudnn", "math", "overrideable"};
constexpr uint8_t kFlashBit = 1, kOtherFusedBits = 2 | 4;

}  // namespace

void set_default_selection(Selection selection) {
  if (selection.strict) strict_seen = true;
  process_default.store(selection, std::memory_order_relaxed);
}

Selection default_selection() { return process_default.load(std::memory_order_relaxed); }

void register_scope_token(const void* object, Selection selection) {
  if (selection.strict) strict_seen = true;
  selection.scoped = true;
  add_token(object, selection);
}

void register_empty_token(const void* object) { add_token(object, Selection{}); }

Selection current_selection() {
  const int count = token_count.load(std::memory_order_acquire);
  if (count > 0) {
    static const std::string key = kScopeKey;
    const auto& store = at::impl::ThreadLocalPythonObjects::get_state();
    if (store.contains(key)) {
      const auto& object = store.get(key);
      const void* address = object->ptr(&object->pyinterpreter());
      for (int i = 0; i < count; ++i)
        if (tokens[i].object == address) {
          if (tokens[i].selection.scoped) return tokens[i].selection;
          break;
        }
    }
  }
  return default_selection();
}

uint8_t enabled_torch_backends() {
  const auto& context = at::globalContext();
  return static_cast<uint8_t>(context.userEnabledFlashSDP() | context.userEnabledMemEfficientSDP() << 1 |
                              context.userEnabledCuDNNSDP() << 2 | context.userEnabledMathSDP() << 3 |
                              context.userEnabledOverrideableSDP() << 4);
}

bool torch_leaves_to_stock(const Selection& selection) {
  const uint8_t enabled = enabled_torch_backends();
  if (selection.scoped && selection.torch_backends == enabled) return false;
  return !((enabled & kFlashBit) && (enabled & kOtherFusedBits));
}

std::string torch_backends_text() {
  std::string names;
  const uint8_t enabled = enabled_torch_backends();
  for (int bit = 0; bit < 5; ++bit)
    if (enabled >> bit & 1) names += (names.empty() ? "" : ", ") + std::string(kTorchBackends[bit]);
  return "torch's own backends are limited to " + (names.empty() ? "none" : names) +
         " (sdpa_kernel or torch.backends.cuda); flashsdpa serves when flash and another fused one are enabled";
}

bool strict_possible() { return strict_seen.load(std::memory_order_relaxed); }

}  // namespace flashsdpa
