// Dropout's decisions (../../dropout.h) for a block of scores in the accumulator layout of wgmma (see fwd_softmax.cuh), for
// both arrangements: bit i % 32 of word i / 32 is set where the lane's accumulator i is kept.
// kGroups: of 8 accumulators, 16 columns, in a word; a block narrower than 64 columns has fewer than 4.
#pragma once

#include "../../dropout.h"
#include "../../ptx/arithmetic.cuh"
#include "../../ptx/warpgroup.cuh"
#include "score_terms.h"

namespace flashsdpa {

struct PhiloxProduct {
  __device__ uint64_t operator()(uint64_t a, uint32_t m) const { return ptx::multiply_wide(uint32_t(a), m); }
};

// Where a warp has what all calls of one (batch, query head) share, the keys of the first round and two words of the counter: in
// pairs, which are read anew for every two calls, for there are no registers for them.

struct StreamInLanes {  // one word in each
  uint32_t word;
  __device__ void lay(uint32_t its_word, int) { word = its_word; }
  __device__ uint2 pair(int i) const {
    return {__shfl_sync(0xffffffffu, word, 2 * i), __shfl_sync(0xffffffffu, word, 2 * i + 1)};
  }
};

struct StreamInShared {  // half as many instructions
  static constexpr int kWords = 4, kBytes = 4 * kWords;
  uint32_t shared;  // this warp's
  __device__ void lay(uint32_t its_word, int lane) {
    __syncwarp();  // all lanes have read what was there
    if (lane < kWords) ptx::store_shared_4(shared + 4 * lane, its_word);
    __syncwarp();
  }
  __device__ uint2 pair(int i) const { return ptx::load_shared_8(shared + 8 * i); }
};

// The random bits of one (batch, query head).
template <typename Place>
class DropoutStreamIn {
 public:
  DropoutStreamIn() = default;
  __device__ DropoutStreamIn(const ScoreTerms& terms, int batch, int head, int lane, Place place = {})
      : place_(place), kept_(terms.kept) {
    const uint64_t seed = __ldg(reinterpret_cast<const unsigned long long*>(terms.seed));
    const uint64_t offset = __ldg(reinterpret_cast<const unsigned long long*>(terms.offset));
    uint64_t words[4] = {offset, offset >> 32, uint64_t(batch), uint64_t(head)};
    philox4x32(words, seed, seed >> 32, PhiloxProduct());
    const uint32_t keys = lane & 1 ? uint32_t(words[1]) : uint32_t(words[0]);
    const uint32_t counter = lane & 1 ? uint32_t(words[3]) : uint32_t(words[2]);
    place_.lay(lane < 2 ? keys : counter, lane);
  }

  // Rows are queries, columns keys. The lane's first of each: `query` of a row whose bit 3 is 0, `key` of 2 * (lane % 4) in a
  // block that begins with a multiple of 16. kCalls of Philox go side by side: the more, the less one waits for another.
  template <int kGroups = 4, int kCalls = 2, int kWords>
  __device__ void draw_by_queries(int query, int key, uint32_t (&bits)[kWords]) const {
    const uint32_t query_block = dropout_query_block(query), key_block = dropout_key_block(key);
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      uint32_t kept = 0;
#pragma unroll 1
      for (int group = kGroups - kCalls; group >= 0; group -= kCalls) {  // of 16 keys: accumulators 8 * group and on, from the last on
        uint32_t key_blocks[kCalls], query_blocks[kCalls], drawn[kCalls][4];
#pragma unroll
        for (int c = 0; c < kCalls; ++c) {
          key_blocks[c] = key_block + (4 * word + group + c) * 4;
          query_blocks[c] = query_block;
        }
        draw(key_blocks, query_blocks, drawn);
#pragma unroll
        for (int c = kCalls - 2; c >= 0; c -= 2) {
          uint32_t pair = 0;  // a chain of its own
#pragma unroll
          for (int i = 15; i >= 0; --i) append(pair, drawn[c + i / 8][i / 4 % 2 * 2 + i % 2], i / 2 % 2);
          kept = kept << 16 | pair;
        }
      }
      bits[word] = kept;
    }
  }

  // Rows are keys, columns queries: `key` of a row whose bit 3 is 0, `query` of 2 * (lane % 4) in a block that begins with a
  // multiple of 16. Of 16 queries a lane has 4, with two keys, k and k + 8: half of what two calls decide. The other half is of
  // the lane with key k ^ 1. Each makes one of the two calls.
  template <int kGroups = 4, int kWords>
  __device__ void draw_by_keys(int key, int query, uint32_t (&bits)[kWords]) const {
    const uint32_t odd = key & 1, key_block = dropout_key_block(key);
    const uint32_t query_block = dropout_query_block(query) + odd;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      // Of each call 8 bits: the even key, the odd one, both 8 keys on; and the same 8 queries on.
      uint32_t own = 0;
#pragma unroll 1
      for (int group = kGroups - 2; group >= 0; group -= 2) {  // of 16 queries
        const uint32_t key_blocks[2] = {key_block, key_block};
        const uint32_t query_blocks[2] = {query_block + (4 * word + group) * 8, query_block + (4 * word + group + 1) * 8};
        uint32_t drawn[2][4];
        draw(key_blocks, query_blocks, drawn);
#pragma unroll
        for (int i = 15; i >= 0; --i) append(own, drawn[i / 8][i % 4], i / 4 % 2);
      }
      // Accumulator i of 8 is query 8 * (i / 4) + i % 2 and key 8 * (i / 2 % 2): every other bit of the call for the even
      // queries is of this lane's keys, which makes the even accumulators, and every other bit of the call for the odd queries.
      constexpr uint32_t kEveryOther = 0x55555555u;
      const uint32_t mine = own >> odd & kEveryOther, others = own >> (odd ^ 1) & kEveryOther;
      const uint32_t received = __shfl_xor_sync(0xffffffffu, others, 4);
      bits[word] = (odd ? received : mine) | (odd ? mine : received) << 1;
    }
  }

 private:
  template <int kCalls>
  __device__ void draw(const uint32_t (&key_blocks)[kCalls], const uint32_t (&query_blocks)[kCalls],
                       uint32_t (&words)[kCalls][4]) const {
    uint2 keys = place_.pair(0);
    const uint2 high = place_.pair(1);
    uint64_t counters[kCalls][4];
#pragma unroll
    for (int c = 0; c < kCalls; ++c) {
      const uint64_t counter[4] = {key_blocks[c], query_blocks[c], high.x, high.y};
#pragma unroll
      for (int i = 0; i < 4; ++i) counters[c][i] = counter[i];
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

  // Shifts in, from below, whether the half of `word` is less than kept_: the sign of their difference, in two instructions.
  __device__ void append(uint32_t& bits, uint32_t word, int half) const {
    const uint32_t difference = half ? (word >> 16) - kept_ : ptx::add_low_half(word, -kept_);
    bits = bits << 1 | difference >> 31;
  }

  Place place_;
  uint32_t kept_;
};

using DropoutStream = DropoutStreamIn<StreamInLanes>;

__device__ inline bool is_kept(const uint32_t* bits, int i) { return bits[i / 32] >> i % 32 & 1; }

}  // namespace flashsdpa
