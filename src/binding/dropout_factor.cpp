#include "dropout_factor.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/where.h>

#include "dropout.h"

namespace flashsdpa {

namespace {

constexpr int64_t kLow = 0xffffffff;

Tensor low(const Tensor& t) { return t.bitwise_and(kLow); }
Tensor high(const Tensor& t) { return low(t.__rshift__(32)); }

// Philox4x32 (see ../dropout.h) in words of int64. Products are modulo 2^64, whose bits are right whatever their sign.
std::array<Tensor, 4> philox(std::array<Tensor, 4> c, Tensor k0, Tensor k1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const Tensor a = c[0] * int64_t{0xD2511F53}, b = c[2] * int64_t{0xCD9E8D57};
    c = {high(b).bitwise_xor(c[1]).bitwise_xor(k0), low(b), high(a).bitwise_xor(c[3]).bitwise_xor(k1), low(a)};
    k0 = low(k0 + int64_t{0x9E3779B9});
    k1 = low(k1 + int64_t{0xBB67AE85});
  }
  return c;
}

}  // namespace

Tensor dropout_factor(const Options& o, at::ScalarType type, int64_t batch, int64_t heads, Span queries, Span keys) {
  const uint32_t kept = dropout_kept(o.dropout_p);
  if (kept == kDropoutOne) return {};
  const Tensor& state = *o.rng_state;
  const auto range = [&](Span s, at::IntArrayRef shape) {
    return at::arange(s.first, s.first + s.count, state.options()).reshape(shape);
  };
  const auto bit = [](const Tensor& t, int which) { return t.bitwise_and(1 << which).ne(0); };
  const Tensor seed = state.select(0, 0), offset = state.select(0, 1);
  const auto stream = philox({low(offset), high(offset), range({0, batch}, {-1, 1, 1, 1}), range({0, heads}, {-1, 1, 1})},
                             low(seed), high(seed));
  const Tensor i = range(queries, {-1, 1}), j = range(keys, {-1});
  const auto block = [](const Tensor& t) { return t.__rshift__(4) * 4 + t.__rshift__(1).bitwise_and(3); };
  const auto words = philox({block(j), block(i), stream[2], stream[3]}, stream[0], stream[1]);
  const Tensor word = at::where(bit(i, 3), at::where(bit(i, 0), words[3], words[2]), at::where(bit(i, 0), words[1], words[0]));
  const Tensor byte = word.__rshift__(bit(j, 0) * 8 + bit(j, 3) * 16).bitwise_and(0xff);
  Tensor tie = words[0].bitwise_xor(words[1]).bitwise_xor(words[2]).bitwise_xor(words[3]);
  for (const int half : {16, 8}) tie = tie.bitwise_xor(tie.__rshift__(half));
  const Tensor bits = byte * 256 + tie.bitwise_and(0xff);  // less than kept: byte < K, or equal, and tie < r
  return bits.lt(int64_t{kept}).to(type) * (kept == 0 ? 0.0 : static_cast<double>(kDropoutOne) / kept);
}

}  // namespace flashsdpa
