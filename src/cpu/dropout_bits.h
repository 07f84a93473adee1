// Dropout's decisions (../dropout.h) for a tile, as bits: one word for each key, one bit for each query.
#pragma once

#include "../dropout.h"
#include "masking.h"

namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE {

// Philox in lanes of 64 bits: a product's halves are the next round's operands where they lie, without a shuffle.
typedef uint64_t Words __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Halves __attribute__((vector_size(kVectorBytes)));
constexpr int kWordLanes = kVectorBytes / 8;

struct WideProduct {
  uint64_t operator()(uint64_t a, uint32_t m) const { return uint64_t(uint32_t(a)) * m; }
  Words operator()(Words a, uint32_t m) const {
#if defined(__AVX512F__)
    return (Words)_mm512_maskz_mul_epu32(__mmask8(-1), (__m512i)a, _mm512_set1_epi64(m));  // the plain one makes g++ 12 warn
#elif defined(__AVX2__)
    return (Words)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(m));
#elif defined(__SSE2__)
    return (Words)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(m));
#else
    return (a & 0xffffffffu) * m;
#endif
  }
};

// The random bits of one (batch, query head).
class DropoutStream {
 public:
  DropoutStream() = default;
  DropoutStream(const Dropout& dropout, int64_t batch, int64_t head) : kept_(uint16_t(dropout.kept)) {
    const uint64_t seed = uint64_t(*dropout.seed), offset = uint64_t(*dropout.offset);
    uint64_t words[4] = {offset, offset >> 32, uint64_t(batch), uint64_t(head)};
    philox4x32(words, seed, seed >> 32, WideProduct());
    for (int i = 0; i < 4; ++i) words_[i] = uint32_t(words[i]);
  }

  // Bit r of of_key[j]: whether the score of query first_query + r and key first_key + j is kept, for `rows` queries and
  // `keys` keys; both begin with a multiple of 16. All 64 words are written.
  void find(int64_t first_query, int rows, int64_t first_key, int keys, uint64_t* of_key) const {
    std::fill_n(of_key, kTile, 0);
    for (int r = 0; r < rows; r += 16)
      for (int j = 0; j < keys; j += 16)
        for (int pair : {0, 4}) add_pair(first_query + r, first_key + j + pair, r, of_key + j + pair);
  }

 private:
  // The decisions for 16 queries and the 8 keys of two blocks, at bits r, ... of of_key[0, 1, 2, 3, 8, 9, 10, 11].
  void add_pair(int64_t query, int64_t key, int r, uint64_t* of_key) const {
    Words found[4] = {};  // in lane i: 16 bits of each half of the first block's word, then of the second's
    for (int lane = 0; lane < 8; lane += kWordLanes) {
      Words queries, bit;
      for (int i = 0; i < kWordLanes; ++i) {
        queries[i] = uint64_t(lane + i);
        bit[i] = (uint64_t(1) << 56 | uint64_t(1) << 32 | uint64_t(1) << 24 | 1) << (lane + i);
      }
      queries += uint64_t(dropout_query_block(query));
      Words first[4], second[4];
      decide(dropout_key_block(key), queries, first);
      decide(dropout_key_block(key + 2), queries, second);
      for (int word = 0; word < 4; ++word) {
        const Words both = (first[word] & 0xffffffffu) | second[word] << 32;
        found[word] |= (Words)((Halves)both < kept_) & bit;
      }
    }
    for (int word = 0; word < 4; ++word) {
      uint64_t bits = 0;
      for (int i = 0; i < kWordLanes; ++i) bits |= found[word][i];
      bits |= bits >> 16;
      uint64_t* at = of_key + (word & 1) + (word >> 1) * 8;
      at[0] |= (bits & 0xffff) << r;
      at[2] |= (bits >> 32 & 0xffff) << r;
    }
  }
  void decide(uint32_t key_block, Words query_block, Words (&words)[4]) const {
    const Words zero{};
    words[0] = zero + key_block;
    words[1] = query_block;
    words[2] = zero + words_[2];
    words[3] = zero + words_[3];
    philox4x32(words, zero + words_[0], zero + words_[1], WideProduct());
  }

  uint64_t words_[4];
  uint16_t kept_;
};

}  // namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE
