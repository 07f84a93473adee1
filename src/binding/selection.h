// Which backend the caller asked for: a default of the process, and scopes that follow a thread (and the backward
// threads that torch starts for it).
#pragma once

#include <cstdint>
#include <string>

namespace flashsdpa {

enum class Backend : int32_t { kStock = 0, kFlashsdpa = 1, kAuto = 2 };
inline const char* backend_name(Backend b) {
  return b == Backend::kStock ? "stock" : b == Backend::kFlashsdpa ? "flashsdpa" : "auto";
}

struct Selection {
  Backend backend = Backend::kStock;
  bool strict = false;
  bool batch_invariant = false;  // "auto" then takes all that ours serve, as stock promises nothing
  bool scoped = false;
  uint8_t torch_backends = 0;  // scoped: torch's enabled SDPA backends when the scope was entered, one bit each

  bool operator==(const Selection&) const = default;
};

constexpr char kScopeKey[] = "flashsdpa.scope";  // of torch's thread-local object store

void set_default_selection(Selection selection);
Selection default_selection();
Selection current_selection();

// A scope is an immortal Python object in torch's thread-local store. It is known here by its address alone, so that
// reading it takes neither the GIL nor Python symbols. Registering twice is harmless.
void register_scope_token(const void* object, Selection selection);
// A token that stands for "no scope": torch's store cannot forget a key.
void register_empty_token(const void* object);

uint8_t enabled_torch_backends();
// Why the user's choice among torch's own backends leaves the call to stock; empty if it does not. A scope entered
// after that choice overrules it.
bool torch_leaves_to_stock(const Selection& selection);
std::string torch_backends_text();

// Whether strict was ever asked for in this process.
bool strict_possible();

}  // namespace flashsdpa
