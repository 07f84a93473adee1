// What the kernels do not take, and why. One set of checks serves the router, the ops' errors, strict mode, the log
// and explain.
#pragma once

#include <c10/util/StringUtil.h>

#include <optional>
#include <string>
#include <vector>

#include "call.h"
#include "kernel_table.h"

namespace flashsdpa {

// Numbers as text without a stream: it costs less to compile and to run, and depends on less of the C++ library that
// torch was built with.
std::string to_text(const c10::SymInt& number);
std::string to_text(double number);
inline std::string to_text(int64_t number) { return std::to_string(number); }
inline std::string to_text(int number) { return std::to_string(number); }
inline std::string to_text(const std::string& text) { return text; }
inline std::string to_text(const char* text) { return text; }
inline std::string to_text(const at::Device& device) { return device.str(); }
inline std::string to_text(c10::DeviceType type) { return c10::DeviceTypeName(type, /*lower_case=*/true); }
inline std::string to_text(at::Layout layout) { return c10::str(layout); }

// Collects refusals. Without a list it only remembers that there was one, and asks the checks to stop there.
class Reasons {
 public:
  explicit Reasons(std::vector<std::string>* list = nullptr) : list_(list) {}

  // True when the caller may stop checking.
  template <class... Parts>
  bool add(const Parts&... parts) {
    ok_ = false;
    if (list_ == nullptr) return true;
    list_->push_back((to_text(parts) + ...));
    return false;
  }
  bool ok() const { return ok_; }
  bool collecting() const { return list_ != nullptr; }

 private:
  bool ok_ = true;
  std::vector<std::string>* list_;
};

std::string join(const std::vector<std::string>& parts, const char* separator);

std::optional<DType> to_dtype(at::ScalarType type);
const char* dtype_name(at::ScalarType type);  // "float32"
bool is_dense(const Tensor& t);               // defined, strided, not nested
std::string shape_text(c10::SymIntArrayRef sizes);

// Raises an error for a tensor that no plan is made of, whatever the device.
void require_plannable(const Tensor& mask);

// Whether a gradient is asked of the call: of any input, of attn_mask.
bool needs_grad(const Call& call);
bool needs_mask_grad(const Call& call);

// Derivatives that no rule gives: those by alibi_slopes, of any kind. Asked above autograd, where a tangent, or the level
// of torch.func that asks for a gradient, is seen; below they are not.
void check_slopes(const Call& call, Reasons& reasons);
// Everything else that can be told without looking at a shape: options, tensor kinds, devices, dtypes, the kernel
// table. Returns whether the shapes can be looked at.
bool check_kinds(const Call& call, Reasons& reasons);
// Ranks, sizes and what the kernel entries make of them. 4-D tensors; guards as little as it can on symbolic sizes.
void check_shapes(const Call& call, Reasons& reasons);
// Why `entry` cannot run the call; `mask_grad` for a backward entry that has to return the mask's gradient.
void check_entry(const KernelEntry& entry, const Call& call, bool mask_grad, Reasons& reasons);

// The entries a call uses. The forward is a decode kernel where few query rows share a key head.
const KernelEntry* table_entry(Pass pass, const at::Device& device, at::ScalarType dtype);
const KernelEntry* forward_entry(const Call& call);
const KernelEntry* backward_entry(const Call& call);
// Whether a backward kernel gives every gradient that the call asks for.
bool has_backward(const Call& call);

// Raises one error that lists every reason.
[[noreturn]] void raise(const char* op, const Call& call);
// Raises it if there is a reason.
void require(const char* op, const Call& call);
// The same for flashsdpa::backward and flashsdpa::jvp, with the tensors that only they take.
void require_backward(const Call& call, const OptTensor& grad_out, const OptTensor& grad_lse, const Tensor& out,
                      const Tensor& lse, const char* op = "flashsdpa::backward");
void require_jvp(const Call& call, const OptTensor& grad_out, const OptTensor& grad_lse, const Tensor& out,
                 const Tensor& lse, const Tangents& tangents);

}  // namespace flashsdpa
