// Dropout's decisions (../../dropout.h) for a block of scores in the accumulator layout of wgmma (see fwd_softmax.cuh), for
// both arrangements: a bit for each of a lane's accumulators, 32 to a word, at places that are made to cost nothing.
#pragma once

#include "../../dropout.h"
#include "../../ptx/arithmetic.cuh"
#include "../../ptx/warpgroup.cuh"
#include "score_terms.h"

namespace flashsdpa {

struct PhiloxProduct {
  __device__ uint64_t operator()(uint64_t a, uint32_t m) const { return ptx::multiply_wide(uint32_t(a), m); }
};

// What all calls of one (batch, query head) share, the keys of the first round and two words of the counter, lies in shared
// memory, and is read anew for all calls that are made together: there are no registers for it.
constexpr int kDropoutStreamBytes = 16;

// Lays it there, for one after another; made once more only where batch or head is another. By one thread.
class DropoutStreamWriter {
 public:
  __device__ void lay(const ScoreTerms& terms, int batch, int head, uint32_t shared) {
    if (batch != batch_ || head != head_) {
      batch_ = batch;
      head_ = head;
      const uint64_t seed = __ldg(reinterpret_cast<const unsigned long long*>(terms.seed));
      const uint64_t offset = __ldg(reinterpret_cast<const unsigned long long*>(terms.offset));
      uint64_t words[4] = {offset, offset >> 32, uint64_t(batch), uint64_t(head)};
      philox4x32(words, seed, seed >> 32, PhiloxProduct());
#pragma unroll
      for (int i = 0; i < 4; ++i) words_[i] = uint32_t(words[i]);
    }
    ptx::store_shared_8(shared, words_[0], words_[1]);
    ptx::store_shared_8(shared + 8, words_[2], words_[3]);
  }

 private:
  int batch_ = -1, head_ = -1;
  uint32_t words_[4];
};

class DropoutStream {
 public:
  DropoutStream() = default;
  // `shared`: where its kDropoutStreamBytes lie.
  __device__ DropoutStream(const ScoreTerms& terms, uint32_t shared) : shared_(shared), kept_(terms.kept) {}
  // A warp's own, laid there by it: no lane reads what was there any more.
  __device__ DropoutStream(const ScoreTerms& terms, int batch, int head, int lane, uint32_t shared)
      : DropoutStream(terms, shared) {
    __syncwarp();
    if (lane == 0) DropoutStreamWriter().lay(terms, batch, head, shared);
    __syncwarp();
  }

  // `row`, `column`: the lane's first of each, in a block that begins with multiples of 16. kGroups: of 16 columns, 8
  // accumulators each, in a word of bits; 4, or 2 in a block that has no more. kTogether: words whose calls of Philox go side
  // by side: the more, the less one waits for another. Of fewer `words` than there are, the last of `bits`
  // are those drawn.
  //
  // What a call decides belongs to two lanes, those of rows r and r ^ 1. The lane of the even row makes the calls of even
  // groups, the other one those of odd groups; then each gives the other its half.
  template <bool kRowsAreKeys, int kGroups = 4, int kTogether = 1, int kWords>
  __device__ void draw(int row, int column, uint32_t (&bits)[kWords], int words = kWords) const {
    constexpr int kCalls = kGroups / 2;
    static_assert(kGroups % 2 == 0 && kCalls <= 2 && kWords % kTogether == 0);
    const bool odd = row & 1;
    const uint32_t row_block = dropout_block(uint32_t(row)), column_block = dropout_block(uint32_t(column)) + 4 * odd;
#pragma unroll 1  // else the compiler makes more together, and spills
    for (int word = 0; word < words; word += kTogether) {
      uint32_t column_blocks[kTogether * kCalls], drawn[kTogether * kCalls][4];
#pragma unroll
      for (int c = 0; c < kTogether * kCalls; ++c) column_blocks[c] = column_block + 4 * (word * kGroups + 2 * c);
      call<kRowsAreKeys>(row_block, column_blocks, drawn);
#pragma unroll
      for (int w = kTogether; w < kWords; ++w) bits[w - kTogether] = bits[w];
#pragma unroll
      for (int w = 0; w < kTogether; ++w) {
        uint32_t own = 0;  // of word i, byte b and call c: bit 8 b + 7 - i - 4 c
#pragma unroll
        for (int c = 0; c < kCalls; ++c) append(own, drawn[w * kCalls + c], 4 * c);
        bits[kWords - kTogether + w] = kRowsAreKeys ? exchange_bytes(own, odd) : exchange_bits(own, odd);
      }
    }
  }

 private:
  template <bool kRowsAreKeys, int kCalls>
  __device__ void call(uint32_t row_block, const uint32_t (&column_blocks)[kCalls], uint32_t (&words)[kCalls][4]) const {
    uint2 keys = ptx::load_shared_8(shared_);
    const uint2 high = ptx::load_shared_8(shared_ + 8);
    uint64_t counters[kCalls][4];
#pragma unroll
    for (int c = 0; c < kCalls; ++c) {
      counters[c][0] = kRowsAreKeys ? row_block : column_blocks[c];
      counters[c][1] = kRowsAreKeys ? column_blocks[c] : row_block;
      counters[c][2] = high.x;
      counters[c][3] = high.y;
    }
#pragma unroll
    for (int round = 0; round < kPhiloxRounds; ++round) {
      for (auto& counter : counters) philox_round(counter, uint64_t(keys.x), uint64_t(keys.y), PhiloxProduct());
      keys.x += kPhiloxStep0;
      keys.y += kPhiloxStep1;
    }
#pragma unroll
    for (int i = 0; i < 4 * kCalls; ++i) words[i / 4][i % 4] = uint32_t(counters[i / 4][i % 4]);
  }

  // The decisions of a call join `bits`, those of word i at bit 7 - i - shift of each byte.
  __device__ void append(uint32_t& bits, const uint32_t (&words)[4], int shift) const {
    uint32_t tie = words[0] ^ words[1] ^ words[2] ^ words[3];
    tie ^= tie << 16;
    tie ^= tie << 8;  // the tie byte is the upper one; the others do not matter beside those of r, which are 0
    const uint32_t bytes = dropout_bytes(kept_), taken_off = dropout_taken_off(bytes, tie < kept_ << 24);
    constexpr uint8_t kKeeps = uint8_t(dropout_keeps(ptx::kBitwiseA, ptx::kBitwiseB, ptx::kBitwiseC));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t signs = ptx::bitwise<kKeeps>(words[i], bytes, (words[i] | kDropoutSigns) - taken_off);
      bits |= signs >> (i + shift) & kDropoutSigns >> (i + shift);
    }
  }

  // Rows are queries: words of a call are queries, even ones in the upper bit of each two. The decisions of even groups go
  // there, those of odd groups below.
  __device__ static uint32_t exchange_bits(uint32_t own, bool odd) {
    constexpr uint32_t kUpper = 0xaaaaaaaau;
    const int left = odd ? 31 : 1;  // the other lane's, where it wants them
    const uint32_t received = __shfl_xor_sync(0xffffffffu, own << left | own >> (32 - left), 4);
    const uint32_t mine = odd ? ~kUpper : kUpper;
    return (own & mine) | (received & ~mine);
  }
  // Rows are keys: bytes of a call are keys. The decisions of even groups go to bytes 0 and 2, those of odd groups to 1 and 3.
  __device__ static uint32_t exchange_bytes(uint32_t own, bool odd) {
    return ptx::select_bytes(own, __shfl_xor_sync(0xffffffffu, own, 4), odd ? 0x3715 : 0x6240);
  }

  uint32_t shared_, kept_;
};

// Where accumulator i % 32 has its bit: of a lane's 8 in 16 columns, i % 2 and i / 4 tell the column, i / 2 % 2 the row.
template <bool kRowsAreKeys>
__device__ constexpr int dropout_place(int i) {
  const int column = i % 2 + i / 4 % 2 * 2, row = i / 2 % 2, odd_group = i / 8 % 2, call = i / 16 % 2;
  return kRowsAreKeys ? 8 * (2 * row + odd_group) + 7 - column - 4 * call : 8 * column + 7 - 2 * row - odd_group - 4 * call;
}
template <bool kRowsAreKeys>
__device__ inline bool is_kept(const uint32_t* bits, int i) {
  return bits[i / 32] >> dropout_place<kRowsAreKeys>(i) & 1;
}

// Rows are queries: of a packed pair of weights, accumulators i and i + 1, those that are dropped become 0. Their bits are in
// neighbouring bytes, which are brought to be signs, and these to be the halves of a mask: half as many instructions as one by
// one.
__device__ inline uint32_t keep_pair(const uint32_t* bits, int i, uint32_t pair) {
  const int place = dropout_place<false>(i);
  const uint32_t signs = bits[i / 32] << (7 - place % 8);
  return pair & ptx::select_bytes(signs, signs, 0x9988 + place / 8 * 0x1111);
}

}  // namespace flashsdpa
