// What a call was decided to be: events for an observer, and explain.
#pragma once

#include <c10/core/SymInt.h>

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "call.h"
#include "checks.h"
#include "selection.h"

namespace flashsdpa {

struct Event {
  const char* kind;  // "decision": the router; "launch": an op of ours
  const char* op;
  const char* kernel;  // of the table, or "stock"
  const Call& call;
  const std::vector<std::string>& reasons;  // why not ours
  const char* backend;
  const char* phase;  // "eager" or "traced"
};

using Observer = void (*)(const Event&);
inline std::atomic<Observer> observer{nullptr};
inline bool observing() { return observer.load(std::memory_order_relaxed) != nullptr; }

void observe_launch(const char* op, const KernelEntry& entry, const Call& call);

// "(2, 1, 128, 128) bool", or empty.
std::string mask_text(const OptTensor& mask);

struct Candidate {
  std::string kernel;
  std::string pass;
  std::vector<std::string> reasons;  // why it is not the one; empty for the chosen
};

struct Explanation {
  std::string chosen = "stock";
  std::vector<std::string> reasons;
  std::vector<Candidate> candidates;
  std::vector<std::pair<std::string, std::string>> config;  // of the chosen kernel, in the order to print
  std::vector<std::string> copies;                          // inputs that are copied before the kernel reads them
};

// Every entry of the table for the call's device, with its reasons; `chosen` may be null.
std::vector<Candidate> candidates(const Call& call, const KernelEntry* chosen);
// Fills chosen, config and copies from the entry that serves `call` (4-D, normalised).
void describe(const KernelEntry& entry, const Call& call, Explanation& explanation);

const char* pass_name(Pass pass);
bool entry_available(const KernelEntry& entry);  // on this machine, as far as the binding can tell

}  // namespace flashsdpa
