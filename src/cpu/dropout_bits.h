// Dropout's decisions (../dropout.h) for a tile, as bits: one word for each key, one bit for each query.
#pragma once

#include "../dropout.h"
#include "masking.h"

namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE {

// Philox in lanes of 64 bits: a product's halves are the next round's operands where they lie, without a shuffle.
typedef uint64_t Words __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Calls __attribute__((vector_size(kVectorBytes)));  // words of two calls in a lane
typedef int32_t SignedCalls __attribute__((vector_size(kVectorBytes)));
typedef int8_t SignedBytes __attribute__((vector_size(kVectorBytes)));
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
  DropoutStream(const Dropout& dropout, int64_t batch, int64_t head) : kept_(dropout.kept) {
    const uint64_t seed = uint64_t(*dropout.seed), offset = uint64_t(*dropout.offset);
    uint64_t words[4] = {offset, offset >> 32, uint64_t(batch), uint64_t(head)};
    philox4x32(words, seed, seed >> 32, WideProduct());
    for (int i = 0; i < 4; ++i) words_[i] = uint32_t(words[i]);
  }

  // Bit r of of_key[j]: whether the score of query first_query + r and key first_key + j is kept, for `rows` queries and
  // `keys` keys; both begin with a multiple of 16. All 64 words are written.
  void find(int64_t first_query, int rows, int64_t first_key, int keys, uint64_t* of_key) const {
    std::fill_n(of_key, kTile, 0);
    for (int j = 0; j < keys; j += 8 * kWordLanes) {
      Words of_eight[8] = {};  // queries 8 i to 8 i + 7: a byte for each of a lane's 8 keys, and in it a bit for each query
      for (int r = 0; r < rows; r += 16) draw_16(first_query + r, std::min(rows - r, 8), first_key + j, &of_eight[r / 8]);
      transpose_bytes(of_eight);
      for (int lane = 0; lane < kWordLanes; ++lane)
        for (int i = 0; i < 8; ++i)
          of_key[j + lane / 2 * 16 + lane % 2 * 4 + i / 4 * 2 + i / 2 % 2 * 8 + i % 2] = of_eight[i][lane];
    }
  }

 private:
  // The decisions for queries 0 to rows - 1 and as many from 8 on, in of_eight[0] and [1], and for 8 keys a lane: those of two
  // calls, blocks 2 i and 2 i + 1 of the keys from `key` on in lane i.
  void draw_16(int64_t query, int rows, int64_t key, Words* of_eight) const {
    Words key_blocks;
    for (int lane = 0; lane < kWordLanes; ++lane) key_blocks[lane] = dropout_block(key) + uint64_t(2 * lane);
    Words found[2] = {};
    for (int i = 0; 2 * i < rows; ++i) {
      const Words zero{}, query_blocks = zero + (dropout_block(query) + uint64_t(i));
      Words first[4], both[4];
      draw(key_blocks, query_blocks, first);
      draw(key_blocks + 1, query_blocks, both);
      for (int word = 0; word < 4; ++word) both[word] = (first[word] & 0xffffffffu) | both[word] << 32;
      const Words taken_off = taken_off_of(both);
      for (int word = 0; word < 4; ++word) {
        const Words bit = zero + (0x0101010101010101u << (2 * i + word % 2));
        found[word / 2] |= kept(both[word], taken_off) & bit;
      }
    }
    of_eight[0] = found[0];
    of_eight[1] = found[1];
  }
  // In each lane, byte i of rows[j] and byte j of rows[i] change places.
  static void transpose_bytes(Words (&rows)[8]) {
    constexpr uint64_t kLower[3] = {0x00ff00ff00ff00ffu, 0x0000ffff0000ffffu, 0x00000000ffffffffu};
    for (int step = 0; step < 3; ++step) {
      for (int i = 0; i < 8; ++i) {
        const int bits = 8 << step, other = i | 1 << step;
        if (other == i) continue;
        const Words changed = (rows[i] >> bits ^ rows[other]) & kLower[step];
        rows[other] ^= changed;
        rows[i] ^= changed << bits;
      }
    }
  }
  void draw(Words key_block, Words query_block, Words (&words)[4]) const {
    const Words zero{};
    words[0] = key_block;
    words[1] = query_block;
    words[2] = zero + words_[2];
    words[3] = zero + words_[3];
    philox4x32(words, zero + words_[0], zero + words_[1], WideProduct());
  }
  Words taken_off_of(const Words (&both)[4]) const {
    Calls tie = Calls(both[0] ^ both[1] ^ both[2] ^ both[3]);
    tie ^= tie >> 16;
    tie = (tie ^ tie >> 8) & 0xff;
    const Calls keeps = Calls(SignedCalls(tie) < int32_t(kept_ & 0xff));
    return Words((keeps & dropout_taken_off(0, true)) + dropout_taken_off(dropout_bytes(kept_), false));
  }
  // All bits of the bytes whose scores are kept.
  Words kept(Words both, Words taken_off) const {
    const Calls word = Calls(both), no_borrow = (word | kDropoutSigns) - Calls(taken_off);
    return Words(SignedBytes(dropout_keeps(word, Calls{} + dropout_bytes(kept_), no_borrow)) < 0);
  }

  uint64_t words_[4];
  uint32_t kept_;
};

}  // namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE
