// Dropout's decisions (../../dropout.h) for a block of scores in the accumulator layout of wgmma (see fwd_softmax.cuh), for both
// arrangements: bit i % 32 of word i / 32 is set where the lane's accumulator i is kept. To be drawn while products run.
#pragma once

#include "../../dropout.h"
#include "../../ptx/arithmetic.cuh"
#include "../../ptx/warpgroup.cuh"
#include "score_terms.h"

namespace flashsdpa {

struct PhiloxProduct {
  __device__ uint64_t operator()(uint64_t a, uint32_t m) const { return ptx::multiply_wide(uint32_t(a), m); }
};

// The random bits of one (batch, query head). The keys of the ten rounds and the two words of the counter that all calls share lie
// in a warp's lanes, one in each, for there are no registers for them: a block of scores reads them anew.
class DropoutStream {
 public:
  DropoutStream() = default;
  __device__ DropoutStream(const ScoreTerms& terms, int batch, int head, int lane) : kept_(terms.kept) {
    const uint64_t seed = __ldg(reinterpret_cast<const unsigned long long*>(terms.seed));
    const uint64_t offset = __ldg(reinterpret_cast<const unsigned long long*>(terms.offset));
    uint64_t words[4] = {offset, offset >> 32, uint64_t(batch), uint64_t(head)};
    philox4x32(words, seed, seed >> 32, PhiloxProduct());
    const uint32_t low = lane & 1 ? uint32_t(words[1]) : uint32_t(words[0]);
    const uint32_t high = lane & 1 ? uint32_t(words[3]) : uint32_t(words[2]);
    lane_word_ = lane < kShared ? low + lane / 2 * (lane & 1 ? kPhiloxStep1 : kPhiloxStep0) : high;
  }

  // Rows are queries, columns keys. The lane's first of each: `query` of a row whose bit 3 is 0, `key` of 2 * (lane % 4) in a block
  // that begins with a multiple of 16.
  template <int kWords>
  __device__ void draw_by_queries(int query, int key, uint32_t (&bits)[kWords]) const {
    const uint32_t query_block = dropout_query_block(query), key_block = dropout_key_block(key);
    const Schedule schedule(*this);
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      uint32_t kept = 0;
#pragma unroll
      for (int group = 3; group >= 0; --group) {  // of 16 keys: accumulators 8 * group and on, from the last on
        uint32_t drawn[4];
        schedule.draw(key_block + (4 * word + group) * 4, query_block, drawn);
#pragma unroll
        for (int i = 7; i >= 0; --i) append(kept, drawn[i / 4 * 2 + i % 2], i / 2 % 2);
      }
      bits[word] = kept;
    }
  }

  // Rows are keys, columns queries: `key` of a row whose bit 3 is 0, `query` of 2 * (lane % 4) in a block that begins with a
  // multiple of 16. Of 16 queries a lane has 4, with two keys, k and k + 8: half of what two calls decide. The other half is of the
  // lane with key k ^ 1. Each makes one of the two calls.
  template <int kWords>
  __device__ void draw_by_keys(int key, int query, uint32_t (&bits)[kWords]) const {
    const uint32_t odd = key & 1, key_block = dropout_key_block(key);
    const uint32_t query_block = dropout_query_block(query) + odd;
    const Schedule schedule(*this);
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      // Of each call 8 bits: the even key, the odd one, both 8 keys on; and the same 8 queries on.
      uint32_t own = 0;
#pragma unroll
      for (int group = 3; group >= 0; --group) {  // of 16 queries
        uint32_t drawn[4];
        schedule.draw(key_block, query_block + (4 * word + group) * 8, drawn);
#pragma unroll
        for (int i = 7; i >= 0; --i) append(own, drawn[i % 4], i / 4);
      }
      // Accumulator i of 8 is query 8 * (i / 4) + i % 2 and key 8 * (i / 2 % 2): every other bit of the call for the even queries
      // is of this lane's keys, which makes the even accumulators, and every other bit of the call for the odd queries.
      constexpr uint32_t kEveryOther = 0x55555555u;
      const uint32_t mine = own >> odd & kEveryOther, others = own >> (odd ^ 1) & kEveryOther;
      const uint32_t received = __shfl_xor_sync(0xffffffffu, others, 4);
      bits[word] = (odd ? received : mine) | (odd ? mine : received) << 1;
    }
  }

 private:
  static constexpr int kShared = 2 * kPhiloxRounds;  // the first lane with a word that calls share

  struct Schedule {
    uint32_t key[kPhiloxRounds][2], counter[2], kept;
    __device__ explicit Schedule(const DropoutStream& stream) : kept(stream.kept_) {
#pragma unroll
      for (int i = 0; i < kShared; ++i) key[i / 2][i % 2] = __shfl_sync(0xffffffffu, stream.lane_word_, i);
#pragma unroll
      for (int i = 0; i < 2; ++i) counter[i] = __shfl_sync(0xffffffffu, stream.lane_word_, kShared + i);
    }
    __device__ void draw(uint32_t key_block, uint32_t query_block, uint32_t (&words)[4]) const {
      uint64_t c[4] = {key_block, query_block, counter[0], counter[1]};
#pragma unroll
      for (const auto& k : key) philox_round(c, uint64_t(k[0]), uint64_t(k[1]), PhiloxProduct());
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = uint32_t(c[i]);
    }
  };

  // Shifts in, from below, whether the half of `word` is less than kept_: the sign of their difference, in two instructions.
  __device__ void append(uint32_t& bits, uint32_t word, int half) const {
    const uint32_t difference = (half ? word >> 16 : word & 0xffff) - kept_;
    bits = bits << 1 | difference >> 31;
  }

  uint32_t lane_word_, kept_;
};

__device__ inline bool is_kept(const uint32_t* bits, int i) { return bits[i / 32] >> i % 32 & 1; }

}  // namespace flashsdpa
