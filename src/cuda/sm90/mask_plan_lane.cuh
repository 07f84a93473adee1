// What a lane of the mask plan's first kernel makes of its 16 bytes of each line: a bit an element, and whether some value adds
// to a score. Issue slots bound that kernel, not bytes, unless 16 bytes cost few instructions (NOTES_MASKS.md), so everything
// here is on words of 32 bits, and nothing is put together before all lines of the warp are through.
#pragma once

#include <cstdint>

#include "../../host_device.h"
#include "../../params.h"
#include "../../ptx/arithmetic.cuh"

namespace flashsdpa {

constexpr int kWarpSize = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kVectorBytes = 16;
constexpr int kLinesPerWarp = 8;

// An element as raw bits. kRemoved is the pattern of -inf; a bool is removed by being zero.
template <typename Unsigned, Unsigned kPattern>
struct ElementBits {
  using Bits = Unsigned;
  static constexpr Bits kRemoved = kPattern;
  static constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1;  // all but the sign
};
template <DType kType>
struct MaskElement;
template <>
struct MaskElement<DType::kBool> : ElementBits<uint8_t, 0> {};
template <>
struct MaskElement<DType::kBFloat16> : ElementBits<uint16_t, 0xff80> {};
template <>
struct MaskElement<DType::kFloat16> : ElementBits<uint16_t, 0xfc00> {};
template <>
struct MaskElement<DType::kFloat32> : ElementBits<uint32_t, 0xff800000> {};
template <>
struct MaskElement<DType::kFloat64> : ElementBits<uint64_t, 0xfff0000000000000> {};

// `value`, of `bits` bits, repeated.
FLASHSDPA_HOST_DEVICE constexpr uint32_t repeat(uint32_t value, int bits) {
  uint32_t word = 0;
  for (int at = 0; at < 32; at += bits) word |= value << at;
  return word;
}

__device__ inline void load_vector(const void* from, uint32_t (&x)[4]) {
  const uint4 vector = __ldg(static_cast<const uint4*>(from));
  x[0] = vector.x, x[1] = vector.y, x[2] = vector.z, x[3] = vector.w;
}

// 16 bytes from any address: the aligned words they lie in, and the one behind if these are four.
__device__ inline void load_words(const void* from, uint32_t (&x)[4]) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(from);
  const uint32_t* words = reinterpret_cast<const uint32_t*>(address & ~uintptr_t{3});
  uint32_t word[5];
#pragma unroll
  for (int w = 0; w < 5; ++w) word[w] = __ldg(words + w);
#pragma unroll
  for (int w = 0; w < 4; ++w) x[w] = __funnelshift_r(word[w], word[w + 1], address % 4 * 8);
}

// The first `count` elements of 16 bytes, one by one; zeros behind.
template <typename Bits>
__device__ inline void load_elements(const Bits* from, int count, uint32_t (&x)[4]) {
  constexpr int kPerWord = 4 / sizeof(Bits);
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    x[w] = 0;
#pragma unroll
    for (int e = 0; e < kPerWord; ++e) {
      if (w * kPerWord + e < count) x[w] |= static_cast<uint32_t>(__ldg(from + w * kPerWord + e)) << 32 / kPerWord * e;
    }
  }
}

// 16 bytes of each of the warp's lines. A field is the bits of one line, one an element: 32 bits hold the fields of kFields lines,
// and kFields lanes hold 32 neighbouring elements of a line.
template <DType kType>
struct LaneBits {
  using Element = MaskElement<kType>;
  using Bits = typename Element::Bits;
  static constexpr int kVector = kVectorBytes / sizeof(Bits), kFields = 32 / kVector;
  static constexpr int kWords = (kLinesPerWarp + kFields - 1) / kFields;
  static constexpr bool kPairs = sizeof(Bits) == 2;

  // Of the elements that are removed, of a bool those that are kept. Pairs: two lines a word, even elements in the low half.
  uint32_t found[kPairs ? 2 * kWords : kWords] = {};
  uint32_t shifted = 0;  // of the elements not removed, whatever is not +0; the sign too

  __device__ void add(int line, const uint32_t (&x)[4]) {
    if constexpr (kType == DType::kBool) {
      uint32_t nonzero[4];  // the top bit of each byte
#pragma unroll
      for (int w = 0; w < 4; ++w) nonzero[w] = (((x[w] & 0x7f7f7f7f) + 0x7f7f7f7f) | x[w]) & 0x80808080;
      // A product of bytes sums four top bits to four neighbouring bits, from bit 7.
      const uint32_t low = __dp4a(nonzero[1], 0x80402010u, __dp4a(nonzero[0], 0x08040201u, 0u));
      const uint32_t high = __dp4a(nonzero[3], 0x80402010u, __dp4a(nonzero[2], 0x08040201u, 0u));
      const uint32_t field = low + high * 256;
      found[line / 2] += line % 2 ? field << 9 : field >> 7;
    } else if constexpr (kPairs) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t removed = ptx::equal_halves<kType == DType::kBFloat16>(x[w], repeat(Element::kRemoved, 16));
        found[line / 2] |= removed & 0x00020001u << (line % 2 * 8 + 2 * w);
        shifted |= x[w] & ~removed;
      }
    } else if constexpr (kType == DType::kFloat32) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t removed = ptx::equal(__uint_as_float(x[w]), __uint_as_float(Element::kRemoved));
        found[0] |= removed & 1u << (line * 4 + w);
        shifted |= x[w] & ~removed;
      }
    } else {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint32_t low = x[2 * e], high = x[2 * e + 1];
        const uint32_t removed = low == 0 && high == Element::kRemoved >> 32 ? kAllLanes : 0;
        found[0] |= removed & 1u << (line * 2 + e);
        shifted |= (low | (high & 0x7fffffff)) & ~removed;
      }
    }
  }

  // Fields of the elements that are kept, the first line's lowest.
  __device__ void kept(uint32_t (&fields)[kWords]) const {
#pragma unroll
    for (int r = 0; r < kWords; ++r) {
      if constexpr (kPairs) {
        const uint32_t first = found[2 * r], second = found[2 * r + 1];  // low halves, then high halves, put together
        fields[r] = ~(__byte_perm(first, second, 0x5410) | __byte_perm(first, second, 0x7632));
      } else {
        fields[r] = kType == DType::kBool ? found[r] : ~found[r];
      }
    }
  }
  __device__ bool any_shifted() const {
    constexpr uint32_t kMagnitude = sizeof(Bits) < 4 ? repeat(Element::kMagnitude, 8 * sizeof(Bits)) : 0x7fffffff;
    return kType == DType::kFloat64 ? shifted != 0 : (shifted & kMagnitude) != 0;
  }

  // The bits of a word that stand for an element of a lane that has `count`.
  __device__ static uint32_t existing(int count) {
    constexpr uint32_t kLines = kAllLanes >> (32 - (kVector * kLinesPerWarp < 32 ? kVector * kLinesPerWarp : 32));
    return count >= kVector ? kLines : count <= 0 ? 0 : ((1u << count) - 1) * repeat(1, kVector) & kLines;
  }

  // Among each kFields lanes: field f of lane q goes to field q of lane f, which then has 32 elements of line f.
  __device__ static void exchange(uint32_t (&fields)[kWords], int lane) {
#pragma unroll
    for (int step = 1; step < kFields; step *= 2) {
      // Fields of which bit `step` of the number is that of the lane's stay; the others come from the lane beside.
      const uint32_t even = kAllLanes / ((1u << step * kVector) + 1);  // step fields, then step not, and so on
      const uint32_t stay = lane & step ? ~even : even, turn = lane & step ? 32 - step * kVector : step * kVector;
#pragma unroll
      for (int r = 0; r < kWords; ++r) {
        const uint32_t other = __shfl_xor_sync(kAllLanes, fields[r], step);
        fields[r] = (fields[r] & stay) | (__funnelshift_l(other, other, turn) & ~stay);
      }
    }
  }
};

}  // namespace flashsdpa
